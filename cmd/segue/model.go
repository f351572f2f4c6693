package main

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/model"
)

// modelFlags are what the model's commands have in common. Times are in units of the service time.
type modelFlags struct {
	thresholds []string
	cores      int
	service    time.Duration
	asJSON     bool
}

func newModel() *cobra.Command {
	f := modelFlags{thresholds: []string{"2", "4", "8"}, cores: 1, service: time.Second}
	loads, percentiles := []string{"30%", "50%", "71%", "88%", "95%"}, []string{"90"}
	var delay time.Duration
	cmd := &cobra.Command{
		Use:   "model",
		Short: "Compute what queueing theory says of servers that decide",
		Long: `Model computes section V of the paper on 6LB: infinitely many servers, flows that arrive
by a Poisson process and take exponential times, and policies SRc, by which the first
of two random servers takes a flow if it has fewer than c, else the second does. SC,
single choice, is what hashing alone does.

Response times are from a flow's arrival at its server to its end, for servers that
work first come, first served; their mean is that of processor sharing too. "passed
on" is the share of flows that the first server leaves to the second, "wrongly" that
of all flows that so come to a server with more flows than the first has.
docs/model.md has the equations.`,
		Example: "  segue model --threshold 4 --load 88% --cores 2 --service 190ms --percentile 50,90,99",
		Args:    arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			policies, err := f.policies()
			if err != nil {
				return err
			}
			if delay < 0 {
				return fmt.Errorf("--delay %v: must not be negative", delay)
			}
			shares, err := parseLoads("--load", loads...)
			if err != nil {
				return err
			}
			asked, err := parsePercentiles("--percentile", percentiles...)
			if err != nil {
				return err
			}
			rows, err := f.steadyRows(shares, policies, asked, delay)
			if err != nil {
				return err
			}
			if f.asJSON {
				return printJSON(cmd.OutOrStdout(), rows)
			}
			return printSteady(cmd.OutOrStdout(), rows, asked)
		},
	}
	f.addTo(cmd)
	cmd.PersistentFlags().BoolVar(&f.asJSON, "json", false, "print JSON; times are in seconds, shares from 0 to 1")
	cmd.Flags().StringSliceVar(&loads, "load", loads, "`shares` of all cores' time that are used")
	cmd.Flags().StringSliceVar(&percentiles, "percentile", percentiles, "`numbers` of the percentiles of response times to compute")
	cmd.Flags().DurationVar(&delay, "delay", 0, "`duration` that it costs to pass a flow on")
	cmd.AddCommand(newModelDistribution(&f), newModelServers(&f), newModelTransient(&f), newModelTwoServers(&f.asJSON))
	return cmd
}

func (f *modelFlags) addTo(cmd *cobra.Command) {
	cmd.Flags().StringSliceVar(&f.thresholds, "threshold", f.thresholds, "`counts` of flows below which a server takes another: c of SRc")
	cmd.Flags().IntVar(&f.cores, "cores", f.cores, "`count` of a server's cores")
	cmd.Flags().DurationVar(&f.service, "service", f.service, "mean `duration` that a core needs for a flow")
}

// policy is single choice or SRc.
type policy struct {
	name      string
	threshold int // of SRc
	single    bool
}

func (p policy) steady(load float64, cores int) (*model.Steady, error) {
	if p.single {
		return model.SingleChoice(load, cores)
	}
	return model.SRc(load, cores, p.threshold)
}

// policies are single choice, the baseline, and those of the flags, which are checked with the others
// that the commands have in common.
func (f *modelFlags) policies() ([]policy, error) {
	if f.cores < 1 || f.cores > model.MaxCores {
		return nil, fmt.Errorf("--cores %d: must be from 1 to %d", f.cores, model.MaxCores)
	}
	if f.service <= 0 {
		return nil, fmt.Errorf("--service %v: must be above 0", f.service)
	}
	list := []policy{{name: "SC", single: true}}
	for _, word := range f.thresholds {
		c, err := strconv.Atoi(word)
		if err != nil || c < 0 || c > model.MaxThreshold {
			return nil, fmt.Errorf("--threshold %q: must be a number from 0 to %d", word, model.MaxThreshold)
		}
		list = append(list, policy{name: "SR" + word, threshold: c})
	}
	return list, nil
}

