// SPDX-License-Identifier: Apache-2.0

package sim_test

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/research/sim"
)

// recorder is a placement that records its calls.
type recorder struct {
	b     *sim.Balancer
	place place
	log   *[]string
}

func (r *recorder) write(format string, args ...any) {
	*r.log = append(*r.log, fmt.Sprintf("%.4g: b%d ", r.b.Now(), r.b.Index+1)+fmt.Sprintf(format, args...))
}

func (r *recorder) Place(f *sim.Flow, offer *sim.Offer) {
	r.write("place %d", f.Number)
	r.place(f, offer)
}

func (r *recorder) Accepted(f *sim.Flow, offer *sim.Offer, taker sim.Load) {
	r.write("accepted %d by %d, offered to %d, open %d", f.Number, f.Server, offer.Servers[:offer.N], taker.Open)
}

func (r *recorder) Connected(f *sim.Flow) { r.write("connected %d", f.Number) }

func (r *recorder) Closed(f *sim.Flow, end sim.End) {
	load := "nothing said"
	if end.Load.CPUs > 0 {
		load = fmt.Sprintf("open %d", end.Load.Open)
	}
	r.write("closed %d, connected %t, after %.4g, %v, %s", f.Number, f.Connected, end.Duration, end.Outcome, load)
}

func (r *recorder) MembershipChanged() { r.write("live %d, peers %d", r.b.Live, r.b.Peers) }

func (r *recorder) Recover(f *sim.Flow, offer *sim.Offer) {
	r.write("recover %d", f.Number)
	r.place(f, offer)
}

// recorded creates placements that record their calls.
func recorded(c *sim.Config, p func(*sim.Balancer) place) *[]string {
	log := new([]string)
	c.Placement = method(func(b *sim.Balancer) sim.Placement { return &recorder{b, p(b), log} })
	return log
}

// always offers flows to the same servers on all balancers.
func always(servers ...int32) func(*sim.Balancer) place {
	return func(*sim.Balancer) place {
		return func(_ *sim.Flow, offer *sim.Offer) { offer.Set(servers...) }
	}
}

func checkLog(t *testing.T, got *[]string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, *got); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
}

func TestWhatABalancerSees(t *testing.T) {
	c := constantly(2, sim.FIFO, 0, 0, 3)
	c.Servers[0].Backlog = 0
	c.Network = sim.Network{
		ClientBalancer: sim.Constant(0.001), BalancerServer: sim.Constant(0.01),
		ServerServer: sim.Constant(0.02), ServerClient: sim.Constant(0.1),
	}
	c.Policy = policy(func(_ sim.Load, offer *sim.Offer) int32 { return offer.N - 1 })
	log := recorded(c, func(*sim.Balancer) place {
		return func(f *sim.Flow, offer *sim.Offer) {
			switch f.Number {
			case 0, 1:
				offer.Set(0)
			case 2:
				offer.Set(0, 1)
			}
		}
	})
	flows(t, c)
	checkLog(t, log,
		"0.001: b1 place 0", "0.001: b1 place 1",
		"0.021: b1 accepted 0 by 0, offered to [0], open 1",
		"0.021: b1 accepted 1 by 0, offered to [0], open 2",
		"0.112: b1 connected 0", "0.112: b1 connected 1",
		"0.223: b1 closed 1, connected true, after 0.111, refused, open 1",
		"1.223: b1 closed 0, connected true, after 1.111, completed, open 0",
		"3.001: b1 place 2",
		"3.041: b1 accepted 2 by 1, offered to [0 1], open 1",
		"3.132: b1 connected 2",
		"4.243: b1 closed 2, connected true, after 1.111, completed, open 0")
}

func TestNoOfferIsALoss(t *testing.T) {
	c := constantly(1, sim.FIFO, 0)
	log := recorded(c, always())
	checkFlows(t, c, ended{0, -1, sim.Lost})
	checkLog(t, log, "0: b1 place 0", "0: b1 closed 0, connected false, after 0, lost, nothing said")
}

