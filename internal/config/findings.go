// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// Finding is about a setting that is valid but unwise. Operators who intend the setting can allow
// the rule of the finding.
type Finding struct {
	*fieldpath.Error        // Problem has the reason and the cure
	Rule             string // the name of the rule, as in docs/reference/configuration.md
}

// rule finds one kind of unwise settings in the desired state of a balancer or an agent.
type rule[T any] struct {
	name string
	find func(*inspection, *T)
}

// inspection collects the findings of a file.
type inspection struct {
	*document
	host     Host
	file     string // the path of the file
	rule     string // the name of the present rule
	findings []Finding
	invalid  []desired.InvalidOverride // the overrides that a start with the file would leave out
}

// findf adds a finding of the present rule about a field. The text has the reason, and the cure
// after a semicolon.
func (i *inspection) findf(path, format string, args ...any) {
	found := fieldpath.Errors{i.at(path, fmt.Sprintf(format, args...))}.In(i.file)
	i.findings = append(i.findings, Finding{found[0], i.rule})
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

// InspectAgent looks for findings in an agent's file and on the host, as InspectBalancer does.
func InspectAgent(path string, data []byte, host Host) ([]Finding, error) {
	a, d := readAgent(data)
	return inspect(&inspection{
		document: d, host: host, file: path, invalid: invalidOf(data, ParseAgentFiles),
	}, a, agentRules)
}

// invalidOf returns the overrides that are invalid, and so have no effect, with a configuration
// file of this content. If the content itself is invalid, it returns nothing.
func invalidOf[D State[D]](
	data []byte, parse func([]byte) (*Files[D], fieldpath.Errors, error),
) []desired.InvalidOverride {
	files, _, err := parse(data)
	if err != nil {
		return nil
	}
	return files.Invalid
}

// inspect applies rules to a desired state, and returns the findings in the order of their lines.
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

// trustedInterface finds a file without node.internal. By default, the interface is inside the
// segment routing domain, and all packets that arrive there are trusted. usesSRv6 tells whether the
// node takes packets of SRv6. inside is node.inside: with it, a balancer needs no node.internal.
func (i *inspection) trustedInterface(usesSRv6 bool, inside string) {
	const path = "node.internal"
	if !usesSRv6 || inside != "" || i.has(path) {
		return
	}
	i.findf(path, "missing: by default, packets to SIDs from any host are trusted; write internal: true if "+
		"routers at the edge drop packets from outside to the locators")
}

// listensEverywhere finds a field with a TCP or UDP address that is reachable through all
// interfaces.
func (i *inspection) listensEverywhere(path, listen, harm, cure string) {
	if listen != "" && isUnspecified(listen) {
		i.findf(path, "listens on all addresses: %s; %s", harm, cure)
	}
}

// metricsEverywhere finds metrics that are reachable through all interfaces.
func (i *inspection) metricsEverywhere(m desired.Metrics) {
	i.listensEverywhere("metrics.listen", m.Listen, "any host that reaches this one, also at a VIP, can read "+
		"names, addresses and loads", "use a loopback address, or one of the management network")
}
