// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"math"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/research/sim"
)

const (
	// linger is how long the generator waits after a response for the server to close the
	// connection. The host that closes first keeps the port for a minute (TIME_WAIT, RFC 9293,
	// section 3.6.1).
	linger = time.Second
	// longestPause is the longest time until the generator notices that its context has ended.
	longestPause = 50 * time.Millisecond
	// mostDue is the largest number of due requests that the generator sends before it handles
	// events of connections again.
	mostDue = 64
	// mostOpening is how many idle connections are opened at the same time. It is less than the
	// backlogs of common servers.
	mostOpening = 64
	readBuffer  = 256 << 10 // the size of the buffer for received bytes
)

// The streams of random numbers of a seed.
const (
	streamArrivals = 100 + iota
	streamDemands
	streamTargets
	streamTrips
)

// generator is the state of a run. One goroutine uses it.
type generator struct {
	*Config
	results results

	start   time.Time     // all times below are relative to this one
	zero    time.Duration // when the arrivals began; valid if started
	started bool          // the arrivals have begun: all idle connections are open
	end     time.Duration // when the arrivals end, at the latest
	source  sim.Source    // of the arrivals
	more    bool          // there is a next arrival
	next    sim.Arrival   // the next arrival; valid if more
	over    bool          // the arrivals ended by themselves or at Requests, before end
	number  uint64        // number of arrivals so far
	demands *sim.Rand     // random numbers for the work of requests
	choices *sim.Rand     // random numbers for their targets
	trips   *sim.Rand     // random numbers for round trips

	epoll       int               // the descriptor of the epoll instance
	events      []unix.EpollEvent // a buffer for events
	buffer      []byte            // a buffer for received bytes
	text        []byte            // a buffer for the text of a request
	headers     map[*Target]string
	heads       *headReader
	connections []*connection             // by descriptor
	serial      int32                     // the serial of the latest connection
	deadlines   deadlines                 // of connections
	resting     map[*Target][]*connection // open connections that can take a request
	waiting     []request                 // requests that wait for a connection, the earliest first
	open        int                       // number of connections for requests, in any phase
	pending     int                       // number of requests without an outcome
	client      int                       // index of the client address that was used last
	idle        idleConnections

	recorder *bufio.Writer // nil without Config.Record
	log      *requestLog   // nil without Config.Log
}

// idleConnections counts the connections that are held open without requests. begun counts all of
// them. Each is being opened, is open, has failed to open, or was open and is lost.
type idleConnections struct {
	begun, opening, open, failed, lost int
	err                                error // the first error of those that failed
}

func newGenerator(c *Config) (*generator, error) {
	source, err := c.Arrivals.Start(sim.NewRand(c.Seed, streamArrivals))
	if err != nil {
		return nil, err
	}
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	g := &generator{
		Config: c, source: source, epoll: epoll, start: time.Now(), more: true,
		demands: sim.NewRand(c.Seed, streamDemands), choices: sim.NewRand(c.Seed, streamTargets),
		trips:  sim.NewRand(c.Seed, streamTrips),
		events: make([]unix.EpollEvent, 256), buffer: make([]byte, readBuffer),
		headers: map[*Target]string{}, resting: map[*Target][]*connection{},
		heads: newHeadReader(c.ServerHeader, c.Expect.Body != nil),
	}
	g.results = newResults(c)
	for _, t := range c.Targets {
		g.headers[t] = c.headers(t)
	}
	if c.Record != nil {
		g.recorder = bufio.NewWriter(c.Record)
		fmt.Fprintln(g.recorder, "time\tquery")
	}
	if c.Log != nil {
		g.log = newRequestLog(c)
	}
	return g, nil
}

// headers returns the text that follows the request target in each request to a target: the rest of
// the request line, and the header.
func (c *Config) headers(t *Target) string {
	var text strings.Builder
	text.WriteString(" HTTP/1.1\r\n")
	has := func(name string) bool {
		for _, line := range c.Headers {
			if given, _, _ := strings.Cut(line, ":"); strings.EqualFold(given, name) {
				return true
			}
		}
		return false
	}
	if !has("Host") {
		fmt.Fprintf(&text, "Host: %s\r\n", t.Host)
	}
	if !has("User-Agent") {
		text.WriteString("User-Agent: segue-load\r\n")
	}
	for _, line := range c.Headers {
		text.WriteString(line + "\r\n")
	}
	if !c.KeepAlive {
		text.WriteString("Connection: close\r\n")
	}
	text.WriteString("\r\n")
	return text.String()
}

// now returns the time since the start of the generator.
func (g *generator) now() time.Duration { return time.Since(g.start) }

