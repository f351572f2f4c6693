package agent

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"github.com/gopacket/gopacket/layers"
	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
)

const (
	xdpDrop    = 1
	xdpPass    = 2
	tcUnspec   = 0xffffffff // TC_ACT_UNSPEC: on to the next program
	tcShot     = 2
	tcRedirect = 7
)

var (
	hostMAC = packet.MAC{2, 0, 0, 0, 1, 2}
	client4 = netip.MustParseAddrPort("203.0.113.7:40000")
	client6 = netip.MustParseAddrPort("[2001:db8:c::7]:40000")
	vip4    = netip.MustParseAddrPort("198.51.100.80:80")
	vip6    = netip.MustParseAddrPort("[2001:db8:80::1]:80")
	other4  = netip.MustParseAddrPort("198.51.100.99:80")
	other6  = netip.MustParseAddrPort("[2001:db8:80::99]:80")
	tunnel4 = netip.MustParseAddr("192.0.2.53")
	tunnel6 = netip.MustParseAddr("fd00:9::53")
	sid     = netip.MustParseAddr("fd00:5:0:1:5::")
	nextSID = netip.MustParseAddr("fd00:5:0:2:5::")
	sender  = netip.MustParseAddr("fd00:6c:0:1::")
)

// testConfig is a server with a TCP service on each VIP, and one on all ports of a third.
func testConfig() *config.Agent {
	yes := true
	return &config.Agent{
		Node: config.AgentNode{
			Instance: "test-agent", Interface: "eth0", AssignVIPs: &yes,
			Locator: netip.MustParsePrefix("fd00:5:0:1::/64"), Addresses: []netip.Addr{tunnel4, tunnel6},
		},
		Services: []config.AgentService{
			{Name: "insert", VIP: vip6.Addr(), Port: 80, Protocol: config.TCP, Encapsulation: config.SRv6Insert},
			{Name: "gre", VIP: vip4.Addr(), Port: 80, Protocol: config.TCP, Encapsulation: config.GRE},
			{Name: "all", VIP: vip4.Addr(), Port: config.AllPorts, Protocol: config.TCP, Encapsulation: config.SRv6Encap},
			{Name: "udp", VIP: vip6.Addr(), Port: 53, Protocol: config.UDP, Encapsulation: config.IPIP},
		},
	}
}

// mtu is the longest packet, in bytes, that the way from the balancers takes.
const mtu = 1500

// testKernel is a data path that is attached to nothing.
func testKernel(t testing.TB) *kernel {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("loading programs needs root")
	}
	instance := fmt.Sprintf("test-%d-packets", os.Getpid())
	k, err := openKernel(instance, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(k.close(), datapath.RemoveDir(instance)); err != nil {
			t.Error(err)
		}
	})
	if err := errors.Join(k.write(newContent(testConfig(), mtu)), k.setHostMAC(hostMAC)); err != nil {
		t.Fatal(err)
	}
	return k
}

// counters are those that are not zero.
func counters(t testing.TB, k *kernel) map[string]agentCounter {
	t.Helper()
	reasons, err := k.reasonCounters()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]agentCounter{}
	for _, r := range reasons {
		if r.Packets != 0 || r.Bytes != 0 {
			all[r.Reason] = agentCounter{Packets: r.Packets, Bytes: r.Bytes}
		}
	}
	synAcks, err := k.synAckCounters()
	if err != nil {
		t.Fatal(err)
	}
	for result, n := range synAcks {
		if n != 0 {
			all["syn_ack_"+result] = agentCounter{Packets: n}
		}
	}
	return all
}

// changed are the counters that differ, and by how much.
func changed(before, after map[string]agentCounter) map[string]agentCounter {
	out := map[string]agentCounter{}
	for reason, c := range after {
		c.Packets -= before[reason].Packets
		c.Bytes -= before[reason].Bytes
		if c != (agentCounter{}) {
			out[reason] = c
		}
	}
	return out
}

func run(t testing.TB, prog *ebpf.Program, frame []byte) (verdict uint32, out []byte) {
	t.Helper()
	verdict, out, err := prog.Test(frame)
	if err != nil {
		t.Fatalf("run %v: %v", prog, err)
	}
	return verdict, out
}

// to wraps a client's SYN.
func to(src, dst netip.AddrPort, e packet.Encap, options ...packet.Option) []byte {
	return wrap(packet.TCP(src, dst, options...), e)
}

