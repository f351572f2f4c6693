// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/packet"
)

const (
	ranksPerLine = 8
	// rankNone is RANK_NONE in bpf/balancer/tables/ranking.h.
	rankNone = math.MaxInt64
	// mostCorrections is MOST_CORRECTIONS in bpf/balancer/place/infer.h.
	mostCorrections = 8
	// rankScoreShift is RANK_SCORE_SHIFT in bpf/balancer/tables/ranking.h.
	rankScoreShift = 28
)

// ranked is a balancer whose service web infers, with its ranking.
type ranked struct {
	*fixture
	random *rand.Rand
	lines  [][ranksPerLine]uint64 // rank_lines, mapped
	flows  []dataplane.Flow
	frames map[packet.TCPFlags][][]byte // by number of the flow
	rows   *reference                   // knows the candidates of buckets
	// barred contains the flags of servers that take no flows, by slot, while the test bars them.
	barred map[uint32]dataplane.ServerFlags
	// placed counts the flows that were placed, and inexact those that may have missed the lowest
	// server, because too many ranks were outdated.
	placed, inexact int
}

// rankedFlags are the flags of the packets that tests of rankings send.
var rankedFlags = []packet.TCPFlags{packet.SYN, packet.ACK, packet.FIN | packet.ACK, packet.RST}

// openRanked opens a balancer whose flow table has the given number of buckets. It makes frames for
// the given number of flows.
func openRanked(t testing.TB, cfg *desired.Balancer, buckets uint32, flows uint16) *ranked {
	t.Helper()
	cfg.Node.Limits = desired.Limits{Flows: buckets * dataplane.FlowLoad, Servers: 400}
	seed := rand.Uint64()
	r := &ranked{
		fixture: open(t, cfg), random: rand.New(rand.NewPCG(seed, 0)),
		barred: map[uint32]dataplane.ServerFlags{}, frames: map[packet.TCPFlags][][]byte{},
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	})
	r.rows = newReference(r.fixture)
	for port := range flows {
		flow := fromPort(web, 1000+port)
		r.flows = append(r.flows, flow)
		for _, flags := range rankedFlags {
			r.frames[flags] = append(r.frames[flags], frameOf(flow, packet.Flags(flags)))
		}
	}
	lines := r.plane.Objects.RankLines
	size := int(lines.MaxEntries()) * ranksPerLine * 8
	memory, err := unix.Mmap(lines.FD(), 0, size, unix.PROT_READ, unix.MAP_SHARED)
	r.must(err)
	t.Cleanup(func() { r.must(unix.Munmap(memory)) })
	first := (*[ranksPerLine]uint64)(unsafe.Pointer(unsafe.SliceData(memory)))
	r.lines = unsafe.Slice(first, lines.MaxEntries())
	return r
}

// leaves returns the ranks of the service's servers, and the lines of the levels above them, the
// lowest level first.
func (r *ranked) leaves() (ranks []uint64, above [][][ranksPerLine]uint64) {
	var ranking [2]uint32
	r.must(r.plane.Objects.Rankings.Lookup(r.services.byName["web"].id, &ranking))
	at, lines := ranking[0], (ranking[1]+ranksPerLine-1)/ranksPerLine
	for _, line := range r.lines[at : at+lines] {
		ranks = append(ranks, line[:]...)
	}
	for lines > 1 {
		at += lines
		lines = (lines + ranksPerLine - 1) / ranksPerLine
		above = append(above, r.lines[at:at+lines])
	}
	return ranks, above
}

// least returns the lowest score of those of the servers that take flows; rankNone: there is none.
func (r *ranked) least(slots []uint32) uint64 {
	least := uint64(rankNone)
	for _, slot := range slots {
		if r.plane.Servers.TakesFlows(slot) {
			least = min(least, r.plane.Loads.Score(slot))
		}
	}
	return least
}

