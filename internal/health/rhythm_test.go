// SPDX-License-Identifier: Apache-2.0

package health

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"
)

func TestRhythm(t *testing.T) {
	for _, hang := range []bool{false, true} {
		t.Run(fmt.Sprintf("hang=%v", hang), func(t *testing.T) {
			f := newFake()
			f.hang["s1"] = hang
			simulate(t, f, func(t *testing.T, c *Checker) {
				began := time.Now()
				c.SetTargets(t.Context(), []Target{target("s1")})
				pass(c, 10*time.Second)
				times := f.times("s1")
				if len(times) < 9 {
					t.Fatalf("%d checks in ten intervals", len(times))
				}
				if !times[0].Equal(began) {
					t.Errorf("first check after %v", times[0].Sub(began))
				}
				for i := 2; i < len(times); i++ {
					if gap := times[i].Sub(times[i-1]); gap != time.Second {
						t.Errorf("check %d came %v after the one before", i, gap)
					}
				}
				if f.worst != 1 {
					t.Errorf("%d checks at a time", f.worst)
				}
			})
		})
	}
}

// The checks of many targets must spread over time, whatever the results of the first checks.
func TestPhasesSpread(t *testing.T) {
	const servers, slots = 2000, 10
	for _, hang := range []bool{false, true} {
		t.Run(fmt.Sprintf("hang=%v", hang), func(t *testing.T) {
			f := newFake()
			var targets []Target
			for i := range servers {
				server := fmt.Sprint(i)
				f.hang[server] = hang
				targets = append(targets, target(server))
			}
			simulate(t, f, func(t *testing.T, c *Checker) {
				began := time.Now()
				c.SetTargets(t.Context(), targets)
				pass(c, 5*time.Second)
				var count [slots]int
				for i := range servers {
					times := f.times(fmt.Sprint(i))
					phase := times[2].Sub(began) % time.Second
					count[phase*slots/time.Second]++
				}
				for slot, n := range count { // 200 ± 13.4: six deviations
					if n < 120 || n > 280 {
						t.Errorf("%d of %d checks in tenth %d of the interval", n, servers, slot)
					}
				}
			})
		})
	}
}

// A check that begins late, because the host has no CPU time for it, cannot fail by its timeout. It
// can succeed, and a bad answer proves that the server fails. After a timeout of such a check, an
// unchecked server stays unchecked.
func TestLateChecks(t *testing.T) {
	for _, test := range []struct {
		late    time.Duration
		before  State // of the server
		err     error
		changes bool
	}{
		{target("s1").Timeout / 2, Healthy, errTimeout, true},
		{target("s1").Timeout/2 + 1, Healthy, errTimeout, false},
		{target("s1").Timeout/2 + 1, Unchecked, errTimeout, false},
		{target("s1").Timeout/2 + 1, Healthy, errDown, true},
		{time.Hour, Failing, nil, true},
	} {
		c := New(nil, slog.New(slog.DiscardHandler))
		c.changes, c.untried = make(chan stateChange, 1), make(chan error, 1)
		c.attempt = func(context.Context, *Target) error { return test.err }
		w := &watch{target: target("s1")}
		w.target.Rise, w.target.Fall = 1, 1
		c.check(t.Context(), w, &streak{state: test.before}, test.late)
		if changes := len(c.changes) > 0; changes != test.changes || changes == (len(c.untried) > 0) {
			t.Errorf("late by %v: changes %v, complaints: %d", test.late, changes, len(c.untried))
		}
	}
}

// A server that does not answer delays its own next check, if the jitter is large. This is not the
// host's fault.
func TestSlowChecksAreNotLate(t *testing.T) {
	f := newFake()
	f.hang["s1"] = true
	simulate(t, f, func(t *testing.T, c *Checker) {
		hanging := target("s1")
		hanging.Jitter = hanging.Interval * 9 / 10 // more than a configuration may have
		var log bytes.Buffer
		c.log = slog.New(slog.NewTextHandler(&log, nil))
		c.SetTargets(t.Context(), []Target{hanging})
		expect(t, "after its checks", pass(c, 30*time.Second),
			Result{Service: "web", Server: "s1", Reason: "timeout"})
		if log.Len() > 0 {
			t.Errorf("logged: %s", &log)
		}
	})
}
