// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

var (
	h3     = netip.AddrPortFrom(vip6.Addr(), 443)
	any4   = netip.AddrPortFrom(vip4.Addr(), 8443) // of the service of all ports
	plain4 = netip.AddrPortFrom(vip4.Addr(), 53)
)

// quicServices are a service of QUIC during a change of the form, one of all ports, and one of its
// ports whose IDs are not compared.
func quicServices() []desired.AgentService {
	h3 := desired.AgentService{
		Name: "h3", VIP: h3.Addr(), Port: desired.Port(h3.Port()), Protocol: desired.UDP,
		Encapsulation: desired.SRv6Insert,
		QUIC: &desired.QUIC{
			Form: desired.QUICLB21, Rotation: 2, ServerIDLength: 3, NonceLength: 8,
			EncodeLength: true,
		},
		QUICID:       "c4605e",
		FormerQUIC:   &desired.QUIC{Form: desired.QUICLB21, ServerIDLength: 1, NonceLength: 4},
		FormerQUICID: "07",
	}
	all := desired.AgentService{
		Name: "any", VIP: any4.Addr(), Port: desired.AllPorts, Protocol: desired.UDP,
		Encapsulation: desired.GRE,
		QUIC: &desired.QUIC{
			Form: desired.QUICLB21, Rotation: 6, ServerIDLength: 15, NonceLength: 4,
		},
		QUICID: "0102030405060708090a0b0c0d0e0f",
	}
	plain := desired.AgentService{
		Name: "plain", VIP: plain4.Addr(), Port: desired.Port(plain4.Port()), Protocol: desired.UDP,
		Encapsulation: desired.IPIP,
	}
	return []desired.AgentService{h3, all, plain}
}

func quicConfig() *desired.Agent {
	cfg := testConfig()
	cfg.Services = append(cfg.Services, quicServices()...)
	return cfg
}

// longHeader returns a QUIC packet with a long header, of a type from 0 to 3.
func longHeader(kind byte, version uint32, destination, source []byte) []byte {
	p := binary.BigEndian.AppendUint32([]byte{0xc0 | kind<<4}, version)
	p = append(append(p, byte(len(destination))), destination...)
	p = append(append(p, byte(len(source))), source...)
	return append(p, "length, packet number and payload"...)
}

func shortHeader(destination []byte) []byte {
	return slices.Concat([]byte{0x40}, destination, []byte("packet number, payload and tag"))
}

func unhex(digits string) []byte {
	octets, err := hex.DecodeString(digits)
	if err != nil {
		panic(err)
	}
	return octets
}

// idCase is a frame, with the result of its connection ID and the ID; "": it is not compared.
type idCase struct {
	name       string
	frame      []byte
	result, id string
}

const (
	version1 = 1
	version2 = 0x6b3343cf // RFC 9369
	version3 = 0x1a2a3a4a // of no known version

	ownID    = "4bc4605e0011223344556677"                 // of h3: rotation 2, 11 octets follow
	otherID  = "4bc4605f0011223344556677"                 // its last octet of the server ID differs
	formerID = "1f0700112233"                             // rotation 0, five random bits
	allID    = "ca0102030405060708090a0b0c0d0e0f00112233" // of the service of all ports
)

