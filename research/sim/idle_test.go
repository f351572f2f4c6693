// SPDX-License-Identifier: Apache-2.0

package sim_test

import (
	"testing"

	"github.com/segue-lb/segue/research/sim"
)

// silencer is a recorder that learns of flows that are silent for three seconds.
type silencer struct{ *recorder }

func (s silencer) SilentAfter() float64 { return 3 }

func (s silencer) Silent(f *sim.Flow) { s.write("silent %d", f.Number) }

// kept is constantly with clients that keep their connections open for a time.
func kept(idle float64, d sim.Discipline, at ...float64) (*sim.Config, *[]string) {
	c := constantly(1, d, at...)
	c.Jobs[0].Idle = sim.Constant(idle)
	log := recorded(c, always(0))
	inner := c.Placement
	c.Placement = method(func(b *sim.Balancer) sim.Placement {
		p, err := inner.New(b)
		if err != nil {
			panic(err) // recorders have no errors
		}
		return silencer{p.(*recorder)}
	})
	return c, log
}

// An idle flow uses no worker and no processor, and its response has ended. It is open on its
// server, and its balancer knows it.
func TestIdleFlows(t *testing.T) {
	c, log := kept(10, sim.ProcessorSharing, 0, 0, 5)
	c.Servers[0].Workers = 1
	checkFlows(t, c, done(1), done(2), done(1))
	checkLog(t, log,
		"0: b1 place 0", "0: b1 accepted 0 by 0, offered to [0], open 1", "0: b1 connected 0",
		"0: b1 place 1", "0: b1 accepted 1 by 0, offered to [0], open 2", "0: b1 connected 1",
		"4: b1 silent 0",
		"5: b1 silent 1",
		"5: b1 place 2", "5: b1 accepted 2 by 0, offered to [0], open 3", "5: b1 connected 2",
		"9: b1 silent 2",
		"11: b1 closed 0, connected true, after 11, completed, open 2",
		"12: b1 closed 1, connected true, after 12, completed, open 1",
		"16: b1 closed 2, connected true, after 11, completed, open 0")
}

// A flow that is idle for a short time is never silent.
func TestShortIdleFlows(t *testing.T) {
	c, log := kept(2, sim.FIFO, 0)
	checkFlows(t, c, done(1))
	checkLog(t, log,
		"0: b1 place 0", "0: b1 accepted 0 by 0, offered to [0], open 1", "0: b1 connected 0",
		"3: b1 closed 0, connected true, after 3, completed, open 0")
}

// A failing server closes its idle flows, whose responses had ended. A server that is back has
// none.
func TestServerOfIdleFlowsFails(t *testing.T) {
	c, log := kept(10, sim.FIFO, 0, 1.5, 4)
	c.Events = []sim.Event{
		{At: 2, Kind: sim.ServerFail, Servers: []int32{0}, Detect: 5},
		{At: 3, Kind: sim.ServerAdd, Servers: []int32{0}},
	}
	checkFlows(t, c, done(1), ended{0.5, 0, sim.Broken}, done(1))
	checkLog(t, log,
		"0: b1 place 0", "0: b1 accepted 0 by 0, offered to [0], open 1", "0: b1 connected 0",
		"1.5: b1 place 1", "1.5: b1 accepted 1 by 0, offered to [0], open 2", "1.5: b1 connected 1",
		"2: b1 closed 0, connected true, after 2, completed, nothing said",
		"2: b1 closed 1, connected true, after 0.5, broken, nothing said",
		"3: b1 live [0], peers [0]",
		"4: b1 place 2", "4: b1 accepted 2 by 0, offered to [0], open 1", "4: b1 connected 2",
		"7: b1 live [0], peers [0]",
		"8: b1 silent 2",
		"15: b1 closed 2, connected true, after 11, completed, open 0")
}

// Another balancer finds idle flows, or closes them.
func TestBalancerOfIdleFlowsFails(t *testing.T) {
	c, log := kept(10, sim.FIFO, 0)
	c.Balancers = []sim.Share{{Weight: 1}, {Weight: 1, Absent: true}}
	c.Events = []sim.Event{
		{At: 2, Kind: sim.BalancerAdd, Balancers: []int32{1}},
		{At: 2, Kind: sim.BalancerFail, Balancers: []int32{0}},
		{At: 3, Kind: sim.BalancerFail, Balancers: []int32{1}},
	}
	checkFlows(t, c, done(1))
	checkLog(t, log,
		"0: b1 place 0", "0: b1 accepted 0 by 0, offered to [0], open 1", "0: b1 connected 0",
		"2: b1 live [0], peers [0 1]", "2: b2 live [0], peers [0 1]",
		"2: b1 closed 0, connected true, after 2, completed, nothing said",
		"2: b2 recover 0", "2: b2 accepted 0 by 0, offered to [0], open 1", "2: b2 connected 0",
		"2: b2 live [0], peers [1]")
}

// Servers tell which of their connections are idle.
func TestIdleLoad(t *testing.T) {
	c, _ := kept(10, sim.FIFO, 0, 0.1, 1.5)
	var loads []sim.Load
	c.Policy = policy(func(own sim.Load, offer *sim.Offer) int32 {
		loads = append(loads, own)
		return offer.At
	})
	flows(t, c)
	for i, want := range []sim.Load{{}, {Open: 1}, {Open: 2, Idle: 1}} {
		if got := loads[i]; got.Open != want.Open || got.Idle != want.Idle {
			t.Errorf("flow %d finds %d connections, %d of them idle, want %d and %d",
				i, got.Open, got.Idle, want.Open, want.Idle)
		}
	}
}
