// SPDX-License-Identifier: Apache-2.0

package report

import (
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/model"
	"github.com/segue-lb/segue/research/testbed"
)

var keep = flag.String("fixture", "", "`directory` for the fixtures and the report of TestFixture, "+
	"larger than in tests, to look at them")

// cluster simulates servers with two processor-sharing cores each, as the fixtures need them:
// enough for plausible results, in a few milliseconds.
type cluster struct {
	random    *rand.Rand
	work      [][]float64 // by server: seconds of work left of each request
	owners    [][]int     // by server: the requests of work
	threshold []int
	adapts    bool // thresholds adapt, as SRdyn
	offered   []int
	taken     []int
	shares    []testbed.Share

	requests []request
	loads    strings.Builder
	fairness float64
	busy     float64
	samples  int
}

type request struct {
	sent, work, latency float64
	server              int
	failed              bool
}

const (
	meanWork  = 0.19
	cores     = 2
	mostLoad  = 32
	noLimit   = math.MaxInt32
	mostQueue = 160
)

func newCluster(servers int, policy string, seed uint64) *cluster {
	c := &cluster{
		random: rand.New(rand.NewPCG(seed, 1)), work: make([][]float64, servers), owners: make([][]int, servers),
		threshold: make([]int, servers), adapts: policy == "srdyn", offered: make([]int, servers),
		taken: make([]int, servers), shares: make([]testbed.Share, servers),
	}
	threshold := noLimit // single choice
	if _, err := fmt.Sscanf(policy, "sr%d", &threshold); err != nil && c.adapts {
		threshold = 1
	}
	c.loads.WriteString("time")
	for i := range servers {
		c.threshold[i] = threshold
		c.shares[i].Server = fmt.Sprintf("s%d", i+1)
		fmt.Fprintf(&c.loads, ",s%d", i+1)
	}
	c.loads.WriteString("\n")
	return c
}

// place chooses a server: a random one, or the first of two that accepts.
func (c *cluster) place() int {
	s := c.random.IntN(len(c.work))
	if c.threshold[s] == noLimit {
		return s
	}
	accepted := len(c.work[s]) < c.threshold[s]
	c.adapt(s, accepted)
	if accepted {
		c.shares[s].Accepted++
		return s
	}
	c.shares[s].Refused++
	other := (s + 1 + c.random.IntN(len(c.work)-1)) % len(c.work)
	c.shares[other].Forced++
	return other
}

// adapt is algorithm 2 of 6LB.
func (c *cluster) adapt(s int, accepted bool) {
	c.offered[s]++
	if accepted {
		c.taken[s]++
	}
	if !c.adapts || c.offered[s] < 50 {
		return
	}
	switch share := float64(c.taken[s]) / 50; {
	case share < 0.4:
		c.threshold[s]++
	case share > 0.6 && c.threshold[s] > 0:
		c.threshold[s]--
	}
	c.offered[s], c.taken[s] = 0, 0
}

// run sends the requests at their times, and samples the loads each 200 ms.
func (c *cluster) run(arrivals []request) {
	c.requests = arrivals
	now, sample := 0.0, 0.0
	for i := range arrivals {
		for sample <= arrivals[i].sent {
			c.advance(now, sample)
			now = sample
			c.sample(now)
			sample += 0.2
		}
		c.advance(now, arrivals[i].sent)
		now = arrivals[i].sent
		s := c.place()
		arrivals[i].server = s
		if len(c.work[s]) >= mostQueue {
			arrivals[i].failed = true
			continue
		}
		c.work[s] = append(c.work[s], arrivals[i].work)
		c.owners[s] = append(c.owners[s], i)
	}
	c.advance(now, math.Inf(1))
}

// advance serves requests from one time to another.
func (c *cluster) advance(now, until float64) {
	for s := range c.work {
		at := now
		for len(c.work[s]) > 0 {
			rate := min(1, cores/float64(len(c.work[s])))
			next := 0
			for j, left := range c.work[s] {
				if left < c.work[s][next] {
					next = j
				}
			}
			step := min(c.work[s][next]/rate, until-at)
			ends := c.work[s][next]/rate <= until-at
			for j := range c.work[s] {
				c.work[s][j] -= step * rate
			}
			at += step
			if !ends {
				break
			}
			c.end(s, next, at)
		}
	}
}

