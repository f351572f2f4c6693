// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// fake is a network in which servers succeed, fail or hang as a test requires.
type fake struct {
	mu      sync.Mutex
	answer  map[string]error       // results of checks by server; nil means success
	hang    map[string]bool        // servers whose checks hang until the timeout
	checks  map[string][]time.Time // start times of the checks
	active  map[string]int
	worst   int      // the maximum number of simultaneous checks of a target
	reports []string // why the host cannot check, as reported
}

func newFake() *fake {
	return &fake{
		answer: map[string]error{}, hang: map[string]bool{},
		checks: map[string][]time.Time{}, active: map[string]int{},
	}
}

func (f *fake) attempt(ctx context.Context, t *Target) error {
	f.mu.Lock()
	f.checks[t.Server] = append(f.checks[t.Server], time.Now())
	f.active[t.Server]++
	f.worst = max(f.worst, f.active[t.Server])
	err, hang := f.answer[t.Server], f.hang[t.Server]
	f.mu.Unlock()
	if hang {
		ctx, cancel := context.WithTimeout(ctx, t.Timeout)
		defer cancel()
		<-ctx.Done()
		if context.Cause(ctx) == context.Canceled {
			time.Sleep(time.Microsecond) // closing a connection takes some time
		}
		err = errTimeout
	}
	f.mu.Lock()
	f.active[t.Server]--
	f.mu.Unlock()
	return err
}

func (f *fake) set(server string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answer[server] = err
}

func (f *fake) times(server string) []time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.checks[server])
}

var errDown = errors.New("connection refused")

// simulate runs a checker in fake time, and fails the test if goroutines are left after Run.
func simulate(t *testing.T, f *fake, test func(t *testing.T, c *Checker)) {
	synctest.Test(t, func(t *testing.T) {
		c := New(nil, slog.New(slog.DiscardHandler))
		c.attempt = f.attempt
		c.ReportUntried(func(reason string) { f.reports = append(f.reports, reason) })
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- c.Run(ctx) }()
		test(t, c)
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
		for server, n := range f.active {
			if n != 0 {
				t.Errorf("Run returned with %d checks of %s", n, server)
			}
		}
	})
}

func target(server string) Target {
	return Target{
		Service: "web", Server: server,
		Interval: time.Second, Timeout: time.Second, Rise: 2, Fall: 3,
	}
}

// pass lets time pass, and returns the updates that the checker has at its end.
func pass(c *Checker, d time.Duration) []Result {
	time.Sleep(d) // in fake time this is exact, and ends when all goroutines wait
	synctest.Wait()
	var results []Result
	for {
		synctest.Wait()
		select {
		case r := <-c.Updates():
			results = append(results, r)
		default:
			return results
		}
	}
}

func expect(t *testing.T, when string, got []Result, want ...Result) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: got %+v, want %+v", when, got, want)
	}
}

func TestStreak(t *testing.T) {
	const yes, no = true, false
	tests := []struct {
		name       string
		rise, fall int
		checks     []bool
		want       []bool // expected states after the checks
	}{
		{"starts healthy", 2, 3, []bool{yes}, []bool{yes}},
		{"falls after three", 2, 3, []bool{no, no, no, no}, []bool{yes, yes, no, no}},
		{"a success interrupts", 2, 3, []bool{no, no, yes, no, no, no}, []bool{yes, yes, yes, yes, yes, no}},
		{"rises after two", 2, 3, []bool{no, no, no, yes, yes, yes}, []bool{yes, yes, no, no, yes, yes}},
		{"a failure interrupts", 2, 1, []bool{no, yes, no, yes, yes}, []bool{no, no, no, no, yes}},
		{"one and one", 1, 1, []bool{no, yes, no}, []bool{no, yes, no}},
		{"rise does not hurry the fall", 1, 3, []bool{no, no, no}, []bool{yes, yes, no}},
		{"fall does not hurry the rise", 3, 1, []bool{no, yes, yes, yes}, []bool{no, no, no, yes}},
		{"nothing is left of the last streak", 2, 2,
			[]bool{no, no, yes, yes, no, no}, []bool{yes, no, no, yes, yes, no}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var s streak
			for i, success := range test.checks {
				before := s.state
				changed := s.observe(success, test.rise, test.fall)
				if s.state != stateOf(test.want[i]) {
					t.Errorf("check %d: state %v, want %v", i, s.state, stateOf(test.want[i]))
				}
				if changed != (before != s.state) {
					t.Errorf("check %d: changed is %v from %v to %v", i, changed, before, s.state)
				}
			}
		})
	}
}

