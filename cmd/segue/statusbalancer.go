// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/wording"
)

// printBalancer prints the status of a balancer: the instance, announcements, the services and the reasons of
// packets.
func printBalancer(out io.Writer, s *balancerStatus) error {
	printHeader(out, &s.Snapshot.Snapshot, isAttached(s.Attachment) || isAttached(s.Inside))
	printConfiguration(out, s.Configuration)
	printUnchecked(out, s.Configuration, s.Time)
	printUnsaved(out, s.Configuration)
	if s.Inside != nil {
		fmt.Fprintf(out, "inside: %s\n", describeAttachment(s.Inside))
	}
	printHiddenTags(out, s.Attachment, s.Inside)
	fmt.Fprintf(out, "flows: %s\n", describeFlows(&s.FlowTable))
	if s.Hints != nil {
		fmt.Fprintf(out, "hints: %s\n", describeHints(s.Hints))
	}
	for _, vip := range s.RemovedVIPs {
		fmt.Fprintf(out, "removed VIP: %s, its last service was removed %s ago, %s dropped since\n",
			vip.VIP, wholeSeconds(vip.Age), wording.Count(int(vip.Packets), "packet"))
	}
	if err := errors.Join(printBGP(out, s.BGP, s.Time), printL2(out, s.L2, s.Time), printSwitch(out, s)); err != nil {
		return err
	}
	for _, service := range s.Services {
		if err := printService(out, service); err != nil {
			return err
		}
	}
	return printReasons(out, "reason", s.Reasons)
}

// describeHints tells how full the hint table is.
func describeHints(h *dataplane.HintCounts) string {
	if h.Capacity == 0 {
		return "none (node.limits.hints is 0)"
	}
	all := h.Idle + h.Recent + h.Shared
	return fmt.Sprintf("%d of %d (%.1f%%): %d recent, %d idle, %d shared",
		all, h.Capacity, 100*float64(all)/float64(h.Capacity), h.Recent, h.Idle, h.Shared)
}

// describeFlows tells how full the flow table is, and how old the numbers are.
func describeFlows(t *inspect.FlowTable) string {
	if t.Age == nil {
		return fmt.Sprintf("- of %d, not counted yet", t.Capacity)
	}
	all := t.Flows.Total()
	return fmt.Sprintf(
		"%d of %d (%s): %d new, %d established, %d silent, %d closing; %d half-open; counted %s ago",
		all, t.Capacity, percent(float64(all)/float64(t.Capacity)),
		t.Flows.New, t.Flows.Established, t.Flows.Silent, t.Flows.Closing, *t.HalfOpen, wholeSeconds(*t.Age))
}

// describeBuckets tells how many buckets a service has, by which hash if it is not the default, and
// by which part of a flow if there is an affinity.
func describeBuckets(s *inspect.ServiceState) string {
	text := wording.Count(int(s.Buckets), "bucket")
	if s.BucketHash == desired.BucketHashCRC32 {
		text += " by " + string(s.BucketHash)
	}
	if a := s.Affinity; a != nil {
		text += fmt.Sprintf(" of clients /%d", a.Prefix)
		if a.Shared {
			text += " at the VIP"
		}
	}
	return text
}

