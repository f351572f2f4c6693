// SPDX-License-Identifier: Apache-2.0

package infer

import "testing"

// exponential lets flows take an exponential time with a mean, in seconds, and sets the load.
func (w *world) exponential(mean, load float64) {
	w.work = func() float64 { return mean * w.random.ExpFloat64() }
	w.load(load, mean)
}

// TestGroupSlowsDown halves the speed of half of the servers. Their share of new flows must have
// moved half-way within 30 s. Before it is near 1/2, and after it near 1/3.
func TestGroupSlowsDown(t *testing.T) {
	for _, kind := range []Kind{TerritoryLearned, TerritoryConfigured, HLB, HLBFixed, HLBMean} {
		w := newWorld(1, kind, 2, sites(16, 2))
		w.exponential(0.2, 0.6)
		group := func(seconds float64) (sum float64) {
			for _, share := range w.run(seconds)[:8] {
				sum += share
			}
			return sum
		}
		w.run(60)
		before := group(60)
		for _, s := range w.sites[:8] {
			s.speed = 0.5
		}
		w.run(20)
		soon := group(20)
		w.run(200)
		late := group(60)
		if before < 0.42 || late > 0.38 || soon > (before+late)/2 {
			t.Errorf("%s: a share of %.3f before, %.3f from 20 s to 40 s, %.3f late", kind, before, soon, late)
		}
	}
}
