// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/packet"
)

// duel makes two cores receive a packet each for the same bucket at the same time, for one bucket
// after the other. Whichever core is first, the table must then contain the flows that the counters
// say were entered. If one core overwrites an entry that it has not seen, a flow is missing.
type duel struct {
	*fixture
	flows [][2]dataplane.Flow // by bucket, then by core
}

// openDuel finds, for each bucket, two flows that prefer the same entry.
func openDuel(t *testing.T, buckets uint32) *duel {
	d := &duel{open(t, crowded(buckets)), make([][2]dataplane.Flow, buckets)}
	random := rand.New(rand.NewPCG(5, 6))
	found := make([]int, buckets)
	for missing := 2 * buckets; missing > 0; {
		flow := web
		flow.Source = randomClient(random)
		number := d.bucketNumber(flow)
		if n := found[number]; n == 0 || n == 1 && d.preferred(flow) == d.preferred(d.flows[number][0]) {
			d.flows[number][n] = flow
			found[number]++
			missing--
		}
	}
	return d
}

// settle fills each bucket with residents. The first resident is the flow of the first core.
func (d *duel) settle(residents [dataplane.FlowsPerBucket]resident) {
	d.t.Helper()
	now, slot := d.now(), d.slot("web", "s1")
	for _, flows := range d.flows {
		for i, r := range residents {
			entry := uint64(0)
			if r.state != stateFree {
				entry = entryOf(d.signature(flows[0])^uint64(i), slot, r.state, now-uint16(r.age))
			}
			d.bucket(flows[0])[i] = entry
		}
	}
}

// frames returns one frame for each flow of a core.
func (d *duel) frames(core int, flags packet.TCPFlags) (frames [][]byte) {
	for _, flows := range d.flows {
		frames = append(frames, frameOf(flows[core], packet.Flags(flags)))
	}
	return frames
}

// fight gives each core its frames, one by one. A core waits until the other one has got as far.
func (d *duel) fight(frames [2][][]byte) {
	d.t.Helper()
	var cores sync.WaitGroup
	var reached [2]atomic.Int64
	for core := range frames {
		cores.Go(func() {
			pin(d.t, core)
			for i, frame := range frames[core] {
				reached[core].Add(1)
				for spins := 0; reached[1-core].Load() <= int64(i); spins++ {
					if spins > 10_000 { // the other goroutine may be waiting for this CPU
						runtime.Gosched()
					}
				}
				if _, err := d.plane.Objects.XdpLb.Run(&ebpf.RunOptions{Data: frame}); err != nil {
					d.t.Error(err)
				}
			}
		})
	}
	cores.Wait()
}

// A core that tries to replace an entry that the other core has changed leaves the entry as it is,
// and notices it.
func TestOneWriterWins(t *testing.T) {
	const buckets = 1024
	d := openDuel(t, buckets)
	busy := repeat(stateEstablished, 0)
	others := uint64(buckets * (dataplane.FlowsPerBucket - 1))
	both := func(noRoom uint64) dataplane.FlowCounts { return dataplane.FlowCounts{New: 2*buckets - noRoom} }
	// If the packet of the first core is first, its flow is established and the other flow finds no
	// room. Otherwise the other flow is entered. If the packet of the first core then comes very
	// late, its flow is entered anew and displaces the other one.
	either := func(noRoom uint64) dataplane.FlowCounts {
		return dataplane.FlowCounts{New: buckets - noRoom, Established: others + noRoom}
	}
	for _, v := range []struct {
		name      string
		residents [dataplane.FlowsPerBucket]resident
		flags     packet.TCPFlags // of the first core's packets; the other core's packets are SYNs
		want      func(noRoom uint64) dataplane.FlowCounts
	}{
		{"both enter", repeat(stateFree, 0), packet.SYN, both},
		{"one enters, where the other confirms", with(busy, map[int]resident{0: {stateNew, 0}}), packet.ACK, either},
		{"one enters, where the other wakes up", with(busy, map[int]resident{0: {stateEstablished, 20}}), packet.ACK, either},
	} {
		t.Run(v.name, func(t *testing.T) {
			d.t = t
			frames := [2][][]byte{d.frames(0, v.flags), d.frames(1, packet.SYN)}
			rounds, missed := 0, uint64(0)
			for start := time.Now(); time.Since(start) < 300*time.Millisecond && !t.Failed(); rounds++ {
				d.settle(v.residents)
				before := d.counters()
				d.fight(frames)
				reasons := difference(before.reasons, d.counters().reasons)
				noRoom := reasons["forward_no_room"].Packets
				if got, want := totalOf(d.plane.Flows), v.want(noRoom); got != want {
					t.Errorf("round %d: the table has %+v, want %+v; packets left as %v", rounds, got, want, reasons)
				}
				missed += noRoom
			}
			t.Logf("%d rounds of %d packets on each of two cores, %d found no room", rounds, buckets, missed)
		})
	}
}
