// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net/netip"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// delivered returns the packet that the reference delivers for a frame.
func delivered(frame []byte) []byte {
	out, err := packet.Decapsulate(frame)
	if err != nil {
		panic(fmt.Sprintf("decapsulate: %v", err))
	}
	return out
}

// advanced returns the frame that XDP leaves to tc for the next server.
func advanced(frame []byte) []byte {
	out, err := packet.Advance(frame)
	if err != nil {
		panic(fmt.Sprintf("advance: %v", err))
	}
	return packet.SetMACs(out, hostMAC, hostMAC)
}

// withTLV returns a frame with an inserted header that has a TLV after the segment list (RFC 8754
// section 2.1.1).
func withTLV() []byte {
	srh := packet.NewSRH(1, sender, sid, vip6.Addr())
	srh.TLVs = []byte{4, 6, 0, 0, 0, 0, 0, 0} // PadN
	return packet.TCP(client6, vip6, packet.Ethernet(packet.MAC{2}, hostMAC), packet.Routing(srh))
}

// mapped returns the frame with the IPv4-mapped form of an address at an offset in layer 3.
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

// uncommon returns packets other than TCP and UDP packets that balancers send for a flow.
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
	insert := to(client6, vip6, srv6Encap(desired.SRv6Insert, sid), packet.Payload([]byte("hello")))
	cases := []packetCase{
		{"insert", insert, "deliver_srv6_insert", nil},
		{"insert, two servers", to(client6, vip6, srv6Encap(desired.SRv6Insert, sid, nextSID)), "deliver_srv6_insert", nil},
		{"insert, eight servers", to(client6, vip6, srv6Encap(desired.SRv6Insert, sid, sid, sid, sid, sid, sid, sid, nextSID)),
			"deliver_srv6_insert", nil},
		{"insert, behind 8 bytes of options", to(client6, vip6, srv6Encap(desired.SRv6Insert, sid), packet.HopByHop(8)),
			"deliver_srv6_insert", nil},
		{"insert, behind 1200 bytes of options", to(client6, vip6, srv6Encap(desired.SRv6Insert, sid, nextSID), packet.HopByHop(1200)),
			"deliver_srv6_insert", nil},
		{"insert, before options", to(client6, vip6, srv6Encap(desired.SRv6Insert, sid), packet.DestinationOptions(16)),
			"deliver_srv6_insert", nil},
		{"insert, TLV", withTLV(), "deliver_srv6_insert", nil},
		{"insert, Ethernet padding", packet.Pad(insert, 1, 2, 3), "deliver_srv6_insert", nil},
		{"insert, other argument", set(insert, functionAt+2, 1, 2, 3, 4, 5, 6), "deliver_srv6_insert", nil},
		{"insert, hop limit 1", packet.SetHopLimit(insert, 1), "deliver_srv6_insert", nil},
		// A tunnel of the client's own, in case a balancer forwards it.
		{"insert, before GRE", set(insert, srhAt, 47), "deliver_srv6_insert", nil},
	}
	for name, frame := range uncommon(client6, vip6) {
		cases = append(cases, packetCase{"insert, " + name, wrap(frame, srv6Encap(desired.SRv6Insert, sid)), "deliver_srv6_insert", nil})
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
			{"srv6-encap", srv6Encap(desired.SRv6Encap, sid), "deliver_srv6_encap"},
			{"srv6-encap, two servers", srv6Encap(desired.SRv6Encap, sid, nextSID), "deliver_srv6_encap"},
			{"gre over IPv4", tunnel(desired.GRE, tunnel4), "deliver_gre"},
			{"gre over IPv6", tunnel(desired.GRE, tunnel6), "deliver_gre"},
			{"ipip over IPv4", tunnel(desired.IPIP, tunnel4), "deliver_ipip"},
			{"ipip over IPv6", tunnel(desired.IPIP, tunnel6), "deliver_ipip"},
		} {
			frame := to(inner.src, inner.dst, outer.e, packet.TrafficClass(0xb8), packet.Payload([]byte("hello")))
			cases = append(cases, packetCase{inner.name + " in " + outer.name, frame, outer.reason, nil})
			for name, frame := range uncommon(inner.src, inner.dst) {
				cases = append(cases, packetCase{inner.name + " in " + outer.name + ", " + name, wrap(frame, outer.e), outer.reason, nil})
			}
		}
	}
	cases = append(cases, taken()...)
	for i := range cases {
		cases[i].out = delivered(cases[i].frame)
	}
	return cases
}

