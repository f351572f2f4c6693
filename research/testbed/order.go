// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/gonum/stat"
	"gonum.org/v1/gonum/stat/distuv"

	"github.com/segue-lb/segue/research/sim"
)

// Step compares two cases that follow each other in the order of the cases at a point. The case
// with the shortest mean response time is first in this order.
type Step struct {
	Better, Worse string
	// Less is the mean, over the seeds, of 1 - b/w. Here b and w are the means of Better and Worse,
	// which have the same requests for each seed. Half is half of the 95% confidence interval of
	// Less (Student), and NaN for a single seed.
	Less, Half float64
	// Confidence is the probability that Better is better, by Student's distribution: 0 to 1. It is
	// NaN for a single seed, and if Less is the same for all seeds.
	Confidence float64
	// Simulated is Less in the simulator. It is NaN if the simulator does not have both cases.
	Simulated float64
}

// String is the sentence for readers, such as "infer takes 12.1% ± 3.0 less than hlb (simulated:
// 13.4%), with a confidence of 99.2%".
func (s Step) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s takes %.1f%%", s.Better, 100*s.Less)
	if !math.IsNaN(s.Half) {
		fmt.Fprintf(&b, " ± %.1f", 100*s.Half)
	}
	fmt.Fprintf(&b, " less than %s", s.Worse)
	if !math.IsNaN(s.Simulated) {
		fmt.Fprintf(&b, " (simulated: %.1f%%)", 100*s.Simulated)
	}
	if !math.IsNaN(s.Confidence) {
		fmt.Fprintf(&b, ", with a confidence of %.1f%%", 100*s.Confidence)
	}
	return b.String()
}

// ComparesTimes tells whether the runs measure the response times of requests.
func (r *Results) ComparesTimes() bool {
	return r.Kind != KindChange && r.Kind != KindHold && r.Kind != KindForward
}

// Order compares each case at a point with the next one, in the order of their mean response times.
// It leaves out cases without runs.
func (r *Results) Order(point float64) (steps []Step) {
	means := map[string]float64{}
	var names []string
	for _, name := range r.Cases {
		if s := r.Summarise(name, point); s != nil {
			means[name] = s.Measured.Mean
			names = append(names, name)
		}
	}
	slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(means[a], means[b]) })
	for i := 1; i < len(names); i++ {
		steps = append(steps, r.step(names[i-1], names[i], point))
	}
	return steps
}

// step compares two cases at a point, seed by seed.
func (r *Results) step(better, worse string, point float64) Step {
	less := r.reductions(better, worse, point, func(run *Run) *Response { return &run.Measured })
	simulated := r.reductions(better, worse, point, func(run *Run) *Response { return run.Simulated })
	e := sim.EstimateOf(less)
	return Step{
		Better: better, Worse: worse, Less: e.Value, Half: e.Half, Confidence: confidence(less),
		Simulated: sim.EstimateOf(simulated).Value,
	}
}

// reductions returns, for each seed, the share by which the mean of the case better is below that
// of the case worse. response selects the measured or the simulated response of a run. Seeds for
// which a case lacks this response are left out.
func (r *Results) reductions(
	better, worse string, point float64, response func(*Run) *Response,
) (all []float64) {
	ofWorse := map[uint64]*Response{} // by seed
	for i := range r.Runs {
		if run := &r.Runs[i]; run.Case == worse && run.Point == point {
			ofWorse[run.Seed] = response(run)
		}
	}
	for i := range r.Runs {
		run := &r.Runs[i]
		if run.Case != better || run.Point != point {
			continue
		}
		if b, w := response(run), ofWorse[run.Seed]; b != nil && w != nil {
			all = append(all, 1-b.Mean/w.Mean)
		}
	}
	return all
}

// confidence returns the probability that the mean of a quantity is above 0, by samples of it. It
// is NaN for fewer than two samples, and if all samples are equal.
func confidence(samples []float64) float64 {
	n := float64(len(samples))
	mean, deviation := stat.MeanStdDev(samples, nil)
	if n < 2 || deviation == 0 {
		return math.NaN()
	}
	student := distuv.StudentsT{Sigma: 1, Nu: n - 1}
	return student.CDF(mean / (deviation / math.Sqrt(n)))
}