// run opens the idle connections, and then sends the requests. It returns when the arrivals have
// ended and all requests have an outcome, or when the context ends. If the context ends first, the
// report is marked as interrupted.
func (g *generator) run(ctx context.Context) error {
	for ctx.Err() == nil {
		now := g.now()
		if !g.started && g.openIdle() {
			g.begin(now)
		}
		if g.started && !g.more && g.pending == 0 {
			return nil
		}
		g.expire(now)
		g.serveWaiting()
		g.sendDue(now)
		g.results.progress.report(g, now)
		if err := g.poll(g.pause()); err != nil {
			return err
		}
	}
	g.results.interrupted = true
	return nil
}

// openIdle begins to open further idle connections, so that up to mostOpening of them are being
// opened. It returns true when each of Config.Idle connections is open or has failed.
func (g *generator) openIdle() bool {
	for g.idle.begun < g.Idle && g.idle.opening < mostOpening {
		target := g.Targets[g.idle.begun%len(g.Targets)]
		g.idle.begun++
		g.idle.opening++
		g.connect(&connection{target: target, idle: true})
	}
	return g.idle.begun == g.Idle && g.idle.opening == 0
}

// begin starts the arrivals at the time now.
func (g *generator) begin(now time.Duration) {
	g.zero, g.started, g.end = now, true, math.MaxInt64
	if g.Duration > 0 {
		g.end = now + g.Duration
	}
	g.results.begin(now)
	g.advance()
}

// advance draws the next arrival, or reads it from the trace. If the arrivals have ended, it sets
// more to false and, unless they ended because of Config.Duration, over to true.
func (g *generator) advance() {
	if g.Requests > 0 && g.number == g.Requests {
		g.more, g.over = false, true
		return
	}
	g.next, g.more = g.source.Next()
	g.over = !g.more
	g.more = g.more && g.dueTime() < g.end
}

// dueTime returns when the next arrival is due.
func (g *generator) dueTime() time.Duration {
	return g.zero + toDuration(g.next.At)
}

// toDuration converts a number of seconds. A number above 1e9 (31 years) counts as 1e9, because a
// Duration ends at 292 years.
func toDuration(seconds float64) time.Duration {
	return time.Duration(math.Round(min(seconds, 1e9) * 1e9))
}

// sendDue makes the requests that are due, at most mostDue of them, and serves each. It does
// nothing before the arrivals have begun.
func (g *generator) sendDue(now time.Duration) {
	if !g.started {
		return
	}
	for n := 0; n < mostDue && g.more && g.dueTime() <= now; n++ {
		r := g.newRequest()
		g.advance()
		g.pending++
		g.results.arrived(&r, g.now()-r.due)
		g.serve(r)
	}
}

// newRequest makes the request of the next arrival, and draws its target. The query is that of the
// trace. If the arrivals are not a trace, newRequest draws the work, and inserts it into the
// target's query. It also writes the arrival to Config.Record.
func (g *generator) newRequest() request {
	due := g.dueTime()
	g.number++
	r := request{
		number: g.number, due: due, target: g.Targets[g.choices.Intn(len(g.Targets))],
		measured: due-g.zero >= g.Warmup,
	}
	if g.next.Query != "" {
		r.query, _ = requestTarget(g.next.Query) // the trace has checked it
	} else {
		var demand time.Duration
		if g.Demand != nil {
			demand = toDuration(g.Demand.Sample(g.demands.Uint64())).Round(time.Microsecond)
		}
		r.query = r.target.query(r.number, demand)
	}
	if g.recorder != nil {
		fmt.Fprintf(g.recorder, "%.9f\t%s\n", g.scaled(due-g.zero), r.query)
	}
	return r
}

// scaled returns a time for Record or Log, in seconds.
func (c *Config) scaled(d time.Duration) float64 { return d.Seconds() * cmp.Or(c.Scale, 1) }

// serve sends a request on a resting connection to its target. If there is none, it opens a
// connection for the request. At the limit of open connections, it first closes a resting
// connection to another target. If there is none either, the request waits.
func (g *generator) serve(r request) {
	if resting := g.resting[r.target]; len(resting) > 0 {
		c := resting[len(resting)-1]
		g.wake(c)
		g.send(c, r, g.now())
		return
	}
	if g.Connections > 0 && g.open >= g.Connections && !g.closeResting() {
		g.waiting = append(g.waiting, r)
		return
	}
	g.open++
	g.connect(&connection{target: r.target, request: r})
}

// serveWaiting serves requests that wait for a connection, the earliest first, until the limit of
// open connections is reached. Requests wait only if there is such a limit.
func (g *generator) serveWaiting() {
	for len(g.waiting) > 0 && g.open < g.Connections {
		next := g.waiting[0]
		g.waiting = g.waiting[1:]
		g.serve(next)
	}
}

// closeResting closes one of the resting connections, no matter which. It returns false if there is
// none.
func (g *generator) closeResting() bool {
	for _, resting := range g.resting {
		if len(resting) > 0 {
			g.release(resting[len(resting)-1])
			return true
		}
	}
	return false
}

