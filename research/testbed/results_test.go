// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"compress/gzip"
	"context"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab/bench"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/placement"
)

const twoCases = `
title: t
points: [0.5, 0.8]
seeds: 2
connections: 2000
cases: [{name: sc, placement: hash}, {name: sr4, placement: hunt, accept: {policy: static, threshold: 4}}]
claims:
  - {text: better, quantity: mean, of: sc, over: sr4, at: 0.8, paper: at least 2, rule: stated}
  - {text: largest, quantity: p99, of: sc, over: sr4, ours: at most 3, rule: stated}
`

func parse(t *testing.T, text string) *Experiment {
	t.Helper()
	e, err := Parse("x", []byte(text))
	testhost.Must(t, err)
	return e
}

// Runs are stored one by one. Results of the same experiment continue, and results of another one
// are refused.
func TestStoreContinues(t *testing.T) {
	directory := t.TempDir()
	e := parse(t, twoCases)
	s := e.with(Options{})
	open := func(s settings, text string, full bool) (*store, error) {
		return openStore(directory, s, []byte(text), full)
	}
	first, err := open(s, twoCases, false)
	testhost.Must(t, err)
	plan := s.plan()
	if len(plan) != 8 || first.results.Planned != 8 {
		t.Fatalf("%d runs are planned, and the results say %d; want 8", len(plan), first.results.Planned)
	}
	for _, p := range plan[:3] {
		run := &Run{Case: p.Case.Name, Point: p.point, Seed: p.seed, Measured: Response{Mean: 1}}
		testhost.Must(t, first.add(run))
	}
	if _, err := open(s, twoCases, false); err == nil || !strings.Contains(err.Error(), "another segue-lab lab run") {
		t.Errorf("two at the same time: got %v, want an error that says so", err)
	}
	testhost.Must(t, first.close())
	second, err := open(s, twoCases, false)
	testhost.Must(t, err)
	if err := second.finish(); err != nil || !second.results.Environment.Finished.IsZero() {
		t.Errorf("a command that made no run: finished at %v, error %v; want no change",
			second.results.Environment.Finished, err)
	}
	testhost.Must(t, second.close())
	for i, p := range plan {
		if (second.run(p) != nil) != (i < 3) {
			t.Errorf("run %d is there: %v", i, second.run(p) != nil)
		}
	}
	if second.results.Claims[0].Met != nil {
		t.Error("a claim is judged while runs are missing")
	}
	faster := e.with(Options{Speed: 2})
	fewer := e.with(Options{Seeds: 1})
	for name, open := range map[string]func() (*store, error){
		"another speed":      func() (*store, error) { return open(faster, twoCases, false) },
		"fewer seeds":        func() (*store, error) { return open(fewer, twoCases, false) },
		"another text":       func() (*store, error) { return open(s, twoCases+"#\n", false) },
		"the paper's length": func() (*store, error) { return open(s, twoCases, true) },
	} {
		if _, err := open(); err == nil || !strings.Contains(err.Error(), directory+": has") {
			t.Errorf("%s: got %v, want an error about the results in the directory", name, err)
		}
	}
}

func TestReadRefusesADamagedFile(t *testing.T) {
	directory := t.TempDir()
	path := filepath.Join(directory, "results.json")
	testhost.Must(t, os.WriteFile(path, []byte("{"), 0o644))
	if _, err := Read(directory); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v, want an error that names %s", err, path)
	}
}