// asks returns a client's packet to this server, with a function about its flow, and with the next
// server if there is one.
func asks(kind desired.Encapsulation, function uint16, frame []byte, next ...netip.Addr) []byte {
	return wrap(frame, srv6Encap(kind, append([]netip.Addr{sidOf(sid, function)}, next...)...))
}

// bouncing is a list of two servers in turn: this one is the first.
func bouncing(n int) (segments []netip.Addr) {
	for i := range n {
		segments = append(segments, []netip.Addr{sid, nextSID}[i%2])
	}
	return segments
}

func whole(e packet.Encap) packet.Encap {
	e.Whole = true
	return e
}

// taken are packets with functions about flows without sockets.
func taken() []packetCase {
	syn4, syn6 := packet.TCP(client4, vip4), packet.TCP(client6, vip6)
	return []packetCase{
		{"connect-force", asks(desired.SRv6Insert, connectForce, syn6), "deliver_srv6_insert", nil},
		{"connect-force of two", asks(desired.SRv6Encap, connectForce, syn4, nextSID), "deliver_srv6_encap", nil},
		{"connect-avail at the last", asks(desired.SRv6Encap, connectAvail, syn6), "deliver_srv6_encap", nil},
		{"connect-force, behind options", asks(desired.SRv6Insert, connectForce, packet.TCP(client6, vip6, packet.DestinationOptions(16))),
			"deliver_srv6_insert", nil},
		{"ack-stickiness", asks(desired.SRv6Insert, ackStickiness, syn6), "deliver_srv6_insert", nil},
		{"ack-stickiness, UDP", asks(desired.SRv6Encap, ackStickiness, packet.UDP(client4, vip4)), "deliver_srv6_encap", nil},
		{"recover-stickiness at the last, to be reset", asks(desired.SRv6Insert, recoverStickiness, syn6), "deliver_not_local", nil},
	}
}

func passes() []packetCase {
	insert := to(client6, vip6, srv6Encap(desired.SRv6Insert, sid))
	gre4, gre6 := to(client4, vip4, tunnel(desired.GRE, tunnel4)), to(client6, vip6, tunnel(desired.GRE, tunnel6))
	ipip4, ipip6 := to(client4, vip4, tunnel(desired.IPIP, tunnel4)), to(client6, vip6, tunnel(desired.IPIP, tunnel6))
	plain4 := packet.TCP(client4, vip4, packet.Ethernet(packet.MAC{2}, hostMAC))
	plain6 := packet.TCP(client6, vip6, packet.Ethernet(packet.MAC{2}, hostMAC))
	return []packetCase{
		{"other MAC address", packet.SetMACs(insert, packet.MAC{2}, packet.MAC{2, 9}), "pass_not_for_host", nil},
		{"broadcast", packet.SetMACs(insert, packet.MAC{2}, packet.MAC{255, 255, 255, 255, 255, 255}), "pass_not_for_host", nil},
		{"ARP", packet.SetByte(packet.SetByte(insert, 12, 8), 13, 6), "pass_not_ip", nil},
		{"VLAN", wrap(packet.TCP(client6, vip6, packet.VLAN(7)), srv6Encap(desired.SRv6Insert, sid)), "pass_not_ip", nil},
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
		{"gre to another VIP", to(client4, other4, tunnel(desired.GRE, tunnel6)), "pass_other_tunnel", nil},
		{"ipip to another VIP", to(client6, other6, tunnel(desired.IPIP, tunnel4)), "pass_other_tunnel", nil},
		{"gre to the mapped form of an IPv4 address", mapped(gre6, 24, tunnel4), "pass_not_for_agent", nil},
		{"ipip to the mapped form of an IPv4 VIP", mapped(ipip6, 40+24, vip4.Addr()), "pass_other_tunnel", nil},
		{"ipip, inner version", set(ipip6, 40, 0x50), "pass_other_tunnel", nil},
		{"ipip, inner header cut short", cut(ipip6, 40+39), "pass_other_tunnel", nil},
	}
}

