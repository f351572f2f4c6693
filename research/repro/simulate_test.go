// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/tables"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/placement"
)

// TestManyServers compares the mean-field model with 10000 servers. They must differ by at most
// 1%.
func TestManyServers(t *testing.T) {
	for _, test := range []struct {
		load      float64
		threshold int
	}{{0.7, 2}, {0.88, 4}} {
		config, err := manyServersConfig(test.load, test.threshold, 50)
		testhost.Must(t, err)
		result, err := sim.Run(t.Context(), config, sim.Options{Seed: 1, Runs: 1, Parallel: 1})
		testhost.Must(t, err)
		s, err := steady(test.load, test.threshold)
		testhost.Must(t, err)
		if got, want := result.Mean().Value, s.MeanResponse(); math.Abs(got-want) > 0.01*want {
			t.Errorf("SR%d at %v: mean response time %v, model %v", test.threshold, test.load, got, want)
		}
		if got, want := result.Hops().Value, s.Rejected; math.Abs(got-want) > 0.01 {
			t.Errorf("SR%d at %v: %v are passed on, model %v", test.threshold, test.load, got, want)
		}
	}
}

// TestSettled checks how long servers that start empty take to the steady state. For SR2 at a high
// load it is much longer than for other policies: after 100 it still has 19% fewer flows.
func TestSettled(t *testing.T) {
	for _, test := range []struct {
		load        float64
		threshold   int
		least, most float64
	}{{0.5, 4, 200, 200}, {0.88, 4, 200, 200}, {0.95, 2, 1400, 1800}} {
		got, err := settlingTime(t.Context(), test.load, test.threshold, 200)
		testhost.Must(t, err)
		if got < test.least || got > test.most {
			t.Errorf("SR%d at %v: %v, want %v to %v", test.threshold, test.load, got, test.least, test.most)
		}
	}
}

// TestSweep checks the main result of the papers with a few batches: SR4 is more than twice as
// fast as single choice.
func TestSweep(t *testing.T) {
	r := &run{Settings: Settings{Seed: 1, Workers: 1}}
	results, err := r.sweep(t.Context(), srlbTestbed, hunters[:2], []float64{0.3, 0.88}, 4)
	testhost.Must(t, err)
	if got := ratio(results[0][1], results[1][1]); got < 1.8 || got > 2.8 {
		t.Errorf("SC / SR4 at 0.88: %v, want 2.3 ± 0.5", got)
	}
	if got := ratio(results[0][0], results[1][0]); got < 1 || got > 1.1 {
		t.Errorf("SC / SR4 at 0.3: %v, want 1 to 1.1", got)
	}
}

// TestSameSeed makes a simulated figure twice, and checks that both are equal.
func TestSameSeed(t *testing.T) {
	var results [2]Result
	for i, workers := range []int{1, 2} {
		r := &run{Settings: Settings{Seed: 5, Workers: workers}}
		testhost.Must(t, r.loadsOverTime(t.Context(), srlbTestbed, hunters[:2], 0.5))
		results[i] = r.result
	}
	if diff := cmp.Diff(results[0], results[1]); diff != "" {
		t.Errorf("one and two workers differ:\n%s", diff)
	}
	arriving := float64(srlbTestbed.queries) / srlbTestbed.rate(0.5)
	for _, c := range results[0].Charts {
		for _, series := range c.Series {
			if end := series.Points[len(series.Points)-1].X; end > arriving || end < arriving-1 {
				t.Errorf("%s, %s: ends after %v s, queries arrive for %v s", c.Title, series.Name, end, arriving)
			}
		}
	}
}

// TestCutOff checks that a few bars that are much higher than the others are cut off.
func TestCutOff(t *testing.T) {
	series := func(ys ...float64) []chart.Series { return []chart.Series{{Points: indexed(ys...)}} }
	if got := cutOff(series(1, 2, 3, 1, 2, 3, 1, 40)); got != 6 {
		t.Errorf("cut off at %v, want 6", got)
	}
	for _, high := range []float64{6, 7.9} {
		if got := cutOff(series(1, 2, 3, 1, 2, 3, 1, high)); got != 0 {
			t.Errorf("with a bar of %v: cut off at %v, want nowhere", high, got)
		}
	}
}

