// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"math"
	"time"
)

// Dynamic is 6LB's algorithm 2, SRdyn: a threshold that moves so that about half of the offers are
// accepted. The paper on SRLB also prints this algorithm, but with an error: its count of attempts
// never grows.
//
// In the paper, a window ends after a number of offers. During a flood of SYNs, windows end faster
// than the load changes. The threshold then moves until it is at the load, and the server accepts
// half of the offers at any load. So here a window also has a shortest time, in which the load can
// go above and below the threshold. Then a SYN of a flood is accepted as often as any other SYN.
type Dynamic struct {
	Threshold  uint32        // the present threshold
	Attempts   uint32        // offers in this window so far
	Accepted   uint32        // accepted offers in this window
	Began      time.Duration // when this window began, by the clock; 0 without a clock
	window     uint32        // the least number of offers in a window
	windowTime time.Duration // the shortest time of a window
	clock      func() time.Duration
	few, many  uint32 // the results of Bounds
}

// NewDynamic returns a policy that begins with the threshold initial. A window lasts for at least
// window offers (1 or more). After each window, the policy adapts the threshold, to keep the
// accepted share within epsilon (0 to less than 0.5) of one half. The paper uses initial 1, window
// 50 and epsilon 0.1.
func NewDynamic(initial, window uint32, epsilon float64) *Dynamic {
	few, many := Bounds(window, epsilon)
	return &Dynamic{Threshold: initial, window: window, few: few, many: many}
}

// WithWindowTime sets the shortest time of a window, which is more than 0, and the monotonic clock
// that measures it. In the paper, windows have no shortest time.
func (d *Dynamic) WithWindowTime(shortest time.Duration, clock func() time.Duration) *Dynamic {
	d.windowTime, d.clock = shortest, clock
	return d
}

// Accepts counts the offer and decides. It keeps the paper's order: the last offer of a window
// first adapts the threshold, and is then compared with the new threshold. If the server accepts
// this offer, the next window counts it as accepted, but not as an offer.
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
	now := time.Duration(0) // without a clock, windowTime is 0 too, and each window ends
	if d.clock != nil {
		now = d.clock()
	}
	if now-d.Began >= d.windowTime {
		d.adapt(l)
		d.Began = now
	}
}

// adapt changes the threshold at the end of a window, and begins the next window. The bounds are
// for d.window offers, but the window may have had more. So adapt compares Accepted/Attempts with
// few/window and many/window, multiplied by both denominators.
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

// Bounds returns the bounds on the accepted offers of a window within which 6LB's algorithm 2 keeps
// the threshold. Fewer offers than few are a share below 1/2-epsilon, and more than many are a
// share above 1/2+epsilon. Bounds computes in whole millionths, because 0.1 is not a binary
// fraction, and 20 of 50 must not be less than 0.4.
func Bounds(window uint32, epsilon float64) (few, many uint32) {
	const one = 1_000_000
	e := uint64(math.Round(epsilon * one))
	few = uint32((uint64(window)*(one/2-e) + one - 1) / one) // rounded up
	many = uint32(uint64(window) * (one/2 + e) / one)
	return few, many
}