// issuedIDs are frames that the host sends.
func issuedIDs() []idCase {
	client := unhex("0011223344556677")
	handshake := func(source string) packet.Option {
		return packet.Payload(longHeader(2, version1, client, unhex(source)))
	}
	from6 := func(source string) []byte { return packet.UDP(h3, client6, handshake(source)) }
	from4 := func(vip netip.AddrPort, source string) []byte {
		return packet.UDP(vip, client4, handshake(source))
	}
	const rotated, reserved = "6bc4605e0011223344556677", "ebc4605e0011223344556677"
	const shorter, long = "4ac4605e0011223344556677", ownID + "8899aabbccddeeff"
	otherAll := allID[:30] + "10" + allID[32:]
	cases := []idCase{
		{"own", from6(ownID), "issued_own", ownID},
		{"another server", from6(otherID), "issued_other", otherID},
		{"former form", from6(formerID), "issued_own", formerID},
		{"former form, another server", from6("1f0800112233"), "issued_other", "1f0800112233"},
		{"other rotation", from6(rotated), "issued_other", rotated},
		{"rotation 7", from6(reserved), "issued_other", reserved},
		{"another length in the ID", from6(shorter), "issued_other", shorter},
		{"short", from6(ownID[:22]), "issued_other", ownID[:22]},
		{"longer", from6(ownID + "88"), "issued_own", ownID + "88"},
		{"none", from6(""), "issued_other", ""},
		{"one octet", from6("4b"), "issued_other", "4b"},
		{"20 octets", from6(long), "issued_own", long},
		{"255 octets", from6(long + strings.Repeat("88", 235)), "issued_own", long},
		{"IPv4, all ports", from4(any4, allID), "issued_own", allID},
		{"IPv4, all ports, last octet", from4(any4, otherAll), "issued_other", otherAll},
		{"not compared", from4(plain4, otherID), "", ""},
		{"another address", packet.UDP(netip.AddrPortFrom(other6.Addr(), h3.Port()), client6,
			handshake(otherID)), "", ""},
		{"a client's packet", packet.UDP(client6, h3, handshake(otherID)), "", ""},
		{"first fragment", set(from4(any4, allID), 6, 0x20), "issued_own", allID},
		{"later fragment", set(from4(any4, allID), 7, 1), "", ""},
		{"options", packet.UDP(h3, client6, packet.DestinationOptions(8), handshake(otherID)),
			"", ""},
		{"mapped address", mapped(from6(otherID), 8, any4.Addr()), "", ""},
		{"TCP", packet.TCP(h3, client6, handshake(otherID)), "", ""},
	}
	add := func(name string, p []byte, result string) {
		id := ""
		if result != "" {
			id = otherID
		}
		cases = append(cases, idCase{name, packet.UDP(h3, client6, packet.Payload(p)), result, id})
	}
	other := unhex(otherID)
	add("Initial", longHeader(0, version1, client, other), "issued_other")
	add("Retry", longHeader(3, version1, client, other), "issued_other")
	add("version 2", longHeader(0, version2, client, other), "issued_other")
	add("version 3", longHeader(1, version3, client, other), "issued_other")
	add("no destination ID", longHeader(2, version1, nil, other), "issued_other")
	add("destination ID of 255 octets", longHeader(2, version1, make([]byte, 255), other),
		"issued_other")
	add("Version Negotiation", longHeader(2, 0, client, other), "")
	add("short header", shortHeader(other), "")
	whole := longHeader(2, version1, client, other)
	add("no fixed bit", append([]byte{0x80}, whole[1:]...), "issued_other")
	for _, length := range []int{0, 1, 5, 6, 10, 14, 15, 20, 26} {
		add("truncated", whole[:length], "")
	}
	add("nothing behind the ID", whole[:27], "issued_other")
	add("255 octets, truncated", longHeader(2, version1, client, make([]byte, 255))[:200], "")
	return cases
}

