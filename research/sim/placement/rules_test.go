// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

// alone returns a balancer without a run, for tests that need neither the clock nor the true
// state.
func alone(cpus ...int32) *sim.Balancer {
	b := &sim.Balancer{Peers: []int32{0}, Rand: new(sim.Rand)}
	for i, n := range cpus {
		b.Servers = append(b.Servers, sim.Server{Name: string(rune('a' + i)), CPUs: n, Speed: 1, Backlog: -1})
		b.Live = append(b.Live, int32(i))
	}
	return b
}

// spied is a method that keeps its first balancer, whose clock stands still after a run.
type spied struct {
	sim.Method
	b *sim.Balancer
}

func (s *spied) New(b *sim.Balancer) (sim.Placement, error) {
	s.b = b
	return s.Method.New(b)
}

// balancerAfterRun returns a balancer of a run that ended some time after 0.
func balancerAfterRun(t *testing.T) *sim.Balancer {
	t.Helper()
	c := smallConfig(nil)
	spy := &spied{Method: &ECMP{}}
	c.Placement, c.Connections, c.Balancers, c.Events = spy, 100, c.Balancers[:1], nil
	if _, err := sim.Run(t.Context(), c, sim.Options{Seed: 1, Runs: 1}); err != nil {
		t.Fatal(err)
	}
	if spy.b.Now() <= 1 {
		t.Fatalf("the run took %v s", spy.b.Now())
	}
	return spy.b
}

// TestTwosIsByCapacity checks that flows that do not end are in proportion to the capacities.
func TestTwosIsByCapacity(t *testing.T) {
	p, err := (&Twos{Count: CountPlaced}).New(alone(1, 3))
	testhost.Must(t, err)
	for i := range uint64(4000) {
		var offer sim.Offer
		p.Place(&sim.Flow{Key: i}, &offer)
	}
	flows := p.(*twos).flows
	if math.Abs(flows[0]-1000) > 30 {
		t.Errorf("flows %v, want 1000 and 3000", flows)
	}
}

// TestSRDynLimit has a server with one processor and five flows, four of which wait. It takes a
// flow only if the limit lets the threshold rise above five. The default limit is one, its
// processor.
func TestSRDynLimit(t *testing.T) {
	for limit, want := range map[int]bool{0: false, 5: false, 6: true} {
		_, policy, err := (&SRDyn{Hunt: Hunt{Candidates: 2}, Window: 10, Epsilon: 0.1, Initial: 1, Limit: limit}).Build()
		testhost.Must(t, err)
		agent, err := policy.New(nil)
		testhost.Must(t, err)
		taken := false
		for range 100 {
			taken = taken || agent.Decide(sim.Load{Open: 5, Busy: 1, Waiting: 4, Workers: 1}, &sim.Offer{N: 2}) == 0
		}
		if taken != want {
			t.Errorf("limit %d: a flow is taken: %t", limit, taken)
		}
	}
}

// TestChain checks that a flow is offered to the first of its candidates, and that Recover returns
// all of them.
func TestChain(t *testing.T) {
	for _, reports := range []bool{false, true} {
		b := balancerAfterRun(t)
		p, err := (&Least{Hunt: Hunt{Candidates: 4, Buckets: 257}, Chain: 2, Reports: reports}).New(b)
		testhost.Must(t, err)
		var offer, all sim.Offer
		f := &sim.Flow{Key: 12345}
		p.Place(f, &offer)
		p.(sim.Recoverer).Recover(f, &all)
		if offer.N != 2 || all.N != 4 || !slices.Contains(all.Servers[:4], offer.Servers[0]) {
			t.Errorf("reports %t: offered to %v, looked for at %v", reports, offer.Servers[:offer.N], all.Servers[:all.N])
		}
	}
}

// TestWeighted checks that a server of four times the capacity has four times as many buckets, if
// weights follow capacities.
func TestWeighted(t *testing.T) {
	b := alone(1, 4)
	for weighted, want := range map[bool]int{false: 500, true: 800} {
		p, err := (&Hunt{Candidates: 1, Buckets: 1009, Weighted: weighted}).New(b)
		testhost.Must(t, err)
		first := 0
		for bucket := range 1000 {
			if p.(*hash).table.Row(bucket)[0] == 1 {
				first++
			}
		}
		if first < want-20 || first > want+20 {
			t.Errorf("weighted %t: the large server has %d of 1000 buckets, want about %d",
				weighted, first, want)
		}
	}
	want := []uint32{10, 20, 40, 1000}
	if got := TableWeights(alone(1, 2, 4, 1000).Servers); !slices.Equal(got, want) {
		t.Errorf("weights %v, want %v", got, want)
	}
	m := &Least{Hunt: Hunt{Candidates: 2, Random: true, Weighted: true}}
	requireError(t, m, "weighted: not with random")
}

