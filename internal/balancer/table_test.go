// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// crowded returns a configuration of two services. Their flow table has few buckets, so that flows
// share buckets.
func crowded(buckets uint32) *desired.Balancer {
	three := func() []desired.Server {
		return []desired.Server{srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 2)}
	}
	cfg := balancerOf(
		serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Insert, three()...),
		serviceOf("dns", vip6, 53, desired.UDP, desired.SRv6Encap, three()...),
	)
	for i := range cfg.Services {
		cfg.Services[i].Health = &desired.Health{TCP: &desired.TCPCheck{}}
	}
	cfg.Node.Limits = desired.Limits{Flows: buckets * dataplane.FlowLoad, Servers: 8}
	return cfg
}

// crowd returns n flows of each service.
func crowd(n uint16) (flows []dataplane.Flow) {
	for port := range n {
		flows = append(flows, fromPort(web, 1000+port), fromPort(dns, 1000+port))
	}
	return flows
}

// tableMachine is a flow table of two buckets, and its reference. Both process the same packets,
// sweeps, passing time and changes of servers.
type tableMachine struct {
	*reference
	known     []dataplane.Flow
	placement desired.Placement // of all services
}

func openTableMachine(t testing.TB) *tableMachine {
	f := open(t, crowded(2))
	f.must(dataplane.Detach(f.cfg.Node.Instance))
	return &tableMachine{reference: newReference(f), known: crowd(15)}
}

// The flow table behaves as the reference: any packets go to the same servers for the same reasons,
// and after each step the entries are the same.
func TestTableFollowsReference(t *testing.T) {
	t.Parallel()
	m := openTableMachine(t)
	seen := map[string]int{}
	m.seen = func(o outcome) { seen[reasonOf(o)]++ }
	rapid.Check(t, m.live)
	for _, reason := range []string{"forward_known", "forward_new", "forward_recover", "forward_no_room", "drop_no_next_hop", "drop_no_server"} {
		if seen[reason] == 0 {
			t.Errorf("no packet left as %s: %v", reason, seen)
		}
	}
	t.Log(seen)
}

// FuzzFlowTable is TestTableFollowsReference, steered by branches of the reference that were not
// yet taken.
func FuzzFlowTable(f *testing.F) {
	m := openTableMachine(f)
	for seed := range byte(8) {
		tape := make([]byte, 1<<16) // the source of rapid's draws, longer than any test needs
		_, _ = rand.NewChaCha8([32]byte{seed}).Read(tape)
		f.Add(tape)
	}
	live := rapid.MakeFuzz(m.live)
	f.Fuzz(func(t *testing.T, tape []byte) {
		m.t = t
		live(t, tape)
	})
}

func (m *tableMachine) live(t *rapid.T) {
	m.via, m.failing = map[string]string{}, map[string]bool{}
	cfg := crowded(2)
	cfg.Services[0].Probe = new(rapid.Bool().Draw(t, "agents"))
	m.placement = rapid.SampledFrom([]desired.Placement{
		desired.PlacementHash, desired.PlacementRoundRobin,
	}).Draw(t, "placement")
	m.place(cfg)
	m.mustApply(cfg)
	for _, svc := range m.cfg.Services {
		for _, server := range svc.Servers {
			m.setHealth(svc.Name, server.Name, true)
		}
	}
	m.changed()
	m.forget()
	t.Repeat(map[string]func(*rapid.T){
		"packets": m.packets, "crowd": m.crowd, "wait": m.wait, "sweep": m.clean, "server": m.server,
		"": m.agreesOnEntries,
	})
}

// place sets the placement of all services.
func (m *tableMachine) place(cfg *desired.Balancer) {
	for i := range cfg.Services {
		cfg.Services[i].Placement = m.placement
	}
}

func (m *tableMachine) packets(t *rapid.T) {
	for range rapid.IntRange(1, 10).Draw(t, "packets") {
		m.send(t, rapid.SampledFrom(m.known).Draw(t, "flow"), rapid.SampledFrom([]packet.TCPFlags{
			packet.SYN, packet.SYN, packet.ACK, packet.ACK, packet.SYN | packet.ACK, packet.FIN | packet.ACK, packet.RST,
		}).Draw(t, "flags"))
	}
}

// crowd establishes several flows, to fill buckets.
func (m *tableMachine) crowd(t *rapid.T) {
	first := rapid.IntRange(0, len(m.known)-1).Draw(t, "first")
	for _, flow := range m.known[first:min(first+8, len(m.known))] {
		m.send(t, flow, packet.SYN)
		m.send(t, flow, packet.ACK)
	}
}

