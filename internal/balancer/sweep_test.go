// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"iter"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/testhost"
)

// sweptReference is the reference of bpf/balancer/sweep.bpf.c. It frees entries of a flow table or
// makes them silent, and adds those that it keeps to counts, by slot and state. Slots beyond the
// end of lifetimes have no server.
func sweptReference(
	entries []uint64, lifetimes []dataplane.FlowLifetimes, now uint16, counts [][8]uint32,
) {
	for i := range entries {
		value := atomic.LoadUint64(&entries[i])
		if value == 0 {
			continue
		}
		entry := dataplane.FlowEntry(value)
		slot, state := value>>14&0xffff, entry.State()
		var of dataplane.FlowLifetimes
		if slot < uint64(len(lifetimes)) {
			of = lifetimes[slot]
		}
		age := ageOf(entry, now)
		lifetime := [...]uint16{
			stateSilent: of.Established, stateNew: of.New, stateEstablished: of.Established,
			stateClosing: of.Established, stateClosed: of.Closed,
		}[state]
		switch {
		case age >= lifetime:
			if atomic.CompareAndSwapUint64(&entries[i], value, 0) {
				continue
			}
		case state == stateEstablished && age >= of.Silent, state == stateClosing && age >= endedTicks:
			silent := entryOf(entry.Signature(), entry.Server(), stateSilent, now-age)
			if atomic.CompareAndSwapUint64(&entries[i], value, silent) {
				state = stateSilent
			}
		}
		counts[slot][state]++
	}
}

// allStates are the states of an entry.
var allStates = []dataplane.FlowState{
	stateFree, stateNew, stateEstablished, stateSilent, stateClosing, stateClosed,
}

// withServer iterates over the slots that have lifetimes.
func withServer(lifetimes []dataplane.FlowLifetimes) iter.Seq2[uint32, dataplane.FlowLifetimes] {
	return func(yield func(uint32, dataplane.FlowLifetimes) bool) {
		for slot, of := range lifetimes {
			if of != (dataplane.FlowLifetimes{}) && !yield(uint32(slot), of) {
				return
			}
		}
	}
}

// randomLifetimes returns lifetimes by slot, from none to more than any age. A quarter of the slots
// has no server.
func randomLifetimes(random *rand.Rand, slots uint32) []dataplane.FlowLifetimes {
	lifetimes := make([]dataplane.FlowLifetimes, slots)
	typical := []uint16{0, 1, 2, 15, 4032, 4063, 4064, dataplane.Forever.New}
	for slot := range lifetimes {
		if random.IntN(4) == 0 {
			continue
		}
		of := &lifetimes[slot]
		for _, lifetime := range []*uint16{&of.New, &of.Established, &of.Closed, &of.Silent} {
			*lifetime = uint16(random.IntN(4033))
			if random.IntN(2) == 0 {
				*lifetime = typical[random.IntN(len(typical))]
			}
		}
	}
	return lifetimes
}

// openSwept opens a balancer with flow tables for the given number of flows.
func openSwept(t testing.TB, flows uint32, shift uint32) *fixture {
	t.Helper()
	clock, err := dataplane.NewFlowClock()
	testhost.Must(t, err)
	clock.Shift = shift
	cfg := standard()
	cfg.Node.Limits.Flows = flows
	return openAt(t, cfg, clock)
}

// fillRandomly fills a table with entries of all states and ages, a quarter of them free. Slots are
// up to a few above the highest one.
func fillRandomly(random *rand.Rand, table *dataplane.FlowTable, slots uint32) {
	for i := range table.Entries {
		state := allStates[random.IntN(len(allStates))]
		table.Entries[i] = 0
		if state != stateFree {
			slot := uint32(random.IntN(int(slots) + 3))
			table.Entries[i] = entryOf(random.Uint64(), slot, state, uint16(random.Uint32()))
		}
	}
}

// A sweep frees the entries that the reference frees, in both tables, and counts all others. The
// large tables need several runs of the program. The clock reads 0 and other times.
func TestSweepFollowsReference(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ flows, shift uint32 }{
		{1024, standstill}, {1024, 24}, {1024, 22}, {300_000, 20}, {300_000, standstill},
	} {
		t.Run(fmt.Sprintf("%d flows, shift %d", c.flows, c.shift), func(t *testing.T) {
			t.Parallel()
			f := openSwept(t, c.flows, c.shift)
			seed := rand.Uint64()
			random := rand.New(rand.NewPCG(seed, 0))
			for range 3 {
				for now := f.now(); !f.sweepRandomly(random, now); now = f.now() {
					t.Log("the clock has ticked during the sweep")
				}
			}
			if t.Failed() {
				t.Logf("seed %d", seed)
			}
		})
	}
}

