// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// longestThink is the maximum time between two requests on a connection, in tests with at most a
// thousand connections.
const longestThink = 500 * time.Millisecond

// think returns the time between two requests on each of n connections. Together they make 250
// requests per second, or more if there are many connections. This leaves CPU time for the tested
// programs, and for other tests.
func think(n int) time.Duration { return min(time.Duration(4*n)*time.Millisecond, longestThink) }

// visitorsRest is the time between two requests of a visitor.
const visitorsRest = 30 * time.Millisecond

// connection is an HTTP connection that makes requests at intervals until it ends.
type connection struct {
	service  lab.Service
	conn     net.Conn
	reader   *bufio.Reader
	server   string // the server that answers
	answered atomic.Int64
	took     atomic.Int64  // how long the last answer took, in nanoseconds
	progress chan struct{} // contains a value after each answer
	ended    chan struct{} // closed when the connection makes no more requests
	err      error         // the reason why it ended, or nil
}

// load is a number of open connections.
type load struct {
	connections []*connection
	cancel      context.CancelFunc
	group       sync.WaitGroup
}

// open opens n connections, distributed over the services. They make requests until the test ends.
func open(t *testing.T, l *lab.Lab, n int, services ...lab.Service) *load {
	t.Helper()
	return openResting(t, l, n, think(n), services...)
}

// openResting does the same as open, with the given time between two requests.
func openResting(t *testing.T, l *lab.Lab, n int, think time.Duration, services ...lab.Service) *load {
	t.Helper()
	return openFrom(t, l, make([]int, n), think, services...)
}

// openFrom does the same as openResting, with a connection from each of the ports. 0 is any port.
func openFrom(t *testing.T, l *lab.Lab, ports []int, think time.Duration, services ...lab.Service) *load {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ld := &load{connections: make([]*connection, len(ports)), cancel: cancel}
	t.Cleanup(ld.stop)
	var group errgroup.Group
	group.SetLimit(16)
	for i, port := range ports {
		group.Go(func() (err error) {
			ctx, cancel := context.WithTimeout(ctx, patience)
			defer cancel()
			ld.connections[i], err = dialFrom(ctx, l, services[i%len(services)], port)
			return err
		})
	}
	must(t, group.Wait())
	for _, c := range ld.connections {
		ld.group.Go(func() { c.run(ctx, think) })
	}
	return ld
}

// dial opens a connection and makes its first request.
func dial(ctx context.Context, l *lab.Lab, s lab.Service) (*connection, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return dialFrom(ctx, l, s, 0)
}

// dialFrom does the same as dial, from a port. 0 is any port.
func dialFrom(ctx context.Context, l *lab.Lab, s lab.Service, port int) (*connection, error) {
	conn, err := dialPort(ctx, l, s, port)
	if err != nil {
		return nil, fmt.Errorf("service %s: %w", s.Name, err)
	}
	c := newConnection(conn, s)
	if c.server, err = c.request(); err != nil {
		conn.Close()
		return nil, fmt.Errorf("service %s: %w", s.Name, err)
	}
	return c, nil
}

// dialPort connects the client to a service from a port. 0 is any port.
func dialPort(ctx context.Context, l *lab.Lab, s lab.Service, port int) (conn net.Conn, err error) {
	err = l.Node("client").Do(func() error {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{Port: port}}
		conn, err = dialer.DialContext(ctx, "tcp", s.Address().String())
		return err
	})
	return conn, err
}

func newConnection(conn net.Conn, s lab.Service) *connection {
	return &connection{
		service: s, conn: conn, reader: bufio.NewReader(conn),
		progress: make(chan struct{}, 1), ended: make(chan struct{}),
	}
}

// run makes requests until the context ends or a request fails. It begins at a random time, so that
// the connections do not make their requests at the same time.
func (c *connection) run(ctx context.Context, think time.Duration) {
	defer close(c.ended)
	defer c.conn.Close()
	stop := context.AfterFunc(ctx, func() { c.conn.Close() })
	defer stop()
	rest := time.NewTimer(rand.N(think))
	defer rest.Stop()
	for {
		select {
		case <-rest.C:
			rest.Reset(think)
		case <-ctx.Done():
			return
		}
		start := time.Now()
		server, err := c.request()
		c.took.Store(int64(time.Since(start)))
		if err == nil && server != c.server {
			err = fmt.Errorf("answered by %s all of a sudden", server)
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			c.err = fmt.Errorf("connection to %s at %s from %s, after %d requests: %w",
				c.service.Name, c.server, c.conn.LocalAddr(), c.answered.Load(), err)
			return
		}
		c.answered.Add(1)
		select {
		case c.progress <- struct{}{}:
		default:
		}
	}
}