func (f *modelFlags) seconds(units float64) float64 { return units * f.service.Seconds() }

// parseLoads reads shares, of which queues without limit need less than 100%.
func parseLoads(flag string, words ...string) ([]float64, error) {
	var loads []float64
	for _, word := range words {
		load, err := parseShare(flag, word, "above 0% and below 100%", func(v float64) bool { return v > 0 && v < 1 })
		if err != nil {
			return nil, err
		}
		loads = append(loads, load)
	}
	if len(loads) == 0 {
		return nil, fmt.Errorf("%s: at least one share is required", flag)
	}
	return loads, nil
}

// parseShare reads a share in percent, which must be what the condition says in words.
func parseShare(flag, word, condition string, holds func(float64) bool) (float64, error) {
	number, percent := strings.CutSuffix(word, "%")
	value, err := strconv.ParseFloat(number, 64)
	if err != nil || !percent || !holds(value/100) {
		return 0, fmt.Errorf("%s %q: must be a share %s, such as 50%%", flag, word, condition)
	}
	return value / 100, nil
}

func parsePercentiles(flag string, words ...string) ([]float64, error) {
	var percentiles []float64
	for _, word := range words {
		x, err := strconv.ParseFloat(word, 64)
		if err != nil || !(x > 0 && x <= model.MaxPercentile) {
			return nil, fmt.Errorf("%s %q: must be a number above 0 and at most %v", flag, word, model.MaxPercentile)
		}
		percentiles = append(percentiles, x)
	}
	return percentiles, nil
}

// steadyRow is the steady state of one policy at one load.
type steadyRow struct {
	Load          float64            `json:"load"`
	Policy        string             `json:"policy"`
	Mean          float64            `json:"mean_seconds"`
	MeanWithDelay float64            `json:"mean_with_delay_seconds"`
	Percentiles   map[string]float64 `json:"percentiles_seconds"`
	Flows         float64            `json:"flows"`
	Fairness      float64            `json:"fairness"`
	PassedOn      float64            `json:"passed_on"`
	Wrongly       float64            `json:"passed_on_wrongly"`
}

func (f *modelFlags) steadyRows(loads []float64, policies []policy, percentiles []float64, delay time.Duration) ([]steadyRow, error) {
	var rows []steadyRow
	for _, load := range loads {
		for _, p := range policies {
			s, err := p.steady(load, f.cores)
			if err != nil {
				return nil, err
			}
			row := steadyRow{
				Load: load, Policy: p.name, Flows: s.MeanFlows(), Fairness: s.Fairness(),
				Mean:          f.seconds(s.MeanResponse()),
				MeanWithDelay: f.seconds(s.MeanResponseWithDelay(delay.Seconds() / f.service.Seconds())),
				Percentiles:   make(map[string]float64),
				PassedOn:      s.Rejected, Wrongly: s.WrongfullyRejected(),
			}
			for _, x := range percentiles {
				value, err := s.Percentile(x)
				if err != nil {
					return nil, err
				}
				row.Percentiles[fmt.Sprint(x)] = f.seconds(value)
			}
			rows = append(rows, row)
		}
	}
	return rows, nil
}

func printSteady(out io.Writer, rows []steadyRow, percentiles []float64) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	header := "load\tpolicy\tmean\twith delay\t"
	for _, x := range percentiles {
		header += fmt.Sprintf("p%v\t", x)
	}
	fmt.Fprintln(w, header+"flows\tfairness\tpassed on\twrongly\t")
	for _, r := range rows {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t", percentage(r.Load), r.Policy, duration(r.Mean), duration(r.MeanWithDelay))
		for _, x := range percentiles {
			fmt.Fprintf(w, "%s\t", duration(r.Percentiles[fmt.Sprint(x)]))
		}
		fmt.Fprintf(w, "%.3f\t%.3f\t%s\t%s\t\n", r.Flows, r.Fairness, percentage(r.PassedOn), percentage(r.Wrongly))
	}
	return w.Flush()
}

