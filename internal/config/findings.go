// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"slices"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// Finding is about a setting that is legal but unwise. Unlike a warning, it can be intended: an
// operator then allows its rule.
type Finding struct {
	*fieldpath.Error        // Problem has the reason and the cure
	Rule             string // as in docs/reference/configuration.md
}

// rule looks for one kind of findings in the desired state of a balancer or an agent.
type rule[T any] struct {
	name string
	find func(*inspection, *T)
}

// inspection collects the findings of a file.
type inspection struct {
	*document
	host     Host
	file     string // path of the file
	rule     string // the rule that is looking
	findings []Finding
	invalid  []desired.InvalidOverride // of the file
}

// findf adds a finding about a field. The format gives the reason, and the cure after a semicolon.
func (i *inspection) findf(path, format string, args ...any) {
	d := document{fields: i.fields}
	d.warnf(path, format, args...)
	i.findings = append(i.findings, Finding{d.warnings.In(i.file)[0], i.rule})
}

// Rules returns the names of all rules, sorted.
func Rules() []string {
	var names []string
	for _, r := range balancerRules {
		names = append(names, r.name)
	}
	for _, r := range agentRules {
		names = append(names, r.name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// InspectBalancer looks for findings in a balancer's file and on the host. The result is sorted by
// lines. The error is that of ParseBalancer.
func InspectBalancer(path string, data []byte, host Host) ([]Finding, error) {
	b, d := readBalancer(data)
	return inspect(&inspection{
		document: d, host: host, file: path, invalid: invalidOf(data, ParseBalancerFiles),
	}, b, balancerRules)
}

// InspectAgent is InspectBalancer for an agent's file.
func InspectAgent(path string, data []byte, host Host) ([]Finding, error) {
	a, d := readAgent(data)
	return inspect(&inspection{
		document: d, host: host, file: path, invalid: invalidOf(data, ParseAgentFiles),
	}, a, agentRules)
}

// invalidOf returns the overrides that a start with a file leaves out. There are none if the file is
// invalid.
func invalidOf[D State[D]](
	data []byte, parse func([]byte) (*Files[D], fieldpath.Errors, error),
) []desired.InvalidOverride {
	files, _, err := parse(data)
	if err != nil {
		return nil
	}
	return files.Invalid
}

func inspect[T any](i *inspection, desired *T, rules []rule[T]) ([]Finding, error) {
	if len(i.problems) > 0 {
		return nil, i.problems.OrNil()
	}
	for _, r := range rules {
		i.rule = r.name
		r.find(i, desired)
	}
	slices.SortStableFunc(i.findings, func(a, b Finding) int { return cmp.Compare(a.Line, b.Line) })
	return i.findings, nil
}

// trustedInterface finds an interface whose trust the file does not state. By default every packet
// that arrives there counts as one of the segment routing domain.
func (i *inspection) trustedInterface(srv6 bool, inside string) {
	const path = "node.internal"
	if !srv6 || inside != "" || i.has(path) {
		return
	}
	i.findf(path, "missing: by default, packets to SIDs from any host are trusted; write internal: true if "+
		"routers at the edge drop packets from outside to the locators")
}

// listensEverywhere finds an address that is reachable through all interfaces.
func (i *inspection) listensEverywhere(path, listen, harm, cure string) {
	if listen != "" && isUnspecified(listen) {
		i.findf(path, "listens on all addresses: %s; %s", harm, cure)
	}
}

// metricsEverywhere is listensEverywhere for metrics.
func (i *inspection) metricsEverywhere(m desired.Metrics) {
	i.listensEverywhere("metrics.listen", m.Listen, "any host that reaches this one, also at a VIP, can read "+
		"names, addresses and loads", "use a loopback address, or one of the management network")
}