func TestClaims(t *testing.T) {
	e := parse(t, twoCases)
	r := newResults(e.with(Options{}), []byte(twoCases), false)
	for _, c := range []struct {
		name      string
		mean, p99 float64
	}{{"sc", 3, 12}, {"sr4", 1, 3}} {
		for _, point := range r.Points {
			for seed := range 2 {
				mean := c.mean + 0.1*float64(2*seed-1)
				r.Runs = append(r.Runs, Run{
					Case: c.name, Point: point, Seed: uint64(seed + 1),
					Measured: Response{Mean: mean, P99: c.p99}, Simulated: &Response{Mean: c.mean, P99: c.p99 / point},
					Bound: &Response{Mean: 0.5},
					Model: &Response{Mean: 2 * c.mean * c.mean}, Requests: 100, Failed: uint64(4 + 2*seed),
					Fairness: 1 / c.mean,
				})
			}
		}
	}
	r.Claims = append(r.Claims,
		Claim{Quantity: "mean", Of: "sr4", Ours: "simulated", Rule: "monte-carlo"},
		Claim{Quantity: "failed", Of: "sc", Paper: "at most 0.04", Rule: "stated"},
		Claim{Quantity: "fairness", Of: "sr4", Over: "sc", Paper: "at least 3", Rule: "drawing"},
		Claim{Quantity: "mean", Of: "sr4", At: 0.5, Over: "sc", OverAt: 0.8, Paper: "0.2", Rule: "digits"},
		Claim{Text: "x", Unjudged: "there is no time"})
	for i := range r.Claims {
		r.Claims[i].judge(&r)
	}
	first := r.Claims[0]
	// The ratios of the two seeds are 2.9/0.9 and 3.1/1.1, with the mean 3.020.
	if !*first.Met || math.Abs(*first.Measured-3.020) > 1e-3 ||
		first.Condition != "mean(sc) / mean(sr4) at 0.8: at least 2 (paper; as stated)" {
		t.Errorf("the first claim: %v %v %q", *first.Met, *first.Measured, first.Condition)
	}
	if math.Abs(*first.Model-9) > 1e-9 || *first.Simulated != 3 {
		t.Errorf("the first claim: model %v, simulated %v", *first.Model, *first.Simulated)
	}
	for i, want := range map[int]struct {
		measured, tolerance float64
		met                 bool
		holds               string
	}{
		1: {4, 0, false, "p99(sc) / p99(sr4): at most 3 (ours; as stated)"},
		// Half of the interval is 12.706 times the standard error, which is 0.1.
		2: {1, 1.2706, true, "mean(sr4): simulated ± 1.3 (ours; Monte Carlo, 95%)"},
		3: {0.05, 0, false, "failed(sc): at most 0.04 (paper; as stated)"},
		4: {3, 0.15, true, "fairness(sr4) / fairness(sc): at least 3 ± 0.15 (paper; drawing, 5%)"},
		5: {0.332, 0.05, false, "mean(sr4) at 0.5 / mean(sc) at 0.8: 0.2 ± 0.05 (paper; printed digits)"},
	} {
		c := r.Claims[i]
		if *c.Met != want.met || math.Abs(*c.Measured-want.measured) > 1e-3 ||
			math.Abs(*c.Tolerance-want.tolerance) > 1e-4 || c.Condition != want.holds {
			t.Errorf("claim %d: %v %v ± %v %q, want %+v", i, *c.Met, *c.Measured, *c.Tolerance, c.Condition, want)
		}
		if hasModel := i == 2 || i == 5; (c.Model != nil) != hasModel {
			t.Errorf("claim %d: model %v", i, c.Model)
		}
	}
	if c := r.Claims[6]; c.Met != nil || c.Condition != "not judged: there is no time" {
		t.Errorf("a claim without a quantity: %v %q", c.Met, c.Condition)
	}
	// The means of the two seeds are 0.1 above and 0.1 below their mean, so its standard error is
	// 0.1. Student's 97.5% quantile with one degree of freedom is 12.706.
	s := r.Summarise("sc", 0.8)
	if want := 12.706 * 0.1; math.Abs(s.Half.Mean-want) > 0.01 || s.Half.P99 != 0 {
		t.Errorf("halves of the confidence intervals are %+v, want %v for the mean and 0 for p99", s.Half, want)
	}
}

// The log of a run is complete after its end, and can be unzipped.
func TestFiles(t *testing.T) {
	folder := t.TempDir()
	f, err := createFiles(folder, true)
	testhost.Must(t, err)
	for file, text := range map[io.Writer]string{f.arrivals: "arrivals", f.requests: "requests"} {
		if _, err := io.WriteString(file, text); err != nil {
			t.Fatal(err)
		}
	}
	testhost.Must(t, f.close())
	arrivals, err := os.ReadFile(filepath.Join(folder, arrivalsFile))
	if err != nil || string(arrivals) != "arrivals" {
		t.Errorf("arrivals: %v %q", err, arrivals)
	}
	zipped, err := os.Open(filepath.Join(folder, requestsFile))
	testhost.Must(t, err)
	defer zipped.Close()
	unzipped, err := gzip.NewReader(zipped)
	testhost.Must(t, err)
	requests, err := io.ReadAll(unzipped)
	if err != nil || string(requests) != "requests" {
		t.Errorf("requests: %v %q", err, requests)
	}
}

