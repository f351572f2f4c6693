// SPDX-License-Identifier: Apache-2.0

package health

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/segue-lb/segue/internal/desired"
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
		answer: map[string]error{},
		hang:   map[string]bool{},
		checks: map[string][]time.Time{},
		active: map[string]int{},
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

// A host that cannot check makes nobody wait for the result: the target is taken for healthy after as
// many checks as a failing one needs.
func TestUntriedChecksOfUncheckedTarget(t *testing.T) {
	f := newFake()
	untried := fmt.Errorf("%w: too many open files", errUntried)
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
		f.set("s1", fmt.Errorf("%w: too many open files", errUntried))
		c.SetTargets(t.Context(), []Target{target("s1")})
		expect(t, "untried while healthy", pass(c, time.Minute))
		if n := len(f.reports); n < 5 || n > 7 || f.reports[n-1] != "too many open files" {
			t.Errorf("in a minute, these reasons were reported: %q", f.reports)
		}
		f.set("s1", errDown)
		expect(t, "failures", pass(c, 3*time.Second), Result{"web", "s1", false, "connection refused"})
		f.set("s1", errUntried)
		expect(t, "untried while unhealthy", pass(c, time.Minute))
	})
}

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

// A verdict may still be on its way when its target is replaced or removed.
func TestVerdictOfReplacedTarget(t *testing.T) {
	b := newBoard(func(w *watch) { w.stop = func() {} })
	b.replace([]Target{target("s1")})
	old := b.watches[name{"web", "s1"}]
	changed := target("s1")
	changed.Fall = 9
	for _, targets := range [][]Target{{changed}, nil} {
		b.replace(targets)
		b.record(verdict{watch: old, reason: "connection refused"})
		if r, ok := b.news(); ok {
			t.Errorf("news: %+v", r)
		}
	}
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

func TestTargets(t *testing.T) {
	host, jitter := netip.MustParseAddr, time.Second
	services := []desired.Service{
		{
			Name: "web", VIP: host("2001:db8::80"), Port: 80,
			Health: &desired.Health{
				Via:      desired.ViaPackets,
				HTTP:     &desired.HTTPCheck{Path: "/healthz", Port: 8080, Status: "200-399", Body: "ok"},
				Interval: 2 * time.Second, Jitter: &jitter, Timeout: time.Second, Rise: 4, Fall: 5,
			},
			Servers: []desired.Server{
				{Name: "s1", Host: host("fd00::1")},
				{Name: "s2", Host: host("fd00::2")},
			},
		},
		{Name: "unchecked", VIP: host("2001:db8::81"), Servers: []desired.Server{{Name: "s1", Host: host("fd00::1")}}},
		{
			Name: "dns", VIP: host("192.0.2.53"), Port: 53,
			Health: &desired.Health{
				Via:      desired.ViaHost,
				TCP:      &desired.TCPCheck{Port: 53},
				Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 2,
			},
			Servers: []desired.Server{{Name: "s1", Host: host("10.0.0.1")}},
		},
		{
			Name: "ntp", VIP: host("192.0.2.123"), Port: 123,
			Health: &desired.Health{
				Via:      desired.ViaPackets,
				UDP:      &desired.UDPCheck{Port: 123, RequestHex: "1b 00", Answer: "GPS"},
				Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 2,
			},
			Servers: []desired.Server{{Name: "s1"}},
		},
		{
			Name: "api", VIP: host("192.0.2.44"), Port: 443,
			Health: &desired.Health{
				Via: desired.ViaPackets,
				HTTPS: &desired.HTTPCheck{
					Path: "/", Port: 8443, Host: "api.example", Status: "204", Verify: true,
				},
				Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 2,
			},
			Servers: []desired.Server{{Name: "s1"}},
		},
	}
	address := netip.MustParseAddrPort
	web := Target{
		Service: "web", Server: "s1", Address: address("[2001:db8::80]:8080"), OnPath: true,
		Kind: HTTP, Path: "/healthz", Host: "[2001:db8::80]:8080", Status: "200-399", Body: "ok",
		Interval: 2 * time.Second, Jitter: time.Second, Timeout: time.Second, Rise: 4, Fall: 5,
	}
	web2 := web
	web2.Server = "s2"
	want := []Target{
		web, web2,
		{
			Service: "dns", Server: "s1", Address: address("10.0.0.1:53"), Kind: TCP,
			Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 2,
		},
		{
			Service: "ntp", Server: "s1", Address: address("192.0.2.123:123"), OnPath: true, Kind: UDP,
			Request: "\x1b\x00", Answer: "GPS", Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 2,
		},
		{
			Service: "api", Server: "s1", Address: address("192.0.2.44:8443"), OnPath: true, Kind: HTTPS,
			Path: "/", Host: "api.example", Status: "204", Verify: true,
			Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 2,
		},
	}
	if got := Targets(services); !slices.Equal(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
}

// If the reader considers a target failing and it is not, the reader must receive that.
func TestFailingFromTheStart(t *testing.T) {
	var started []*watch
	b := newBoard(func(w *watch) { w.stop = func() {}; started = append(started, w) })
	target := Target{Service: "web", Server: "s1", State: Failing}
	b.replace([]Target{target})
	if r, ok := b.news(); ok {
		t.Errorf("news at once: %+v", r)
	}
	b.record(verdict{watch: started[0], healthy: true})
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

// A check that begins late, because the host has no CPU time for it, cannot fail by its timeout. It
// can succeed, and a bad answer proves that the server fails.
func TestLateChecks(t *testing.T) {
	for _, test := range []struct {
		late    time.Duration
		failing bool // the server's state before
		err     error
		changes bool
	}{
		{target("s1").Timeout / 2, false, errTimeout, true},
		{target("s1").Timeout/2 + 1, false, errTimeout, false},
		{target("s1").Timeout/2 + 1, false, errDown, true},
		{time.Hour, true, nil, true},
	} {
		c := New(nil, slog.New(slog.DiscardHandler))
		c.verdicts, c.untried = make(chan verdict, 1), make(chan error, 1)
		c.attempt = func(context.Context, *Target) error { return test.err }
		w := &watch{target: target("s1")}
		w.target.Rise, w.target.Fall = 1, 1
		c.check(t.Context(), w, &streak{state: stateOf(!test.failing)}, test.late)
		if changes := len(c.verdicts) > 0; changes != test.changes || changes == (len(c.untried) > 0) {
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