func (c *cluster) end(s, j int, at float64) {
	r := &c.requests[c.owners[s][j]]
	r.latency = at - r.sent + 0.001
	share := &c.shares[s]
	share.Responses++
	share.Mean += (r.latency - share.Mean) / float64(share.Responses)
	c.work[s] = slices.Delete(c.work[s], j, j+1)
	c.owners[s] = slices.Delete(c.owners[s], j, j+1)
}

func (c *cluster) sample(now float64) {
	fmt.Fprintf(&c.loads, "%.1f", now)
	var sum, squares float64
	c.samples++
	for s, work := range c.work {
		busy := float64(min(len(work), mostLoad))
		fmt.Fprintf(&c.loads, ",%.0f", busy)
		sum += busy
		squares += busy * busy
		c.shares[s].Busy += (busy - c.shares[s].Busy) / float64(c.samples)
	}
	n := float64(len(c.work))
	c.busy += (sum/n - c.busy) / float64(c.samples)
	if squares > 0 {
		c.fairness += (sum*sum/squares/n - c.fairness) / float64(c.samples)
	}
	c.loads.WriteString("\n")
}

// poisson draws requests until a time. Their rate is a function of the time.
func poisson(random *rand.Rand, seconds, highest float64, rate func(t float64) float64) (requests []request) {
	for t := random.ExpFloat64() / highest; t < seconds; t += random.ExpFloat64() / highest {
		if random.Float64()*highest < rate(t) {
			requests = append(requests, request{sent: t, work: meanWork * random.ExpFloat64()})
		}
	}
	return requests
}

func (c *cluster) response(shares int) testbed.Response {
	var times []float64
	sum := 0.0
	for _, r := range c.requests {
		if !r.failed {
			times = append(times, r.latency)
			sum += r.latency
		}
	}
	return responseOf(times, sum/float64(len(times)), shares)
}

func responseOf(times []float64, mean float64, shares int) testbed.Response {
	slices.Sort(times)
	at := func(q float64) float64 { return times[int(q*float64(len(times)-1))] }
	r := testbed.Response{Mean: mean, P50: at(0.5), P90: at(0.9), P99: at(0.99)}
	for i := range shares + 1 {
		q := float64(i) / float64(shares)
		r.Distribution = append(r.Distribution, testbed.DistributionPoint{Seconds: at(q), Share: q})
	}
	return r
}

// modelOf is the model of a policy, or nil.
func modelOf(t *testing.T, policy string, load float64) *testbed.Response {
	t.Helper()
	steady, err := model.SingleChoice(load, cores)
	threshold := 0
	if policy != "sc" {
		if _, scan := fmt.Sscanf(policy, "sr%d", &threshold); scan != nil {
			return nil
		}
		steady, err = model.SRc(load, cores, threshold)
	}
	testhost.Must(t, err)
	return &testbed.Response{Mean: meanWork * steady.MeanResponse()} // the runner has no percentiles either
}

// fixture describes an experiment to simulate.
type fixture struct {
	testbed.Results
	servers    int
	seconds    float64
	handshakes bool
}

// write simulates all runs of an experiment and writes their files into a directory, as the runner
// does.
func (x fixture) write(t *testing.T, directory string) {
	t.Helper()
	x.Planned = len(x.Cases) * len(x.Points) * x.Seeds
	for _, policy := range x.Cases {
		for _, point := range x.Points {
			for seed := range uint64(x.Seeds) {
				run := x.run(t, directory, policy, point, seed+1)
				x.Runs = append(x.Runs, run)
			}
		}
	}
	writeResults(t, directory, &x.Results)
}

func writeResults(t *testing.T, directory string, results *testbed.Results) {
	t.Helper()
	text, err := json.MarshalIndent(results, "", " ")
	testhost.Must(t, err)
	writeFile(t, filepath.Join(directory, "results.json"), string(text))
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	testhost.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	testhost.Must(t, os.WriteFile(path, []byte(text), 0o644))
}