func TestFlowTable(t *testing.T) {
	c := constantly(1, sim.FIFO, 0, 0.1, 0.2, 5)
	c.FlowTable = sim.FlowTable{Buckets: 1, Ways: 2}
	log := recorded(c, always(0))
	_, r := flows(t, c)
	checkLog(t, log,
		"0: b1 place 0", "0: b1 accepted 0 by 0, offered to [0], open 1", "0: b1 connected 0",
		"0.1: b1 place 1", "0.1: b1 accepted 1 by 0, offered to [0], open 2", "0.1: b1 connected 1",
		"1: b1 closed 0, connected true, after 1, completed, open 2",
		"2: b1 closed 1, connected true, after 1.9, completed, open 1",
		"5: b1 place 3", "5: b1 accepted 3 by 0, offered to [0], open 1", "5: b1 connected 3",
		"6: b1 closed 3, connected true, after 1, completed, open 0")
	if r.Untracked != 1 {
		t.Errorf("%d untracked, want 1", r.Untracked)
	}
}

func TestServersComeAndGo(t *testing.T) {
	c := constantly(3, sim.FIFO, 0, 0.6, 0.8, 1.2, 4)
	c.Servers[2].Absent = true
	c.Events = []sim.Event{
		{At: 0.5, Kind: sim.ServerFail, Servers: []int32{0}, Detect: 0.2},
		{At: 1, Kind: sim.ServerAdd, Servers: []int32{2}},
		{At: 3, Kind: sim.ServerAdd, Servers: []int32{0}, Detect: 0.1},
		{At: 3.5, Kind: sim.ServerDrain, Servers: []int32{1, 2}},
	}
	log := recorded(c, func(b *sim.Balancer) place {
		return func(_ *sim.Flow, offer *sim.Offer) { offer.Set(b.Live[0]) }
	})
	checkFlows(t, c,
		ended{0.5, 0, sim.Broken}, ended{0, -1, sim.Lost}, ended{1, 1, sim.Completed},
		ended{1.6, 1, sim.Completed}, ended{1, 0, sim.Completed})
	changes := slices.DeleteFunc(*log, func(line string) bool { return !strings.Contains(line, "live") })
	checkLog(t, &changes,
		"0.7: b1 live [1], peers [0]", "1: b1 live [1 2], peers [0]",
		"3.1: b1 live [0 1 2], peers [0]", "3.5: b1 live [0], peers [0]")
}

func TestAFailedServerHasNothingLeft(t *testing.T) {
	for _, d := range []sim.Discipline{sim.FIFO, sim.ProcessorSharing} {
		c := constantly(1, d, 0, 0, 0, 2)
		c.Servers[0].Backlog = 10
		if d == sim.ProcessorSharing {
			c.Servers[0].Workers = 1
		}
		c.Events = []sim.Event{
			{At: 0.5, Kind: sim.ServerFail, Servers: []int32{0}}, {At: 1, Kind: sim.ServerAdd, Servers: []int32{0}},
		}
		broken := ended{0.5, 0, sim.Broken}
		checkFlows(t, c, broken, broken, broken, done(1))
	}
}

