// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/packet"
)

// inferring returns a configuration whose service web infers, without a slow start.
func inferring(servers ...desired.Server) *desired.Balancer {
	cfg := webOf(servers...)
	svc := &cfg.Services[0]
	svc.Placement, svc.Candidates = desired.PlacementInfer, 8
	svc.Infer = &desired.Infer{
		Estimator: desired.EstimateTerritoryLearned, Interval: 500 * time.Millisecond,
		Among: desired.AmongAll,
	}
	cfg.Node.Name = "lb1"
	return cfg
}

// placingBy returns inferring with another placement.
func placingBy(placement desired.Placement, servers ...desired.Server) *desired.Balancer {
	cfg := inferring(servers...)
	svc := &cfg.Services[0]
	svc.Placement = placement
	if placement.Infers() {
		svc.Infer = &desired.Infer{Among: among(placement)}
	} else {
		svc.Infer = nil
	}
	return cfg
}

// manyServers returns servers of weight 1.
func manyServers(n int) (servers []desired.Server) {
	for i := range n {
		server := srv6Server(fmt.Sprint("s", i+1), uint8(i+1), 1)
		locator := server.Locator.Addr().As16()
		locator[6] = byte((i + 1) >> 8)
		server.Locator = netip.PrefixFrom(netip.AddrFrom16(locator), 64)
		servers = append(servers, server)
	}
	return servers
}

// infers lets time pass for the balancer, in which it samples at the usual interval.
func (f *fixture) infers(d time.Duration) {
	f.t.Helper()
	for end := f.inferred.Add(d); f.inferred.Before(end); {
		f.inferred = f.inferred.Add(sampleInterval)
		f.inference.tick(f.inferred)
	}
	if f.inference.problem != "" {
		f.t.Error(f.inference.problem)
	}
}

func (f *fixture) priceOf(server string) infer.Price {
	f.t.Helper()
	return f.plane.Loads.Price(f.slot("web", server))
}

// lowest returns the servers that take flows and have the shortest delay now. A core may take any of
// them (place/infer.h).
func (f *fixture) lowest() (servers []string) {
	least := uint64(math.MaxUint64)
	for _, m := range f.services.byName["web"].members {
		delay := f.plane.Loads.Score(m.slot) >> rankScoreShift
		if !f.plane.Servers.TakesFlows(m.slot) || delay > least {
			continue
		}
		if delay < least {
			least, servers = delay, nil
		}
		servers = append(servers, "web/"+m.Name)
	}
	return servers
}

// goesToLowest sends a number of SYNs of other flows, and requires that each goes to a server with
// the shortest delay.
func (f *fixture) goesToLowest(first, count uint16) (servers []string) {
	f.t.Helper()
	for port := range count {
		lowest := f.lowest()
		o := f.run(frameOf(fromPort(web, first+port)))
		if !slices.Contains(lowest, serverOf(o)) || reasonOf(o) != "forward_new" {
			f.t.Fatalf("flow %d goes to %s (%s), want one of %s", port, serverOf(o), reasonOf(o), lowest)
		}
		servers = append(servers, serverOf(o))
	}
	return servers
}

// checkPlaces requires that the members of the service have all places of its ranking, and that no
// other server has one.
func (f *fixture) checkPlaces() {
	f.t.Helper()
	svc := f.services.byName["web"]
	var ranking [2]uint32
	f.must(f.plane.Objects.Rankings.Lookup(svc.id, &ranking))
	want := len(svc.members)
	if !svc.Placement.Infers() {
		want = 0
	}
	var ranks []uint32
	for slot := range f.plane.Objects.Loads.MaxEntries() {
		rank := f.plane.Directory.Servers[slot].Rank
		if rank == 0 {
			continue
		}
		if !slices.ContainsFunc(svc.members, func(m *member) bool { return m.slot == slot }) {
			f.t.Errorf("slot %d has rank %d, and no server", slot, rank)
		}
		ranks = append(ranks, rank)
	}
	slices.Sort(ranks)
	for i, rank := range ranks {
		if rank != uint32(i+1) {
			f.t.Errorf("the ranks are %v", ranks)
			break
		}
	}
	if len(ranks) != want || int(ranking[1]) != want {
		f.t.Errorf("%d ranks, and a ranking of %d, want %d", len(ranks), ranking[1], want)
	}
}

// Each flow goes to the server with the lowest score, also after prices have changed.
func TestFlowsFollowPrices(t *testing.T) {
	t.Parallel()
	f := open(t, inferring(manyServers(20)...))
	first := f.goesToLowest(1000, 20)
	if n := len(occurrences(first)); n != 20 {
		t.Errorf("20 flows go to %d of 20 equal servers", n)
	}
	cheap := f.slot("web", "s7")
	f.plane.Loads.SetPrice(cheap, infer.NewPrice(1./16, 0, 4000, false))
	f.must(f.plane.Rankings.Rank([]uint32{cheap}))
	got := occurrences(f.goesToLowest(2000, 30))
	if got["web/s7"] < 14 {
		t.Errorf("a server that serves 16 flows at once gets %d of 30", got["web/s7"])
	}
}

