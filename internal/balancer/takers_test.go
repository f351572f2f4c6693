// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"flag"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

var collisions = flag.Int("collisions", 1,
	"how many times as many packets meet on two cores as in make test")

// meeting makes two cores continue at the same time, any number of times.
type meeting struct{ arrived atomic.Int32 }

// wait returns when both cores have called it for the nth time. It uses a busy loop, to make the
// cores as simultaneous as possible.
func (m *meeting) wait(n int32) {
	for m.arrived.Add(1); m.arrived.Load() < 2*n; {
	}
}

// collide runs the data path with two frames at the same time, each on its own core: as often as
// given, times the flag collisions. Each time it calls before first, and then after with the
// verdicts.
func (f *fixture) collide(times int32, frames [2][]byte, before func(), after func(verdict [2]uint32)) {
	times *= int32(*collisions)
	f.moving = true
	defer func() { f.moving = false }()
	var verdict [2]uint32
	var start, end meeting
	var cores sync.WaitGroup
	for core, frame := range frames {
		cores.Go(func() {
			pin(f.t, core)
			for n := range times {
				if core == 0 && !f.t.Failed() {
					before()
				}
				start.wait(n + 1)
				verdict[core], _ = f.exec(frame, nil)
				end.wait(n + 1)
				if core == 0 && !f.t.Failed() {
					after(verdict)
				}
			}
		})
	}
	cores.Wait()
}

// Two servers accept one connection, and their SYN-ACKs arrive at the same time. One SYN-ACK
// continues to the client, and the other server gets a reset. The flow then belongs only to the
// first of these servers.
func TestTwoTakers(t *testing.T) {
	f := open(t, hunting(desired.SelectConsistent, 2))
	parts := f.cast(web, "web")
	frames := [2][]byte{
		f.signal(web, "web", parts[first], srv6.CreateStickiness, synAck),
		f.signal(web, "web", parts[second], srv6.CreateStickiness, synAck),
	}
	for name, ages := range map[string][]uint16{
		"empty": {}, "full": {0, 0, 0, 0, 0, 0, 0, 0}, "full of older ones": {9, 9, 9, 9, 9, 9, 9, 9},
		"full of older and newer ones": {1, 3, 2, 5, 5, 0, 4, 1},
	} {
		t.Run(name, func(t *testing.T) {
			f.t = t
			won := map[string]int{}
			f.collide(300, frames, func() { f.crowdHalfOpen(web, "web", ages) }, func(verdict [2]uint32) {
				f.leaveHalfOpen(web)
				outcome := verdicts[verdict[0]] + ", " + verdicts[verdict[1]] + ": " + f.state(web, "web", parts)
				won[outcome]++
				if outcome != "pass, redirect: half-open first" && outcome != "redirect, pass: half-open second" {
					t.Error(outcome)
				}
			})
			t.Log(won)
			if len(won) < 2 {
				t.Error("they were never at it together")
			}
		})
	}
}

// crowdHalfOpen makes half-open flows of the given ages, in ticks, the only ones. They are in the
// bucket of a flow.
func (f *fixture) crowdHalfOpen(flow dataplane.Flow, service string, ages []uint16) {
	clear(f.plane.HalfOpen.Entries)
	place, signature := flow.TableHash(f.serviceID(flow), &f.identity)
	for i, age := range ages {
		other := signature ^ uint64(i+1)<<3
		f.plane.HalfOpen.Entries[bucketNumber(f.plane.HalfOpen, place)*dataplane.FlowsPerBucket+i] =
			entryOf(other, f.slot(service, f.service(service).Servers[0].Name), stateNew, f.now()-age)
	}
}

// leaveHalfOpen frees all entries of a flow's bucket except that of the flow.
func (f *fixture) leaveHalfOpen(flow dataplane.Flow) {
	place, signature := flow.TableHash(f.serviceID(flow), &f.identity)
	bucket := f.plane.HalfOpen.Entries[bucketNumber(f.plane.HalfOpen, place)*dataplane.FlowsPerBucket:][:dataplane.FlowsPerBucket]
	for i, entry := range bucket {
		if dataplane.FlowEntry(entry).Signature() != signature {
			bucket[i] = 0
		}
	}
}

// A second server accepts a connection while the client's answer to the first server makes the flow
// known. The second server must lose, whether its signal comes before, after or while the entry
// moves from one table to the other.
func TestTakerWhileConfirmed(t *testing.T) {
	f := open(t, hunting(desired.SelectConsistent, 2))
	parts := f.cast(web, "web")
	frames := [2][]byte{
		frameOf(web, packet.Flags(packet.ACK)),
		f.signal(web, "web", parts[second], srv6.CreateStickiness, synAck),
	}
	f.collide(2_000, frames, func() { f.setState(web, "web", "half-open first", parts) }, func(verdict [2]uint32) {
		outcome := verdicts[verdict[0]] + ", " + verdicts[verdict[1]] + ": " + f.state(web, "web", parts)
		if outcome != "redirect, redirect: steer first" {
			t.Error(outcome)
		}
	})
}
