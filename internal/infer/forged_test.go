// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// forge lets a client begin the given number of flows on a server. While all of them are there, one
// ends and begins again, the given number of times. Then all end. All of this happens at one
// moment. The data path counts such ends only if each flow is another one, or once in some seconds
// (docs/operate/infer.md): this is what a client with thousands of ports can do.
func (w *world) forge(server, flows, times int) {
	c := &w.gates[0].counters[server]
	begin := func() { c.Placed, c.Answered, c.Established = c.Placed+1, c.Answered+1, c.Established+1 }
	end := func() {
		c.Ended[min(c.Established, MostServed)-1]++
		c.Established--
	}
	for range flows {
		begin()
	}
	for range times {
		end()
		begin()
	}
	for range flows {
		end()
	}
}

// every does something at regular intervals, in seconds.
func (w *world) every(seconds float64, do func()) {
	w.after(seconds, func() {
		do()
		w.every(seconds, do)
	})
}

// duration returns the mean duration of the flows that end in so many seconds.
func (w *world) duration(seconds float64) float64 {
	w.run(seconds)
	return w.stays / w.ended
}

// TestForgedCapacity lets a client pretend that one of eight servers serves 31 flows at once, or that
// seven of them serve single flows in no time. Capacities are learned from that, but not beyond a
// multiple of the median. So the duration of flows grows by the factors below at most. Without the
// bound, the server would get as many flows as it seems to serve, and the factors would be 2.8 to
// 4.
func TestForgedCapacity(t *testing.T) {
	attract := func(w *world) { w.every(1, func() { w.forge(3, 31, 600) }) }
	repel := func(w *world) {
		for s := 1; s < 8; s++ {
			w.every(0.002, func() { w.forge(s, 1, 0) })
		}
	}
	for _, c := range []struct {
		name   string
		attack func(*world)
		cpus   int
		load   float64
		most   float64
	}{
		{"attract", attract, 2, 0.6, 1.7}, {"attract", attract, 2, 0.8, 1.7}, {"attract", attract, 4, 0.6, 1.7},
		{"repel", repel, 2, 0.6, 1.4}, {"repel", repel, 2, 0.8, 1.4},
	} {
		w := newWorld(1, TerritoryLearned, 1, sites(8, c.cpus))
		w.exponential(0.2, c.load)
		w.run(200)
		before := w.duration(100)
		c.attack(w)
		w.run(30)
		after := w.duration(100)
		t.Logf("%s, %d processors, load %.1f: %.3f s, then %.3f s", c.name, c.cpus, c.load, before, after)
		if after > c.most*before {
			t.Errorf("%s, %d processors, load %.1f: flows took %.3f s before, and %.3f s then: more than %v times",
				c.name, c.cpus, c.load, before, after, c.most)
		}
	}
}

// TestCapacityBounds checks the bounds by hand: a multiple of the median of the servers that take
// flows, which the weights of an operator widen.
func TestCapacityBounds(t *testing.T) {
	for _, c := range []struct {
		name             string
		learned, weights []float64
		server           int
		want             float64
	}{
		{"most", []float64{2, 2, 2, 32}, []float64{1, 1, 1, 1}, 3, 8},
		{"least", []float64{16, 16, 16, 1}, []float64{1, 1, 1, 1}, 3, 4},
		{"within", []float64{4, 4, 4, 16}, []float64{1, 1, 1, 1}, 3, 16},
		{"half of the servers is larger", []float64{4, 4, 16, 16}, []float64{1, 1, 1, 1}, 3, 16},
		{"half of the servers is larger, seen from there", []float64{4, 4, 16, 16}, []float64{1, 1, 1, 1}, 0, 4},
		{"two servers", []float64{2, 32}, []float64{1, 1}, 1, 8},
		{"two servers, the other one", []float64{2, 32}, []float64{1, 1}, 0, 8},
		{"a larger weight", []float64{2, 2, 2, 32}, []float64{1, 1, 1, 8}, 3, 32},
		{"a smaller weight", []float64{16, 16, 16, 1}, []float64{4, 4, 4, 1}, 3, 1},
		{"weights of servers alike", []float64{2, 2, 2, 32}, []float64{5, 5, 5, 5}, 3, 8},
		{"servers that take no flows do not count", []float64{1, 1, 1, 8, 32}, []float64{0, 0, 0, 1, 1}, 4, 32},
		{"one server", []float64{32}, []float64{1}, 0, 32},
	} {
		e, err := NewEstimator(Settings{Kind: TerritoryLearned})
		testhost.Must(t, err)
		list := members(len(c.learned))
		for i := range list {
			list[i].Weight = c.weights[i]
		}
		testhost.Must(t, e.Arrange(list, nil, "b"))
		for i, capacity := range c.learned {
			e.capacities.servers[i].capacity = capacity
		}
		e.boundCapacities()
		if got := e.capacity(c.server); got != c.want {
			t.Errorf("%s: a capacity of %v, want %v", c.name, got, c.want)
		}
	}
}

// TestForgedDurations keeps one flow of an hour in the sample of one of eight servers, for as long
// as such a flow lasts. The server's weight must not vanish: durations count up to a multiple of
// the median. Without the bound, durations-mean would give the server a weight of 0.02 relative to
// the others.
func TestForgedDurations(t *testing.T) {
	for kind, least := range map[Kind]float64{Durations: 0.35, DurationsFixed: 0.35, DurationsMean: 0.1} {
		w := newWorld(1, kind, 1, sites(8, 8))
		w.exponential(0.2, 0.3)
		w.run(100)
		gate := w.gates[0]
		gate.samples[3][0] = 3600
		for range 2 * 3600 {
			for s := range w.sites {
				gate.estimator.Observe(s, gate.samples[s])
			}
			gate.estimator.Step(0.5, 0)
		}
		others := 0.0
		for s := range w.sites {
			if s != 3 {
				others += gate.estimator.Report(s).Weight / 7
			}
		}
		got := gate.estimator.Report(3).Weight / others
		t.Logf("%s: a weight of %.4f relative to the others", kind, got)
		if got < least {
			t.Errorf("%s: a weight of %.4f relative to the others, want %v at least", kind, got, least)
		}
	}
}