func TestUpdatesOnChangeOnly(t *testing.T) {
	f := newFake()
	f.set("bad", errDown)
	simulate(t, f, func(t *testing.T, c *Checker) {
		c.SetTargets(t.Context(), []Target{target("good"), target("bad")})
		expect(t, "two checks", pass(c, time.Second))
		expect(t, "three failures", pass(c, 2*time.Second),
			Result{"web", "bad", false, "connection refused"})
		expect(t, "more failures", pass(c, time.Minute))
		f.set("bad", nil)
		expect(t, "successes", pass(c, 2*time.Second),
			Result{"web", "bad", true, "successful checks: 2"})
		expect(t, "more successes", pass(c, time.Minute))
	})
}

// The first success of a target about which nothing is known counts at once. A failure counts as for
// a healthy target.
func TestUncheckedTarget(t *testing.T) {
	f := newFake()
	f.set("bad", errDown)
	f.set("flaky", errDown)
	simulate(t, f, func(t *testing.T, c *Checker) {
		var targets []Target
		for _, server := range []string{"good", "bad", "flaky"} {
			unchecked := target(server)
			unchecked.State = Unchecked
			targets = append(targets, unchecked)
		}
		c.SetTargets(t.Context(), targets)
		const reason = "the first successful check"
		expect(t, "the first checks", pass(c, 0), Result{"web", "good", true, reason})
		c.SetTargets(t.Context(), targets)
		expect(t, "to a reader that has forgotten it", pass(c, 0), Result{"web", "good", true, reason})
		f.set("flaky", nil)
		expect(t, "two checks", pass(c, time.Second), Result{"web", "flaky", true, reason})
		expect(t, "three failures", pass(c, time.Second), Result{"web", "bad", false, "connection refused"})
		targets[0].State, targets[1].State, targets[2].State = Healthy, Failing, Healthy
		c.SetTargets(t.Context(), targets)
		f.set("bad", nil)
		f.set("good", errDown)
		expect(t, "two checks", pass(c, 2*time.Second), Result{"web", "bad", true, "successful checks: 2"})
		expect(t, "a third", pass(c, time.Second), Result{"web", "good", false, "connection refused"})
	})
}

// If the host cannot make checks, nobody waits for a result: after Fall attempts, an unchecked
// target becomes healthy.
func TestUntriedChecksOfUncheckedTarget(t *testing.T) {
	f := newFake()
	untried := fmt.Errorf("%w: too many open files", ErrUntried)
	f.set("s1", untried)
	simulate(t, f, func(t *testing.T, c *Checker) {
		unchecked := target("s1")
		unchecked.State = Unchecked
		c.SetTargets(t.Context(), []Target{unchecked})
		expect(t, "two checks", pass(c, time.Second))
		expect(t, "three checks", pass(c, time.Second), Result{"web", "s1", true, untried.Error()})
		f.set("s1", errDown)
		expect(t, "two failures", pass(c, 2*time.Second))
		expect(t, "three failures", pass(c, time.Second), Result{"web", "s1", false, "connection refused"})
	})
}