// TestReportsAge checks that a report approaches the mean of all reports by the factor e in each
// age.
func TestReportsAge(t *testing.T) {
	b := balancerAfterRun(t)
	p := &reported{b: b, age: 0.5, mean: 2, last: []report{{load: 6, when: b.Now() - 0.5}, {load: 1, when: b.Now()}}}
	for server, want := range []float64{2 + 4/math.E, 1} {
		if got := p.load(int32(server)); math.Abs(got-want) > 1e-9 {
			t.Errorf("server %d is taken to have %v, want %v", server, got, want)
		}
	}
	if p.age = 0; p.load(0) != 6 {
		t.Errorf("without ageing it is taken to have %v, want 6", p.load(0))
	}
}

// TestReportOthers checks whose loads a balancer takes from the signal about a flow that the first
// two of four candidates passed on, and which value it takes.
func TestReportOthers(t *testing.T) {
	busy := func(open int32) sim.Load { return sim.Load{Open: open, CPUs: 3} }
	for _, c := range []struct {
		others ReportOthers
		coded  bool
		want   []float64
	}{
		{"", false, []float64{8. / 3, 9. / 3, 10. / 3, 0}},
		{ReportAll, false, []float64{8. / 3, 9. / 3, 10. / 3, 0}},
		{ReportFirst, false, []float64{8. / 3, 0, 10. / 3, 0}},
		{ReportNone, false, []float64{0, 0, 10. / 3, 0}},
		{ReportAll, true, []float64{44. / 16, 48. / 16, 54. / 16, 0}}, // 8/3 is 42.7/16
	} {
		p := newReported(t, &Least{ReportOthers: c.others, Coded: c.coded})
		offer := sim.Offer{N: 4, At: 2, Servers: [sim.MaxChain]int32{0, 1, 2, 3}}
		offer.Loads[0], offer.Loads[1], offer.Loads[2] = busy(7), busy(8), busy(8)
		p.Accepted(&sim.Flow{Server: 2}, &offer, busy(9))
		for server, want := range c.want {
			if got := p.last[server].load; got != want {
				t.Errorf("others %q, coded %t: server %d reported %v, want %v",
					c.others, c.coded, server, got, want)
			}
		}
	}
}

// TestReportOfTheFirstAlone checks that the first candidate does not count twice if it takes the
// flow itself.
func TestReportOfTheFirstAlone(t *testing.T) {
	p := newReported(t, &Least{ReportOthers: ReportFirst})
	offer := sim.Offer{N: 2, Servers: [sim.MaxChain]int32{0, 1}}
	offer.Loads[0] = sim.Load{Open: 50, CPUs: 1}
	p.Accepted(&sim.Flow{Server: 0}, &offer, sim.Load{Open: 9, CPUs: 1})
	if want := meanGain * 10; math.Abs(p.mean-want) > 1e-9 {
		t.Errorf("the mean of the reports is %v, want %v", p.mean, want)
	}
}

// newReported returns the placement of a balancer after a run.
func newReported(t *testing.T, m *Least) *reported {
	t.Helper()
	m.Hunt, m.Reports = Hunt{Candidates: 4, Buckets: 257}, true
	p, err := m.New(balancerAfterRun(t))
	testhost.Must(t, err)
	return p.(*reported)
}

// TestReportsOnly checks that options of reports are refused without reports.
func TestReportsOnly(t *testing.T) {
	for _, m := range []*Least{{Spare: 1}, {ReportOthers: ReportFirst}, {Coded: true}} {
		m.Candidates = 2
		requireError(t, m, "with reports only")
		m.Reports = true
		if _, _, err := m.Build(); err != nil {
			t.Errorf("with reports: %v", err)
		}
	}
	m := &Least{Hunt: Hunt{Candidates: 2}, Reports: true, ReportOthers: "some"}
	requireError(t, m, `report-others "some": must be all or first or none`)
}

// requireError checks that the parameters of a placement are refused.
func requireError(t *testing.T, s Spec, want string) {
	t.Helper()
	if _, _, err := s.Build(); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %q", err, want)
	}
}

// TestOldAnswersAreNoChoice checks that answers are removed when they are too old, and that one
// answer alone is not used.
func TestOldAnswersAreNoChoice(t *testing.T) {
	b := balancerAfterRun(t)
	p := &prequal{m: prequalDefaults(), b: b}
	fresh, old := answer{server: 0, uses: 9, when: b.Now()}, answer{server: 0, uses: 9, when: b.Now() - 1.1}
	count := func(pool ...answer) (first int) {
		for range 100 {
			var offer sim.Offer
			p.pool = slices.Clone(pool)
			p.Place(nil, &offer)
			if offer.Servers[0] == 0 {
				first++
			}
		}
		return first
	}
	if n := count(fresh, fresh); n != 100 {
		t.Errorf("%d of 100 flows went where two answers are from", n)
	}
	for _, pool := range [][]answer{{fresh}, {old, old}} {
		if n := count(pool...); n == 0 || n > 50 {
			t.Errorf("%d of 100 flows went to one of eight servers by chance", n)
		}
	}
}