// The simulator replays recorded arrivals: two requests of 100 ms on a server with one core, at the
// same time, share it.
func TestSimulateReplaysArrivals(t *testing.T) {
	e := parse(t, `
title: t
points: [0.5]
servers: 1
emulated: {cores: 1}
cases: [{name: sc, direct: true}]
`)
	path := filepath.Join(t.TempDir(), "arrivals.tsv")
	testhost.Must(t, os.WriteFile(path, []byte("time\tquery\n0\t/?work=100ms\n0\t/?work=100ms\n"), 0o644))
	p := e.with(Options{}).plan()[0]
	r, err := p.simulate(context.Background(), path)
	testhost.Must(t, err)
	if math.Abs(r.Mean-0.2) > 1e-6 {
		t.Errorf("the mean is %v s, want 0.2 s", r.Mean)
	}
}

// In the simulator, co-located work slows servers down, at emulated times. The lab's topology does
// not have it, because it begins with each run.
func TestColocatedWork(t *testing.T) {
	e := parse(t, `
title: t
points: [0.5]
servers: 2
speed: 4
emulated:
  cores: 1
  speed: 2
  colocated: 50%@1s
  exceptions: [{server: s2, speed: 4, colocated: "75%@100ms,0%@2s"}]
cases: [{name: sc, direct: true}]
`)
	p := e.with(Options{}).plan()[0]
	want := []sim.Event{
		{At: 1, Kind: sim.SetSpeed, Servers: []int32{0}, Speed: 1},
		{At: 0.1, Kind: sim.SetSpeed, Servers: []int32{1}, Speed: 1},
		{At: 2, Kind: sim.SetSpeed, Servers: []int32{1}, Speed: 4},
	}
	if diff := cmp.Diff(want, p.slowdowns()); diff != "" {
		t.Errorf("events of the simulator, -want +got:\n%s", diff)
	}
	emulated := p.topology("x", p.Case).Emulated
	s1, s2 := emulated.Of("s1"), emulated.Of("s2")
	if s1.Colocated+s2.Colocated != "" || *s2.Speed != 16 {
		t.Errorf("the lab's servers: %+v, %+v", s1, s2)
	}
	if m, err := p.model(); m != nil || err != nil {
		t.Errorf("model %v, error %v; want none", m, err)
	}
	path := filepath.Join(t.TempDir(), "arrivals.tsv")
	arrivals := "time\tquery\n0\t/?work=200ms\n3\t/?work=200ms\n"
	testhost.Must(t, os.WriteFile(path, []byte(arrivals), 0o644))
	r, err := p.bound(context.Background(), path)
	testhost.Must(t, err)
	if math.Abs(r.Mean-0.05) > 1e-6 {
		t.Errorf("the faster server slows down and recovers: %v s, want 0.05 s", r.Mean)
	}
	e.Emulated.Exceptions[0].Colocated = "75%@100ms"
	p = e.with(Options{}).plan()[0]
	if r, err = p.bound(context.Background(), path); err != nil || math.Abs(r.Mean-0.125) > 1e-6 {
		t.Errorf("the faster server slows down: %+v, error %v; want 0.05 and 0.2 s", r, err)
	}
}