func TestBalancersComeAndGo(t *testing.T) {
	at := make(times, 40) // many flows, so that each balancer gets some
	build := func(p func(*sim.Balancer) place) (*sim.Config, *[]string) {
		c := constantly(1, sim.FIFO, at...)
		c.Servers[0].CPUs = int32(len(at))
		c.Balancers = []sim.Share{{Weight: 1}, {Weight: 1}}
		c.Events = []sim.Event{{At: 0.5, Kind: sim.BalancerFail, Balancers: []int32{1}}}
		return c, recorded(c, p)
	}
	count := func(all []sim.Ended, o sim.Outcome) (n int) {
		for _, f := range all {
			if f.Outcome == o {
				n++
			}
		}
		return n
	}
	t.Run("recovered", func(t *testing.T) {
		c, log := build(always(0))
		all, r := flows(t, c)
		if count(all, sim.Completed) != len(at) || r.Recovered == 0 || r.Recovered == uint64(len(at)) {
			t.Errorf("%d of %d completed, %d recovered", count(all, sim.Completed), len(at), r.Recovered)
		}
		closed := slices.DeleteFunc(slices.Clone(*log), func(line string) bool {
			var n int
			_, err := fmt.Sscanf(line, "1: b1 closed %d,", &n)
			return err != nil
		})
		if len(closed) != len(at) {
			t.Errorf("%d flows closed at the balancer that is left, want all", len(closed))
		}
	})
	t.Run("not found", func(t *testing.T) {
		// Only the first of the servers is there, so the remaining balancer looks for others.
		c, log := build(func(b *sim.Balancer) place {
			return func(_ *sim.Flow, offer *sim.Offer) {
				if b.Now() == 0 {
					offer.Set(0)
				}
			}
		})
		all, r := flows(t, c)
		if n := count(all, sim.Broken); n == 0 || n == len(at) || r.Recovered != 0 {
			t.Errorf("%d of %d broken, %d recovered", n, len(at), r.Recovered)
		}
		closed := 0
		for _, line := range *log {
			if strings.Contains(line, "closed") {
				closed++
			}
		}
		if want := count(all, sim.Completed); closed != want {
			t.Errorf("%d flows closed, want the %d that the balancer had placed", closed, want)
		}
	})
	t.Run("added", func(t *testing.T) {
		c, log := build(always(0))
		// The flows that move free entries for the later flows.
		c.Arrivals = append(slices.Clone(at), 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6)
		c.FlowTable = sim.FlowTable{Buckets: 1, Ways: len(at)}
		c.Balancers[1].Absent = true
		c.Events[0].Kind = sim.BalancerAdd
		_, r := flows(t, c)
		if r.Recovered == 0 || r.Balancers[0] == uint64(len(at)) || r.Untracked != 0 {
			t.Errorf("%d recovered, %d placed by the first, %d untracked", r.Recovered, r.Balancers[0], r.Untracked)
		}
		if want := "0.5: b2 live [0], peers [0 1]"; !slices.Contains(*log, want) {
			t.Errorf("no %q in %q", want, *log)
		}
	})
}

func TestSharesOfBalancers(t *testing.T) {
	c := one(1, sim.FIFO, 0.5, sim.Constant(1))
	c.Connections, c.Warmup = 100_000, 0
	for _, weights := range [][]float64{{1, 1, 1, 1}, {4, 2, 1, 1}} {
		c.Balancers = nil
		total := 0.0
		for _, weight := range weights {
			c.Balancers = append(c.Balancers, sim.Share{Weight: weight})
			total += weight
		}
		_, r := flows(t, c)
		for i, n := range r.Balancers {
			want := weights[i] / total
			if got := float64(n) / 100_000; math.Abs(got-want) > 4*math.Sqrt(want/100_000) {
				t.Errorf("weights %v: balancer %d has %v, want %v", weights, i, got, want)
			}
		}
	}
}

// prober asks server 1 for its load at each step, and records the answers.
type prober struct {
	place
	b   *sim.Balancer
	log *[]string
}

func (p *prober) Interval() float64 { return 0.5 }

func (p *prober) Step() { p.b.Probe(1) }

func (p *prober) Probed(server int32, load sim.Load) {
	*p.log = append(*p.log, fmt.Sprintf("%.4g: %d has %d open, %d busy, %d waiting",
		p.b.Now(), server, load.Open, load.Busy, load.Waiting))
}

func TestProbes(t *testing.T) {
	c := constantly(2, sim.FIFO, 0.45, 0.45, 1.5)
	c.Network.BalancerServer = sim.Constant(0.01)
	var log []string
	c.Placement = method(func(b *sim.Balancer) sim.Placement {
		return &prober{place(func(_ *sim.Flow, offer *sim.Offer) { offer.Set(1) }), b, &log}
	})
	c.Events = []sim.Event{{At: 1.9, Kind: sim.ServerFail, Servers: []int32{1}}}
	flows(t, c)
	checkLog(t, &log, "0.52: 1 has 2 open, 1 busy, 1 waiting",
		"1.02: 1 has 2 open, 1 busy, 1 waiting", "1.52: 1 has 1 open, 1 busy, 0 waiting")
}

