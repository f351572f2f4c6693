// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// The VIPs and other addresses of most tests.
var (
	vip6All  = netip.MustParseAddr("2001:db8:80::a11")
	vip6Both = netip.MustParseAddr("2001:db8:80::b07")
	vip4Both = netip.MustParseAddr("198.51.100.7")
	otherIP6 = netip.MustParseAddr("2001:db8:80::ffff")
	otherIP4 = netip.MustParseAddr("198.51.100.99")
	router6  = netip.MustParseAddr("2001:db8:ffff::1")
	router4  = netip.MustParseAddr("203.0.113.254")
)

// from gives a service source prefixes.
func from(s desired.Service, prefixes ...string) desired.Service {
	for _, prefix := range prefixes {
		s.Sources = append(s.Sources, netip.MustParsePrefix(prefix))
	}
	return s
}

// at gives a service several VIPs, and the ports 80 and 443.
func at(s desired.Service, vips ...netip.Addr) desired.Service {
	s.VIPs, s.Ports = vips, []desired.Port{80, 443}
	s.VIP, s.Port = s.VIPs[0], s.Ports[0]
	return s
}

func standard() *desired.Balancer {
	three := []desired.Server{srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 1)}
	return balancerOf(
		serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap, three...),
		serviceOf("web4", vip4, 80, desired.TCP, desired.SRv6Encap, three...),
		serviceOf("dns", vip6, 53, desired.UDP, desired.SRv6Encap, three...),
		serviceOf("dns4", vip4, 53, desired.UDP, desired.SRv6Encap, three...),
		serviceOf("insert", vip6, 443, desired.TCP, desired.SRv6Insert, srv6Server("i", 4, 1)),
		serviceOf("drained", vip6, 81, desired.TCP, desired.SRv6Encap, srv6Server("d", 5, 0)),
		serviceOf("unrouted", vip6, 82, desired.TCP, desired.SRv6Encap, srv6Server("u", 6, 1)),
		serviceOf("narrow", vip6, 83, desired.TCP, desired.SRv6Encap, srv6Server("n", 7, 1)),
		serviceOf("hairpin", vip6, 84, desired.TCP, desired.SRv6Encap, srv6Server("h", 8, 1)),
		huntingOf(serviceOf("hunt", vip6, 85, desired.TCP, desired.SRv6Insert, three...), desired.SelectConsistent, 2),
		huntingOf(serviceOf("hunt4", vip4, 85, desired.TCP, desired.SRv6Encap, three...), desired.SelectConsistent, 3),
		serviceOf("all", vip6All, desired.AllPorts, desired.TCP, desired.SRv6Encap, srv6Server("a", 9, 1)),
		serviceOf("one", vip6All, 80, desired.TCP, desired.SRv6Encap, srv6Server("o", 10, 1)),
		at(serviceOf("several", vip6Both, 80, desired.TCP, desired.SRv6Encap, srv6Server("v", 11, 1)),
			vip6Both, vip4Both),
		from(serviceOf("sourced", vip6, 79, desired.TCP, desired.SRv6Encap, srv6Server("w", 12, 1)), "2001:db8:c::/64"),
		from(serviceOf("sourced4", vip4, 79, desired.TCP, desired.SRv6Encap, srv6Server("x", 13, 1)), "192.0.2.0/30", "10.0.0.0/8"),
	)
}

func openStandard(t testing.TB) *fixture {
	f := open(t, standard())
	f.via["u"], f.via["n"], f.via["h"] = "", "narrow", "bridge"
	f.route()
	return f
}