func drops() []packetCase {
	insert := to(client6, vip6, srv6Encap(desired.SRv6Insert, sid))
	two := to(client6, other6, srv6Encap(desired.SRv6Insert, sid, nextSID))
	encap4, encap6 := to(client4, vip4, srv6Encap(desired.SRv6Encap, sid)), to(client6, vip6, srv6Encap(desired.SRv6Encap, sid))
	encapTwo := to(client4, other4, srv6Encap(desired.SRv6Encap, sid, nextSID))
	options := to(client6, vip6, srv6Encap(desired.SRv6Insert, sid), packet.HopByHop(8))
	ipip4 := to(client4, vip4, tunnel(desired.IPIP, tunnel4))
	bare := packet.TCP(client6, netip.AddrPortFrom(sid, 80), packet.Ethernet(packet.MAC{2}, hostMAC))
	syn4, syn6, few4, few6 := packet.TCP(client4, vip4), packet.TCP(client6, vip6), uncommon(client4, vip4), uncommon(client6, vip6)
	return []packetCase{
		{"recover-stickiness at the last", asks(desired.SRv6Encap, recoverStickiness, syn4), "drop_not_local", nil},
		{"steer at the last, ICMP error", asks(desired.SRv6Encap, steer, few4["ICMP error"]), "drop_not_local", nil},
		{"steer at the last, ICMP error, where others are reset",
			asks(desired.SRv6Insert, steer, few6["ICMP error"]), "drop_not_local", nil},
		{"steer at the last, later fragment", asks(desired.SRv6Encap, steer, few4["last fragment"]), "drop_not_local", nil},
		{"recover-stickiness of a stranger", set(asks(desired.SRv6Encap, recoverStickiness, syn4), 8+3, 0x6d), "drop_sender", nil},
		{"steer of a stranger, later fragment", set(asks(desired.SRv6Encap, steer, few4["last fragment"]), 8+3, 0x6d), "drop_sender", nil},
		{"connect-force of a stranger", set(asks(desired.SRv6Insert, connectForce, syn6), srhAt+8+2*16+3, 0x6d), "drop_sender", nil},
		{"connect-avail, UDP", asks(desired.SRv6Insert, connectAvail, packet.UDP(client6, vip6)), "drop_tcp_flags", nil},
		{"connect-avail, SYN and FIN", asks(desired.SRv6Encap, connectAvail,
			packet.TCP(client6, vip6, packet.Flags(packet.SYN|packet.FIN))), "drop_tcp_flags", nil},
		{"connect-force, SYN and RST", asks(desired.SRv6Insert, connectForce,
			packet.TCP(client6, vip6, packet.Flags(packet.SYN|packet.RST))), "drop_tcp_flags", nil},
		{"connect-avail, ACK", asks(desired.SRv6Encap, connectAvail,
			packet.TCP(client4, vip4, packet.Flags(packet.ACK))), "drop_tcp_flags", nil},
		{"recover-stickiness, ICMP error", asks(desired.SRv6Insert, recoverStickiness, few6["ICMP error"]), "drop_transport", nil},
		{"refused with hop limit 1", packet.SetHopLimit(asks(desired.SRv6Insert, connectAvail, syn6, nextSID), 1), "drop_hop_limit", nil},
		{"connect-force without a balancer", set(asks(desired.SRv6Insert, connectForce, syn6), srhSegmentsLeft, 2),
			"drop_srh_segments_left", nil},
		{"version", set(insert, 0, 0x50), "drop_ip_header", nil},
		{"longer than the frame", shorten(insert, 1), "drop_ip_header", nil},
		{"function 0x0008", set(insert, functionAt+1, 8), "drop_unknown_function", nil},
		{"a balancer's function", set(insert, functionAt+1, 0x11), "drop_unknown_function", nil},
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
		{"inserted list of 11 servers", to(client6, other6, srv6Encap(desired.SRv6Insert, bouncing(11)...)), "drop_too_many_servers", nil},
		{"list of 11 servers, to its VIP", to(client6, vip6, srv6Encap(desired.SRv6Insert, bouncing(11)...)), "drop_too_many_servers", nil},
		{"inserted list of 90 servers", to(client6, other6, srv6Encap(desired.SRv6Insert, bouncing(90)...)), "drop_too_many_servers", nil},
		{"reduced list of 11 servers", to(client4, other4, srv6Encap(desired.SRv6Encap, bouncing(11)...)), "drop_too_many_servers", nil},
		{"whole list of 11 servers", to(client6, other6, whole(srv6Encap(desired.SRv6Encap, bouncing(11)...))), "drop_too_many_servers", nil},
		{"not encapsulated", bare, "drop_not_encapsulated", nil},
		{"inner IPv4 version", set(encap4, 40, 0x55), "drop_inner_header", nil},
		{"inner IPv4 header of 16 bytes", set(encap4, 40, 0x44), "drop_inner_header", nil},
		{"inner IPv4 header cut short", cut(encap4, 40+19), "drop_inner_header", nil},
		{"inner IPv4 longer than the outer", cut(encap4, 40+39), "drop_inner_header", nil},
		{"inner IPv6 version", set(encap6, 40, 0x50), "drop_inner_header", nil},
		{"inner IPv6 header cut short", cut(encap6, 40+39), "drop_inner_header", nil},
		{"inner IPv6 longer than the outer", cut(encap6, 40+59), "drop_inner_header", nil},
		{"ipip, inner longer than the outer", set(ipip4, 20+2, 0xff), "drop_inner_header", nil},
		{"insert, another VIP", to(client6, other6, srv6Encap(desired.SRv6Insert, sid)), "drop_not_served", nil},
		{"insert, the mapped form of an IPv4 VIP", mapped(insert, srhAt+8, vip4.Addr()), "drop_not_served", nil},
		{"encap, the mapped form of an IPv4 VIP", mapped(encap6, 40+24, vip4.Addr()), "drop_not_served", nil},
		{"encap, another VIP", to(client6, other6, srv6Encap(desired.SRv6Encap, sid)), "drop_not_served", nil},
		{"encap, last of two, another VIP", set(encapTwo, srhSegmentsLeft, 0), "drop_not_served", nil},
		{"insert, last of two, another VIP", set(two, srhSegmentsLeft, 1), "drop_not_served", nil},
		{"insert, next a balancer's create-stickiness",
			to(client6, other6, srv6Encap(desired.SRv6Insert, sid, balancerSID)), "drop_next_segment", nil},
		{"encap, next a balancer's remove-stickiness",
			to(client4, other4, srv6Encap(desired.SRv6Encap, sid, sidOf(balancer1, 0x12))),
			"drop_next_segment", nil},
		{"next an unknown function, behind options",
			to(client6, other6, srv6Encap(desired.SRv6Insert, sid, sidOf(nextSID, 0x99)), packet.HopByHop(24)),
			"drop_next_segment", nil},
		{"next a host",
			to(client6, other6, srv6Encap(desired.SRv6Encap, sid, sidOf(nextSID, 0))), "drop_next_segment", nil},
		{"next this server again",
			to(client6, other6, srv6Encap(desired.SRv6Insert, sid, sid, nextSID)), "drop_next_segment", nil},
		{"next a multicast group",
			to(client6, other6, srv6Encap(desired.SRv6Encap, sid, netip.MustParseAddr("ff02::5:0:0:0"))),
			"drop_next_segment", nil},
		{"next a balancer, hop limit 1",
			packet.SetHopLimit(to(client6, other6, srv6Encap(desired.SRv6Encap, sid, balancerSID)), 1),
			"drop_next_segment", nil},
		{"refused, next a balancer",
			asks(desired.SRv6Insert, connectAvail, syn6, balancerSID), "drop_next_segment", nil},
		{"refused, next a balancer, encap IPv4",
			asks(desired.SRv6Encap, connectAvail, syn4, balancerSID), "drop_next_segment", nil},
		{"not here, next a balancer",
			asks(desired.SRv6Encap, recoverStickiness, syn6, balancerSID), "drop_next_segment", nil},
		// This equals the server's own signal, except for the function in its own segment.
		{"a forged signal", withoutSender(vip6, client6, sid, balancerSID), "drop_sender", nil},
		{"insert to the next, of a stranger", set(two, srhAt+8+3*16+3, 0x6d), "drop_sender", nil},
		{"insert to the next, of nobody",
			withoutSender(client6, other6, sid, nextSID), "drop_sender", nil},
		{"encap to the next, of a stranger", set(encapTwo, 8+3, 0x6d), "drop_sender", nil},
		{"hop limit 1 on the way to the next", packet.SetHopLimit(two, 1), "drop_hop_limit", nil},
		{"congestion met by who does not understand", set(encap4, 1, 0x30), "drop_ecn", nil},
	}
}

