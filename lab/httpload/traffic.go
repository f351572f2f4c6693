// SPDX-License-Identifier: Apache-2.0

// Package httpload generates HTTP/1.1 requests in an open loop: it sends each request when it is
// due, even if earlier requests have no response yet. The latency of a request is measured from the
// time at which it was due. If a server stands still for a second, the report has the delays of all
// requests of that second. A generator in a closed loop would wait meanwhile, and not send most of
// them (G. Tene, "How NOT to measure latency", calls this error coordinated omission).
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
	// Targets has at least one target. Each request draws one of them, all equally likely. If the
	// arrivals are a trace, the trace's query takes the place of the target's.
	Targets []*Target
	// Clients are the client addresses. Connections use them in turn. If there are none, the kernel
	// chooses an address.
	Clients []netip.Addr

	// Arrivals are the times at which requests are due. A trace ends by itself.
	Arrivals sim.Arrivals
	// Duration is the time after which the arrivals end. Requests is the largest number of
	// arrivals. 0 means no limit.
	Duration time.Duration
	Requests uint64
	// Warmup is the time at the beginning of the run whose requests do not count in the report.
	Warmup time.Duration
	// Demand is the distribution of the work that replaces {demand} in the targets' URLs, in
	// seconds. Work is rounded to microseconds. Demand is nil if the targets have no such
	// placeholder.
	Demand *sim.Distribution
	// RoundTrip, if it is set, lets clients appear to be far away. The generator draws a time from
	// this distribution, and acts on the end of a handshake, or on a response, only after that
	// time. So the balancer gets packets at the times at which a distant client would send them.
	// But the last packet of a handshake is never sent later than after 200 ms. The times are in
	// seconds, and are divided by Scale. KeepAlive is then not permitted.
	RoundTrip *sim.Distribution
	// Seed is the seed of arrivals, targets, work and round trips.
	Seed uint64

	// ConnectTimeout is the longest time of a handshake; more than 0.
	ConnectTimeout time.Duration
	// Timeout is the longest time from when a request is due to the end of its response; more than
	// 0.
	Timeout time.Duration
	// KeepAlive sends further requests on connections whose response is complete.
	KeepAlive bool
	// Connections is the largest number of open connections, without the idle ones. 0 means no
	// limit. At the limit, requests wait for a connection.
	Connections int
	// Idle is the number of connections that are opened before the first request, to all targets in
	// turn. They are held open without requests.
	Idle int
	// Headers are lines "Name: value", which are sent with each request. A line "Host: value" takes
	// the place of the target's own.
	Headers []string

	Expect Expectation
	// ServerHeader is the name of the response header that names the server.
	ServerHeader string

	// Every is the length of the report's intervals. 0 means no intervals.
	Every time.Duration
	// Record, if it is set, is where the arrivals are written, as a trace in the format
	// sim.TimedQueries.
	Record io.Writer
	// Log, if it is set, is where a line of CSV is written for each measured request.
	Log io.Writer
	// Scale multiplies the times in Record and Log. It is how many times faster than real time the
	// run is; 0 means 1.
	Scale float64
	// Progress, if it is set, is called every second.
	Progress func(Progress)
}

// Expectation is what a response must be.
type Expectation struct {
	// Status are the expected statuses. An empty list means 200 to 399.
	Status []int
	// Body must match somewhere in the first mebibyte of the body. nil means any body.
	Body *regexp.Regexp
}

// check returns Succeeded if a complete response is as expected. Otherwise it returns WrongStatus
// or WrongContent.
func (e *Expectation) check(r *response) Outcome {
	isExpected := slices.Contains(e.Status, r.status)
	if len(e.Status) == 0 {
		isExpected = r.status >= 200 && r.status <= 399
	}
	switch {
	case !isExpected:
		return WrongStatus
	case e.Body != nil && !e.Body.Match(r.body):
		return WrongContent
	}
	return Succeeded
}

// Progress is the state of a run. It includes the requests of the warm-up.
type Progress struct {
	Elapsed  time.Duration // since the arrivals began; negative while idle connections are opened
	Sent     uint64        // requests that were due until now
	Failed   uint64
	Rate     float64 // requests per second since the last call of Config.Progress
	Open     int     // connections, including idle ones, and those that are being opened
	Waiting  int     // requests that wait for a connection
	P50, P99 float64 // percentiles of the latency so far, in seconds; NaN if no request has succeeded
}

// Check returns an error if the parts of the configuration contradict each other.
func (c *Config) Check() error {
	for _, t := range c.Targets {
		if len(c.Clients) > 0 && c.Clients[0].Is4() != t.Address.Addr().Is4() {
			return fmt.Errorf("client address %s cannot connect to %s: one is IPv4, and the other is "+
				"IPv6", c.Clients[0], t.URL)
		}
		if _, isTrace := c.Arrivals.(sim.Trace); isTrace && !t.isBare() {
			return fmt.Errorf("URL %q: must have no path and no query, because those of the trace are "+
				"used", t.URL)
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

// checkHeader returns an error unless a line has the form "Name: value". It also returns an error
// for headers that the generator itself sets.
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

// Run sends the requests, and returns a report when all have an outcome. It makes sockets on the
// calling goroutine's thread, and so in its network namespace. If ctx ends, Run returns the report
// at once, in which requests without an outcome count as unfinished. If reading a trace or writing
// a file fails, Run returns both a report and the error.
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

// exactTimers sets the timer slack of this thread to 1 ns, so that the kernel wakes it at the
// intended times. By default, the kernel may wake it 50 µs later. restore sets the former timer
// slack.
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