// stepper counts its steps.
type stepper struct {
	place
	b   *sim.Balancer
	log *[]string
}

func (s *stepper) Interval() float64 { return 0.5 }

func (s *stepper) Step() { *s.log = append(*s.log, fmt.Sprintf("%.4g", s.b.Now())) }

// A balancer that comes back is a new one with its own steps. Adding it a second time changes
// nothing.
func TestStepsOfABalancerThatComesBack(t *testing.T) {
	c := constantly(1, sim.FIFO, 0, 1.65, 2.5)
	c.Servers[0].CPUs = 3
	var log []string
	c.Placement = method(func(b *sim.Balancer) sim.Placement {
		return &stepper{place(func(_ *sim.Flow, offer *sim.Offer) { offer.Set(0) }), b, &log}
	})
	c.Events = []sim.Event{
		{At: 1.6, Kind: sim.BalancerFail, Balancers: []int32{0}},
		{At: 1.7, Kind: sim.BalancerAdd, Balancers: []int32{0}},
		{At: 1.8, Kind: sim.BalancerAdd, Balancers: []int32{0}},
	}
	checkFlows(t, c, done(1), ended{0, -1, sim.Lost}, done(1))
	checkLog(t, &log, "0.5", "1", "1.5", "2.2", "2.7", "3.2")
}

// A SYN is lost if it is under way to the last balancer when that balancer fails.
func TestNoBalancerIsLeft(t *testing.T) {
	c := constantly(1, sim.FIFO, 0)
	c.Network.ClientBalancer = sim.Constant(0.1)
	c.Events = []sim.Event{{At: 0.05, Kind: sim.BalancerFail, Balancers: []int32{0}}}
	checkFlows(t, c, ended{0.1, -1, sim.Lost})
}

// A server that comes back before balancers know of its failure stays. A server that fails before
// balancers know that it was added stays away.
func TestDetectionIsOfTheLastChange(t *testing.T) {
	c := constantly(2, sim.FIFO, 0, 5)
	c.Servers[1].Absent = true
	c.Events = []sim.Event{
		{At: 1, Kind: sim.ServerFail, Servers: []int32{0}, Detect: 2},
		{At: 2, Kind: sim.ServerAdd, Servers: []int32{0}},
		{At: 2.5, Kind: sim.ServerAdd, Servers: []int32{1}, Detect: 2},
		{At: 3.5, Kind: sim.ServerFail, Servers: []int32{1}},
	}
	log := recorded(c, func(b *sim.Balancer) place {
		return func(_ *sim.Flow, offer *sim.Offer) { offer.Set(b.Live...) }
	})
	checkFlows(t, c, done(1), done(1))
	for _, line := range *log {
		if strings.Contains(line, "live") && !strings.Contains(line, "live [0],") {
			t.Error(line)
		}
	}
}

// Lost flows count as broken, even if the client would have given up later. They are not found
// again when the balancers change once more.
func TestLostFlowsStayLost(t *testing.T) {
	c := constantly(1, sim.FIFO, 0, 0)
	c.Timeout = 0.75
	c.Balancers = []sim.Share{{Weight: 1}, {Weight: 1, Absent: true}}
	c.Events = []sim.Event{
		{At: 0.25, Kind: sim.BalancerFail, Balancers: []int32{0}},
		{At: 0.5, Kind: sim.BalancerAdd, Balancers: []int32{1}},
	}
	recorded(c, always(0))
	all, r := flows(t, c)
	if all[0].Outcome != sim.Broken || all[1].Outcome != sim.Broken || r.Recovered != 0 {
		t.Errorf("outcomes %v and %v, %d recovered", all[0].Outcome, all[1].Outcome, r.Recovered)
	}
}

