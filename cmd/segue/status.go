// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/internal/wording"
)

// statusOptions are the flags of status.
type statusOptions struct {
	instance string
	service  string // empty: all
	asJSON   bool
	watch    bool
	interval time.Duration
}

func newStatus() *cobra.Command {
	var o statusOptions
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show services, servers, flows and packet counters",
		Long: `Status reads the tables of the data path of a balancer or an agent. It works without
a running process. To measure rates, it reads the counters again after an interval. It
needs root.

With --watch, status shows the status again after each interval, until Ctrl-C. On a
terminal, it replaces the earlier status, and shows as much as fits into the window. If the
output is not a terminal, it prints one status after the other.

Without --instance, status shows the only instance on the host, or the only one in this
network namespace. If the host has several instances, and this network namespace does not
have exactly one of them, status lists all instances and their network namespaces. Then the
exit code is 1.

The process of a balancer sweeps the flow tables every five seconds, and counts the flows.
Status shows the numbers of the last sweep, and how long ago it was. It shows "-" for a
server that is newer than the last sweep.

For an interface in another network namespace, status shows the index, such as #7.

With --service it shows only that service. The other lines are those of the whole instance.

--json prints the fields that docs/reference/observability.md describes.`,
		Args: cli.NoArguments("the instance", "-i"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return status(cmd.Context(), cmd.OutOrStdout(), o)
		},
	}
	cmd.Flags().StringVarP(&o.instance, "instance", "i", "", "`name` of the balancer or agent")
	cmd.Flags().StringVar(&o.service, "service", "", "`name` of the only service to show")
	_ = cmd.RegisterFlagCompletionFunc("service",
		func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			return serviceKind.complete(cmd.Context(), o.instance), cobra.ShellCompDirectiveNoFileComp
		})
	cli.JSONFlag(cmd, &o.asJSON)
	cmd.Flags().BoolVarP(&o.watch, "watch", "w", false, "show the status again after each interval")
	cmd.Flags().DurationVar(&o.interval, "interval", time.Second,
		"time over which rates are measured; 0 shows no rates and returns at once")
	return cmd
}

// status shows the status of an instance, or lists the instances if it is not clear which one is
// meant.
func status(ctx context.Context, out io.Writer, o statusOptions) error {
	if o.interval < 0 {
		return fmt.Errorf("--interval %s: must not be negative", o.interval)
	}
	if o.watch && o.interval == 0 {
		return errors.New("--interval 0: --watch needs an interval")
	}
	instance, err := choose(o.instance)
	if several, ok := errors.AsType[*severalError](err); ok {
		return errors.Join(listInstances(out, several.instances, o.asJSON), errors.New(several.advice()))
	}
	if err != nil {
		return err
	}
	if instance.Role == datapath.RoleAgent {
		return report(ctx, out, o, func() (*agent.Snapshot, error) {
			snapshot, err := readAgent(instance.Name)
			if err != nil {
				return nil, err
			}
			snapshot.Services, err = only(snapshot.Services, o.service, func(s *agent.ServiceState) string { return s.Name })
			return snapshot, err
		}, printAgent)
	}
	return report(ctx, out, o, func() (*balancerStatus, error) {
		snapshot, err := readBalancer(instance.Name, o.service)
		if err != nil {
			return nil, err
		}
		return &balancerStatus{snapshot, readBGP(ctx, instance.Name)}, nil
	}, printBalancer)
}

// only returns the service with a name, or all services if the name is empty.
func only[S any](services []S, name string, nameOf func(S) string) ([]S, error) {
	if name == "" {
		return services, nil
	}
	var names []string
	for _, s := range services {
		if nameOf(s) == name {
			return []S{s}, nil
		}
		names = append(names, nameOf(s))
	}
	return nil, noService(name, names)
}

// noService returns the error about a service that an instance does not have. names are the
// services that it has.
func noService(name string, names []string) error {
	advice := "segue service list shows all"
	if near := wording.Nearest(name, names...); near != "" {
		advice = fmt.Sprintf("did you mean %s?", near)
	}
	return fmt.Errorf("--service %q: the instance has no such service; %s", name, advice)
}

