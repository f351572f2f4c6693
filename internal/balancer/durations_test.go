// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"container/heap"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/packet"
)

// ending is a flow that is to end.
type ending struct {
	at   time.Time
	flow int
}

type endings []ending

func (e endings) Len() int           { return len(e) }
func (e endings) Less(i, j int) bool { return e[i].at.Before(e[j].at) }
func (e endings) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *endings) Push(x any)        { *e = append(*e, x.(ending)) }
func (e *endings) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// timing runs flows that last for random times, and collects the sample of their durations.
type timing struct {
	*ranked
	draw   func(server int) float64 // a duration in seconds
	slots  []uint32
	began  map[int]time.Time // by number of the flow
	queue  endings
	all    [2][]float64 // the durations of all flows in seconds, by server
	sample [2][]float64
}

// reservoirSize is RESERVOIR_SIZE in bpf/balancer/types.h.
const reservoirSize = 128

// openTiming opens a balancer with two servers, and with room for the given number of starts.
func openTiming(t testing.TB, starts uint32, draw func(server int) float64) *timing {
	r := openRanked(t, inferring(manyServers(2)...), 4*starts, 6000)
	tm := &timing{
		ranked: r, draw: draw, began: map[int]time.Time{}, slots: r.services.byName["web"].slots(),
	}
	for _, slot := range tm.slots {
		r.plane.SetTiming(slot, infer.TimingEnds)
	}
	if got := r.plane.Objects.Starts.MaxEntries(); got != starts {
		t.Fatalf("there is place for %d starts", got)
	}
	r.moving = true // dry runs take time
	return tm
}

// begin begins a flow, and plans its end. The time is that before the first packet: the test may stand
// still between the last one and the next statement.
func (tm *timing) begin(flow int) {
	now := time.Now()
	tm.exec(tm.frames[packet.SYN][flow], nil)
	tm.exec(tm.frames[packet.ACK][flow], nil)
	entry := tm.entry(tm.flows[flow])
	if entry.State() != stateEstablished {
		return // there was no room
	}
	tm.began[flow] = now
	duration := tm.draw(slices.Index(tm.slots, entry.Server()))
	heap.Push(&tm.queue, ending{now.Add(time.Duration(duration * 1e9)), flow})
}

// end ends the flow whose end comes first. Its entry leaves the table, as after the timeout.
func (tm *timing) end() {
	flow := heap.Pop(&tm.queue).(ending).flow
	server := slices.Index(tm.slots, tm.entry(tm.flows[flow]).Server())
	tm.exec(tm.frames[packet.FIN|packet.ACK][flow], nil)
	for i, value := range tm.bucket(tm.flows[flow]) {
		if dataplane.FlowEntry(value).State() == stateClosing {
			tm.bucket(tm.flows[flow])[i] = 0
		}
	}
	tm.all[server] = append(tm.all[server], time.Since(tm.began[flow]).Seconds())
}

// run begins flows at random times, until all have begun. Full reservoirs are emptied, so that the
// sample is larger than they are.
func (tm *timing) run(gap time.Duration) {
	tm.t.Helper()
	next := time.Now()
	for flow := 0; flow < len(tm.flows) || len(tm.queue) > 0; {
		now := time.Now()
		switch {
		case len(tm.queue) > 0 && !tm.queue[0].at.After(now):
			tm.end()
		case flow < len(tm.flows) && !next.After(now):
			tm.begin(flow)
			flow++
			next = next.Add(time.Duration(rand.ExpFloat64() * float64(gap)))
			if flow%50 == 0 {
				tm.collect(flow > len(tm.flows)/8)
			}
		default:
			time.Sleep(50 * time.Microsecond)
		}
	}
}

// collect empties the full reservoirs, and keeps their durations or not.
func (tm *timing) collect(keep bool) {
	tm.t.Helper()
	for server, slot := range tm.slots {
		durations := tm.plane.Loads.Durations(slot, nil)
		if len(durations) < reservoirSize {
			continue
		}
		if keep {
			tm.sample[server] = append(tm.sample[server], durations...)
		}
		var none [reservoirSize + 2]uint32
		tm.must(tm.plane.Objects.Reservoirs.Put(slot, none))
	}
}

// checkSample requires that a sample has the distribution of all durations, by the test of
// Kolmogorov and Smirnov, and their mean. Both tests fail wrongly once in some ten thousand times.
func checkSample(t *testing.T, sample, all []float64) {
	t.Helper()
	slices.Sort(all)
	slices.Sort(sample)
	n, m := float64(len(sample)), float64(len(all))
	distance := 0.0
	for i, x := range sample {
		below, _ := slices.BinarySearch(all, x)
		for _, rank := range []float64{float64(i), float64(i + 1)} {
			distance = max(distance, math.Abs(rank/n-float64(below)/m))
		}
	}
	if limit := 2.2 * math.Sqrt(1/n+1/m); distance > limit {
		t.Errorf("the distribution of %v durations differs by %.3f from that of all %v, limit %.3f",
			n, distance, m, limit)
	}
	mean, deviation := moments(all)
	got, _ := moments(sample)
	if limit := 5 * deviation * math.Sqrt(1/n+1/m); math.Abs(got-mean) > limit {
		t.Errorf("the mean of %v durations is %.5f, that of all %v is %.5f ± %.5f", n, got, m,
			mean, limit)
	}
}

