// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// broken has the events that tell that a connection has ended or failed.
const broken = unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR

// epollWait calls epoll_pwait2(2), which Linux has since 5.11. Its timeout is in nanoseconds, while
// that of epoll_wait(2) is in milliseconds.
func epollWait(epoll int, events []unix.EpollEvent, pause time.Duration) (int, error) {
	timeout := unix.NsecToTimespec(pause.Nanoseconds())
	n, _, errno := unix.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(epoll),
		uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)),
		uintptr(unsafe.Pointer(&timeout)), 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// nextClient returns the client address for a new connection, or the zero address if the kernel is
// to choose.
func (g *generator) nextClient() netip.Addr {
	if len(g.Clients) == 0 {
		return netip.Addr{}
	}
	g.client = (g.client + 1) % len(g.Clients)
	return g.Clients[g.client]
}

// handle reacts to events of a connection. In phase connecting, it ends the handshake or fails.
// After that it writes the rest of the request, and reads what has arrived, so far as the phase
// permits.
func (g *generator) handle(c *connection, events uint32) {
	if c.phase == connecting {
		if events&(unix.EPOLLOUT|broken) == 0 {
			return
		}
		if events&(unix.EPOLLERR|unix.EPOLLHUP) != 0 {
			if err := socketError(c.descriptor); err != nil {
				g.fail(c, outcomeOf(err, false), fmt.Errorf("connect %s: %w", c.target.Address, explain(err)))
				return
			}
		}
		g.connected(c)
	}
	if c.phase == returning { // the response is complete; only the end of the connection matters
		c.isEnded = c.isEnded || events&broken != 0
		return
	}
	if len(c.unsent) > 0 && c.phase == requesting && events&unix.EPOLLOUT != 0 {
		g.write(c, c.unsent)
	}
	if c.phase != closed && events&(unix.EPOLLIN|broken) != 0 {
		g.read(c, events&broken != 0)
	}
}

// connected handles the end of a handshake. An idle connection then rests. Any other connection
// sends its request: with distant clients (Config.RoundTrip), after the handshake's round trip.
func (g *generator) connected(c *connection) {
	if c.idle {
		g.idle.opening--
		g.idle.open++
		c.phase = resting
		g.deadlines.clear(c)
		return
	}
	if !g.beginTrip(c, accepted) {
		g.request(c)
	}
}

// beginTrip puts a connection into phase p, for as long as a reply would take to a distant client.
// The phase ends in expire. If clients are not distant (Config.RoundTrip is nil), beginTrip does
// nothing and returns false.
func (g *generator) beginTrip(c *connection, p phase) bool {
	if g.RoundTrip == nil {
		return false
	}
	c.phase = p
	trip := toDuration(g.RoundTrip.Sample(g.trips.Uint64()) / cmp.Or(g.Scale, 1))
	g.deadlines.set(c, g.now()+trip)
	return true
}

// request counts the handshake of a new connection, and sends the connection's request.
func (g *generator) request(c *connection) {
	g.results.connected(&c.request, g.now()-c.begun)
	g.send(c, c.request, c.begun)
}

// read reads all bytes that have arrived on a connection. ending tells that the connection has
// ended or failed. Then no further event will come, because events are edge-triggered. So read goes
// on until the end of the stream.
func (g *generator) read(c *connection, ending bool) {
	for c.phase != closed {
		n, err := unix.Read(c.descriptor, g.buffer)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return
		case err != nil:
			g.fail(c, outcomeOf(err, true), fmt.Errorf("read: %w", err))
			return
		case n == 0:
			g.ended(c)
			return
		}
		g.received(c, g.buffer[:n])
		if c.phase == returning { // the response is complete; what follows does not matter
			c.isEnded = ending
			return
		}
		if n < len(g.buffer) && !ending { // the socket is empty
			return
		}
	}
}

// received handles bytes that the server has sent.
func (g *generator) received(c *connection, p []byte) {
	g.results.bytes += uint64(len(p))
	switch c.phase {
	case requesting:
		rest, err := c.response.feed(p, g.heads)
		switch {
		case err != nil:
			g.fail(c, Malformed, err)
		case c.response.part == complete:
			isClean := len(rest) == 0 && len(c.unsent) == 0 // nothing is left of this exchange
			g.answered(c, g.KeepAlive && c.response.keeps && isClean)
		}
	case resting: // also an idle connection: the server has nothing to answer
		g.fail(c, Malformed, errors.New("bytes without a request"))
	}
}

