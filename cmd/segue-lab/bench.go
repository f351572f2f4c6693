// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/lab/bench"
)

// packetFlags has the values of the flags about measurements with packets. Some flags write
// directly to options. The others need to be parsed.
type packetFlags struct {
	options bench.PacketOptions
	flows   []string
	room    string
	pattern string // the value of --case
}

// add adds the flags to a command.
func (f *packetFlags) add(flags *pflag.FlagSet) {
	f.options = bench.DefaultPacketOptions()
	f.flows, f.room = []string{"1", "1k", "64k", "1M", "10M"}, "1M"
	flags.StringSliceVar(&f.flows, "flows", f.flows,
		"`counts` of known flows; k and M stand for thousands and millions")
	flags.StringVar(&f.room, "room", f.room,
		"`count` of flows for which the flow table has room at least")
	flags.StringVar(&f.pattern, "case", "", "measure only the cases whose names match this `regexp`")
	flags.IntVar(&f.options.Rounds, "rounds", f.options.Rounds, "number of measurements of each case")
	flags.Uint32Var(&f.options.Packets, "packets", f.options.Packets,
		"`count` of packets in a measurement")
}

// parse stores the values of all flags in the options, and checks them.
func (f *packetFlags) parse() (err error) {
	if f.options.Flows, err = parseFlowCounts("--flows", f.flows...); err != nil {
		return err
	}
	rooms, err := parseFlowCounts("--room", f.room)
	if err != nil {
		return err
	}
	f.options.Room = rooms[0]
	if f.options.Case, err = cli.ParseRegexp("--case", f.pattern); err != nil {
		return err
	}
	if f.options.Rounds < 1 {
		return fmt.Errorf("--rounds %d: must be at least 1", f.options.Rounds)
	}
	if f.options.Packets < 1 {
		return fmt.Errorf("--packets %d: must be at least 1", f.options.Packets)
	}
	return nil
}

// progressHelp describes the flag --progress.
const progressHelp = "show progress even if standard error is not a terminal"

// newBench returns the command that measures the cost of packets. It also has the commands for
// other measurements.
func newBench() *cobra.Command {
	var f packetFlags
	var against string
	var asJSON, loud bool
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure the data path on this machine",
		Long: `Bench measures the CPU time of a packet in the data path, in nanoseconds. It uses test
runs of the programs (BPF_PROG_TEST_RUN). It touches no interface. It disturbs balancers
on this machine only by its CPU load.

Every round measures every case. It measures the cases null and floor several times,
because other cases are compared with them. "null" is the host program alone, which
writes each packet anew. "floor" is an encapsulation without any lookup. In the report,
"net" is the median of a case minus the median of "null". Before each measurement, an
equal number of packets warms the caches. The packets of known flows come in random
order. The flow table has room for at least --room flows. docs/understand/performance.md
describes the cases.

--against FILE compares this build with another one, whose executable is FILE. Every
round measures each case in both builds, one right after the other. The report shows the
time of this build divided by the time of the other build. With --against, the defaults
are --flows 1k, --rounds 100 and --packets 20000. Without --case, bench then leaves out
the cases *up-to-*, floor-*-table and reference-lru. docs/understand/performance.md
explains the report.

--json prints an array of objects. Their keys are case, family, encapsulation, flows,
ns_median, ns_p10, ns_p90, net_ns and rounds. If the processor counts instructions and CPU
cycles, the keys instructions and cycles are added. With --against, --json prints one
object with the keys old and new (the builds), cases, only_old and only_new.

Bench needs root and, for ten million flows, four gigabytes of memory. A full run takes
some minutes.`,
		Example: "  segue-lab bench --case 'known-flow$|reference' --flows 1k,1M\n" +
			"  segue-lab bench --against /usr/local/bin/segue-lab",
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.parse(); err != nil {
				return err
			}
			f.options.Progress = progressTo(cmd.ErrOrStderr(), loud)
			if cmd.Flags().Changed(againstFlag) {
				return compareBuilds(cmd, f.options, against, asJSON)
			}
			times, err := bench.MeasurePackets(cmd.Context(), f.options)
			if err != nil {
				return err
			}
			if asJSON {
				return cli.PrintJSON(cmd.OutOrStdout(), times)
			}
			return printPackets(cmd.OutOrStdout(), times)
		},
	}
	f.add(cmd.Flags())
	cmd.Flags().StringVar(&against, againstFlag, "",
		"compare this build with another one, whose executable is the `file`")
	cmd.PersistentFlags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.PersistentFlags().BoolVar(&loud, "progress", false, progressHelp)
	cmd.AddCommand(newBenchMemory(&asJSON, &loud), newBenchTables(&asJSON, &loud),
		newBenchThroughput(&asJSON, &loud), newBenchControl(&asJSON, &loud))
	cmd.AddCommand(newBenchWorker())
	return cmd
}

