// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/lab"
)

// arrivals are connections that the lab's client opens at a fixed rate, independently of the
// answers to earlier ones (an open loop). The services take turns. Each connection makes one
// request.
type arrivals struct {
	services []lab.Service
	interval time.Duration // between two connections
	cancel   context.CancelFunc
	group    sync.WaitGroup

	mu    sync.Mutex
	limit time.Duration // for connections that begin from now on
	all   []*arrival
	err   error // the reason why no more connections can be opened
}

// arrival is one of the connections.
type arrival struct {
	service string
	began   time.Time
	ended   time.Time // zero while the connection is in progress
	server  string    // the server that answered
	err     error     // the reason why there is no complete answer
}

// startArrivals opens rate connections per second in total until the test ends. Connections without
// a complete answer within the limit give up.
func startArrivals(t *testing.T, l *lab.Lab, rate int, limit time.Duration) *arrivals {
	ctx, cancel := context.WithCancel(t.Context())
	a := &arrivals{
		services: l.Topology.Services, interval: time.Second / time.Duration(rate),
		cancel: cancel, limit: limit,
	}
	a.group.Go(func() {
		err := l.Node("client").Do(func() error { return a.run(ctx) })
		a.mu.Lock()
		defer a.mu.Unlock()
		a.err = err
	})
	t.Cleanup(a.stop)
	return a
}

// run opens the connections. It locks a thread in the client's network namespace. Sockets stay in
// the namespace in which they are opened, and any thread can use them later.
func (a *arrivals) run(ctx context.Context) error {
	due := time.Now()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Until(due)): // due immediately if the machine stood still
		}
		due = due.Add(a.interval)
		s := a.services[i%len(a.services)]
		// A port that comes back soon would not make a new connection: see fromNewAddress.
		from := lab.ClientAddresses(s.VIP, 254)
		conn, err := beginConnect(from[i%len(from)], s.Address())
		if conn == nil {
			return err
		}
		arrived := &arrival{service: s.Name, began: time.Now()}
		a.mu.Lock()
		a.all = append(a.all, arrived)
		limit := a.limit
		a.mu.Unlock()
		a.group.Go(func() {
			server := ""
			if err == nil {
				server, err = converse(ctx, conn, s, limit)
			}
			conn.Close()
			a.mu.Lock()
			defer a.mu.Unlock()
			arrived.ended, arrived.server, arrived.err = time.Now(), server, err
		})
	}
}

// beginConnect opens a socket and sends the SYN from an address of the client. If it returns a socket,
// the error is that of the connection. Otherwise the error is of this host.
func beginConnect(from netip.Addr, to netip.AddrPort) (*os.File, error) {
	domain, level, option := unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND
	if to.Addr().Is4() {
		domain, level, option = unix.AF_INET, unix.IPPROTO_IP, unix.IP_FREEBIND
	}
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a socket: %w", err)
	}
	err = errors.Join(unix.SetsockoptInt(fd, level, option, 1),
		unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1),
		unix.Bind(fd, sockaddr(netip.AddrPortFrom(from, 0))))
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("bind a socket to %v: %w", from, err)
	}
	err = unix.Connect(fd, sockaddr(to))
	if errors.Is(err, unix.EINPROGRESS) {
		err = nil
	}
	return os.NewFile(uintptr(fd), to.String()), err
}

func sockaddr(address netip.AddrPort) unix.Sockaddr {
	if address.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(address.Port()), Addr: address.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(address.Port()), Addr: address.Addr().As16()}
}

// converse makes a request, which waits until the connection is open. It returns the server after a
// complete answer.
func converse(
	ctx context.Context, conn *os.File, s lab.Service, limit time.Duration,
) (server string, err error) {
	if err := conn.SetDeadline(time.Now().Add(limit)); err != nil {
		return "", err
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	const request = "GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n"
	_, err = fmt.Fprintf(conn, request, s.Address())
	if err != nil {
		return "", err
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		return "", err
	}
	if response.StatusCode != http.StatusOK {
		return "", errors.New(response.Status)
	}
	return response.Header.Get("X-Segue-Server"), nil
}

// setLimit sets the limit of the connections that begin from now on.
func (a *arrivals) setLimit(limit time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.limit = limit
}

// since returns the connections that began at a time or later, or were in progress then, with their
// current state.
func (a *arrivals) since(t *testing.T, from time.Time) []arrival {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	must(t, a.err)
	var some []arrival
	for _, arrived := range a.all {
		if arrived.ended.IsZero() || !arrived.ended.Before(from) {
			some = append(some, *arrived)
		}
	}
	return some
}

// await waits until all connections that began between two times have ended. It returns the same
// connections as since.
func (a *arrivals) await(t *testing.T, from, to time.Time) (some []arrival) {
	t.Helper()
	eventually(t, func() error {
		some = a.since(t, from)
		some = slices.DeleteFunc(some, func(c arrival) bool { return c.began.After(to) })
		for _, c := range some {
			if c.ended.IsZero() {
				return fmt.Errorf("a connection to %s is without an answer after %v",
					c.service, time.Since(c.began))
			}
		}
		return nil
	})
	return some
}

func (a *arrivals) stop() {
	a.cancel()
	a.group.Wait()
}

// outcome describes the result of a connection in a word. It is empty if the connection was
// answered in time.
func (c arrival) outcome(limit time.Duration) string {
	switch {
	case c.err == nil && c.ended.Sub(c.began) <= limit:
		return ""
	case errors.Is(c.err, unix.ECONNREFUSED):
		return "refused"
	case errors.Is(c.err, unix.ECONNRESET), errors.Is(c.err, unix.EPIPE):
		return "reset"
	case errors.Is(c.err, unix.EHOSTUNREACH), errors.Is(c.err, unix.ENETUNREACH):
		return "unreachable"
	case c.err == nil, errors.Is(c.err, os.ErrDeadlineExceeded):
		return "timeout"
	}
	return "broken off"
}