// deliveredIDs are frames to the agent.
func deliveredIDs() []idCase {
	to6 := func(p []byte, options ...packet.Option) []byte {
		options = append(options, packet.Payload(p))
		return wrap(packet.UDP(client6, h3, options...), srv6Encap(desired.SRv6Insert, sid))
	}
	to4 := func(vip netip.AddrPort, p []byte) []byte {
		return wrap(packet.UDP(client4, vip, packet.Payload(p)), tunnel(desired.GRE, tunnel4))
	}
	own, other, mine := unhex(ownID), unhex(otherID), unhex("0011")
	const delivered = "delivered_other"
	behind := otherID + hex.EncodeToString([]byte("packet n")) // 20 octets
	short := slices.Concat([]byte{0x40}, other)
	otherAll := slices.Concat(unhex(allID)[:15], []byte{0x10}, unhex(allID)[16:])
	shortAll, hexAll := slices.Concat([]byte{0x40}, otherAll), hex.EncodeToString(otherAll)
	longest := append(slices.Clone(other), make([]byte, 243)...)
	fragment := packet.UDP(client4, any4, packet.Payload(shortAll))
	return []idCase{
		{"own", to6(shortHeader(own)), "", ""},
		{"another server", to6(shortHeader(other)), delivered, behind},
		{"nothing behind the ID", to6(short), delivered, otherID},
		{"an octet is missing", to6(short[:len(short)-1]), "", ""},
		{"only the first octet", to6(short[:1]), "", ""},
		{"no payload", to6(nil), "", ""},
		{"former form", to6(shortHeader(unhex(formerID))), "", ""},
		{"former form, another server", to6(append([]byte{0x40}, unhex("1f0800112233")...)),
			delivered, "1f0800112233"},
		{"other rotation", to6(shortHeader(unhex("6bc4605f0011223344556677"))), "", ""},
		{"another length in the ID", to6(shortHeader(unhex("4ac4605f0011223344556677"))), "", ""},
		{"Handshake", to6(longHeader(2, version1, other, mine)), delivered, otherID},
		{"Handshake, own", to6(longHeader(2, version1, own, mine)), "", ""},
		{"Initial", to6(longHeader(0, version1, other, mine)), "", ""},
		{"0-RTT", to6(longHeader(1, version1, other, mine)), "", ""},
		{"Initial of version 2", to6(longHeader(1, version2, other, mine)), "", ""},
		{"0-RTT of version 2", to6(longHeader(2, version2, other, mine)), "", ""},
		{"Handshake of version 2", to6(longHeader(3, version2, other, mine)), delivered, otherID},
		{"version 3", to6(longHeader(0, version3, other, mine)), delivered, otherID},
		{"Version Negotiation", to6(longHeader(2, 0, other, mine)), "", ""},
		{"long header, short ID", to6(longHeader(2, version1, other[:11], mine)), "", ""},
		{"long header, ID beyond the packet", to6(longHeader(2, version1, other, mine)[:17]),
			"", ""},
		{"long header, truncated", to6(longHeader(2, version1, other, mine)[:5]), "", ""},
		{"long header, 255 octets", to6(longHeader(2, version1, longest, mine)),
			delivered, otherID + "0000000000000000"},
		{"all ports", to4(any4, shortAll), delivered, hexAll},
		{"all ports, own", to4(any4, shortHeader(unhex(allID))), "", ""},
		{"not compared", to4(plain4, shortAll), "", ""},
		{"IPv4, ipip", wrap(packet.UDP(client4, any4, packet.Payload(shortAll)),
			tunnel(desired.IPIP, tunnel6)), delivered, hexAll},
		{"IPv6, srv6-encap", wrap(packet.UDP(client6, h3, packet.Payload(short)),
			srv6Encap(desired.SRv6Encap, sid)), delivered, otherID},
		{"padding", packet.Pad(to6(short[:len(short)-1]), 1, 2, 3), "", ""},
		{"options", to6(shortHeader(other), packet.DestinationOptions(8)), "", ""},
		{"first fragment", wrap(set(fragment, 6, 0x20), tunnel(desired.GRE, tunnel4)), "", ""},
		{"TCP", wrap(packet.TCP(client6, h3, packet.Payload(shortHeader(other))),
			srv6Encap(desired.SRv6Insert, sid)), "", ""},
		{"for another server", wrap(packet.UDP(client6, netip.AddrPortFrom(other6.Addr(), 443),
			packet.Payload(shortHeader(other))), srv6Encap(desired.SRv6Insert, sid, nextSID)),
			"", ""},
	}
}