func TestUntriedProbesCountForNothing(t *testing.T) {
	f := newFake()
	simulate(t, f, func(t *testing.T, c *Checker) {
		f.set("s1", fmt.Errorf("%w: too many open files", ErrUntried))
		c.SetTargets(t.Context(), []Target{target("s1")})
		expect(t, "untried while healthy", pass(c, time.Minute))
		if n := len(f.reports); n < 5 || n > 7 || f.reports[n-1] != "too many open files" {
			t.Errorf("in a minute, these reasons were reported: %q", f.reports)
		}
		f.set("s1", errDown)
		expect(t, "failures", pass(c, 3*time.Second), Result{"web", "s1", false, "connection refused"})
		f.set("s1", ErrUntried)
		expect(t, "untried while unhealthy", pass(c, time.Minute))
	})
}

// The context ends while a check hangs. simulate checks that no goroutine is left.
func TestRunEndsHangingProbes(t *testing.T) {
	f := newFake()
	f.hang["s1"] = true
	simulate(t, f, func(t *testing.T, c *Checker) {
		endless := target("s1")
		endless.Interval, endless.Timeout, endless.Fall = time.Hour, time.Hour, 1
		c.SetTargets(t.Context(), []Target{endless})
		expect(t, "hanging", pass(c, time.Minute))
	})
	if n := len(f.checks["s1"]); n != 1 {
		t.Errorf("%d checks, want the one that hung", n)
	}
}

// A real server stops and comes back, and another one accepts late.
func TestRealServers(t *testing.T) {
	late := listen(t, "127.0.0.1:0")
	broken := make(chan bool, 1)
	broken <- true
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		is := <-broken
		broken <- is
		if is {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer server.Close()

	c := New(nil, slog.New(slog.NewTextHandler(t.Output(), nil)))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- c.Run(ctx) }()

	web, queue, refused := httpTarget(server.Listener.Addr()), httpTarget(late.Addr()), tcpTarget(refusing(t))
	web.Server, queue.Server, refused.Server = "web", "late", "refused"
	queue.Timeout, queue.Interval = brief, brief
	c.SetTargets(ctx, []Target{web, queue, refused})
	next := func(what string) Result {
		t.Helper()
		select {
		case r := <-c.Updates():
			return r
		case <-time.After(time.Minute):
			t.Fatalf("waited a minute for a result %s", what)
			return Result{}
		}
	}
	got := map[string]Result{}
	for len(got) < 3 {
		r := next("of each server")
		got[r.Server] = r
	}
	for _, want := range []Result{
		{"web", "web", false, "status 503"},
		{"web", "late", false, "timeout after 50ms"},
		{"web", "refused", false, "connection refused"},
	} {
		if got[want.Server] != want {
			t.Errorf("got %+v, want %+v", got[want.Server], want)
		}
	}

	<-broken
	broken <- false
	if r := next("after the repair"); r.Server != "web" || !r.Healthy {
		t.Errorf("after the repair: %+v", r)
	}
	go func() {
		_ = http.Serve(late, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "ok")
		}))
	}()
	if r := next("after the first accept"); r.Server != "late" || !r.Healthy {
		t.Errorf("after the first accept: %+v", r)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// The reader takes a target for failing. When a check of it succeeds, the reader must receive that.
func TestFailingFromTheStart(t *testing.T) {
	var started []*watch
	b := newBoard(func(w *watch) { w.stop = func() {}; started = append(started, w) })
	target := Target{Service: "web", Server: "s1", State: Failing}
	b.replace([]Target{target})
	if r, ok := b.news(); ok {
		t.Errorf("news at once: %+v", r)
	}
	b.record(stateChange{watch: started[0], healthy: true})
	if r, ok := b.news(); !ok || !r.Healthy {
		t.Errorf("after it recovered: %+v, %v", r, ok)
	}
	// The state that the reader knows does not make the target a different one.
	target.State = Healthy
	b.replace([]Target{target})
	if len(started) != 1 {
		t.Fatalf("started %d times", len(started))
	}
}