// progressTo returns a function that prints a step of the work, with the time since progressTo was
// called. If out is not a terminal and loud is false, it returns nil, and no step is printed.
func progressTo(out io.Writer, loud bool) bench.Progress {
	if file, ok := out.(*os.File); !loud && (!ok || !isTerminal(file)) {
		return nil
	}
	start := time.Now()
	return func(what string) {
		fmt.Fprintf(out, "%4.0f s: %s\n", time.Since(start).Seconds(), what)
	}
}

// isTerminal tells whether a file is a terminal.
func isTerminal(file *os.File) bool {
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
	return err == nil
}

// maxFlowCount is the largest number of flows that a flag may have.
const maxFlowCount = 100_000_000

// parseFlowCounts parses the numbers of flows that a flag has, such as 64k and 10M. It returns an
// error if there is none, or if one is not from 1 to maxFlowCount.
func parseFlowCounts(flag string, words ...string) ([]uint32, error) {
	if len(words) == 0 {
		return nil, fmt.Errorf("%s: at least one number is required", flag)
	}
	var counts []uint32
	for _, word := range words {
		number, unit := word, uint64(1)
		if rest, ok := strings.CutSuffix(word, "k"); ok {
			number, unit = rest, 1e3
		} else if rest, ok := strings.CutSuffix(word, "M"); ok {
			number, unit = rest, 1e6
		}
		n, err := strconv.ParseUint(number, 10, 32)
		if err != nil || n == 0 || n*unit > maxFlowCount {
			return nil, fmt.Errorf("%s %q: must be a number from 1 to 100M", flag, word)
		}
		counts = append(counts, uint32(n*unit))
	}
	return counts, nil
}

// printPackets prints a table of the costs of packets.
func printPackets(out io.Writer, times []bench.PacketTime) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "case\tfamily\tencapsulation\tflows\tmedian\tp10\tp90\tnet ns\tinstructions\tcycles\t")
	for _, t := range times {
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%.1f\t%.1f\t%.1f\t%.1f\t%s\t%s\t\n",
			t.Case, t.Family, t.Encapsulation, t.Flows, t.Median, t.P10, t.P90, t.Net,
			countOf(t.Instructions), countOf(t.Cycles))
	}
	return w.Flush()
}

// countOf formats what the processor has counted, or returns a dash if it does not count that.
func countOf(n *float64) string {
	if n == nil {
		return "-"
	}
	return fmt.Sprintf("%.0f", *n)
}

func newBenchMemory(asJSON, loud *bool) *cobra.Command {
	flows := []string{"1M", "10M"}
	cmd := &cobra.Command{
		Use:   "memory",
		Short: "Measure the memory of full flow tables",
		Args:  cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			sizes, err := parseFlowCounts("--flows", flows...)
			if err != nil {
				return err
			}
			all, err := bench.MeasureMemory(cmd.Context(), sizes, progressTo(cmd.ErrOrStderr(), *loud))
			if err != nil {
				return err
			}
			if *asJSON {
				return cli.PrintJSON(cmd.OutOrStdout(), all)
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', tabwriter.AlignRight)
			fmt.Fprintln(w, "limits.flows\tcapacity\tbytes\tbytes per flow\theld at once\t")
			for _, m := range all {
				fmt.Fprintf(w, "%d\t%d\t%d\t%.2f\t%d\t\n",
					m.Flows, m.Capacity, m.Bytes, m.BytesPerFlow, m.Held)
			}
			return w.Flush()
		},
	}
	cmd.Flags().StringSliceVar(&flows, "flows", flows,
		"`counts` of flows for which tables have room; k and M stand for thousands and millions")
	return cmd
}

