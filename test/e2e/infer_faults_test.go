// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

const (
	// faultyServer is the server of TestInferFaults that fails.
	faultyServer = "s3"
	// faultyRate is the number of connections per second that clients open.
	faultyRate = 20
	// faultyPatience is the time after which clients give up.
	faultyPatience = 2 * time.Second
)

// serverFault makes a server fail, and returns the end of the fault.
type serverFault struct {
	name  string
	begin func(t *testing.T, l *lab.Lab) (end func())
	// back is the number of connections within which the server is to have half of its share again.
	back int
}

// serverFaults are the faults of TestInferFaults. If connections are answered, an end is known only
// ten seconds after a connection has fallen silent.
var serverFaults = []serverFault{
	{"refuses", func(t *testing.T, l *lab.Lab) func() { return instead(t, l, nil) }, 20 * faultyRate},
	{"answers no SYN", loseAnswers, 20 * faultyRate},
	{"resets what it accepts", func(t *testing.T, l *lab.Lab) func() { return instead(t, l, reset) }, 40 * faultyRate},
	{"accepts and says nothing", func(t *testing.T, l *lab.Lab) func() { return instead(t, l, hold) }, 40 * faultyRate},
}

// instead stops the faulty server's application, and gives its connections to a function. Nil
// accepts none.
func instead(t *testing.T, l *lab.Lab, serve func(net.Conn)) (end func()) {
	t.Helper()
	app := l.Process(faultyServer, "emulated")
	must(t, app.Stop())
	var group sync.WaitGroup
	stop := func() {}
	if serve != nil {
		listener, err := l.Node(faultyServer).Listen(t.Context(), "tcp", ":80")
		must(t, err)
		stop = func() { _ = listener.Close() }
		t.Cleanup(stop)
		group.Go(func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				group.Go(func() { serve(conn) })
			}
		})
	}
	return func() {
		stop()
		group.Wait()
		must(t, app.Start(t.Context()))
	}
}

// reset resets a connection.
func reset(conn net.Conn) {
	_ = conn.(*net.TCPConn).SetLinger(0)
	_ = conn.Close()
}

// hold keeps a connection open until the client closes it.
func hold(conn net.Conn) {
	buffer := make([]byte, 4096)
	for {
		if _, err := conn.Read(buffer); err != nil {
			_ = conn.Close()
			return
		}
	}
}

// loseAnswers makes the faulty server lose all that it sends to clients.
func loseAnswers(t *testing.T, l *lab.Lab) (end func()) {
	t.Helper()
	route := func(action string) {
		command(t, l, faultyServer, "ip", "-6", "route", action, "blackhole", "2001:db8:c::/64", "metric", "1")
	}
	route("add")
	return func() { route("del") }
}

// TestInferFaults lets one of eight servers fail in several ways. From three seconds after that on,
// it must get no more than its share of new connections. After the fault it must come back. The
// placement is least-queue: with learned capacities, the share of a server that is well also depends
// on what was learned. docs/operate/infer.md has the numbers that the test logs.
func TestInferFaults(t *testing.T) {
	t.Parallel()
	for _, f := range serverFaults {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			topology := inferredLab(1)
			topology.Emulated.Cores, topology.Emulated.Exceptions = 4, nil
			topology.Services[0].Placement = desired.PlacementLeastQueue
			l := up(t, topology)
			c := startCustomers(t, l)
			c.placed(t, 10*faultyRate) // it learns

			end := f.begin(t, l)
			failed := c.failed.Load()
			first := c.placed(t, 3*faultyRate)
			ill := c.placed(t, 20*faultyRate)
			end()
			ended := time.Now()
			t.Logf("%s: %s of the connections in the first 3 s, then %s; %d requests failed",
				f.name, first, ill, c.failed.Load()-failed)
			if 8*ill.faulty > ill.all {
				t.Errorf("%s of the connections go to the server", ill)
			}

			back := c.awaitShare(t, f.back)
			t.Logf("%s: back after %d connections, %.1f s", f.name, back, time.Since(ended).Seconds())
			requireNoDrops(t, l)
		})
	}
}

// customers open connections at a rate, each for one request of half a second.
type customers struct {
	view   *inspect.View
	failed atomic.Int64
	opened chan struct{} // has a value after some connections
}

func startCustomers(t *testing.T, l *lab.Lab) *customers {
	t.Helper()
	c := &customers{view: viewsOf(t, l)[0], opened: make(chan struct{}, 1)}
	client := http.Client{
		Transport: &http.Transport{DialContext: l.Node("client").Dial, DisableKeepAlives: true},
		Timeout:   faultyPatience,
	}
	url := fmt.Sprintf("http://%s/?work=500ms", service(t, l, "web").Address())
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	t.Cleanup(func() { cancel(); group.Wait() })
	tick := time.NewTicker(time.Second / faultyRate)
	group.Go(func() {
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			group.Go(func() {
				if err := visitOnce(ctx, &client, url); err != nil {
					c.failed.Add(1)
				}
			})
			select {
			case c.opened <- struct{}{}:
			default:
			}
		}
	})
	return c
}

func visitOnce(ctx context.Context, client *http.Client, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		err = errors.New(response.Status)
	}
	return errors.Join(err, response.Body.Close())
}

// placements counts connections: those of the faulty server, and all.
type placements struct{ faulty, all uint32 }

func (p placements) String() string {
	return fmt.Sprintf("%d of %d", p.faulty, p.all)
}

// count returns the placements so far.
func (c *customers) count(t *testing.T) (p placements) {
	t.Helper()
	services, err := c.view.Services() // without shares, which take long to read
	must(t, err)
	for _, server := range services[0].Servers {
		if server.Inferred == nil {
			continue
		}
		p.all += server.Inferred.Placed
		if server.Name == faultyServer {
			p.faulty += server.Inferred.Placed
		}
	}
	return p
}

// since returns the placements after earlier ones.
func (p placements) since(before placements) placements {
	return placements{p.faulty - before.faulty, p.all - before.all}
}

// placed waits until so many more connections were placed, and counts them.
func (c *customers) placed(t *testing.T, connections uint32) (p placements) {
	t.Helper()
	before := c.count(t)
	timeout := time.After(2*patience + time.Duration(connections)*time.Second/faultyRate)
	for p.all < connections {
		select {
		case <-c.opened:
			p = c.count(t).since(before)
		case <-timeout:
			t.Fatalf("%d of %d connections were placed in time", p.all, connections)
		}
	}
	return p
}

// awaitShare waits until the faulty server has got half of its share of the last 80 connections, or
// more. It returns the number of connections until then, and fails the test if there are too many.
func (c *customers) awaitShare(t *testing.T, most int) (connections int) {
	t.Helper()
	const step, window = 10, 80
	var steps []placements
	for connections < most {
		steps = append(steps, c.placed(t, step))
		connections += step
		var last placements
		for _, p := range steps[max(0, len(steps)-window/step):] {
			last = placements{last.faulty + p.faulty, last.all + p.all}
		}
		if len(steps) >= window/step && 16*last.faulty >= last.all {
			return connections
		}
	}
	t.Fatalf("the server is not back after %d connections: %v", connections, steps)
	return 0
}