// balancerSID is the SID that signals go to.
var balancerSID = sidOf(balancer1, 0x11)

// withoutSender returns a SYN-ACK with an inserted header whose list begins with the packet's
// destination.
func withoutSender(source, destination netip.AddrPort, segments ...netip.Addr) []byte {
	path := append(segments, destination.Addr())
	return packet.TCP(source, destination, packet.Flags(packet.SYN|packet.ACK),
		packet.Ethernet(packet.MAC{2}, hostMAC), packet.Routing(packet.NewSRH(len(path)-1, path...)))
}

func nexts() []packetCase {
	syn4, syn6, few4, few6 := packet.TCP(client4, vip4), packet.TCP(client6, vip6), uncommon(client4, vip4), uncommon(client6, vip6)
	cases := []packetCase{
		{"nobody listens", asks(desired.SRv6Insert, connectAvail, syn6, nextSID), "next_refused", nil},
		{"nobody listens, encap IPv4", asks(desired.SRv6Encap, connectAvail, syn4, nextSID, nextSID), "next_refused", nil},
		{"not here", asks(desired.SRv6Insert, recoverStickiness, syn6, nextSID), "next_not_local", nil},
		{"not here, steer", asks(desired.SRv6Encap, steer, syn6, nextSID), "next_not_local", nil},
		{"ICMP error", asks(desired.SRv6Insert, steer, few6["ICMP error"], nextSID), "next_not_local", nil},
		{"ICMP error, encap IPv4", asks(desired.SRv6Encap, steer, few4["ICMP error"], nextSID), "next_not_local", nil},
		{"later fragment", asks(desired.SRv6Encap, steer, few4["last fragment"], nextSID), "next_not_local", nil},
		{"insert", to(client6, other6, srv6Encap(desired.SRv6Insert, sid, nextSID)), "next_segment", nil},
		{"insert, first of ten", to(client6, other6, srv6Encap(desired.SRv6Insert, bouncing(10)...)), "next_segment", nil},
		{"reduced list of ten", to(client4, other4, srv6Encap(desired.SRv6Encap, bouncing(10)...)), "next_segment", nil},
		{"whole list of ten", to(client6, other6, whole(srv6Encap(desired.SRv6Encap, bouncing(10)...))), "next_segment", nil},
		{"insert, first of three", to(client6, other6, srv6Encap(desired.SRv6Insert, sid, nextSID, nextSID)), "next_segment", nil},
		{"insert, behind options", to(client6, other6, srv6Encap(desired.SRv6Insert, sid, nextSID), packet.HopByHop(24)),
			"next_segment", nil},
		{"encap IPv4", to(client4, other4, srv6Encap(desired.SRv6Encap, sid, nextSID)), "next_segment", nil},
		{"encap IPv6", to(client6, other6, srv6Encap(desired.SRv6Encap, sid, nextSID)), "next_segment", nil},
		{"encap, hop limit 2", packet.SetHopLimit(to(client6, other6, srv6Encap(desired.SRv6Encap, sid, nextSID)), 2),
			"next_segment", nil},
	}
	for i := range cases {
		cases[i].out = advanced(cases[i].frame)
	}
	return cases
}
