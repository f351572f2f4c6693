// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/lab"
)

var (
	historyChanges     = flag.Int("history.changes", 4, "how often TestHistoryKeepsConnections changes the servers")
	historyServers     = flag.Int("history.servers", 13, "how many servers stay in TestHistoryKeepsConnections")
	historyConnections = flag.Int("history.connections", 100,
		"how many connections of each service TestHistoryKeepsConnections keeps open")
)

// withoutFlowTable are the persistence methods that find the server of a flow by its column.
var withoutFlowTable = []desired.Persistence{desired.PersistenceStateless, desired.PersistenceHint}

// statelessServices returns services without a flow table, in each encapsulation.
func statelessServices(candidates int) []lab.Service {
	return columnServices(candidates, desired.PersistenceStateless)
}

// columnServices returns services with the persistence: some that hunt, in each encapsulation, one
// with placement hash, and at last one that infers.
func columnServices(candidates int, persistence desired.Persistence) []lab.Service {
	services := huntingServices(candidates)
	hash := services[0]
	hash.Name, hash.Port, hash.Placement, hash.Candidates = "hash6", 81, desired.PlacementHash, 0
	infers := hash
	infers.Name, infers.Port, infers.Placement, infers.Candidates = "infer6", 83, desired.PlacementInfer, candidates
	services = append(services, hash, infers)
	for i := range services {
		services[i].Persistence = persistence
	}
	return services
}

// refusing makes every second server refuse connections unless it must accept them. Then all
// columns of a row have connections, however few there are: half as many in each as in the one
// before.
func refusing(topology lab.Topology) lab.Topology {
	for i := range topology.Services {
		s := &topology.Services[i]
		s.Accept = desired.Accept{Policy: desired.AcceptAlways}
		for server := 2; server <= topology.Servers; server += 2 {
			s.Exceptions = append(s.Exceptions, lab.Exception{
				Server: fmt.Sprintf("s%d", server), Accept: desired.Accept{Policy: desired.AcceptNever},
			})
		}
	}
	return topology
}

// TestStatelessTraffic sends requests, downloads and uploads to services without a flow table.
// Each server gets some, and every byte is correct.
func TestStatelessTraffic(t *testing.T) {
	t.Parallel()
	l := up(t, hunting(statelessServices(4)...))
	c := newClient(l)
	for _, s := range l.Topology.Services {
		for _, size := range lab.Sizes {
			must(t, c.download(t.Context(), s, size))
			must(t, c.upload(t.Context(), s, size))
		}
		if _, err := c.visit(t.Context(), s, 40); err != nil {
			t.Errorf("%s: %v", s.Name, err)
		}
	}
	must(t, c.spread(t.Context(), nodes(l, lab.RoleServer)...))
	requireNoDrops(t, l)
}

// TestHistoryKeepsConnections changes the servers many times while connections are open: a server
// comes, or another one leaves. Then a balancer that was just started gets all packets. Without
// hints, it finds a connection exactly if the connection's server is in the history of its
// column.
//
// Section VI of SHELL computes that more than 5% of the connections are lost without a history (h
// = 1), and less than 1% with h = 3. The services h1 and h3 have the paper's two candidates.
// Nothing is random: the rows follow from the servers' names, and the ports are fixed.
func TestHistoryKeepsConnections(t *testing.T) {
	servers := *historyServers + 1 + (*historyChanges+1)/2
	t.Parallel()
	services := statelessServices(4)
	for i := range services {
		services[i].History = 4
		services[i].Buckets = 4099 // so that a change takes less time
	}
	for _, depth := range []int{1, 3} {
		s := services[0]
		s.Name, s.Port, s.Candidates, s.History = fmt.Sprint("h", depth), desired.Port(81+depth), 2, depth
		services = append(services, s)
	}
	topology := hunting(services...)
	topology.Servers = servers
	topology.Applications = []lab.Application{lab.Nginx}
	l := up(t, refusing(topology))
	all := nodes(l, lab.RoleServer)
	withServers := func(first, end int) func(*desired.Balancer) {
		return func(cfg *desired.Balancer) {
			cfg.Node.Limits.Hints = 0
			keepServers(cfg, append(all[:*historyServers:*historyServers], all[first:end]...)...)
		}
	}
	restartAnew(t, l, withServers(*historyServers, *historyServers+1))
	awaitServers(t, l)
	must(t, l.SetNextHops("lb1"))
	ports := make([]int, *historyConnections*len(services))
	for i := range ports {
		ports[i] = 20000 + i
	}
	live := openFrom(t, l, ports, time.Duration(len(ports))*time.Millisecond, l.Topology.Services...)
	places := placesOf(t, l, "lb1", live)
	for change := range *historyChanges {
		first, end := *historyServers+(change+1)/2, *historyServers+2+change/2
		reconfigure(t, l, withServers(first, end))
		live.rounds(t, 1)
	}
	startAnew(t, l, "lb2", "lb1")
	must(t, l.SetNextHops("lb2"))
	live.rounds(t, 2)
	requireHistory(t, l, live, places, all[*historyServers])
}

// requireHistory requires that exactly those connections are lost whose server was not in the
// history of its column after one of the changes. A server that has left is excepted.
func requireHistory(t *testing.T, l *lab.Lab, live *load, places []int, left string) {
	t.Helper()
	for _, s := range l.Topology.Services {
		beyond := beyondHistory(t, l, s, generationsOf(t, l, "lb2")[s.Name].Sets, live, places)
		lost, of := 0, 0
		for i, c := range live.connections {
			if c.service.Name != s.Name || c.server == left {
				continue
			}
			of++
			err := c.failure()
			if err != nil {
				lost++
			}
			if (err != nil) != beyond[i] {
				t.Errorf("beyond the history of its column: %v, error: %v: connection from %s to %s at %s",
					beyond[i], err, c.conn.LocalAddr(), s.Name, c.server)
			}
		}
		t.Logf("%s: %d of %d connections are lost", s.Name, lost, of)
		switch {
		case s.History == 1 && 20*lost <= of:
			t.Errorf("without a history, at most 5%% of the connections are lost: %d of %d", lost, of)
		case s.History > 1 && 100*lost >= of:
			t.Errorf("%s: 1%% of the connections or more are lost: %d of %d", s.Name, lost, of)
		}
	}
}

// restartAnew starts all balancers with a changed configuration and without what they knew.
func restartAnew(t *testing.T, l *lab.Lab, change func(*desired.Balancer)) {
	t.Helper()
	for _, name := range nodes(l, lab.RoleBalancer) {
		n, p := l.Node(name), l.Process(name, "lb")
		must(t, p.Stop())
		command(t, l, name, segue, "lb", "detach", n.Instance())
		cfg := n.BalancerConfig()
		change(&cfg)
		must(t, n.WriteBalancerConfig(cfg))
		must(t, p.Start(t.Context()))
	}
}

// startAnew removes a balancer with all that it knows, and starts it with the generations of
// another.
func startAnew(t *testing.T, l *lab.Lab, name, other string) {
	t.Helper()
	lb := l.Process(name, "lb")
	must(t, lb.Stop())
	command(t, l, name, segue, "lb", "detach", l.Node(name).Instance())
	text, err := os.ReadFile(generationsFile(l, other))
	must(t, err)
	must(t, os.WriteFile(generationsFile(l, name), text, 0o600))
	must(t, lb.Start(t.Context()))
}

// generationsFile returns the path of the file in which a balancer keeps its generations.
func generationsFile(l *lab.Lab, balancer string) string {
	node := l.Node(balancer).BalancerConfig().Node
	return serversets.File(node.State, node.Instance)
}