// readBalancer reads the state of a balancer with one of its services, or with all if the name is
// empty.
func readBalancer(name, service string) (*inspect.Snapshot, error) {
	view, err := inspect.OpenView(name)
	if err != nil {
		return nil, err
	}
	defer view.Close()
	snapshot, err := view.SnapshotOf(func(s string) bool { return service == "" || s == service })
	if err != nil || service == "" || len(snapshot.Services) > 0 {
		return snapshot, err
	}
	others, err := view.Services()
	if err != nil {
		return nil, err
	}
	names := make([]string, len(others))
	for i, s := range others {
		names[i] = s.Name
	}
	return nil, noService(service, names)
}

// readAgent reads the state of an agent.
func readAgent(name string) (*agent.Snapshot, error) {
	view, err := agent.OpenView(name)
	if err != nil {
		return nil, err
	}
	defer view.Close()
	s, err := view.Snapshot()
	if err == nil {
		datapath.AddHiddenTags(s.Attachment)
	}
	return s, err
}

// snapshot is the state of an instance at one time. RatesSince sets the rates in it from the
// counters of an earlier snapshot.
type snapshot[S any] interface{ RatesSince(earlier S) }

// report prints one snapshot with rates after the interval, or one without rates at once if the
// interval is 0. With --watch it prints snapshots until the context ends. The first of them has no
// rates, so that it appears at once.
func report[S snapshot[S]](
	ctx context.Context, out io.Writer, o statusOptions,
	read func() (S, error), printText func(io.Writer, S) error,
) error {
	show := printText
	if o.asJSON {
		show = func(out io.Writer, s S) error { return cli.PrintJSON(out, s) }
	}
	before, err := read()
	if err != nil {
		return err
	}
	if o.watch {
		return watch(ctx, out, o, before, read, show)
	}
	if o.interval == 0 {
		return show(out, before)
	}
	now, err := later(ctx, o.interval, read)
	if err != nil {
		return err
	}
	now.RatesSince(before)
	return show(out, now)
}

// later waits for an interval and then reads a snapshot.
func later[S any](ctx context.Context, interval time.Duration, read func() (S, error)) (s S, err error) {
	timer := time.NewTimer(interval)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return s, ctx.Err()
	case <-timer.C:
		return read()
	}
}

// printBalancer prints the status of a balancer: the instance, BGP, the services and the reasons of
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
	if err := printBGP(out, s.BGP, s.Time); err != nil {
		return err
	}
	for _, service := range s.Services {
		if err := printService(out, service); err != nil {
			return err
		}
	}
	return printReasons(out, &s.Snapshot.Snapshot)
}

// printHiddenTags warns if the program of an attachment may not see VLAN tags, and prints the
// reason.
func printHiddenTags(out io.Writer, attachments ...*datapath.Attachment) {
	for _, a := range attachments {
		if a != nil && a.HiddenVLANTags != "" {
			fmt.Fprintf(out, "PACKETS IN VLANS MAY BE TAKEN FOR PACKETS IN NONE: %s\n", a.HiddenVLANTags)
		}
	}
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

// wholeSeconds formats a number of seconds as a duration, such as 3s or 2h5m0s.
func wholeSeconds(seconds float64) string {
	return time.Duration(seconds * float64(time.Second)).Round(time.Second).String()
}

// printAgent prints the status of an agent: the instance, the services and the reasons of packets.
func printAgent(out io.Writer, s *agent.Snapshot) error {
	printHeader(out, &s.Snapshot, isAttached(s.Attachment))
	printConfiguration(out, s.Configuration)
	printHiddenTags(out, s.Attachment)
	err := errors.Join(printPresence(out, s.Services), printOffers(out, s.Services), printIDs(out, s.Services))
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "\nsignals: %d create, %d remove; %d did not fit\n",
		s.Signals["create"], s.Signals["remove"], s.Signals["too_long"])
	return printReasons(out, &s.Snapshot)
}

