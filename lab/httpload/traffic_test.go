// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

// TestLatencyFromIntendedTime has a server that answers only when all requests have arrived. A
// closed loop would wait for ever. The latency of each request counts from when it was due.
func TestLatencyFromIntendedTime(t *testing.T) {
	const n, rate = 40, 200
	var arrived atomic.Int64
	all := make(chan struct{})
	c := config(t, listen(t, func(conn net.Conn, _ *http.Request) {
		if arrived.Add(1) == n {
			close(all)
		}
		<-all
		conn.Write([]byte(answer))
	}), n)
	c.Arrivals = Constant{Rate: rate}
	report, log := runLogged(t, c)
	if report.Succeeded != n || len(log) != n {
		t.Fatalf("%d of %d requests succeeded: %v", report.Succeeded, n, report.Errors)
	}
	for _, l := range log {
		if least := (n-1)/float64(rate) - l.time; l.latency < least {
			t.Errorf("the request of %.3f s has a latency of %.3f s, and waited for %.3f s at least",
				l.time, l.latency, least)
		}
	}
	if report.Latency.Max < (n-1)/float64(rate) {
		t.Errorf("the report has a largest latency of %v s", report.Latency.Max)
	}
}

// TestLatencyWithOneConnection: the latency of a request includes the time for which it waits for a
// connection. Its exchange does not.
func TestLatencyWithOneConnection(t *testing.T) {
	const n, pause = 10, 20 * time.Millisecond
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		time.Sleep(pause)
	}))
	defer server.Close()
	c := config(t, server.URL, n)
	c.KeepAlive, c.Connections = true, 1
	report, log := runLogged(t, c)
	if report.Connections != 1 || report.Succeeded != n {
		t.Errorf("%d connections, %d of %d requests succeeded: %v", report.Connections,
			report.Succeeded, n, report.Errors)
	}
	for i, l := range log {
		if least := float64(i+1)*pause.Seconds() - l.time; l.latency < least {
			t.Errorf("request %d: latency %v s, want at least %v s", i, l.latency, least)
		}
		waited := float64(i)*pause.Seconds() - l.time - 1e-6 // at least
		if l.exchange < pause.Seconds() || l.latency-l.exchange < waited {
			t.Errorf("request %d: exchange %v s of %v s", i, l.exchange, l.latency)
		}
	}
}

// TestKeepAlive: connections are used again, unless the server wants to close them.
func TestKeepAlive(t *testing.T) {
	for _, test := range []struct {
		keepAlive, closes bool
		most, least       int64
	}{
		{keepAlive: true, most: 4, least: 1},
		{keepAlive: true, closes: true, most: 40, least: 40},
		{most: 40, least: 40},
	} {
		var accepted atomic.Int64
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(
			w http.ResponseWriter, r *http.Request,
		) {
			if test.closes {
				w.Header().Set("Connection", "close")
			}
			if r.Close == test.keepAlive {
				t.Errorf("keep-alive %v, and the request has Connection: close: %v", test.keepAlive, r.Close)
			}
			fmt.Fprintln(w, "hello")
		}))
		server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
			if state == http.StateNew {
				accepted.Add(1)
			}
		}
		server.Start()
		c := config(t, server.URL, 40)
		c.KeepAlive, c.Connections = test.keepAlive, 4
		report := run(t, c)
		server.Close()
		if n := accepted.Load(); n < test.least || n > test.most || report.Connections != uint64(n) {
			t.Errorf("%+v: the server accepted %d connections, and the report says %d", test, n,
				report.Connections)
		}
		if report.Succeeded != 40 {
			t.Errorf("%+v: %d of 40 succeeded: %v", test, report.Succeeded, report.Errors)
		}
	}
}

// TestAnnouncedClose: no request goes to a connection that the server said it would close, also if
// the server is slow to close it.
func TestAnnouncedClose(t *testing.T) {
	c := config(t, listen(t, func(conn net.Conn, _ *http.Request) {
		conn.Write([]byte("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"))
		conn.Read(make([]byte, 1)) // until the client closes
	}), 3)
	c.KeepAlive, c.Arrivals, c.Timeout = true, Constant{Rate: 20}, 3*time.Second
	if report := run(t, c); report.Succeeded != 3 || report.Connections != 3 {
		t.Errorf("%d requests succeeded on %d connections: %v", report.Succeeded, report.Connections,
			report.Errors)
	}
}

// TestLargeRequest sends requests that are larger than what a socket takes at once.
func TestLargeRequest(t *testing.T) {
	const size = 16 << 20
	c := config(t, listen(t, func(conn net.Conn, r *http.Request) {
		if n := len(r.Header.Get("X-Pad")); n != size {
			t.Errorf("%d bytes of the header arrived, of %d", n, size)
		}
		conn.Write([]byte(answer))
	}), 2)
	c.Headers = []string{"X-Pad: " + strings.Repeat("x", size)}
	if report := run(t, c); report.Succeeded != 2 {
		t.Errorf("%v", report.Errors)
	}
}