var (
	web      = flowTo(vip6, 80, desired.TCP)
	web4     = flowTo(vip4, 80, desired.TCP)
	dns      = flowTo(vip6, 53, desired.UDP)
	dns4     = flowTo(vip4, 53, desired.UDP)
	insert   = flowTo(vip6, 443, desired.TCP)
	toAll    = flowTo(vip6All, 81, desired.TCP)
	toOne    = flowTo(vip6All, 80, desired.TCP)
	both6    = flowTo(vip6Both, 443, desired.TCP)
	both4    = flowTo(vip4Both, 80, desired.TCP)
	sourced  = flowTo(vip6, 79, desired.TCP)
	sourced4 = flowTo(vip4, 79, desired.TCP)
	refused6 = fromAddress(sourced, "2001:db8:c:1::2")
	refused4 = fromAddress(sourced4, "192.0.2.4")
	noVIP    = flowTo(otherIP6, 80, desired.TCP)
	noVIP4   = flowTo(otherIP4, 80, desired.TCP)
	drained  = flowTo(vip6, 81, desired.TCP)
	unrouted = flowTo(vip6, 82, desired.TCP)
	narrow   = flowTo(vip6, 83, desired.TCP)
	hairpin  = flowTo(vip6, 84, desired.TCP)
	hunt     = flowTo(vip6, 85, desired.TCP)
	hunt4    = flowTo(vip4, 85, desired.TCP)
)

// large is a payload that needs two fragments of 64 bytes, together with the UDP header.
var large = packet.Payload(make([]byte, 100))

// visit is a frame and the wanted outcome.
type visit struct {
	name   string
	before []byte // a frame that the data path gets before this one
	frame  []byte
	full   bool // the flow's bucket is full of established flows that are in use
	reason string
	// flow and service are set if the frame is forwarded.
	flow    dataplane.Flow
	service string
	// function is set if the frame visits the candidates in turn.
	function srv6.Function
	// mtu is the MTU that the client is told.
	mtu uint32
	// length is set for all other frames. It is the number of bytes counted, or 0 if no IP header
	// was read.
	length uint64
}

const ethernetLength = 14

var synAck = packet.Flags(packet.SYN | packet.ACK)

// signalTo returns a signal from the server of a number. The encapsulation is that of the flow's
// family in visits.
func signalTo(flow dataplane.Flow, number uint8, function srv6.Function, options ...packet.Option) []byte {
	kind := desired.SRv6Insert
	if flow.Source.Addr().Is4() {
		kind = desired.SRv6Encap
	}
	return signal(kind, srv6Server("", number, 1).Locator, flow, function, options...)
}

// reply returns a packet from the server to the client.
func reply(flow dataplane.Flow, options ...packet.Option) []byte {
	return frameOf(reversed(flow), options...)
}

// set returns a copy of the frame with another value in a 16-bit field of layer 3.
func set(frame []byte, offset int, value uint16) []byte {
	out := slices.Clone(frame)
	binary.BigEndian.PutUint16(out[ethernetLength+offset:], value)
	return out
}

// withLength returns a copy of the frame whose IP header says that its packet has length bytes.
func withLength(frame []byte, length int) []byte {
	if frame[ethernetLength]>>4 == 4 {
		return set(frame, 2, uint16(length))
	}
	return set(frame, 4, uint16(length-40))
}

func setByte(frame []byte, offset int, value byte) []byte {
	return packet.SetByte(frame, ethernetLength+offset, value)
}

// mapped returns an IPv6 frame whose destination is the IPv4-mapped form of an IPv4 VIP.
func mapped(frame []byte) []byte {
	out := slices.Clone(frame)
	address := vip4.As16()
	copy(out[ethernetLength+24:], address[:])
	return out
}

