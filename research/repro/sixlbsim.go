// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/model"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/placement"
)

// sixLBLoads are the 20 loads of section VI-B2. They include the loads that the text names.
var sixLBLoads = []float64{
	0.05, 0.1, 0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.71, 0.75, 0.79, 0.83, 0.87, 0.89, 0.91,
	0.93, 0.95, 0.98,
}

// oneBatch is the number of runs in the papers: one batch of queries for each load.
const oneBatch = 1

// compareHunters checks the statements of both papers about mean response times. The results are
// those of hunters, by load. According to the papers, single choice takes up to 2.3 times as long
// as SR4. heavy is the load at which the papers have this largest ratio.
func (r *run) compareHunters(loads []float64, results [][]*sim.Result, heavy float64) {
	single, four, eight, sixteen, dynamic := results[0], results[1], results[2], results[3], results[4]
	at := slices.Index(loads, heavy)
	atHeavy := ratioOf(single[at], four[at], meanOfRun)
	largestAt, largest := largestRatio(single, four)
	r.about(fmt.Sprintf("SC / SR4 at ρ = %v", heavy), largestGain, atHeavy.Value,
		sampled(atHeavy, len(single[0].Runs), oneBatch),
		fmt.Sprintf("at ρ = %v it is %.2f", loads[largestAt], largest.Value))
	r.about("load at which SC / SR4 is largest", fmt.Sprint(heavy), loads[largestAt], digits, "")
	r.because("unexplained. It is not chance: among 20 single batches of SRLB's testbed, and 10 of " +
		"6LB's, the ratio of none is largest below ρ = 0.92. Nor are refused connections the cause, " +
		"because they begin at 96%%")
	for _, other := range []struct {
		name    string
		results []*sim.Result
	}{{"SR8", eight}, {"SR16", sixteen}} {
		r.smaller("SR4", fmt.Sprintf("%s at ρ = %v", other.name, heavy), four[at].Mean().Value,
			other.results[at].Mean().Value, "SR4 has the best response times, says the text")
		_, worst := largestRatio(other.results, single)
		r.atMost("largest "+other.name+" / SC at any load", "1", worst.Value,
			sampled(worst, len(single[0].Runs), oneBatch),
			"better for all loads, says the text; at light loads there is no difference to see")
	}
	worst := 0.0 // SRdyn, relative to the best static policy
	for j := range loads {
		best := min(four[j].Mean().Value, eight[j].Mean().Value, sixteen[j].Mean().Value)
		worst = max(worst, dynamic[j].Mean().Value/best)
	}
	r.notWorse("largest SRdyn / best static policy at any load", worst,
		"close to the best static policy, says the text")
	r.because("the threshold begins with 1, and follows the noise of 50 offers. At ρ = 0.95 with 48 " +
		"servers, SRdyn is 10%% worse than SR4. If it begins with 4, it is 7%% worse, and with a " +
		"window of 200 offers as well, 1%%")
}

// largestGain is the largest ratio of single choice to SR4 by both papers.
const largestGain = "2.3"

// markGain marks the largest ratio of single choice to SR4 by the papers in a chart of the hunters:
// the mean response time that single choice would have with the ratio, given that of SR4 here.
func markGain(c *chart.Chart, loads []float64, results [][]*sim.Result, heavy float64) {
	at := slices.Index(loads, heavy)
	y := mustParse(largestGain).Value * results[1][at].Mean().Value
	c.Series = append(c.Series, printed(c.Series[0].Name, chart.Point{X: heavy, Y: y}))
}

// figure10a draws the mean response times of the hunters by load, with those of the model.
func figure10a(ctx context.Context, r *run) error {
	results, err := r.sweep(ctx, sixLBTestbed, hunters, sixLBLoads, pick(r, 4, 10))
	if err != nil {
		return err
	}
	c := meanChart("Mean response time, 48 servers", hunters, sixLBLoads, results)
	deviation, err := r.addModel(&c, results)
	if err != nil {
		return err
	}
	means := make([][]float64, len(hunterThresholds))
	for i := range means {
		for _, result := range results[i] {
			means[i] = append(means[i], result.Mean().Value)
		}
	}
	below, above, err := fitEquation6(means)
	if err != nil {
		return err
	}
	c.Y.Max = 2
	markGain(&c, sixLBLoads, results, 0.87)
	r.draw(c)
	r.compareHunters(sixLBLoads, results, 0.87)
	r.alike("largest simulation / equation (6), or equation / simulation, below ρ = 0.9", below,
		"the model accurately fits the data, says the text, after a fit on SC")
	r.because("equation (6) is for servers of one processor, and those of the testbed have two. "+
		"The same model for two processors, without a fit, is at most %.1f%% off (dashed)",
		100*(deviation-1))
	r.differ("the same from ρ = 0.9 on", above, "the assumptions do not hold any more, says the text")
	r.remark("Dashed: section V's model, but for servers of two processors. The paper draws equation " +
		"(6), which is for one processor, with a fit on SC.")
	return nil
}

