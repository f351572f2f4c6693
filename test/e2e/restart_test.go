// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// upUnderLoad builds a lab whose services are in use, by long and by short connections.
func upUnderLoad(t *testing.T) (*lab.Lab, *load, *visitors) {
	t.Helper()
	l := shared(t, topology(mixed...))
	return l, open(t, l, 100, l.Topology.Services...), startVisitors(t, l, 4, l.Topology.Services...)
}

// requireUnnoticed fails the test if a connection or a request has failed, or if a packet is
// missing.
func requireUnnoticed(t *testing.T, l *lab.Lab, live *load, visitors *visitors) {
	t.Helper()
	live.requireUnbroken(t)
	visitors.requireContent(t)
	requireNoDrops(t, l)
	live.stop()
	visitors.stop()
	requireAllDelivered(t, l)
}

// killBalancers kills the balancers' processes under load and starts them again. New connections
// are counted under the reason opening, and existing connections continue.
func killBalancers(t *testing.T, l *lab.Lab, live *load, visitors *visitors, opening string) {
	t.Helper()
	for range 2 {
		for _, name := range nodes(l, lab.RoleBalancer) {
			must(t, l.Process(name, "lb").Kill())
			before := packetCounts(t, l.Node(name))
			live.rounds(t, 1)
			visitors.more(t, 50)
			if grown := packetCounts(t, l.Node(name)).since(t, before); grown[opening] == 0 || grown["forward_known"] == 0 {
				t.Errorf("%s did not go on without its process: %v", name, grown)
			}
			must(t, l.Process(name, "lb").Start(t.Context()))
			live.rounds(t, 1)
			visitors.more(t, 50)
			if grown := packetCounts(t, l.Node(name)).since(t, before); grown["forward_recover"] > 0 {
				t.Errorf("%s forgot what it knew: %v", name, grown)
			}
		}
	}
}

// TestBalancersAreKilled kills balancers' processes under load. It affects no packets.
func TestBalancersAreKilled(t *testing.T) {
	t.Parallel()
	l, live, visitors := upUnderLoad(t)
	killBalancers(t, l, live, visitors, "forward_new")
	requireUnnoticed(t, l, live, visitors)
}

// TestStopsAndStartsUnderLoad stops balancers as an operator would. The data path keeps working
// until a process that can take it over has started.
func TestStopsAndStartsUnderLoad(t *testing.T) {
	t.Parallel()
	l, live, visitors := upUnderLoad(t)
	lb, n := l.Process("lb1", "lb"), l.Node("lb1")
	path := filepath.Join("/run/segue/lab", l.Name, "conf", "lb1-balancer.yaml")
	if out, err := n.Run(t.Context(), segue, "lb", "-c", path); err == nil || !strings.Contains(out, "is already running") {
		t.Errorf("a second process of the instance: %v: %s", err, out)
	}
	must(t, lb.Stop())
	before := status(t, n)
	goesOn := func(when string) {
		t.Helper()
		counted := packetCounts(t, n)
		live.rounds(t, 1)
		visitors.more(t, 50)
		if grown := packetCounts(t, n).since(t, counted); grown["forward_new"] == 0 || grown["forward_known"] == 0 || grown["forward_recover"] > 0 {
			t.Errorf("%s: %v", when, grown)
		}
	}
	goesOn("stopped")

	cfg := n.BalancerConfig()
	cfg.Node.Limits.Servers = 70
	must(t, n.WriteBalancerConfig(cfg))
	if err := lb.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "segue lb detach "+n.Instance()) {
		t.Errorf("a start with other limits: error %v", err)
	}
	if after := status(t, n); after.Program.ID != before.Program.ID || after.Attachment == nil {
		t.Errorf("after a start that was refused: program %+v, attached %+v; before %+v", after.Program, after.Attachment, before.Program)
	}
	goesOn("after a start that was refused")

	// The changed configuration takes effect, and nothing else changes.
	for _, name := range nodes(l, lab.RoleBalancer) {
		must(t, l.Process(name, "lb").Stop())
		cfg := l.Node(name).BalancerConfig()
		setWeight(&cfg, "s1", 0)
		must(t, l.Node(name).WriteBalancerConfig(cfg))
		must(t, l.Process(name, "lb").Start(t.Context()))
	}
	goesOn("started again")
	must(t, newClient(l).spread(t.Context(), "s2", "s3"))
	requireUnnoticed(t, l, live, visitors)
}

// TestAgentsAreKilled kills the agents' processes under load and starts them again.
func TestAgentsAreKilled(t *testing.T) {
	t.Parallel()
	l, live, visitors := upUnderLoad(t)
	for _, name := range nodes(l, lab.RoleServer) {
		must(t, l.Process(name, "agent").Kill())
		before := packetCounts(t, l.Node(name))
		live.rounds(t, 1)
		visitors.more(t, 50)
		if grown := packetCounts(t, l.Node(name)).since(t, before); grown.with("deliver_").sum() == 0 {
			t.Errorf("%s did not go on without its agent: %v", name, grown)
		}
		must(t, l.Process(name, "agent").Start(t.Context()))
		live.rounds(t, 1)
		visitors.more(t, 50)
		packetCounts(t, l.Node(name)).since(t, before)
	}
	requireUnnoticed(t, l, live, visitors)
}

