// SPDX-License-Identifier: Apache-2.0

package packettest

import (
	"net/netip"
	"slices"

	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// Frame generates frames with a client's valid packets, of IP version 4 or 6, with a hop limit of
// at least 2. They have TCP, UDP or ICMP. They may have options, extension headers, VLAN tags and
// bytes after the packet.
func Frame(version int) *rapid.Generator[[]byte] {
	return rapid.Custom(func(t *rapid.T) []byte {
		src, dst := endpoint(version).Draw(t, "source"), endpoint(version).Draw(t, "destination")
		options := []packet.Option{
			packet.HopLimit(rapid.Uint8Range(2, 255).Draw(t, "hop limit")),
			packet.TrafficClass(rapid.Uint8().Draw(t, "traffic class")),
			packet.FlowLabel(rapid.Uint32Max(1<<20-1).Draw(t, "flow label")),
			packet.ID(rapid.Uint16().Draw(t, "id")),
			packet.VLAN(rapid.SliceOfN(rapid.Uint16Range(1, 4094), 0, 2).Draw(t, "VLANs")...),
			packet.Payload(rapid.SliceOfN(rapid.Byte(), 0, 64).Draw(t, "payload")),
		}
		options = append(options, headers(t, version)...)
		var frame []byte
		switch rapid.SampledFrom([]string{"tcp", "udp", "icmp"}).Draw(t, "protocol") {
		case "tcp":
			frame = packet.TCP(src, dst, append(options, segment(t)...)...)
		case "udp":
			frame = packet.UDP(src, dst, options...)
		default:
			echo := map[int]uint8{4: 8, 6: 128}[version]
			frame = packet.ICMP(src.Addr(), dst.Addr(), echo, 0, rapid.Uint32().Draw(t, "id and sequence"), options...)
		}
		return packet.Pad(frame, rapid.SliceOfN(rapid.Byte(), 0, 8).Draw(t, "trailer")...)
	})
}

// Encap generates valid encapsulations, with 1 to 8 servers, for packets of an IP version.
func Encap(inner int) *rapid.Generator[packet.Encap] {
	return rapid.Custom(func(t *rapid.T) packet.Encap {
		kinds := []desired.Encapsulation{desired.SRv6Encap, desired.GRE, desired.IPIP}
		if inner == 6 {
			kinds = append(kinds, desired.SRv6Insert)
		}
		e := packet.Encap{
			Kind:      rapid.SampledFrom(kinds).Draw(t, "kind"),
			FlowLabel: rapid.Uint32Max(1<<20-1).Draw(t, "outer flow label"),
			Own:       packet.MAC{2, 0, 0, 0, 1, 1},
			NextHop:   packet.MAC{2, 0, 0, 0, 1, 2},
		}
		if e.Kind == desired.GRE || e.Kind == desired.IPIP {
			outer := rapid.SampledFrom([]int{4, 6}).Draw(t, "outer version")
			e.Source, e.Destination = address(outer).Draw(t, "outer source"), address(outer).Draw(t, "outer destination")
			return e
		}
		e.Sender = srv6.SID{Locator: locator(t, "balancer")}.Addr()
		for range rapid.IntRange(1, 8).Draw(t, "segments") {
			sid := srv6.SID{Locator: locator(t, "server"), Function: srv6.Deliver}.Addr()
			if !slices.Contains(e.Segments, sid) { // no server passes a packet on to itself
				e.Segments = append(e.Segments, sid)
			}
		}
		e.Whole = e.Kind == desired.SRv6Encap && rapid.Bool().Draw(t, "whole list")
		return e
	})
}

// headers draws IPv4 options or IPv6 extension headers.
func headers(t *rapid.T, version int) []packet.Option {
	if version == 4 {
		words := rapid.IntRange(0, 10).Draw(t, "words of options")
		noOperations := make([]byte, words*4)
		for i := range noOperations {
			noOperations[i] = 1
		}
		return []packet.Option{packet.IPOptions(noOperations)}
	}
	var out []packet.Option
	if size := rapid.IntRange(0, 3).Draw(t, "hop-by-hop"); size > 0 {
		out = append(out, packet.HopByHop(size*8))
	}
	if size := rapid.IntRange(0, 3).Draw(t, "destination options"); size > 0 {
		out = append(out, packet.DestinationOptions(size*8))
	}
	return out
}

// segment draws the fields of a TCP segment.
func segment(t *rapid.T) []packet.Option {
	out := []packet.Option{
		packet.Flags(packet.TCPFlags(rapid.Uint8().Draw(t, "flags"))),
		packet.Sequence(rapid.Uint32().Draw(t, "seq"), rapid.Uint32().Draw(t, "ack")),
	}
	if rapid.Bool().Draw(t, "with MSS") {
		out = append(out, packet.MSS(rapid.Uint16().Draw(t, "MSS")))
	}
	if rapid.Bool().Draw(t, "with timestamps") {
		out = append(out, packet.Timestamps(rapid.Uint32().Draw(t, "TSval"), rapid.Uint32().Draw(t, "TSecr")))
	}
	return out
}

func endpoint(version int) *rapid.Generator[netip.AddrPort] {
	return rapid.Custom(func(t *rapid.T) netip.AddrPort {
		return netip.AddrPortFrom(address(version).Draw(t, "address"), rapid.Uint16Min(1).Draw(t, "port"))
	})
}

// address generates addresses for tests and documentation: 198.18.0.0/15, or 2001:db8::/32.
func address(version int) *rapid.Generator[netip.Addr] {
	return rapid.Custom(func(t *rapid.T) netip.Addr {
		tail := rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "bytes")
		if version == 4 {
			return netip.AddrFrom4([4]byte{198, 18 | tail[1]&1, tail[2], tail[3]})
		}
		return netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, tail[0], tail[1], 14: tail[2], 15: tail[3]})
	})
}

func locator(t *rapid.T, name string) netip.Prefix {
	tail := rapid.Uint16().Draw(t, name)
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 6: uint8(tail >> 8), 7: uint8(tail)}), srv6.LocatorBits)
}
