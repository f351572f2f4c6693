// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// TestSeveralVIPsAndPorts gives a service that hunts VIPs of both families and two ports. Clients
// reach it at each, and the servers decide about all connections by one accept policy.
func TestSeveralVIPsAndPorts(t *testing.T) {
	t.Parallel()
	topology := topology("hunt6-encap", "hunt4-encap")
	topology.Balancers, topology.Servers = 1, 2
	l := up(t, topology)
	s, other := service(t, l, "hunt6-encap"), service(t, l, "hunt4-encap")
	vips, ports := []netip.Addr{s.VIP, other.VIP}, []desired.Port{s.Port, 8080}
	servers := nodes(l, lab.RoleServer)
	for _, name := range servers {
		cfg := l.Node(name).AgentConfig()
		cfg.Services = slices.DeleteFunc(cfg.Services, func(s desired.AgentService) bool { return s.Name == other.Name })
		cfg.Services[0].VIPs, cfg.Services[0].Ports = vips, ports
		must(t, l.Node(name).WriteAgentConfig(cfg))
		reload(t, l, name)
		tellName(t, l, name, ports[1])
	}
	reconfigure(t, l, func(cfg *desired.Balancer) {
		cfg.Services = slices.DeleteFunc(cfg.Services, func(s desired.Service) bool { return s.Name == other.Name })
		cfg.Services[0].VIPs, cfg.Services[0].Ports = vips, ports
	})
	awaitServers(t, l)
	offered := func() (connections uint64) {
		for _, name := range servers {
			states, err := l.Node(name).AcceptStates()
			must(t, err)
			connections += states[s.Name].Offered
		}
		return connections
	}
	const each = 10
	before := offered()
	for _, vip := range vips {
		s.VIP = vip
		_, err := newClient(l).visit(t.Context(), s, each)
		must(t, err)
		for range each {
			if name := nameAt(t, l, netip.AddrPortFrom(vip, ports[1].Number())); !slices.Contains(servers, name) {
				t.Errorf("%q answers at port %s of %s", name, ports[1], vip)
			}
		}
	}
	if n, least := offered()-before, uint64(4*each); n < least {
		t.Errorf("servers were offered %d connections, want at least %d", n, least)
	}
	requireNoDrops(t, l)
}

// tellName makes a server tell its name to each client of a port.
func tellName(t *testing.T, l *lab.Lab, server string, port desired.Port) {
	t.Helper()
	listener, err := l.Node(server).Listen(t.Context(), "tcp", ":"+port.String())
	must(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(conn, server) // a client that lacks it fails the test
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() {
		_ = listener.Close()
		<-ended
	})
}

// nameAt returns the name that a server tells a new client of an address.
func nameAt(t *testing.T, l *lab.Lab, address netip.AddrPort) string {
	t.Helper()
	conn, err := l.Node("client").Dial(t.Context(), "tcp", address.String())
	must(t, err)
	defer conn.Close()
	must(t, conn.SetDeadline(time.Now().Add(patience)))
	name, err := io.ReadAll(conn)
	must(t, err)
	return string(name)
}

// TestSources lets only one address of the client reach a service. The other address gets no new
// connection, and the connection that it has stands still.
func TestSources(t *testing.T) {
	t.Parallel()
	topology := topology("http6-encap")
	topology.Balancers, topology.Servers = 1, 2
	l := up(t, topology)
	s := service(t, l, "http6-encap")
	from := lab.ClientAddresses(s.VIP, 2)
	open := func(address netip.Addr) *session {
		conn, err := l.Node("client").DialTCP(t.Context(), address, s.Address())
		must(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		opened := &session{conn: conn, reader: bufio.NewReader(conn)}
		opened.server, err = opened.ask()
		must(t, err)
		return opened
	}
	admitted, excluded := open(from[0]), open(from[1])
	reconfigure(t, l, func(cfg *desired.Balancer) {
		cfg.Services[0].Sources = []netip.Prefix{netip.PrefixFrom(from[0], from[0].BitLen())}
	})
	server, err := admitted.ask()
	must(t, err)
	if server != admitted.server {
		t.Errorf("a connection of %s has moved to %s", admitted.server, server)
	}
	open(from[0])
	dropped := func() uint64 { return packetCounts(t, l.Node("lb1"))["drop_source"] }
	before := dropped()
	_, err = io.WriteString(excluded.conn, "GET / HTTP/1.1\r\nHost: vip\r\n\r\n")
	must(t, err)
	eventually(t, func() error {
		if dropped() == before {
			return errors.New("no packet of the excluded client is dropped")
		}
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	refused := make(chan error, 1)
	go func() {
		_, err := l.Node("client").DialTCP(ctx, from[1], s.Address())
		refused <- err
	}()
	before = dropped()
	eventually(t, func() error {
		if dropped() == before {
			return errors.New("no SYN of the excluded client is dropped")
		}
		return nil
	})
	cancel()
	if err := <-refused; err == nil {
		t.Error("the excluded client has connected")
	}
	reconfigure(t, l, func(*desired.Balancer) {})
	if _, err := excluded.ask(); err != nil {
		t.Errorf("a client may reach the service again: %v", err)
	}
}