func moments(values []float64) (mean, deviation float64) {
	for _, x := range values {
		mean += x / float64(len(values))
	}
	for _, x := range values {
		deviation += (x - mean) * (x - mean) / float64(len(values))
	}
	return mean, math.Sqrt(deviation)
}

// The sample of durations is one of all flows, although there is place for few starts. One server
// is three times as slow as the other.
func TestSampleOfDurations(t *testing.T) {
	means := [2]float64{0.006, 0.018}
	for name, draw := range map[string]func(server int) float64{
		"exponential": func(server int) float64 { return means[server] * rand.ExpFloat64() },
		"lognormal": func(server int) float64 {
			return means[server] * math.Exp(rand.NormFloat64()-0.5)
		},
	} {
		t.Run(name, func(t *testing.T) {
			tm := openTiming(t, 16, draw)
			tm.run(350 * time.Microsecond)
			for server := range tm.slots {
				if len(tm.sample[server]) < reservoirSize {
					t.Fatalf("server %d: only %d durations were sampled, of %d", server,
						len(tm.sample[server]), len(tm.all[server]))
				}
				checkSample(t, tm.sample[server], tm.all[server])
			}
			for slot := range tm.plane.Objects.Loads.MaxEntries() {
				durations := tm.plane.Loads.Durations(slot, nil)
				if len(durations) > 0 && !slices.Contains(tm.slots, slot) {
					t.Errorf("slot %d has durations, and no server", slot)
				}
			}
		})
	}
}

// A full reservoir has a random part of the last durations, all in their places.
func TestFullReservoir(t *testing.T) {
	t.Parallel()
	tm := openTiming(t, 4096, func(int) float64 { return 0 })
	for flow := range len(tm.flows) {
		tm.begin(flow)
		for flow%2 == 1 && len(tm.queue) > 0 { // each server has one of two flows
			tm.end()
		}
	}
	for server, slot := range tm.slots {
		durations := tm.plane.Loads.Durations(slot, nil)
		if len(durations) != reservoirSize || len(tm.all[server]) < 1000 {
			t.Errorf("server %d: %d durations of %d", server, len(durations), len(tm.all[server]))
		}
		var reservoir [reservoirSize + 2]uint32
		tm.must(tm.plane.Objects.Reservoirs.Lookup(slot, &reservoir))
		if got := int(reservoir[0]); got != len(tm.all[server]) || reservoir[1] != 0 {
			t.Errorf("server %d: %d durations were counted, %d flows ended", server, got,
				len(tm.all[server]))
		}
		for place, duration := range durations {
			if duration > slices.Max(tm.all[server]) {
				t.Errorf("server %d: place %d has %v s", server, place, duration)
			}
		}
	}
}

// The start of a flow that leaves without an end keeps its place for some minutes. Only the same
// flow may use the place meanwhile.
func TestStartLeftBehind(t *testing.T) {
	t.Parallel()
	tm := openTiming(t, 1, func(int) float64 { return 0 })
	sampled := func() (n int) {
		for _, slot := range tm.slots {
			n += len(tm.plane.Loads.Durations(slot, nil))
		}
		return n
	}
	tm.begin(0)
	_, err := tm.plane.Sweeper.Sweep(nobody)
	tm.must(err)
	tm.queue = nil
	tm.begin(1)
	tm.end()
	if sampled() != 0 {
		t.Error("a flow was timed while another one had the only place")
	}
	time.Sleep(20 * time.Millisecond)
	again := time.Now()
	tm.begin(0)
	tm.end()
	var durations []float64
	for _, slot := range tm.slots {
		durations = tm.plane.Loads.Durations(slot, durations)
	}
	if len(durations) != 1 || durations[0] > time.Since(again).Seconds() {
		t.Errorf("a flow that began anew has the durations %v, after %v", durations,
			time.Since(again))
	}
	for age, isFree := range map[time.Duration]bool{time.Minute: false, 5 * time.Minute: true} {
		var now unix.Timespec
		tm.must(unix.ClockGettime(unix.CLOCK_BOOTTIME, &now))
		start := uint64(now.Nano()-int64(age)) / 1000 & (1<<46 - 1)
		tm.must(tm.plane.Objects.Starts.Put(uint32(0), start|1<<63))
		before := sampled()
		tm.begin(2)
		tm.end()
		if got := sampled() > before; got != isFree {
			t.Errorf("a start of %v ago makes room for another one: %t", age, got)
		}
		tm.forgetFlows()
	}
}
