// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// h3 is a flow to the service of quicOf.
var h3 = flowTo(vip6, 443, desired.UDP)

// quicForm is the form of connection IDs of most tests.
func quicForm() *desired.QUIC {
	return &desired.QUIC{
		Form: desired.QUICLB21, Rotation: 2, ServerIDLength: 3, NonceLength: 8,
		EncodeLength: true,
	}
}

// withID returns a server with the server ID that consists of the repeated octet.
func withID(s desired.Server, octet byte, form *desired.QUIC) desired.Server {
	s.QUICID = fmt.Sprintf("%x", slices.Repeat([]byte{octet}, form.ServerIDLength))
	return s
}

// quicOf returns a balancer with the service "h3". Its servers have the numbers, and server IDs
// that consist of the number. Server 1 has the name q1.
func quicOf(form *desired.QUIC, numbers ...uint8) *desired.Balancer {
	var servers []desired.Server
	for _, number := range numbers {
		s := srv6Server(fmt.Sprintf("q%d", number), number, 1)
		servers = append(servers, withID(s, number, form))
	}
	svc := serviceOf("h3", vip6, 443, desired.UDP, desired.SRv6Encap, servers...)
	svc.Persistence, svc.QUIC = desired.PersistenceQUIC, form
	return balancerOf(svc)
}

// issued returns a connection ID of a server.
func issued(t testing.TB, form *desired.QUIC, server *desired.Server) []byte {
	t.Helper()
	id, err := form.Config().Generate(server.QUICServerID())
	testhost.Must(t, err)
	return id
}

// shortHeader returns a QUIC packet with a short header.
func shortHeader(id []byte) []byte {
	return slices.Concat([]byte{0x40}, id, []byte("packet number, payload and tag"))
}

// longHeader returns a QUIC packet with a long header, of a type from 0 to 3.
func longHeader(kind byte, version uint32, id []byte) []byte {
	header := binary.BigEndian.AppendUint32([]byte{0xc0 | kind<<4}, version)
	header = append(header, byte(len(id)))
	rest := []byte("length, packet number and payload")
	return slices.Concat(header, id, []byte{4, 1, 2, 3, 4}, rest)
}

const (
	version1 = 1
	version2 = 0x6b3343cf // RFC 9369
	version3 = 0x1a2a3a4a // of no known version
)

// portTo returns the flow with a client port for which hash does not choose the server.
func (f *fixture) portTo(flow dataplane.Flow, service, other string) dataplane.Flow {
	f.t.Helper()
	for port := uint16(1); port < 1000; port++ {
		if flow = fromPort(flow, port); f.placed(flow, service) != other {
			return flow
		}
	}
	f.t.Fatalf("hash places all flows of %s on %s", service, other)
	return flow
}

// The balancer reads no octet beyond the datagram, and decides as quiclb.Config.ServerID does.
func TestQUICTruncated(t *testing.T) {
	t.Parallel()
	form := quicForm()
	f := open(t, quicOf(form, 1, 2, 3))
	r := newReference(f)
	server := &f.service("h3").Servers[1]
	id := issued(t, form, server)
	flow := f.portTo(h3, "h3", server.Name)
	for name, payload := range map[string][]byte{
		"short":     shortHeader(id),
		"Handshake": longHeader(2, version1, id),
		"Initial":   longHeader(0, version1, id),
	} {
		known := 0
		for length := range len(payload) + 1 {
			frame := frameOf(flow, packet.Payload(payload[:length]))
			// What follows the datagram in the packet must not be read.
			padded := frameOf(flow, packet.Payload(payload))
			binary.BigEndian.PutUint16(padded[ethernetLength+40+4:], uint16(8+length))
			behind := packet.Pad(frame, payload[length:]...)
			for _, frame := range [][]byte{frame, padded, behind} {
				want := r.receive(frame)
				if got := f.run(frame); !same(want, got) {
					t.Errorf("%s, %d octets: %s",
						name, length, explain(frame, want, got))
				}
				known += int(want.Reasons["forward_known"].Packets)
			}
		}
		if name == "Initial" != (known == 0) {
			t.Errorf("%s: %d packets go to the server that they name", name, known)
		}
	}
	// No ID is read in a first fragment. Here the octets of the UDP header would name a server.
	server.QUICID = "01bb05"
	f.mustApply(balancerOf(*f.service("h3")))
	whole := frameOf(fromPort(h3, 0x404b), packet.Payload(make([]byte, 0x500)))
	frame := packet.Fragments(whole, 64, 1)[0]
	if want, got := r.receive(frame), f.run(frame); !same(want, got) {
		t.Errorf("a first fragment: %s", explain(frame, want, got))
	}
}