// countedIDs returns the counts of connection IDs that are not zero, over all services, by the
// results with the prefix quic_id_. The last ID is that of any service.
func countedIDs(t testing.TB, k *kernel, cfg *desired.Agent) map[string]IDCount {
	t.Helper()
	all := map[string]IDCount{}
	for _, s := range cfg.Services {
		if s.QUIC == nil {
			continue
		}
		counts, err := k.view().idCounts(serviceKey(s))
		testhost.Must(t, err)
		for result, count := range counts {
			if name := "quic_id_" + result; count.Packets > 0 {
				all[name] = IDCount{all[name].Packets + count.Packets, count.Last}
			}
		}
	}
	return all
}

// forgetIDs clears the counts of all connection IDs. The agent removes the counts of a service
// whose IDs are not compared.
func forgetIDs(t testing.TB, k *kernel, cfg *desired.Agent) {
	t.Helper()
	without := newTableContent(cfg, mtu)
	without.ownIDs = nil
	testhost.Must(t, k.write(without))
	testhost.Must(t, k.write(newTableContent(cfg, mtu)))
}

// wantedIDs is what countedIDs returns after one packet.
func wantedIDs(result, id string) map[string]IDCount {
	if result == "" {
		return map[string]IDCount{}
	}
	return map[string]IDCount{"quic_id_" + result: {1, id}}
}

// The agent counts the connection IDs that the program issues, and those of delivered packets that
// name other servers. It changes nothing.
func TestQUICIDs(t *testing.T) {
	cfg := quicConfig()
	k, r := testKernelOf(t, cfg), newReference(cfg)
	check := func(t *testing.T, c idCase, result string, id []byte) {
		t.Helper()
		if diff := cmp.Diff(wantedIDs(c.result, c.id), countedIDs(t, k, cfg)); diff != "" {
			t.Errorf("%s\ncounts (-want +got):\n%s", explain(c.frame), diff)
		}
		if result != c.result || shown(id) != c.id && c.result != "" {
			t.Errorf("the reference says %q, %x", result, id)
		}
	}
	for _, c := range issuedIDs() {
		t.Run("issued/"+c.name, func(t *testing.T) {
			forgetIDs(t, k, cfg)
			requireUnchanged(t, k, c.frame)
			result, id := r.issuedID(c.frame)
			check(t, c, result, id)
		})
	}
	for _, c := range deliveredIDs() {
		t.Run("delivered/"+c.name, func(t *testing.T) {
			forgetIDs(t, k, cfg)
			reason, want := r.receive(c.frame)
			verdict, out := runAgent(t, k, c.frame)
			if verdict != xdpPass || !bytes.Equal(want, out) {
				t.Errorf("verdict %d; frame (-want +got):\n%s", verdict, cmp.Diff(want, out))
			}
			result, id := r.deliveredID(reason, out)
			check(t, c, result, id)
		})
	}
}

// shown returns as much of an ID as the agent keeps.
func shown(id []byte) string { return hex.EncodeToString(id[:min(len(id), 20)]) }

func requireUnchanged(t testing.TB, k *kernel, frame []byte) {
	t.Helper()
	verdict, out := run(t, k.objects.TcAgent, frame)
	if verdict != tcUnspec || !bytes.Equal(frame, out) {
		t.Errorf("verdict %#x; frame (-want +got):\n%s", verdict, cmp.Diff(frame, out))
	}
}

// Routers and hosts with containers forward packets of others.
func TestForwardedIDsAreNotIssued(t *testing.T) {
	cfg := quicConfig()
	k := testKernelOf(t, cfg)
	transmitAs(t, k, issuedIDs()[1].frame, map[int]uint32{ingressIfindexAt: 1})
	if got := countedIDs(t, k, cfg); len(got) != 0 {
		t.Errorf("counted %v", got)
	}
}