// ended handles the end of the stream: the server has closed the connection. The end completes a
// response whose body has no known length. Otherwise a request without a complete response fails.
// Any other connection is only released.
func (g *generator) ended(c *connection) {
	switch {
	case c.phase == requesting && c.response.end():
		c.isEnded = true
		g.answered(c, false)
	case c.phase == accepted:
		g.fail(c, Short,
			fmt.Errorf("%s: the server closed the connection before the request", c.target.Address))
	case c.phase == requesting:
		what := "before the response"
		if c.response.status != 0 {
			what = "before the end of the response"
		}
		g.fail(c, Short, fmt.Errorf("%s: the server closed the connection %s", c.target.Address, what))
	default:
		g.release(c)
	}
}

// answered handles the end of a response. reusable tells whether the connection can take further
// requests.
func (g *generator) answered(c *connection, reusable bool) {
	if !g.beginTrip(c, returning) {
		g.complete(c, reusable)
	}
}

// complete ends a request whose response is complete. The first rule that applies decides what
// happens to the connection:
//   - If the server has closed it, it is released.
//   - If it is not reusable, it waits for the server to close it.
//   - If requests wait, it takes the first one, or is released if that one has another target.
//   - Otherwise it rests.
func (g *generator) complete(c *connection, reusable bool) {
	now := g.now()
	r, response := c.request, &c.response
	o := outcome{
		kind: g.Expect.check(response), server: response.server,
		latency: now - r.due, exchange: now - c.begun,
	}
	switch o.kind {
	case WrongStatus:
		o.err = fmt.Errorf("%s: status %d", r.query, response.status)
	case WrongContent:
		o.err = fmt.Errorf("%s: the body begins with %.60q", r.query, response.body)
	}
	g.pending--
	g.finish(&r, &o)
	switch {
	case c.isEnded:
		g.release(c)
	case !reusable:
		c.phase = closing
		g.deadlines.set(c, now+linger)
	case len(g.waiting) > 0 && g.waiting[0].target == c.target:
		next := g.waiting[0]
		g.waiting = g.waiting[1:]
		g.send(c, next, now)
	case len(g.waiting) > 0:
		g.release(c)
	default:
		g.rest(c)
	}
}

// fail closes a connection on which something went wrong. If the connection has a request without
// an outcome, the request gets the outcome kind. An idle connection counts as failed if it was
// being opened, and as lost if it was open.
func (g *generator) fail(c *connection, kind Outcome, err error) {
	phase, r, server := c.phase, c.request, c.response.server // before the connection is closed
	if phase == connecting && c.idle {
		g.idle.opening--
		g.idle.failed++
		g.idle.err = cmp.Or(g.idle.err, err)
	}
	if phase == requesting || phase == accepted { // the server may still work for the request
		g.reset(c)
	} else {
		g.release(c)
	}
	hasRequest := phase == connecting || phase == accepted || phase == requesting
	if hasRequest && !c.idle {
		g.pending--
		g.finish(&r, &outcome{kind: kind, err: err, server: server})
	}
}

// finish counts the outcome of a request. If the request is not of the warm-up, finish also writes
// it to the log.
func (g *generator) finish(r *request, o *outcome) {
	g.results.finished(r, o)
	if g.log != nil && r.measured {
		g.log.write(r.due-g.zero, r, o)
	}
}

// rest keeps a connection open for the next request to its target.
func (g *generator) rest(c *connection) {
	c.phase, c.place = resting, len(g.resting[c.target])
	g.deadlines.clear(c)
	g.resting[c.target] = append(g.resting[c.target], c)
}

// wake removes a connection from the resting ones of its target. The last one takes its place.
func (g *generator) wake(c *connection) {
	resting := g.resting[c.target]
	last := len(resting) - 1
	resting[c.place], resting[last].place = resting[last], c.place
	resting[last] = nil
	g.resting[c.target] = resting[:last]
}

// reset closes a connection that the server may still use. The server gets a reset.
func (g *generator) reset(c *connection) {
	if c.descriptor >= 0 {
		resetOnClose(c.descriptor)
	}
	g.release(c)
}

// release closes a connection, and removes it from the lists and counts of the generator. An idle
// connection that was open counts as lost.
func (g *generator) release(c *connection) {
	wasResting := c.phase == resting
	g.deadlines.clear(c)
	if wasResting && !c.idle {
		g.wake(c)
	}
	c.phase = closed
	if c.descriptor >= 0 {
		g.connections[c.descriptor] = nil
		unix.Close(c.descriptor)
	}
	switch {
	case !c.idle:
		g.open--
	case wasResting: // an idle connection, which was open
		g.idle.open--
		g.idle.lost++
	}
}
