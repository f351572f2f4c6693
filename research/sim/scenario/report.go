// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/segue-lb/segue/research/sim"
)

// Report has the results of a scenario.
type Report struct {
	Scenario   string       `json:"scenario"`
	Seed       uint64       `json:"seed"`
	Runs       int          `json:"runs"` // number of runs of each case
	Cases      []CaseReport `json:"cases"`
	Assertions []Verdict    `json:"assertions"`
	// Warnings name parts of the file that had no effect in the runs.
	Warnings []string `json:"warnings"`
}

// CaseReport has the results of a case.
type CaseReport struct {
	Name  string `json:"case"`
	Flows uint64 `json:"flows"`
	Quantities
	Groups  []GroupReport `json:"groups"`
	Servers []ServerUse   `json:"servers"`
	// Series are the intervals of Scenario.Every that lie completely in the time of arrivals of
	// all runs.
	Series []Interval `json:"series,omitempty"`
}

// Interval has the results of a case in an interval. They cover the flows that arrived in the
// interval, measured or not.
type Interval struct {
	From     Time     `json:"from"`
	To       Time     `json:"to"`
	Flows    uint64   `json:"flows"`
	Arrivals Estimate `json:"arrivals"` // flows per second
	Quantities
}

// Quantities are the measured quantities. Times are in seconds, and shares are from 0 to 1.
type Quantities struct {
	Mean Estimate `json:"mean"`
	P50  Estimate `json:"p50"`
	P90  Estimate `json:"p90"`
	P99  Estimate `json:"p99"`
	P999 Estimate `json:"p99.9"`
	// Maximum over all runs, without a confidence interval.
	Max             Estimate `json:"max"`
	Deviation       Estimate `json:"deviation"` // also without a confidence interval
	Refused         Estimate `json:"refused"`
	TimedOut        Estimate `json:"timed-out"`
	Lost            Estimate `json:"lost"`
	Broken          Estimate `json:"broken"`
	Failed          Estimate `json:"failed"` // sum of the four above
	Hops            Estimate `json:"hops"`
	Wrongful        Estimate `json:"wrongful"`
	Untracked       Estimate `json:"untracked"`
	Recovered       Estimate `json:"recovered"` // number of flows in a run
	Utilisation     Estimate `json:"utilisation"`
	Open            Estimate `json:"open"`
	Fairness        Estimate `json:"fairness"`
	InstantFairness Estimate `json:"instant-fairness"`
}

// GroupReport describes the use of the servers of a group.
type GroupReport struct {
	Name        string   `json:"group"`
	Connections Estimate `json:"connections"` // sum over the servers of the group in a run
	Utilisation Estimate `json:"utilisation"`
	Open        Estimate `json:"open"` // mean number of flows of a server over time
}

// ServerUse describes the use of one server: means over all runs.
type ServerUse struct {
	Name        string `json:"server"`
	Connections Number `json:"connections"`
	Utilisation Number `json:"utilisation"`
	Open        Number `json:"open"`
}

// Estimate is a value and half the width of its 95% confidence interval.
type Estimate struct {
	Value Number `json:"value"`
	Half  Number `json:"half-width"`
}

// Number is a number that is written as null or as an empty text if it does not exist, such as a
// mean of no flows.
type Number float64

// MarshalJSON implements json.Marshaler.
func (n Number) MarshalJSON() ([]byte, error) {
	if s := n.String(); s != "" {
		return []byte(s), nil
	}
	return []byte("null"), nil
}

// String formats the value with six significant digits.
func (n Number) String() string {
	if math.IsNaN(float64(n)) || math.IsInf(float64(n), 0) {
		return ""
	}
	return strconv.FormatFloat(float64(n), 'g', 6, 64)
}

// Time is a time since the start, in seconds.
type Time float64

// String formats the time with all digits.
func (t Time) String() string { return strconv.FormatFloat(float64(t), 'f', -1, 64) }

// Column is a quantity with its name.
type Column struct {
	Name     string
	Estimate Estimate
}