// foretell returns the score of the server that find_lowest in bpf/balancer/place/infer.h chooses,
// among all. It is the lowest one unless too many ranks are outdated; then isExact is false.
func (r *ranked) foretell() (score uint64, isExact bool) {
	ranks, _ := r.leaves()
	for range mostCorrections {
		rank := slices.Min(ranks)
		if rank == rankNone {
			return rankNone, false
		}
		place := slices.Index(ranks, rank)
		ranks[place] = rankNone
		if slot := uint32(rank & 0xffff); r.plane.Servers.TakesFlows(slot) {
			score = r.plane.Loads.Score(slot)
			ranks[place] = score
		}
		if ranks[place] == rank {
			return score, true
		}
	}
	return score, false
}

// staysWith tells whether a core may stay with a server (place/infer.h): the server got the last
// new flow of a core, and its delay is the shortest one.
func (r *ranked) staysWith(slot uint32, latest []uint32, score, least uint64) bool {
	return slices.Contains(latest, slot+1) && score>>rankScoreShift == least>>rankScoreShift
}

// send sends a packet of a flow. If it places the flow, it must do so on the lowest server, or on
// one with which a core stays.
func (r *ranked) send(flow int, flags packet.TCPFlags) {
	r.t.Helper()
	least, before := r.least(r.slotsFor(r.flows[flow])), r.entry(r.flows[flow])
	want, isExact := least, true
	var latest []uint32
	if r.service("web").Infer.Among == desired.AmongAll {
		want, isExact = r.foretell()
		r.must(r.plane.Objects.Latest.Lookup(r.services.byName["web"].id, &latest))
	}
	if isExact && want != least {
		r.t.Fatalf("the ranking has %#x, and the lowest score is %#x", want, least)
	}
	score := map[uint32]uint64{}
	for _, m := range r.services.byName["web"].members {
		score[m.slot] = r.plane.Loads.Score(m.slot)
	}
	r.exec(r.frames[flags][flow], nil)
	after := r.entry(r.flows[flow])
	isPlaced := after != 0 && (before == 0 || before.Server() != after.Server())
	if flags != packet.SYN || !isPlaced || least == rankNone {
		return
	}
	r.placed++
	if !r.plane.Servers.TakesFlows(after.Server()) {
		r.t.Fatalf("flow %d goes to slot %d, which takes no flows", flow, after.Server())
	}
	got := score[after.Server()]
	if r.staysWith(after.Server(), latest, got, least) {
		return
	}
	if !isExact {
		r.inexact++
	} else if got != want {
		r.t.Fatalf("flow %d goes to slot %d with score %#x, want %#x", flow, after.Server(), got,
			want)
	}
}

// slotsFor returns the slots of the servers among which a new flow chooses.
func (r *ranked) slotsFor(flow dataplane.Flow) (slots []uint32) {
	svc := r.service("web")
	if svc.Infer.Among == desired.AmongAll {
		return r.services.byName["web"].slots()
	}
	for _, name := range r.rows.possible(flow, svc) {
		slots = append(slots, r.slot("web", name))
	}
	return slots
}

// checkTree requires that each number above the leaves is the lowest of the line below, and that no
// rank is higher than its server's score. If ranks are fresh, they equal the scores.
func (r *ranked) checkTree(isFresh bool) {
	r.t.Helper()
	below, above := r.leaves()
	for place, rank := range below {
		slot := uint32(rank & 0xffff)
		if rank == rankNone || !r.plane.Servers.TakesFlows(slot) {
			continue
		}
		if score := r.plane.Loads.Score(slot); rank > score || isFresh && rank < score {
			r.t.Fatalf("place %d has rank %#x, its server has score %#x", place, rank, score)
		}
	}
	for _, m := range r.services.byName["web"].members {
		isRanked := below[r.plane.Directory.Servers[m.slot].Rank-1] != rankNone
		if takes := r.plane.Servers.TakesFlows(m.slot); takes != isRanked && (takes || isFresh) {
			r.t.Fatalf("slot %d takes flows: %t, and has a rank: %t", m.slot, takes, isRanked)
		}
	}
	for level, lines := range above {
		for i := range lines {
			for j, node := range lines[i] {
				at := (i*ranksPerLine + j) * ranksPerLine
				want := uint64(rankNone)
				if at < len(below) {
					want = slices.Min(below[at : at+ranksPerLine])
				}
				if node != want {
					r.t.Fatalf("node %d of line %d above level %d is %#x, want %#x", j, i, level,
						node, want)
				}
			}
		}
		below = slices.Concat(flat(lines)...)
	}
}

