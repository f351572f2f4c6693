// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// byClient returns an affinity by the client's address, or its /24 or /56.
func byClient(scope desired.AffinityScope, usesPrefix bool) *desired.Affinity {
	a := &desired.Affinity{By: desired.AffinityClient, Scope: scope, PrefixIPv4: 32, PrefixIPv6: 128}
	if usesPrefix {
		a.PrefixIPv4, a.PrefixIPv6 = 24, 56
	}
	return a
}

// affine gives all services of a configuration the same affinity.
func affine(a *desired.Affinity, cfg *desired.Balancer) *desired.Balancer {
	for i := range cfg.Services {
		cfg.Services[i].Affinity = a
	}
	return cfg
}

// spreadAffinities gives services different affinities, or none, if their placement allows one.
func spreadAffinities(services []desired.Service) {
	all := []*desired.Affinity{nil, byClient(desired.ScopeService, false), byClient(desired.ScopeVIP, true)}
	for i := range services {
		s := &services[i]
		s.Affinity = all[i%len(all)]
		if s.WhyNoAffinity() != "" {
			s.Affinity = nil
		}
	}
}

// fromClient returns the flow from another client and port.
func fromClient(flow dataplane.Flow, client string, port uint16) dataplane.Flow {
	flow.Source = netip.AddrPortFrom(netip.MustParseAddr(client), port)
	return flow
}

