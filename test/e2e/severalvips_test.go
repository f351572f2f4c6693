// SPDX-License-Identifier: Apache-2.0

package e2e

import (
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