func wrap(frame []byte, e packet.Encap) []byte {
	e.NextHop = hostMAC
	out, err := packet.Encapsulate(frame, e)
	if err != nil {
		panic(fmt.Sprintf("encapsulate: %v", err))
	}
	return out
}

func srv6(kind config.Encapsulation, segments ...netip.Addr) packet.Encap {
	return packet.Encap{Kind: kind, Sender: sender, Segments: segments, FlowLabel: 0x12345}
}

func tunnel(kind config.Encapsulation, destination netip.Addr) packet.Encap {
	source := netip.MustParseAddr("192.0.2.1")
	if destination.Is6() {
		source = netip.MustParseAddr("fd00:9::1")
	}
	return packet.Encap{Kind: kind, Source: source, Destination: destination, FlowLabel: 0x12345}
}

// set is a copy of the frame with other bytes at an offset in layer 3.
func set(frame []byte, offset int, values ...byte) []byte {
	for i, v := range values {
		frame = packet.SetByte(frame, 14+offset+i, v)
	}
	return frame
}

// shorten takes bytes off the end of the frame but not off the length in the IPv6 header.
func shorten(frame []byte, n int) []byte { return packet.Truncate(frame, len(frame)-n) }

// cut takes bytes off the end of an IPv6 packet, and says so in its header.
func cut(frame []byte, length int) []byte {
	return set(packet.Truncate(frame, 14+length), 4, byte((length-40)>>8), byte(length-40))
}

// delivered is what the reference makes of a frame.
func delivered(frame []byte) []byte {
	out, err := packet.Decapsulate(frame)
	if err != nil {
		panic(fmt.Sprintf("decapsulate: %v", err))
	}
	return out
}

// withTLV is an inserted header with a TLV behind the list (RFC 8754 section 2.1.1).
func withTLV() []byte {
	srh := packet.NewSRH(1, sender, sid, vip6.Addr())
	srh.TLVs = []byte{4, 6, 0, 0, 0, 0, 0, 0} // PadN
	return packet.TCP(client6, vip6, packet.Ethernet(packet.MAC{2}, hostMAC), packet.Routing(srh))
}

// The offsets of what the cases change: in an inserted header behind the IPv6 header.
const (
	srhAt           = 40
	srhLength       = srhAt + 1
	srhType         = srhAt + 2
	srhSegmentsLeft = srhAt + 3
	srhLastEntry    = srhAt + 4
	functionAt      = 24 + 8
)

// mapped is the frame with the IPv4-mapped form of an address at an offset in layer 3.
func mapped(frame []byte, offset int, address netip.Addr) []byte {
	form := address.As16()
	return set(frame, offset, form[:]...)
}

type packetCase struct {
	name   string
	frame  []byte
	reason string
	out    []byte // nil: the frame unchanged
}

// uncommon are what else than TCP and UDP packets balancers send for a flow.
func uncommon(client, vip netip.AddrPort) map[string][]byte {
	fragments := packet.Fragments(packet.UDP(client, vip, packet.Payload(make([]byte, 3000))), 1440, 7)
	router, unreachable := netip.MustParseAddr("192.0.2.254"), uint8(3)
	if client.Addr().Is6() {
		router, unreachable = netip.MustParseAddr("2001:db8:ffff::1"), 1
	}
	return map[string][]byte{
		"first fragment":  fragments[0],
		"middle fragment": fragments[1],
		"last fragment":   fragments[2],
		"ICMP error":      packet.ICMPError(router, unreachable, 0, 0, packet.TCP(vip, client)),
	}
}