var visits = []visit{
	{name: "ARP", frame: packet.SetByte(frameOf(web4), 13, 0x06), reason: "pass_not_ip"},
	{name: "VLAN", frame: frameOf(web, packet.VLAN(7)), reason: "pass_vlan"},
	{name: "VLAN of a provider", frame: packet.SetByte(packet.SetByte(frameOf(web, packet.VLAN(7)), 12, 0x88), 13, 0xa8),
		reason: "pass_vlan"},
	{name: "another host", frame: packet.SetByte(frameOf(web), 5, 9), reason: "pass_not_for_host"},
	{name: "broadcast", frame: packet.SetMACs(frameOf(web4), packet.MAC{2, 0, 0, 0, 0, 1},
		packet.MAC{255, 255, 255, 255, 255, 255}), reason: "pass_not_for_host"},
	{name: "not a VIP", frame: frameOf(noVIP), reason: "pass_not_vip", length: 60},
	{name: "not a VIP, IPv4", frame: frameOf(noVIP4), reason: "pass_not_vip", length: 40},
	{name: "VIP of the other family's form", frame: frameOf(flowTo(
		netip.MustParseAddr("2001:db8:80::c633:6401"), 80, desired.TCP)), reason: "pass_not_vip", length: 60},
	{name: "Ethernet header only", frame: frameOf(web)[:ethernetLength], reason: "pass_not_vip"},

	{name: "SYN", frame: frameOf(web), reason: "forward_new", flow: web, service: "web"},
	{name: "SYN, IPv4", frame: frameOf(web4), reason: "forward_new", flow: web4, service: "web4"},
	{name: "UDP", frame: frameOf(dns), reason: "forward_new", flow: dns, service: "dns"},
	{name: "UDP, IPv4", frame: frameOf(dns4), reason: "forward_new", flow: dns4, service: "dns4"},
	{name: "ACK after SYN", before: frameOf(web), frame: frameOf(web, packet.Flags(packet.ACK)),
		reason: "forward_known", flow: web, service: "web"},
	{name: "SYN again", before: frameOf(web), frame: frameOf(web), reason: "forward_known", flow: web, service: "web"},
	{name: "second datagram", before: frameOf(dns), frame: frameOf(dns), reason: "forward_known", flow: dns, service: "dns"},
	{name: "ACK of an unknown flow", frame: frameOf(web, packet.Flags(packet.ACK)),
		reason: "forward_recover", flow: web, service: "web"},
	{name: "SYN-ACK of an unknown flow", frame: frameOf(web, packet.Flags(packet.SYN|packet.ACK)),
		reason: "forward_recover", flow: web, service: "web"},
	{name: "SYN into a full bucket", full: true, frame: frameOf(web), reason: "forward_no_room", flow: web, service: "web"},
	{name: "ACK into a full bucket", full: true, frame: frameOf(web, packet.Flags(packet.ACK)),
		reason: "forward_no_room", flow: web, service: "web"},
	{name: "every port of a VIP", frame: frameOf(toAll), reason: "forward_new", flow: toAll, service: "all"},
	{name: "second port of a service", frame: frameOf(both6), reason: "forward_new", flow: both6, service: "several"},
	{name: "second VIP of a service", frame: frameOf(both4), reason: "forward_new", flow: both4, service: "several"},
	{name: "no port of the service", frame: frameOf(flowTo(vip4Both, 81, desired.TCP)), reason: "answer_no_service"},
	{name: "client in a source prefix", frame: frameOf(sourced), reason: "forward_new", flow: sourced, service: "sourced"},
	{name: "client outside of the source prefixes", frame: frameOf(refused6), reason: "drop_source", length: 60},
	{name: "later packet from outside of the source prefixes", frame: frameOf(refused6, packet.Flags(packet.ACK)),
		reason: "drop_source", length: 60},
	{name: "IPv4 client in a source prefix", frame: frameOf(sourced4), reason: "forward_new", flow: sourced4, service: "sourced4"},
	{name: "IPv4 client outside of the source prefixes", frame: frameOf(refused4), reason: "drop_source", length: 40},
	{name: "ICMP error about a client in a source prefix", frame: packet.ICMPError(router6, 1, 0, 0, reply(sourced)),
		reason: "forward_icmp", flow: sourced, service: "sourced"},
	{name: "ICMP error about a client outside of the source prefixes", frame: packet.ICMPError(router6, 1, 0, 0, reply(refused6)),
		reason: "drop_source", length: 48 + 60},
	{name: "first fragment from outside of the source prefixes", frame: packet.Fragments(frameOf(refused6, large), 64, 7)[0],
		reason: "drop_source", length: 48 + 64},
	{name: "later fragment from outside of the source prefixes", before: packet.Fragments(frameOf(refused6, large), 64, 7)[0],
		frame: packet.Fragments(frameOf(refused6, large), 64, 7)[1], reason: "drop_source", length: 48 + 56},
	{name: "a port with its own service", frame: frameOf(toOne), reason: "forward_new", flow: toOne, service: "one"},
	{name: "padding after the packet", frame: packet.Pad(frameOf(web4), 1, 2, 3, 4, 5, 6),
		reason: "forward_new", flow: web4, service: "web4"},
	{name: "IPv4 options", frame: frameOf(web4, packet.IPOptions(slices.Repeat([]byte{1}, 40))),
		reason: "forward_new", flow: web4, service: "web4"},
	{name: "DSCP and ECN", frame: frameOf(web, packet.TrafficClass(0xb9), packet.FlowLabel(0xabcde)),
		reason: "forward_new", flow: web, service: "web"},
	{name: "DSCP and ECN, IPv4", frame: frameOf(web4, packet.TrafficClass(0xb9)),
		reason: "forward_new", flow: web4, service: "web4"},
	{name: "first fragment", frame: packet.Fragments(frameOf(dns, large), 64, 7)[0],
		reason: "forward_new", flow: dns, service: "dns"},
	{name: "first fragment, IPv4", frame: packet.Fragments(frameOf(dns4, large), 64, 7)[0],
		reason: "forward_new", flow: dns4, service: "dns4"},
	{name: "last fragment", before: packet.Fragments(frameOf(dns, large), 64, 7)[0],
		frame: packet.Fragments(frameOf(dns, large), 64, 7)[1], reason: "forward_fragment", flow: dns, service: "dns"},
	{name: "last fragment, IPv4", before: packet.Fragments(frameOf(dns4, large), 64, 7)[0],
		frame: packet.Fragments(frameOf(dns4, large), 64, 7)[1], reason: "forward_fragment", flow: dns4, service: "dns4"},
	{name: "atomic fragment", frame: packet.Fragments(frameOf(web), 64, 7)[0],
		reason: "forward_new", flow: web, service: "web"},
	{name: "atomic fragment behind hop-by-hop options", frame: packet.Fragments(frameOf(insert, packet.HopByHop(8)), 64, 7)[0],
		reason: "forward_new", flow: insert, service: "insert"},
	{name: "routing header at its end", frame: frameOf(web, packet.Routing(packet.NewSRH(0, vip6))),
		reason: "forward_new", flow: web, service: "web"},
	{name: "eight extension headers", frame: frameOf(web, slices.Repeat([]packet.Option{packet.DestinationOptions(8)}, 8)...),
		reason: "forward_new", flow: web, service: "web"},
	{name: "hop limit 2", frame: frameOf(web, packet.HopLimit(2)), reason: "forward_new", flow: web, service: "web"},
	{name: "TTL 2", frame: frameOf(web4, packet.HopLimit(2)), reason: "forward_new", flow: web4, service: "web4"},
	{name: "as long as the way allows", frame: frameOf(narrow, packet.Payload(make([]byte, 1500-40-60))),
		reason: "forward_new", flow: narrow, service: "narrow"},

	{name: "SYN, hunting", frame: frameOf(hunt), reason: "forward_hunt", flow: hunt, service: "hunt", function: srv6.ConnectAvail},
	{name: "SYN, hunting, IPv4", frame: frameOf(hunt4), reason: "forward_hunt", flow: hunt4, service: "hunt4",
		function: srv6.ConnectAvail},
	{name: "ACK, hunting", frame: frameOf(hunt, packet.Flags(packet.ACK)), reason: "forward_recover", flow: hunt, service: "hunt",
		function: srv6.RecoverStickiness},
	{name: "too big about a hunting flow", frame: packet.ICMPError(router6, 2, 0, 1400, reply(hunt)),
		reason: "forward_icmp", flow: hunt, service: "hunt", function: srv6.Steer},
	{name: "signal: created", frame: signalTo(hunt, 1, srv6.CreateStickiness, synAck), reason: "return_create"},
	{name: "signal: created, IPv4", frame: signalTo(hunt4, 2, srv6.CreateStickiness, synAck), reason: "return_create"},
	{name: "signal: created, and a full bucket", full: true, frame: signalTo(hunt, 1, srv6.CreateStickiness, packet.Flags(packet.ACK)),
		reason: "return_no_room", flow: hunt, service: "hunt"},
	{name: "signal: removed", frame: signalTo(hunt, 1, srv6.RemoveStickiness, packet.Flags(packet.FIN|packet.ACK)),
		reason: "return_remove"},
	{name: "signal: created by another", before: signalTo(hunt, 1, srv6.CreateStickiness, synAck),
		frame:  signalTo(hunt, 2, srv6.CreateStickiness, synAck, packet.Sequence(1, acknowledged)),
		reason: "forward_reset", flow: hunt, service: "hunt"},
	{name: "signal: of no server", frame: signalTo(hunt, 9, srv6.CreateStickiness, synAck), reason: "drop_sender", length: 116},
	{name: "signal: of no service", frame: signalTo(flowTo(vip6, 8080, desired.TCP), 1, srv6.CreateStickiness, synAck),
		reason: "drop_sender", length: 116},
	{name: "signal: hop limit 1", frame: signalTo(hunt, 1, srv6.CreateStickiness, synAck, packet.HopLimit(1)),
		reason: "drop_hop_limit", length: 116},
	{name: "signal: two segments left", frame: setByte(signalTo(hunt, 1, srv6.CreateStickiness, synAck), 43, 2),
		reason: "drop_signal", length: 116},
	{name: "signal: of UDP", frame: setByte(signalTo(hunt4, 1, srv6.CreateStickiness, synAck), 40+9, 17),
		reason: "drop_signal", length: 80},

	{name: "version 4 in IPv6", frame: setByte(frameOf(web), 0, 0x40), reason: "drop_ip_header", length: 60},
	{name: "version 6 in IPv4", frame: setByte(frameOf(web4), 0, 0x65), reason: "drop_ip_header", length: 40},
	{name: "IPv4 header length 4", frame: setByte(frameOf(web4), 0, 0x44), reason: "drop_ip_header", length: 40},
	{name: "IPv4 header longer than the packet", frame: setByte(frameOf(web4), 0, 0x4f), reason: "drop_ip_header", length: 40},
	{name: "IPv4 total length 19", frame: set(frameOf(web4), 2, 19), reason: "drop_ip_header", length: 19},
	{name: "IPv4 longer than the frame", frame: set(frameOf(web4), 2, 41), reason: "drop_ip_header", length: 41},
	{name: "IPv6 longer than the frame", frame: set(frameOf(web), 4, 21), reason: "drop_ip_header", length: 61},
	{name: "IPv6 length that wraps to itself", frame: set(frameOf(web), 4, 65535), reason: "drop_ip_header", length: 39},
	{name: "IPv4 VIP in IPv6", frame: mapped(frameOf(web)), reason: "drop_ip_header", length: 60},
	{name: "no room for an extension header", frame: set(frameOf(web, packet.HopByHop(8)), 4, 7),
		reason: "drop_extension", length: 47},
	{name: "extension header beyond the packet", frame: setByte(frameOf(web, packet.HopByHop(8)), 41, 3),
		reason: "drop_extension", length: 68},
	{name: "hop-by-hop options in second place", frame: frameOf(web, packet.DestinationOptions(8), packet.HopByHop(8)),
		reason: "drop_extension", length: 76},
	{name: "nine extension headers", frame: frameOf(web, slices.Repeat([]packet.Option{packet.DestinationOptions(8)}, 9)...),
		reason: "drop_extension", length: 60 + 72},
	{name: "routing header on its way", frame: frameOf(web, packet.Routing(packet.NewSRH(1, vip6, otherIP6))),
		reason: "drop_routing_header", length: 60 + 40},
	{name: "first fragment without all of TCP", frame: packet.Fragments(frameOf(web), 8, 7)[0], reason: "drop_fragment", length: 56},
	{name: "first fragment without all of TCP, IPv4", frame: packet.Fragments(frameOf(web4), 8, 7)[0],
		reason: "drop_fragment", length: 28},
	{name: "last fragment alone", frame: packet.Fragments(frameOf(dns, large), 64, 7)[1], reason: "take_fragment", length: 40 + 8 + 44},
	{name: "last fragment alone, IPv4", frame: packet.Fragments(frameOf(dns4, large), 64, 7)[1],
		reason: "take_fragment", length: 20 + 44},
	{name: "last fragment alone, held before", frame: packet.SetMACs(packet.Fragments(frameOf(dns, large), 64, 7)[1], heldMAC, ownMAC),
		reason: "drop_fragment_unknown", length: 40 + 8 + 44},
	{name: "ping, IPv6", frame: packet.ICMP(client6.Addr(), vip6, 128, 0, 1), reason: "answer_echo"},
	{name: "ping, IPv4", frame: packet.ICMP(client4.Addr(), vip4, 8, 0, 1), reason: "answer_echo"},
	{name: "too big about a flow", frame: packet.ICMPError(router6, 2, 0, 1400, reply(web)),
		reason: "forward_icmp", flow: web, service: "web"},
	{name: "fragmentation needed about a flow", frame: packet.ICMPError(router4, 3, 4, 1400, reply(web4)),
		reason: "forward_icmp", flow: web4, service: "web4"},
	{name: "redirect", frame: packet.ICMPError(router4, 5, 1, 0, reply(web4)), reason: "drop_icmp_type", length: 68},
	{name: "neighbour solicitation", frame: solicitation(vip6), reason: "pass_solicitation", length: 64},
	{name: "forwarded neighbour solicitation", frame: packet.ICMP(router6, vip6, 135, 0, 0, packet.HopLimit(254)),
		reason: "drop_icmp_type", length: 48},
	{name: "error about another protocol", frame: packet.ICMPError(router4, 3, 4, 1400, packet.ICMP(vip4, client4.Addr(), 0, 0, 1)),
		reason: "drop_icmp_quote", length: 56},
	{name: "error about a flow of no service", frame: packet.ICMPError(router6, 2, 0, 1400, reply(flowTo(vip6, 8080, desired.TCP))),
		reason: "drop_icmp_no_service", length: 48 + 60},
	{name: "IGMP", frame: setByte(frameOf(web4), 9, 2), reason: "drop_protocol", length: 40},
	{name: "ICMPv6 in IPv4", frame: setByte(frameOf(web4), 9, 58), reason: "drop_protocol", length: 40},
	{name: "ICMP in IPv6", frame: setByte(frameOf(web), 6, 1), reason: "drop_protocol", length: 60},
	{name: "no next header", frame: setByte(frameOf(web), 6, 59), reason: "drop_protocol", length: 60},
	{name: "TCP data offset 4", frame: setByte(frameOf(web), 40+12, 0x40), reason: "drop_transport", length: 60},
	{name: "19 bytes of TCP", frame: set(frameOf(web), 4, 19), reason: "drop_transport", length: 59},
	{name: "19 bytes of TCP, IPv4, and padding", frame: set(frameOf(web4), 2, 39), reason: "drop_transport", length: 39},
	{name: "7 bytes of UDP", frame: set(frameOf(dns), 4, 7), reason: "drop_transport", length: 47},
	{name: "UDP length 7", frame: set(frameOf(dns), 40+4, 7), reason: "drop_transport", length: 48},
	{name: "SYN and FIN", frame: frameOf(web, packet.Flags(packet.SYN|packet.FIN)), reason: "drop_tcp_flags", length: 60},
	{name: "SYN and RST, IPv4", frame: frameOf(web4, packet.Flags(packet.SYN|packet.RST)), reason: "drop_tcp_flags", length: 40},
	{name: "SYN, FIN and ACK of a known flow", before: frameOf(web),
		frame: frameOf(web, packet.Flags(packet.SYN|packet.FIN|packet.ACK)), reason: "drop_tcp_flags", length: 60},
	{name: "SYN and FIN in extension headers", frame: frameOf(web, packet.DestinationOptions(8), packet.Flags(packet.SYN|packet.FIN)),
		reason: "drop_tcp_flags", length: 68},
	{name: "port without a service", frame: frameOf(flowTo(vip6, 8080, desired.TCP)), reason: "answer_no_service"},
	{name: "protocol without a service", frame: frameOf(flowTo(vip6, 80, desired.UDP)), reason: "answer_no_service"},
	{name: "UDP to a VIP of all ports of TCP", frame: frameOf(flowTo(vip6All, 80, desired.UDP)), reason: "answer_no_service"},
	{name: "reset to a port without a service", frame: frameOf(flowTo(vip6, 8080, desired.TCP), packet.Flags(packet.RST)),
		reason: "drop_no_service", length: 60},
	{name: "hop limit 1", frame: frameOf(web, packet.HopLimit(1)), reason: "answer_hop_limit"},
	{name: "hop limit 0", frame: frameOf(web, packet.HopLimit(0)), reason: "answer_hop_limit"},
	{name: "TTL 1", frame: frameOf(web4, packet.HopLimit(1)), reason: "answer_hop_limit"},
	{name: "TTL 0", frame: frameOf(web4, packet.HopLimit(0)), reason: "answer_hop_limit"},
	{name: "hop limit 1, about a flow", frame: packet.ICMPError(router6, 2, 0, 1400, reply(web), packet.HopLimit(1)),
		reason: "drop_hop_limit", length: 48 + 60},
	{name: "all servers drained", frame: frameOf(drained), reason: "answer_no_server"},
	{name: "all servers drained, not a SYN", frame: frameOf(drained, packet.Flags(packet.ACK)),
		reason: "drop_no_server", length: 60},
	{name: "server without a next hop", frame: frameOf(unrouted), reason: "drop_no_next_hop", length: 60},
	{name: "longer than the way allows", frame: frameOf(narrow, packet.Payload(make([]byte, 1500-40-60+1))),
		reason: "answer_too_big", mtu: 1460},
	{name: "longer than the way allows, about a flow", frame: packet.ICMPError(router6, 1, 0, 0, reply(narrow),
		packet.DestinationOptions(1400)), reason: "drop_too_big", length: 1400 + 48 + 60},
}