// printPresence prints a table of the services: whether the server has the VIP and a socket that
// listens, the condition that the agent tells balancers, and the open connections.
func printPresence(out io.Writer, services []*agent.ServiceState) error {
	if len(services) == 0 {
		return nil
	}
	fmt.Fprintln(out)
	table := newTable(out)
	table.row("service", "address", "VIP", "listening", "condition", "connections")
	for _, s := range services {
		vip := "yes"
		if !s.VIPPresent {
			vip = "MISSING"
		}
		table.row(s.Name, fmt.Sprintf("%s %s", s.Protocol, addressOf(s.VIP, s.Port)), vip,
			describeListening(s.Listening), string(s.Condition), describeConnections(s))
	}
	return table.Flush()
}

func describeListening(l agent.Listening) string {
	if l == agent.ListeningNo {
		return "NO"
	}
	return cmp.Or(string(l), "-")
}

// describeConnections formats the number of open connections of an agent's service.
func describeConnections(s *agent.ServiceState) string {
	connections := "-"
	if s.Connections != nil {
		connections = strconv.FormatUint(uint64(*s.Connections), 10)
	}
	if s.Corrected != 0 {
		connections += fmt.Sprintf(" (corrected by %d)", s.Corrected)
	}
	return connections
}

// printOffers prints a table of the services to which balancers can offer connections, if there are
// any.
func printOffers(out io.Writer, services []*agent.ServiceState) error {
	isOffered := func(s *agent.ServiceState) bool { return s.Accept != nil }
	if !slices.ContainsFunc(services, isOffered) {
		return nil
	}
	fmt.Fprintln(out)
	table := newTable(out)
	table.row("service", "policy", "load", "threshold", "offered", "accepted", "of which stale",
		"refused", "refused down", "handed back", "taken back", "forced", "offered/s")
	for _, s := range services {
		a := s.Accept
		if a == nil {
			continue
		}
		rate := "-"
		if a.OfferedRate != nil {
			rate = short(*a.OfferedRate)
		}
		row := append([]string{s.Name, string(a.Policy), a.DescribeLoad(), a.DescribeThreshold()},
			numbers(a.Offered, a.Accepted, a.Offers["accepted_stale"], a.Offers["refused"],
				a.Offers["refused_down"], a.Offers["returned"], a.Offers["taken_back"],
				a.Offers["forced"])...)
		table.row(append(row, rate)...)
	}
	return table.Flush()
}