// printService prints a service: a line about it, warnings, and a table of its servers. The columns
// depend on the placement.
func printService(out io.Writer, s *inspect.ServiceState) error {
	fmt.Fprintf(out, "\nservice %s: %s %s, %s, placement %s, persistence %s, %s, %s, %s%s\n",
		s.Name, s.Protocol, endpoint(s), s.Encapsulation, describePlacement(s), s.Persistence,
		describeBuckets(s), wording.Count(int(s.Candidates), "candidate"),
		describeGeneration(s), describeProbing(s))
	if len(s.Sources) > 0 {
		fmt.Fprintf(out, "  only for clients in %s\n", joined(s.Sources, netip.Prefix{}))
	}
	printForms(out, s.QUIC, s.FormerQUIC)
	printWarnings(out, s)
	header := []string{"server", "address", "condition", "share", "next hop",
		"new", "established", "silent", "closing", "packets/s", "bits/s", "new flows/s"}
	if s.Placement.Method().ServersDecide {
		header = append(header, "half-open", "offered", "created", "removed", "resets")
	}
	if s.Inference != nil {
		header = append(header, "flows now", estimateName(s), "delay", "slower", "placed", "answered")
		if polls(s) {
			header = append(header, "polled load")
		}
	}
	if ordersByReports(s) {
		header = append(header, "reported load")
	}
	table := newTable(out)
	table.row(header...)
	for _, server := range s.Servers {
		packets, bits := "-", "-"
		if server.Rate != nil {
			packets, bits = short(server.Rate.Packets), short(server.Rate.Bits)
		}
		newFlows := "-"
		if server.PlacedRate != nil {
			newFlows = short(*server.PlacedRate)
		}
		row := []string{server.Name, server.Address, describeCondition(server), describeShare(s, server),
			describeHop(server.NextHop)}
		row = append(row, describeStates(server.Flows)...)
		row = append(row, packets, bits, newFlows)
		if h := server.Hunt; h != nil {
			halfOpen := "-"
			if h.HalfOpen != nil {
				halfOpen = strconv.FormatUint(*h.HalfOpen, 10)
			}
			row = append(row, halfOpen)
			row = append(row, numbers(h.Offered, h.Created, h.Removed, h.Resets)...)
			if h.Reports != nil {
				row = append(row, describeReport(h.Reports))
			}
		}
		if i := server.Inferred; i != nil {
			row = append(row, describeInferred(i)...)
			if polls(s) {
				row = append(row, describePolled(i.Estimate))
			}
		}
		table.row(row...)
	}
	return table.Flush()
}

// describeCondition returns the condition of a server with all causes and their reasons, such as
// "failing: connection refused; refusing". If the server gets new flows nevertheless, "(ignored)"
// follows.
func describeCondition(s *inspect.ServerState) string {
	var texts []string
	if !slices.Contains(s.Causes, s.Condition) { // otherwise it comes with its reason below
		texts = append(texts, string(s.Condition))
	}
	for _, cause := range s.Causes {
		text := string(cause)
		if reason := s.Reasons[cause]; reason != "" {
			text += ": " + brief(reason)
		}
		texts = append(texts, text)
	}
	described := strings.Join(texts, "; ")
	if len(s.Causes) > 0 && s.TakesFlows {
		described += " (ignored)"
	}
	return described
}

// brief cuts a text that is too long for a column.
func brief(text string) string {
	const most = 60
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most-1]) + "…"
	}
	return text
}

// printForms prints the present and the former form of a service's QUIC connection IDs, if there
// are any.
func printForms(out io.Writer, present, former *desired.QUIC) {
	if present != nil {
		fmt.Fprintf(out, "quic: %s\n", present)
	}
	if former != nil {
		fmt.Fprintf(out, "former-quic: %s\n", former)
	}
}

// ordersByReports tells whether the balancer orders the service's candidates by the loads that they
// report.
func ordersByReports(s *inspect.ServiceState) bool {
	return s.Selection.OrdersByReports()
}

// describeReport returns the load that a server last reported, and when, such as "2.5, 40ms ago".
// If the report is too old to matter, "no weight" follows.
func describeReport(r *inspect.ReportState) string {
	if r.Age == nil {
		return "none"
	}
	age := time.Duration(*r.Age * float64(time.Second))
	ago := age.Round(time.Millisecond).String() + " ago"
	if age >= time.Second {
		ago = wholeSeconds(*r.Age) + " ago"
	}
	switch {
	case r.Load == nil:
		return "unknown, " + ago
	case age.Round(time.Second) >= weightless:
		return short(*r.Load) + ", " + ago + ", no weight"
	}
	return short(*r.Load) + ", " + ago
}