func TestEveryExit(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	for _, v := range visits {
		t.Run(v.name, func(t *testing.T) {
			f.t = t
			clear(f.plane.Flows.Entries)
			clear(f.plane.HalfOpen.Entries)
			f.forgetFragments()
			if v.full {
				f.fill(v.flow, f.slot(v.service, f.placed(v.flow, v.service)))
			}
			if v.before != nil {
				f.run(v.before)
			}
			f.check(f.expected(v), f.run(v.frame))
		})
	}
}

func (f *fixture) expected(v visit) outcome {
	f.t.Helper()
	switch {
	case v.reason == "answer_echo":
		return sentBack(v.frame, v.reason, packet.EchoReply(v.frame, 64))
	case strings.HasPrefix(v.reason, "answer_no_"):
		return rejected(v.frame, v.reason)
	case strings.HasPrefix(v.reason, "answer_"):
		return answered(v.frame, v.reason, v.mtu)
	case v.reason == "forward_reset":
		return f.reset(v.flow, v.service, "s2")
	case strings.HasPrefix(v.reason, "return_"):
		return f.returned(v.frame, v.reason)
	case v.function != srv6.Host:
		return f.offered(v.frame, v.flow, v.service, v.reason, v.function, f.row(v.flow, v.service)...)
	case v.service == "":
		return refused(v.frame, v.reason, v.length)
	}
	return f.forwarded(v.frame, v.flow, v.service, f.placed(v.flow, v.service), v.reason)
}