// All forms of connection IDs are read as quiclb writes them.
func TestQUICForms(t *testing.T) {
	t.Parallel()
	f := open(t, quicOf(quicForm(), 1, 2, 3))
	for _, form := range []desired.QUIC{
		{Rotation: 0, ServerIDLength: 1, NonceLength: 4},
		{Rotation: 6, ServerIDLength: 15, NonceLength: 4, EncodeLength: true},
		{Rotation: 6, ServerIDLength: 15, NonceLength: 4},
		{Rotation: 5, ServerIDLength: 1, NonceLength: 18, EncodeLength: true},
		{Rotation: 1, ServerIDLength: 8, NonceLength: 8},
	} {
		form.Form = desired.QUICLB21
		f.mustApply(quicOf(&form, 1, 2, 3))
		for i := range f.service("h3").Servers {
			server := &f.service("h3").Servers[i]
			flow := f.portTo(h3, "h3", server.Name)
			id := issued(t, &form, server)
			other := changed(id, form.ServerIDLength, 0x80) // in the last octet
			for payload, reason := range map[string]string{
				string(shortHeader(id)):    "forward_known",
				string(shortHeader(other)): "forward_recover",
				// Without all of the nonce, this is no ID.
				string(append([]byte{0x40}, id[:len(id)-1]...)): "forward_recover",
			} {
				to := server.Name
				if reason != "forward_known" {
					to = f.placed(flow, "h3")
				}
				frame := frameOf(flow, packet.Payload([]byte(payload)))
				f.check(f.forwarded(frame, flow, "h3", to, reason), f.run(frame))
			}
		}
	}
}

// rotated gives the service of quicOf another form, and keeps the form before as the former one.
// The servers' new IDs consist of the octet 0x80 plus their number.
func rotated(cfg *desired.Balancer, form *desired.QUIC) *desired.Balancer {
	svc := &cfg.Services[0]
	svc.QUIC, svc.FormerQUIC = form, svc.QUIC
	for i := range svc.Servers {
		s := &svc.Servers[i]
		s.FormerQUICID = s.QUICID
		*s = withID(*s, s.QUICServerID()[0]|0x80, form)
	}
	return cfg
}

// A change of the form keeps the connections of the form before, for as long as it is the former
// one. The lengths of the forms can differ. A restart keeps both.
func TestQUICRotation(t *testing.T) {
	t.Parallel()
	before := quicForm()
	for _, after := range []*desired.QUIC{
		{Rotation: 3, ServerIDLength: 3, NonceLength: 8, EncodeLength: true},
		{Rotation: 0, ServerIDLength: 1, NonceLength: 4},
		{Rotation: 6, ServerIDLength: 15, NonceLength: 4, EncodeLength: true},
	} {
		after.Form = desired.QUICLB21
		f := open(t, quicOf(before, 1, 2, 3))
		old := issued(t, before, serverOfName(f.service("h3"), "q2"))
		requireNamed := func(id []byte, named bool) {
			t.Helper()
			flow := f.portTo(h3, "h3", "q2")
			to, reason := "q2", "forward_known"
			if !named {
				to, reason = f.placed(flow, "h3"), "forward_recover"
			}
			frame := frameOf(flow, packet.Payload(longHeader(2, version1, id)))
			f.check(f.forwarded(frame, flow, "h3", to, reason), f.run(frame))
		}
		f.mustApply(rotated(quicOf(before, 1, 2, 3), after))
		now := issued(t, after, serverOfName(f.service("h3"), "q2"))
		mixed := slices.Clone(old) // the rotation of one form and the server ID of the other
		mixed[0] ^= (before.Rotation ^ after.Rotation) << 5
		both := func() {
			t.Helper()
			requireNamed(old, true)
			requireNamed(now, true)
			requireNamed(mixed, false)
			requireNamed(old[:len(old)-1], false)
			requireNamed(now[:len(now)-1], false)
			requireNamed([]byte{}, false)
			requireIDs(t, f, 6)
		}
		both()
		next := rotated(quicOf(before, 1, 2, 3), after)
		next.Node = f.cfg.Node
		f.restartAs(next)
		both()
		next = rotated(quicOf(before, 1, 2, 3), after)
		next.Services[0].FormerQUIC = nil
		f.mustApply(next)
		requireNamed(old, false)
		requireNamed(now, true)
		requireIDs(t, f, 3)
	}
}