// TestProxiesHaveTheirOwnLabs: a case with a proxy has a lab without Segue, and its service keeps its
// VIP. The simulator replays it, unless requests wait in the proxy.
func TestProxiesHaveTheirOwnLabs(t *testing.T) {
	e := parse(t, `
title: t
points: [0.5]
cases:
  - {name: sc, placement: hash}
  - {name: random2, proxy: {program: haproxy, algorithm: random(2)}}
  - {name: queue, proxy: {program: haproxy, algorithm: leastconn, maxconn: 2}}
  - {name: direct, direct: true}
  - {name: rr, placement: round-robin}
`)
	plan := e.with(Options{}).plan()
	for i, want := range [][]string{{"sc", "rr"}, {"random2"}, {"queue"}, {"sc", "rr"}, {"sc", "rr"}} {
		p := plan[i]
		topology := p.topology("x", p.Case)
		var names []string
		for _, s := range topology.Services {
			names = append(names, s.Name)
		}
		if !slices.Equal(names, want) || topology.RunsSegue() == p.Case.hasProxy() {
			t.Errorf("%s: the services are %v, want %v; %+v", p.Case.Name, names, want, topology.Proxy)
		}
	}
	if n := len(plan[0].labs()); n != 3 {
		t.Errorf("%d labs, want 3", n)
	}
	if services := plan[1].topology("x", plan[1].Case).Services; services[0].VIP != vip(1) {
		t.Errorf("the VIP of random2 is %v", services[0].VIP)
	}
	want := placement.Own{Choices: 2, Count: placement.CountPlaced}
	if spec, ok := plan[1].spec().(*placement.LeastQueue); !ok || spec.Own != want {
		t.Errorf("the simulator's placement for random2 is %+v, want %+v", spec, want)
	}
	if spec := plan[2].spec(); spec != nil {
		t.Errorf("the simulator has %+v for a proxy with a queue", spec)
	}
}

// TestMeasuredCasesHaveTheirOwnLabs: with cpu-time, a lab has the service of one case only, and no run
// of another case uses the lab.
func TestMeasuredCasesHaveTheirOwnLabs(t *testing.T) {
	e := parse(t, `
title: t
points: [0.5]
cpu-time: true
cases:
  - {name: sc, placement: hash}
  - {name: queue, placement: least-queue}
  - {name: direct, direct: true}
`)
	plan := e.with(Options{}).plan()
	for i, want := range []string{"sc", "queue"} {
		services := plan[i].topology("x", plan[i].Case).Services
		if len(services) != 1 || services[0].Name != want || services[0].VIP != vip(i) {
			t.Errorf("the lab of %s has %+v", want, services)
		}
	}
	if bare := plan[2].topology("x", plan[2].Case); !bare.Bare {
		t.Error("the lab of direct has balancers")
	}
	if n := len(plan[0].labs()); n != 3 {
		t.Errorf("%d labs, want 3", n)
	}
	if a, b := plan[0].labKind(), plan[1].labKind(); a == b || plan[3].labKind() != a {
		t.Errorf("the cases have the labs %+v and %+v", a, b)
	}
}

// TestForwardRun: the times and the cycles of packets lack those of the host program. A processor that
// does not count cycles has none.
func TestForwardRun(t *testing.T) {
	p := planned{Case: Case{Name: "syn"}, point: 1000, seed: 2}
	m := bench.PacketTime{Median: 500, Net: 400, P90: 700, Rounds: 10, Cycles: new(1200.0)}
	run := p.newForwardRun(m, 200)
	if run.Case != "syn" || run.Point != 1000 || run.Seed != 2 || run.Requests != 2000 {
		t.Errorf("the run is %+v", run)
	}
	r := run.Measured
	if math.Abs(r.Mean-400e-9) > 1e-15 || r.P50 != r.Mean || math.Abs(r.P90-600e-9) > 1e-15 {
		t.Errorf("times %+v, want 400, 400 and 600 ns", r)
	}
	if got := run.quantity("cycles"); got != 1200 {
		t.Errorf("%v cycles, want 1200", got)
	}
	m.Cycles = nil
	if got := p.newForwardRun(m, 200).quantity("cycles"); !math.IsNaN(got) {
		t.Errorf("%v cycles, which were not counted", got)
	}
}

