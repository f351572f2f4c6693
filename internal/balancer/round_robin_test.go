// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/tables"
)

var (
	turns    = flowTo(vip6, 86, desired.TCP)
	dnsTurns = flowTo(vip6, 86, desired.UDP)
)

// inTurn returns a service with placement round-robin, whose servers have weights of 3, 2 and 1.
func inTurn(protocol desired.Protocol) desired.Service {
	svc := serviceOf("turns-"+string(protocol), vip6, 86, protocol, desired.SRv6Encap,
		srv6Server("s1", 1, 3), srv6Server("s2", 2, 2), srv6Server("s3", 3, 1))
	svc.Placement, svc.Candidates = desired.PlacementRoundRobin, tables.MaxCandidates
	return svc
}

// roundRobin returns a configuration with a service of the given number of servers, which have
// agents.
func roundRobin(servers uint8) *desired.Balancer {
	cfg := webOf()
	svc := &cfg.Services[0]
	svc.Placement, svc.Candidates, svc.Probe = desired.PlacementRoundRobin, tables.MaxCandidates, new(true)
	for i := range servers {
		svc.Servers = append(svc.Servers, srv6Server(fmt.Sprintf("s%d", i+1), i+1, 1))
	}
	return cfg
}

// place sends the first packet of a number of flows, and returns their servers in this order. It
// requires that packets with the same ports stay on their server, and take no turn.
func (f *fixture) place(flow dataplane.Flow, first, count uint16) (servers []string) {
	f.t.Helper()
	before := f.turnsGiven(f.classify(flow).Name)
	for port := range count {
		frame := frameOf(fromPort(flow, first+port))
		o := f.run(frame)
		if again := f.run(frame); reasonOf(o) != "forward_new" || reasonOf(again) != "forward_known" || serverOf(again) != serverOf(o) {
			f.t.Fatalf("to %s (%s), and the same packet again to %s (%s)", serverOf(o), reasonOf(o), serverOf(again), reasonOf(again))
		}
		servers = append(servers, serverOf(o))
	}
	if given := f.turnsGiven(f.classify(flow).Name) - before; given != uint64(count) {
		f.t.Errorf("%d flows have taken %d turns", count, given)
	}
	return servers
}

// occurrences counts how often each value occurs.
func occurrences(values []string) map[string]int {
	counts := map[string]int{}
	for _, value := range values {
		counts[value]++
	}
	return counts
}

// In any six turns that follow one another, which are a cycle, each server gets as many flows as
// its weight says. The servers are in the order of the table, and the first turn is drawn.
func TestTurnsFollowWeights(t *testing.T) {
	t.Parallel()
	f := open(t, balancerOf(inTurn(desired.TCP), inTurn(desired.UDP)))
	for _, flow := range []dataplane.Flow{turns, dnsTurns} {
		service := f.classify(flow).Name
		table, err := tables.BuildTurns([]tables.Server{{Name: "s1", Weight: 3}, {Name: "s2", Weight: 2}, {Name: "s3", Weight: 1}}, 251, 1)
		f.must(err)
		var want []string
		for i := range 20 {
			row := table.Row(int((f.turnsGiven(service) + uint64(i)) % uint64(table.Buckets)))
			want = append(want, service+"/"+table.Servers[row[0]].Name)
		}
		got := f.place(flow, 1000, 20)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", service, diff)
		}
		cycle := map[string]int{service + "/s1": 3, service + "/s2": 2, service + "/s3": 1}
		for i := range len(got) - 6 {
			if diff := cmp.Diff(cycle, occurrences(got[i:i+6])); diff != "" {
				t.Errorf("%s, turns from %d on (-want +got):\n%s", service, i, diff)
			}
		}
	}
}

// Services begin at random turns, so that several balancers do not all begin with the same server.
func TestFirstTurnIsRandom(t *testing.T) {
	t.Parallel()
	f := open(t, balancerOf(inTurn(desired.TCP), inTurn(desired.UDP)))
	if a, b := f.turnsGiven("turns-tcp"), f.turnsGiven("turns-udp"); a == b {
		t.Errorf("both services begin at turn %d", a)
	}
}