// changed returns a copy of octets with some bits of one octet changed.
func changed(octets []byte, at int, bits byte) []byte {
	out := slices.Clone(octets)
	out[at] ^= bits
	return out
}

// A connection stays with its server while the server fails, is drained or is moved in the list,
// and while others come and go. Only if its server is removed, its packets are placed.
func TestQUICServersChange(t *testing.T) {
	t.Parallel()
	form := quicForm()
	cfg := quicOf(form, 1, 2, 3)
	cfg.Services[0].Health = &desired.Health{TCP: &desired.TCPCheck{}}
	f := open(t, cfg)
	server := &f.service("h3").Servers[1]
	payload := packet.Payload(shortHeader(issued(t, form, server)))
	stays := func() {
		t.Helper()
		flow := f.portTo(h3, "h3", "q2")
		frame := frameOf(flow, payload)
		f.check(f.forwarded(frame, flow, "h3", "q2", "forward_known"), f.run(frame))
	}
	stays()
	f.setHealth("h3", "q2", false)
	stays()
	for _, numbers := range [][]uint8{{2, 4, 1, 3}, {5, 6, 7, 2}, {2}, {1, 2, 3}} {
		next := quicOf(form, numbers...)
		next.Services[0].Servers[slices.Index(numbers, 2)].Drained = len(numbers) > 1
		f.mustApply(next)
		if len(numbers) == 1 {
			frame := frameOf(h3, payload)
			f.check(f.forwarded(frame, h3, "h3", "q2", "forward_known"), f.run(frame))
			continue
		}
		stays()
	}
	next := quicOf(form, 1, 2, 3)
	next.Node = f.cfg.Node
	f.restartAs(next)
	stays()

	slot := f.slot("h3", "q2")
	f.mustApply(quicOf(form, 1, 3))
	frame := frameOf(h3, payload)
	f.check(f.forwarded(frame, h3, "h3", f.placed(h3, "h3"), "forward_recover"), f.run(frame))
	requireIDs(t, f, 2)

	// While a packet is under way, an ID can lead to a slot that its server has left.
	prefix, err := dataplane.QUICPrefixOf(f.serviceID(h3), form, server.QUICServerID())
	f.must(err)
	stale := map[dataplane.QUICPrefix]uint32{prefix: slot}
	f.must(f.plane.AddQUICServers(f.serviceID(h3), f.service("h3"), stale))
	f.check(f.forwarded(frame, h3, "h3", f.placed(h3, "h3"), "forward_recover"), f.run(frame))
}

// requireIDs requires that the table of server IDs has the given number of entries.
func requireIDs(t *testing.T, f *fixture, want int) {
	t.Helper()
	var prefix dataplane.QUICPrefix
	var slot uint32
	got := 0
	for entries := f.plane.Objects.QuicServers.Iterate(); entries.Next(&prefix, &slot); got++ {
	}
	if got != want {
		t.Errorf("%d server IDs are in the table, want %d", got, want)
	}
}