// TestCostsOfRuns: quantities and columns are times of a request, and the memory of the balancers.
func TestCostsOfRuns(t *testing.T) {
	r := &Results{Runs: []Run{
		{
			Case: "a", Point: 1, Requests: 100, CPU: &CPU{Balancers: 0.01, BalancerPrograms: 0.02, All: 0.5},
			Memory: &Memory{Processes: 10 << 20, Kernel: 70 << 20},
		},
		{
			Case: "a", Point: 1, Requests: 100, CPU: &CPU{Balancers: 0.03, BalancerPrograms: 0.02, All: 0.5},
			Memory: &Memory{Processes: 15 << 20, Kernel: 70 << 20},
		},
		{Case: "b", Point: 1, Requests: 100},
	}}
	if !r.HasCPU() || r.Runs[2].CPU != nil {
		t.Error("the results have no CPU times")
	}
	for i, want := range []float64{200, 200, 0, 0, 5000, 12.5, 70} {
		if got := Costs[i].Estimate(r, "a", 1).Value; math.Abs(got-want) > 1e-9 {
			t.Errorf("%s: %v, want %v", Costs[i].Name, got, want)
		}
	}
	if got := Costs[6].Estimate(r, "b", 1).Value; !math.IsNaN(got) {
		t.Errorf("a run that did not measure has %v MiB", got)
	}
	if got := runQuantities["memory"](&r.Runs[0]); got != 80 {
		t.Errorf("balancers have %v MiB, want 80", got)
	}
	if got := runQuantities["balancer-cpu"](&r.Runs[0]); math.Abs(got-300e-6) > 1e-12 {
		t.Errorf("balancers take %v s for a request, want 300 µs", got)
	}
	if got := runQuantities["lab-cpu"](&r.Runs[2]); !math.IsNaN(got) {
		t.Errorf("a run that did not measure has %v s", got)
	}
}

// An omniscient balancer sends two requests at the same time to two servers, and the next one to
// the server that ends first.
func TestBoundKnowsAllServers(t *testing.T) {
	e := parse(t, `
title: t
points: [0.5]
servers: 2
emulated: {cores: 1}
cases: [{name: sc, placement: hash}]
`)
	path := filepath.Join(t.TempDir(), "arrivals.tsv")
	arrivals := "time\tquery\n0\t/?work=300ms\n0\t/?work=100ms\n0.2\t/?work=200ms\n"
	testhost.Must(t, os.WriteFile(path, []byte(arrivals), 0o644))
	r, err := e.with(Options{}).plan()[0].bound(context.Background(), path)
	testhost.Must(t, err)
	if math.Abs(r.Mean-0.2) > 1e-6 || r.Half > 1e-9 {
		t.Errorf("the mean is %v ± %v s, want 0.2 ± 0 s", r.Mean, r.Half)
	}
}

// Open connections are counted by server, also for servers that have none.
func TestHeldConnections(t *testing.T) {
	e := parse(t, `
title: t
kind: hold
axis: connections
points: [7]
servers: 3
seeds: 2
cases: [{name: sc, placement: hash}]
claims: [{text: x, quantity: from-even, of: sc, ours: at most 4.6, rule: stated}]
`)
	s := e.with(Options{})
	p := s.plan()[0]
	if p.Connections != 7 {
		t.Errorf("%d connections, want 7", p.Connections)
	}
	held := func(servers ...string) *Run {
		var all []*longLived
		for _, server := range servers {
			all = append(all, &longLived{server: server})
		}
		return p.newHeldRun(all)
	}
	run := held("s3", "s1", "s3", "s3", "s3", "s3", "s3")
	want := []Share{{Server: "s1", Responses: 1}, {Server: "s2"}, {Server: "s3", Responses: 6}}
	if diff := cmp.Diff(want, run.Shares); diff != "" || run.Requests != 7 {
		t.Errorf("%d connections, shares -want +got:\n%s", run.Requests, diff)
	}
	if got := run.FromEven(); math.Abs(got-(6-7./3)) > 1e-9 {
		t.Errorf("furthest from even: %v, want 6 - 7/3", got)
	}
	r := newResults(s, nil, false)
	r.Runs = []Run{*run, *held("s1", "s1", "s2", "s2", "s2", "s3", "s3")}
	r.Runs[1].Seed = 2
	summary := r.Summarise("sc", 7)
	if summary.Fewest != 0 || summary.Most != 6 || math.Abs(summary.FromEven-(6-7./3)) > 1e-9 {
		t.Errorf("summary: %d to %d connections, %v from even",
			summary.Fewest, summary.Most, summary.FromEven)
	}
	c := r.Claims[0]
	c.judge(&r)
	if c.Met == nil || !*c.Met || c.Condition != "from-even(sc): at most 4.6 (ours; as stated)" {
		t.Errorf("the claim: %+v", c)
	}
}