func deliveries() []packetCase {
	insert := to(client6, vip6, srv6(config.SRv6Insert, sid), packet.Payload([]byte("hello")))
	cases := []packetCase{
		{"insert", insert, "deliver_srv6_insert", nil},
		{"insert, two servers", to(client6, vip6, srv6(config.SRv6Insert, sid, nextSID)), "deliver_srv6_insert", nil},
		{"insert, eight servers", to(client6, vip6, srv6(config.SRv6Insert, sid, sid, sid, sid, sid, sid, sid, nextSID)),
			"deliver_srv6_insert", nil},
		{"insert, behind 8 bytes of options", to(client6, vip6, srv6(config.SRv6Insert, sid), packet.HopByHop(8)),
			"deliver_srv6_insert", nil},
		{"insert, behind 1200 bytes of options", to(client6, vip6, srv6(config.SRv6Insert, sid, nextSID), packet.HopByHop(1200)),
			"deliver_srv6_insert", nil},
		{"insert, before options", to(client6, vip6, srv6(config.SRv6Insert, sid), packet.DestinationOptions(16)),
			"deliver_srv6_insert", nil},
		{"insert, TLV", withTLV(), "deliver_srv6_insert", nil},
		{"insert, Ethernet padding", packet.Pad(insert, 1, 2, 3), "deliver_srv6_insert", nil},
		{"insert, other argument", set(insert, functionAt+2, 1, 2, 3, 4, 5, 6), "deliver_srv6_insert", nil},
		{"insert, hop limit 1", packet.SetHopLimit(insert, 1), "deliver_srv6_insert", nil},
		// A tunnel of the client's own, if a balancer ever let it through.
		{"insert, before GRE", set(insert, srhAt, 47), "deliver_srv6_insert", nil},
	}
	for name, frame := range uncommon(client6, vip6) {
		cases = append(cases, packetCase{"insert, " + name, wrap(frame, srv6(config.SRv6Insert, sid)), "deliver_srv6_insert", nil})
	}
	for _, inner := range []struct {
		name     string
		src, dst netip.AddrPort
	}{{"IPv4", client4, vip4}, {"IPv6", client6, vip6}} {
		for _, outer := range []struct {
			name   string
			e      packet.Encap
			reason string
		}{
			{"srv6-encap", srv6(config.SRv6Encap, sid), "deliver_srv6_encap"},
			{"srv6-encap, two servers", srv6(config.SRv6Encap, sid, nextSID), "deliver_srv6_encap"},
			{"gre over IPv4", tunnel(config.GRE, tunnel4), "deliver_gre"},
			{"gre over IPv6", tunnel(config.GRE, tunnel6), "deliver_gre"},
			{"ipip over IPv4", tunnel(config.IPIP, tunnel4), "deliver_ipip"},
			{"ipip over IPv6", tunnel(config.IPIP, tunnel6), "deliver_ipip"},
		} {
			frame := to(inner.src, inner.dst, outer.e, packet.TrafficClass(0xb8), packet.Payload([]byte("hello")))
			cases = append(cases, packetCase{inner.name + " in " + outer.name, frame, outer.reason, nil})
			for name, frame := range uncommon(inner.src, inner.dst) {
				cases = append(cases, packetCase{inner.name + " in " + outer.name + ", " + name, wrap(frame, outer.e), outer.reason, nil})
			}
		}
	}
	for i := range cases {
		cases[i].out = delivered(cases[i].frame)
	}
	return cases
}

