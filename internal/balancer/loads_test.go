// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"iter"
	"math/rand/v2"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/packet"
)

// load is how many flows of a server count.
type load struct{ unconfirmed, established uint32 }

// loadsOfEntries counts the entries of all flow tables, by slot.
func (f *fixture) loadsOfEntries() []load {
	return loadsOf(f.plane.Objects.Loads.MaxEntries(),
		f.plane.Flows.Entries, f.plane.HalfOpen.Entries, f.plane.Observed.Entries)
}

// loadsOf counts the entries of flow tables by slot. Silent flows do not count, nor do closing ones.
func loadsOf(slots uint32, tables ...[]uint64) []load {
	loads := make([]load, slots)
	for _, entries := range tables {
		for _, value := range entries {
			entry := dataplane.FlowEntry(value)
			switch entry.State() {
			case stateNew:
				loads[entry.Server()].unconfirmed++
			case stateEstablished:
				loads[entry.Server()].established++
			}
		}
	}
	return loads
}

// checkLoads checks that the load of each server equals its entries.
func (f *fixture) checkLoads() {
	f.t.Helper()
	for slot, want := range f.loadsOfEntries() {
		var got load
		got.unconfirmed, got.established = f.plane.Loads.Flows(uint32(slot))
		if got != want {
			f.t.Errorf("slot %d: the load is %+v, the entries are %+v", slot, got, want)
		}
	}
}

// nobody iterates over no slots: a sweep then frees the entries of all of them.
var nobody iter.Seq2[uint32, dataplane.FlowLifetimes] = func(func(uint32, dataplane.FlowLifetimes) bool) {}

// A flow counts as its state says, and a silent one does not count until its next packet.
func TestLoadFollowsFlow(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	slot := f.slot("web", f.placed(web, "web"))
	sends := func(flags packet.TCPFlags, want load) {
		t.Helper()
		f.run(frameOf(web, packet.Flags(flags)))
		f.hasLoad(slot, want)
	}
	fallSilent := func() {
		_, err := f.plane.Sweeper.Sweep(func(yield func(uint32, dataplane.FlowLifetimes) bool) {
			lifetimes := dataplane.Forever
			lifetimes.Silent = 0
			yield(slot, lifetimes)
		})
		f.must(err)
	}
	sends(packet.SYN, load{1, 0})
	sends(packet.SYN, load{1, 0})
	fallSilent()
	f.hasLoad(slot, load{1, 0})
	sends(packet.ACK, load{0, 1})
	fallSilent()
	f.hasLoad(slot, load{})
	sends(packet.SYN, load{})
	sends(packet.ACK, load{0, 1})
	sends(packet.FIN|packet.ACK, load{})
	sends(packet.SYN, load{})
	sends(packet.ACK, load{})
	f.endClosing()
	sends(packet.SYN, load{})
	sends(packet.ACK, load{0, 1})
	_, err := f.plane.Sweeper.Sweep(nobody)
	f.must(err)
	f.hasLoad(slot, load{})
}

func (f *fixture) hasLoad(slot uint32, want load) {
	f.t.Helper()
	var got load
	if got.unconfirmed, got.established = f.plane.Loads.Flows(slot); got != want {
		f.t.Errorf("the load is %+v, want %+v", got, want)
	}
	f.checkLoads()
}

// In a table that is too small, new flows take the entries of others. Loads follow, and are zero
// when all flows are swept. Programs for services without a ranking count by code of their own.
func TestLoadsFollowEvictions(t *testing.T) {
	t.Parallel()
	for name, isNarrow := range map[string]bool{"with rankings": false, "without rankings": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := openWith(t, crowded(2), stoppedClock(t), isNarrow)
			f.evict()
			_, err := f.plane.Sweeper.Sweep(nobody)
			f.must(err)
			for slot := range f.plane.Objects.Loads.MaxEntries() {
				f.hasLoad(slot, load{})
			}
		})
	}
}

// evict sends packets of so many flows that they take each other's entries.
func (f *fixture) evict() {
	f.t.Helper()
	seed := rand.Uint64()
	f.t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	flags := []packet.TCPFlags{packet.SYN, packet.SYN, packet.ACK, packet.FIN | packet.ACK, packet.RST}
	flows := crowd(100)
	for i := range 5000 {
		flow := flows[random.IntN(len(flows))]
		f.exec(frameOf(flow, packet.Flags(flags[random.IntN(len(flags))])), nil)
		if i%500 == 0 {
			f.checkLoads()
			f.elapseFlows(flowMinIdle, everyFlow) // established flows yield their entries, too
		}
	}
	f.checkLoads()
}

// A number of flows that is below 0 counts as 0, so that the server still gets flows.
func TestLoadBelowZero(t *testing.T) {
	t.Parallel()
	f := open(t, inferring(manyServers(2)...))
	slot := f.slot("web", "s1")
	for i, c := range []struct {
		flows int64
		lost  uint32
	}{{-1, 0}, {0, 1}, {-1, 1}, {1 << 32, 0}} {
		load, err := f.plane.Objects.Loads.LookupBytes(slot)
		f.must(err)
		binary.NativeEndian.PutUint64(load, uint64(c.flows))
		binary.NativeEndian.PutUint32(load[8:], 0) // placed
		binary.NativeEndian.PutUint32(load[12:], c.lost)
		f.must(f.plane.Objects.Loads.Put(slot, load))
		if fresh, established := f.plane.Loads.Flows(slot); fresh != 0 || established != 0 {
			t.Errorf("%+v: %d new and %d established flows", c, fresh, established)
		}
		f.must(f.plane.Rankings.Rank(f.services.byName["web"].slots()))
		got := map[string]int{}
		for port := range uint16(4) {
			got[serverOf(f.run(frameOf(fromPort(web, 2000+port+uint16(4*i)))))]++
		}
		if got["web/s1"] == 0 {
			t.Errorf("%+v: flows go to %v", c, got)
		}
		f.plane.Loads.Clear()
		clear(f.plane.Flows.Entries)
	}
}

// The data path and user space compute the same score from any numbers, also if these are below 0 or
// have passed 2^32.
func TestScoresAgree(t *testing.T) {
	t.Parallel()
	r := openRanked(t, inferring(manyServers(8)...), 32, 8)
	slots := r.services.byName["web"].slots()
	for range 200 {
		for _, slot := range slots {
			load, err := r.plane.Objects.Loads.LookupBytes(slot)
			r.must(err)
			answered, lost := r.random.Uint32(), r.random.Uint32()
			established := int64(r.random.IntN(7) - 3)
			binary.NativeEndian.PutUint64(load, uint64(answered)<<32+uint64(established))
			binary.NativeEndian.PutUint32(load[8:], answered+lost+uint32(r.random.IntN(100)-10)) // placed
			binary.NativeEndian.PutUint32(load[12:], lost)
			r.must(r.plane.Objects.Loads.Put(slot, load))
			r.plane.Loads.SetPrice(slot, randomPrice(r.random))
		}
		r.rank()
		r.checkTree(true)
	}
	r.plane.Loads.Clear()
	r.checkLoads()
}
