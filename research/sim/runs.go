// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"sync"

	"gonum.org/v1/gonum/stat"
	"gonum.org/v1/gonum/stat/distuv"
)

// Options tell how often and how to run configurations.
type Options struct {
	// Seed determines all random numbers of all runs. Run r has the same flows in all
	// configurations with the same arrivals and jobs.
	Seed uint64
	// Runs is the number of runs of each configuration, at least 1.
	Runs int
	// Parallel is the number of runs at the same time. 0 means one per core. It does not change
	// the results.
	Parallel int
	// Progress, if not nil, is called after each run. Calls do not overlap.
	Progress func(done, total int)
}

// Result is the result of all runs of a configuration.
type Result struct {
	Runs []*RunResult
	// Response contains the times of all runs.
	Response Histogram
}

// Run simulates one configuration.
func Run(ctx context.Context, c *Config, o Options) (*Result, error) {
	results, err := RunAll(ctx, []*Config{c}, o)
	if err != nil {
		return nil, err
	}
	return results[0], nil
}

// RunAll simulates several configurations, and returns their results in the same order. After the
// first error, or when ctx ends, it ends all runs and returns the error.
func RunAll(ctx context.Context, configs []*Config, o Options) ([]*Result, error) {
	if o.Runs < 1 {
		return nil, fmt.Errorf("%d runs: must be at least 1", o.Runs)
	}
	results := make([]*Result, len(configs))
	for i := range results {
		results[i] = &Result{Runs: make([]*RunResult, o.Runs)}
	}
	total := len(configs) * o.Runs
	err := parallel(ctx, total, o, func(ctx context.Context, i int) (err error) {
		which, run := i/o.Runs, i%o.Runs
		results[which].Runs[run], err = simulate(ctx, configs[which], runSeed(o.Seed, run), run)
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, result := range results {
		for _, run := range result.Runs {
			result.Response.Merge(&run.Response)
		}
	}
	return results, nil
}

// runSeed returns the seed of one run.
func runSeed(seed uint64, run int) uint64 { return mix(seed + uint64(run)*golden) }

// parallel calls do for 0 to n-1 from a pool of goroutines, and waits for them. After an error of
// do, or when ctx ends, it makes no more calls and returns the error.
func parallel(ctx context.Context, n int, o Options, do func(ctx context.Context, i int) error) error {
	workers := o.Parallel
	if workers <= 0 {
		workers = runtime.GOMAXPROCS(0)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var mutex sync.Mutex
	next, done := 0, 0
	take := func() (int, bool) {
		mutex.Lock()
		defer mutex.Unlock()
		next++
		return next - 1, next <= n && ctx.Err() == nil
	}
	finished := func() {
		mutex.Lock()
		defer mutex.Unlock()
		done++
		if o.Progress != nil {
			o.Progress(done, n)
		}
	}
	var pool sync.WaitGroup
	for range min(workers, n) {
		pool.Go(func() {
			for i, ok := take(); ok; i, ok = take() {
				if err := do(ctx, i); err != nil {
					cancel(err)
					return
				}
				finished()
			}
		})
	}
	pool.Wait()
	return context.Cause(ctx)
}

// Estimate is a value with half the width of its 95% confidence interval. Half is NaN if there are
// too few values for an interval.
type Estimate struct{ Value, Half float64 }

// confidence is the level of the intervals.
const confidence = 0.95

// Estimate returns the mean of a quantity over the runs, with its confidence interval by Student's
// distribution. It ignores runs in which the quantity is NaN, such as a mean over no flows.
func (r *Result) Estimate(quantity func(*RunResult) float64) Estimate {
	values := make([]float64, 0, len(r.Runs))
	for _, run := range r.Runs {
		if value := quantity(run); !math.IsNaN(value) {
			values = append(values, value)
		}
	}
	return EstimateOf(values)
}

// EstimateOf returns the mean of independent values, with its confidence interval by Student's
// distribution. Without values, Value and Half are NaN.
func EstimateOf(values []float64) Estimate {
	return Estimate{Value: stat.Mean(values, nil), Half: halfWidth(values)}
}

// halfWidth returns half the width of the confidence interval of the mean of independent values.
func halfWidth(values []float64) float64 {
	n := float64(len(values))
	if n < 2 {
		return math.NaN()
	}
	t := distuv.StudentsT{Sigma: 1, Nu: n - 1}.Quantile((1 + confidence) / 2)
	return t * stat.StdDev(values, nil) / math.Sqrt(n)
}

// Mean returns the mean response time in seconds. Its confidence interval comes from the means of
// the runs. If there is only one run, it comes from the means of batches of flows that ended one
// after the other.
func (r *Result) Mean() Estimate {
	e := r.Estimate(func(run *RunResult) float64 { return run.Response.Mean() })
	if len(r.Runs) == 1 {
		e.Half = halfWidth(r.Runs[0].batches.means())
	}
	e.Value = r.Response.Mean()
	return e
}

// Quantile returns the response time in seconds that a share q of all flows of all runs do not
// exceed. q is 0 to 1. The confidence interval comes from the quantiles of the runs.
func (r *Result) Quantile(q float64) Estimate {
	e := r.Estimate(func(run *RunResult) float64 { return run.Response.Quantile(q) })
	e.Value = r.Response.Quantile(q)
	return e
}

// Share returns the share of the flows with an outcome, 0 to 1.
func (r *Result) Share(o Outcome) Estimate {
	return r.perFlow(func(run *RunResult) uint64 { return run.Outcomes[o] })
}

// Hops returns the mean number of times that a flow was passed on.
func (r *Result) Hops() Estimate {
	return r.perFlow(func(run *RunResult) uint64 { return run.Hops })
}

// Wrongful returns the share of flows that were passed on wrongly.
func (r *Result) Wrongful() Estimate {
	return r.perFlow(func(run *RunResult) uint64 { return run.Wrongful })
}

// Untracked returns the share of flows without an entry in the flow table.
func (r *Result) Untracked() Estimate {
	return r.perFlow(func(run *RunResult) uint64 { return run.Untracked })
}

// perFlow returns a count divided by the number of flows of all runs. The confidence interval
// comes from the runs.
func (r *Result) perFlow(count func(*RunResult) uint64) Estimate {
	e := r.Estimate(func(run *RunResult) float64 { return float64(count(run)) / float64(run.Flows()) })
	sum := uint64(0)
	for _, run := range r.Runs {
		sum += count(run)
	}
	e.Value = float64(sum) / float64(r.Flows())
	return e
}

// Fairness returns the mean of RunResult.Fairness.
func (r *Result) Fairness() Estimate {
	return r.Estimate(func(run *RunResult) float64 { return run.Fairness })
}

// InstantFairness returns the mean of RunResult.InstantFairness.
func (r *Result) InstantFairness() Estimate {
	return r.Estimate(func(run *RunResult) float64 { return run.InstantFairness })
}

// Utilisation returns the mean of RunResult.Utilisation.
func (r *Result) Utilisation() Estimate {
	return r.Estimate(func(run *RunResult) float64 { return run.Utilisation })
}

// Open returns the mean of RunResult.Open.
func (r *Result) Open() Estimate {
	return r.Estimate(func(run *RunResult) float64 { return run.Open })
}

// Intervals returns the results of each interval of Config.Every that all runs have. They have no
// servers, no balancers and no series.
func (r *Result) Intervals() []*Result {
	n := math.MaxInt
	for _, run := range r.Runs {
		n = min(n, len(run.Series))
	}
	intervals := make([]*Result, n)
	for i := range intervals {
		intervals[i] = &Result{}
		for _, run := range r.Runs {
			only := &RunResult{Run: run.Run, Seed: run.Seed, Measures: run.Series[i]}
			intervals[i].Runs = append(intervals[i].Runs, only)
			intervals[i].Response.Merge(&run.Series[i].Response)
		}
	}
	return intervals
}

// Flows returns the number of measured flows in all runs.
func (r *Result) Flows() uint64 {
	sum := uint64(0)
	for _, run := range r.Runs {
		sum += run.Flows()
	}
	return sum
}