// TestHLBRate checks the work of flows for the resource that they use most.
func TestHLBRate(t *testing.T) {
	h := newHLBCluster() // 192 processors and 128 IO queues
	for _, test := range []struct {
		cpu, io float64 // seconds per flow
		want    float64 // flows per second
	}{
		{0.5, 0, 192 / 0.5},
		{0.75, 0.25, 192 / 0.75},
		{0.25, 0.75, 128 / 0.75},
	} {
		h.jobs = []sim.Stage{
			{Queue: sim.CPU, Work: sim.Exponential(test.cpu / 2)}, {Queue: sim.IO, Work: sim.Exponential(test.io)},
			{Queue: sim.CPU, Work: sim.Exponential(test.cpu / 2)},
		}
		if got := h.rate(0.9); math.Abs(got-0.9*test.want) > 1e-9 {
			t.Errorf("CPU %v s, IO %v s: %v flows a second, want %v", test.cpu, test.io, got, 0.9*test.want)
		}
	}
}

// TestHLBTestbed checks the rates: 680 pages a second at 85%, and files by the disks' load.
func TestHLBTestbed(t *testing.T) {
	list, err := rivals("LSQ")
	testhost.Must(t, err)
	meanFile := (0.1 + 0.2 + 0.5 + 0.75 + 1 + 2 + 5) / 7 / 125
	for _, test := range []struct {
		demand     []sim.Stage
		load, want float64
	}{{wikiDemand, 0.85, 680}, {loopDemand, 0.7, 70}, {fileDemand, 0.9, 0.9 * 7 / meanFile}} {
		c, err := hlbTestbed(list[0], test.demand, test.load, 1)
		testhost.Must(t, err)
		if got := c.Arrivals.(sim.Poisson).Rate; math.Abs(got-test.want) > 1e-9*test.want {
			t.Errorf("%v flows a second, want %v", got, test.want)
		}
	}
}

// TestGroupWeights lets HLB learn on the testbed that four processors are more than two. At first
// all weights are equal.
func TestGroupWeights(t *testing.T) {
	list, err := rivals("HLB")
	testhost.Must(t, err)
	c, err := hlbTestbed(list[0], wikiDemand, 0.9, 40)
	testhost.Must(t, err)
	var weights groupWeights
	c.SampleInterval, c.Sample = groupWeightsInterval, weights.look
	if _, err := sim.Run(t.Context(), c, sim.Options{Seed: 1, Runs: 2}); err != nil {
		t.Fatal(err)
	}
	points := weights.points()
	if len(points) < 15 || points[3].X != 4*groupWeightsInterval || weights.count[3] != 2 {
		t.Fatalf("%d samples, of %v runs: %v", len(points), weights.count, points)
	}
	if late := weights.mean(30, 40); late < 1.005 || late > 2 {
		t.Errorf("a ratio of weights of %v after 30 s", late)
	}
	if got, want := weights.mean(4, 8), (points[1].Y+points[2].Y)/2; math.Abs(got-want) > 1e-12 {
		t.Errorf("a mean of %v from 4 to 8 s, want %v", got, want)
	}
}

// TestFromSYN checks that rivals that count flows from the SYN have their own names and lines, and
// that other rivals are refused.
func TestFromSYN(t *testing.T) {
	list, err := fromSYN("LSQ", "SED", "HLB")
	testhost.Must(t, err)
	c := &contest{rivals: list, results: [][]*sim.Result{{{}, {}, {}}}}
	for i, name := range []string{"LSQ", "SED", "HLB"} {
		if list[i].name != name+", from the SYN" {
			t.Errorf("%s is called %q", name, list[i].name)
		}
		count := reflect.ValueOf(list[i].spec).Elem().FieldByName("Count").String()
		if count != string(placement.CountPlaced) {
			t.Errorf("%s counts flows when they are %q", name, count)
		}
	}
	drawn := c.chart("", places{at: []float64{0}}, chart.Axis{},
		func(*sim.Result) sim.Estimate { return sim.Estimate{} })
	for i, series := range drawn.Series {
		if series.Style != chart.Dashed || series.Like+countedFromSYN != list[i].name {
			t.Errorf("%s is drawn as %v, like %q", series.Name, series.Style, series.Like)
		}
	}
	if _, err := fromSYN("GSQ"); err == nil || err.Error() != "GSQ does not count flows by itself" {
		t.Errorf("error %v", err)
	}
}

