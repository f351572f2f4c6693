// SPDX-License-Identifier: Apache-2.0

package sim_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

// times are arrivals at the given times.
type times []float64

func (a times) Start(*sim.Rand) (sim.Source, error) { return &timesSource{left: a}, nil }

type timesSource struct{ left times }

func (s *timesSource) Next() (next sim.Arrival, ok bool) {
	if len(s.left) == 0 {
		return sim.Arrival{}, false
	}
	next = sim.Arrival{At: s.left[0], Class: -1}
	s.left = s.left[1:]
	return next, true
}

func (s *timesSource) Close() error { return nil }

// constantly is a configuration of equal servers with one processor each, and one balancer. The
// flows arrive at the given times. Each has one second of work.
func constantly(servers int, d sim.Discipline, at ...float64) *sim.Config {
	c := &sim.Config{
		Balancers: []sim.Share{{Weight: 1}},
		Arrivals:  times(at),
		Jobs:      []sim.Job{{Share: 1, Stages: []sim.Stage{{Work: sim.Constant(1)}}}},
		Placement: to(0),
	}
	for i := range servers {
		c.Servers = append(c.Servers, sim.Server{
			Name: fmt.Sprintf("s%d", i+1), CPUs: 1, Speed: 1, IOSpeed: 1, Discipline: d, Backlog: -1,
		})
	}
	return c
}

// flows runs a configuration once and returns its flows by number.
func flows(t *testing.T, c *sim.Config) ([]sim.Ended, *sim.RunResult) {
	t.Helper()
	var all []sim.Ended
	c.Completed = func(_ int, flow sim.Ended) { all = append(all, flow) }
	r, err := sim.Run(t.Context(), c, sim.Options{Seed: 1, Runs: 1})
	testhost.Must(t, err)
	slices.SortFunc(all, func(a, b sim.Ended) int { return int(a.Number) - int(b.Number) })
	return all, r.Runs[0]
}

// ended has the fields of a flow that tests compare.
type ended struct {
	response float64
	server   int32
	outcome  sim.Outcome
}

func checkFlows(t *testing.T, c *sim.Config, want ...ended) {
	t.Helper()
	all, _ := flows(t, c)
	var got []ended
	for _, f := range all {
		got = append(got, ended{f.Response, f.Server, f.Outcome})
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(ended{}), cmpopts.EquateApprox(0, 1e-9)); diff != "" {
		t.Errorf("flows (-want +got):\n%s", diff)
	}
}

func done(response float64) ended { return ended{response: response} }

func TestDisciplines(t *testing.T) {
	t.Run("FIFO", func(t *testing.T) {
		checkFlows(t, constantly(1, sim.FIFO, 0, 0.5, 0.5), done(1), done(1.5), done(2.5))
	})
	t.Run("processor sharing", func(t *testing.T) {
		// Three flows share from 0.5 on. At 2 the first one has had its second of work, and the
		// others share the processor.
		checkFlows(t, constantly(1, sim.ProcessorSharing, 0, 0.5, 0.5), done(2), done(2.5), done(2.5))
	})
	t.Run("processor sharing on two processors", func(t *testing.T) {
		c := constantly(1, sim.ProcessorSharing, 0, 0, 0)
		c.Servers[0].CPUs = 2
		checkFlows(t, c, done(1.5), done(1.5), done(1.5))
	})
	t.Run("worker limit", func(t *testing.T) {
		c := constantly(1, sim.ProcessorSharing, 0, 0, 0, 0, 0)
		c.Servers[0].Workers, c.Servers[0].Backlog = 2, 2
		checkFlows(t, c, done(2), done(2), done(4), done(4), ended{0, 0, sim.Refused})
	})
	t.Run("backlog", func(t *testing.T) {
		c := constantly(1, sim.FIFO, 0, 0, 0, 1)
		c.Servers[0].Backlog = 1
		checkFlows(t, c, done(1), done(2), ended{0, 0, sim.Refused}, done(2))
	})
	t.Run("speed", func(t *testing.T) {
		c := constantly(1, sim.FIFO, 0, 0)
		c.Servers[0].Speed = 4
		checkFlows(t, c, done(0.25), done(0.5))
	})
}

func TestStages(t *testing.T) {
	c := constantly(1, sim.FIFO, 0, 0)
	stage := func(q sim.Queue) sim.Stage { return sim.Stage{Queue: q, Work: sim.Constant(1)} }
	c.Jobs[0].Stages = []sim.Stage{stage(sim.CPU), stage(sim.IO), stage(sim.CPU)}
	checkFlows(t, c, done(3), done(4)) // the flows use the processor and IO in turn
	c = constantly(1, sim.FIFO, 0, 0.5)
	c.Jobs[0].Stages = []sim.Stage{stage(sim.IO), stage(sim.CPU)}
	c.Servers[0].IOSpeed = 2
	// In the IO queue, the second flow begins when the first one has left.
	checkFlows(t, c, done(1.5), done(2))
}