// sweepRandomly sweeps random tables with random lifetimes, and compares the result with that of
// the reference. It compares nothing and returns false if the time is another one after the sweep.
func (f *fixture) sweepRandomly(random *rand.Rand, now uint16) bool {
	f.t.Helper()
	slots := f.plane.Objects.ServerCounters.MaxEntries()
	lifetimes := randomLifetimes(random, slots)
	tables := [2]*dataplane.FlowTable{f.plane.Flows, f.plane.HalfOpen}
	var before, want [2][]uint64
	var counts [2][][8]uint32
	for i, table := range tables {
		fillRandomly(random, table, slots)
		before[i], want[i] = slices.Clone(table.Entries), slices.Clone(table.Entries)
		counts[i] = make([][8]uint32, dataplane.NoServer+1)
		sweptReference(want[i], lifetimes, now, counts[i])
	}
	kept, err := f.plane.Sweeper.Sweep(withServer(lifetimes))
	f.must(err)
	if f.now() != now {
		return false
	}
	for i, table := range tables {
		f.compareSwept(before[i], table.Entries, want[i], lifetimes, now)
	}
	for slot, of := range lifetimes {
		if slot >= len(kept) {
			if of != (dataplane.FlowLifetimes{}) {
				f.t.Errorf("slot %d has lifetimes, and only %d slots have counts", slot, len(kept))
			}
			continue
		}
		flows, halfOpen := countsOf(kept[slot].Flows[:]), countsOf(kept[slot].HalfOpen[:])
		if flows != countsOf(counts[0][slot][:]) || halfOpen != countsOf(counts[1][slot][:]) {
			f.t.Errorf("slot %d: %+v are counted, and half-open: %+v; want %v and %v", slot, flows, halfOpen,
				counts[0][slot], counts[1][slot])
		}
	}
	return true
}

// countsOf returns the numbers of flows that a sweep, or its reference, has counted.
func countsOf(states []uint32) dataplane.FlowCounts {
	return dataplane.FlowCounts{
		New:         uint64(states[stateNew]),
		Established: uint64(states[stateEstablished]),
		Silent:      uint64(states[stateSilent]),
		Closing:     uint64(states[stateClosing]) + uint64(states[stateClosed]),
	}
}

// compareSwept reports up to three differences between the entries of a table and those that are
// wanted.
func (f *fixture) compareSwept(
	before, got, want []uint64, lifetimes []dataplane.FlowLifetimes, now uint16,
) {
	f.t.Helper()
	for i, differences := 0, 0; i < len(got) && differences < 3; i++ {
		if got[i] == want[i] {
			continue
		}
		differences++
		e := dataplane.FlowEntry(before[i])
		f.t.Errorf("entry %d of %d: %#x, want %#x; slot %d of %d, state %v, seen %d, now %d", i,
			len(got), got[i], want[i], e.Server(), len(lifetimes), e.State(), seenOf(e), now)
	}
}

// An entry that another core renews during the sweep stays, and the sweep counts it.
func TestSweepSparesRenewedEntries(t *testing.T) {
	const rounds = 10
	f := openSwept(t, 300_000, standstill)
	slot := f.slot("web", "s1")
	old, fresh := entryOf(1, slot, stateNew, f.now()-100), entryOf(1, slot, stateEstablished, f.now())
	lifetimes := make([]dataplane.FlowLifetimes, slot+1)
	lifetimes[slot] = dataplane.FlowLifetimes{New: 10, Established: 10, Closed: 10, Silent: 10}
	random := rand.New(rand.NewPCG(rand.Uint64(), 0))
	renewedInAll := 0
	for range rounds {
		for i := range f.plane.Flows.Entries {
			f.plane.Flows.Entries[i] = old
		}
		var renewed int
		var ended atomic.Bool
		var writer sync.WaitGroup
		writer.Go(func() { renewed = renewAhead(random, f.plane.Flows.Entries, old, fresh, &ended) })
		kept, err := f.plane.Sweeper.Sweep(withServer(lifetimes))
		ended.Store(true)
		writer.Wait()
		f.must(err)
		f.checkRenewed(renewed, fresh, kept[slot])
		renewedInAll += renewed
	}
	if renewedInAll == 0 {
		t.Skip("no entry was renewed during a sweep: this machine runs no two threads at a time")
	}
	t.Logf("%d entries were renewed during %d sweeps", renewedInAll, rounds)
}