func (x fixture) run(t *testing.T, directory, policy string, load float64, seed uint64) testbed.Run {
	t.Helper()
	highest := load * cores * float64(x.servers) / meanWork
	rate := func(time float64) float64 {
		if x.Bin == 0 {
			return highest
		}
		return highest * (0.7 - 0.3*math.Cos(2*math.Pi*time/x.seconds))
	}
	arrivals := poisson(rand.New(rand.NewPCG(seed, uint64(1000*load))), x.seconds, highest, rate)
	real, replayed := newCluster(x.servers, policy, seed), newCluster(x.servers, policy, seed+100)
	replayed.run(slices.Clone(arrivals))
	real.run(arrivals)
	simulated := replayed.response(50)
	run := testbed.Run{
		Case: policy, Point: load, Seed: seed, Folder: fmt.Sprintf("runs/%s-%v-%d", policy, load, seed),
		Load: load, Servers: x.servers, Balancers: 2, Seconds: x.seconds, Requests: uint64(len(arrivals)),
		Failures: map[string]uint64{}, Measured: real.response(50), Simulated: &simulated,
		Fairness: real.fairness, Busy: real.busy, Shares: real.shares,
		Machine: testbed.Machine{Idle: 0.9 - 0.7*load, Generator: 0.3 * load, LateP99: 0.0004 / (1 - load)},
	}
	if run.Machine.Idle < 0.25 {
		run.Warnings = []string{fmt.Sprintf("only %.0f%% of the machine's CPU time was left", 100*run.Machine.Idle)}
	}
	for _, r := range arrivals {
		if r.failed {
			run.Failed++
			run.Failures["reset"]++
		}
	}
	if x.Bin == 0 {
		run.Model = modelOf(t, policy, load)
	}
	if x.handshakes {
		run.Handshake = real.handshake()
		for i, r := range []*testbed.Response{&run.Measured, run.Simulated} {
			over := 0.6 + 0.02*float64(i)
			r.Large, r.LargeOver = over-0.05, []float64{over, over - 0.1, 1}
		}
	}
	writeFile(t, filepath.Join(directory, run.Folder, "loads.csv"), real.loads.String())
	real.writeRequests(t, filepath.Join(directory, run.Folder, "requests.csv.gz"))
	return run
}

// handshake makes times from SYN to SYN-ACK of 80 µs and more, longer if the first server refused.
func (c *cluster) handshake() *testbed.Response {
	var times []float64
	sum := 0.0
	for range c.requests {
		v := 80e-6 + 30e-6*c.random.ExpFloat64()
		if c.threshold[0] != noLimit && c.random.Float64() < 0.4 {
			v += 20e-6
		}
		times = append(times, v)
		sum += v
	}
	r := responseOf(times, sum/float64(len(times)), 50)
	return &r
}

func (c *cluster) writeRequests(t *testing.T, path string) {
	t.Helper()
	var lines strings.Builder
	for _, r := range c.requests {
		if r.failed {
			fmt.Fprintf(&lines, "%.4f,/?work=%.4fs,,reset,,\n", r.sent, r.work)
		} else {
			fmt.Fprintf(&lines, "%.4f,/?work=%.4fs,s%d,succeeded,%.5f,%.5f\n", r.sent, r.work, r.server+1, r.latency, r.latency)
		}
	}
	writeFile(t, path, packed(t, lines.String()))
}

func pointer[T any](v T) *T { return &v }

// fixtures are the experiments of the tests. A larger scale takes longer and has smoother results.
func fixtures(scale float64) map[string]fixture {
	started := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	base := testbed.Results{
		Axis: testbed.Axis{Key: "load", Label: "load of the processors, ρ"}, Speed: 4,
		Environment: testbed.Environment{
			Version: "v1", Kernel: "6.1.0-1-amd64", CPU: "Example CPU", Cores: 2, Memory: 24 << 30,
			Started: started, Finished: started.Add(754 * time.Second),
		},
	}
	sweep, day, latency := base, base, base
	sweep.Experiment, sweep.Title = "policies", "Response times of accept policies"
	sweep.Paper = "6LB, section VI-B2, figures 10a to 10c"
	sweep.Text = "title: Response times of accept policies\naxis: load\n"
	sweep.Cases = []string{"sc", "sr4", "sr8", "sr16", "srdyn"}
	sweep.Points, sweep.Seeds = []float64{0.5, 0.65, 0.77, 0.88, 0.95}, 3
	sweep.Claims = []testbed.Claim{
		{Text: "SR4 is up to 2.3 times better than SC", Condition: "max(sc / sr4) >= 2.3",
			Measured: pointer(2.71828), Simulated: pointer(2.65), Model: pointer(3.0), Met: pointer(true)},
		{Text: "SRdyn is close to the best static policy", Condition: "mean(srdyn, 0.88) / mean(sr4, 0.88) <= 1.1",
			Measured: pointer(1.21), Simulated: pointer(1.19), Met: pointer(false)},
		{Text: "SR4 spreads queries better between all servers"},
	}
	day.Experiment, day.Title, day.Paper = "day", "A day of Wikipedia", "6LB, section VI-C, figure 12"
	day.Cases, day.Points, day.Seeds, day.Bin = []string{"sc", "srdyn"}, []float64{0.9}, 1, 10*scale
	latency.Experiment, latency.Title, latency.Paper = "latency", "Time to connect", "6LB, section VI-B6, figure 11c"
	latency.Cases, latency.Points, latency.Seeds = []string{"sc", "sr4"}, []float64{0.3, 0.6}, 2
	servers := int(8 * scale)
	return map[string]fixture{
		"policies": {Results: sweep, servers: servers, seconds: 20 * scale},
		"day":      {Results: day, servers: servers, seconds: 300 * scale},
		"latency":  {Results: latency, servers: servers, seconds: 10 * scale, handshakes: true},
	}
}