// fill puts eight other established flows of the server into the flow's bucket, seen just now.
func (f *fixture) fill(flow dataplane.Flow, slot uint32) {
	f.t.Helper()
	now := f.now()
	for i := range f.bucket(flow) {
		other := f.signature(flow) ^ uint64(i+1)
		f.bucket(flow)[i] = entryOf(other, slot, dataplane.FlowEstablished, now)
	}
}

// A frame that is cut, or whose IP header has a shorter length, is decided as in the reference: the
// data path reads nothing behind the end of the frame or of the packet.
func TestTruncated(t *testing.T) {
	t.Parallel()
	r := newReference(openStandard(t))
	data := packet.Payload([]byte("data"))
	for _, frame := range [][]byte{
		frameOf(web4, packet.IPOptions([]byte{1, 1, 1, 1}), data), frameOf(dns4, data),
		frameOf(web, packet.HopByHop(16), packet.DestinationOptions(8), data), frameOf(dns, data),
	} {
		var all [][]byte
		for length := ethernetLength; length < len(frame); length++ {
			all = append(all, packet.Truncate(frame, length))
		}
		header := map[byte]int{4: 0, 6: 40}[frame[ethernetLength]>>4]
		for length := header; length < len(frame)-ethernetLength; length++ {
			all = append(all, withLength(frame, length))
		}
		r.compare(t, all)
	}
}