func (m *tableMachine) send(t *rapid.T, flow dataplane.Flow, flags packet.TCPFlags) {
	frame := frameOf(flow, packet.Flags(flags))
	want, got := m.receive(frame), m.run(frame)
	if m.seen != nil {
		m.seen(got)
	}
	if !same(want, got) {
		t.Fatalf("%s", explain(frame, want, got))
	}
}

// wait makes time pass. It draws numbers of ticks around flowMinIdle and around the timeouts.
func (m *tableMachine) wait(t *rapid.T) {
	m.elapse(rapid.SampledFrom([]uint16{1, 2, 7, 13, 14, 15, 100, 838, 839}).Draw(t, "ticks"))
}

func (m *tableMachine) clean(t *rapid.T) {
	m.must(m.Balancer.sweep())
	m.reference.sweep()
}

// server rarely changes a server, and else sends packets. For each change of a candidate table, the
// kernel waits until no packet can use the former one.
func (m *tableMachine) server(t *rapid.T) {
	switch rapid.IntRange(0, 11).Draw(t, "change") {
	case 0:
		m.health(t)
	case 1:
		m.nextHop(t)
	case 2:
		m.reconfigure(t)
	default:
		m.packets(t)
	}
}

func (m *tableMachine) drawServer(t *rapid.T) (service, server string) {
	svc := rapid.SampledFrom(m.cfg.Services).Draw(t, "service")
	return svc.Name, rapid.SampledFrom(svc.Servers).Draw(t, "server").Name
}

func (m *tableMachine) health(t *rapid.T) {
	service, server := m.drawServer(t)
	fails := rapid.Bool().Draw(t, "fails")
	m.setHealth(service, server, !fails)
	m.failing[service+"/"+server] = fails
	m.changed()
}

func (m *tableMachine) nextHop(t *rapid.T) {
	_, server := m.drawServer(t)
	m.via[server] = rapid.SampledFrom([]string{"", "out", "out"}).Draw(t, "link")
	m.silent[server] = rapid.IntRange(0, 2).Draw(t, "silent") == 0
	m.route()
	m.changed()
}

// reconfigure changes weights, adds and removes servers, or drains all servers of a service.
func (m *tableMachine) reconfigure(t *rapid.T) {
	cfg := crowded(2)
	for i := range cfg.Services {
		svc := &cfg.Services[i]
		weights := []uint32{0, 1, 1, 2}
		if rapid.IntRange(0, 3).Draw(t, "all drained") == 0 {
			weights = weights[:1]
		}
		for j := range svc.Servers {
			weight := rapid.SampledFrom(weights).Draw(t, "weight")
			svc.Servers[j].Weight = &weight
		}
		if gone := rapid.IntRange(-2, len(svc.Servers)-1).Draw(t, "gone"); gone >= 0 {
			// A server that is added again begins anew.
			delete(m.failing, svc.Name+"/"+svc.Servers[gone].Name)
			svc.Servers = slices.Delete(svc.Servers, gone, gone+1)
		}
	}
	m.place(cfg)
	m.mustApply(cfg)
	m.changed()
}

// agreesOnEntries compares the flow table with that of the reference.
func (m *tableMachine) agreesOnEntries(t *rapid.T) {
	var want dataplane.FlowCounts
	text := func(server string, state dataplane.FlowState, seen uint16) string {
		return fmt.Sprintf("%s, %s, seen at %d", server, state.String(), seen)
	}
	for _, flow := range m.known {
		wanted, got := "none", "none"
		if e := m.bucketOf(flow).find(flow, m.classify(flow).Name); e != nil {
			wanted = text(e.server, e.state, e.seen&timeMaskOf(e.state))
			switch e.state {
			case stateNew:
				want.New++
			case stateEstablished:
				want.Established++
			case stateClosing, stateClosed:
				want.Closing++
			}
		}
		if e := m.entry(flow); e != 0 {
			key := m.slots.Server(e.Server())
			got = text(key.Service+"/"+key.Server, e.State(), seenOf(e))
		}
		if got != wanted {
			t.Fatalf("entry of %v: %s, want %s", flow, got, wanted)
		}
	}
	if got := totalOf(m.plane.Flows); got != want {
		t.Fatalf("the table has %+v, want %+v", got, want)
	}
}
