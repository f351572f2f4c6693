// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"math"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/poll"
	"github.com/segue-lb/segue/internal/testhost"
)

// among returns the servers that a placement chooses among by default.
func among(placement desired.Placement) desired.Among {
	switch placement {
	case desired.PlacementAWCMP:
		return desired.AmongWeighted
	case desired.PlacementWeightedTurns:
		return desired.AmongTurns
	case desired.PlacementGSQ2:
		return desired.AmongTwo
	}
	return desired.AmongAll
}

// share returns the share of its turns or draws that a server takes, in 2^-32.
func (f *fixture) share(slot uint32) uint64 {
	return min(1<<32, (1<<48)/uint64(f.plane.Loads.Price(slot).Unit))
}

// drawn returns the server that a draw by weights gives a flow to.
func (f *fixture) drawn(flow dataplane.Flow) uint32 {
	slots, hash := f.rankedSlots(), flow.Hash(&f.identity.BucketKeys)
	for try := uint32(0); ; try++ {
		at := uint64(mixed(hash+2*try*0x9e3779b9)) * uint64(len(slots)) >> 32
		ticket := mixed(hash + (2*try+1)*0x9e3779b9)
		if slot := slots[at]; f.plane.Servers.TakesFlows(slot) && uint64(ticket) < f.share(slot) {
			return slot
		}
	}
}

// turned returns the server that gets a flow if this turn comes next, and the turn after.
func (f *fixture) turned(turn uint64) (slot uint32, next uint64) {
	slots := f.rankedSlots()
	for ; ; turn++ {
		at, cycle := turn%uint64(len(slots)), turn/uint64(len(slots))
		slot := slots[at]
		ticket := uint32(at*0x9e3779b9 + cycle*f.share(slot))
		if f.plane.Servers.TakesFlows(slot) && uint64(ticket) < f.share(slot) {
			return slot, turn + 1
		}
	}
}

// setWeights sets the prices of s1, s2 and so on for weights.
func (f *fixture) setWeights(weights ...float64) {
	most := 0.0
	for _, w := range weights {
		most = max(most, w)
	}
	for i, m := range f.services.byName["web"].members {
		f.plane.Loads.SetPrice(m.slot, infer.NewPrice(most/weights[i], 0, 0, false))
	}
}

// Each flow goes to the server that its hash draws, or whose turn it is. All flows together follow
// the weights.
func TestFlowsFollowWeights(t *testing.T) {
	t.Parallel()
	weights := []float64{8, 4, 4, 1, 0.01}
	const flows = 3000
	for _, placement := range []desired.Placement{desired.PlacementAWCMP, desired.PlacementWeightedTurns} {
		t.Run(string(placement), func(t *testing.T) {
			t.Parallel()
			cfg := placingBy(placement, manyServers(6)...)
			cfg.Node.Limits.Flows = 1 << 14
			f := open(t, cfg)
			f.setWeights(append(weights, 4)...)
			f.via["s6"] = ""
			f.route()
			got := map[string]int{}
			for port := range uint16(flows) {
				flow := fromPort(web, 1000+port)
				want := f.drawn(flow)
				if placement == desired.PlacementWeightedTurns {
					want, _ = f.turned(f.turnsGiven("web"))
				}
				o := f.run(frameOf(flow))
				if name := f.leastOf([]uint32{want}); serverOf(o) != name {
					t.Fatalf("flow %d goes to %s (%s), want %s", port, serverOf(o), reasonOf(o), name)
				}
				got[serverOf(o)]++
			}
			for i, w := range weights {
				name := "web/" + manyServers(6)[i].Name
				want := flows * w / 17.01
				tolerance := 5*math.Sqrt(want) + 1
				if placement == desired.PlacementWeightedTurns {
					want, tolerance = float64(got["web/s1"])*w/weights[0], 2
				}
				if math.Abs(float64(got[name])-want) > tolerance {
					t.Errorf("%s gets %d flows, want %.1f", name, got[name], want)
				}
			}
		})
	}
}

