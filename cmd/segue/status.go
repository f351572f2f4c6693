// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/datapath"
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

If there is a switch in front of the balancer, the process tells what the switch has. Status
reads its packet counters through the process, too.

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
		speaker, link := readAnnouncements(ctx, instance.Name)
		return &balancerStatus{
			snapshot, speaker, link, readSwitch(ctx, instance.Name, o.service),
		}, nil
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
	isMissing := err == nil && service != "" && len(snapshot.Services) == 0
	if !isMissing {
		return snapshot, err
	}
	all, err := view.Services()
	if err != nil {
		return nil, err
	}
	names := make([]string, len(all))
	for i, s := range all {
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

// printHiddenTags warns if the program of an attachment may not see VLAN tags, and prints the
// reason.
func printHiddenTags(out io.Writer, attachments ...*datapath.Attachment) {
	for _, a := range attachments {
		if a != nil && a.HiddenVLANTags != "" {
			fmt.Fprintf(out, "PACKETS IN VLANS MAY BE TAKEN FOR PACKETS IN NONE: %s\n", a.HiddenVLANTags)
		}
	}
}

// wholeSeconds formats a number of seconds as a duration, such as 3s or 2h5m0s.
func wholeSeconds(seconds float64) string {
	return time.Duration(seconds * float64(time.Second)).Round(time.Second).String()
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

// weightless is the least age, rounded to seconds, at which a report has practically no weight. A
// report loses half of its weight in at most 160 ms (docs/understand/protocol.md, "Candidates in
// the order of reports"). So after 1.5 s, which rounds to 2 s, the weight is below 1/512.
const weightless = 2 * time.Second

// printReasons prints a table of the reasons under which a data path has counted packets.
func printReasons(out io.Writer, title string, reasons []datapath.ReasonCount) error {
	fmt.Fprintln(out)
	table := newTable(out)
	table.row(title, "packets", "bytes", "packets/s", "bits/s")
	for _, r := range reasons {
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