// TestCloses: if the server closes a connection, the client closes it, too. If the server does not
// close it, the client resets it after a second, so that its port is free.
func TestCloses(t *testing.T) {
	t.Parallel() // it waits
	var mu sync.Mutex
	ends := map[string]error{}
	c := config(t, listen(t, func(conn net.Conn, r *http.Request) {
		conn.Write([]byte(answer))
		if r.URL.Path == "/1" {
			conn.(*net.TCPConn).CloseWrite()
		}
		_, err := conn.Read(make([]byte, 1))
		mu.Lock()
		defer mu.Unlock()
		ends[r.URL.Path] = err
	}), 0)
	c.Arrivals = Trace(write(t, "trace", "0\t/1\n0\t/2\n2\t/3\n"), sim.TimedQueries, 1)
	if report := run(t, c); report.Succeeded != 3 {
		t.Errorf("%v", report.Errors)
	}
	mu.Lock()
	defer mu.Unlock()
	if !errors.Is(ends["/1"], io.EOF) || !errors.Is(ends["/2"], syscall.ECONNRESET) {
		t.Errorf("the connections ended by %v", ends)
	}
}

// TestIdleConnections: they are open before the first request, and the report says which were lost.
func TestIdleConnections(t *testing.T) {
	const idle, lost = 200, 10
	var mu sync.Mutex
	open := map[net.Conn]bool{}
	var once sync.Once
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(
		w http.ResponseWriter, r *http.Request,
	) {
		once.Do(func() {
			mu.Lock()
			defer mu.Unlock()
			if len(open) < idle {
				t.Errorf("at the first request %d connections are open, want at least %d", len(open), idle)
			}
			closed := 0
			for conn := range open {
				if closed < lost && conn.RemoteAddr().String() != r.RemoteAddr {
					conn.Close()
					closed++
				}
			}
		})
	}))
	server.Config.ConnState = func(conn net.Conn, state http.ConnState) {
		mu.Lock()
		defer mu.Unlock()
		switch state {
		case http.StateNew:
			open[conn] = true
		case http.StateClosed:
			delete(open, conn)
		}
	}
	server.Start()
	defer server.Close()
	c := config(t, server.URL, 50)
	c.Idle, c.KeepAlive, c.Connections = idle, true, 1
	report := run(t, c)
	want := Idle{Open: idle - lost, Lost: lost}
	if diff := cmp.Diff(want, report.Idle); diff != "" || report.Succeeded != 50 {
		t.Errorf("%d succeeded, idle connections (-want +got):\n%s", report.Succeeded, diff)
	}
}

// TestInterrupted: the report has the outcomes until the interrupt, and the number of requests
// without an outcome.
func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var arrived atomic.Int64
	c := config(t, listen(t, func(conn net.Conn, _ *http.Request) {
		switch n := arrived.Add(1); {
		case n <= 10:
			conn.Write([]byte(answer))
		case n == 20:
			cancel()
			fallthrough
		default:
			conn.Read(make([]byte, 1)) // until the client closes
		}
	}), 1e6)
	report, err := Run(ctx, c)
	testhost.Must(t, err)
	if !report.Interrupted || report.Succeeded > 10 || report.Unfinished < 10 || report.Failed != 0 ||
		report.Requests != report.Succeeded+report.Unfinished || !(report.Seconds > 0) {
		t.Errorf("%+v", report)
	}
}

// TestWarmup: requests of the warm-up are sent, and are not in the report.
func TestWarmup(t *testing.T) {
	var arrived atomic.Int64
	c := config(t, listen(t, func(conn net.Conn, _ *http.Request) {
		arrived.Add(1)
		conn.Write([]byte(answer))
	}), 0)
	c.Duration, c.Warmup, c.Every = 200*time.Millisecond, 50*time.Millisecond, 100*time.Millisecond
	report, log := runLogged(t, c)
	if arrived.Load() != 200 || report.Requests != 150 || len(log) != 150 || report.Seconds != 0.15 {
		t.Errorf("%d arrived, %d are in the report, %d in the log, in %v s; want 200, 150, 150 in 0.15 s",
			arrived.Load(), report.Requests, len(log), report.Seconds)
	}
	var got []string
	for _, at := range report.Intervals {
		got = append(got, fmt.Sprint(at.From, at.To, at.Requests, at.Succeeded, at.Latency != nil))
	}
	if diff := cmp.Diff([]string{"0.05 0.1 50 50 true", "0.1 0.2 100 100 true"}, got); diff != "" {
		t.Errorf("intervals (-want +got):\n%s", diff)
	}
}

