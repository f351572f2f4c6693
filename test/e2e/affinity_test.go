// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// TestAffinity gives services an affinity by client while connections are open. These stay with
// their servers. New connections of a client all come to one server, through both balancers, and
// those of several clients to all servers. Datagrams to the same VIP come to the same server. A
// trace names the client. Connections outlive a move to the other balancer, which looks for them in
// the client's row.
func TestAffinity(t *testing.T) {
	t.Parallel()
	l := shared(t, topology("http6-encap", "http4-encap", "echo6-encap"))
	http6, http4, echo6 := service(t, l, "http6-encap"), service(t, l, "http4-encap"), service(t, l, "echo6-encap")
	c := newClient(l)
	before := open(t, l, 20, http6, http4)
	reconfigure(t, l, func(cfg *desired.Balancer) {
		for i := range cfg.Services {
			cfg.Services[i].Affinity = &desired.Affinity{
				By: desired.AffinityClient, Scope: desired.ScopeVIP, PrefixIPv4: 32, PrefixIPv6: 128,
			}
		}
	})
	before.rounds(t, 1)

	all := map[string]bool{}
	for range 16 {
		visits, err := c.visit(t.Context(), http4, 8) // from one new address
		must(t, err)
		if len(visits) != 1 {
			t.Errorf("the connections of one client come to %v", visits)
		}
		for server := range visits {
			all[server] = true
		}
	}
	if len(all) != 3 {
		t.Errorf("the connections of 16 clients come to %v", all)
	}

	from := lab.ClientAddresses(http6.VIP, 254)[253] // which has no earlier flows
	servers := map[string]bool{}
	for range 12 {
		servers[echoFrom(t, l, from, echo6)] = true
		server, _, err := c.from(from, http6).get(t.Context(), http6, "/")
		must(t, err)
		servers[server] = true
	}
	if len(servers) != 1 {
		t.Errorf("datagrams and connections of one client to a VIP come to %v", servers)
	}
	foreseen := command(t, l, "lb1", segue, "trace", "-i", l.Node("lb1").Instance(), "tcp", "[2001:db8:c::2]:7", http6.Address().String())
	if !strings.Contains(foreseen, " of clients 2001:db8:c::2/128: ") {
		t.Errorf("a trace does not name the client:\n%s", foreseen)
	}

	affine := open(t, l, 20, http6, http4)
	must(t, l.SetNextHops("lb2"))
	for _, live := range []*load{before, affine} {
		live.rounds(t, 2)
		live.requireUnbroken(t)
	}
}

// echoFrom sends a datagram from an IPv6 address, which no interface needs to have, and a new port.
// It returns the server that echoes the datagram.
func echoFrom(t *testing.T, l *lab.Lab, from netip.Addr, s lab.Service) (server string) {
	t.Helper()
	freely := func(_, _ string, c syscall.RawConn) (err error) {
		errControl := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1)
		})
		return errors.Join(errControl, err)
	}
	must(t, l.Node("client").Do(func() error {
		dialer := net.Dialer{Control: freely, LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
		conn, err := dialer.DialContext(t.Context(), "udp", s.Address().String())
		if err != nil {
			return err
		}
		defer conn.Close()
		server, err = exchange(conn, []byte("hello"))
		return err
	}))
	return server
}