// A server that takes no new flows loses its turns, and the others share them: none gets the turns
// of its neighbour as well.
func TestServersLoseTheirTurns(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(f *fixture){
		"drained": func(f *fixture) {
			cfg := roundRobin(4)
			cfg.Services[0].Servers[1].Drained = true
			f.mustApply(cfg)
		},
		"failing":     func(f *fixture) { f.setHealth("web", "s2", false) },
		"no next hop": func(f *fixture) { f.via["s2"] = ""; f.route() },
		"unreachable": func(f *fixture) { f.silent["s2"] = true; f.route() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := open(t, roundRobin(4))
			lose(f)
			var got []string
			for port := range uint16(12) {
				got = append(got, serverOf(f.run(frameOf(fromPort(web, 1000+port)))))
			}
			want := map[string]int{"web/s1": 4, "web/s3": 4, "web/s4": 4}
			if diff := cmp.Diff(want, occurrences(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			snapshot, err := f.view().Snapshot()
			f.must(err)
			for _, server := range snapshot.Services[0].Servers {
				if want := float64(want["web/"+server.Name]) / 12; server.Share != want {
					t.Errorf("status: the share of %s is %v, want %v", server.Name, server.Share, want)
				}
			}
		})
	}
}

// If no server takes new flows, packets take no turns.
func TestNoServerHasATurn(t *testing.T) {
	t.Parallel()
	cfg := roundRobin(2)
	for i := range cfg.Services[0].Servers {
		cfg.Services[0].Servers[i].Drained = true
	}
	f := open(t, cfg)
	before := f.turnsGiven("web")
	if o := f.run(frameOf(web)); reasonOf(o) != "answer_no_server" || f.turnsGiven("web") != before {
		t.Errorf("%s, and %d turns", reasonOf(o), f.turnsGiven("web")-before)
	}
}

// A dry run foresees the server whose turn it is, also behind a server that loses its turn, and
// leaves the turn to the next flow.
func TestDryRunsTakeNoTurn(t *testing.T) {
	t.Parallel()
	f := open(t, roundRobin(4))
	f.setHealth("web", "s2", false)
	for port := range uint16(6) {
		frame := frameOf(fromPort(web, 1000+port))
		before := f.turnsGiven("web")
		var dry *foreseen
		for range 3 {
			dry = f.foresee(f.plane.Objects.XdpLb, ebpf.RunOptions{Data: frame, DataOut: make([]byte, 4096)})
		}
		if after := f.turnsGiven("web"); after != before {
			t.Fatalf("dry runs have moved the turn from %d to %d", before, after)
		}
		d := &dry.decision.Placement
		_, out := f.exec(frame, nil)
		if !bytes.Equal(dry.frame, out) || d.IsPicked == 0 || d.Count != 1 || d.Candidate[0] != dry.decision.Segment[0].Server {
			t.Errorf("flow %d: decided %+v; the frames differ: %t", port, d, !bytes.Equal(dry.frame, out))
		}
	}
}

// If the flow table has no room, the flow's bucket selects the server, so that all packets of the
// flow reach the same server.
func TestFlowsWithoutRoomKeepTheirServer(t *testing.T) {
	t.Parallel()
	f := open(t, balancerOf(inTurn(desired.TCP), inTurn(desired.UDP)))
	r := newReference(f)
	for _, flow := range []dataplane.Flow{turns, dnsTurns} {
		service := f.classify(flow).Name
		for port := range uint16(10) {
			flow := fromPort(flow, 1000+port)
			f.forgetFlows()
			f.fill(flow, f.slot(service, "s1"))
			server := r.place(flow, f.service(service)).Name
			for _, flags := range []packet.TCPFlags{packet.SYN, packet.SYN, packet.ACK} {
				o := f.run(frameOf(flow, packet.Flags(flags)))
				if reasonOf(o) != "forward_no_room" || serverOf(o) != service+"/"+server {
					t.Errorf("%s: to %s (%s), want %s", service, serverOf(o), reasonOf(o), server)
				}
			}
		}
	}
}

// A server that has left the table by weight 0 is in a former set. Packets of unknown flows still
// visit it, also after another change of the placement. Sets of hash do not fit a table of
// round-robin.
func TestFormerSetsOfRoundRobin(t *testing.T) {
	t.Parallel()
	withoutS2 := func(placement desired.Placement) *desired.Balancer {
		cfg := roundRobin(5)
		cfg.Services[0].Placement = placement
		cfg.Services[0].Servers[1].Weight = new(uint32(0))
		return cfg
	}
	f := open(t, roundRobin(5))
	r := newReference(f)
	for _, step := range []struct {
		cfg  *desired.Balancer
		sets uint32
	}{
		{withoutS2(desired.PlacementRoundRobin), 2},
		{withoutS2(desired.PlacementHash), 3},
		{withoutS2(desired.PlacementRoundRobin), 2},
	} {
		f.mustApply(step.cfg)
		r.changed()
		svc := &f.cfg.Services[0]
		rule := f.plane.Services.Find(dataplane.ServiceKey(svc)).Rule
		if rule.Generations() != step.sets {
			t.Errorf("%s: the table has %d sets, want %d", svc.Placement, rule.Generations(), step.sets)
		}
		for port := range uint16(20) {
			flow := fromPort(web, 1000+port)
			f.forgetFlows()
			o := f.run(frameOf(flow, packet.Flags(packet.ACK)))
			f.check(r.receive(frameOf(flow, packet.Flags(packet.ACK))), o)
			if visited := visitedBy(o.Frame, desired.SRv6Encap); len(visited) != 5 {
				t.Fatalf("%s: %v visits %v", svc.Placement, flow, visited)
			}
		}
	}
}

// Connections stay on their servers while the placement changes, and across a restart, which
// continues the turns.
func TestFlowsSurviveChangesOfPlacement(t *testing.T) {
	t.Parallel()
	hash := roundRobin(4)
	hash.Services[0].Placement, hash.Services[0].Candidates = desired.PlacementHash, 3
	hunting := roundRobin(4)
	hunting.Services[0] = huntingOf(hunting.Services[0], desired.SelectConsistent, 2)
	hash.Node.Limits.Flows = 1 << 14
	f := open(t, hash)
	all := f.establish(web)
	for i, cfg := range []*desired.Balancer{roundRobin(4), hunting, roundRobin(4), hash, roundRobin(4)} {
		cfg.Node = hash.Node
		f.mustApply(cfg)
		f.stay(all, "")
		if cfg.Services[0].Placement == desired.PlacementHunt {
			continue // servers enter flows, and there are none here
		}
		for flow, server := range f.establish(fromSubnet(web, byte(i))) {
			all[flow] = server
		}
		f.stay(all, "")
	}
	before := f.turnsGiven("web")
	f.restart()
	f.stay(all, "")
	if given := f.turnsGiven("web"); given != before {
		t.Errorf("a restart has moved the turn from %d to %d", before, given)
	}
}

// Two cores place flows at the same time, and each turn is given to one of them.
func TestTwoCoresShareTheTurns(t *testing.T) {
	f := open(t, roundRobin(4))
	const times = 400
	f.collide(times, [2][]byte{frameOf(web), frameOf(fromPort(web, 7))}, f.forgetFlows, func([2]uint32) {})
	each := uint64(times / 2 * *collisions)
	want := map[string]uint64{"web/s1": each, "web/s2": each, "web/s3": each, "web/s4": each}
	got := map[string]uint64{}
	for server, counted := range f.counters().servers {
		got[server] = counted.Packets
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// fromSubnet returns the flow from another client.
func fromSubnet(flow dataplane.Flow, subnet byte) dataplane.Flow {
	address := flow.Source.Addr().As16()
	address[7] = subnet + 1
	flow.Source = netip.AddrPortFrom(netip.AddrFrom16(address), flow.Source.Port())
	return flow
}