func TestTimeouts(t *testing.T) {
	late := ended{2.5, 0, sim.TimedOut}
	t.Run("backlog", func(t *testing.T) {
		// The third flow is served too late. The client of the fourth one has gone when it comes
		// to the head of the backlog at 3. So the fifth one, which arrives then, is served at
		// once.
		c := constantly(1, sim.FIFO, 0, 0, 0, 0.1, 2.9)
		c.Timeout = 2.5
		checkFlows(t, c, done(1), done(2), late, late, done(1.1))
	})
	t.Run("workers", func(t *testing.T) {
		c := constantly(1, sim.ProcessorSharing, 0, 0, 0, 0.1, 2.9)
		c.Servers[0].Workers, c.Timeout = 1, 2.5
		checkFlows(t, c, done(1), done(2), late, late, done(1.1))
	})
	t.Run("silent servers", func(t *testing.T) {
		c := constantly(1, sim.FIFO, 0, 0)
		c.Servers[0].Backlog, c.Timeout, c.Silent = 0, 2.5, true
		checkFlows(t, c, done(1), late)
		if _, r := flows(t, c); r.Response.Count() != 2 || r.Response.Max() != 2.5 {
			t.Errorf("%d response times up to %v, want 2 up to the timeout", r.Response.Count(), r.Response.Max())
		}
	})
}

func TestDelays(t *testing.T) {
	c := constantly(2, sim.FIFO, 0, 0)
	c.Network = sim.Network{
		ClientBalancer: sim.Constant(0.001), BalancerServer: sim.Constant(0.01),
		ServerServer: sim.Constant(0.1), ServerClient: sim.Constant(0.5),
	}
	// The response contains a handshake to the server and back, the request, the work and the
	// response.
	checkFlows(t, c, done(2*0.511+1), done(2*0.511+2))
	c.Arrivals, c.Placement = times{0}, to(0, 1)
	c.Policy = policy(func(_ sim.Load, offer *sim.Offer) int32 { return min(offer.At+1, offer.N-1) })
	checkFlows(t, c, ended{2*0.511 + 0.1 + 1, 1, sim.Completed})
	if _, r := flows(t, c); r.Hops != 1 || r.Wrongful != 0 {
		t.Errorf("%d hops, %d passed on wrongfully to a server as idle; want 1 and 0", r.Hops, r.Wrongful)
	}
}

func TestAgentsDecide(t *testing.T) {
	var seen []sim.Load
	c := constantly(3, sim.FIFO, 0, 0, 0, 0)
	c.Placement = to(0, 1, 2)
	c.Policy = policy(func(own sim.Load, offer *sim.Offer) int32 {
		switch {
		case !offer.Last() && own.Open > 0:
			return offer.At + 1
		case own.Open > 0:
			seen = append(seen, offer.Loads[:3]...)
			return 0 // the next server, which must take the flow
		}
		return offer.At
	})
	all, r := flows(t, c)
	var servers, hops []int32
	for _, f := range all {
		servers, hops = append(servers, f.Server), append(hops, f.Hops)
	}
	if !slices.Equal(servers, []int32{0, 1, 2, 0}) || !slices.Equal(hops, []int32{0, 1, 2, 3}) {
		t.Errorf("servers %v after %v hops", servers, hops)
	}
	busy := sim.Load{Open: 1, Busy: 1, Workers: 1, CPUs: 1, Capacity: 1}
	if want := []sim.Load{busy, busy, busy}; !slices.Equal(seen, want) {
		t.Errorf("loads %+v, want %+v", seen, want)
	}
	if r.Hops != 6 || r.Wrongful != 0 {
		t.Errorf("%d hops, %d passed on wrongfully; want 6 and 0", r.Hops, r.Wrongful)
	}
}

func TestWrongfulRejections(t *testing.T) {
	c := constantly(2, sim.FIFO, 0, 0.1, 0.2)
	c.Placement = method(func(*sim.Balancer) sim.Placement {
		return place(func(f *sim.Flow, offer *sim.Offer) {
			if f.Number < 2 {
				offer.Set(1) // so that server 1 has two flows
			} else {
				offer.Set(0, 1)
			}
		})
	})
	c.Policy = policy(func(_ sim.Load, offer *sim.Offer) int32 { return min(offer.At+1, offer.N-1) })
	if _, r := flows(t, c); r.Wrongful != 1 {
		t.Errorf("%d passed on wrongfully, want 1", r.Wrongful)
	}
}