// quicForms returns a random form and perhaps a former one, with random server IDs.
func quicForms(r *rapid.T, s *desired.AgentService) {
	form := func(name string) (*desired.QUIC, string) {
		n := rapid.IntRange(1, 15).Draw(r, name+" server ID length")
		q := &desired.QUIC{
			Form: desired.QUICLB21, Rotation: rapid.Uint8Range(0, 6).Draw(r, name+" rotation"),
			ServerIDLength: n, NonceLength: rapid.IntRange(4, 19-n).Draw(r, name+" nonce length"),
			EncodeLength: rapid.Bool().Draw(r, name+" encode length"),
		}
		id := rapid.SliceOfN(rapid.ByteRange(0, 3), n, n).Draw(r, name+" server ID")
		return q, hex.EncodeToString(id)
	}
	s.QUIC, s.QUICID = form("present")
	s.FormerQUIC, s.FormerQUICID = nil, ""
	if former, id := form("former"); former.Rotation != s.QUIC.Rotation {
		s.FormerQUIC, s.FormerQUICID = former, id
	}
}

// connectionID returns a random connection ID. Most are like those of a form of the service, with
// another server ID, another first octet, or another length.
func connectionID(r *rapid.T, s desired.AgentService, name string) []byte {
	form, serverID := s.QUIC, s.QUICServerID()
	if s.FormerQUIC != nil && rapid.Bool().Draw(r, name+" former") {
		form, serverID = s.FormerQUIC, s.FormerQUICServerID()
	}
	id, err := form.Config().Generate(serverID)
	if err != nil {
		r.Fatal(err)
	}
	if rapid.Bool().Draw(r, name+" change") {
		id[rapid.IntRange(0, len(id)-1).Draw(r, name+" at")] = rapid.Byte().Draw(r, name+" octet")
	}
	switch rapid.IntRange(0, 5).Draw(r, name+" length") {
	case 0:
		id = id[:rapid.IntRange(0, len(id)).Draw(r, name+" kept")]
	case 1:
		id = append(id, make([]byte, rapid.IntRange(1, 255-len(id)).Draw(r, name+" more"))...)
	}
	return id
}

// TestQUICIDsAgree compares random packets of random forms in both directions with the reference.
func TestQUICIDsAgree(t *testing.T) {
	cfg := quicConfig()
	k := testKernelOf(t, cfg)
	seen := map[string]int{}
	rapid.Check(t, func(r *rapid.T) {
		at := rapid.IntRange(len(cfg.Services)-3, len(cfg.Services)-2).Draw(r, "service")
		s := &cfg.Services[at]
		quicForms(r, s)
		forgetIDs(t, k, cfg)
		reference := newReference(cfg)
		vip, client := h3, client6
		if s.VIP.Is4() {
			vip, client = any4, client4
		}
		version := rapid.SampledFrom([]uint32{
			0, version1, version1, version2, version3,
		}).Draw(r, "version")
		destination, source := connectionID(r, *s, "destination"), connectionID(r, *s, "source")
		p := longHeader(rapid.ByteRange(0, 3).Draw(r, "type"), version, destination, source)
		if rapid.Bool().Draw(r, "short header") {
			p = shortHeader(destination)
		}
		if rapid.IntRange(0, 3).Draw(r, "truncate") == 0 {
			p = p[:rapid.IntRange(0, len(p)).Draw(r, "length")]
		}
		var result string
		var id []byte
		if rapid.Bool().Draw(r, "issued") {
			frame := packet.UDP(vip, client, packet.Payload(p))
			requireUnchanged(t, k, frame)
			result, id = reference.issuedID(frame)
		} else {
			e := rapid.SampledFrom([]packet.Encap{
				srv6Encap(desired.SRv6Encap, sid), tunnel(desired.GRE, tunnel6),
				tunnel(desired.IPIP, tunnel4),
			}).Draw(r, "encapsulation")
			frame := wrap(packet.UDP(client, vip, packet.Payload(p)), e)
			reason, out := reference.receive(frame)
			if verdict, got := runAgent(t, k, frame); verdict != xdpPass || !bytes.Equal(out, got) {
				r.Fatalf("verdict %d; frame (-want +got):\n%s", verdict, cmp.Diff(out, got))
			}
			result, id = reference.deliveredID(reason, out)
		}
		seen[result]++
		if diff := cmp.Diff(wantedIDs(result, shown(id)), countedIDs(t, k, cfg)); diff != "" {
			r.Fatalf("%x\nown %s %s, former %s %s\ncounts (-want +got):\n%s",
				p, s.QUICID, s.QUIC, s.FormerQUICID, s.FormerQUIC, diff)
		}
	})
	if t.Failed() || len(seen) < 4 {
		t.Errorf("results: %v", seen)
	}
}