func newBenchTables(asJSON, loud *bool) *cobra.Command {
	changes := 9
	cmd := &cobra.Command{
		Use:   "tables",
		Short: "Measure the time to build candidate tables and to swap them in",
		Args:  cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if changes < 1 {
				return fmt.Errorf("--changes %d: must be at least 1", changes)
			}
			progress := progressTo(cmd.ErrOrStderr(), *loud)
			times, err := bench.MeasureTables(cmd.Context(), bench.TableSizes, changes, progress)
			if err != nil {
				return err
			}
			if *asJSON {
				return cli.PrintJSON(cmd.OutOrStdout(), times)
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', tabwriter.AlignRight)
			fmt.Fprintln(w, "servers\tbuckets\tcandidates\tbuild\tbuild and swap\t")
			for _, t := range times {
				fmt.Fprintf(w, "%d\t%d\t%d\t%v\t%v\t\n", t.Servers, t.Buckets, t.Candidates,
					t.Build.Round(100*time.Microsecond), t.Swap.Round(100*time.Microsecond))
			}
			return w.Flush()
		},
	}
	cmd.Flags().IntVar(&changes, "changes", changes,
		"number of changes of the servers; each result is their median")
	return cmd
}

func newBenchThroughput(asJSON, loud *bool) *cobra.Command {
	o := bench.ThroughputOptions{Duration: time.Second, Rounds: 9}
	setups := ""
	cmd := &cobra.Command{
		Use:   "throughput",
		Short: "Measure the packets per second of one and two cores",
		Long: `Throughput sends packets of known flows through a balancer in its own network
namespaces. The packets come from a generator in the kernel on the same core. Each of the
following setups does more work than the one before. "dropped" drops packets on arrival.
"passed-on" forwards them unchanged. "balanced" balances them by srv6-insert.
"balanced-alike" does the same, but all cores have the same flows.

Setups whose names begin with "host" are test runs without a network. Their rates are
per second of CPU time. "host" runs only the program that writes each packet anew. The
others also run the balancer. In "host-balanced", all cores have the same few known flows,
and in "host-balanced-1M" the same million. "host-mix-hash" and "host-mix-infer" have
short connections to 1000 servers, with placement hash and infer.`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if o.Rounds < 1 {
				return fmt.Errorf("--rounds %d: must be at least 1", o.Rounds)
			}
			if o.Duration < bench.MinThroughputDuration {
				return fmt.Errorf("--duration %v: must be at least %v",
					o.Duration, bench.MinThroughputDuration)
			}
			if o.Setups, err = regexp.Compile(setups); err != nil {
				return fmt.Errorf("--setup %q: %w", setups, err)
			}
			o.Progress = progressTo(cmd.ErrOrStderr(), *loud)
			results, err := bench.MeasureThroughput(cmd.Context(), o)
			if err != nil {
				return err
			}
			if *asJSON {
				return cli.PrintJSON(cmd.OutOrStdout(), results)
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', tabwriter.AlignRight)
			fmt.Fprintln(w, "setup\tcores\tMpps\tp10\tp90\tmean\tspeedup\tlost\t")
			for _, r := range results {
				fmt.Fprintf(w, "%s\t%d\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.1f%%\t\n",
					r.Way, r.Cores, r.PacketsPerSecond/1e6, r.P10/1e6, r.P90/1e6, r.Mean/1e6,
					bench.Speedup(results, r.Way, r.Cores), 100*r.Lost)
			}
			return w.Flush()
		},
	}
	cmd.Flags().IntVar(&o.Rounds, "rounds", o.Rounds, "number of measurements of each setup")
	cmd.Flags().StringVar(&setups, "setup", setups,
		"measure only the setups whose names match this `regexp`")
	cmd.Flags().DurationVar(&o.Duration, "duration", o.Duration, "length of each measurement")
	return cmd
}