func flat(lines [][ranksPerLine]uint64) (all [][]uint64) {
	for i := range lines {
		all = append(all, lines[i][:])
	}
	return all
}

func (r *ranked) rank() {
	r.t.Helper()
	r.must(r.plane.Rankings.Rank(r.services.byName["web"].slots()))
}

// randomPrice returns any price, often one that is equal or similar to others, or at a limit.
func randomPrice(random *rand.Rand) infer.Price {
	price := infer.Price{
		Unit: infer.PriceOne / 4, Position: uint16(random.IntN(infer.Positions)),
		Away: random.IntN(4) == 0,
	}
	switch random.IntN(4) {
	case 0:
		price.Unit = max(1, random.Uint32()>>random.IntN(32))
		price.Extra = random.Uint32() >> random.IntN(32)
	case 1:
		price.Extra = random.Uint32N(2 * infer.PriceOne)
	case 2:
		price.Position = 0
		if random.IntN(20) == 0 {
			price.Unit, price.Extra = math.MaxUint32, math.MaxUint32
		}
	}
	return price
}

// changePrices gives some servers other prices, and ranks these.
func (r *ranked) changePrices() {
	r.t.Helper()
	slots := r.services.byName["web"].slots()
	r.random.Shuffle(len(slots), func(i, j int) { slots[i], slots[j] = slots[j], slots[i] })
	slots = slots[:1+r.random.IntN(len(slots))]
	for _, slot := range slots {
		r.plane.Loads.SetPrice(slot, randomPrice(r.random))
	}
	r.must(r.plane.Rankings.Rank(slots))
}

// bar makes a server take no flows, and does not correct its rank.
func (r *ranked) bar(slot uint32) {
	flags := r.plane.Servers.Flags(slot)
	_, isBarred := r.barred[slot]
	if isBarred || len(r.barred) == len(r.services.byName["web"].members)-1 {
		return // one of them always takes flows
	}
	r.barred[slot] = flags
	why := []dataplane.ServerFlags{
		dataplane.FlagDrained, dataplane.FlagFailing,
		dataplane.FlagFailing | dataplane.FlagUnreachable,
	}[r.random.IntN(3)]
	r.plane.Servers.SetFlags(slot, flags|why)
}

// admitAll makes all servers take flows again.
func (r *ranked) admitAll() {
	r.t.Helper()
	for slot, flags := range r.barred {
		r.plane.Servers.SetFlags(slot, flags)
		delete(r.barred, slot)
	}
	r.rank()
}

// sweepSome frees some entries, and makes others silent. The servers' ranks follow at the next
// step, which the caller makes.
func (r *ranked) sweepSome() {
	r.t.Helper()
	_, err := r.plane.Sweeper.Sweep(func(yield func(uint32, dataplane.FlowLifetimes) bool) {
		for slot := range r.plane.Objects.ServerCounters.MaxEntries() {
			lifetimes := dataplane.Forever
			for _, lifetime := range []*uint16{
				&lifetimes.New, &lifetimes.Silent, &lifetimes.Closed, &lifetimes.Established,
			} {
				if r.random.IntN(4) == 0 {
					*lifetime = uint16(r.random.IntN(20))
				}
			}
			if !yield(slot, lifetimes) {
				return
			}
		}
	})
	r.must(err)
}

// rankFlooded corrects the ranks if a server has more new flows than count fully. Packets leave the
// ranks of such servers to the next step.
func (r *ranked) rankFlooded(slots []uint32) {
	for _, slot := range slots {
		if unconfirmed, _ := r.plane.Loads.Flows(slot); unconfirmed > sureNew {
			r.rank()
			return
		}
	}
}

// sureNew is SURE_NEW in bpf/balancer/tables/loads.h.
const sureNew = 16

