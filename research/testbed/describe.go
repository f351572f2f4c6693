// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/segue-lb/segue/internal/desired"
)

// Describe says for readers how requests of the case come to servers.
func (c Case) Describe() string {
	if c.Direct {
		return "clients send requests to random servers, without a balancer"
	}
	if c.hasProxy() {
		return c.proxyInWords()
	}
	parts := []string{c.placement()}
	if c.Placement == desired.PlacementHunt {
		parts = append(parts, c.acceptance())
	}
	if c.Infer != nil && c.Infer.Estimator != "" {
		parts = append(parts, fmt.Sprintf("estimator %s", c.Infer.Estimator))
	}
	if c.Infer != nil && c.Infer.Among != "" {
		parts = append(parts, fmt.Sprintf("among %s", c.Infer.Among))
	}
	if c.Persistence != "" {
		parts = append(parts, fmt.Sprintf("persistence %s", c.Persistence))
	}
	if c.Weighted {
		parts = append(parts, "weights in proportion to the servers' capacities")
	}
	if c.Weights != nil {
		parts = append(parts, fmt.Sprintf("weights %d", c.Weights))
	}
	if c.Feedback > 0 {
		parts = append(parts, fmt.Sprintf("weights that follow the servers' loads every %v", c.Feedback))
	}
	if c.Packets != "" {
		parts = append(parts, fmt.Sprintf("packets %s", c.Packets))
	}
	return strings.Join(parts, "; ")
}

// proxyInWords describes a proxy in place of the balancers.
func (c Case) proxyInWords() string {
	text := fmt.Sprintf("%s as a proxy, by %s of its own connections", c.Proxy.Program, c.Proxy.Algorithm)
	if c.Proxy.Maxconn > 0 {
		text += fmt.Sprintf("; at most %d to a server at a time, and other requests wait in the proxy",
			c.Proxy.Maxconn)
	}
	return text
}

// inPapers are the names that the papers have for placements.
var inPapers = map[desired.Placement]string{
	desired.PlacementHash:       "SC, single choice: ",
	desired.PlacementLeastQueue: "LSQ, local shortest queue: ",
	desired.PlacementSED:        "SED, shortest expected delay: ",
	desired.PlacementAWCMP:      "AWCMP, active weighted-cost multipath: ",
	desired.PlacementGSQ2:       "GSQ2, global shortest queue, of two servers: ",
}

// placement describes the placement, with the candidates of a hunt.
func (c Case) placement() string {
	if c.Placement != desired.PlacementHunt {
		return inPapers[c.Placement] + strings.ReplaceAll(c.Placement.Method().Summary, "`", "")
	}
	n := cmp.Or(c.Candidates, c.Selection.DefaultCandidates())
	switch c.Selection {
	case desired.SelectReports:
		return fmt.Sprintf("a connection is offered to those of %d candidates that reported the lowest loads", n)
	case desired.SelectSpare:
		return fmt.Sprintf("a connection is offered to those of %d candidates that reported the lowest loads, "+
			"and to a server that reported free capacity", n)
	case desired.SelectRandom:
		return fmt.Sprintf("a connection is offered to %d random servers in turn", n)
	}
	return fmt.Sprintf("a connection is offered to its %d candidates in turn", n)
}

// acceptance describes the accept policy of a hunt.
func (c Case) acceptance() string {
	switch policy := cmp.Or(c.Accept.Policy, desired.DefaultAcceptPolicy); {
	case policy == desired.AcceptStatic && c.Accept.Threshold != nil:
		return fmt.Sprintf("a server accepts it while its load is below %d (SR%[1]d)", *c.Accept.Threshold)
	case policy == desired.AcceptDynamic:
		return "a server accepts it while its load is below a threshold, which it adapts (SRdyn)"
	case policy == desired.AcceptLeast:
		return "the one with the lowest load accepts it"
	default:
		return fmt.Sprintf("a server accepts it: %s", policy)
	}
}