// A server that has failed reports no load, although its flows are closed.
func TestAFailedServerReportsNothing(t *testing.T) {
	c := constantly(1, sim.FIFO, 0)
	c.Events = []sim.Event{{At: 0.5, Kind: sim.ServerFail, Servers: []int32{0}}}
	log := recorded(c, always(0))
	checkFlows(t, c, ended{0.5, 0, sim.Broken})
	if want := "0.5: b1 closed 0, connected true, after 0.5, broken, nothing said"; !slices.Contains(*log, want) {
		t.Errorf("no %q in %q", want, *log)
	}
}

// TestApplicationFails offers flows to two servers. The application of the first one fails at 1 s,
// and the server passes on what it would have accepted. Without a second candidate, or without an
// agent, the server refuses. It is back at 5 s.
func TestApplicationFails(t *testing.T) {
	accept := policy(func(_ sim.Load, offer *sim.Offer) int32 { return offer.At })
	events := []sim.Event{
		{At: 1, Kind: sim.ApplicationFail, Servers: []int32{0}, Detect: 100},
		{At: 5, Kind: sim.ServerAdd, Servers: []int32{0}},
	}
	for name, test := range map[string]struct {
		placement sim.Method
		policy    sim.Policy
		want      []sim.Outcome
		server    int32 // of the second flow
		hops      int32
	}{
		"two candidates": {to(0, 1), accept, []sim.Outcome{sim.Broken, sim.Completed, sim.Completed}, 1, 1},
		"the last one":   {to(0), accept, []sim.Outcome{sim.Broken, sim.Refused, sim.Completed}, -1, 0},
		"no agent":       {to(0, 1), nil, []sim.Outcome{sim.Broken, sim.Refused, sim.Completed}, -1, 0},
	} {
		c := constantly(2, sim.FIFO, 0.5, 2, 6)
		c.Placement, c.Policy, c.Events = test.placement, test.policy, events
		all, _ := flows(t, c)
		for i, want := range test.want {
			if all[i].Outcome != want {
				t.Errorf("%s: flow %d: %v, want %v", name, i, all[i].Outcome, want)
			}
		}
		if all[1].Server != test.server || all[1].Hops != test.hops || all[2].Server != 0 {
			t.Errorf("%s: %+v", name, all[1:])
		}
	}
}

// TestNothingReturnsToAFailedApplication has a second candidate that sends offers back to a first
// one with less load.
func TestNothingReturnsToAFailedApplication(t *testing.T) {
	c := constantly(2, sim.FIFO, 2)
	c.Placement = to(0, 1)
	c.Policy = policy(func(own sim.Load, offer *sim.Offer) int32 {
		if offer.At == 1 && offer.Loads[0].Open <= own.Open {
			return 0
		}
		return offer.At
	})
	c.Events = []sim.Event{{At: 1, Kind: sim.ApplicationFail, Servers: []int32{0}, Detect: 100}}
	if all, _ := flows(t, c); all[0].Outcome != sim.Completed || all[0].Server != 1 {
		t.Errorf("%+v", all[0])
	}
}

// TestFlood counts the offers of a flood at the agents, which accept none of them. The flows of the
// run are not counted, because they are accepted and served as without the flood.
func TestFlood(t *testing.T) {
	offers := [2]int{}
	c := constantly(2, sim.FIFO, 0, 1, 2, 10)
	c.Placement = to(0, 1)
	c.Policy = policy(func(_ sim.Load, offer *sim.Offer) int32 {
		offers[offer.At]++
		return min(offer.At+1, 1)
	})
	without, _ := flows(t, c)
	c.Flood, offers = 1000, [2]int{}
	with, result := flows(t, c)
	if diff := cmp.Diff(without, with); diff != "" {
		t.Errorf("the flood changes flows:\n%s", diff)
	}
	if result.Flows() != 4 {
		t.Errorf("%d flows", result.Flows())
	}
	// The last flow ends at 11 s.
	for candidate, n := range offers {
		if n < 10_500 || n > 11_500 {
			t.Errorf("candidate %d got %d offers, want about 11000", candidate, n)
		}
	}
}