func passes() []packetCase {
	insert := to(client6, vip6, srv6(config.SRv6Insert, sid))
	gre4, gre6 := to(client4, vip4, tunnel(config.GRE, tunnel4)), to(client6, vip6, tunnel(config.GRE, tunnel6))
	ipip4, ipip6 := to(client4, vip4, tunnel(config.IPIP, tunnel4)), to(client6, vip6, tunnel(config.IPIP, tunnel6))
	plain4 := packet.TCP(client4, vip4, packet.Ethernet(packet.MAC{2}, hostMAC))
	plain6 := packet.TCP(client6, vip6, packet.Ethernet(packet.MAC{2}, hostMAC))
	return []packetCase{
		{"other MAC address", packet.SetMACs(insert, packet.MAC{2}, packet.MAC{2, 9}), "pass_not_for_host", nil},
		{"broadcast", packet.SetMACs(insert, packet.MAC{2}, packet.MAC{255, 255, 255, 255, 255, 255}), "pass_not_for_host", nil},
		{"ARP", packet.SetByte(packet.SetByte(insert, 12, 8), 13, 6), "pass_not_ip", nil},
		{"VLAN", wrap(packet.TCP(client6, vip6, packet.VLAN(7)), srv6(config.SRv6Insert, sid)), "pass_not_ip", nil},
		{"plain IPv4 to the VIP", plain4, "pass_not_for_agent", nil},
		{"plain IPv6 to the VIP", plain6, "pass_not_for_agent", nil},
		{"plain IPv4 to the tunnel's address", packet.TCP(client4, netip.AddrPortFrom(tunnel4, 22),
			packet.Ethernet(packet.MAC{2}, hostMAC)), "pass_not_for_agent", nil},
		{"other locator", set(insert, 24+7, 9), "pass_not_for_agent", nil},
		{"gre to another address", set(gre4, 19, 54), "pass_not_for_agent", nil},
		{"host SID", set(insert, functionAt, 0, 0), "pass_host", nil},
		{"IPv4 header cut short", packet.Truncate(plain4, 14+19), "pass_ip_header", nil},
		{"IPv6 header cut short", packet.Truncate(plain6, 14+39), "pass_ip_header", nil},
		{"tunnel, IPv4 version 5", set(gre4, 0, 0x55), "pass_ip_header", nil},
		{"tunnel, IPv4 header of 16 bytes", set(gre4, 0, 0x44), "pass_ip_header", nil},
		{"tunnel, IPv4 longer than the frame", shorten(gre4, 1), "pass_ip_header", nil},
		{"tunnel, IPv6 version 5", set(gre6, 0, 0x50), "pass_ip_header", nil},
		{"tunnel, IPv6 longer than the frame", shorten(gre6, 1), "pass_ip_header", nil},
		{"tunnel, first fragment", set(ipip4, 6, 0x20), "pass_fragment", nil},
		{"tunnel, later fragment", set(ipip4, 7, 1), "pass_fragment", nil},
		{"gre with a key", set(gre4, 20, 0x20), "pass_gre", nil},
		{"gre version 1", set(gre4, 21, 1), "pass_gre", nil},
		{"gre with Ethernet", set(gre6, 42, 0x65, 0x58), "pass_gre", nil},
		{"gre header cut short", cut(gre6, 43), "pass_gre", nil},
		{"gre to another VIP", to(client4, other4, tunnel(config.GRE, tunnel6)), "pass_other_tunnel", nil},
		{"ipip to another VIP", to(client6, other6, tunnel(config.IPIP, tunnel4)), "pass_other_tunnel", nil},
		{"gre to the mapped form of an IPv4 address", mapped(gre6, 24, tunnel4), "pass_not_for_agent", nil},
		{"ipip to the mapped form of an IPv4 VIP", mapped(ipip6, 40+24, vip4.Addr()), "pass_other_tunnel", nil},
		{"ipip, inner version", set(ipip6, 40, 0x50), "pass_other_tunnel", nil},
		{"ipip, inner header cut short", cut(ipip6, 40+39), "pass_other_tunnel", nil},
	}
}

