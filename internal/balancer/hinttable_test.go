// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// hintMachine is a balancer with a small hint table, and its reference. Both process the same
// packets, signals, returned packets and sweeps, while servers come and go and the persistence
// changes.
type hintMachine struct {
	*reference
	known       []dataplane.Flow
	placement   desired.Placement // of all services
	persistence desired.Persistence
	present     []int // the numbers of the servers
}

// hintMachineServers is the number of servers of which each service has some.
const hintMachineServers = 7

func openHintMachine(t testing.TB, placement desired.Placement) *hintMachine {
	m := &hintMachine{placement: placement, present: []int{0}}
	m.persistence = desired.PersistenceTable
	f := open(t, m.config())
	f.must(dataplane.Detach(f.cfg.Node.Instance))
	for port := range uint16(12) {
		m.known = append(m.known, fromPort(web, 1000+port), fromPort(web4, 1000+port))
	}
	m.reference = newReference(f)
	return m
}

// config returns two services. Their tables have few rows, so that flows share rows.
func (m *hintMachine) config() *desired.Balancer {
	cfg := hunting(desired.SelectConsistent, 3)
	cfg.Services = cfg.Services[1:] // without srv6-insert
	for i := range cfg.Services {
		svc := &cfg.Services[i]
		all := svc.Servers
		svc.Servers = nil
		for _, number := range m.present {
			svc.Servers = append(svc.Servers, all[number])
		}
		svc.Buckets, svc.Persistence, svc.Generations = 17, m.persistence, 4
		if svc.FindsByColumn() {
			svc.Generations, svc.History = 32, 3
		}
		if svc.Placement = m.placement; svc.Placement != desired.PlacementHunt {
			svc.Selection, svc.Probe = "", new(true)
		}
		svc.Health = &desired.Health{TCP: &desired.TCPCheck{}}
	}
	cfg.Node.Limits.Hints, cfg.Node.Limits.Servers = 8, 16
	return cfg
}

// The hint table behaves as the reference: packets, signals and returned packets have the same
// effect, and after each step the hints are the same.
func TestHintsFollowReference(t *testing.T) {
	t.Parallel()
	for placement, reason := range map[desired.Placement]string{
		desired.PlacementHunt: "forward_hunt", desired.PlacementHash: "forward_new",
	} {
		t.Run(string(placement), func(t *testing.T) {
			t.Parallel()
			m := openHintMachine(t, placement)
			seen := map[string]int{}
			m.seen = func(o outcome) { seen[reasonOf(o)]++ }
			rapid.Check(t, m.live)
			for _, reason := range []string{
				reason, "forward_known", "forward_recover",
				"return_create", "return_remove", "return_no_room",
			} {
				if seen[reason] == 0 {
					t.Errorf("no packet left as %s: %v", reason, seen)
				}
			}
			t.Log(seen)
		})
	}
}

func (m *hintMachine) live(t *rapid.T) {
	m.via, m.silent, m.failing = map[string]string{}, map[string]bool{}, map[string]bool{}
	m.present = []int{0, 1, 2, 3, 4}
	m.persist(t)
	for _, svc := range m.cfg.Services {
		for _, server := range svc.Servers {
			m.setHealth(svc.Name, server.Name, true)
		}
	}
	m.changed()
	m.forget()
	t.Repeat(map[string]func(*rapid.T){
		"packets": m.packets, "signals": m.signals, "connect": m.connect, "sweep": m.sweep,
		"change": m.change, "": m.agreesOnHints,
	})
}

// persist begins with a persistence. Services have had persistence table before, without flows.
func (m *hintMachine) persist(t *rapid.T) {
	m.former = map[string]desired.Service{}
	m.persistence = desired.PersistenceTable
	m.reconfigure()
	m.drawPersistence(t)
}

func (m *hintMachine) drawPersistence(t *rapid.T) {
	m.persistence = rapid.SampledFrom([]desired.Persistence{
		desired.PersistenceHint, desired.PersistenceStateless, desired.PersistenceTable,
	}).Draw(t, "persistence")
	m.reconfigure()
}

// reconfigure applies the present configuration. A service that leaves persistence table may have
// former flows.
func (m *hintMachine) reconfigure() {
	before, cfg := m.cfg.Services, m.config()
	m.mustApply(cfg)
	for i := range cfg.Services {
		name := cfg.Services[i].Name
		switch {
		case !cfg.Services[i].FindsByColumn():
			delete(m.former, name)
		case !before[i].FindsByColumn():
			m.former[name] = before[i]
		}
	}
	m.changed()
}