func TestLoadsOfARun(t *testing.T) {
	r := &Run{Shares: make([]Share, 2)}
	r.addLoads(&samples{
		servers: []string{"s1", "s2"}, times: []float64{0, 0.2, 0.4},
		busy: [][]uint32{{0, 0}, {4, 0}, {2, 2}},
	})
	// Jain's index is 1 (nobody is busy), 1/2 and 1.
	if math.Abs(r.Fairness-2.5/3) > 1e-9 || math.Abs(r.Busy-8.0/6) > 1e-9 || r.Shares[0].Busy != 2 {
		t.Errorf("fairness %v, busy %v, busy of s1 %v", r.Fairness, r.Busy, r.Shares[0].Busy)
	}
	if math.Abs(r.Overprovision-1.5) > 1e-9 { // 2 and 1 while servers are busy
		t.Errorf("the largest load is %v of the mean, want 1.5", r.Overprovision)
	}
}

// TestEstimateRatio compares what balancers infer about large servers with the others.
func TestEstimateRatio(t *testing.T) {
	r := &Run{Shares: []Share{
		{Capacity: 1, Estimate: 2}, {Capacity: 2, Estimate: 7}, {Capacity: 1, Estimate: 4}, {Capacity: 2, Estimate: 5},
	}}
	if got := r.EstimateRatio(); got != 2 {
		t.Errorf("%v, want 2", got)
	}
	for _, r := range []*Run{
		{Shares: []Share{{Capacity: 2}, {Capacity: 1}}},                           // nobody infers
		{Shares: []Share{{Capacity: 1, Estimate: 1}, {Capacity: 1, Estimate: 2}}}, // all are alike
	} {
		if got := r.EstimateRatio(); !math.IsNaN(got) {
			t.Errorf("%+v: %v, want none", r.Shares, got)
		}
	}
}

// TestTypesOfRequests tells pages from static files, and counts only requests that succeeded.
func TestTypesOfRequests(t *testing.T) {
	path := filepath.Join(t.TempDir(), requestsFile)
	file, err := os.Create(path)
	testhost.Must(t, err)
	zipped := gzip.NewWriter(file)
	io.WriteString(zipped, "time,query,server,outcome,latency,exchange\n"+
		"0.1,/wiki/index.php/A,s1,succeeded,0.3,0.3\n0.2,/static/a.png,s1,succeeded,0.002,0.002\n"+
		"0.3,/wiki/index.php/B,s2,succeeded,0.1,0.1\n0.4,/wiki/index.php/B,s2,timeout,,\n")
	testhost.Must(t, errors.Join(zipped.Close(), file.Close()))
	types, err := readTypes(path)
	testhost.Must(t, err)
	page, static := types[TypePage], types[TypeStatic]
	if len(types) != 2 || math.Abs(page.Mean-0.2) > 1e-9 || page.P50 != 0.1 || page.P90 != 0.3 || static.Mean != 0.002 {
		t.Errorf("pages %+v, static files %+v", page, static)
	}
}

// TestLayouts checks that the points of the axis ratio have servers of their own, at the same load.
func TestLayouts(t *testing.T) {
	e := parse(t, `
title: t
axis: ratio
points: [1, 4]
work: "constant: 100ms"
load: 0.5
layouts: [{ratio: 1, cores: [2, 2, 2]}, {ratio: 4, cores: [2, 8]}]
cases: [{name: sc, placement: hash}]
`)
	for i, want := range []struct {
		capacity, rate float64
		names          int
		large          map[string]bool
	}{{6, 30, 3, nil}, {10, 50, 2, map[string]bool{"s1": false, "s2": true}}} {
		s := e.with(Options{}).at(e.Points[i])
		if s.capacity(s.present) != want.capacity || s.rate() != want.rate || len(s.serverNames()) != want.names {
			t.Errorf("ratio %v: capacity %v, rate %v, servers %v; want %+v",
				e.Points[i], s.capacity(s.present), s.rate(), s.serverNames(), want)
		}
		if diff := cmp.Diff(want.large, s.largeServers()); diff != "" {
			t.Errorf("ratio %v: large servers, -want +got:\n%s", e.Points[i], diff)
		}
	}
}
