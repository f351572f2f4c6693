// SPDX-License-Identifier: Apache-2.0

// Package httpload generates HTTP/1.1 requests in an open loop: requests are sent when they are due,
// whatever has become of the requests before. Each request has an intended send time, and its
// latency is measured from that time. So a server that stands still for a second delays all
// requests of that second in the report, also those that a generator in a closed loop would not
// have sent (G. Tene, "How NOT to measure latency", calls the error of such generators coordinated
// omission).
//
// One thread serves all connections by epoll(7). Connections have no goroutines.
package httpload

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/research/sim"
)

// Config describes a run.
type Config struct {
	// Targets has at least one target. Each request draws one of them, all equally likely. Requests
	// of a trace have the query of the trace in the place of the target's.
	Targets []*Target
	// Clients are the client addresses. Connections use them in turn. Without any, the kernel
	// chooses.
	Clients []netip.Addr

	// Arrivals says when requests are due. It ends by itself, or after Duration or Requests, unless
	// they are 0.
	Arrivals sim.Arrivals
	Duration time.Duration
	Requests uint64
	// Warmup is the time at the beginning whose requests do not count in the report.
	Warmup time.Duration
	// Demand is the distribution of the work in the targets' URLs. Work is rounded to microseconds.
	// It is nil if the targets have no placeholder for it.
	Demand *sim.Distribution
	// RoundTrip, if it is set, makes clients seem far away: the generator acts on the end of a
	// handshake and on a response only after a time from this distribution. So the balancer sees the
	// packets of clients that replies reach so late. Times are those of the clock, multiplied by
	// Scale. It excludes KeepAlive.
	RoundTrip *sim.Distribution
	// Seed seeds arrivals, targets, work and round trips.
	Seed uint64

	// ConnectTimeout is counted from the beginning of the handshake, Timeout from the time at which
	// the request was due. Both are more than 0.
	ConnectTimeout, Timeout time.Duration
	// KeepAlive sends further requests on connections whose response is complete.
	KeepAlive bool
	// Connections is the largest number of open connections, without the idle ones; 0 stands for no
	// limit. At the limit, requests wait for a connection.
	Connections int
	// Idle is the number of connections that are opened before the first request, and held open
	// without requests. They go to all targets in turn.
	Idle int
	// Headers are lines "Name: value", which are sent with each request. A line "Host: value" takes
	// the place of the target's own.
	Headers []string

	Expect Expectation
	// ServerHeader is the name of the response header that names the server.
	ServerHeader string

	// Every is the length of the report's intervals; without intervals it is 0.
	Every time.Duration
	// Record, if it is set, gets the arrivals, as a trace of the format sim.TimedQueries.
	Record io.Writer
	// Log, if it is set, gets a line of CSV for each measured request.
	Log io.Writer
	// Scale multiplies the times in Record and Log, for tests that are faster than real time; 0
	// stands for 1.
	Scale float64
	// Progress, if it is set, is called every second.
	Progress func(Progress)
}

// Expectation is what a response must be.
type Expectation struct {
	// Status are the expected statuses; none stands for 200 to 399.
	Status []int
	// Body must be found in the first mebibyte of the body. nil stands for any body.
	Body *regexp.Regexp
}

// check returns Succeeded, or the failure of a complete response.
func (e *Expectation) check(r *response) Outcome {
	switch {
	case len(e.Status) == 0 && (r.status < 200 || r.status > 399),
		len(e.Status) > 0 && !slices.Contains(e.Status, r.status):
		return WrongStatus
	case e.Body != nil && !e.Body.Match(r.body):
		return WrongContent
	}
	return Succeeded
}

// Progress is the state of a run. Requests of the warm-up are part of it.
type Progress struct {
	Elapsed  time.Duration // since the first request was due; negative while idle connections open
	Sent     uint64        // requests that were due until now
	Failed   uint64
	Rate     float64 // requests per second since the last call
	Open     int     // connections, with those that are being opened and idle ones
	Waiting  int     // requests that wait for a connection
	P50, P99 float64 // latency since the beginning in seconds, NaN without any
}

// Check returns an error if the parts of the configuration contradict each other.
func (c *Config) Check() error {
	for _, t := range c.Targets {
		if len(c.Clients) > 0 && c.Clients[0].Is4() != t.Address.Addr().Is4() {
			return fmt.Errorf("client address %s cannot connect to %s: one is IPv4, and the other is IPv6",
				c.Clients[0], t.URL)
		}
		if _, isTrace := c.Arrivals.(sim.Trace); isTrace && !t.isBare() {
			return fmt.Errorf("URL %q: must have no path and no query, because those of the trace are used",
				t.URL)
		}
		if t.HasDemand() && c.Demand == nil {
			return fmt.Errorf("URL %q: contains a demand, and no distribution of it is given", t.URL)
		}
		if c.Demand != nil && !t.HasDemand() {
			return fmt.Errorf("URL %q: must contain {demand} or {demand-us}, because a distribution "+
				"of it is given", t.URL)
		}
	}
	if c.RoundTrip != nil && c.KeepAlive {
		return errors.New("round trips are not for connections that are kept")
	}
	for _, line := range c.Headers {
		if err := checkHeader(line); err != nil {
			return err
		}
	}
	return nil
}

// checkHeader refuses lines that are not "Name: value", and headers that the generator itself sets.
func checkHeader(line string) error {
	name, value, found := strings.Cut(line, ":")
	if !found || name == "" || strings.ContainsAny(name, " \t") || strings.ContainsAny(value, "\r\n") {
		return fmt.Errorf("header %q: must be NAME: VALUE", line)
	}
	for _, own := range []string{"Connection", "Content-Length", "Transfer-Encoding"} {
		if strings.EqualFold(name, own) {
			return fmt.Errorf("header %q: is not allowed, because requests have their own %s", line, own)
		}
	}
	return nil
}

// Run sends the requests, and returns when all have their outcome. Sockets are made on the calling
// goroutine's thread, and so in its network namespace. If ctx ends, requests without an outcome
// count as unfinished, and Run returns the report. It also returns the report with an error about a
// trace or a file.
func Run(ctx context.Context, c Config) (*Report, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	restore, err := exactTimers()
	if err != nil {
		return nil, err
	}
	defer restore()
	g, err := newGenerator(&c)
	if err != nil {
		return nil, err
	}
	running := g.run(ctx)
	ending := g.close()
	return g.results.report(g), errors.Join(running, ending)
}

// exactTimers has the kernel wake this thread at the intended times. By default, it may be 50 µs
// late. restore undoes that.
func exactTimers() (restore func(), err error) {
	before, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0)
	if err != nil {
		return nil, fmt.Errorf("timer slack: %w", err)
	}
	set := func(nanoseconds int) error {
		return unix.Prctl(unix.PR_SET_TIMERSLACK, uintptr(nanoseconds), 0, 0, 0)
	}
	if err := set(1); err != nil {
		return nil, fmt.Errorf("timer slack: %w", err)
	}
	return func() { _ = set(before) }, nil
}