// A driver may leave less room before the frame than the headers need, of the encapsulation or of an
// error. The hop limit of a frame that is forwarded has been decremented already.
func TestNoHeadroom(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	metadata := make([]byte, 200)
	for hops, left := range map[uint8]uint8{64: 63, 1: 1} {
		got := f.runIn(append(metadata, frameOf(web, packet.HopLimit(hops))...), &frameContext{Data: uint32(len(metadata))})
		f.check(refused(frameOf(web, packet.HopLimit(left)), "drop_no_headroom", 60), got)
	}
}

// A packet leaves by XDP_TX if its next hop is on the program's own interface, unless that is a
// veth, whose peer might not run XDP. All other packets leave by a redirect.
func TestHairpin(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	for _, v := range []struct {
		link    string // on which the program runs
		flow    dataplane.Flow
		service string
		verdict uint32
	}{
		{"bridge", hairpin, "hairpin", verdictTX},
		{"bridge", web, "web", verdictRedirect},
		{"out", hairpin, "hairpin", verdictRedirect},
		{"out", web, "web", verdictRedirect},
	} {
		clear(f.plane.Flows.Entries)
		own := f.link(v.link)
		own.MAC = ownMAC
		f.must(f.plane.Sides[0].SetHost(own))
		want := f.forwarded(frameOf(v.flow), v.flow, v.service, f.placed(v.flow, v.service), "forward_new")
		want.Verdict = v.verdict
		f.must(f.ns.Do(func() error {
			f.check(want, f.runIn(frameOf(v.flow), &frameContext{IngressIfindex: uint32(f.ifindex[v.link])}))
			return nil
		}))
	}
}

