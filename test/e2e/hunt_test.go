// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// huntingServices returns services with placement hunt, one for each way to carry a segment list:
// IPv6 inserted, IPv6 encapsulated, and IPv4, which can only be encapsulated.
func huntingServices(candidates int) []lab.Service {
	service := func(name, vip string, encapsulation desired.Encapsulation) lab.Service {
		return lab.Service{
			Name: fmt.Sprintf("%s-%d", name, candidates), VIP: netip.MustParseAddr(fmt.Sprintf(vip, candidates)),
			Port: 80, Protocol: desired.TCP, Encapsulation: encapsulation,
			Placement: desired.PlacementHunt, Candidates: candidates,
		}
	}
	return []lab.Service{
		service("insert6", "2001:db8:80::a%d", desired.SRv6Insert),
		service("encap6", "2001:db8:80::b%d", desired.SRv6Encap),
		service("encap4", "203.0.113.8%d", desired.SRv6Encap),
	}
}

// hunting returns the topology of a lab with services that hunt. Its servers run nginx and Apache
// alternately.
func hunting(services ...lab.Service) lab.Topology {
	t := topology()
	t.Applications = []lab.Application{lab.Nginx, lab.Apache}
	t.Apache.Workers = 256 // an open connection occupies a worker, and some tests have hundreds
	t.Services = services
	return t
}

// accept gives all servers another accept policy while they run.
func accept(t *testing.T, l *lab.Lab, policy desired.Accept) {
	t.Helper()
	for _, name := range nodes(l, lab.RoleServer) {
		reagent(t, l, name, func(s *desired.AgentService) { s.Accept = policy })
	}
}

// reagent changes the agent's configuration of each service on a server while the agent runs.
func reagent(t *testing.T, l *lab.Lab, server string, change func(*desired.AgentService)) {
	t.Helper()
	cfg := l.Node(server).AgentConfig()
	for i := range cfg.Services {
		change(&cfg.Services[i])
	}
	must(t, l.Node(server).WriteAgentConfig(cfg))
	reload(t, l, server)
}

// offered counts the connections offered to a server by outcome. It also contains the load, if the
// load is known.
type offered struct {
	accepted, refused, forced, load int
}

// offers returns the offers of a service at a server.
func offers(t *testing.T, l *lab.Lab, server, service string) (o offered) {
	t.Helper()
	states, err := l.Node(server).AcceptStates()
	must(t, err)
	state := states[service]
	if state == nil {
		t.Fatalf("%s can be offered no connection of %s", server, service)
	}
	if state.Load != nil {
		o.load = int(state.Load.Busy)
	}
	o.accepted, o.refused, o.forced = int(state.Offers["accepted"]), int(state.Offers["refused"]), int(state.Offers["forced"])
	return o
}

// awaitShown returns when the load source of a server shows n connections of a service. A
// connection that leaves the accept queue is in no number until the next reading. So the queue must
// be empty.
func awaitShown(t *testing.T, l *lab.Lab, server, service string, n int) {
	t.Helper()
	awaitLoad(t, l, server, service, n)
	awaitQueue(t, l, server, 0)
	awaitLoad(t, l, server, service, n)
}

// awaitLoad returns when a server has n connections of a service.
func awaitLoad(t *testing.T, l *lab.Lab, server, service string, n int) {
	t.Helper()
	eventually(t, func() error {
		if o := offers(t, l, server, service); o.load != n {
			return fmt.Errorf("%s has %d connections of %s, want %d", server, o.load, service, n)
		}
		return nil
	})
}