// addModel draws the response times of section V's model, but for servers with two processors. It
// returns the largest factor by which simulation and model differ below load 0.9. The factor is at
// least 1.
func (r *run) addModel(c *chart.Chart, results [][]*sim.Result) (deviation float64, err error) {
	for i, threshold := range hunterThresholds {
		series := chart.Series{
			Name: "model " + hunters[i].name + ", two processors", Style: chart.Dashed, Like: hunters[i].name,
		}
		value := func(rho float64) (float64, error) {
			s, err := model.SRc(rho, 2, threshold)
			if err != nil {
				return 0, err
			}
			return s.MeanResponse() * sixLBTestbed.job.Mean(), nil
		}
		for step := 1; step < 100; step++ {
			y, err := value(float64(step) / 100)
			if err != nil {
				return 0, err
			}
			series.Points = append(series.Points, chart.Point{X: float64(step) / 100, Y: y})
		}
		for j, rho := range sixLBLoads {
			y, err := value(rho)
			if err != nil {
				return 0, err
			}
			if ratio := results[i][j].Mean().Value / y; rho < modelEnd {
				deviation = max(deviation, ratio, 1/ratio)
			}
		}
		c.Series = append(c.Series, series)
	}
	return deviation, nil
}

// hunterThresholds are those of the first hunters; 0 is single choice.
var hunterThresholds = []int{0, 4, 8, 16}

// modelEnd is the load from which the model does not fit any more, according to section VI-B2.
const modelEnd = 0.9

// fitEquation6 fits equation (6) to the means of SC below modelEnd, by one coefficient of time and
// one of load, and applies both to all policies (footnote 5). The means have the order of
// hunterThresholds and sixLBLoads. It returns the largest factors by which means and equation
// differ: below modelEnd, and from there on. A factor is at least 1.
func fitEquation6(means [][]float64) (below, above float64, err error) {
	times := func(scale float64, threshold int) ([]float64, error) { // in mean service times
		var list []float64
		for _, rho := range sixLBLoads {
			s, err := steady(rho*scale, threshold)
			if err != nil {
				return nil, err
			}
			list = append(list, s.MeanResponse())
		}
		return list, nil
	}
	unit, scale, least := 0.0, 0.0, math.Inf(1)
	for thousandths := 500; thousandths < 1020; thousandths++ { // at 1.02, the largest load is 1
		s := float64(thousandths) / 1000
		list, err := times(s, 0)
		if err != nil {
			return 0, 0, err
		}
		// The unit with the least squares of the relative errors unit·x - 1.
		sum, squares, n := 0.0, 0.0, 0.0
		for j, rho := range sixLBLoads {
			if rho < modelEnd {
				x := list[j] / means[0][j]
				sum, squares, n = sum+x, squares+x*x, n+1
			}
		}
		if rest := n - sum*sum/squares; rest < least {
			unit, scale, least = sum/squares, s, rest
		}
	}
	for i, threshold := range hunterThresholds {
		list, err := times(scale, threshold)
		if err != nil {
			return 0, 0, err
		}
		for j, rho := range sixLBLoads {
			ratio := means[i][j] / (unit * list[j])
			if rho < modelEnd {
				below = max(below, ratio, 1/ratio)
			} else {
				above = max(above, ratio, 1/ratio)
			}
		}
	}
	return below, above, nil
}

// figure10b draws the loads of the servers over time, at the load 0.89.
func figure10b(ctx context.Context, r *run) error {
	return r.loadsOverTime(ctx, sixLBTestbed, hunters, 0.89)
}