func drops() []packetCase {
	insert := to(client6, vip6, srv6(config.SRv6Insert, sid))
	two := to(client6, other6, srv6(config.SRv6Insert, sid, nextSID))
	encap4, encap6 := to(client4, vip4, srv6(config.SRv6Encap, sid)), to(client6, vip6, srv6(config.SRv6Encap, sid))
	encapTwo := to(client4, other4, srv6(config.SRv6Encap, sid, nextSID))
	options := to(client6, vip6, srv6(config.SRv6Insert, sid), packet.HopByHop(8))
	ipip4 := to(client4, vip4, tunnel(config.IPIP, tunnel4))
	bare := packet.TCP(client6, netip.AddrPortFrom(sid, 80), packet.Ethernet(packet.MAC{2}, hostMAC))
	return []packetCase{
		{"version", set(insert, 0, 0x50), "drop_ip_header", nil},
		{"longer than the frame", shorten(insert, 1), "drop_ip_header", nil},
		{"function 0x0001", set(insert, functionAt+1, 1), "drop_unknown_function", nil},
		{"function 0x0500", set(insert, functionAt, 5, 0), "drop_unknown_function", nil},
		{"options beyond the packet", set(options, 41, 255), "drop_extension", nil},
		{"options cut short", cut(options, 41), "drop_extension", nil},
		{"fragment", set(bare, 6, 44), "drop_fragment", nil},
		{"routing type 2", set(insert, srhType, 2), "drop_routing_type", nil},
		{"header beyond the packet", set(insert, srhLength, 255), "drop_srh_truncated", nil},
		{"header cut short", cut(insert, 47), "drop_srh_truncated", nil},
		{"segment cut short", cut(insert, 40+23), "drop_srh_truncated", nil},
		{"last segment cut short", cut(insert, 40+55), "drop_srh_truncated", nil},
		{"last entry beyond the header", set(insert, srhLastEntry, 3), "drop_srh_last_entry", nil},
		{"last entry 255", set(insert, srhLastEntry, 255), "drop_srh_last_entry", nil},
		{"header without a list", set(insert, srhLength, 1), "drop_srh_last_entry", nil},
		{"segments left beyond the list", set(insert, srhSegmentsLeft, 4), "drop_srh_segments_left", nil},
		{"no segment left", set(insert, srhSegmentsLeft, 0), "drop_srh_segments_left", nil},
		{"not encapsulated", bare, "drop_not_encapsulated", nil},
		{"inner IPv4 version", set(encap4, 40, 0x55), "drop_inner_header", nil},
		{"inner IPv4 header of 16 bytes", set(encap4, 40, 0x44), "drop_inner_header", nil},
		{"inner IPv4 header cut short", cut(encap4, 40+19), "drop_inner_header", nil},
		{"inner IPv4 longer than the outer", cut(encap4, 40+39), "drop_inner_header", nil},
		{"inner IPv6 version", set(encap6, 40, 0x50), "drop_inner_header", nil},
		{"inner IPv6 header cut short", cut(encap6, 40+39), "drop_inner_header", nil},
		{"inner IPv6 longer than the outer", cut(encap6, 40+59), "drop_inner_header", nil},
		{"ipip, inner longer than the outer", set(ipip4, 20+2, 0xff), "drop_inner_header", nil},
		{"insert, another VIP", to(client6, other6, srv6(config.SRv6Insert, sid)), "drop_not_served", nil},
		{"insert, the mapped form of an IPv4 VIP", mapped(insert, srhAt+8, vip4.Addr()), "drop_not_served", nil},
		{"encap, the mapped form of an IPv4 VIP", mapped(encap6, 40+24, vip4.Addr()), "drop_not_served", nil},
		{"encap, another VIP", to(client6, other6, srv6(config.SRv6Encap, sid)), "drop_not_served", nil},
		{"encap, last of two, another VIP", set(encapTwo, srhSegmentsLeft, 0), "drop_not_served", nil},
		{"insert, last of two, another VIP", set(two, srhSegmentsLeft, 1), "drop_not_served", nil},
		{"hop limit 1 on the way to the next", packet.SetHopLimit(two, 1), "drop_hop_limit", nil},
		{"congestion met by who does not understand", set(encap4, 1, 0x30), "drop_ecn", nil},
	}
}

func nexts() []packetCase {
	return []packetCase{
		{"insert", to(client6, other6, srv6(config.SRv6Insert, sid, nextSID)), "next_segment", nil},
		{"insert, first of three", to(client6, other6, srv6(config.SRv6Insert, sid, nextSID, nextSID)), "next_segment", nil},
		{"insert, behind options", to(client6, other6, srv6(config.SRv6Insert, sid, nextSID), packet.HopByHop(24)),
			"next_segment", nil},
		{"encap IPv4", to(client4, other4, srv6(config.SRv6Encap, sid, nextSID)), "next_segment", nil},
		{"encap IPv6", to(client6, other6, srv6(config.SRv6Encap, sid, nextSID)), "next_segment", nil},
		{"encap, hop limit 2", packet.SetHopLimit(to(client6, other6, srv6(config.SRv6Encap, sid, nextSID)), 2),
			"next_segment", nil},
	}
}