// TestBest checks that the best of the others is neither the Oracle nor a rival that counts flows
// from the SYN.
func TestBest(t *testing.T) {
	c := &contest{}
	var results []*sim.Result
	for i, name := range []string{"Oracle", "LSQ, from the SYN", "HLB", "SED", "LSQ"} {
		c.rivals = append(c.rivals, rival{name: name})
		result := &sim.Result{Runs: []*sim.RunResult{{}}}
		result.Response.Add(float64(i + 1))
		results = append(results, result)
	}
	c.results = [][]*sim.Result{results}
	for want, without := range map[int][]string{2: nil, 3: {"HLB"}, 4: {"HLB", "SED"}} {
		if got := c.best(0, without...); got != results[want] {
			t.Errorf("without %v: a mean of %v, want %d", without, got.Mean().Value, want+1)
		}
	}
}

// TestServersNeeded checks the smallest number of servers that is as good as the target, in each
// run.
func TestServersNeeded(t *testing.T) {
	means := func(values ...float64) *sim.Result {
		result := &sim.Result{}
		for _, v := range values {
			run := &sim.RunResult{}
			run.Response.Add(v)
			result.Runs = append(result.Runs, run)
		}
		return result
	}
	got := serversNeeded(means(1, 1),
		[]*sim.Result{means(4, 4), means(2, 0.5), means(0.5, 2), means(0.25, 0.25)}, 34)
	if want := []float64{36, 35}; !slices.Equal(got, want) {
		t.Errorf("servers needed: %v, want %v", got, want)
	}
}

// TestHalves checks the sums over the halves of the cluster.
func TestHalves(t *testing.T) {
	servers := []sim.ServerUse{{Connections: 1, Open: 1}, {Connections: 2, Open: 1}, {Connections: 3, Open: 2}, {Connections: 6, Open: 4}}
	result := &sim.Result{Runs: []*sim.RunResult{{Servers: servers}}}
	if got := powerful(result).Value; got != 0.75 {
		t.Errorf("the second half has %v of the flows, want 0.75", got)
	}
	if got := queueRatio(result).Value; got != 3 {
		t.Errorf("the second half has %v times the queues, want 3", got)
	}
}

// TestWeightRatios checks that HLB infers which half is faster.
func TestWeightRatios(t *testing.T) {
	cluster := newHLBCluster()
	cluster.servers, cluster.cpus, cluster.balancers = 8, [2]int32{1, 4}, 1
	r := &run{Settings: Settings{Seed: 1, Workers: 1, Quick: true}}
	ratios, err := r.weightRatios(t.Context(), []hlbCluster{cluster}, 0.9, "")
	testhost.Must(t, err)
	if ratios[0].Value <= 1.005 || ratios[0].Value > 4 || !(ratios[0].Half > 0) {
		t.Errorf("ratio of weights %v, want more than 1 and at most 4, with an interval", ratios[0])
	}
}

// TestGains checks HLB-FIX, whose gain is 1/(n+1/2) in its n-th step. The steps are 0.5 s apart.
func TestGains(t *testing.T) {
	list, err := rivals("HLB-FIX")
	testhost.Must(t, err)
	var g gains
	one := settings([]hlbCluster{newHLBCluster()}, 0.9, list)
	one[0].watch = func(c *sim.Config, _ int) { g.watch(c) }
	r := &run{Settings: Settings{Seed: 1, Workers: 2}}
	if _, err := r.compete(t.Context(), one, 2); err != nil {
		t.Fatal(err)
	}
	points := g.series("", chart.Line).Points
	if len(points) < 40 {
		t.Fatalf("%d samples", len(points))
	}
	for i, p := range points {
		// The sample may be taken before the step at the same time.
		steps := p.X / 0.5
		if low, high := 1/(steps+0.5), 1/(steps-0.5); p.X != float64(i+1)*gainInterval || p.Y < low-1e-9 || p.Y > high+1e-9 {
			t.Errorf("after %v s: gain %v, want %v to %v", p.X, p.Y, low, high)
		}
	}
}

// TestMultiplesFail checks that the removal of a server moves flows of many others, if
// neighbouring servers have nearly the same permutation.
func TestMultiplesFail(t *testing.T) {
	for name, test := range map[string]struct {
		generator func(int, *rand.Rand) uint32
		want      [2]float64
	}{"ascending": {ascending, [2]float64{0.22, 0.057}}, "random": {anyGenerator, [2]float64{0.026, 0.014}}} {
		rates, err := failuresOfMultiples(1, 4, 8, test.generator)
		testhost.Must(t, err)
		for i := range rates {
			if math.Abs(rates[i]-test.want[i]) > 0.1*test.want[i] {
				t.Errorf("%s: %v, want %v", name, rates, test.want)
			}
		}
	}
	if rates, err := failuresOfMultiples(1, 1, 0, ascending); err != nil || rates != [2]float64{} {
		t.Errorf("%v, %v, though no server goes", rates, err)
	}
}