// Columns lists all quantities in their order.
func (q *Quantities) Columns() []Column {
	return []Column{
		{"mean", q.Mean}, {"p50", q.P50}, {"p90", q.P90}, {"p99", q.P99}, {"p99.9", q.P999},
		{"max", q.Max}, {"deviation", q.Deviation},
		{"refused", q.Refused}, {"timed-out", q.TimedOut}, {"lost", q.Lost}, {"broken", q.Broken},
		{"failed", q.Failed},
		{"hops", q.Hops}, {"wrongful", q.Wrongful}, {"untracked", q.Untracked}, {"recovered", q.Recovered},
		{"utilisation", q.Utilisation}, {"open", q.Open}, {"fairness", q.Fairness}, {"instant-fairness", q.InstantFairness},
	}
}

// Run simulates all cases and judges the results. Parallel is the number of runs at the same time.
// 0 stands for one per core. Progress, if not nil, is called after each run.
func (s *Scenario) Run(ctx context.Context, parallel int, progress func(done, total int)) (*Report, error) {
	var configs []*sim.Config
	for _, c := range s.Cases {
		config := *c.Config
		config.Every = s.Every.Seconds()
		configs = append(configs, &config)
	}
	results, err := sim.RunAll(ctx, configs, sim.Options{
		Seed: s.Seed, Runs: s.Runs, Parallel: parallel, Progress: progress,
	})
	if err != nil {
		return nil, err
	}
	report := &Report{
		Scenario: s.Name, Seed: s.Seed, Runs: s.Runs, Assertions: s.Judge(results),
		Warnings: []string{},
	}
	for i := range s.Cases {
		of := s.Cases[i].report(results[i], s.Every)
		report.Cases = append(report.Cases, of)
		report.Warnings = append(report.Warnings, s.Cases[i].warnings(results[i], s.Every, len(of.Series))...)
	}
	return report, nil
}

// warnings returns warnings about runs in which no flow was measured, about a series that has no
// intervals or too many, and about events after the last arrival. These problems cannot be found
// before the runs, which show how long a number of connections or a trace takes.
func (c *RunnableCase) warnings(r *sim.Result, every time.Duration, intervals int) (warnings []string) {
	unmeasured := 0
	last := 0.0
	for _, run := range r.Runs {
		last = max(last, run.LastArrival)
		if run.Flows() == 0 {
			unmeasured++
		}
	}
	if unmeasured > 0 {
		warnings = append(warnings, fmt.Sprintf("case %s: no flow was measured in %d of %d runs", c.Name, unmeasured, len(r.Runs)))
	}
	if every > 0 && intervals == 0 {
		warnings = append(warnings, fmt.Sprintf("case %s: no interval of %v is over when the last flow arrives", c.Name, every))
	} else if intervals == sim.MostIntervals {
		warnings = append(warnings, fmt.Sprintf("case %s: only the first %d intervals of %v are kept", c.Name, intervals, every))
	}
	for i, event := range c.Config.Events {
		late := 0 // runs in which the event was after the last arrival
		for _, run := range r.Runs {
			if event.At > run.LastArrival {
				late++
			}
		}
		if late > 0 {
			warnings = append(warnings, fmt.Sprintf("case %s: %s.at %gs is after the last arrival "+
				"in %d of %d runs, which was at %.6gs at the latest",
				c.Name, c.events[i], event.At, late, len(r.Runs), last))
		}
	}
	return warnings
}

func estimate(e sim.Estimate) Estimate { return Estimate{Number(e.Value), Number(e.Half)} }

// exact returns a value without a confidence interval.
func exact(value float64) Estimate { return Estimate{Number(value), Number(math.NaN())} }

// recovered returns the number of flows of a run that moved to another balancer and were found by
// it.
func recovered(r *sim.Result) sim.Estimate {
	return r.Estimate(func(run *sim.RunResult) float64 { return float64(run.Recovered) })
}

