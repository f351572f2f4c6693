// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// The outcomes of open connections when servers are removed and their balancer changes.
const (
	// ServerRemoved means that the connection's server was removed, so the connection had to break.
	ServerRemoved = "server removed"
	// Broken means that the connection's server is still there, but does not answer.
	Broken = "broken"
)

const (
	// atOnce is the number of connections that open at the same time.
	atOnce = 64
	// answerTimeout is the longest time that a request on an open connection may take.
	answerTimeout = 10 * time.Second
)

// longLived is a connection that stays open during a run.
type longLived struct {
	conn   net.Conn
	reader *bufio.Reader
	server string // that answered the first request
}

// change opens connections through the first balancer. Then it removes servers from all balancers,
// sends all traffic to the second balancer, and counts the connections that do not answer any more
// (6LB, section VI-B5). Run.Requests then counts connections. At the end, change restores the
// servers and the next hops.
func (b *rig) change(ctx context.Context, p planned) (run *Run, err error) {
	service := p.service()
	if err := b.lab.SetNextHops("lb1"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.restore(ctx)) }()
	connections, err := b.open(ctx, p.client(), service.Address(), p.Connections)
	defer closeAll(connections)
	if err != nil {
		return nil, err
	}
	removed := p.chooseRemoved()
	if err := b.removeServers(ctx, service.Name, removed); err != nil {
		return nil, err
	}
	if err := b.lab.SetNextHops("lb2"); err != nil {
		return nil, err
	}
	run = &Run{
		Case: p.Case.Name, Point: p.point, Seed: p.seed, Servers: p.present, Balancers: p.Balancers,
		Requests: uint64(len(connections)),
		Failures: map[string]uint64{ServerRemoved: 0, Broken: 0},
		Shares:   []Share{}, Counters: map[string]uint64{},
	}
	run.addConnections(connections, removed)
	return run, nil
}

func (p planned) service() lab.Service {
	services := p.topology(notBuilt, p.Case).Services
	i := slices.IndexFunc(services, func(s lab.Service) bool { return s.Name == p.Case.Name })
	return services[i]
}

// chooseRemoved draws the servers to remove. All cases of a seed have the same ones.
func (p planned) chooseRemoved() (servers []string) {
	random := rand.New(rand.NewPCG(p.seed, 0))
	for _, i := range random.Perm(p.present)[:p.removed] {
		servers = append(servers, serverName(i+1))
	}
	return servers
}

// client returns the client address of the run. Each run of a case has its own address, because
// flow tables still have connections of earlier runs, whose ports are soon used again.
func (p planned) client() netip.Addr {
	addresses := lab.ClientAddresses(p.service().VIP, clientAddresses)
	run := slices.Index(p.Points, p.point)*p.Seeds + int(p.seed)
	return addresses[run%len(addresses)]
}

// open opens n connections with one request each, whose response names the server. After an error,
// it returns the connections that are open already, and the caller must close them.
func (b *rig) open(
	ctx context.Context, from netip.Addr, to netip.AddrPort, n int,
) ([]*longLived, error) {
	all := make([]*longLived, n)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for i := range all {
		group.Go(func() error {
			conn, err := b.lab.Node("client").DialTCP(ctx, from, to)
			if err != nil {
				return fmt.Errorf("connection %d: %w", i+1, err)
			}
			all[i] = &longLived{conn: conn, reader: bufio.NewReader(conn)}
			if all[i].server, err = all[i].ask(); err != nil {
				return fmt.Errorf("connection %d: %w", i+1, err)
			}
			return nil
		})
	}
	err := group.Wait()
	return slices.DeleteFunc(all, func(c *longLived) bool { return c == nil }), err
}

func closeAll(connections []*longLived) {
	for _, c := range connections {
		c.conn.Close()
	}
}

// ask sends a request without work, and returns the server that answers.
func (c *longLived) ask() (server string, err error) {
	if err := c.conn.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return "", err
	}
	const request = "GET /?work=0s HTTP/1.1\r\nHost: testbed\r\nConnection: keep-alive\r\n\r\n"
	if _, err := io.WriteString(c.conn, request); err != nil {
		return "", err
	}
	response, err := http.ReadResponse(c.reader, nil)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	_, err = io.Copy(io.Discard, response.Body)
	return response.Header.Get(serverHeader), err
}

// removeServers removes servers from a service on all balancers.
func (b *rig) removeServers(ctx context.Context, service string, servers []string) error {
	return b.reconfigure(ctx, func(c *desired.Balancer) {
		for i := range c.Services {
			if s := &c.Services[i]; s.Name == service {
				s.Servers = slices.DeleteFunc(s.Servers, func(server desired.Server) bool {
					return slices.Contains(servers, server.Name)
				})
			}
		}
	})
}

// restore undoes a change. It restarts the applications, because a server keeps a broken connection
// open, and soon all workers would have one.
func (b *rig) restore(ctx context.Context) error {
	if err := b.reconfigure(ctx, func(*desired.Balancer) {}); err != nil {
		return err
	}
	for _, n := range b.lab.Nodes {
		if n.Role != lab.RoleServer {
			continue
		}
		if _, err := b.lab.Restart(ctx, n.Name, []string{string(n.Application)}, false); err != nil {
			return err
		}
	}
	var all []string
	for i := range b.lab.Topology.Balancers {
		all = append(all, fmt.Sprintf("lb%d", i+1))
	}
	return b.lab.SetNextHops(all...)
}

// reconfigure applies the function change to each balancer's configuration from the start of the
// lab, and gives the balancer the result.
func (b *rig) reconfigure(ctx context.Context, change func(*desired.Balancer)) error {
	for _, n := range b.lab.Nodes {
		if n.Role != lab.RoleBalancer {
			continue
		}
		c := n.BalancerConfig()
		change(&c)
		if err := n.WriteBalancerConfig(c); err != nil {
			return err
		}
		if err := b.lab.Process(n.Name, "lb").Reload(ctx); err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
	}
	return nil
}

// addConnections sends another request on each connection. It counts the connections whose server
// does not answer this request: by ServerRemoved if the server is among the removed ones, otherwise
// by Broken and as failed.
func (r *Run) addConnections(all []*longLived, removed []string) {
	for _, c := range all {
		server, err := c.ask()
		switch {
		case err == nil && server == c.server: // the connection is intact
		case slices.Contains(removed, c.server):
			r.Failures[ServerRemoved]++
		default:
			r.Failures[Broken]++
			r.Failed++
		}
	}
}