// forwarding are results about the CPU time of packets, removal those about connections that a
// change of servers breaks, and holding those about connections that stay open. Their runs have no
// files.
func forwarding() *testbed.Results {
	r := &testbed.Results{
		Experiment: "forward", Title: "Forwarding of known flows", Kind: testbed.KindForward, Paper: "6LB, section VI-D, figure 13",
		Axis: testbed.Axis{Key: "flows", Label: "flows"}, Cases: []string{"hash", "hunt"},
		Points: []float64{1e3, 1e4, 1e5, 1e6}, Seeds: 1, Speed: 1, Planned: 8,
	}
	for i, name := range r.Cases {
		for j, flows := range r.Points {
			ns := 110 + 9*float64(i) + 40*float64(j)
			r.Runs = append(r.Runs, testbed.Run{
				Case: name, Point: flows, Seed: 1, Requests: 3_000_000,
				Measured: testbed.Response{Mean: ns * 1e-9, P50: ns * 1e-9, P90: 1.2 * ns * 1e-9},
			})
		}
	}
	return r
}

func removal() *testbed.Results {
	r := &testbed.Results{
		Experiment: "removal", Title: "Connections that a change breaks", Kind: testbed.KindChange, Paper: "6LB, section VI-B5, figure 11d",
		Axis: testbed.Axis{Key: "removed", Label: "removed servers"}, Cases: []string{"sc", "sr8"},
		Points: []float64{1, 2, 4}, Seeds: 3, Speed: 1, Planned: 18,
	}
	for i, name := range r.Cases {
		for _, removed := range r.Points {
			for seed := range uint64(3) {
				lost := uint64(removed)*uint64(6-3*i) + seed
				r.Runs = append(r.Runs, testbed.Run{
					Case: name, Point: removed, Seed: seed + 1, Requests: 1000, Failed: lost,
					Failures: map[string]uint64{"broken": lost, "server removed": 80 * uint64(removed)},
				})
			}
		}
	}
	return r
}

func holding() *testbed.Results {
	r := &testbed.Results{
		Experiment: "holding", Title: "Connections that stay open", Kind: testbed.KindHold,
		Axis:  testbed.Axis{Key: "connections", Label: "open connections"},
		Cases: []string{"sc", "srdyn"}, Points: []float64{30}, Seeds: 2, Speed: 1, Planned: 4,
	}
	for i, name := range r.Cases {
		for seed := range uint64(2) {
			off := seed + uint64(2-i)
			run := testbed.Run{
				Case: name, Point: 30, Seed: seed + 1, Requests: 30,
				Failures: map[string]uint64{"broken": 0},
				Shares: []testbed.Share{
					{Server: "s1", Responses: 10 + off},
					{Server: "s2", Responses: 10 - off},
					{Server: "s3", Responses: 10},
				},
			}
			if name == "srdyn" {
				run.Shares[0].Accepted, run.Shares[0].Forced = 3, 7+off
			}
			r.Runs = append(r.Runs, run)
		}
	}
	return r
}

// writeFixtures writes the experiments into directories in a directory.
func writeFixtures(t *testing.T, directory string, scale float64) {
	t.Helper()
	for _, results := range []*testbed.Results{forwarding(), removal(), holding()} {
		writeResults(t, filepath.Join(directory, results.Experiment), results)
	}
	for name, x := range fixtures(scale) {
		x.write(t, filepath.Join(directory, name))
	}
}

// TestFixture makes a large report to look at.
func TestFixture(t *testing.T) {
	if *keep == "" {
		t.Skip("makes a report only with -fixture=DIRECTORY")
	}
	writeFixtures(t, *keep, 5)
	report, err := Write(*keep, Settings{})
	testhost.Must(t, err)
	t.Logf("%+v", report)
}