// TestIntervals: the report has intervals without requests, and cuts the first and the last one.
func TestIntervals(t *testing.T) {
	i := intervals{every: 100 * time.Millisecond, done: []Interval{
		{From: 0.2, To: 0.3, Requests: 1}, {From: 0, To: 0.1, Requests: 2},
	}}
	want := []Interval{
		{From: 0.05, To: 0.1, Requests: 2}, {From: 0.1, To: 0.2},
		{From: 0.2, To: 0.3, Requests: 1}, {From: 0.3, To: 0.35},
	}
	got := i.between(50*time.Millisecond, 350*time.Millisecond)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("intervals (-want +got):\n%s", diff)
	}
}

// TestExtremes: arrival times and demands that are too large for a time.Duration are limited.
func TestExtremes(t *testing.T) {
	c := config(t, listen(t, respond(answer))+"/{demand}", 0)
	demand := sim.Constant(1e12)
	c.Arrivals, c.Duration, c.Demand = Constant{Rate: 1e-12}, 20*time.Millisecond, &demand
	_, log := runLogged(t, c)
	if len(log) != 1 || log[0].query != "/1000000000000ms" {
		t.Errorf("requests %+v", log)
	}
}

// TestServers: the report says which server answered, and how.
func TestServers(t *testing.T) {
	var n atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		switch n.Add(1) % 4 {
		case 0:
			w.WriteHeader(http.StatusServiceUnavailable)
		case 1:
			w.Header().Set("X-Segue-Server", "s10")
		default:
			w.Header().Set("X-Segue-Server", "s2")
		}
	}))
	defer server.Close()
	report := run(t, config(t, server.URL, 40))
	var got []string
	for _, s := range report.Servers {
		got = append(got, fmt.Sprint(s.Name, " ", s.Responses, s.Failed, s.Latency != nil))
	}
	if diff := cmp.Diff([]string{"s2 20 0 true", "s10 10 0 true"}, got); diff != "" {
		t.Errorf("servers (-want +got):\n%s", diff)
	}
	if report.Failures["wrong-status"] != 10 {
		t.Errorf("failures %v", report.Failures)
	}
}

// TestTargets: requests draw one of the targets, each equally likely.
func TestTargets(t *testing.T) {
	c := config(t, listen(t, respond(answer)), 600)
	base := c.Targets[0].URL
	c.Targets = []*Target{target(t, base+"/a"), target(t, base+"/b?n={n}"), target(t, base+"/c")}
	_, log := runLogged(t, c)
	count := map[string]int{}
	for _, l := range log {
		path, _, _ := strings.Cut(l.query, "?")
		count[path]++
	}
	for path, n := range count {
		if n < 150 || n > 250 { // 200 on average, with a standard deviation of 11.5
			t.Errorf("%d of 600 requests go to %s", n, path)
		}
	}
	if len(count) != 3 {
		t.Errorf("paths %v", count)
	}
}

// TestTrace replays a trace: the server sees the queries in their order.
func TestTrace(t *testing.T) {
	const trace = "1 100.00 http://en.wikipedia.org/wiki/A -\n" +
		"2 100.10 http://en.wikipedia.org/wiki/B?x=1#top -\n3 100.30 http://upload.wikimedia.org -\n"
	var mu sync.Mutex
	var hosts []string
	c := config(t, listen(t, func(conn net.Conn, r *http.Request) {
		mu.Lock()
		hosts = append(hosts, r.Host+r.RequestURI)
		mu.Unlock()
		conn.Write([]byte(answer))
	}), 0)
	c.Headers = []string{"Host: wiki"}
	c.Arrivals = Trace(write(t, "trace", trace), sim.Wikibench, 2)
	_, log := runLogged(t, c)
	var got []string
	for _, l := range log {
		got = append(got, fmt.Sprintf("%.3f %s", l.time, l.query))
	}
	slices.Sort(got)
	mu.Lock()
	defer mu.Unlock()
	slices.Sort(hosts)
	if diff := cmp.Diff([]string{"0.000 /wiki/A", "0.050 /wiki/B?x=1", "0.150 /"}, got); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"wiki/", "wiki/wiki/A", "wiki/wiki/B?x=1"}, hosts); diff != "" {
		t.Errorf("at the server (-want +got):\n%s", diff)
	}
}