// firstServers returns the servers that get the first packets of flows, sorted.
func (f *fixture) firstServers(flows ...dataplane.Flow) []string {
	f.t.Helper()
	names := map[string]bool{}
	for _, flow := range flows {
		for name, counted := range f.run(frameOf(flow)).Servers {
			if counted.Packets > 0 {
				names[name] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// fromPorts returns flows from a client's ports.
func fromPorts(flow dataplane.Flow, client string) (flows []dataplane.Flow) {
	for port := range uint16(12) {
		flows = append(flows, fromClient(flow, client, 40000+port))
	}
	return flows
}

// All connections of a client come to one server. Other clients of the prefix come to the same one
// if a prefix counts, and other clients mostly to others.
func TestAffinityByClient(t *testing.T) {
	t.Parallel()
	clients := map[string]struct{ one, near, far string }{ // near: in the same /24 or /56
		"web4": {"192.0.2.2", "192.0.2.201", "192.0.%d.2"},
		"web":  {"2001:db8:c:1::2", "2001:db8:c:1f::3", "2001:db8:c:1%d00::2"},
	}
	for _, usesPrefix := range []bool{false, true} {
		f := open(t, affine(byClient(desired.ScopeService, usesPrefix), hashing(3)))
		for service, c := range clients {
			flow := hunted[service]
			own := f.firstServers(fromPorts(flow, c.one)...)
			if len(own) != 1 {
				t.Errorf("%s: connections of one client come to %v", service, own)
			}
			near := f.firstServers(fromPorts(flow, c.near)...)
			if usesPrefix != slices.Equal(own, near) {
				t.Errorf("%s: prefixes count: %v; clients of one prefix come to %v and %v", service, usesPrefix, own, near)
			}
			var far []dataplane.Flow
			for i := range 7 {
				far = append(far, fromClient(flow, fmt.Sprintf(c.far, i+3), 40000))
			}
			if got := f.firstServers(far...); len(got) < 3 {
				t.Errorf("%s: 7 clients come to %v only", service, got)
			}
		}
	}
}

// Services of a VIP that share their affinity give a client the same server, and others do not.
func TestAffinityOfAVIP(t *testing.T) {
	t.Parallel()
	for _, scope := range []desired.AffinityScope{desired.ScopeService, desired.ScopeVIP} {
		cfg := hashing(3)
		dns := cfg.Services[1]
		dns.Name, dns.Port, dns.Protocol = "dns", 53, desired.UDP
		cfg.Services = append(cfg.Services, dns)
		f := open(t, affine(byClient(scope, false), cfg))
		same := 0
		for i := range 8 {
			client, servers := fmt.Sprintf("2001:db8:c::%d", i), map[string]bool{}
			for _, flow := range []dataplane.Flow{insert, web, flowTo(vip6, 53, desired.UDP)} {
				for _, name := range f.firstServers(fromPorts(flow, client)[:2]...) {
					servers[name[len(name)-2:]] = true // without the service
				}
			}
			if len(servers) == 1 {
				same++
			}
		}
		if shares := scope == desired.ScopeVIP; shares && same != 8 || !shares && same == 8 {
			t.Errorf("scope %s: %d of 8 clients have one server in all services", scope, same)
		}
	}
}

// A service for all ports gives a client one server, and not one for each port.
func TestAffinityOfAllPorts(t *testing.T) {
	t.Parallel()
	cfg := hashing(3)
	cfg.Services[1].Port = desired.AllPorts
	f := open(t, affine(byClient(desired.ScopeService, false), cfg))
	var flows []dataplane.Flow
	for port := range uint16(8) {
		flows = append(flows, flowTo(vip6, 1000+port, desired.TCP))
	}
	if got := f.firstServers(flows...); len(got) != 1 {
		t.Errorf("connections of one client to several ports come to %v", got)
	}
}

// The packets of a flow under affinity visit the servers of the client's row: SYNs, later packets of
// unknown flows, fragments and ICMP errors, for each placement and persistence that permits
// affinity.
func TestAffinityFollowsReference(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]*desired.Balancer{
		"hash":            hashing(3),
		"hunt":            hunting(desired.SelectConsistent, 4),
		"hunt, reports":   hunting(desired.SelectReports, 8),
		"hash, stateless": multilinear(stateless(desired.PlacementHash, 2)),
		"hunt, stateless": multilinear(stateless(desired.PlacementHunt, 4)),
		"hunt, hint":      hinting(desired.PlacementHunt, 4),
		"infer":           inRow(desired.PersistenceTable),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			clock, err := dataplane.NewFlowClock()
			testhost.Must(t, err)
			clock.Shift, clock.Jiffy = standstill, slowJiffy // loads that servers have reported do not age
			f := openAt(t, affine(byClient(desired.ScopeVIP, true), cfg), clock)
			r := newReference(f)
			var frames [][]byte
			for service, flow := range hunted {
				if !slices.ContainsFunc(cfg.Services, func(s desired.Service) bool { return s.Name == service }) {
					continue
				}
				for port := range uint16(4) {
					flow := fromPort(flow, port)
					frames = append(frames,
						frameOf(flow, packet.Flags(packet.ACK)), packet.ICMPError(routerOf(flow.Destination.Addr()), 3, 1, 1280, reply(flow)),
						frameOf(flow, packet.Timestamps(7, 0)), frameOf(flow, packet.Flags(packet.ACK), packet.Timestamps(9, 1025)))
					frames = append(frames, packet.Fragments(frameOf(flow, packet.Flags(packet.ACK), large), 64, 9)...)
				}
			}
			r.compare(t, frames)
		})
	}
}

// The answer to an offer enters the server of the offer: the row in which the balancer looks for the
// server's column is the client's.
func TestAffinityOfHints(t *testing.T) {
	t.Parallel()
	f := open(t, affine(byClient(desired.ScopeService, false), hinting(desired.PlacementHunt, 4)))
	row := f.row(web, "web")
	for port := range uint16(4) {
		flow := fromPort(web, 40000+port)
		if got := f.row(flow, "web"); !slices.Equal(got, row) {
			t.Fatalf("port %d has the row %v, and another one %v", port, got, row)
		}
		f.run(f.signal(flow, "web", row[2], srv6.CreateStickiness, packet.Flags(packet.SYN|packet.ACK)))
		ack := frameOf(flow, packet.Flags(packet.ACK))
		if got := f.run(ack).Servers["web/"+row[2]]; got.Packets != 1 {
			t.Errorf("port %d: the hinted server %s gets no packet", port, row[2])
		}
	}
}

// A change of affinity drops the former sets, in which flows have other buckets. Known flows stay.
func TestChangeOfAffinity(t *testing.T) {
	t.Parallel()
	grown := hashing(3)
	grown.Services[1].Servers = grown.Services[1].Servers[1:]
	f := openWith(t, hashing(3), stoppedClock(t), true)
	f.mustApply(grown)
	flows := fromPorts(web, client6.Addr().String())
	before := map[dataplane.Flow][]string{}
	for _, flow := range flows {
		before[flow] = f.firstServers(flow)
	}
	cfg := affine(byClient(desired.ScopeService, false), hashing(3))
	cfg.Services[1].Servers = cfg.Services[1].Servers[1:]
	f.mustApply(cfg)
	f.cfg = cfg
	for _, flow := range flows {
		data := frameOf(flow, packet.Flags(packet.ACK))
		if got := f.run(data).Servers; len(got) != 1 || got[before[flow][0]].Packets != 1 {
			t.Errorf("a flow of %s comes to %v", before[flow], got)
		}
	}
	fresh := fromPorts(web, "2001:db8:c::77")
	if got := f.firstServers(fresh...); len(got) != 1 {
		t.Errorf("after the change, connections of one client come to %v", got)
	}
	for _, s := range mustSnapshot(t, f.view()).Services {
		if s.Affinity == nil || s.Affinity.Prefix != s.VIP.BitLen() || s.Sets != 1 {
			t.Errorf("service %s: affinity %v, %d sets", s.Name, s.Affinity, s.Sets)
		}
	}
}
