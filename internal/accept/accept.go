// SPDX-License-Identifier: Apache-2.0

// Package accept holds the policies by which a server takes a connection that it is offered or passes
// it on: those of "6LB: Scalable and Application-Aware Load Balancing with Segment Routing", section
// II-B, and Least; and with Spare what a balancer makes of servers' answers. The agent's data path has
// its own form of the paper's in bpf/agent/accept.h; tests of the agent compare the two.
package accept

import "math"

// Load is how busy a server is.
type Load struct {
	// Busy is how many connections the application serves, or has waiting, as the load source counts.
	Busy uint32
	// Capacity is how many it can serve at a time without making any wait; NoCapacity where unknown.
	Capacity uint32
}

// NoCapacity is the capacity of a source that knows none.
const NoCapacity = math.MaxUint32

// Policy decides for one server about the connections that it may refuse: those offered by
// connect-avail. What comes with connect-force is taken without asking.
type Policy interface {
	// Accepts tells whether a server of this load takes the connection that it is offered now.
	Accepts(Load) bool
}

// Always takes whatever is offered: the first candidate gets all, as with a single choice.
type Always struct{}

// Accepts is true.
func (Always) Accepts(Load) bool { return true }

// Never passes everything on: the last candidate gets all.
type Never struct{}

// Accepts is false.
func (Never) Accepts(Load) bool { return false }

// Static is 6LB's algorithm 1, SRc: a connection is taken while fewer than Threshold are busy.
type Static struct {
	Threshold uint32 // c
}

// Accepts compares the load with the threshold.
func (s Static) Accepts(l Load) bool { return l.Busy < s.Threshold }

// Dynamic is 6LB's algorithm 2, SRdyn: a threshold that moves so that about half of the offers are
// taken. (SRLB prints the algorithm too, but there the attempts never accumulate.)
type Dynamic struct {
	Threshold uint32 // c, as it is now
	Attempts  uint32 // in this window so far
	Accepted  uint32 // of them
	window    uint32
	few, many uint32
}

// NewDynamic begins with a threshold, and adapts it after each window of so many offers, 1 or more, to
// keep the accepted share within epsilon, 0 to less than 0.5, of one half. The paper has 1, 50 and 0.1.
func NewDynamic(initial, window uint32, epsilon float64) *Dynamic {
	few, many := Bounds(window, epsilon)
	return &Dynamic{Threshold: initial, window: window, few: few, many: many}
}

// Accepts counts the offer and decides, in the paper's order: the last offer of a window is decided by
// the new threshold, and counted in the next one as accepted, though not as an attempt.
func (d *Dynamic) Accepts(l Load) bool {
	d.Attempts++
	if d.Attempts == d.window {
		d.adapt(l)
	}
	accepted := l.Busy < d.Threshold
	if accepted {
		d.Accepted++
	}
	return accepted
}

func (d *Dynamic) adapt(l Load) {
	if d.Accepted < d.few {
		if d.Threshold < l.Capacity {
			d.Threshold++
		}
	} else if d.Accepted > d.many && d.Threshold > 0 {
		d.Threshold--
	}
	d.Attempts, d.Accepted = 0, 0
}

// Bounds are the accepted connections of a window between which algorithm 2 leaves the threshold alone:
// fewer than few are less than a share of 1/2-epsilon, more than many are more than 1/2+epsilon. In
// whole millionths, because 0.1 is no binary fraction and 20 of 50 must not be less than 0.4.
func Bounds(window uint32, epsilon float64) (few, many uint32) {
	const one = 1_000_000
	e := uint64(math.Round(epsilon * one))
	few = uint32((uint64(window)*(one/2-e) + one - 1) / one)
	many = uint32(uint64(window) * (one/2 + e) / one)
	return few, many
}