func TestReceive(t *testing.T) {
	k := testKernel(t)
	for _, group := range []struct {
		verdict uint32
		cases   []packetCase
	}{
		{xdpPass, deliveries()}, {xdpPass, passes()}, {xdpPass, nexts()}, {xdpDrop, drops()},
	} {
		for _, c := range group.cases {
			t.Run(c.reason+"/"+c.name, func(t *testing.T) {
				before := counters(t, k)
				verdict, out := run(t, k.objects.XdpAgent, c.frame)
				if verdict != group.verdict {
					t.Errorf("verdict %d, want %d", verdict, group.verdict)
				}
				want := map[string]agentCounter{c.reason: {Packets: 1, Bytes: uint64(len(c.frame) - 14)}}
				if diff := cmp.Diff(want, changed(before, counters(t, k))); diff != "" {
					t.Errorf("counters (-want +got):\n%s", diff)
				}
				wantOut := c.out
				if wantOut == nil {
					wantOut = c.frame
				}
				if diff := cmp.Diff(wantOut, out); diff != "" {
					t.Errorf("frame (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// TestECN goes through figure 4 of RFC 6040.
func TestECN(t *testing.T) {
	k := testKernel(t)
	const notECT, ect1, ect0, ce, drop = 0, 1, 2, 3, 4
	figure4 := [4][4]int{ // by inner, outer
		notECT: {notECT, notECT, notECT, drop},
		ect1:   {ect1, ect1, ect1, ce},
		ect0:   {ect0, ect1, ect0, ce},
		ce:     {ce, ce, ce, ce},
	}
	for inner, row := range figure4 {
		for outer, want := range row {
			t.Run(fmt.Sprintf("IPv4, inner %d outer %d", inner, outer), func(t *testing.T) {
				frame := to(client4, vip4, srv6(config.SRv6Encap, sid), packet.TrafficClass(0xb8|byte(inner)))
				checkECN(t, k, set(frame, 1, frame[15]&^0x30|byte(outer)<<4), want,
					packet.TCP(client4, vip4, packet.TrafficClass(0xb8|byte(want)), packet.HopLimit(63)))
			})
			t.Run(fmt.Sprintf("IPv6, inner %d outer %d", inner, outer), func(t *testing.T) {
				frame := to(client6, vip6, srv6(config.SRv6Encap, sid), packet.TrafficClass(0xb8|byte(inner)))
				checkECN(t, k, set(frame, 1, frame[15]&^0x30|byte(outer)<<4), want,
					packet.TCP(client6, vip6, packet.TrafficClass(0xb8|byte(want)), packet.HopLimit(63)))
			})
		}
	}
}

func checkECN(t *testing.T, k *kernel, frame []byte, want int, wantFrame []byte) {
	t.Helper()
	verdict, out := run(t, k.objects.XdpAgent, frame)
	if want == 4 {
		if verdict != xdpDrop {
			t.Errorf("verdict %d, want a drop", verdict)
		}
		return
	}
	if verdict != xdpPass {
		t.Fatalf("verdict %d, want %d", verdict, xdpPass)
	}
	if diff := cmp.Diff(wantFrame[14:], out[14:]); diff != "" {
		t.Errorf("packet (-want +got):\n%s", diff)
	}
}

func TestForward(t *testing.T) {
	k := testKernel(t)
	for _, c := range nexts() {
		t.Run(c.name, func(t *testing.T) {
			verdict, out := run(t, k.objects.TcForward, c.frame)
			if verdict != tcRedirect {
				t.Errorf("verdict %d, want %d", verdict, tcRedirect)
			}
			want, err := packet.Advance(c.frame)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, out); diff != "" {
				t.Errorf("frame (-want +got):\n%s", diff)
			}
		})
	}
	for _, c := range append(passes(), deliveries()...) {
		if c.reason == "pass_ip_header" {
			continue // too short for a socket buffer of its protocol
		}
		frame := c.frame
		if c.out != nil {
			frame = c.out
		}
		t.Run("leaves alone/"+c.name, func(t *testing.T) {
			verdict, out := run(t, k.objects.TcForward, frame)
			if verdict != tcUnspec || !bytes.Equal(out, frame) {
				t.Errorf("verdict %#x, %d bytes; want %#x and all %d unchanged", verdict, len(out), uint32(tcUnspec), len(frame))
			}
		})
	}
	next := nexts()[0].frame // last entry 3: the balancer, two servers and the VIP
	for name, frame := range map[string][]byte{
		"without segments":               set(set(drops()[0].frame, 0, 0x60), srhSegmentsLeft, 0),
		"hop limit 0":                    packet.SetHopLimit(next, 0),
		"hop limit 1":                    packet.SetHopLimit(next, 1),
		"segments left beyond the list":  set(next, srhSegmentsLeft, 5),
		"last entry beyond the header":   set(next, srhSegmentsLeft+1, 4),
		"both, beyond the packet's list": set(next, srhSegmentsLeft, 5, 4),
	} {
		t.Run(name, func(t *testing.T) {
			before := counters(t, k)
			if verdict, _ := run(t, k.objects.TcForward, frame); verdict != tcShot {
				t.Errorf("verdict %d, want %d", verdict, tcShot)
			}
			want := map[string]agentCounter{"drop_rewrite": {Packets: 1, Bytes: uint64(len(frame) - 14)}}
			if diff := cmp.Diff(want, changed(before, counters(t, k))); diff != "" {
				t.Errorf("counters (-want +got):\n%s", diff)
			}
		})
	}
}

// synAckCase is a frame that the host sends.
type synAckCase struct {
	name    string
	frame   []byte
	counter string // of SYN-ACKs; empty: none
	want    []byte // nil: unchanged
}

// synAcks are for packets of 1500 bytes: 1384 is what 56 bytes of srv6-insert leave to IPv6, 1416 what
// 44 of gre over IPv6 leave to IPv4, 1420 what 40 of srv6-encap do.
func synAcks() []synAckCase {
	synAck := packet.Flags(packet.SYN | packet.ACK)
	nop := packet.TCPOption(layers.TCPOptionKindNop, nil)
	timestamps := packet.Timestamps(1, 2)
	otherPort := netip.AddrPortFrom(vip4.Addr(), 8080)
	return []synAckCase{
		{"IPv6", packet.TCP(vip6, client6, synAck, packet.MSS(1440), timestamps), "clamped",
			packet.TCP(vip6, client6, synAck, packet.MSS(1384), timestamps)},
		{"IPv4", packet.TCP(vip4, client4, synAck, packet.MSS(1460), timestamps), "clamped",
			packet.TCP(vip4, client4, synAck, packet.MSS(1416), timestamps)},
		{"all ports", packet.TCP(otherPort, client4, synAck, packet.MSS(1460)), "clamped",
			packet.TCP(otherPort, client4, synAck, packet.MSS(1420))},
		{"IPv4 options", packet.TCP(vip4, client4, synAck, packet.IPOptions([]byte{1, 1, 1, 1}), packet.MSS(1460)), "clamped",
			packet.TCP(vip4, client4, synAck, packet.IPOptions([]byte{1, 1, 1, 1}), packet.MSS(1416))},
		{"behind timestamps", packet.TCP(vip6, client6, synAck, timestamps, packet.MSS(65535)), "clamped",
			packet.TCP(vip6, client6, synAck, timestamps, packet.MSS(1384))},
		{"at an odd byte", packet.TCP(vip6, client6, synAck, nop, packet.MSS(1440)), "clamped",
			packet.TCP(vip6, client6, synAck, nop, packet.MSS(1384))},
		{"behind 16 no-operations", padded(16, 1440), "clamped",
			padded(16, 1384)},
		{"equal", packet.TCP(vip6, client6, synAck, packet.MSS(1384)), "fits", nil},
		{"less", packet.TCP(vip6, client6, synAck, packet.MSS(1220)), "fits", nil},
		{"no options", packet.TCP(vip6, client6, synAck), "no_option", nil},
		{"other options", packet.TCP(vip6, client6, synAck, timestamps), "no_option", nil},
		{"behind the end", packet.SetByte(packet.TCP(vip6, client6, synAck, nop, packet.MSS(1440)), 14+60, 0), "no_option", nil},
		{"36 no-operations", padded(36, 1440), "malformed", nil},
		{"option of length 0", packet.SetByte(packet.TCP(vip6, client6, synAck, packet.MSS(1440)), 14+61, 0), "malformed", nil},
		{"MSS of length 3", packet.SetByte(packet.TCP(vip6, client6, synAck, packet.MSS(1440)), 14+61, 3), "malformed", nil},
		{"option beyond the header", packet.SetByte(packet.TCP(vip6, client6, synAck, packet.MSS(1440)), 14+61, 5), "malformed", nil},
		{"SYN", packet.TCP(vip6, client6, packet.Flags(packet.SYN), packet.MSS(1440)), "", nil},
		{"ACK", packet.TCP(vip6, client6, packet.Flags(packet.ACK), packet.MSS(1440)), "", nil},
		{"other address", packet.TCP(other6, client6, synAck, packet.MSS(1440)), "", nil},
		{"other port", packet.TCP(netip.AddrPortFrom(vip6.Addr(), 53), client6, synAck, packet.MSS(1440)), "", nil},
		{"UDP", packet.UDP(vip6, client6), "", nil},
		{"later fragment", set(packet.TCP(vip4, client4, synAck, packet.MSS(1460)), 7, 1), "", nil},
		{"IPv4 version 5", set(packet.TCP(vip4, client4, synAck, packet.MSS(1460)), 0, 0x55), "", nil},
		{"IPv4 header of 16 bytes", // where the flags would be is a SYN-ACK's
			set(packet.TCP(vip4, client4, packet.Sequence(0, 0x120000), packet.MSS(1460)), 0, 0x44), "", nil},
		{"IPv6 version 5", set(packet.TCP(vip6, client6, synAck, packet.MSS(1440)), 0, 0x50), "", nil},
		{"the mapped form of an IPv4 address", mapped(packet.TCP(vip6, client6, synAck, packet.MSS(1440)), 8, vip4.Addr()), "", nil},
	}
}

func TestClampMSS(t *testing.T) {
	k := testKernel(t)
	for _, c := range synAcks() {
		t.Run(c.name, func(t *testing.T) {
			before := counters(t, k)
			verdict, out := run(t, k.objects.TcAgent, c.frame)
			if verdict != tcUnspec {
				t.Errorf("verdict %#x, want %#x", verdict, uint32(tcUnspec))
			}
			want := c.want
			if want == nil {
				want = c.frame
			}
			if diff := cmp.Diff(want, out); diff != "" {
				t.Errorf("frame (-want +got):\n%s", diff)
			}
			wantCounters := map[string]agentCounter{}
			if c.counter != "" {
				wantCounters["syn_ack_"+c.counter] = agentCounter{Packets: 1}
			}
			if diff := cmp.Diff(wantCounters, changed(before, counters(t, k))); diff != "" {
				t.Errorf("counters (-want +got):\n%s", diff)
			}
		})
	}
}

// padded is a SYN-ACK whose MSS is behind n no-operations.
func padded(n int, mss uint16) []byte {
	options := []packet.Option{packet.Flags(packet.SYN | packet.ACK)}
	for range n {
		options = append(options, packet.TCPOption(layers.TCPOptionKindNop, nil))
	}
	return packet.TCP(vip6, client6, append(options, packet.MSS(mss))...)
}

// TestReferenceAgrees delivers random packets in random encapsulations, some damaged in one byte of
// their headers: the data path delivers what the reference delivers, and nothing else.
func TestReferenceAgrees(t *testing.T) {
	k := testKernel(t)
	rapid.Check(t, func(r *rapid.T) {
		version := rapid.SampledFrom([]int{4, 6}).Draw(r, "version")
		frame := packettest.Frame(version).Draw(r, "frame")
		e := packettest.Encap(version).Draw(r, "encapsulation")
		e.NextHop = hostMAC
		inner, err := packet.Decode(frame)
		if err != nil {
			r.Fatal(err)
		}
		vip := inner.Headers[0].FinalDestination()
		cfg := testConfig()
		server := packet.Server{VIPs: []netip.Addr{vip}}
		if len(e.Segments) > 0 {
			server.Locator = netip.PrefixFrom(e.Segments[0], 64).Masked()
		} else {
			server.Addresses = []netip.Addr{e.Destination}
		}
		cfg.Node.Locator, cfg.Node.Addresses = server.Locator, server.Addresses
		cfg.Services = []config.AgentService{{VIP: vip, Protocol: config.UDP}}
		if err := k.write(newContent(cfg, mtu)); err != nil {
			r.Fatal(err)
		}
		wrapped, err := packet.Encapsulate(frame, e)
		if err != nil {
			r.Skip(err)
		}
		if len(inner.VLANs) > 0 {
			r.Skip("VLAN tags are for the host")
		}
		if rapid.Bool().Draw(r, "damage") {
			at := rapid.IntRange(14, min(len(wrapped)-1, 14+200)).Draw(r, "at")
			wrapped = packet.SetByte(wrapped, at, rapid.Byte().Draw(r, "value"))
		}
		verdict, want, _ := server.Receive(wrapped)
		got, out, err := k.objects.XdpAgent.Test(wrapped)
		if err != nil {
			r.Fatal(err)
		}
		delivered := got == xdpPass && !bytes.Equal(out, wrapped)
		if delivered != (verdict == packet.Deliver) {
			r.Fatalf("XDP verdict %d, delivered %v; the reference says %v", got, delivered, verdict)
		}
		if diff := cmp.Diff(want, out); delivered && diff != "" {
			r.Fatalf("frame (-want +got):\n%s", diff)
		}
	})
}