// describeStates returns the numbers of flows by state, or dashes if they are unknown.
func describeStates(flows *dataplane.FlowCounts) []string {
	if flows == nil {
		return []string{"-", "-", "-", "-"}
	}
	return numbers(flows.New, flows.Established, flows.Silent, flows.Closing)
}

// describeGeneration returns the number of a service's generation, and the number and the digest of
// the sets of servers in its candidate table.
func describeGeneration(s *inspect.ServiceState) string {
	return fmt.Sprintf("generation %d (%s, %s)", s.Generation, wording.Count(int(s.Sets), "set"), s.Digest)
}

// printWarnings prints the warnings about a service as a whole.
func printWarnings(out io.Writer, s *inspect.ServiceState) {
	switch {
	case s.Refuses:
		fmt.Fprintln(out, "ALL SERVERS HAVE FAILED: new flows are refused (all-failed: refuse)")
	case !s.TakesFlows:
		fmt.Fprintln(out, "NO SERVER FOR NEW FLOWS: there are no servers, or all are drained, and new flows are refused")
	}
	for _, cause := range s.Ignored {
		switch cause {
		case inspect.ServerUnresolved:
			fmt.Fprintln(out,
				"NO REACHABLE SERVER: all servers that are not drained lack a next hop, and packets are dropped")
		case inspect.ServerFailing:
			fmt.Fprintln(out, "HEALTH CHECKS ARE IGNORED: all reachable servers fail them (fail open)")
		case inspect.ServerUnreachable:
			fmt.Fprintln(out, "ALL SERVERS ARE UNREACHABLE: no next hop answers, "+
				"and new flows go there nevertheless (fail open)")
		default: // a cause that probes of the agents have found
			fmt.Fprintf(out, "TOO MANY SERVERS ARE %s: probes exclude at most a third of the servers, and none if all are unfit\n",
				strings.ToUpper(string(cause)))
		}
	}
}

// describeProbing returns a note if some servers have an agent that the balancer does not probe.
func describeProbing(s *inspect.ServiceState) string {
	if slices.ContainsFunc(s.Servers, func(server *inspect.ServerState) bool { return !server.Probed }) {
		return ", agents not probed"
	}
	return ""
}

// numbers formats numbers as the cells of a table.
func numbers(values ...uint64) []string {
	texts := make([]string, len(values))
	for i, value := range values {
		texts[i] = strconv.FormatUint(value, 10)
	}
	return texts
}

// describePlacement returns the placement of a service, with its selection or its estimator.
func describePlacement(s *inspect.ServiceState) string {
	if s.Inference != nil {
		return describeInference(s)
	}
	if s.Selection == "" {
		return string(s.Placement)
	}
	return fmt.Sprintf("%s %s", s.Placement, s.Selection)
}

func endpoint(s *inspect.ServiceState) string { return addressOf(s.VIP, s.VIPs, s.Port, s.Ports) }

// addressOf describes the VIPs and ports of a service. Both lists are empty unless there are several.
func addressOf(vip netip.Addr, vips []netip.Addr, port uint16, ports []uint16) string {
	switch {
	case len(vips) > 0 || len(ports) > 0:
		return fmt.Sprintf("%s %s", joined(vips, vip), describePorts(ports, port))
	case port == 0:
		return vip.String() + " all ports"
	}
	return netip.AddrPortFrom(vip, port).String()
}

func describePorts(ports []uint16, port uint16) string {
	switch {
	case len(ports) > 0:
		return "ports " + joined(ports, port)
	case port == 0:
		return "all ports"
	}
	return fmt.Sprintf("port %d", port)
}

// joined returns the items of a list, or if it is empty a single item, as one text.
func joined[T any](list []T, single T) string {
	if len(list) == 0 {
		return fmt.Sprint(single)
	}
	texts := make([]string, len(list))
	for i, item := range list {
		texts[i] = fmt.Sprint(item)
	}
	return strings.Join(texts, ",")
}

func describeHop(hop *inspect.NextHop) string {
	if hop == nil {
		return "UNRESOLVED"
	}
	return hop.MAC + " " + interfaceName(hop.Interface, hop.Ifindex)
}