// failed returns the share of the flows that were not completed.
func failed(r *sim.Result) sim.Estimate {
	completed := r.Share(sim.Completed)
	return sim.Estimate{Value: 1 - completed.Value, Half: completed.Half}
}

// quantities returns all quantities of a result. The maximum and the deviation have no interval.
func quantities(r *sim.Result) Quantities {
	return Quantities{
		Mean:            estimate(r.Mean()),
		P50:             estimate(r.Quantile(0.5)),
		P90:             estimate(r.Quantile(0.9)),
		P99:             estimate(r.Quantile(0.99)),
		P999:            estimate(r.Quantile(0.999)),
		Max:             exact(r.Response.Max()),
		Deviation:       exact(r.Response.Deviation()),
		Refused:         estimate(r.Share(sim.Refused)),
		TimedOut:        estimate(r.Share(sim.TimedOut)),
		Lost:            estimate(r.Share(sim.Lost)),
		Broken:          estimate(r.Share(sim.Broken)),
		Failed:          estimate(failed(r)),
		Hops:            estimate(r.Hops()),
		Wrongful:        estimate(r.Wrongful()),
		Untracked:       estimate(r.Untracked()),
		Recovered:       estimate(recovered(r)),
		Utilisation:     estimate(r.Utilisation()),
		Open:            estimate(r.Open()),
		Fairness:        estimate(r.Fairness()),
		InstantFairness: estimate(r.InstantFairness()),
	}
}

// series returns the results of the intervals.
func series(r *sim.Result, every time.Duration) (all []Interval) {
	for i, of := range r.Intervals() {
		all = append(all, Interval{
			From: Time((time.Duration(i) * every).Seconds()), To: Time((time.Duration(i+1) * every).Seconds()),
			Flows: of.Flows(),
			Arrivals: estimate(of.Estimate(func(run *sim.RunResult) float64 {
				return float64(run.Flows()) / every.Seconds()
			})),
			Quantities: quantities(of),
		})
	}
	return all
}

// report returns the results of a case: for all servers, for each group, for each server, and for
// each interval of length every.
func (c *RunnableCase) report(r *sim.Result, every time.Duration) CaseReport {
	report := CaseReport{
		Name: c.Name, Flows: r.Flows(), Quantities: quantities(r), Series: series(r, every),
	}
	for i := range c.Groups {
		report.Groups = append(report.Groups, c.groupReport(int32(i), r))
	}
	for s := range c.Config.Servers {
		use := func(quantity func(*sim.ServerUse) float64) Number {
			return Number(r.Estimate(func(run *sim.RunResult) float64 { return quantity(&run.Servers[s]) }).Value)
		}
		report.Servers = append(report.Servers, ServerUse{
			Name:        c.Config.Servers[s].Name,
			Connections: use(connections), Utilisation: use(utilisation), Open: use(open),
		})
	}
	return report
}

func connections(u *sim.ServerUse) float64 { return float64(u.Connections) }
func utilisation(u *sim.ServerUse) float64 { return u.Utilisation }
func open(u *sim.ServerUse) float64        { return u.Open }

// groupReport sums up the use of the servers of a group. Connections are summed over the servers.
// Utilisation and open flows are means over the servers.
func (c *RunnableCase) groupReport(group int32, r *sim.Result) GroupReport {
	n := 0.0
	for s := range c.Config.Servers {
		if c.Config.Servers[s].Group == group {
			n++
		}
	}
	// sum returns the sum of a quantity over the servers of the group, divided by the number by.
	sum := func(quantity func(*sim.ServerUse) float64, by float64) Estimate {
		return estimate(r.Estimate(func(run *sim.RunResult) float64 {
			sum := 0.0
			for s := range c.Config.Servers {
				if c.Config.Servers[s].Group == group {
					sum += quantity(&run.Servers[s])
				}
			}
			return sum / by
		}))
	}
	return GroupReport{
		Name: c.Groups[group], Connections: sum(connections, 1), Utilisation: sum(utilisation, n), Open: sum(open, n),
	}
}
