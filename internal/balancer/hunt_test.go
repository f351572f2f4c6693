// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/srv6"
)

// huntingOf makes a service hunt with the given number of candidates.
func huntingOf(svc desired.Service, selection desired.Selection, candidates int) desired.Service {
	svc.Placement, svc.Selection, svc.Candidates = desired.PlacementHunt, selection, candidates
	return svc
}

// hunting returns a configuration with services that hunt, with both SRv6 encapsulations and both
// families.
func hunting(selection desired.Selection, candidates int) *desired.Balancer {
	var servers []desired.Server
	for i := range uint8(10) {
		servers = append(servers, srv6Server(fmt.Sprintf("s%d", i), i+1, 1))
	}
	var services []desired.Service
	for _, s := range []desired.Service{
		serviceOf("insert", vip6, 443, desired.TCP, desired.SRv6Insert, servers...),
		serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap, servers...),
		serviceOf("web4", vip4, 80, desired.TCP, desired.SRv6Encap, servers...),
	} {
		services = append(services, huntingOf(s, selection, candidates))
	}
	return balancerOf(services...)
}

// hunted contains the flows to the services of hunting, by service.
var hunted = map[string]dataplane.Flow{"insert": insert, "web": web, "web4": web4}

// row lists the servers in the row of a flow's bucket.
func (f *fixture) row(flow dataplane.Flow, service string) (names []string) {
	f.t.Helper()
	svc := f.service(service)
	table, err := serversets.SetOf(svc).Table()
	f.must(err)
	for _, i := range table.Row(flow.BucketOf(svc, &f.identity.BucketKeys, svc.Buckets)) {
		names = append(names, table.Servers[i].Name)
	}
	return names
}

// With random candidates, a SYN is offered to the candidates of a random bucket. A later packet is
// recovered through the candidates of the flow's own bucket.
func TestHuntRandom(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectRandom, 2))
	lists := map[string]bool{}
	svc := f.service("web")
	for range 100 {
		verdict, out := f.exec(frameOf(web), nil)
		if verdict != verdictRedirect {
			t.Fatalf("verdict %d", verdict)
		}
		found := ""
		for _, a := range svc.Servers {
			for _, b := range svc.Servers {
				all := offers(nil, nil, []string{a.Name, b.Name}) // no column tells anything about them
				want, err := packet.Encapsulate(frameOf(web), f.encapFor(web, "web", all...))
				f.must(err)
				if a.Name != b.Name && slices.Equal(want, out) {
					found = a.Name + " " + b.Name
				}
			}
		}
		if found == "" {
			t.Fatalf("offered to none: %x", out)
		}
		lists[found] = true
	}
	// Suppose that there are at least 10 lists, and that they are equally likely. Then 100 SYNs
	// have fewer than 5 different lists with a probability of 1 in 10^25.
	if len(lists) < 5 {
		t.Errorf("100 SYNs had the lists %v", lists)
	}
	ack := frameOf(web, packet.Flags(packet.ACK))
	f.check(f.offered(ack, web, "web", "forward_recover", srv6.RecoverStickiness, f.row(web, "web")...), f.run(ack))
}

func without(names []string, one string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name == one })
}

// After changes of servers, the server of a flow may not be a candidate any more. Recovering asks
// the candidates of former generations as well, but new flows are not offered to them. They are
// forgotten when there were too many changes, or when the number of buckets changes. Trace agrees.
func TestRecoverAsksFormerCandidates(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 2))
	flow, left := f.flowThatMoves("s3")
	row := f.row(flow, "web")
	view := f.view()
	ack := frameOf(flow, packet.Flags(packet.ACK))
	check := func(name string, list ...string) {
		t.Helper()
		f.forgetFlows()
		t.Run(name, func(t *testing.T) {
			f.t = t
			f.check(f.offered(ack, flow, "web", "forward_recover", srv6.RecoverStickiness, list...), f.run(ack))
			f.check(f.offered(frameOf(flow), flow, "web", "forward_hunt", srv6.ConnectAvail, row...), f.run(frameOf(flow)))
			trace := mustTrace(t, view, inspect.Packet{Flow: flow, Length: int(layer3(ack))})
			f.check(f.traced(t, trace, ack), f.run(ack))
		})
		f.t = t
	}
	check("after the change", append(slices.Clone(row), left...)...)
	for _, name := range left {
		f.plane.Servers.ClearNextHop(f.slot("web", name))
	}
	check("and out of reach", row...)
	f.route()
	check("and back", append(slices.Clone(row), left...)...)
	for _, name := range left {
		f.hush(f.slot("web", name))
	}
	check("and silent", row...)
	f.route()

	r := newReference(f)
	change := func(name string, knows bool, cfg *desired.Balancer) {
		f.mustApply(cfg)
		f.cfg = cfg
		r.changed()
		row = f.row(flow, "web")
		asked := r.possible(flow, f.service("web"))
		for _, name := range left {
			if slices.Contains(asked, name) != knows {
				t.Errorf("%s: asked are %v, and %s had the flow", name, asked, name)
			}
		}
		check(name, asked...)
	}
	next := []string{"s3"}
	for _, name := range nodesExcept(f.service("web"), append(slices.Clone(left), row...)...)[:2] {
		next = append(next, name)
		change("without "+name, len(next) == 2, huntingWithout(2, next...))
	}
	change("all back", true, hunting(desired.SelectConsistent, 2))
	other := hunting(desired.SelectConsistent, 2)
	for i := range other.Services {
		other.Services[i].Buckets = 257
	}
	f.mustApply(other)
	row = f.row(flow, "web")
	check("with other buckets", row...)
}

// nodesExcept lists the servers of a service except some.
func nodesExcept(svc *desired.Service, except ...string) (names []string) {
	for _, s := range svc.Servers {
		if !slices.Contains(except, s.Name) {
			names = append(names, s.Name)
		}
	}
	return names
}

func huntingWithout(candidates int, names ...string) *desired.Balancer {
	cfg := hunting(desired.SelectConsistent, candidates)
	for i := range cfg.Services {
		svc := &cfg.Services[i]
		svc.Servers = slices.DeleteFunc(svc.Servers, func(s desired.Server) bool { return slices.Contains(names, s.Name) })
	}
	return cfg
}

// flowThatMoves removes a server. It finds a flow that has lost another candidate by this change,
// and returns the flow and the candidates that it has lost. These servers are still configured.
func (f *fixture) flowThatMoves(removed string) (flow dataplane.Flow, left []string) {
	f.t.Helper()
	var flows []dataplane.Flow
	var before [][]string
	for port := range uint16(2000) {
		flow := web
		flow.Source = netip.AddrPortFrom(web.Source.Addr(), 30000+port)
		flows, before = append(flows, flow), append(before, f.row(flow, "web"))
	}
	f.mustApply(huntingWithout(2, removed))
	f.route()
	for i, flow := range flows {
		after := f.row(flow, "web")
		left := slices.DeleteFunc(slices.Clone(before[i]), func(name string) bool { return name == removed || slices.Contains(after, name) })
		if len(left) > 0 {
			return flow, left
		}
	}
	f.t.Fatal("no flow has lost a candidate that is still there")
	return flow, nil
}
