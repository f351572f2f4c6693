// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/lab"
)

// TestPolledTurns gives one of three servers a capacity of 400 and the others 100, which only their
// agents know. With placement weighted-round-robin, the balancer polls them, and the server gets
// two thirds of the connections.
func TestPolledTurns(t *testing.T) {
	t.Parallel()
	l := up(t, topology("http6-insert"))
	s := service(t, l, "http6-insert")
	answerPolls(t, l)
	must(t, l.SetNextHops("lb1"))
	const connections = 300
	// A weight is capacity / (busy + 1), and polls see a few connections. With equal weights, 100
	// connections would be expected.
	eventually(t, func() error {
		report := generate(t, l, "--rate", "300", "--requests", fmt.Sprint(connections),
			fmt.Sprintf("http://%s/1kB", s.Address()))
		if report.Succeeded != connections {
			t.Fatalf("%d of %d requests succeeded: %v", report.Succeeded, connections, report.Errors)
		}
		for _, server := range report.Servers {
			if n := server.Responses; server.Name == "s1" && (n < 160 || n > 240) {
				return fmt.Errorf("s1 has %d of %d connections, want about 200", n, connections)
			}
		}
		return nil
	})
	requireNoDrops(t, l)
}

// answerPolls gives all nodes a key and makes the balancers poll the servers.
func answerPolls(t *testing.T, l *lab.Lab) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "key")
	must(t, os.WriteFile(file, []byte("000102030405060708090a0b0c0d0e0f\n"), 0o600))
	hosts := map[string]netip.Addr{}
	for _, name := range nodes(l, lab.RoleServer) {
		n := l.Node(name)
		hosts[name] = n.IPv6
		cfg := n.AgentConfig()
		cfg.Node.SignalKey = file
		cfg.Poll.Listen = netip.AddrPortFrom(n.IPv6, desired.DefaultPollPort).String()
		cfg.Services[0].Load = desired.Source{Kind: desired.LoadConnections, Capacity: 100}
		if name == "s1" {
			cfg.Services[0].Load.Capacity = 400
		}
		must(t, n.WriteAgentConfig(cfg))
		agent := l.Process(name, "agent")
		must(t, agent.Stop())
		must(t, agent.Start(t.Context()))
	}
	reconfigure(t, l, func(cfg *desired.Balancer) {
		cfg.Node.SignalKey = file
		svc := &cfg.Services[0]
		svc.Placement = desired.PlacementWeightedTurns
		for i := range svc.Servers {
			svc.Servers[i].Host = hosts[svc.Servers[i].Name]
		}
	})
}
