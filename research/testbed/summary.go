// SPDX-License-Identifier: Apache-2.0

package testbed

import "github.com/segue-lb/segue/research/sim"

// Summary sums up the runs of a case at a point. Requests and failures are sums over the seeds.
// Other quantities are means over the seeds, unless noted.
type Summary struct {
	Case      string
	Point     float64
	Load      float64
	Balancers int
	Seeds     int
	Requests  uint64
	Failed    uint64
	Failures  map[string]uint64
	Warnings  []string // of all runs
	// FromEven is the largest of the runs' Run.FromEven.
	FromEven float64
	// Fewest and Most are the smallest and the largest number of responses of a server in a run.
	Fewest, Most uint64
	Measured     Response
	// Half has half of the 95% confidence interval of each measured time, over the seeds (Student).
	// It is nil for a single run.
	Half *Response
	// Simulated, Bound and Model are nil unless all runs have them.
	Simulated *Response
	Bound     *Response
	Model     *Response
}

// Summarise returns the summary of a case at a point, or nil if none of its runs has ended.
func (r *Results) Summarise(name string, point float64) *Summary {
	s := &Summary{Case: name, Point: point, Failures: map[string]uint64{}, Warnings: []string{}}
	var measured, simulated, bound, model []*Response
	for i := range r.Runs {
		run := &r.Runs[i]
		if run.Case != name || run.Point != point {
			continue
		}
		s.Seeds++
		s.Load, s.Balancers = run.Load, run.Balancers
		s.Requests += run.Requests
		s.Failed += run.Failed
		for outcome, n := range run.Failures {
			s.Failures[outcome] += n
		}
		s.addShares(run)
		s.Warnings = append(s.Warnings, run.Warnings...)
		measured = append(measured, &run.Measured)
		simulated = append(simulated, run.Simulated)
		bound = append(bound, run.Bound)
		model = append(model, run.Model)
	}
	if s.Seeds == 0 {
		return nil
	}
	s.Measured, s.Half = *meanOf(measured), halfOf(measured)
	s.Simulated, s.Bound, s.Model = meanOf(simulated), meanOf(bound), meanOf(model)
	return s
}

// addShares adds the measures of how evenly a run's responses are distributed over the servers.
func (s *Summary) addShares(run *Run) {
	if len(run.Shares) == 0 {
		return
	}
	s.FromEven = max(s.FromEven, run.FromEven())
	for i, share := range run.Shares {
		if s.Seeds == 1 && i == 0 { // the first server of the first run
			s.Fewest = share.Responses
		}
		s.Fewest, s.Most = min(s.Fewest, share.Responses), max(s.Most, share.Responses)
	}
}

// meanOf returns the means of all times and of Large, or nil if one response is nil.
func meanOf(all []*Response) *Response {
	var mean Response
	n := float64(len(all))
	for _, r := range all {
		if r == nil {
			return nil
		}
		mean.Mean += r.Mean / n
		mean.P50 += r.P50 / n
		mean.P90 += r.P90 / n
		mean.P99 += r.P99 / n
		mean.Large += r.Large / n
	}
	return &mean
}

// halfOf returns half of the confidence interval of each time, or nil for a single response.
func halfOf(all []*Response) *Response {
	if len(all) < 2 {
		return nil
	}
	half := func(quantity string) float64 {
		var values []float64
		for _, r := range all {
			values = append(values, responseQuantities[quantity](r))
		}
		return sim.EstimateOf(values).Half
	}
	return &Response{Mean: half("mean"), P50: half("p50"), P90: half("p90"), P99: half("p99")}
}