// renewAhead follows a sweep through the entries, until it has ended. It renews entries a little
// ahead of the sweep, so that some of them are those that the sweep frees at that moment. It
// returns the number of renewed entries.
func renewAhead(
	random *rand.Rand, entries []uint64, old, fresh uint64, ended *atomic.Bool,
) (renewed int) {
	for i := 0; i < len(entries) && !ended.Load(); {
		if atomic.LoadUint64(&entries[i]) == old {
			continue
		}
		// The faster the sweep, the farther ahead it is when this core sees that entry i is free.
		for i += 1 << random.IntN(12); i < len(entries); i++ {
			if atomic.CompareAndSwapUint64(&entries[i], old, fresh) {
				renewed++
				break
			}
		}
		i++ // the next entry that the sweep frees
	}
	return renewed
}

// checkRenewed checks that the given number of entries have the fresh value, that all others are
// free, and that the sweep has counted those that are left.
func (f *fixture) checkRenewed(renewed int, fresh uint64, kept dataplane.SweptServer) {
	f.t.Helper()
	left, stale := 0, 0
	for _, value := range f.plane.Flows.Entries {
		if value == fresh {
			left++
		} else if value != 0 {
			stale++
		}
	}
	if left != renewed || stale > 0 {
		f.t.Fatalf("%d entries were renewed; %d are left, and %d that were not renewed",
			renewed, left, stale)
	}
	// An entry that was renewed after the program had read it counts with its earlier state.
	counts := countsOf(kept.Flows[:])
	if counts.Total() != uint64(left) || counts.Closing != 0 {
		f.t.Fatalf("%d entries are left, %+v are counted", left, counts)
	}
}

// A sweep uses the memory of the sweep before, also if flows have the highest slots.
func TestSweepsUseNoMoreMemory(t *testing.T) {
	cfg := standard()
	cfg.Node.Limits.Servers = (dataplane.NoServer + 1) / 2
	f := open(t, cfg)
	sweeps := func(n int) (allocated uint64) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range n {
			kept, err := f.plane.Sweeper.Sweep(func(yield func(uint32, dataplane.FlowLifetimes) bool) {
				yield(dataplane.NoServer, dataplane.Forever)
			})
			f.must(err)
			f.must(f.slots.Swept(kept))
			f.must(f.sweep())
		}
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	sweeps(1)
	const n = 5
	// The counts of all slots take 4 MB.
	if each := sweeps(n) / n; each > 64<<10 {
		t.Errorf("two sweeps allocate %d bytes", each)
	}
}

// BenchmarkSweep sweeps full flow tables by the program and by its reference, in turn. The results
// are medians: milliseconds per million entries. A table for n flows has at least 2n entries, and
// the table of half-open flows a quarter of that. 100M flows need 3 GB.
func BenchmarkSweep(b *testing.B) {
	for _, flows := range []uint32{1 << 20, 10_000_000, 100_000_000} {
		b.Run(fmt.Sprintf("flows=%d", flows), func(b *testing.B) {
			f := openSwept(b, flows, standstill)
			slots := f.plane.Objects.ServerCounters.MaxEntries()
			lifetimes := slices.Repeat([]dataplane.FlowLifetimes{dataplane.Forever}, int(slots))
			random := rand.New(rand.NewPCG(1, 0))
			millions := 0.0
			for _, table := range []*dataplane.FlowTable{f.plane.Flows, f.plane.HalfOpen} {
				for i := range table.Entries {
					if random.IntN(2) == 0 { // as at the table's capacity
						table.Entries[i] = entryOf(random.Uint64(), random.Uint32N(slots), stateEstablished, 0)
					}
				}
				millions += float64(len(table.Entries)) / 1e6
			}
			counts := make([][8]uint32, dataplane.NoServer+1)
			var byReference, byProgram []time.Duration
			for b.Loop() {
				start := time.Now()
				sweptReference(f.plane.Flows.Entries, lifetimes, 0, counts)
				sweptReference(f.plane.HalfOpen.Entries, lifetimes, 0, counts)
				middle := time.Now()
				_, err := f.plane.Sweeper.Sweep(withServer(lifetimes))
				f.must(err)
				byReference = append(byReference, middle.Sub(start))
				byProgram = append(byProgram, time.Since(middle))
			}
			for name, times := range map[string][]time.Duration{
				"reference": byReference, "program": byProgram,
			} {
				slices.Sort(times)
				median := times[len(times)/2]
				b.ReportMetric(float64(median.Microseconds())/1e3/millions, name+"-ms/M")
			}
		})
	}
}
