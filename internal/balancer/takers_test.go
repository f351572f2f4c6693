package balancer

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// meeting lets two cores go on at once, over and over.
type meeting struct{ arrived atomic.Int32 }

// wait returns when both have called it for the nth time; by a loop, which is as close as it gets.
func (m *meeting) wait(n int32) {
	for m.arrived.Add(1); m.arrived.Load() < 2*n; {
	}
}

// collide sends two frames at once, each on a core of its own, that many times. What is to be done before
// and after is told the number of the time.
func (f *fixture) collide(times int32, frames [2][]byte, before func(), after func(verdict [2]uint32)) {
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

// Two servers take one connection, and their SYN-ACKs come at the same time: one goes on to the client, and
// the other server gets a reset. From then on the flow is the first one's, alone.
func TestTwoTakers(t *testing.T) {
	f := open(t, hunting(config.SelectConsistent, 2))
	parts := f.cast(web, "web")
	frames := [2][]byte{
		f.signal(web, "web", parts[first], srv6.CreateStickiness, synAck),
		f.signal(web, "web", parts[second], srv6.CreateStickiness, synAck),
	}
	won := map[string]int{}
	f.collide(20_000, frames, func() { clear(f.kernel.pending.entries) }, func(verdict [2]uint32) {
		outcome := verdicts[verdict[0]] + ", " + verdicts[verdict[1]] + ": " + f.state(web, "web", parts)
		won[outcome]++
		if outcome != "pass, redirect: pending first" && outcome != "redirect, pass: pending second" {
			t.Error(outcome)
		}
	})
	t.Log(won)
	if len(won) < 2 {
		t.Error("they were never at it together")
	}
}

// A second server takes a connection while the client's answer to the first one makes the flow known: it
// comes too late, before, after and while the entry moves from one table to the other.
func TestTakerWhileConfirmed(t *testing.T) {
	f := open(t, hunting(config.SelectConsistent, 2))
	parts := f.cast(web, "web")
	frames := [2][]byte{
		web.frame(packet.Flags(packet.ACK)),
		f.signal(web, "web", parts[second], srv6.CreateStickiness, synAck),
	}
	f.collide(30_000, frames, func() { f.setState(web, "web", "pending first", parts) }, func(verdict [2]uint32) {
		outcome := verdicts[verdict[0]] + ", " + verdicts[verdict[1]] + ": " + f.state(web, "web", parts)
		if outcome != "redirect, redirect: steer first" {
			t.Error(outcome)
		}
	})
}