// printIDs prints the services whose QUIC connection IDs the agent compares with the server ID. A
// table of the results follows each service.
func printIDs(out io.Writer, services []*agent.ServiceState) error {
	for _, s := range services {
		q := s.QUIC
		if q == nil {
			continue
		}
		fmt.Fprintf(out, "\nservice %s: quic-id %s (%s)", s.Name, q.QUICID, q.QUIC)
		if q.FormerQUIC != nil {
			fmt.Fprintf(out, ", former-quic-id %s (%s)", q.FormerQUICID, q.FormerQUIC)
		}
		fmt.Fprintln(out)
		table := newTable(out)
		table.row("connection IDs", "packets", "last")
		for _, result := range slices.Sorted(maps.Keys(q.IDs)) {
			ids := q.IDs[result]
			table.row(result, strconv.FormatUint(ids.Packets, 10), describeLast(ids))
		}
		if err := table.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// describeLast returns the last connection ID that was counted: "-" if there was none, and "empty"
// if it has no octets.
func describeLast(ids agent.IDCount) string {
	if ids.Packets == 0 {
		return "-"
	}
	return cmp.Or(ids.Last, "empty")
}

// printHeader prints instance, attachment and process. attached tells whether the data path is
// attached to any interface.
func printHeader(out io.Writer, s *datapath.Snapshot, attached bool) {
	fmt.Fprintf(out, "%s %s: %s", s.Role, s.Name, describeAttachment(s.Attachment))
	if s.Program != nil {
		fmt.Fprintf(out, ", program %d tag %s", s.Program.ID, s.Program.Tag)
	}
	fmt.Fprintf(out, "\nprocess: %s\n", describeProcess(s.Process, attached))
}

// describeProcess returns the process that runs an instance. attached tells whether the data path
// is attached to an interface.
func describeProcess(p *rundir.Process, attached bool) string {
	switch {
	case p != nil:
		return fmt.Sprintf("%d, since %s", p.PID, p.Since.Format(time.RFC3339))
	case attached:
		return "NOT RUNNING, the data path keeps working with its last configuration"
	}
	return "NOT RUNNING"
}

func isAttached(a *datapath.Attachment) bool { return a != nil && a.Ifindex != 0 }

// describeAttachment returns where the data path is attached.
func describeAttachment(a *datapath.Attachment) string {
	switch {
	case !isAttached(a):
		return "NOT ATTACHED, no packets are processed"
	case a.Interface == "":
		return fmt.Sprintf("attached to %s in another network namespace", interfaceName("", a.Ifindex))
	}
	return fmt.Sprintf("%s XDP on %s", a.Mode, a.Interface)
}

// interfaceName returns the name of an interface. The name of an interface in another network
// namespace is unknown, so it returns the index, such as #7.
func interfaceName(name string, index int) string {
	if name == "" {
		return "#" + strconv.Itoa(index)
	}
	return name
}

// printService prints a service: a line about it, warnings, and a table of its servers. The columns
// depend on the placement.
func printService(out io.Writer, s *inspect.ServiceState) error {
	fmt.Fprintf(out, "\nservice %s: %s %s, %s, placement %s, persistence %s, %s, %s, %s%s\n",
		s.Name, s.Protocol, endpoint(s), s.Encapsulation, describePlacement(s), s.Persistence,
		wording.Count(int(s.Buckets), "bucket"), wording.Count(int(s.Candidates), "candidate"),
		describeGeneration(s), describeProbing(s))
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

// weightless is the least age, rounded to seconds, at which a report has practically no weight. A
// report loses half of its weight in at most 160 ms (docs/understand/protocol.md, "Candidates in
// the order of reports"). So after 1.5 s, which rounds to 2 s, the weight is below 1/512.
const weightless = 2 * time.Second

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

func endpoint(s *inspect.ServiceState) string { return addressOf(s.VIP, s.Port) }

func addressOf(vip netip.Addr, port uint16) string {
	if port == 0 {
		return vip.String() + " all ports"
	}
	return netip.AddrPortFrom(vip, port).String()
}

func describeHop(hop *inspect.NextHop) string {
	if hop == nil {
		return "UNRESOLVED"
	}
	return hop.MAC + " " + interfaceName(hop.Interface, hop.Ifindex)
}

// printReasons prints a table of the reasons under which the data path has counted packets.
func printReasons(out io.Writer, s *datapath.Snapshot) error {
	fmt.Fprintln(out)
	table := newTable(out)
	table.row("reason", "packets", "bytes", "packets/s", "bits/s")
	for _, r := range s.Reasons {
		if r.Packets == 0 {
			continue
		}
		packets, bits := "-", "-"
		if r.Rate != nil {
			packets, bits = short(r.Rate.Packets), short(r.Rate.Bits)
		}
		table.row(r.Reason, strconv.FormatUint(r.Packets, 10), strconv.FormatUint(r.Bytes, 10), packets, bits)
	}
	return table.Flush()
}

func percent(part float64) string {
	return fmt.Sprintf("%.1f%%", 100*part)
}

// short formats a number with three significant digits and an SI prefix.
func short(n float64) string {
	for _, prefix := range []string{"", "k", "M", "G"} {
		if n < 999.5 { // rounds to 999 at most
			return strconv.FormatFloat(n, 'f', decimals(n), 64) + prefix
		}
		n /= 1000
	}
	return strconv.FormatFloat(n, 'f', decimals(n), 64) + "T"
}

// decimals returns how many decimals of a number below 1000 give it three significant digits. The
// bounds are the least numbers that round to 100 and to 10.
func decimals(n float64) int {
	switch {
	case n == 0 || n >= 99.95:
		return 0
	case n >= 9.995:
		return 1
	}
	return 2
}

// table aligns columns.
type table struct{ *tabwriter.Writer }

func newTable(out io.Writer) table {
	return table{tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)}
}

// row adds a row to the table.
func (t table) row(cells ...string) {
	for i, cell := range cells {
		if i > 0 {
			fmt.Fprint(t, "\t")
		}
		fmt.Fprint(t, cell)
	}
	fmt.Fprintln(t)
}