// figure10c draws the distributions of response times at a light and a heavy load.
func figure10c(ctx context.Context, r *run) error {
	runs := pick(r, 4, 10)
	light, err := r.distributions(ctx, sixLBTestbed, hunters, 0.71, runs)
	if err != nil {
		return err
	}
	heavy, err := r.distributions(ctx, sixLBTestbed, hunters, 0.89, runs)
	if err != nil {
		return err
	}
	r.compareAtLightLoad(light, 0.71)
	r.compareAtHighLoad(heavy, 0.89)
	hops := times(light[1].Hops(), 100)
	r.about("flows that the second server takes, SR4 at ρ = 0.71, %", "38", hops.Value,
		sampled(hops, runs, oneBatch), "section VI-B6")
	r.because("conjecture: the testbed's processors were busier than ρ. With 85%% of them used, " +
		"37%% are passed on")
	return nil
}

// compareAtLightLoad checks the statements of both papers about mean response times at a light
// load. The results are those of hunters.
func (r *run) compareAtLightLoad(results []*sim.Result, rho float64) {
	single, four, eight, sixteen, dynamic := results[0], results[1], results[2], results[3], results[4]
	at := fmt.Sprintf(" at ρ = %v", rho)
	r.alike("SR16 / SC"+at, ratio(sixteen, single), "no improvement, says the text")
	r.smaller("SR8", "SC"+at, eight.Mean().Value, single.Mean().Value,
		"a small improvement, says the text")
	r.smaller("SR4", "SR8"+at, four.Mean().Value, eight.Mean().Value,
		"a substantial improvement, says the text")
	r.notWorse("SRdyn / SR4"+at, ratio(dynamic, four), "matches SR4, says the text")
}

// figure11a finds the number of servers with SR4 that are as fast as 48 servers with SC.
func figure11a(ctx context.Context, r *run) error {
	runs := pick(r, 4, 10)
	rate := sixLBTestbed.rate(0.71)
	var b batches
	b.add(sixLBTestbed, singleChoice, rate)
	const fewest = 34
	for n := fewest; n <= 48; n++ {
		t := sixLBTestbed
		t.servers = n
		b.add(t, sr4, rate)
	}
	results, err := r.simulateBatches(ctx, &b, runs)
	if err != nil {
		return err
	}
	target := results[0].Mean()
	c := chart.Chart{
		Title:  "Servers that SR4 needs for what 48 give with SC",
		X:      chart.Axis{Label: "servers"},
		Y:      chart.Axis{Label: "mean response time, s", Max: 3 * target.Value},
		Series: []chart.Series{{Name: "SR4", Style: chart.Marked}, {Name: "SC, 48 servers", Style: chart.Dashed}},
	}
	for i, result := range results[1:] {
		n := fewest + i
		mean := result.Mean()
		c.Series[0].Points = append(c.Series[0].Points, estimated(float64(n), mean))
		c.Series[1].Points = append(c.Series[1].Points, chart.Point{X: float64(n), Y: target.Value})
	}
	c.Series = append(c.Series, printed("SR4", chart.Point{X: 40, Y: 0.58}))
	r.draw(c)
	enough := sim.EstimateOf(serversNeeded(results[0], results[1:], fewest))
	r.about("servers that SR4 needs instead of 48", "40", enough.Value,
		sampled(enough, runs, oneBatch), "a reduction of 17%, says the text")
	r.because("conjecture: the testbed's processors were busier than ρ. At the rate that uses 82%% " +
		"of 48 servers, SR4 needs 41")
	r.about("mean response time of SC at ρ = 0.71, s", "0.58", target.Value,
		sampled(target, runs, oneBatch), "")
	r.because("two processors that keep their speed give 190 ms/(1-ρ²) = 0.38 s. Conjecture: they " +
		"were busier than ρ. With 82%% of them used, it is 0.58 s")
	return nil
}

// serversNeeded returns, for each run, the smallest number of servers with which the mean response
// time is at most that of the target. If no number is enough, it returns the largest one.
// results[i] is the result with fewest+i servers.
func serversNeeded(target *sim.Result, results []*sim.Result, fewest int) []float64 {
	needed := make([]float64, len(target.Runs))
	for run := range needed {
		n := 0
		for n < len(results)-1 && meanOfRun(results[n].Runs[run]) > meanOfRun(target.Runs[run]) {
			n++
		}
		needed[run] = float64(fewest + n)
	}
	return needed
}