// connect opens the socket of a connection, and begins the handshake. If that fails at once, the
// connection's request fails. A connection without a request (idle) counts as failed then.
func (g *generator) connect(c *connection) {
	c.phase, c.begun, c.position, c.descriptor = connecting, g.now(), noDeadline, -1
	from := g.nextClient()
	fd, err := dial(from, c.target.Address, g.RoundTrip != nil)
	if err == nil {
		g.serial++
		c.descriptor, c.serial = fd, g.serial
		for fd >= len(g.connections) {
			g.connections = append(g.connections, nil)
		}
		g.connections[fd] = c
		err = unix.EpollCtl(g.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{
			Events: unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET,
			Fd:     int32(fd), Pad: c.serial,
		})
	}
	if err != nil {
		g.fail(c, outcomeOf(err, false), explain(err))
		return
	}
	deadline := c.begun + g.ConnectTimeout
	if !c.idle {
		deadline = min(deadline, c.request.due+g.Timeout)
	}
	g.deadlines.set(c, deadline)
}

// send sends a request on a connection. begun is the time from which the exchange is measured: when
// the handshake began, or on a connection that was open already, the present time.
func (g *generator) send(c *connection, r request, begun time.Duration) {
	c.phase, c.request, c.begun = requesting, r, begun
	c.response.reset()
	g.deadlines.set(c, r.due+g.Timeout)
	g.text = append(g.text[:0], "GET "...)
	g.text = append(g.text, r.query...)
	g.text = append(g.text, g.headers[r.target]...)
	g.write(c, g.text)
}

// write sends text on a connection. If the socket does not take all of it, unsent gets the rest.
func (g *generator) write(c *connection, text []byte) {
	n, err := unix.Write(c.descriptor, text)
	switch {
	case err == unix.EAGAIN || err == unix.EINTR:
		n = 0
	case err != nil:
		g.fail(c, outcomeOf(err, true), fmt.Errorf("write: %w", err))
		return
	}
	c.unsent = append(c.unsent[:0], text[n:]...)
}

// expire handles the deadlines that have passed. What a deadline of a connection means depends on
// the phase of the connection. In the phases accepted and returning, it is the time at which a
// distant client would see what has happened. Requests that wait for a connection fail at their
// timeout.
func (g *generator) expire(now time.Duration) {
	for len(g.deadlines) > 0 && g.deadlines[0].deadline <= now {
		c := g.deadlines[0]
		// The deadline of a handshake is ConnectTimeout or Timeout, whichever ends first.
		isConnectTimeout := c.phase == connecting && (c.idle || c.deadline < c.request.due+g.Timeout)
		switch {
		case c.phase == closing: // the server has not closed the connection within linger
			g.reset(c)
		case c.phase == accepted:
			g.request(c)
		case c.phase == returning:
			g.complete(c, false)
		case isConnectTimeout:
			g.fail(c, ConnectTimeout,
				fmt.Errorf("connect %s: no answer within %v", c.target.Address, g.ConnectTimeout))
		default:
			g.fail(c, Timeout,
				fmt.Errorf("%s: no complete response within %v", c.target.Address, g.Timeout))
		}
	}
	for len(g.waiting) > 0 && g.waiting[0].due+g.Timeout <= now {
		r := g.waiting[0]
		g.waiting = g.waiting[1:]
		g.pending--
		g.finish(&r, &outcome{kind: Timeout, err: fmt.Errorf("no free connection within %v", g.Timeout)})
	}
}

// pause returns how long the generator may wait for events, until it has something else to do.
func (g *generator) pause() time.Duration {
	now := g.now()
	until := now + longestPause
	if g.started && g.more {
		until = min(until, g.dueTime())
	}
	if len(g.deadlines) > 0 {
		until = min(until, g.deadlines[0].deadline)
	}
	if len(g.waiting) > 0 {
		until = min(until, g.waiting[0].due+g.Timeout)
	}
	return max(until-now, 0)
}

// poll waits for events of connections, at most for the pause, and handles them.
func (g *generator) poll(pause time.Duration) error {
	n, err := epollWait(g.epoll, g.events, pause)
	if err != nil && err != unix.EINTR {
		return fmt.Errorf("epoll: %w", err)
	}
	for _, event := range g.events[:n] {
		c := g.connections[event.Fd]
		if c != nil && c.serial == event.Pad {
			g.handle(c, event.Events)
		}
	}
	return nil
}

// close closes all connections, and writes the rest of Record and Log. It returns the first error.
func (g *generator) close() error {
	for _, c := range g.connections {
		if c != nil && c.phase != closed {
			if c.phase == requesting { // so that the server does not go on with the request
				resetOnClose(c.descriptor)
			}
			unix.Close(c.descriptor)
		}
	}
	unix.Close(g.epoll)
	err := g.source.Close()
	if g.recorder != nil {
		err = cmp.Or(err, g.recorder.Flush())
	}
	if g.log != nil {
		err = cmp.Or(err, g.log.flush())
	}
	return err
}
