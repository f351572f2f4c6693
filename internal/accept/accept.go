// SPDX-License-Identifier: Apache-2.0

// Package accept has the policies by which a server accepts or refuses an offered connection: those
// of "6LB: Scalable and Application-Aware Load Balancing with Segment Routing", section II-B, and
// Least. It also has the codes of loads in reports, and Spare, a balancer's list of free servers.
// The agent's data path has its own form of the policies in bpf/agent; tests of the agent compare
// the two.
package accept

import (
	"math"
	"time"
)

// Load is the load of a server.
type Load struct {
	// Busy is the number of connections that the application serves or has waiting, as the load
	// source counts them.
	Busy uint32
	// Capacity is the number that it can serve at a time without a wait: NoCapacity if the source
	// does not know it, and 0 if the whole load is unknown.
	Capacity uint32
}

// NoCapacity is the capacity if the source does not know it. For Least, such a server is never
// free, and compares with others as if its capacity were 1.
const NoCapacity = math.MaxUint32

// Unknown is the load of a server whose source has no reading, or a reading that is too old.
var Unknown = Load{}

// Policy decides for one server about connections that are offered by connect-avail. Connections
// with connect-force are accepted without a decision.
type Policy interface {
	// Accepts tells whether a server with this load accepts an offered connection.
	Accepts(Load) bool
}

// Always accepts all offers: the first candidate gets all connections, as with a single choice.
type Always struct{}

// Accepts is true.
func (Always) Accepts(Load) bool { return true }

// Never refuses all offers: the last candidate gets all connections.
type Never struct{}

// Accepts is false.
func (Never) Accepts(Load) bool { return false }

// Static is 6LB's algorithm 1, SRc: a server accepts while its load is less than Threshold.
type Static struct {
	Threshold uint32 // c
}

// Accepts compares the load with the threshold.
func (s Static) Accepts(l Load) bool { return l.Busy < s.Threshold }

// Dynamic is 6LB's algorithm 2, SRdyn: a threshold that moves so that about half of the offers are
// accepted. (SRLB also prints the algorithm, but there the attempts never accumulate.)
//
// The paper counts SYNs. A flood of SYNs fills a window within a time in which the load does not
// change. Then the threshold follows the load, and the policy accepts half of the offers whatever
// the load is. So a window also has a shortest time. Over a longer time, a SYN of a flood finds the
// server above its threshold as often as any other SYN.
type Dynamic struct {
	Threshold  uint32        // the present threshold
	Attempts   uint32        // offers in this window so far
	Accepted   uint32        // accepted offers in this window
	Began      time.Duration // when this window began, by the clock; 0 without a shortest time
	window     uint32
	windowTime time.Duration
	clock      func() time.Duration
	few, many  uint32
}

// NewDynamic returns a policy that begins with a threshold. It adapts the threshold after each
// window, to keep the accepted share within epsilon (0 to less than 0.5) of one half. A window has
// at least a number of offers (1 or more). The paper uses 1, 50 and 0.1.
func NewDynamic(initial, window uint32, epsilon float64) *Dynamic {
	few, many := Bounds(window, epsilon)
	return &Dynamic{Threshold: initial, window: window, few: few, many: many}
}

// WithWindowTime lets a window last at least a time, more than 0, by a monotonic clock. The paper
// has no such time.
func (d *Dynamic) WithWindowTime(least time.Duration, clock func() time.Duration) *Dynamic {
	d.windowTime, d.clock = least, clock
	return d
}

// Accepts counts the offer and decides, in the paper's order. The new threshold decides the last
// offer of a window. If the server accepts this offer, the next window counts it as accepted, but
// not as an offer.
func (d *Dynamic) Accepts(l Load) bool {
	d.Attempts++
	if d.Attempts >= d.window {
		d.endWindow(l)
	}
	accepted := l.Busy < d.Threshold
	if accepted {
		d.Accepted++
	}
	return accepted
}

// endWindow ends a window that has enough offers, if it has lasted long enough.
func (d *Dynamic) endWindow(l Load) {
	now := time.Duration(0)
	if d.clock != nil {
		now = d.clock()
	}
	if now-d.Began >= d.windowTime {
		d.adapt(l)
		d.Began = now
	}
}

// adapt changes the threshold at the end of a window. The bounds are for a window with the smallest
// number of offers, so the accepted offers are scaled to that number.
func (d *Dynamic) adapt(l Load) {
	accepted := uint64(d.Accepted) * uint64(d.window)
	if accepted < uint64(d.few)*uint64(d.Attempts) {
		if d.Threshold < l.Capacity {
			d.Threshold++
		}
	} else if accepted > uint64(d.many)*uint64(d.Attempts) && d.Threshold > 0 {
		d.Threshold--
	}
	d.Attempts, d.Accepted = 0, 0
}

// Bounds returns the numbers of accepted connections of a window between which algorithm 2 keeps
// the threshold. Fewer than few are less than a share of 1/2-epsilon, and more than many are more
// than 1/2+epsilon. It computes in whole millionths, because 0.1 is not a binary fraction and 20 of
// 50 must not be less than 0.4.
func Bounds(window uint32, epsilon float64) (few, many uint32) {
	const one = 1_000_000
	e := uint64(math.Round(epsilon * one))
	few = uint32((uint64(window)*(one/2-e) + one - 1) / one)
	many = uint32(uint64(window) * (one/2 + e) / one)
	return few, many
}
