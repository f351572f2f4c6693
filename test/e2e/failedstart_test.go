// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// wrongStart starts an instance in a wrong place.
type wrongStart struct {
	node    string   // the node of the instance
	command []string // the command with the instance's configuration file
	other   string   // a node with the same role
	// configure writes a configuration with another interface than that of the instance.
	configure func(iface string)
	byPackets []string // pinned maps that packets change
}

// requireRefused requires that the start fails in other network namespaces, and with an interface
// that does not exist, and that it changes nothing.
func (w *wrongStart) requireRefused(t *testing.T, l *lab.Lab) {
	t.Helper()
	const elsewhere = "works in another network namespace"
	before := w.state(t, l)
	for _, at := range []struct{ node, iface, want string }{
		{w.other, "eth0", elsewhere},
		{"client", "eth0", elsewhere},
		{w.node, "eth9", `"eth9": there is no such interface`},
	} {
		where := fmt.Sprintf("%s on %s of %s", w.node, at.iface, at.node)
		w.configure(at.iface)
		out, err := l.Node(at.node).Run(t.Context(), segue, w.command...)
		if err == nil || !strings.Contains(out, at.want) {
			t.Errorf("%s: error %v: %s; want %s", where, err, out, at.want)
		}
		before.RequireSame(t, where, w.state(t, l))
	}
}

// state describes the pinned objects without the maps that packets change.
func (w *wrongStart) state(t *testing.T, l *lab.Lab) datapathtest.State {
	t.Helper()
	state := datapathtest.ReadState(t, datapath.Dir(l.Node(w.node).Instance()))
	for _, name := range w.byPackets {
		delete(state, name)
	}
	return state
}

// wrongBalancer is a start of lb1 with other servers and services.
func wrongBalancer(t *testing.T, l *lab.Lab) *wrongStart {
	n := l.Node("lb1")
	return &wrongStart{
		node: n.Name, other: "lb2",
		command: []string{"lb", "-c", configFile(l, "lb1-balancer.yaml")},
		configure: func(iface string) {
			cfg := n.BalancerConfig()
			cfg.Node.Interface, cfg.Metrics.Listen = iface, ""
			cfg.Services = cfg.Services[1:]
			keepServers(&cfg, "s2", "s3")
			must(t, n.WriteBalancerConfig(cfg))
		},
		byPackets: []string{"flows", "pending", "reasons", "server_counters", "server_signals"},
	}
}

// wrongAgent is a start of the agent of s1 with other services, which accept no connections.
func wrongAgent(t *testing.T, l *lab.Lab) *wrongStart {
	n := l.Node("s1")
	return &wrongStart{
		node: n.Name, other: "s2",
		command: []string{"agent", "-c", configFile(l, "s1-agent.yaml")},
		configure: func(iface string) {
			cfg := n.AgentConfig()
			cfg.Node.Interface, cfg.Metrics.Listen = iface, ""
			cfg.Services = cfg.Services[2:]
			for i := range cfg.Services {
				cfg.Services[i].Accept = desired.Accept{Policy: desired.AcceptNever}
			}
			must(t, n.WriteAgentConfig(cfg))
		},
		byPackets: []string{"reasons", "agent_flows", "agent_balancers", "connections", "loads", "signals"},
	}
}

func configFile(l *lab.Lab, name string) string {
	return filepath.Join("/run/segue/lab", l.Name, "conf", name)
}

// The test kills the processes of a balancer and of an agent, and then starts them in wrong places
// with other configurations. Their data paths stay unchanged, and connections continue.
func TestFailedStartsUnderLoad(t *testing.T) {
	t.Parallel()
	topology := topology("http6-encap", "http4-gre")
	topology.Services = append(topology.Services, huntingServices(2)[1:]...) // IPv6 and IPv4
	l := up(t, topology)
	live := open(t, l, 120, l.Topology.Services...)
	must(t, l.Process("lb1", "lb").Kill())
	must(t, l.Process("s1", "agent").Kill())
	live.rounds(t, 1)
	counted := packetCounts(t, l.Node("lb1"))

	wrongBalancer(t, l).requireRefused(t, l)
	wrongAgent(t, l).requireRefused(t, l)

	live.rounds(t, 1)
	grown := packetCounts(t, l.Node("lb1")).since(t, counted)
	if grown["forward_known"] == 0 || grown["forward_recover"] > 0 {
		t.Errorf("lb1 has not gone on as before: %v", grown)
	}
	must(t, l.Node("lb1").WriteBalancerConfig(l.Node("lb1").BalancerConfig()))
	must(t, l.Node("s1").WriteAgentConfig(l.Node("s1").AgentConfig()))
	must(t, l.Process("lb1", "lb").Start(t.Context()))
	must(t, l.Process("s1", "agent").Start(t.Context()))
	live.rounds(t, 1)
	must(t, newClient(l).spread(t.Context(), "s1", "s2", "s3"))
	live.requireUnbroken(t)
	requireNoDrops(t, l)
}