// The baselines know the speeds from the configuration, or take all servers for equal.
func TestBaselines(t *testing.T) {
	t.Parallel()
	servers := []desired.Server{srv6Server("s1", 1, 3), srv6Server("s2", 2, 1), srv6Server("s3", 3, 0)}
	for placement, want := range map[desired.Placement]map[string]int{
		desired.PlacementSED:        {"web/s1": 30, "web/s2": 10},
		desired.PlacementLeastQueue: {"web/s1": 20, "web/s2": 20},
	} {
		f := open(t, placingBy(placement, servers...))
		f.infers(time.Second)
		var all []string
		for port := range uint16(40) { // established, because more than 16 new flows do not count
			flow := fromPort(web, 1000+port)
			all = append(all, serverOf(f.run(frameOf(flow))))
			f.run(frameOf(flow, packet.Flags(packet.ACK)))
		}
		if got := occurrences(all); !maps.Equal(got, want) {
			t.Errorf("%s: %v, want %v", placement, got, want)
		}
	}
}

// The price of a server that does not answer rises. The price outlives the process, and so does
// what it follows from. A server that is removed and added again begins anew.
func TestEstimatesOutliveProcess(t *testing.T) {
	t.Parallel()
	cfg := inferring(manyServers(4)...)
	f := open(t, cfg)
	f.infers(time.Second)
	f.ignoreSYNs("s2", 40)
	suspect, trusted := f.priceOf("s2"), f.priceOf("s1")
	if suspect.Unit < 2*trusted.Unit {
		t.Fatalf("after SYNs without an answer: price %+v, of others %+v", suspect, trusted)
	}
	f.preserveEstimates()
	f.restart()
	if got := f.priceOf("s2"); got != suspect {
		t.Errorf("a restart changes the price from %+v to %+v", suspect, got)
	}
	f.infers(time.Second)
	if got := f.priceOf("s2"); got.Unit < suspect.Unit/2 {
		t.Errorf("a second after the restart the price is %+v, before %+v", got, suspect)
	}
	f.checkPlaces()
	for _, n := range []int{1, 4} {
		f.mustApply(inferring(manyServers(n)...))
		f.checkPlaces()
	}
	f.infers(time.Second)
	if got := f.priceOf("s2"); got.Unit != f.priceOf("s3").Unit {
		t.Errorf("a new server has the price %+v, others %+v", got, f.priceOf("s3"))
	}
}

// preserveEstimates keeps the stored estimates from aging until the next process restores them, which
// takes seconds on a busy machine: their times are then an hour ahead.
func (f *fixture) preserveEstimates() {
	f.t.Helper()
	for _, m := range f.services.byName["web"].members {
		e, ok, err := f.plane.Estimates.Of(m.slot)
		if !ok || err != nil {
			f.t.Fatalf("the estimate of %s: %t, %v", m.Name, ok, err)
		}
		e.Time += time.Hour
		f.plane.Estimates.Add(m.slot, &e)
	}
	f.must(f.plane.Estimates.Put())
}

// ignoreSYNs sends SYNs in rounds of one for each server. Only one server does not answer. All flows
// end with their round.
func (f *fixture) ignoreSYNs(server string, rounds int) {
	f.t.Helper()
	for i := range rounds {
		for j := range f.services.byName["web"].members {
			flow := fromPort(web, uint16(20000+100*i+j))
			if to := serverOf(f.run(frameOf(flow))); to != "web/"+server {
				f.run(frameOf(flow, packet.Flags(packet.ACK)))
			}
		}
		f.infers(100 * time.Millisecond)
		_, err := f.plane.Sweeper.Sweep(nobody)
		f.must(err)
	}
	f.infers(2 * time.Second)
}

