// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"math"
	"testing"
)

// serve lets a server with a number of processors of a given speed have from 1 to most flows, for
// 100 s each. The number of flows that end is the expected one.
func serve(c *Capacities, server int32, processors, most int, speed float64) {
	for n := 1; n <= most; n++ {
		c.Had(server, n, 100)
		c.Ended(server, n, 100*speed*float64(min(n, processors)))
	}
}

func TestCapacities(t *testing.T) {
	c := NewCapacities(6)
	serve(c, 0, 1, 3, 1)
	serve(c, 1, 2, 4, 1)
	serve(c, 2, 4, 6, 1)
	serve(c, 3, 16, 20, 1)
	serve(c, 4, 4, 6, 0.5) // slow processors have the same number
	c.Step(0.5, []int32{0, 1, 2, 3})
	for s, want := range []float64{1, 2, 4, 16, 4} {
		if got := c.Capacity(int32(s)); got != want {
			t.Errorf("server %d: capacity %v, want %v", s, got, want)
		}
	}
	// In each second, there are 1, 2 and 3 flows, which is six seconds of flows. Three of these
	// were service.
	if got := c.Wait(0); math.Abs(got-1) > 0.01 {
		t.Errorf("server 0: a wait of %v, want 1", got)
	}
	if got := c.Wait(5); got != 0 {
		t.Errorf("a server without flows: a wait of %v", got)
	}
	c.Forget(3)
	if c.Capacity(3) != 1 || c.Wait(3) != 0 {
		t.Errorf("after it was forgotten: capacity %v, wait %v", c.Capacity(3), c.Wait(3))
	}
}

// TestCapacitiesAreCommon checks the estimate for the last server: little is known about it, and
// the observations fit 2 as well as 4 and 16.
func TestCapacitiesAreCommon(t *testing.T) {
	c := NewCapacities(10)
	home := make([]int32, 0, 9)
	for s := range int32(9) {
		serve(c, s, 4, 6, 1)
		home = append(home, s)
	}
	c.Had(9, 2, 1)
	c.Ended(9, 2, 2)
	for range 3 {
		c.Step(0.5, home)
	}
	if got := c.Capacity(9); got != 4 {
		t.Errorf("capacity %v, want 4 as of all others", got)
	}
}

// TestCapacitiesFade checks that the estimate follows a server that loses processors.
func TestCapacitiesFade(t *testing.T) {
	c, home := NewCapacities(1), []int32{0}
	serve(c, 0, 4, 6, 1)
	c.Step(0.5, home)
	if got := c.Capacity(0); got != 4 {
		t.Errorf("capacity %v, want 4", got)
	}
	c.Step(5*memory, home)
	serve(c, 0, 1, 6, 1)
	c.Step(0.5, home)
	if got := c.Capacity(0); got != 1 {
		t.Errorf("capacity %v, want 1", got)
	}
}

func TestNothingSeen(t *testing.T) {
	c := NewCapacities(2)
	c.Had(1, 1, 5)
	c.Ended(1, 1, 1) // a server of another home
	c.Step(0.5, []int32{0})
	if c.Capacity(1) != 1 || c.Wait(1) != 0 {
		t.Errorf("capacity %v, wait %v of what cannot be told yet", c.Capacity(1), c.Wait(1))
	}
}

// work lets a server with a number of processors of speed 1 have from 1 to most flows in turn, each
// for a second, with a step after each second. The number of flows that end is the expected one.
func work(c *Capacities, server int32, processors, most, seconds int, home []int32) {
	for second := range seconds {
		n := 1 + second%most
		c.Had(server, n, 1)
		c.Ended(server, n, float64(min(n, processors)))
		c.Step(1, home)
	}
}

// TestCapacitiesChange checks that a server that loses or gains processors is learned anew within
// 30 s, after ten minutes, and that nothing is forgotten while it does not change.
func TestCapacitiesChange(t *testing.T) {
	home := []int32{0}
	for _, change := range [][2]int{{8, 3}, {3, 8}, {4, 1}} {
		c := NewCapacities(1)
		work(c, 0, change[0], 12, 600, home)
		if got := c.Capacity(0); got != float64(change[0]) {
			t.Errorf("%v: capacity %v before the change", change, got)
		}
		if got := c.servers[0].above()[0].seconds; got < 200 {
			t.Errorf("%v: only %v s are left of 600 s without a change", change, got)
		}
		work(c, 0, change[1], 12, 30, home)
		if got := c.Capacity(0); got != float64(change[1]) {
			t.Errorf("%v: capacity %v after the change", change, got)
		}
	}
}