// An ID can move to another server, and one server can have the same ID in two services.
func TestQUICIDsMove(t *testing.T) {
	t.Parallel()
	form := quicForm()
	config := func(first, second byte) *desired.Balancer {
		cfg := quicOf(form, 1, 2)
		svc := quicOf(form, 1, 2).Services[0]
		svc.Name, svc.Port = "other", 444
		cfg.Services = append(cfg.Services, svc)
		for i, octet := range []byte{first, second} {
			s := &cfg.Services[0].Servers[i]
			*s = withID(*s, octet, form)
		}
		return cfg
	}
	f := open(t, config(1, 2))
	for _, ids := range [][2]byte{{1, 2}, {2, 1}, {1, 3}} {
		f.mustApply(config(ids[0], ids[1]))
		for i, octet := range ids {
			server := withID(desired.Server{}, octet, form)
			frame := frameOf(h3, packet.Payload(shortHeader(issued(t, form, &server))))
			to := fmt.Sprintf("q%d", i+1)
			f.check(f.forwarded(frame, h3, "h3", to, "forward_known"), f.run(frame))
		}
		for _, name := range []string{"q1", "q2"} {
			flow := flowTo(vip6, 444, desired.UDP)
			id := issued(t, form, serverOfName(f.service("other"), name))
			frame := frameOf(flow, packet.Payload(shortHeader(id)))
			want := f.forwarded(frame, flow, "other", name, "forward_known")
			f.check(want, f.run(frame))
		}
		requireIDs(t, f, 4)
	}
}

// Flows from before a change from persistence table stay with their servers, and the flow table
// gets no new ones.
func TestQUICFormerFlows(t *testing.T) {
	t.Parallel()
	form := quicForm()
	checked := func(cfg *desired.Balancer) *desired.Balancer {
		cfg.Services[0].Health = &desired.Health{TCP: &desired.TCPCheck{}}
		return cfg
	}
	before := checked(quicOf(form, 1, 2, 3))
	before.Services[0].Persistence, before.Services[0].QUIC = desired.PersistenceTable, nil
	f := open(t, before)
	frame := frameOf(h3, packet.Payload(longHeader(0, version1, []byte("12345678"))))
	f.run(frame)
	server := f.placed(h3, "h3")
	numbers := []uint8{1, 2, 3}
	for f.placed(h3, "h3") == server {
		numbers = append(numbers, uint8(len(numbers)+1))
		f.mustApply(checked(quicOf(form, numbers...)))
		for _, server := range f.service("h3").Servers { // one that awaits its check gets no flow
			f.setHealth("h3", server.Name, true)
		}
	}
	f.check(f.forwarded(frame, h3, "h3", server, "forward_known"), f.run(frame))
	other := fromPort(h3, 7)
	frame = frameOf(other, packet.Payload(longHeader(0, version1, []byte("12345678"))))
	f.check(f.forwarded(frame, other, "h3", f.placed(other, "h3"), "forward_new"), f.run(frame))
	if total := totalOf(f.plane.Flows); total.New+total.Established != 1 {
		t.Errorf("the flow table has %+v, want the former flow alone", total)
	}

	// When a flow has left its server, the table forgets it: otherwise it would go back.
	frame = frameOf(h3, packet.Payload(longHeader(0, version1, []byte("12345678"))))
	for _, healthy := range []bool{false, true} {
		f.setHealth("h3", server, healthy)
		want := f.forwarded(frame, h3, "h3", f.placed(h3, "h3"), "forward_new")
		f.check(want, f.run(frame))
	}
}