// figure11b varies the size of the table. In a small table, servers have unequal shares, which
// depend on their names.
func figure11b(ctx context.Context, r *run) error {
	experiments := pick(r, 4, 10)
	rate := sixLBTestbed.rate(0.71)
	var sizes []int
	for m := 64; m <= 65536; m *= 2 {
		sizes = append(sizes, m)
	}
	var b batches
	for _, m := range sizes {
		for e := range experiments {
			t := sixLBTestbed
			t.buckets, t.experiment = m, e
			b.add(t, sr4, rate)
		}
	}
	for e := range experiments {
		t := sixLBTestbed
		t.experiment = e
		b.add(t, singleChoice, rate)
	}
	// The testbed may have been busier than ρ: see docs/research/reproduction.md.
	const small, busier = 128, 0.82
	for _, contender := range []contender{sr4, singleChoice} {
		for e := range experiments {
			t := sixLBTestbed
			t.experiment = e
			if contender.name == sr4.name {
				t.buckets = small
			}
			b.add(t, contender, t.rate(busier))
		}
	}
	results, err := r.simulateBatches(ctx, &b, 1)
	if err != nil {
		return err
	}
	// The means have the order of the batches: SR4 at each size, then single choice, then SR4 and
	// single choice at the higher load.
	var means []sim.Estimate
	for batch := range slices.Chunk(results, experiments) {
		var values []float64
		for _, result := range batch {
			values = append(values, result.Mean().Value)
		}
		means = append(means, sim.EstimateOf(values))
	}
	after := func(i int) float64 { return means[len(sizes)+i].Value }
	single, busierSR4, busierSingle := after(0), after(1), after(2)
	c := chart.Chart{
		Title:  "Mean response time by size of the table, ρ = 0.71",
		X:      chart.Axis{Label: "buckets, M", Log: true},
		Y:      chart.Axis{Label: "mean response time, s", Max: 2 * single},
		Series: []chart.Series{{Name: "SR4", Style: chart.Marked}, {Name: "SC, M = 65536", Style: chart.Dashed}},
	}
	for i, m := range sizes {
		c.Series[0].Points = append(c.Series[0].Points, estimated(float64(m), means[i]))
		c.Series[1].Points = append(c.Series[1].Points, chart.Point{X: float64(m), Y: single})
	}
	r.draw(c)
	at := func(m int) float64 { return means[slices.Index(sizes, m)].Value }
	const why = "unexplained. The names of the servers determine which of them get larger shares, " +
		"but with ten sets of names, the ratio is %s"
	r.atMost("SR4 with M = 256 / SC", "1", at(256)/single, stated, "")
	r.atLeast("SR4 with M = 128 / SC", "1", at(small)/single, stated, "")
	r.because(why, "0.71 to 0.74")
	r.alike("SR4 with M = 2048 / M = 65536", at(2048)/at(65536),
		"almost identical for large tables, says the text")
	r.differ("SR4 with M = 1024 / M = 65536", at(1024)/at(65536),
		"a noticeable influence from M = 1024 down, says the text")
	r.because(why, "1.00 to 1.01")
	r.remark("If the testbed's processors were busier than ρ, this does not explain M = %d. With "+
		"%.0f%% of them used, SR4 with M = %d / SC is %.2f.", small, 100*busier, small,
		busierSR4/busierSingle)
	return nil
}

// figure11e compares SC and SRdyn with the centralised policies: round-robin, and round-robin by
// weights that follow feedback from the servers.
func figure11e(ctx context.Context, r *run) error {
	contenders := []contender{singleChoice, roundRobin, feedback, srDynamic}
	t := sixLBTestbed
	t.balancers = 1 // the centralised policies need a single balancer; SC and SRdyn do not care
	results, err := r.sweep(ctx, t, contenders, sixLBLoads, pick(r, 4, 10))
	if err != nil {
		return err
	}
	c := meanChart("Mean response time with centralized policies", contenders, sixLBLoads, results)
	c.Y.Max = 2
	r.draw(c)
	for _, rho := range []float64{0.79, 0.89} {
		at := slices.Index(sixLBLoads, rho)
		mean := func(i int) float64 { return results[i][at].Mean().Value }
		r.smaller("round-robin", fmt.Sprintf("SC at ρ = %v", rho), mean(1), mean(0), "")
		r.smaller("SRdyn", fmt.Sprintf("round-robin at ρ = %v", rho), mean(3), mean(1), "")
		r.smaller("feedback", fmt.Sprintf("round-robin at ρ = %v", rho), mean(2), mean(1), "")
		r.smaller("SRdyn", fmt.Sprintf("feedback at ρ = %v", rho), mean(3), mean(2),
			"")
		r.because("the feedback here is exact, has no delay and costs servers nothing. If it comes " +
			"every 0.6 s instead of every 0.2 s, SRdyn is better (second chart)")
	}
	light := 1.0 // the largest ratio of SRdyn to round-robin, or the reverse, at light loads
	for i, rho := range sixLBLoads {
		if rho <= 0.7 {
			light = max(light, ratio(results[3][i], results[1][i]),
				ratio(results[1][i], results[3][i]))
		}
	}
	r.alike("largest SRdyn / round-robin, or round-robin / SRdyn, up to ρ = 0.7", light,
		"equivalent results for light loads, says the text")
	return r.feedbackByInterval(ctx, t, 0.89)
}