// A reload keeps the counts. They end with the fields of the service.
func TestQUICIDsOutlastReloads(t *testing.T) {
	cfg := quicConfig()
	k := testKernelOf(t, cfg)
	issue := func(want uint64) {
		t.Helper()
		requireUnchanged(t, k, issuedIDs()[1].frame)
		if got := countedIDs(t, k, cfg)["quic_id_issued_other"].Packets; got != want {
			t.Errorf("counted %d IDs, want %d", got, want)
		}
	}
	reload := func() {
		t.Helper()
		testhost.Must(t, k.write(newTableContent(cfg, mtu)))
	}
	issue(1)
	reload()
	issue(2)
	h3 := &cfg.Services[len(cfg.Services)-3]
	h3.QUICID = "c4605f"
	reload()
	issue(2) // it is the own ID now
	h3.QUICID = "c4605e"
	reload()
	issue(3)
	before := *h3
	h3.QUIC, h3.FormerQUIC = nil, nil
	reload()
	issue(0)
	*h3 = before
	reload()
	issue(1)
	for i := range cfg.Services {
		cfg.Services[i].QUIC, cfg.Services[i].FormerQUIC = nil, nil
	}
	reload()
	var compared uint32
	if err := k.objects.QuicIsCompared.Get(&compared); err != nil || compared != 0 {
		t.Errorf("no service has quic, and quic_is_compared is %d: %v", compared, err)
	}
}

// The state of a service names its forms as the file does.
func TestQUICState(t *testing.T) {
	cfg := quicConfig()
	k := testKernelOf(t, cfg)
	services, err := k.view().services()
	testhost.Must(t, err)
	got := map[string]*QUICState{}
	for _, s := range services {
		if s.QUIC != nil {
			got[s.Name] = s.QUIC
		}
	}
	want := map[string]*QUICState{}
	none := map[string]IDCount{"issued_own": {}, "issued_other": {}, "delivered_other": {}}
	for _, s := range cfg.Services {
		if s.QUIC != nil {
			want[s.Name] = &QUICState{s.QUIC, s.QUICID, s.FormerQUIC, s.FormerQUICID, none}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// The log warns about a program that issues IDs of other servers, at most once a minute. It does
// not warn about those from before the start of the process, or about delivered packets.
func TestQUICWarning(t *testing.T) {
	cfg := quicConfig()
	k := testKernelOf(t, cfg)
	var log bytes.Buffer
	a := &Agent{log: slog.New(slog.NewTextHandler(&log, nil)), cfg: cfg, kernel: k}
	warned := func(wanted ...string) {
		t.Helper()
		testhost.Must(t, a.followQUIC())
		for _, text := range wanted {
			if !strings.Contains(log.String(), text) {
				t.Errorf("the log has no %s: %q", text, log.String())
			}
		}
		if len(wanted) == 0 && log.Len() > 0 {
			t.Errorf("the log has %q", log.String())
		}
		log.Reset()
	}
	issue := func(n int) {
		for range n {
			requireUnchanged(t, k, issuedIDs()[1].frame)
		}
	}
	issue(1)
	warned()
	requireUnchanged(t, k, issuedIDs()[0].frame)
	for _, c := range deliveredIDs() {
		runAgent(t, k, c.frame)
	}
	warned()
	issue(2)
	warned("level=WARN", "service=h3", "packets=2", "last_id="+otherID, "quic_id=c4605e")
	issue(3)
	warned()
	for name, before := range maps.Clone(a.others) {
		before.at = before.at.Add(-time.Minute)
		a.others[name] = before
	}
	warned("packets=3")
	warned()
}
