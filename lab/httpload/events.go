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

// broken are the events of connections that have ended or failed.
const broken = unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR

// epollWait is epoll_pwait2(2), of Linux 5.11 and later: epoll_wait(2) counts in milliseconds.
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

// nextClient returns the client address of the next connection.
func (g *generator) nextClient() netip.Addr {
	if len(g.Clients) == 0 {
		return netip.Addr{}
	}
	g.client = (g.client + 1) % len(g.Clients)
	return g.Clients[g.client]
}

// handle does what follows from the events of a connection.
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
	if c.phase == returning {
		c.left = c.left || events&broken != 0
		return
	}
	if len(c.unsent) > 0 && c.phase == requesting && events&unix.EPOLLOUT != 0 {
		g.write(c, c.unsent)
	}
	if c.phase != closed && events&(unix.EPOLLIN|broken) != 0 {
		g.read(c, events&broken != 0)
	}
}

// connected continues after the handshake.
func (g *generator) connected(c *connection) {
	if c.idle {
		g.idle.opening--
		g.idle.open++
		c.phase = resting
		g.deadlines.clear(c)
		return
	}
	if !g.travels(c, accepted) {
		g.request(c)
	}
}

// travels has a connection wait in a phase for as long as a reply takes to a distant client. It
// returns false if clients are near.
func (g *generator) travels(c *connection, p phase) bool {
	if g.RoundTrip == nil {
		return false
	}
	c.phase = p
	trip := toDuration(g.RoundTrip.Sample(g.trips.Uint64()) / cmp.Or(g.Scale, 1))
	g.deadlines.set(c, g.now()+trip)
	return true
}

// request sends the request of a new connection.
func (g *generator) request(c *connection) {
	g.results.connected(&c.request, g.now()-c.begun)
	g.send(c, c.request, c.begun)
}

// read reads all that has arrived. Events are edge-triggered, so it reads to the end if the
// connection is ending.
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
		if c.phase == returning { // what follows does not matter: the client has the response
			c.left = ending
			return
		}
		if n < len(g.buffer) && !ending {
			return
		}
	}
}

// received handles bytes from the server.
func (g *generator) received(c *connection, p []byte) {
	g.results.bytes += uint64(len(p))
	switch c.phase {
	case requesting:
		rest, err := c.response.feed(p, g.heads)
		switch {
		case err != nil:
			g.fail(c, Malformed, err)
		case c.response.part == complete:
			g.answered(c, g.KeepAlive && c.response.keeps && len(rest) == 0 && len(c.unsent) == 0)
		}
	case resting:
		g.fail(c, Malformed, errors.New("bytes without a request"))
	}
}

// ended handles the end of a connection by the server.
func (g *generator) ended(c *connection) {
	switch {
	case c.phase == requesting && c.response.end():
		c.left = true
		g.answered(c, false)
	case c.phase == accepted:
		g.fail(c, Short, fmt.Errorf("%s: the server closed the connection before the request", c.target.Address))
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

// answered continues after the end of a response.
func (g *generator) answered(c *connection, reusable bool) {
	if !g.travels(c, returning) {
		g.complete(c, reusable)
	}
}

// complete ends a request whose response the client has. The connection then rests, takes the next
// request that waits, or waits for its end.
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
	case c.left:
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

// fail ends a connection that cannot be used any more, and the request on it.
func (g *generator) fail(c *connection, kind Outcome, err error) {
	phase, r, server := c.phase, c.request, c.response.server
	if phase == connecting && c.idle {
		g.idle.opening--
		if g.idle.failed++; g.idle.err == nil {
			g.idle.err = err
		}
	}
	if phase == requesting || phase == accepted {
		g.reset(c)
	} else {
		g.release(c)
	}
	if (phase == connecting || phase == accepted || phase == requesting) && !c.idle {
		g.pending--
		g.finish(&r, &outcome{kind: kind, err: err, server: server})
	}
}

// finish reports the outcome of a request.
func (g *generator) finish(r *request, o *outcome) {
	g.results.finished(r, o)
	if g.log != nil && r.measured {
		g.log.write(r.due-g.zero, r, o)
	}
}

// rest keeps a connection for the next request to its target.
func (g *generator) rest(c *connection) {
	c.phase, c.place = resting, len(g.resting[c.target])
	g.deadlines.clear(c)
	g.resting[c.target] = append(g.resting[c.target], c)
}

// wake takes a connection from those that rest.
func (g *generator) wake(c *connection) {
	resting := g.resting[c.target]
	last := len(resting) - 1
	resting[c.place], resting[last].place = resting[last], c.place
	resting[last] = nil
	g.resting[c.target] = resting[:last]
}

// reset closes a connection that the server may still use.
func (g *generator) reset(c *connection) {
	if c.descriptor >= 0 {
		resetOnClose(c.descriptor)
	}
	g.release(c)
}

// release closes a connection.
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
	case wasResting:
		g.idle.open--
		g.idle.lost++
	}
}