func percentage(share float64) string { return fmt.Sprintf("%.2f%%", 100*share) }

// duration has four digits, in the unit that fits.
func duration(seconds float64) string {
	if seconds == 0 {
		return "0 s"
	}
	scale, unit := 1.0, "s"
	switch {
	case seconds < 1e-3:
		scale, unit = 1e6, "µs"
	case seconds < 1:
		scale, unit = 1e3, "ms"
	}
	value := seconds * scale
	digits := max(0, 3-int(math.Floor(math.Log10(value))))
	return strconv.FormatFloat(value, 'f', digits, 64) + " " + unit
}

func newModelDistribution(f *modelFlags) *cobra.Command {
	load, to, points := "88%", time.Duration(0), 20
	cmd := &cobra.Command{
		Use:   "distribution",
		Short: "Compute how response times are distributed, first come, first served",
		Args:  arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			policies, err := f.policies()
			if err != nil {
				return err
			}
			loads, err := parseLoads("--load", load)
			if err != nil {
				return err
			}
			if points < 1 || points > 10000 {
				return fmt.Errorf("--points %d: must be from 1 to 10000", points)
			}
			if to < 0 {
				return fmt.Errorf("--to %v: must not be negative", to)
			}
			return f.distribution(cmd.OutOrStdout(), loads[0], policies, to, points)
		},
	}
	f.addTo(cmd)
	cmd.Flags().StringVar(&load, "load", load, "`share` of all cores' time that is used")
	cmd.Flags().DurationVar(&to, "to", 0, "longest `duration` to compute, 0 for the 99th percentile of single choice")
	cmd.Flags().IntVar(&points, "points", points, "`count` of durations, at equal distances")
	return cmd
}

// distributionRow is the share of flows that take no longer than Time, by policy.
type distributionRow struct {
	Time  float64            `json:"time_seconds"`
	Share map[string]float64 `json:"share"`
}