// Under hunt, an Initial packet of a former flow whose server fails is offered as if there were no
// such flow. Only a server that its ID names would be asked first. The flow table forgets the flow.
func TestQUICHuntsFormerFlows(t *testing.T) {
	t.Parallel()
	form := quicForm()
	before := quicOf(form, 1, 2, 3)
	before.Services[0].Persistence, before.Services[0].QUIC = desired.PersistenceTable, nil
	f := open(t, before)
	frame := frameOf(h3, packet.Payload(longHeader(0, version1, []byte("12345678"))))
	f.run(frame)
	row := f.row(h3, "h3")
	f.mustApply(huntingQUIC(form, 1, 2, 3))
	f.check(f.forwarded(frame, h3, "h3", row[0], "forward_known"), f.run(frame))

	f.setHealth("h3", row[0], false)
	offer := offers(nil, row, row[1:])
	f.check(f.visited(frame, h3, "h3", "forward_hunt", offer...), f.run(frame))
	f.setHealth("h3", row[0], true)
	offer = offers(nil, row, row)
	f.check(f.visited(frame, h3, "h3", "forward_hunt", offer...), f.run(frame))
	if total := totalOf(f.plane.Flows); total.New+total.Established != 0 {
		t.Errorf("the flow table has %+v, want no flow", total)
	}
}

// huntingQUIC is as quicOf, with placement hunt.
func huntingQUIC(form *desired.QUIC, numbers ...uint8) *desired.Balancer {
	cfg := quicOf(form, numbers...)
	svc := &cfg.Services[0]
	svc.Placement, svc.Selection = desired.PlacementHunt, desired.SelectConsistent
	return cfg
}

// A trace shows which server a connection ID names.
func TestTraceQUIC(t *testing.T) {
	t.Parallel()
	form := quicForm()
	f := open(t, quicOf(form, 1, 2, 3))
	f.must(datapath.Pin(f.plane.Objects.XdpLb,
		filepath.Join(datapath.Dir(f.cfg.Node.Instance), datapath.BalancerProgram)))
	view, err := inspect.OpenView(f.cfg.Node.Instance)
	f.must(err)
	defer view.Close()
	flow := f.portTo(h3, "h3", "q2")
	placed := f.placed(flow, "h3")
	for _, c := range []struct {
		id             []byte
		server, reason string
	}{
		{nil, placed, "forward_recover"},
		{issued(t, form, serverOfName(f.service("h3"), "q2")), "q2", "forward_known"},
		{issued(t, form, &desired.Server{QUICID: "c4605e"}), placed, "forward_recover"},
	} {
		got, err := view.Trace(inspect.Packet{
			Flow: flow, Length: 48 + 1 + len(c.id), ConnectionID: c.id,
		})
		f.must(err)
		if got.Reason != c.reason || got.Server.Name != c.server {
			t.Errorf("ID %x: %s to %s, want %s to %s",
				c.id, got.Reason, got.Server.Name, c.reason, c.server)
		}
	}
}

// A trace of an Initial packet shows to which servers a service that hunts offers the connection. The
// server that its ID names is asked first.
func TestTraceInitial(t *testing.T) {
	t.Parallel()
	form := quicForm()
	f := open(t, huntingQUIC(form, 1, 2, 3))
	f.must(datapath.Pin(f.plane.Objects.XdpLb,
		filepath.Join(datapath.Dir(f.cfg.Node.Instance), datapath.BalancerProgram)))
	view, err := inspect.OpenView(f.cfg.Node.Instance)
	f.must(err)
	defer view.Close()
	for id, first := range map[string]srv6.Function{
		"12345678": srv6.ConnectAvail,
		string(issued(t, form, serverOfName(f.service("h3"), "q2"))): srv6.Steer,
	} {
		got, err := view.Trace(inspect.Packet{
			Flow: h3, Opens: true, ConnectionID: []byte(id), Length: 48 + len(packet.QUICHeader(true, []byte(id))),
		})
		f.must(err)
		var asked []string
		for _, at := range got.Course[1:] {
			asked = append(asked, at.Function)
		}
		want := slices.Repeat([]string{srv6.ConnectAvail.String()}, 2)
		if got.Reason != "forward_hunt" || got.Course[0].Function != first.String() || !slices.Equal(asked, want) ||
			first == srv6.Steer && got.Course[0].Server != "q2" {
			t.Errorf("ID %x: %s, %+v", id, got.Reason, got.Course)
		}
	}
}