// A flood of SYNs makes no server seem slower and changes neither the learned capacities nor the
// number of established flows, though most of the servers have no flows whose clients answer. The
// flood begins slowly, so that for a while it takes only these servers. Half of its sources are
// addresses of other hosts, which reset what they did not open.
func TestFloodKeepsEstimates(t *testing.T) {
	t.Parallel()
	const servers = 8
	f := open(t, inferring(manyServers(servers)...))
	v := visitors{fixture: f, random: rand.New(rand.NewPCG(1, 1)), port: 10000, at: map[string][]dataplane.Flow{}}
	for range 40 {
		v.visit(3 * servers / 2)
	}
	capacity := f.capacity()
	flood := flowTo(vip6, 80, desired.TCP)
	for step := range 30 {
		for range min(1<<step, 2000) {
			flood.Source = netip.AddrPortFrom(flood.Source.Addr().Next(), 1024)
			f.exec(frameOf(flood), nil)
			if flood.Source.Addr().As16()[15]%2 == 0 {
				f.exec(frameOf(flood, packet.Flags(packet.RST)), nil)
			}
		}
		v.visit(1 + step%2)
		for i := range servers {
			if r := f.estimatorOf("web").Report(i); r.NoAnswers*r.SilentFlows > 1 {
				t.Fatalf("step %d, server %d: %+v", step, i, r)
			}
		}
	}
	if got := f.capacity(); got < capacity*2/3 || got > capacity*3/2 {
		t.Errorf("a mean capacity of %.1f, before the flood %.1f", got, capacity)
	}
	open := 0
	for _, flows := range v.at {
		open += len(flows)
	}
	if got := f.established(); got != uint32(open) {
		t.Errorf("%d flows are established, of %d", got, open)
	}
}

// visitors open flows to servers that serve two flows at once, each for half a second in the mean.
// The balancer learns the true capacity of a server only if its flows end in the order in which the
// server serves them.
type visitors struct {
	*fixture
	random *rand.Rand
	port   uint16
	at     map[string][]dataplane.Flow // open flows by server, the oldest first
}

// visit opens flows, and serves for half a second.
func (v *visitors) visit(flows int) {
	for range flows {
		v.port++
		flow := fromPort(web, v.port)
		server := serverOf(v.run(frameOf(flow)))
		v.exec(frameOf(flow, packet.Flags(packet.ACK)), nil)
		v.at[server] = append(v.at[server], flow)
	}
	for range 500 * time.Millisecond / sampleInterval {
		v.infers(sampleInterval)
		for _, server := range slices.Sorted(maps.Keys(v.at)) {
			v.serve(server)
		}
	}
}

// serve ends those flows of a server whose service ends in one interval.
func (v *visitors) serve(server string) {
	for range min(2, len(v.at[server])) {
		if v.random.Float64() < sampleInterval.Seconds()/0.5 {
			v.exec(frameOf(v.at[server][0], packet.Flags(packet.FIN|packet.ACK)), nil)
			v.at[server] = v.at[server][1:]
		}
	}
}

// capacity returns the mean learned capacity of the servers of the service web.
func (f *fixture) capacity() (mean float64) {
	members := f.services.byName["web"].members
	for i := range members {
		mean += f.estimatorOf("web").Report(i).Capacity / float64(len(members))
	}
	return mean
}

// established returns the number of established flows of the service web.
func (f *fixture) established() (flows uint32) {
	for _, m := range f.services.byName["web"].members {
		_, established := f.plane.Loads.Flows(m.slot)
		flows += established
	}
	return flows
}

// A trace shows the scores also where a flow goes to a candidate of its bucket without a flow table.
func TestTraceOfCandidates(t *testing.T) {
	t.Parallel()
	for _, persistence := range []desired.Persistence{
		desired.PersistenceTable, desired.PersistenceHint, desired.PersistenceStateless,
	} {
		cfg := inferring(manyServers(4)...)
		svc := &cfg.Services[0]
		svc.Persistence, svc.Infer.Among, svc.Candidates = persistence, desired.AmongCandidates, 3
		if svc.FindsByColumn() {
			svc.Generations, svc.History = 32, 3
		}
		f := open(t, cfg)
		trace := mustTrace(t, f.view(), inspect.Packet{Flow: web, Length: 60, Opens: true})
		got := trace.Placement.Scores
		if got == nil || len(got.Servers) != 3 || got.Servers[0].Server != trace.Server.Name {
			t.Errorf("%s: %+v, to %s", persistence, got, trace.Server.Name)
		}
		if trace.Placement.Bucket == nil {
			t.Errorf("%s: the bucket decides, and the trace does not show it", persistence)
		}
	}
}

// A trace tells how many other servers have the lowest score, too, and shows the estimates of
// servers. No bucket decides.
func TestTraceOfEqualScores(t *testing.T) {
	t.Parallel()
	f := open(t, inferring(manyServers(6)...))
	f.infers(time.Second)
	for dearer, equal := range []int{5, 4} {
		trace := mustTrace(t, f.view(), inspect.Packet{Flow: web, Length: 60, Opens: true})
		scores := trace.Placement.Scores
		if scores.Equal != equal || trace.Placement.Bucket != nil || scores.Servers[0].Estimate == nil {
			t.Errorf("%d dearer servers: %+v", dearer, trace.Placement)
		}
		f.plane.Loads.SetPrice(f.slot("web", "s1"), infer.Price{Unit: 1 << 20})
	}
}

