// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// TestGenericXDP runs a balancer on an interface whose driver does not support XDP: a bridge with
// the node's link as its only port.
func TestGenericXDP(t *testing.T) {
	t.Parallel()
	topology := topology(append(slices.Clone(mixed), "echo6-encap", "echo4-gre")...)
	topology.Balancers = 1
	l := up(t, topology)
	lb := l.Process("lb1", "lb")
	must(t, lb.Stop())
	command(t, l, "lb1", segue, "lb", "detach", l.Node("lb1").Instance())
	n := l.Node("lb1")
	script := `set -e
		mac=$(cat /sys/class/net/eth0/address)
		ip link add uplink address $mac mtu $(cat /sys/class/net/eth0/mtu) type bridge
		routes6=$(ip -6 route show dev eth0 | grep via); routes4=$(ip -4 route show dev eth0 | grep via)
		ip addr flush dev eth0
		ip link set eth0 master uplink
		ip link set uplink up
		ip addr add ` + n.IPv6.String() + `/64 dev uplink nodad
		ip addr add ` + n.IPv4.String() + `/24 dev uplink
		echo "$routes6" | while read r; do ip -6 route replace $r dev uplink; done
		echo "$routes4" | while read r; do ip -4 route replace $r dev uplink; done`
	command(t, l, "lb1", "sh", "-c", script)
	cfg := n.BalancerConfig()
	cfg.Node.Interface = "uplink"
	must(t, n.WriteBalancerConfig(cfg))
	must(t, lb.Start(t.Context()))
	log := readLog(t, lb)
	for _, part := range []string{"level=WARN", "no native XDP", "mode=generic", "takes them out below a bridge"} {
		if !strings.Contains(log, part) {
			t.Errorf("the log does not have %q: %s", part, log)
		}
	}
	must(t, newClient(l).spread(t.Context(), nodes(l, lab.RoleServer)...))
	for _, server := range nodes(l, lab.RoleServer) {
		sendWhatFits(t, l, server)
	}
	for _, s := range l.Topology.Services {
		if s.Protocol == desired.UDP {
			sendReordered(t, l, s, bytes.Repeat([]byte("0123456789abcdef"), 4000/16))
			continue
		}
		transfer(t, l, s)
	}
	requireNoDrops(t, l)
}

// TestChosenXDPMode changes the mode of XDP of a balancer and of a server's agent, both of which
// can do native XDP, and changes it back.
func TestChosenXDPMode(t *testing.T) {
	t.Parallel()
	topology := topology("http6-encap", "http4-gre")
	topology.Balancers = 1
	l := up(t, topology)
	c := newClient(l)
	for _, mode := range []desired.XDPMode{desired.XDPGeneric, desired.XDPNative} {
		n, server := l.Node("lb1"), l.Node("s1")
		balancer, agent := n.BalancerConfig(), server.AgentConfig()
		balancer.Node.XDPMode, agent.Node.XDPMode = mode, mode
		must(t, n.WriteBalancerConfig(balancer))
		must(t, server.WriteAgentConfig(agent))
		for _, p := range []*lab.Process{l.Process("lb1", "lb"), l.Process("s1", "agent")} {
			must(t, p.Stop())
			must(t, p.Start(t.Context()))
			if log := readLog(t, p); strings.Contains(log, "no native XDP") {
				t.Errorf("%s warns of the mode: %s", p, log)
			}
		}
		awaitServers(t, l)
		for _, node := range []*lab.Node{n, server} {
			status := command(t, l, node.Name, segue, "status", "-i", node.Instance())
			if !strings.Contains(status, string(mode)+" XDP on eth0") {
				t.Errorf("with %s, the status of %s is %s", mode, node.Name, status)
			}
		}
		must(t, c.spread(t.Context(), nodes(l, lab.RoleServer)...))
	}
	requireNoDrops(t, l)
}