func (f *modelFlags) distribution(out io.Writer, load float64, policies []policy, to time.Duration, points int) error {
	states := make([]*model.Steady, len(policies))
	for i, p := range policies {
		var err error
		if states[i], err = p.steady(load, f.cores); err != nil {
			return err
		}
	}
	longest := to.Seconds() / f.service.Seconds()
	if to == 0 {
		var err error
		if longest, err = states[0].Percentile(99); err != nil {
			return err
		}
	}
	rows := make([]distributionRow, points)
	for i := range rows {
		t := longest * float64(i+1) / float64(points)
		rows[i] = distributionRow{f.seconds(t), make(map[string]float64)}
		for j, p := range policies {
			rows[i].Share[p.name] = states[j].CDF(t)
		}
	}
	if f.asJSON {
		return printJSON(out, rows)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	header := "no longer than\t"
	for _, p := range policies {
		header += p.name + "\t"
	}
	fmt.Fprintln(w, header)
	for _, r := range rows {
		fmt.Fprintf(w, "%s\t", duration(r.Time))
		for _, p := range policies {
			fmt.Fprintf(w, "%s\t", percentage(r.Share[p.name]))
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}

func newModelServers(f *modelFlags) *cobra.Command {
	limit, servers, percentile := 6*time.Second, 100, "90"
	cmd := &cobra.Command{
		Use:   "servers",
		Short: "Compute how many servers keep response times below a limit",
		Long: `Servers computes equation (11) of 6LB: with single choice a number of servers just
keeps a percentile of the response times at the limit; how many do it with SRc.`,
		Args: arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			policies, err := f.policies()
			if err != nil {
				return err
			}
			if servers < 1 {
				return fmt.Errorf("--servers %d: must be at least 1", servers)
			}
			x, err := parsePercentiles("--percentile", percentile)
			if err != nil {
				return err
			}
			return f.servers(cmd.OutOrStdout(), policies[1:], x[0], limit, servers)
		},
	}
	f.addTo(cmd)
	cmd.Flags().DurationVar(&limit, "limit", limit, "longest `duration` that the percentile may have")
	cmd.Flags().StringVar(&percentile, "percentile", percentile, "percentile that has the limit, a `number` such as 99.9")
	cmd.Flags().IntVar(&servers, "servers", servers, "`count` of servers with single choice")
	return cmd
}

// serversRow is how many servers a policy needs.
type serversRow struct {
	Policy           string  `json:"policy"`
	SingleChoiceLoad float64 `json:"single_choice_load"`
	Load             float64 `json:"load"`
	Ratio            float64 `json:"ratio"`
	Servers          int     `json:"servers"`
}

func (f *modelFlags) servers(out io.Writer, policies []policy, percentile float64, limit time.Duration, servers int) error {
	var rows []serversRow
	for _, p := range policies {
		saving, err := model.Save(percentile, limit.Seconds()/f.service.Seconds(), f.cores, p.threshold)
		if err != nil {
			return fmt.Errorf("--limit %v: %w", limit, err)
		}
		rows = append(rows, serversRow{
			Policy: p.name, SingleChoiceLoad: saving.SingleChoiceLoad, Load: saving.Load, Ratio: saving.Ratio,
			Servers: int(math.Ceil(float64(servers)*saving.Ratio - 1e-6)),
		})
	}
	if f.asJSON {
		return printJSON(out, rows)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "policy\tload with SC\tload\tratio\tservers\t")
	for _, r := range rows {
		fmt.Fprintf(w, "%s\t%s\t%s\t%.4f\t%d\t\n", r.Policy, percentage(r.SingleChoiceLoad), percentage(r.Load), r.Ratio, r.Servers)
	}
	return w.Flush()
}

func newModelTransient(f *modelFlags) *cobra.Command {
	load, to, step, flows := "88%", 20*time.Second, time.Second, 0
	cmd := &cobra.Command{
		Use:   "transient",
		Short: "Compute how servers that start with few or many flows come to the steady state",
		Args:  arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			policies, err := f.policies()
			if err != nil {
				return err
			}
			loads, err := parseLoads("--load", load)
			if err != nil {
				return err
			}
			if step <= 0 || to < step || to/step > 10000 {
				return fmt.Errorf("--step %v: must be above 0, at most --to %v, and at least 1/10000 of that", step, to)
			}
			if flows < 0 || flows > model.MaxThreshold {
				return fmt.Errorf("--flows %d: must be from 0 to %d", flows, model.MaxThreshold)
			}
			return f.transient(cmd.OutOrStdout(), loads[0], policies, flows, step, to)
		},
	}
	f.addTo(cmd)
	cmd.Flags().StringVar(&load, "load", load, "`share` of all cores' time that is used in the end")
	cmd.Flags().IntVar(&flows, "flows", flows, "`count` of flows that each server starts with")
	cmd.Flags().DurationVar(&to, "to", to, "`duration` to follow")
	cmd.Flags().DurationVar(&step, "step", step, "`duration` between two lines")
	return cmd
}

// transientRow is the mean number of flows of a server at Time, by policy.
type transientRow struct {
	Time  float64            `json:"time_seconds"`
	Flows map[string]float64 `json:"flows"`
}

func (f *modelFlags) transient(out io.Writer, load float64, policies []policy, flows int, step, to time.Duration) error {
	systems := make([]*model.Transient, len(policies))
	for i, p := range policies {
		var err error
		if systems[i], err = model.NewTransient(load, f.cores, p.threshold, flows); err != nil {
			return err
		}
	}
	var rows []transientRow
	for now := time.Duration(0); now <= to; now += step {
		row := transientRow{now.Seconds(), make(map[string]float64)}
		for i, p := range policies {
			row.Flows[p.name] = systems[i].MeanFlows()
			systems[i].Advance(step.Seconds() / f.service.Seconds())
		}
		rows = append(rows, row)
	}
	if f.asJSON {
		return printJSON(out, rows)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	header := "time\t"
	for _, p := range policies {
		header += "flows, " + p.name + "\t"
	}
	fmt.Fprintln(w, header)
	for _, r := range rows {
		fmt.Fprintf(w, "%s\t", duration(r.Time))
		for _, p := range policies {
			fmt.Fprintf(w, "%.4f\t", r.Flows[p.name])
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}
