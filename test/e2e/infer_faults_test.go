// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

var inferApart = flag.Bool("infer.apart", false, "TestInferFaults has a lab for each fault")

const (
	// faultyRate is the number of connections per second that clients open.
	faultyRate = 20
	// faultyPatience is the time after which clients give up.
	faultyPatience = 2 * time.Second
)

// serverFault makes a server of TestInferFaults fail, and returns the end of the fault.
type serverFault struct {
	name   string
	server string
	begin  func(t *testing.T, l *lab.Lab, server string) (end func())
	// back is the number of connections within which the server is to have half of its share again.
	back int
}

// serverFaults are the faults of TestInferFaults. If connections are answered, an end is known only
// ten seconds after a connection has fallen silent.
var serverFaults = []serverFault{
	{"refuses", "s1", instead(nil), 20 * faultyRate},
	{"answers no SYN", "s2", loseAnswers, 20 * faultyRate},
	{"resets what it accepts", "s3", instead(reset), 40 * faultyRate},
	{"accepts and says nothing", "s4", instead(hold), 40 * faultyRate},
}

// instead stops a server's application, and gives its connections to a function. Nil accepts none.
func instead(serve func(net.Conn)) func(*testing.T, *lab.Lab, string) (end func()) {
	return func(t *testing.T, l *lab.Lab, server string) func() {
		t.Helper()
		app := l.Process(server, "emulated")
		must(t, app.Stop())
		var group sync.WaitGroup
		stop := func() {}
		if serve != nil {
			listener, err := l.Node(server).Listen(t.Context(), "tcp", ":80")
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

// loseAnswers makes a server lose all that it sends to clients.
func loseAnswers(t *testing.T, l *lab.Lab, server string) (end func()) {
	t.Helper()
	route := func(action string) {
		command(t, l, server, "ip", "-6", "route", action, "blackhole", "2001:db8:c::/64", "metric", "1")
	}
	route("add")
	return func() { route("del") }
}

// TestInferFaults lets half of eight servers fail, each in another way. From three seconds after that
// on, none of them may get more than its share of new connections. After the fault each must come
// back. The placement is least-queue: with learned capacities, the share of a server that is well also
// depends on what was learned. With -infer.apart, one server of a lab fails. docs/operate/infer.md has
// the numbers that the test logs then.
func TestInferFaults(t *testing.T) {
	t.Parallel()
	if !*inferApart {
		inferFaults(t, serverFaults...)
		return
	}
	for _, f := range serverFaults {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			inferFaults(t, f)
		})
	}
}

func inferFaults(t *testing.T, faults ...serverFault) {
	topology := inferredLab(1)
	topology.Emulated.Cores, topology.Emulated.Exceptions = 4, nil
	topology.Services[0].Placement = desired.PlacementLeastQueue
	l := up(t, topology)
	c := startCustomers(t, l)
	c.placed(t, 10*faultyRate) // it learns

	var ends []func()
	for _, f := range faults {
		ends = append(ends, f.begin(t, l, f.server))
	}
	failed := c.failed.Load()
	first := c.placed(t, 3*faultyRate)
	ill := c.placed(t, 20*faultyRate)
	for _, end := range ends {
		end()
	}
	ended := time.Now()
	t.Logf("%d requests failed", c.failed.Load()-failed)
	for _, f := range faults {
		t.Logf("%s: %d of %d connections in the first 3 s, then %d of %d",
			f.name, first.at[f.server], first.all, ill.at[f.server], ill.all)
		if 8*ill.at[f.server] > ill.all {
			t.Errorf("%s: %d of %d connections go to the server", f.name, ill.at[f.server], ill.all)
		}
	}
	c.awaitShares(t, faults, ended)
	requireNoDrops(t, l)
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

// placements counts connections: those of each server, and all.
type placements struct {
	at  map[string]uint32
	all uint32
}

// count returns the placements so far.
func (c *customers) count(t *testing.T) placements {
	t.Helper()
	services, err := c.view.Services() // without shares, which take long to read
	must(t, err)
	p := placements{at: map[string]uint32{}}
	for _, server := range services[0].Servers {
		if server.Inferred != nil {
			p.all += server.Inferred.Placed
			p.at[server.Name] = server.Inferred.Placed
		}
	}
	return p
}

// since returns the placements after earlier ones.
func (p placements) since(before placements) placements {
	at := map[string]uint32{}
	for server, n := range p.at {
		at[server] = n - before.at[server]
	}
	return placements{at, p.all - before.all}
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

// awaitShares waits until each faulty server has got half of its share of the last 80 connections, or
// more. It fails the test if that takes a server too many connections.
func (c *customers) awaitShares(t *testing.T, faults []serverFault, ended time.Time) {
	t.Helper()
	const step, window = 10, 80
	counts := []placements{c.count(t)}
	for waiting := faults; len(waiting) > 0; {
		c.placed(t, step)
		counts = append(counts, c.count(t))
		now := counts[len(counts)-1]
		last, connections := now.since(counts[max(0, len(counts)-1-window/step)]), int(now.all-counts[0].all)
		waiting = slices.DeleteFunc(slices.Clone(waiting), func(f serverFault) bool {
			back := last.all >= window && 16*last.at[f.server] >= last.all
			if back {
				t.Logf("%s: back after %d connections, %.1f s", f.name, connections, time.Since(ended).Seconds())
			} else if connections >= f.back {
				t.Fatalf("%s: not back after %d connections: %v", f.name, connections, counts)
			}
			return back
		})
	}
}