// step sends a random packet. Rarely it changes something else instead.
func (r *ranked) step() {
	r.t.Helper()
	slots := r.services.byName["web"].slots()
	switch r.random.IntN(60) {
	case 0:
		r.changePrices()
	case 1:
		isIdle := func(dataplane.FlowEntry) bool { return r.random.IntN(3) > 0 }
		r.elapseFlows(uint16(r.random.IntN(20)), isIdle)
	case 2:
		r.sweepSome()
		r.rank()
		r.checkTree(true)
	case 3:
		for range 1 + r.random.IntN(12) {
			r.bar(slots[r.random.IntN(len(slots))])
		}
	case 4:
		r.admitAll()
		r.checkTree(true)
	default:
		r.rankFlooded(slots)
		r.send(r.random.IntN(len(r.flows)), []packet.TCPFlags{
			packet.SYN, packet.SYN, packet.SYN, packet.ACK, packet.FIN | packet.ACK, packet.RST,
		}[r.random.IntN(6)])
	}
}

// Of several servers with the shortest delay, a core takes the one that got its last flow, unless
// it takes no flows.
func TestCoreStaysWithServer(t *testing.T) {
	r := openRanked(t, inferring(manyServers(3)...), 32, 100)
	pin(t, 0)
	next, slots := 0, r.services.byName["web"].slots()
	prices := func(unit uint32, position uint16) {
		r.plane.Loads.SetPrice(slots[0], infer.Price{Unit: unit, Position: position})
		r.rank()
	}
	expect := func(what string, want uint32) {
		t.Helper()
		r.exec(r.frames[packet.SYN][next], nil)
		if got := r.entry(r.flows[next]).Server(); got != want {
			t.Errorf("%s: slot %d gets the flow, want %d", what, got, want)
		}
		r.exec(r.frames[packet.ACK][next], nil)
		r.exec(r.frames[packet.RST][next], nil)
		next++
	}
	const unit = infer.PriceOne / 4
	for i, slot := range slots {
		r.plane.Loads.SetPrice(slot, infer.Price{Unit: unit, Position: uint16(i)})
	}
	prices(unit, 0)
	expect("the first flow", slots[0])
	prices(unit, 3)
	expect("equal delays, and the last position", slots[0])
	prices(unit+1, 3)
	expect("a longer delay", slots[1])
	prices(unit, 0)
	expect("another server has got the last flow", slots[1])
	r.plane.Servers.SetFlags(slots[1], r.plane.Servers.Flags(slots[1])|dataplane.FlagDrained)
	expect("that server is drained", slots[0])
}

// Each new flow goes to the server with the lowest score, whatever prices servers have, whatever
// happens to flows, and whichever servers take none.
func TestFlowsGoToLowest(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 2, 8, 9, 64, 65, 300} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			r := openRanked(t, inferring(manyServers(n)...), 32, 400)
			r.changePrices()
			for i := range 2000 {
				r.step()
				if i%20 == 0 {
					r.rankFlooded(r.services.byName["web"].slots())
					r.checkTree(false)
				}
			}
			if r.placed < 200 || r.inexact > r.placed/20 {
				t.Errorf("%d of %d flows went to a lowest server", r.placed-r.inexact, r.placed)
			}
		})
	}
}

// Among the candidates of a flow's bucket, each new flow goes to the lowest one that takes flows.
func TestFlowsGoToLowestCandidate(t *testing.T) {
	t.Parallel()
	cfg := inferring(manyServers(20)...)
	cfg.Services[0].Infer.Among, cfg.Services[0].Candidates = desired.AmongCandidates, 4
	r := openRanked(t, cfg, 32, 400)
	r.changePrices()
	for range 2000 {
		r.step()
	}
	if r.placed < 200 {
		t.Errorf("only %d flows were placed", r.placed)
	}
}

// storm makes two cores send the given number of packets each. Meanwhile it calls act again and
// again.
func (r *ranked) storm(packets int, send func(core int, random *rand.Rand), act func()) {
	r.t.Helper()
	r.moving = true
	defer func() { r.moving = false }()
	var senders sync.WaitGroup
	for core := range 2 {
		random := rand.New(rand.NewPCG(r.random.Uint64(), 0))
		senders.Go(func() {
			pin(r.t, core)
			for range packets {
				send(core, random)
			}
		})
	}
	ended := make(chan struct{})
	go func() { senders.Wait(); close(ended) }()
	for {
		select {
		case <-ended:
			return
		default:
			act()
		}
	}
}