// request makes one request and returns the server that answered.
func (c *connection) request() (server string, err error) {
	if err := c.conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(c.conn, "GET / HTTP/1.1\r\nHost: e2e\r\n\r\n"); err != nil {
		return "", err
	}
	resp, err := http.ReadResponse(c.reader, nil)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return "", err
	}
	if resp.StatusCode != http.StatusOK {
		return "", errors.New(resp.Status)
	}
	return resp.Header.Get("X-Segue-Server"), nil
}

// rounds returns when every connection that has not failed has made n more requests.
func (l *load) rounds(t *testing.T, n int64) {
	t.Helper()
	wanted := make([]int64, len(l.connections))
	for i, c := range l.connections {
		// One request that began before may still be in progress.
		wanted[i] = c.answered.Load() + 1 + n
	}
	timeout := time.After(2 * patience)
	for i, c := range l.connections {
		for ended := false; !ended && c.answered.Load() < wanted[i]; {
			select {
			case <-c.progress:
			case <-c.ended:
				ended = true
			case <-timeout:
				t.Fatalf("connection to %s at %s: no answer in time", c.service.Name, c.server)
			}
		}
	}
}

// requireUnbroken fails the test if a connection has failed, unless it was to one of the excepted
// servers.
func (l *load) requireUnbroken(t *testing.T, except ...string) {
	t.Helper()
	broken := 0
	for _, c := range l.connections {
		if slices.Contains(except, c.server) {
			continue
		}
		if err := c.failure(); err != nil {
			if broken++; broken <= 5 {
				t.Error(err)
			}
		}
	}
	if broken > 0 {
		t.Fatalf("%d of %d connections broke", broken, len(l.connections))
	}
}

// failure returns why the connection failed, or nil if it has not failed.
func (c *connection) failure() error {
	select {
	case <-c.ended:
		return c.err
	default:
		return nil
	}
}

// at returns the connections to a server.
func (l *load) at(server string) []*connection {
	return slices.DeleteFunc(slices.Clone(l.connections), func(c *connection) bool { return c.server != server })
}

// responseTimes returns the median and the 99th percentile of the last answers on all connections.
func (l *load) responseTimes() (median, p99 time.Duration) {
	var took []int64
	for _, c := range l.connections {
		took = append(took, c.took.Load())
	}
	slices.Sort(took)
	return time.Duration(took[len(took)/2]), time.Duration(took[len(took)*99/100])
}

// of returns the connections of the services with a placement, as a load of their own.
func (l *load) of(placement desired.Placement) *load {
	return &load{connections: slices.DeleteFunc(slices.Clone(l.connections), func(c *connection) bool {
		return c.service.Placement != placement
	})}
}

// to returns the connections to the named servers, as a load of their own.
func (l *load) to(servers ...string) *load {
	return &load{connections: slices.DeleteFunc(slices.Clone(l.connections), func(c *connection) bool {
		return !slices.Contains(servers, c.server)
	})}
}

// stop closes all connections.
func (l *load) stop() {
	l.cancel()
	l.group.Wait()
}

// visitors make requests at intervals, each on a new connection.
type visitors struct {
	cancel   context.CancelFunc
	group    sync.WaitGroup
	answered atomic.Int64
	progress chan struct{}

	mu       sync.Mutex
	failures []error
}

// startVisitors starts n visitors. They use the services in turn, until the test ends.
func startVisitors(t *testing.T, l *lab.Lab, n int, services ...lab.Service) *visitors {
	ctx, cancel := context.WithCancel(t.Context())
	v := &visitors{cancel: cancel, progress: make(chan struct{}, 1)}
	c := newClient(l)
	for i := range n {
		v.group.Go(func() { v.run(ctx, c, i, services) })
	}
	t.Cleanup(v.stop)
	return v
}

func (v *visitors) run(ctx context.Context, c *client, first int, services []lab.Service) {
	for i := first; ; i++ {
		_, _, err := c.get(ctx, services[i%len(services)], "/"+lab.Size(1e3).String())
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			v.mu.Lock()
			v.failures = append(v.failures, err)
			v.mu.Unlock()
		}
		v.answered.Add(1)
		select {
		case v.progress <- struct{}{}:
		default:
		}
		select {
		case <-time.After(visitorsRest):
		case <-ctx.Done():
			return
		}
	}
}

// more returns when n more requests have been made, whether they succeeded or failed.
func (v *visitors) more(t *testing.T, n int64) {
	t.Helper()
	timeout := time.After(2 * patience)
	for wanted := v.answered.Load() + n; v.answered.Load() < wanted; {
		select {
		case <-v.progress:
		case <-timeout:
			t.Fatalf("%d requests were not made in time", n)
		}
	}
}

// requireContent fails the test if a request has failed.
func (v *visitors) requireContent(t *testing.T) {
	t.Helper()
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, err := range v.failures[:min(5, len(v.failures))] {
		t.Error(err)
	}
	if len(v.failures) > 0 {
		t.Fatalf("%d of %d requests failed", len(v.failures), v.answered.Load())
	}
}

func (v *visitors) stop() {
	v.cancel()
	v.group.Wait()
}