// TestPlaceLongFlows checks that servers take flows up to the threshold, and pass on later ones.
func TestPlaceLongFlows(t *testing.T) {
	table, err := tables.Build(resiliencyServers(10, 0), 1021, 2)
	testhost.Must(t, err)
	first, second := 0, 0
	for bucket, taken := range placeLongFlows(table, 1000, 8, rand.New(rand.NewPCG(1, 1))) {
		row := table.Row(bucket)
		for _, server := range taken {
			switch server {
			case row[0]:
				first++
			case row[1]:
				second++
			default:
				t.Fatalf("bucket %d: server %d is not in %v", bucket, server, row)
			}
		}
	}
	// Each server takes at most 8 flows as the first candidate. The second candidate takes any
	// flow.
	if first > 80 || first+second != 1000 {
		t.Errorf("%d flows with the first server, %d with the second", first, second)
	}
}

// TestCountResets checks that there are no resets without removals, and otherwise at least those
// of flows on removed servers.
func TestCountResets(t *testing.T) {
	for candidates := 1; candidates <= 2; candidates++ {
		r, err := countResets(1, 0, candidates)
		testhost.Must(t, err)
		if r[0].all != 0 {
			t.Errorf("%d candidates: %v resets though no server went", candidates, r[0].all)
		}
		for k := 1; k <= mostRemoved; k++ {
			gone := r[k].all - r[k].extra
			if mean := float64(k*resetFlows) / resetServers; gone < 0.4*mean || gone > 1.6*mean {
				t.Errorf("%d candidates, %d servers gone: %v of their flows, want about %.0f", candidates, k, gone, mean)
			}
			if r[k].extra == 0 || r[k].extra > 0.1*resetFlows {
				t.Errorf("%d candidates, %d servers gone: %v resets of others", candidates, k, r[k].extra)
			}
		}
	}
}

// TestEstimated checks that a point has the interval by Student's distribution, also of few runs:
// for three values, the factor is 4.303. The interval does not begin below 0.
func TestEstimated(t *testing.T) {
	half := 4.3027 / math.Sqrt(3)
	for first, low := range map[float64]float64{1: 0, 11: 12 - half} {
		got := estimated(7, sim.EstimateOf([]float64{first, first + 1, first + 2}))
		want := chart.Point{X: 7, Y: first + 1, Low: low, High: first + 1 + half}
		if math.Abs(got.Low-want.Low)+math.Abs(got.High-want.High) > 1e-3 || got.X != want.X || got.Y != want.Y {
			t.Errorf("%v, want %v", got, want)
		}
	}
	if got := estimated(7, sim.EstimateOf([]float64{2})); got != (chart.Point{X: 7, Y: 2}) {
		t.Errorf("one run: %v", got)
	}
}

// TestRivals checks that each name of the paper has a placement, also among two servers.
func TestRivals(t *testing.T) {
	names := append(slices.Clone(everyRival), "HLB-FIX", "GSQ", "LSQ2", "SED2", "HLB2", "Oracle2")
	list, err := rivals(names...)
	testhost.Must(t, err)
	for _, rival := range list {
		if _, _, err := rival.spec.Build(); err != nil {
			t.Errorf("%s: %v", rival.name, err)
		}
	}
}

// TestFitEquation6 finds the coefficients with which means were computed by equation (6), and the
// policy whose means are larger.
func TestFitEquation6(t *testing.T) {
	const unit, scale = 0.3, 0.9
	means := make([][]float64, len(hunterThresholds))
	for i, threshold := range hunterThresholds {
		for _, rho := range sixLBLoads {
			s, err := steady(rho*scale, threshold)
			testhost.Must(t, err)
			means[i] = append(means[i], unit*s.MeanResponse())
		}
	}
	below, above, err := fitEquation6(means)
	testhost.Must(t, err)
	if math.Abs(below-1) > 1e-6 || math.Abs(above-1) > 1e-6 {
		t.Errorf("equation and means differ by the factors %v and %v, want 1", below, above)
	}
	means[2][0] *= 1.2
	means[3][len(sixLBLoads)-1] /= 1.5
	below, above, err = fitEquation6(means)
	testhost.Must(t, err)
	if math.Abs(below-1.2) > 1e-6 || math.Abs(above-1.5) > 1e-6 {
		t.Errorf("the largest factors are %v and %v, want 1.2 and 1.5", below, above)
	}
}