// own returns one of the flows that only this core sends, and the flags of a packet.
func (r *ranked) own(core int, random *rand.Rand) (flow int, flags packet.TCPFlags) {
	return random.IntN(len(r.flows)/2)*2 + core, rankedFlags[random.IntN(len(rankedFlags))]
}

// Two cores correct ranks at the same time, while prices change, flows are swept, and the service
// is reloaded with other servers and another placement. The numbers of the ranking can be wrong
// then, and are right after the next step. The loads are always right.
func TestRankingAfterStorm(t *testing.T) {
	for _, n := range []int{9, 70} {
		r := openRanked(t, inferring(manyServers(n)...), 64, 800)
		limits := r.cfg.Node.Limits
		reload := func(cfg *desired.Balancer) {
			cfg.Node.Limits = limits
			r.mustApply(cfg)
		}
		for range 3 {
			r.storm(5000, func(core int, random *rand.Rand) {
				flow, flags := r.own(core, random)
				r.exec(r.frames[flags][flow], nil)
			}, func() {
				switch r.random.IntN(10) {
				case 0:
					reload(inferring(manyServers(1 + r.random.IntN(n))...))
				case 1:
					reload(placingBy(desired.PlacementHash, manyServers(n)...))
				default:
					r.changePrices()
					r.sweepSome()
				}
			})
			reload(inferring(manyServers(n)...))
			r.rank()
			r.checkTree(true)
			r.checkLoads()
			for range 20 {
				r.step()
			}
			r.admitAll()
		}
		r.checkEmptied()
	}
}

// checkEmptied sweeps all flows, and requires that no server has a load then.
func (r *ranked) checkEmptied() {
	r.t.Helper()
	_, err := r.plane.Sweeper.Sweep(nobody)
	r.must(err)
	for slot := range r.plane.Objects.Loads.MaxEntries() {
		unconfirmed, established := r.plane.Loads.Flows(slot)
		if unconfirmed != 0 || established != 0 {
			r.t.Errorf("slot %d has %d and %d flows, and no entry", slot, unconfirmed, established)
		}
	}
}

// A step corrects all numbers of a ranking, also if one is wrong above numbers that are right.
func TestStepCorrectsRanking(t *testing.T) {
	t.Parallel()
	r := openRanked(t, inferring(manyServers(300)...), 32, 400)
	r.changePrices()
	ranks, above := r.leaves()
	lines := len(ranks) / ranksPerLine
	for _, level := range above {
		lines += len(level)
	}
	var ranking [2]uint32
	r.must(r.plane.Objects.Rankings.Lookup(r.services.byName["web"].id, &ranking))
	for line := range uint32(lines) {
		wrong := r.lines[ranking[0]+line]
		for i := range wrong {
			if wrong[i] != rankNone { // otherwise there is nothing below
				wrong[i] = []uint64{0, rankNone - 1}[r.random.IntN(2)]
			}
		}
		r.must(r.plane.Objects.RankLines.Put(ranking[0]+line, wrong))
		r.rank()
		r.checkTree(true)
	}
}

// While two cores place flows on equal servers, a wrong number hides servers until the next step at
// most. So servers hardly differ in their numbers of flows.
func TestStormIsSpread(t *testing.T) {
	const servers, flows = 70, 7000
	r := openRanked(t, inferring(manyServers(servers)...), flows, flows)
	r.rank()
	var senders sync.WaitGroup
	r.moving = true
	for core := range 2 {
		senders.Go(func() {
			pin(t, core)
			for flow := core; flow < flows; flow += 2 {
				r.exec(r.frames[packet.SYN][flow], nil)
				r.exec(r.frames[packet.ACK][flow], nil)
				if flow/2%100 == 0 {
					r.rank()
				}
			}
		})
	}
	senders.Wait()
	least, most := uint32(math.MaxUint32), uint32(0)
	for _, m := range r.services.byName["web"].members {
		_, established := r.plane.Loads.Flows(m.slot)
		least, most = min(least, established), max(most, established)
	}
	if most-least > 4 {
		t.Errorf("servers have %d to %d flows", least, most)
	}
}
