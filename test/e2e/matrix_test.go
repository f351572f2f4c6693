// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// TestEveryEncapsulation sends requests for every encapsulation, family and protocol, through both
// balancers. The datagrams of a flow go to one server.
func TestEveryEncapsulation(t *testing.T) {
	t.Parallel()
	whole := lab.DefaultTopology()
	whole.Name, whole.Servers = labName, 3
	l := up(t, whole)
	c := newClient(l)
	for _, s := range l.Topology.Services {
		t.Run(s.Name, func(t *testing.T) {
			served := map[string]int{}
			for i := range 60 {
				var server string
				var err error
				if s.Protocol == desired.UDP {
					server, err = c.echo(t.Context(), s, fmt.Appendf(nil, "datagram %d of %s", i, s.Name))
				} else {
					server, _, err = c.get(t.Context(), s, "/")
				}
				must(t, err)
				served[server]++
			}
			for _, server := range nodes(l, lab.RoleServer) {
				if served[server] == 0 {
					t.Errorf("%s served none of 60 requests: %v", server, served)
				}
			}
			if s.Protocol == desired.UDP {
				requireTogether(t, l, s)
			}
		})
	}
	for _, name := range nodes(l, lab.RoleBalancer) {
		counted := packetCounts(t, l.Node(name))
		if counted["forward_new"] == 0 || counted["forward_known"] == 0 {
			t.Errorf("%s forwarded nothing: %v", name, counted)
		}
		for label, n := range counted.with("") {
			// The host's own traffic is only neighbour discovery. All other packets are for VIPs.
			expected := []string{"forward_new", "forward_known", "forward_hunt", "return_create", "return_remove",
				"take_probe", "pass_not_ip", "pass_not_for_host", "pass_not_vip"}
			if !slices.Contains(expected, label) {
				t.Errorf("%s: %d packets are counted as %s", name, n, label)
			}
		}
	}
	requireNoDrops(t, l)
}

// requireTogether requires that the datagrams of a flow go to one server.
func requireTogether(t *testing.T, l *lab.Lab, s lab.Service) {
	t.Helper()
	for range 20 {
		conn, err := l.Node("client").Dial(t.Context(), "udp", s.Address().String())
		must(t, err)
		first := ""
		for range 10 {
			server, err := exchange(conn, []byte("hello"))
			must(t, err)
			if first == "" {
				first = server
			}
			if server != first {
				t.Errorf("%s: datagrams of %s went to %s and %s", s.Name, conn.LocalAddr(), first, server)
			}
		}
		conn.Close()
	}
}