var reloads = flag.Uint("reloads", 8, "how often TestReloadsUnderLoad reloads")

// TestReloadsUnderLoad reloads repeatedly, with different weights each time.
func TestReloadsUnderLoad(t *testing.T) {
	t.Parallel()
	l, live, visitors := upUnderLoad(t)
	for i := range uint32(*reloads) {
		reconfigure(t, l, func(cfg *desired.Balancer) {
			setWeight(cfg, "s1", 1+i%3)
			setWeight(cfg, "s2", i%2)
		})
		visitors.more(t, 10)
	}
	live.rounds(t, 1)
	requireUnnoticed(t, l, live, visitors)
}

// TestBadConfigurations reloads invalid configurations. The balancer reports the reason in the log
// and in its status, and continues as before.
func TestBadConfigurations(t *testing.T) {
	t.Parallel()
	l := shared(t, topology(mixed...))
	balancer := l.Process("lb1", "lb")
	pid, _ := balancer.PID()
	cfg := l.Node("lb1").BalancerConfig()
	must(t, l.Node("lb1").WriteBalancerConfig(cfg))
	path := filepath.Join("/run/segue/lab", l.Name, "conf", "lb1-balancer.yaml")
	good, err := os.ReadFile(path)
	must(t, err)
	c := newClient(l)
	for _, bad := range []struct{ name, old, new, logged string }{
		{"no YAML", "services:", "services: [", "yaml"},
		{"unknown field", "protocol: tcp", "protocol: tcp\n    colour: blue", "services[0].colour"},
		{"port", "port: 80", "port: 70000", "services[0].port"},
		{"encapsulation", "encapsulation: gre", "encapsulation: vxlan", "services[2].encapsulation"},
		{"locator missing", `, locator: "fd00:5:0:1::/64"`, "", "services[0].servers[0].locator"},
		{"VIP", `vip: "203.0.113.3"`, `vip: "224.0.0.1"`, "services[2].vip"},
		{"interface cannot change", `interface: "eth0"`, `interface: "lo"`, "node.interface"},
		{"empty", string(good), "", "the file is empty"},
	} {
		t.Run(bad.name, func(t *testing.T) {
			text := strings.Replace(string(good), bad.old, bad.new, 1)
			if text == string(good) {
				t.Fatalf("%q is not in the configuration:\n%s", bad.old, good)
			}
			must(t, os.WriteFile(path, []byte(text), 0o644))
			logged, counted := len(readLog(t, balancer)), packetCounts(t, l.Node("lb1"))
			must(t, balancer.Reload(t.Context()))
			answer := readLog(t, balancer)[logged:]
			if !strings.Contains(answer, "reload failed") || !strings.Contains(answer, bad.logged) {
				t.Errorf("the log does not tell %q: %s", bad.logged, answer)
			}
			requireRefused(t, l.Node("lb1"), path, bad.logged)
			if now, alive := balancer.PID(); !alive || now != pid {
				t.Fatal("the balancer has ended")
			}
			for _, s := range l.Topology.Services {
				_, err := c.visit(t.Context(), s, 10)
				must(t, err)
			}
			packetCounts(t, l.Node("lb1")).since(t, counted)
		})
	}
	must(t, os.WriteFile(path, good, 0o644))
	reload(t, l, "lb1")
	requireAccepted(t, l.Node("lb1"), path)
	badAgentConfiguration(t, l)
	requireNoDrops(t, l)
}

// badAgentConfiguration reloads an agent with a change that needs a restart.
func badAgentConfiguration(t *testing.T, l *lab.Lab) {
	t.Helper()
	n := l.Node("s1")
	cfg := n.AgentConfig()
	must(t, n.WriteAgentConfig(cfg))
	cfg.Node.Interface = "lo"
	path := filepath.Join("/run/segue/lab", l.Name, "conf", "s1-agent.yaml")
	good, err := os.ReadFile(path)
	must(t, err)
	must(t, n.WriteAgentConfig(cfg))
	must(t, l.Process("s1", "agent").Reload(t.Context()))
	requireRefused(t, n, path, `node.interface "lo": a change from "eth0" needs a restart`)
	must(t, os.WriteFile(path, good, 0o644))
	reload(t, l, "s1")
	requireAccepted(t, n, path)
}

// requireRefused requires that status shows why the last reload was refused, and that segue check
// says that the file would be refused again.
func requireRefused(t *testing.T, n *lab.Node, file, problem string) {
	t.Helper()
	c := status(t, n).Configuration
	if c == nil || c.File != file || c.Refused == nil ||
		!strings.Contains(strings.Join(c.Refused.Problems, "\n"), problem) {
		t.Errorf("the status of %s does not tell %q: %+v", n.Name, problem, c)
	}
	out, err := cli(t, segue, "check", "-c", file, "--against", n.Instance())
	if err == nil || !strings.Contains(out, problem) {
		t.Errorf("segue check: error %v, and no %q in:\n%s", err, problem, out)
	}
}

// requireAccepted requires the opposite of requireRefused.
func requireAccepted(t *testing.T, n *lab.Node, file string) {
	t.Helper()
	if c := status(t, n).Configuration; c == nil || c.Refused != nil {
		t.Errorf("status of %s after a reload: %+v", n.Name, c)
	}
	mustCLI(t, segue, "check", "-c", file, "--against", n.Instance())
}
