// SPDX-License-Identifier: Apache-2.0

package health

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestUnchangedTargetsGoOn(t *testing.T) {
	f := newFake()
	f.set("s1", errDown)
	simulate(t, f, func(t *testing.T, c *Checker) {
		c.SetTargets(t.Context(), []Target{target("s1")})
		expect(t, "two failures", pass(c, time.Second))
		before := f.times("s1")
		if len(before) != 2 {
			t.Fatalf("%d checks in the first interval, want 2", len(before))
		}
		c.SetTargets(t.Context(), []Target{target("s2"), target("s1")})
		synctest.Wait()
		if after := f.times("s1"); len(after) != 2 {
			t.Errorf("%d checks at once for an unchanged target", len(after)-2)
		}
		if n := len(f.times("s2")); n != 1 {
			t.Errorf("%d checks at once for a new target, want 1", n)
		}
		expect(t, "the third failure", pass(c, time.Second),
			Result{"web", "s1", false, "connection refused"})
		if times := f.times("s1"); times[2].Sub(times[1]) != time.Second {
			t.Errorf("the rhythm changed to %v", times[2].Sub(times[1]))
		}
		failing := target("s1")
		failing.State = Failing
		c.SetTargets(t.Context(), []Target{failing})
		expect(t, "unhealthy as before", pass(c, time.Minute))
	})
}

// A change of a check does not put a server that fails back into use. Only checks do.
func TestChangedTargetKeepsItsState(t *testing.T) {
	f := newFake()
	f.set("s1", errDown)
	simulate(t, f, func(t *testing.T, c *Checker) {
		c.SetTargets(t.Context(), []Target{target("s1")})
		expect(t, "three failures", pass(c, 3*time.Second), Result{"web", "s1", false, "connection refused"})
		changed := target("s1")
		changed.Path, changed.State = "/other", Failing
		c.SetTargets(t.Context(), []Target{changed})
		expect(t, "changed", pass(c, 0))
		checks := len(f.times("s1"))
		expect(t, "failing as before", pass(c, 3*time.Second))
		if n := len(f.times("s1")) - checks; n != 3 {
			t.Errorf("%d checks after the first in three intervals, want 3: is the old one left?", n)
		}
		f.set("s1", nil)
		changed.Rise = 3
		c.SetTargets(t.Context(), []Target{changed})
		expect(t, "two successes", pass(c, time.Second))
		expect(t, "three successes", pass(c, 2*time.Second), Result{"web", "s1", true, "successful checks: 3"})
		changed.Path, changed.State = "/third", Healthy
		c.SetTargets(t.Context(), []Target{changed})
		expect(t, "healthy as before", pass(c, time.Minute))
	})
}

// If the reader has forgotten the state of a target, because another host has its name, the reader
// receives what the checks say.
func TestForgottenState(t *testing.T) {
	f := newFake()
	f.set("s1", errDown)
	simulate(t, f, func(t *testing.T, c *Checker) {
		c.SetTargets(t.Context(), []Target{target("s1")})
		failed := Result{"web", "s1", false, "connection refused"}
		expect(t, "three failures", pass(c, 3*time.Second), failed)
		checks := len(f.times("s1"))
		c.SetTargets(t.Context(), []Target{target("s1")})
		expect(t, "at once", pass(c, 0), failed)
		if n := len(f.times("s1")); n != checks {
			t.Errorf("%d checks at once for an unchanged target", n-checks)
		}
	})
}

func TestRemovedTarget(t *testing.T) {
	f := newFake()
	f.set("s1", errDown)
	simulate(t, f, func(t *testing.T, c *Checker) {
		c.SetTargets(t.Context(), []Target{target("s1")})
		time.Sleep(3 * time.Second) // its result waits for a reader
		synctest.Wait()
		c.SetTargets(t.Context(), nil)
		checks := len(f.times("s1"))
		expect(t, "removed before it was read", pass(c, time.Minute))
		if n := len(f.times("s1")); n != checks {
			t.Errorf("%d checks of a removed target", n-checks)
		}
		f.set("s1", nil)
		c.SetTargets(t.Context(), []Target{target("s1")})
		expect(t, "added again", pass(c, time.Minute))
	})
}

// A busy reader must not delay checks, and must not receive changes that were reversed.
func TestSlowReader(t *testing.T) {
	f := newFake()
	for _, server := range []string{"a", "b", "c"} {
		f.set(server, errDown)
	}
	simulate(t, f, func(t *testing.T, c *Checker) {
		c.SetTargets(t.Context(), []Target{target("a"), target("b"), target("c")})
		time.Sleep(3 * time.Second)
		f.set("b", nil)
		got := pass(c, 2*time.Second)
		slices.SortFunc(got, func(x, y Result) int { return int(x.Server[0]) - int(y.Server[0]) })
		expect(t, "after an outage of b", got,
			Result{"web", "a", false, "connection refused"}, Result{"web", "c", false, "connection refused"})
		expect(t, "read", pass(c, time.Minute))
	})
}

// The same server in two services is two targets.
func TestServiceIsPartOfTheName(t *testing.T) {
	f := newFake()
	f.set("s1", errDown)
	simulate(t, f, func(t *testing.T, c *Checker) {
		other := target("s1")
		other.Service, other.Fall = "dns", 100
		c.SetTargets(t.Context(), []Target{target("s1"), other})
		expect(t, "three failures", pass(c, 3*time.Second), Result{"web", "s1", false, "connection refused"})
	})
}

// A change of state may still be on its way when its target is replaced or removed.
func TestChangeOfReplacedTarget(t *testing.T) {
	b := newBoard(func(w *watch) { w.stop = func() {} })
	b.replace([]Target{target("s1")})
	old := b.watches[name{"web", "s1"}]
	changed := target("s1")
	changed.Fall = 9
	for _, targets := range [][]Target{{changed}, nil} {
		b.replace(targets)
		b.record(stateChange{watch: old, reason: "connection refused"})
		if r, ok := b.news(); ok {
			t.Errorf("news: %+v", r)
		}
	}
}