// feedbackByInterval draws the response times of round-robin with feedback by the interval between
// polls, and those of SRdyn for comparison.
func (r *run) feedbackByInterval(ctx context.Context, t testbed, rho float64) error {
	const ms = time.Millisecond
	intervals := []time.Duration{200 * ms, 400 * ms, 600 * ms, 800 * ms, 1000 * ms}
	contenders := []contender{srDynamic}
	for _, interval := range intervals {
		every := func(testbed) placement.Spec { return feedbackEvery(interval) }
		contenders = append(contenders, contender{feedback.name, every})
	}
	results, err := r.sweep(ctx, t, contenders, []float64{rho}, pick(r, 4, 10))
	if err != nil {
		return err
	}
	c := chart.Chart{
		Title:  fmt.Sprintf("Feedback by age, ρ = %v", rho),
		X:      chart.Axis{Label: "interval between polls, s"},
		Y:      chart.Axis{Label: "mean response time, s"},
		Series: []chart.Series{{Name: feedback.name, Style: chart.Marked}, {Name: srDynamic.name, Style: chart.Dashed}},
	}
	for i, interval := range intervals {
		x := interval.Seconds()
		c.Series[0].Points = append(c.Series[0].Points, estimated(x, results[i+1][0].Mean()))
		c.Series[1].Points = append(c.Series[1].Points, chart.Point{X: x, Y: results[0][0].Mean().Value})
	}
	r.draw(c)
	return nil
}

// figure11f varies the deviation of the jobs. They have a lognormal distribution, whose median is
// that of the exponential one.
func figure11f(ctx context.Context, r *run) error {
	median := sixLBTestbed.job.Mean() * math.Ln2
	deviations := []float64{0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3}
	contenders := []contender{singleChoice, srDynamic, roundRobin}
	rate := sixLBTestbed.rate(0.71)
	var b batches
	for _, contender := range contenders {
		for _, deviation := range deviations {
			t := sixLBTestbed
			// With w = exp(σ²) the deviation is median·√(w(w-1)).
			w := (1 + math.Sqrt(1+4*deviation*deviation/(median*median))) / 2
			t.job = sim.Lognormal(median, math.Sqrt(math.Log(w)))
			b.add(t, contender, rate)
		}
	}
	results, err := r.simulateBatches(ctx, &b, pick(r, 4, 10))
	if err != nil {
		return err
	}
	c := chart.Chart{
		Title: "Mean response time by variance of the jobs",
		X:     chart.Axis{Label: "standard deviation of job times, s"},
		Y:     chart.Axis{Label: "mean response time, s"},
	}
	last := len(deviations) - 1
	mean := func(contender, i int) float64 { return results[contender*len(deviations)+i].Mean().Value }
	for i, contender := range contenders {
		series := chart.Series{Name: contender.name, Style: chart.Marked}
		for j, deviation := range deviations {
			result := results[i*len(deviations)+j]
			series.Points = append(series.Points, estimated(deviation, result.Mean()))
		}
		c.Series = append(c.Series, series)
	}
	r.draw(c)
	r.smaller("round-robin", "SRdyn, constant jobs", mean(2, 0), mean(1, 0), "")
	r.smaller("SRdyn", "SC, constant jobs", mean(1, 0), mean(0, 0), "")
	r.smaller("SRdyn", "SC, most skewed jobs", mean(1, last), mean(0, last), "")
	r.smaller("SRdyn", "round-robin, most skewed jobs", mean(1, last), mean(2, last), "")
	r.remark("The rate is that of ρ = 0.71 for exponential jobs. The median of the jobs is " +
		"constant, so their mean, and with it the load, grows with their deviation.")
	return nil
}