func (m *hintMachine) drawFlow(t *rapid.T) dataplane.Flow {
	return rapid.SampledFrom(m.known).Draw(t, "flow")
}

// drawServer draws a server of a flow's service, mostly one of the flow's row.
func (m *hintMachine) drawServer(t *rapid.T, flow dataplane.Flow) *desired.Server {
	svc := m.classify(flow)
	if rapid.IntRange(0, 5).Draw(t, "in row") == 0 {
		return &svc.Servers[rapid.IntRange(0, len(svc.Servers)-1).Draw(t, "server")]
	}
	row := m.row(svc, 0, m.bucket(flow, svc))
	return serverOfName(svc, rapid.SampledFrom(row).Draw(t, "candidate"))
}

// packets sends packets with and without timestamps, and packets that servers return.
func (m *hintMachine) packets(t *rapid.T) {
	for range rapid.IntRange(1, 8).Draw(t, "packets") {
		flow := m.drawFlow(t)
		options := []packet.Option{packet.Flags(rapid.SampledFrom([]packet.TCPFlags{
			packet.SYN, packet.ACK, packet.ACK, packet.FIN | packet.ACK, packet.RST,
		}).Draw(t, "flags"))}
		if rapid.IntRange(0, 3).Draw(t, "timestamps") == 0 {
			echo := rapid.Uint32Range(4096, 4099).Draw(t, "echo")
			options = append(options, packet.Timestamps(1, echo))
		}
		frame := frameOf(flow, options...)
		if rapid.IntRange(0, 4).Draw(t, "returned") == 0 {
			frame = returnedBy(desired.SRv6Encap, m.drawServer(t, flow).Locator, frame)
		}
		m.send(t, frame)
	}
}

// signals sends signals of servers.
func (m *hintMachine) signals(t *rapid.T) {
	for range rapid.IntRange(1, 8).Draw(t, "signals") {
		flow, function := m.drawFlow(t), srv6.CreateStickiness
		flags := rapid.SampledFrom([]packet.TCPFlags{
			packet.SYN | packet.ACK, packet.ACK, packet.FIN | packet.ACK,
		}).Draw(t, "flags")
		if flags&packet.FIN != 0 {
			function = srv6.RemoveStickiness
		}
		sender := m.drawServer(t, flow).Locator
		m.send(t, signal(desired.SRv6Encap, sender, flow, function, packet.Flags(flags)))
	}
}

// connect makes a server accept a flow, whose client then sends a packet.
func (m *hintMachine) connect(t *rapid.T) {
	flow := m.drawFlow(t)
	sender := m.drawServer(t, flow).Locator
	m.send(t, frameOf(flow))
	m.send(t, signal(desired.SRv6Encap, sender, flow, srv6.CreateStickiness, synAck))
	m.send(t, frameOf(flow, packet.Flags(packet.ACK)))
}

func (m *hintMachine) send(t *rapid.T, frame []byte) {
	want, got := m.receive(frame), m.run(frame)
	if m.seen != nil {
		m.seen(got)
	}
	if !same(want, got) {
		t.Fatalf("%s", explain(frame, want, got))
	}
}

func (m *hintMachine) sweep(*rapid.T) {
	m.plane.Hints.Sweep()
	m.sweepHints()
}

// change rarely changes servers or the persistence, and else sends packets: each change takes long.
func (m *hintMachine) change(t *rapid.T) {
	switch rapid.IntRange(0, 9).Draw(t, "change") {
	case 0:
		m.drawPersistence(t)
	case 1:
		m.changeServers(t)
	case 2:
		flow := m.drawFlow(t)
		m.fail(m.classify(flow), m.drawServer(t, flow).Name, rapid.Bool().Draw(t, "fails"))
		m.changed()
	case 3:
		name := m.drawServer(t, m.drawFlow(t)).Name
		m.silent[name] = !m.silent[name]
		m.route()
		m.changed()
	default:
		m.packets(t)
	}
}

// changeServers replaces one server by another one.
func (m *hintMachine) changeServers(t *rapid.T) {
	m.present = slices.Clone(m.present)
	gone := rapid.IntRange(0, len(m.present)-1).Draw(t, "gone")
	for _, svc := range m.cfg.Services {
		delete(m.failing, svc.Name+"/"+svc.Servers[gone].Name)
	}
	for number := range hintMachineServers {
		next := (m.present[gone] + number) % hintMachineServers
		if !slices.Contains(m.present, next) {
			m.present[gone] = next
			break
		}
	}
	m.reconfigure()
}

func (m *hintMachine) agreesOnHints(t *rapid.T) {
	if text := m.explainHints(); text != "" {
		t.Fatal(text)
	}
}