// TestBadTraces: an error names file and line.
func TestBadTraces(t *testing.T) {
	for text, problem := range map[string]string{
		"time\tquery\n0\t/\n1\twiki/A\n": `:3: "1\twiki/A": the query must be a URL, or begin with /`,
		"time\tquery\n0\t/a b\n":         `:2: "0\t/a b": " ": must be written as %20 in a URL`,
		"time\tquery\n0 /\n":             `:2: "0 /": must be time<TAB>query`,
		"0\t/\nx1\t/\n":                  `:2: "x1\t/": time "x1": must be seconds, or such as 2010-05-27T09:31:55.63`,
	} {
		trace := Trace(write(t, "trace", text), sim.TimedQueries, 1)
		if _, err := trace.Extent(); err == nil || err.Error() != trace.File+problem {
			t.Errorf("%q: %v\nwant %s", text, err, trace.File+problem)
		}
		// Without the check beforehand, Run returns the same error when it reads the line.
		c := config(t, listen(t, respond(answer)), 0)
		c.Arrivals = trace
		report, err := Run(t.Context(), c)
		if err == nil || err.Error() != trace.File+problem || report == nil {
			t.Errorf("%q: %v with the report %v", text, err, report)
		}
	}
}

// TestLateGenerator: if the generator stands still for a while, the report has a warning, and the
// lateness is part of the latency.
func TestLateGenerator(t *testing.T) {
	t.Parallel() // it waits
	const still = 200 * time.Millisecond
	c := config(t, listen(t, respond(answer)), 0)
	c.Arrivals, c.Duration = Constant{Rate: 100}, 1200*time.Millisecond
	c.Progress = func(Progress) { time.Sleep(still) } // a second after the start
	report := run(t, c)
	late := report.Lateness
	if late.Max < still.Seconds()/2 || report.Latency.Max < late.Max {
		t.Errorf("lateness %+v, latency %+v", late, report.Latency)
	}
	if !strings.Contains(strings.Join(report.Warnings, "\n"), "the generator was late") {
		t.Errorf("warnings %q", report.Warnings)
	}
}

// TestProgress: Config.Progress is called every second with the counts so far.
func TestProgress(t *testing.T) {
	t.Parallel() // it waits
	c := config(t, listen(t, respond(answer)), 0)
	c.Arrivals, c.Duration = Constant{Rate: 100}, 1100*time.Millisecond
	var all []Progress
	c.Progress = func(p Progress) { all = append(all, p) }
	report := run(t, c)
	if len(all) == 0 || all[0].Elapsed < time.Second || all[0].Sent == 0 ||
		all[0].Sent > report.Requests ||
		!(all[0].P99 > 0) || !(all[0].Rate > 0) {
		t.Errorf("%+v", all)
	}
}

// TestChecks refuses configurations that contradict themselves.
func TestChecks(t *testing.T) {
	exponential := sim.Exponential(0.1)
	for name, test := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"family": {func(c *Config) { c.Clients, _ = ParseClients([]string{"::1"}) },
			"client address ::1 cannot connect to"},
		"demand": {func(c *Config) { c.Targets[0] = target(t, "http://127.0.0.1/{demand}") },
			"contains a demand, and no distribution of it is given"},
		"no demand": {func(c *Config) { c.Demand = &exponential },
			"must contain {demand} or {demand-us}"},
		"trace": {func(c *Config) {
			c.Arrivals, c.Targets[0] = sim.Trace{}, target(t, "http://127.0.0.1/x")
		},
			"must have no path and no query"},
		"header": {func(c *Config) { c.Headers = []string{"Host"} },
			`header "Host": must be NAME: VALUE`},
		"own header": {func(c *Config) { c.Headers = []string{"connection: close"} },
			`header "connection: close": is not allowed, because requests have their own Connection`},
	} {
		c := config(t, "http://127.0.0.1/", 1)
		test.change(&c)
		if _, err := Run(t.Context(), c); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %s", name, err, test.want)
		}
	}
}

// TestFilesFail: a file that cannot be written is an error, and the report is not lost.
func TestFilesFail(t *testing.T) {
	for _, set := range []func(*Config){
		func(c *Config) { c.Record = full{} },
		func(c *Config) { c.Log = full{} },
	} {
		c := config(t, listen(t, respond(answer)), 3)
		set(&c)
		report, err := Run(t.Context(), c)
		if !errors.Is(err, errFull) || report == nil || report.Succeeded != 3 {
			t.Errorf("%v, report %+v", err, report)
		}
	}
}

var errFull = errors.New("full")

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errFull }

// TestSeeds: a seed determines arrivals and demands.
func TestSeeds(t *testing.T) {
	url := listen(t, respond(answer)) + "/?work={demand}"
	record := func(seed uint64) string {
		var text bytes.Buffer
		c := config(t, url, 50)
		demand := sim.Exponential(0.19)
		c.Arrivals, c.Demand, c.Seed, c.Record = sim.Poisson{Rate: 5000}, &demand, seed, &text
		run(t, c)
		return text.String()
	}
	one := record(1)
	if again := record(1); again != one {
		t.Errorf("the same seed:\n%s", cmp.Diff(one, again))
	}
	if other := record(2); other == one {
		t.Error("another seed has the same arrivals")
	}
}