// flowsByServer runs flows of equal work that arrive about gap seconds apart. It returns the number
// of flows of each server.
func flowsByServer(t *testing.T, m sim.Method, work float64, gap float64, flows int, all ...sim.Server) []int {
	t.Helper()
	c := smallConfig(m)
	c.Servers, c.Events, c.Network = all, nil, sim.Network{}
	c.Jobs[0].Stages[0].Work = sim.Constant(work)
	c.Arrivals, c.Connections = sim.Poisson{Rate: 1 / gap}, uint64(flows)
	had := make([]int, len(all))
	c.Completed = func(_ int, f sim.Ended) { had[f.Server]++ }
	if _, err := sim.Run(t.Context(), c, sim.Options{Seed: 1, Runs: 1}); err != nil {
		t.Fatal(err)
	}
	return had
}

// TestOracleCountsTheFlowIn checks that a busy fast server gets a flow if it would complete it
// before an idle slow one.
func TestOracleCountsTheFlowIn(t *testing.T) {
	slow := sim.Server{Name: "slow", CPUs: 1, Speed: 1, Backlog: -1}
	fast := sim.Server{Name: "fast", CPUs: 1, Speed: 10, Backlog: -1}
	if had := flowsByServer(t, &Oracle{}, 10, 1e-6, 9, slow, fast); had[1] != 9 {
		t.Errorf("flows %v, want all on the fast server", had)
	}
	if had := flowsByServer(t, &Oracle{}, 10, 1e-6, 22, slow, fast); had[0] == 0 || had[0] > 2 {
		t.Errorf("flows %v, want 2 on the slow server", had)
	}
}

// TestOracleWhole checks that ten processors complete ten flows in the time of one flow, but do
// not complete one flow faster.
func TestOracleWhole(t *testing.T) {
	single := sim.Server{Name: "single", CPUs: 1, Speed: 2, Backlog: -1}
	large := sim.Server{Name: "large", CPUs: 10, Speed: 1, Backlog: -1}
	for whole, want := range map[bool][]int{false: {0, 1}, true: {1, 0}} {
		if had := flowsByServer(t, &Oracle{Whole: whole}, 10, 1, 1, single, large); !slices.Equal(had, want) {
			t.Errorf("whole %t: flows %v, want %v", whole, had, want)
		}
	}
}

// TestTruthBreaksTiesByChance checks that idle servers get the same number of flows.
func TestTruthBreaksTiesByChance(t *testing.T) {
	one := sim.Server{Name: "one", CPUs: 1, Speed: 1, Backlog: -1}
	two := one
	two.Name = "two"
	if had := flowsByServer(t, &GSQ{}, 1e-6, 1, 200, one, two); had[0] < 70 || had[1] < 70 {
		t.Errorf("flows %v, want about 100 on each", had)
	}
}

// TestOwnOrder checks that each balancer breaks ties in its own order.
func TestOwnOrder(t *testing.T) {
	orders := make(map[string]bool)
	for seed := range 4 {
		b := alone(1, 1, 1, 1, 1, 1, 1, 1)
		for range seed {
			b.Rand.Uint64()
		}
		p, err := (&LeastQueue{Own: Own{Ties: TiesOwn}}).New(b)
		testhost.Must(t, err)
		order := p.(*byScore).server
		if !slices.Equal(slices.Sorted(slices.Values(order)), b.Live) {
			t.Errorf("order %v", order)
		}
		name := ""
		for _, s := range order {
			name += b.Servers[s].Name
		}
		orders[name] = true
	}
	if len(orders) < 3 {
		t.Errorf("four balancers have the orders %v", orders)
	}
}

// TestHomesComeFirst checks that a balancer's order begins with its home servers, and ends with
// the servers that are not live.
func TestHomesComeFirst(t *testing.T) {
	b := alone(1, 2, 1, 2, 1, 2, 1, 2, 1, 2)
	b.Live, b.Peers = []int32{0, 1, 2, 3, 5, 6, 7, 8}, []int32{0, 2}
	var members []infer.WeightedServer
	for _, s := range b.Live {
		members = append(members, infer.WeightedServer{Name: b.Servers[s].Name, Weight: b.Servers[s].Capacity()})
	}
	home := infer.Homes(members, []string{"balancer 0", "balancer 2"})
	total := 0
	for self, index := range b.Peers {
		b.Index = int(index)
		order, homes := homeOrder(b, capacities(b))
		var want []int32
		for i, s := range b.Live {
			if int(home[i]) == self {
				want = append(want, s)
			}
		}
		if got := slices.Sorted(slices.Values(order[:homes])); !slices.Equal(got, want) || !slices.Equal(order[8:], []int32{4, 9}) {
			t.Errorf("balancer %d: order %v, of which %d at home; want %v there, and 4 and 9 last", index, order, homes, want)
		}
		total += homes
	}
	if total != len(b.Live) {
		t.Errorf("%d servers have a home, want %d", total, len(b.Live))
	}
}