// While servers come and go, flows go to the lowest server, and the slots of removed servers become
// free without a rank.
func TestRankingFollowsServers(t *testing.T) {
	t.Parallel()
	f := open(t, inferring(manyServers(10)...))
	servers := manyServers(30)
	for i, some := range [][]desired.Server{
		servers[5:12], servers[5:30], servers[:1], nil, servers[:9], servers[20:29], servers,
	} {
		f.mustApply(inferring(some...))
		f.checkPlaces()
		if len(some) > 0 {
			f.goesToLowest(uint16(1000*(i+1)), 20)
			f.infers(time.Second)
			f.goesToLowest(uint16(1000*(i+1)+500), 20)
		}
		f.must(f.sweep())
		f.must(f.sweep())
		f.checkPlaces()
	}
	if f.plane.Rankings.HasFormer() {
		t.Error("after a sweep, lines of former rankings are still in use")
	}
	f.mustApply(inferring(servers[0]))
	f.must(f.sweep())
	f.must(f.sweep())
	for slot := range f.plane.Objects.Loads.MaxEntries() {
		placed, answered := f.plane.Loads.Placed(slot)
		if slot != f.slot("web", "s1") && (placed > 0 || answered > 0 || f.plane.Loads.Price(slot) != infer.Price{}) {
			t.Errorf("free slot %d: %d flows placed, price %+v", slot, placed, f.plane.Loads.Price(slot))
		}
	}
}

// Connections stay on their servers while the placement changes. Then new flows go where the new
// placement says.
func TestInferenceBeginsAndEnds(t *testing.T) {
	t.Parallel()
	servers := manyServers(6)
	hash := placingBy(desired.PlacementHash, servers...)
	hash.Node.Limits.Flows = 1 << 14
	f := open(t, hash)
	all := f.establish(web)
	row := inferring(servers...)
	row.Services[0].Infer.Among = desired.AmongCandidates
	for i, cfg := range []*desired.Balancer{
		inferring(servers...), hash, row, placingBy(desired.PlacementSED, servers...), hash,
		inferring(servers...),
	} {
		cfg.Node.Limits = hash.Node.Limits
		inferred := len(f.inference.byName) > 0
		f.mustApply(cfg)
		f.checkPlaces()
		for _, s := range servers {
			if placed, _ := f.plane.Loads.Placed(f.slot("web", s.Name)); placed > 0 && !inferred {
				t.Errorf("%s begins with %d flows placed", s.Name, placed)
			}
		}
		f.stay(all, "")
		f.infers(time.Second)
		if infers := len(f.inference.byName) > 0; infers != cfg.Services[0].Placement.Infers() {
			t.Errorf("placement %s: infers %t", cfg.Services[0].Placement, infers)
		}
		maps.Copy(all, f.establish(fromSubnet(web, byte(i))))
		f.stay(all, "")
		f.must(f.sweep())
		f.checkPlaces()
	}
}

// Among the candidates, a flow goes to the lowest of its bucket, and any other balancer finds it.
func TestInferAmongCandidates(t *testing.T) {
	t.Parallel()
	cfg := inferring(manyServers(20)...)
	svc := &cfg.Services[0]
	svc.Infer.Among, svc.Candidates, svc.Probe = desired.AmongCandidates, 4, new(true)
	f := open(t, cfg)
	f.infers(time.Second)
	r := newReference(f)
	for port := range uint16(100) {
		flow := fromPort(web, 1000+port)
		row := r.possible(flow, svc)
		best := slices.MinFunc(row, func(a, b string) int {
			return cmp.Compare(f.plane.Loads.Score(f.slot("web", a)), f.plane.Loads.Score(f.slot("web", b)))
		})
		if got := serverOf(f.run(frameOf(flow))); got != "web/"+best {
			t.Fatalf("flow %d goes to %s, want %s of %v", port, got, best, row)
		}
	}
}

// A reload that fails leaves rankings and estimates as they were.
func TestRefusedReloadKeepsRanking(t *testing.T) {
	t.Parallel()
	cfg := inferring(manyServers(4)...)
	f := open(t, cfg)
	f.infers(time.Second)
	f.ignoreSYNs("s2", 40)
	before := f.priceOf("s2")
	bad := inferring(append(manyServers(3), srv6Server("s9", 9, 1))...)
	bad.Services = append(bad.Services, serviceOf("bad", vip6, 81, desired.TCP, desired.SRv6Encap,
		manyServers(2)...))
	bad.Services[1].Buckets = 1000 // not valid
	if err := f.apply(bad); err == nil {
		t.Fatal("the reload succeeded")
	}
	f.route()
	f.checkPlaces()
	if got := f.priceOf("s2"); got != before {
		t.Errorf("price %+v, before %+v", got, before)
	}
	f.goesToLowest(1000, 20)
}

func (f *fixture) estimatorOf(service string) *infer.Estimator {
	return f.inference.byName[service].estimator
}