func TestEveryReasonHasACase(t *testing.T) {
	t.Parallel()
	provoked := map[string]bool{ // reasons that other tests reach
		"none": true, "drop_no_headroom": true, "drop_rate_limit": true, "drop_outside": true, "drop_tag": true,
		"take_probe": true, "copy_icmp": true, "drop_group_source": true, "drop_removed_vip": true,
		"drop_fragment_room": true, "drop_stranger": true, "drop_underlay": true,
	}
	for _, v := range visits {
		provoked[v.reason] = true
	}
	for _, name := range slices.Sorted(maps.Keys(reasonNumbers())) {
		if !provoked[name] {
			t.Errorf("nothing provokes %s", name)
		}
	}
}

// A frame that is not for a VIP passes unchanged, also if it is malformed.
func TestMalformedForOthersIsPassed(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	to := map[netip.Addr]netip.Addr{
		vip6: otherIP6, vip6All: otherIP6, vip6Both: otherIP6, vip4: otherIP4, vip4Both: otherIP4,
	}
	for _, v := range visits {
		if v.length == 0 && v.service == "" && !strings.HasPrefix(v.reason, "answer_") {
			continue // no destination was read
		}
		if strings.HasPrefix(v.name, "signal: ") {
			continue // it is for the balancer, not for a VIP
		}
		if v.name == "IPv4 VIP in IPv6" {
			continue // its fault is its destination
		}
		t.Run(v.name, func(t *testing.T) {
			f.t = t
			frame := slices.Clone(v.frame)
			p := frame[ethernetLength:]
			at, size := 24, 16
			if frame[12] == 0x08 {
				at, size = 16, 4
			}
			address, _ := netip.AddrFromSlice(p[at : at+size])
			if other, ok := to[address]; ok {
				copy(p[at:], other.AsSlice())
			}
			got := f.run(frame)
			got.Reasons["pass_not_vip"] = tally{Packets: got.Reasons["pass_not_vip"].Packets}
			f.check(refused(frame, "pass_not_vip", 0), got)
		})
	}
}