// Two cores take turns at the same time. Each turn is given out once, so that all flows together
// have the shares of the same number of flows one after the other. A flow takes 34 turns on
// average, until one is of the first server, or another one takes it. So the cores collide often.
func TestTurnsOfTwoCores(t *testing.T) {
	t.Parallel()
	const flows = 2000 // of each core
	cfg := placingBy(desired.PlacementWeightedTurns, manyServers(100)...)
	cfg.Node.Limits.Flows = 1 << 14
	f := open(t, cfg)
	f.setWeights(append([]float64{1}, slices.Repeat([]float64{0.02}, 99)...)...)
	want, turn := map[string]uint64{}, f.turnsGiven("web")
	for range 2 * flows {
		var slot uint32
		slot, turn = f.turned(turn)
		want[f.leastOf([]uint32{slot})]++
	}
	f.moving = true
	var cores sync.WaitGroup
	for core := range uint16(2) {
		cores.Go(func() {
			pin(t, int(core))
			for i := range uint16(flows) {
				f.exec(frameOf(fromPort(web, 1000+2*i+core)), nil)
			}
		})
	}
	cores.Wait()
	got := map[string]uint64{}
	for server, n := range f.counters().servers {
		if n.Flows > 0 {
			got[server] = n.Flows
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if next := f.turnsGiven("web"); next != turn {
		t.Errorf("turn %d comes next, want %d", next, turn)
	}
}

// A trace foresees the server of a flow, as often as it is asked, and takes no turn.
func TestTraceOfWeights(t *testing.T) {
	t.Parallel()
	for placement, among := range map[desired.Placement]desired.Among{
		desired.PlacementAWCMP: desired.AmongWeighted, desired.PlacementGSQ2: desired.AmongTwo,
		desired.PlacementWeightedTurns: desired.AmongTurns,
	} {
		t.Run(string(placement), func(t *testing.T) {
			t.Parallel()
			f := open(t, placingBy(placement, manyServers(5)...))
			f.setWeights(8, 4, 3, 1, 0.1)
			view := f.view()
			for port := range uint16(50) {
				flow := fromPort(web, 1000+port)
				first := mustTrace(t, view, inspect.Packet{Flow: flow, Length: 60, Opens: true})
				trace := mustTrace(t, view, inspect.Packet{Flow: flow, Length: 60, Opens: true})
				if first.Server.Name != trace.Server.Name {
					t.Fatalf("traced to %s, and then to %s", first.Server.Name, trace.Server.Name)
				}
				scores := trace.Placement.Scores
				if scores.Among != among || len(scores.Servers) != 1 || scores.Others != 4 ||
					scores.Servers[0].Server != trace.Server.Name {
					t.Fatalf("of server %s: %+v", trace.Server.Name, scores)
				}
				if got := serverOf(f.run(frameOf(flow))); got != "web/"+trace.Server.Name {
					t.Fatalf("flow %d goes to %s, traced to %s", port, got, trace.Server.Name)
				}
			}
		})
	}
}

// agents answers the polls of a fixture with the loads of servers.
func agents(t *testing.T, key desired.SignalKey, load func(poll.Service) (poll.Load, bool)) netip.AddrPort {
	t.Helper()
	r := poll.NewResponder(load)
	r.SetKeys(desired.SignalKeys{key})
	testhost.Must(t, r.Listen("[::1]:0"))
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(t.Context())
	}()
	t.Cleanup(func() { <-done })
	return netip.MustParseAddrPort(r.Address())
}

// polling returns a configuration in which only s1 answers polls, at this address.
func polling(placement desired.Placement, at netip.AddrPort) *desired.Balancer {
	servers := manyServers(3)
	for i := range servers {
		servers[i].Host = netip.MustParseAddr("100::1") // no host has it: RFC 6666
	}
	servers[0].Host = at.Addr()
	cfg := placingBy(placement, servers...)
	cfg.Services[0].Infer.PollPort = at.Port()
	cfg.Services[0].Infer.Poll = 100 * time.Millisecond
	return cfg
}

// settles lets time pass until the prices are as wanted.
func (f *fixture) settles(isWanted func() bool) {
	f.t.Helper()
	for range 500 {
		if f.infers(sampleInterval); isWanted() {
			return
		}
		time.Sleep(2 * time.Millisecond)
	}
	f.t.Fatalf("the prices are %+v and %+v", f.priceOf("s1"), f.priceOf("s2"))
}

// Prices follow the answers of agents. Servers without an answer count as the average. Before the
// first answer the configured weights count.
func TestPricesFollowPolls(t *testing.T) {
	t.Parallel()
	key := desired.SignalKey{9}
	for placement, extra := range map[desired.Placement]uint32{
		desired.PlacementAWCMP: 0, desired.PlacementGSQ2: 9 * infer.PriceOne,
	} {
		t.Run(string(placement), func(t *testing.T) {
			t.Parallel()
			want := poll.Service{VIP: vip6, Port: 80, Protocol: 6}
			at := agents(t, key, func(s poll.Service) (poll.Load, bool) {
				return poll.Load{Busy: 9, Capacity: 5}, s == want
			})
			cfg := polling(placement, at)
			cfg.Services[0].Servers[1].Weight = new(uint32(3))
			f := open(t, cfg)
			if a, b := f.priceOf("s1"), f.priceOf("s2"); extra == 0 && a.Unit != 3*b.Unit {
				t.Errorf("before the first answer: %+v and %+v", a, b)
			}
			f.inference.poller.SetKeys(desired.SignalKeys{key})
			f.settles(func() bool {
				a, b := f.priceOf("s1"), f.priceOf("s2")
				return a.Unit == b.Unit && a.Extra == extra && b.Extra == extra
			})
		})
	}
}

// A server keeps its last load while it misses few polls. Readers see the load as long as it
// counts.
func TestMissedPolls(t *testing.T) {
	t.Parallel()
	key, busy := desired.SignalKey{9}, uint32(2)
	at := agents(t, key, func(poll.Service) (poll.Load, bool) {
		busy += 50
		return poll.Load{Busy: busy, Capacity: 7}, busy < 100
	})
	cfg := polling(desired.PlacementGSQ2, at)
	f := open(t, cfg)
	shown := func() *inspect.PolledLoad {
		snapshot, err := f.view().Snapshot()
		f.must(err)
		return snapshot.Services[0].Servers[0].Inferred.Estimate.Polled
	}
	metrics := newRegistry(f)
	f.inference.poller.SetKeys(desired.SignalKeys{key})
	f.settles(func() bool { return f.priceOf("s1").Extra > 0 })
	f.infers(4 * cfg.Services[0].Infer.Poll)
	if p := f.priceOf("s1"); p.Extra != 52*infer.PriceOne {
		t.Errorf("after four polls without an answer: %+v", p)
	}
	if p := shown(); p == nil || p.Busy != 52 || *p.Capacity != 7 || p.Age <= 0 {
		t.Errorf("after four polls without an answer readers see %+v", p)
	}
	exposed := `segue_lb_server_polled_load{server="s1",service="web"} 52`
	if got := expose(t, metrics); !strings.Contains(got, exposed) {
		t.Errorf("after four polls without an answer %s is missing in\n%s", exposed, got)
	}
	f.infers(2 * cfg.Services[0].Infer.Poll)
	if p := f.priceOf("s1"); p.Extra != 0 {
		t.Errorf("after five polls without an answer: %+v", p)
	}
	if p := shown(); p != nil {
		t.Errorf("after five polls without an answer readers see %+v", p)
	}
	if got := expose(t, metrics); strings.Contains(got, "segue_lb_server_polled_load{") {
		t.Errorf("after five polls without an answer:\n%s", got)
	}
}

// A server that answers again counts with what it says.
func TestAnswersAgain(t *testing.T) {
	t.Parallel()
	key, knows := desired.SignalKey{9}, atomic.Bool{}
	at := agents(t, key, func(poll.Service) (poll.Load, bool) {
		return poll.Load{Busy: 3}, knows.Load()
	})
	cfg := polling(desired.PlacementGSQ2, at)
	f := open(t, cfg)
	f.inference.poller.SetKeys(desired.SignalKeys{key})
	for range 2 {
		knows.Store(true)
		f.settles(func() bool { return f.priceOf("s1").Extra == 3*infer.PriceOne })
		knows.Store(false)
		f.infers(10 * cfg.Services[0].Infer.Poll)
		if p := f.priceOf("s1"); p.Extra != 0 {
			t.Errorf("without answers: %+v", p)
		}
	}
}

// The next process continues with the loads that servers have told, as long as they count.
func TestLoadsOutliveProcess(t *testing.T) {
	t.Parallel()
	key := desired.SignalKey{9}
	at := agents(t, key, func(poll.Service) (poll.Load, bool) { return poll.Load{Busy: 5}, true })
	cfg := polling(desired.PlacementGSQ2, at)
	cfg.Services[0].Infer.Poll = 10 * time.Second
	f := open(t, cfg)
	f.inference.poller.SetKeys(desired.SignalKeys{key})
	f.infers(cfg.Services[0].Infer.Poll)
	f.settles(func() bool { return f.priceOf("s1").Extra > 0 })
	f.restart() // without a key, so that nobody answers
	f.infers(4 * cfg.Services[0].Infer.Poll)
	if p := f.priceOf("s1"); p.Extra != 5*infer.PriceOne {
		t.Errorf("after a restart: %+v", p)
	}
	f.infers(2 * cfg.Services[0].Infer.Poll)
	if p := f.priceOf("s1"); p.Extra != 0 {
		t.Errorf("a minute after a restart: %+v", p)
	}
}

// A load that is too old to count is not recalled.
func TestRecall(t *testing.T) {
	t.Parallel()
	const now, interval = time.Hour, time.Second
	for age, counts := range map[time.Duration]bool{
		0: true, 4900 * time.Millisecond: true, 5 * time.Second: false,
	} {
		var p polled
		p.recall(&dataplane.Estimate{Told: &infer.Load{Busy: 5}, ToldAt: now - age}, now, interval)
		if got := p.load != nil; got != counts {
			t.Errorf("the load of %s ago counts: %t", age, got)
		}
	}
}
