// SPDX-License-Identifier: Apache-2.0

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

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/research/model"
)

// modelFlags has the values of the flags that several commands of segue-lab model have.
type modelFlags struct {
	thresholds []string
	cores      int
	service    time.Duration
	asJSON     bool
}

// newModel returns the command that computes the steady state of the papers' models. It also has
// the commands for other results of the models.
func newModel() *cobra.Command {
	f := modelFlags{thresholds: []string{"2", "4", "8"}, cores: 1, service: time.Second}
	loads, percentiles := []string{"30%", "50%", "71%", "88%", "95%"}, []string{"90"}
	var delay time.Duration
	cmd := &cobra.Command{
		Use:   "model",
		Short: "Compute the papers' queueing models",
		Long: `Model computes the model in section V of the paper on 6LB: infinitely many servers, Poisson
arrivals and exponential service times. Under policy SRc, a flow is offered to two random
servers. The first server accepts the flow if it has fewer than c flows; otherwise the
second server accepts it. Under policy SC (single choice), each flow goes to one random
server, as by hashing.

A response time lasts from a flow's arrival at its server to its end. Servers serve
flows first come, first served. (The mean is the same for processor sharing.) "passed
on" is the share of flows that the first server refuses. "wrongly" is the share of flows
that the first server refuses although the second one has more flows. Both are shares of
all flows. docs/research/model.md has the equations.`,
		Example: "  segue-lab model --threshold 4 --load 88% --cores 2 --service 190ms " +
			"--percentile 50,90,99",
		Args: cli.Arguments(),
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
				return cli.PrintJSON(cmd.OutOrStdout(), rows)
			}
			return printSteady(cmd.OutOrStdout(), rows, asked)
		},
	}
	f.addTo(cmd)
	cmd.PersistentFlags().BoolVar(&f.asJSON, "json", false,
		"print JSON, with times in seconds and shares from 0 to 1")
	cmd.Flags().StringSliceVar(&loads, "load", loads,
		"loads: `shares` of the cores that are busy on average")
	cmd.Flags().StringSliceVar(&percentiles, "percentile", percentiles,
		"percentiles of the response time, `numbers` such as 99.9")
	cmd.Flags().DurationVar(&delay, "delay", 0,
		"`duration` of passing a flow from the first server to the second")
	cmd.AddCommand(newModelDistribution(&f), newModelServers(&f), newModelTransient(&f),
		newModelTwoServers(&f.asJSON))
	return cmd
}

// addTo adds the flags about policies and servers to a command.
func (f *modelFlags) addTo(cmd *cobra.Command) {
	cmd.Flags().StringSliceVar(&f.thresholds, "threshold", f.thresholds,
		"thresholds: `counts` c of SRc; a server accepts while it has fewer than c flows")
	cmd.Flags().IntVar(&f.cores, "cores", f.cores, "`count` of cores per server")
	cmd.Flags().DurationVar(&f.service, "service", f.service, "mean `duration` of a flow on one core")
}

// policy is single choice or SRc.
type policy struct {
	name      string
	threshold int  // the c of SRc; 0 for single choice, which is the same as SR0
	single    bool // it is single choice
}

// steady computes the steady state under the policy.
func (p policy) steady(load float64, cores int) (*model.Steady, error) {
	if p.single {
		return model.SingleChoice(load, cores)
	}
	return model.SRc(load, cores, p.threshold)
}

// policies checks the flags of addTo. It returns single choice and, for each --threshold, SRc.
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
		list = append(list, policy{name: fmt.Sprintf("SR%d", c), threshold: c})
	}
	return list, nil
}

// seconds converts a time from service times, the unit of the model, to seconds.
func (f *modelFlags) seconds(serviceTimes float64) float64 {
	return serviceTimes * f.service.Seconds()
}

// parseLoads parses the loads that a flag has. They are below 100%, because a queue without limit
// has no steady state at 100%.
func parseLoads(flag string, words ...string) ([]float64, error) {
	var loads []float64
	for _, word := range words {
		between := func(v float64) bool { return v > 0 && v < 1 }
		load, err := parseShare(flag, word, "above 0% and below 100%", between)
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

// parseShare parses a share in percent. It returns an error if isAllowed returns false for the
// share. The error describes the allowed shares by the text allowed.
func parseShare(flag, word, allowed string, isAllowed func(float64) bool) (float64, error) {
	number, percent := strings.CutSuffix(word, "%")
	value, err := strconv.ParseFloat(number, 64)
	if err != nil || !percent || !isAllowed(value/100) {
		return 0, fmt.Errorf("%s %q: must be a share %s, such as 50%%", flag, word, allowed)
	}
	return value / 100, nil
}

// parsePercentiles parses the percentiles that a flag has.
func parsePercentiles(flag string, words ...string) ([]float64, error) {
	var percentiles []float64
	for _, word := range words {
		x, err := strconv.ParseFloat(word, 64)
		if err != nil || !(x > 0 && x <= model.MaxPercentile) {
			return nil, fmt.Errorf("%s %q: must be a number above 0 and at most %v",
				flag, word, model.MaxPercentile)
		}
		percentiles = append(percentiles, x)
	}
	return percentiles, nil
}

// steadyRow has the results for the steady state under one policy at one load.
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

// steadyRows computes the steady state under each policy at each load. delay is the time of passing
// a flow on.
func (f *modelFlags) steadyRows(
	loads []float64, policies []policy, percentiles []float64, delay time.Duration,
) ([]steadyRow, error) {
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

// printSteady prints a table of steady states.
func printSteady(out io.Writer, rows []steadyRow, percentiles []float64) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	header := "load\tpolicy\tmean\twith delay\t"
	for _, x := range percentiles {
		header += fmt.Sprintf("p%v\t", x)
	}
	fmt.Fprintln(w, header+"flows\tfairness\tpassed on\twrongly\t")
	for _, r := range rows {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t", percentage(r.Load), r.Policy,
			duration(r.Mean), duration(r.MeanWithDelay))
		for _, x := range percentiles {
			fmt.Fprintf(w, "%s\t", duration(r.Percentiles[fmt.Sprint(x)]))
		}
		fmt.Fprintf(w, "%.3f\t%.3f\t%s\t%s\t\n",
			r.Flows, r.Fairness, percentage(r.PassedOn), percentage(r.Wrongly))
	}
	return w.Flush()
}

// percentage formats a share in percent.
func percentage(share float64) string { return fmt.Sprintf("%.2f%%", 100*share) }

// duration formats a number of seconds with four significant digits, in s, ms or µs.
func duration(seconds float64) string {
	if seconds == 0 { // it has no logarithm
		return "0 s"
	}
	scale, unit := 1.0, "s"
	switch {
	case seconds < 1e-3:
		scale, unit = 1e6, "µs"
	case seconds < 1:
		scale, unit = 1e3, "ms"
	}
	const significant = 4
	value := seconds * scale
	magnitude := int(math.Floor(math.Log10(value)))
	decimals := max(0, significant-1-magnitude)
	return strconv.FormatFloat(value, 'f', decimals, 64) + " " + unit
}