func TestSpeedChanges(t *testing.T) {
	for _, d := range []sim.Discipline{sim.FIFO, sim.ProcessorSharing} {
		c := constantly(2, d, 0, 1.25)
		c.Events = []sim.Event{
			{At: 0.5, Kind: sim.SetSpeed, Servers: []int32{0}, Speed: 0.5},
			{At: 1.75, Kind: sim.SetSpeed, Servers: []int32{0}, Speed: 4},
		}
		if d == sim.FIFO {
			// The first flow has half of its work by 0.5, and the rest by 1.5. Then the second
			// flow begins. It has 1/8 of its work by 1.75, and ends at 1.75 + 7/32.
			checkFlows(t, c, done(1.5), done(0.5+7./32))
		} else {
			// From 1.25 on each flow gets a quarter of a second's work per second. By 1.75 the
			// first flow is complete: it had 7/8 of its work by 1.25, and got 1/8 since then.
			checkFlows(t, c, done(1.75), done(0.5+7./32))
		}
	}
}

func TestSamplesSeeTheTruth(t *testing.T) {
	for _, d := range []sim.Discipline{sim.FIFO, sim.ProcessorSharing} {
		c := constantly(1, d, 0, 0, 3)
		c.SampleInterval = 0.25
		var work []float64
		c.Sample = func(_ int, _ float64, w sim.World) { work = append(work, w.Work(0)) }
		flows(t, c)
		if want := []float64{1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25, 0}; !cmp.Equal(work[:8], want, cmpopts.EquateApprox(0, 1e-9)) {
			t.Errorf("work left %v, want %v", work, want)
		}
	}
}

// TestQueued compares the flows in a server's queues with its open flows. The handshake takes 2 s,
// so a flow is open for 2 s before its request arrives. Then it is in the queue of the processor or
// of IO.
func TestQueued(t *testing.T) {
	for _, d := range []sim.Discipline{sim.FIFO, sim.ProcessorSharing} {
		c := constantly(1, d, 0, 0, 0, 11)
		c.Network.ServerClient = sim.Constant(2)
		c.Jobs[0].Stages = append(c.Jobs[0].Stages, sim.Stage{Queue: sim.IO, Work: sim.Constant(1)})
		if d == sim.ProcessorSharing {
			c.Servers[0].Workers = 2 // so the third flow waits for a worker
		}
		c.SampleInterval = 0.99
		var open, queued []int
		c.Sample = func(_ int, _ float64, w sim.World) {
			open, queued = append(open, w.Open(0)), append(queued, w.Queued(0))
		}
		flows(t, c)
		if !slices.Equal(open[:2], []int{3, 3}) || !slices.Equal(queued[:2], []int{0, 0}) {
			t.Errorf("discipline %d: %v open and %v queued", d, open, queued)
		}
		if !slices.Equal(queued[2:9], open[2:9]) || open[2] != 3 || open[8] != 0 {
			t.Errorf("discipline %d, after the handshakes: %v open and %v queued", d, open, queued)
		}
	}
}

// observer is a policy that accepts all flows and records which flows were served.
type observer struct{ log *[]string }

func (observer) Decide(_ sim.Load, offer *sim.Offer) int32 { return offer.At }

func (o observer) Served(duration float64, others int32) {
	*o.log = append(*o.log, fmt.Sprintf("after %.4g, beside %d", duration, others))
}

func (observer) Latency(own sim.Load) float64 { return 7 + float64(own.Open) }

type observers struct{ log *[]string }

func (o observers) New(*sim.Host) (sim.Agent, error) { return observer(o), nil }

// An agent sees the flows that were served. It does not see flows that were refused, given up or
// broken.
func TestObserversSeeWhatWasServed(t *testing.T) {
	var log []string
	c := constantly(1, sim.FIFO, 0, 0, 0, 0, 1.25, 2.5)
	c.Servers[0].Backlog, c.Timeout, c.Policy = 2, 1.5, observers{&log}
	c.Network.ServerClient = sim.Constant(0.1)
	c.Events = []sim.Event{{At: 2.55, Kind: sim.ServerFail, Servers: []int32{0}}}
	checkFlows(t, c,
		done(1.2), ended{1.5, 0, sim.TimedOut}, ended{1.5, 0, sim.TimedOut}, ended{0.2, 0, sim.Refused},
		ended{1.4, 0, sim.Broken}, ended{0.15, 0, sim.Broken})
	if want := []string{"after 1, beside 0", "after 2, beside 1"}; !slices.Equal(log, want) {
		t.Errorf("seen %q, want %q", log, want)
	}
	c.SampleInterval = 0.25 // up to the last arrival
	c.Sample = func(_ int, now float64, w sim.World) {
		if l := w.Load(0); l.Latency != 7+float64(l.Open) {
			t.Errorf("at %v latency %v with %d open", now, l.Latency, l.Open)
		}
	}
	flows(t, c)
}
