// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
)

// drainable returns a service of three servers.
func drainable(protocol desired.Protocol, placement desired.Placement, onDrain desired.OnDrain) desired.Service {
	service := serviceOf("web", vip6, 80, protocol, desired.SRv6Encap,
		srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 1))
	service.Placement, service.OnDrain = placement, onDrain
	return service
}

// The flows of a drained server stay or move, by rule and protocol. The flow table knows all of
// them, so their buckets do not matter.
func TestFlowsOfDrainedServers(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		rule      desired.OnDrain
		protocol  desired.Protocol
		placement desired.Placement
		stays     bool
	}{
		{desired.OnDrainMoveUDP, desired.UDP, desired.PlacementHash, false},
		{desired.OnDrainMoveUDP, desired.UDP, desired.PlacementRoundRobin, false},
		{desired.OnDrainMoveUDP, desired.TCP, desired.PlacementHash, true},
		{desired.OnDrainKeep, desired.UDP, desired.PlacementHash, true},
		{desired.OnDrainKeep, desired.UDP, desired.PlacementRoundRobin, true},
		{desired.OnDrainKeep, desired.TCP, desired.PlacementHash, true},
	} {
		for how, drain := range map[string]func(*desired.Server){
			"drained":  func(s *desired.Server) { s.Drained = true },
			"weight 0": func(s *desired.Server) { s.Weight = new(uint32) },
		} {
			t.Run(fmt.Sprint(test.rule, test.protocol, test.placement, how), func(t *testing.T) {
				service := drainable(test.protocol, test.placement, test.rule)
				f := open(t, balancerOf(service))
				flow := flowTo(vip6, 80, test.protocol)
				servers := f.establish(flow)
				drained := drainable(test.protocol, test.placement, test.rule)
				drain(&drained.Servers[0])
				f.mustApply(balancerOf(drained))
				f.requireTraced(servers, "web/s1", test.stays)
				f.requireVisits(servers, "web/s1", test.stays)
				f.requireCondition("web", "s1", inspect.ServerDrained)
				// Flows that have not sent a packet meanwhile stay when the server is back.
				f.mustApply(balancerOf(service))
				f.forgetFlows()
				servers = f.establish(flow)
				f.mustApply(balancerOf(drained))
				f.mustApply(balancerOf(service))
				f.requireVisits(servers, "web/s1", true)
			})
		}
	}
}

// requireTraced requires that a trace says why the flows of a server leave it, if they do.
func (f *fixture) requireTraced(servers map[dataplane.Flow]string, server string, stays bool) {
	f.t.Helper()
	want := "the server is drained"
	if stays {
		want = ""
	}
	for flow, has := range servers {
		if has != server {
			continue
		}
		known := mustTrace(f.t, f.view(), inspect.Packet{Flow: flow, Length: 100}).Known
		if known == nil || known.Left != want {
			f.t.Fatalf("trace of a flow of %s: %+v, want left because %q", server, known, want)
		}
		return
	}
	f.t.Fatalf("%s has no flow", server)
}

// If no server takes new flows, the flows of UDP stay with their drained servers.
func TestFlowsOfDrainedServersStayIfAllAreDrained(t *testing.T) {
	t.Parallel()
	service := drainable(desired.UDP, desired.PlacementHash, desired.OnDrainMoveUDP)
	f := open(t, balancerOf(service))
	servers := f.establish(flowTo(vip6, 80, desired.UDP))
	drained := drainable(desired.UDP, desired.PlacementHash, desired.OnDrainMoveUDP)
	for i := range drained.Servers {
		drained.Servers[i].Drained = true
	}
	f.mustApply(balancerOf(drained))
	for _, server := range service.Servers {
		f.requireVisits(servers, "web/"+server.Name, true)
	}
}

// A server that starts slowly keeps its flows of UDP, although it is drained now and then.
func TestSlowStartMovesNoFlows(t *testing.T) {
	t.Parallel()
	slow := 10 * time.Second
	service := drainable(desired.UDP, desired.PlacementHash, desired.OnDrainMoveUDP)
	service.OnFailure, service.SlowStart = desired.OnFailureKeep, &slow
	f := open(t, balancerOf(service))
	servers := f.establish(flowTo(vip6, 80, desired.UDP))
	f.setHealth("web", "s1", false)
	f.setHealth("web", "s1", true)
	if flags := f.plane.Servers.Flags(f.slot("web", "s1")); flags&dataplane.FlagDrained == 0 {
		t.Fatalf("flags %x: the server does not rest", flags)
	}
	f.requireVisits(servers, "web/s1", true)
}

// Flows from before a change to persistence quic stay with a drained server. Their packets are
// still looked up in the flow table.
func TestFormerFlowsOfQUICStay(t *testing.T) {
	t.Parallel()
	f := open(t, balancerOf(drainable(desired.UDP, desired.PlacementHash, desired.OnDrainMoveUDP)))
	servers := f.establish(flowTo(vip6, 80, desired.UDP))
	after := drainable(desired.UDP, desired.PlacementHash, desired.OnDrainKeep)
	after.Persistence = desired.PersistenceQUIC
	after.QUIC = &desired.QUIC{Form: desired.QUICLB21, ServerIDLength: 3, NonceLength: 16}
	for i := range after.Servers {
		after.Servers[i].QUICID = fmt.Sprintf("00000%d", i+1)
	}
	after.Servers[0].Drained = true
	f.mustApply(balancerOf(after))
	f.requireVisits(servers, "web/s1", true)
}

// While the servers that take new flows await their first health checks, flows of UDP stay with the
// drained server, which may be the only one that works.
func TestUDPAwaitsFirstCheckOfOthers(t *testing.T) {
	t.Parallel()
	service := drainable(desired.UDP, desired.PlacementHash, desired.OnDrainMoveUDP)
	service.Health = &desired.Health{HTTP: &desired.HTTPCheck{Path: "/", Port: 80}}
	added := service.Servers[1]
	service.Servers = service.Servers[:1]
	old := service.Servers[0].Name
	f := open(t, balancerOf(service))
	f.setHealth(service.Name, old, true)
	servers := f.establish(flowTo(service.VIP, service.Port.Number(), desired.UDP))

	drained := service.Servers[0]
	drained.Drained = true
	service.Servers = []desired.Server{drained, added}
	f.mustApply(balancerOf(service))
	f.route()
	f.requireVisits(servers, service.Name+"/"+old, true)
	f.setHealth(service.Name, added.Name, true)
	f.requireVisits(servers, service.Name+"/"+old, false)
}
