// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"net/netip"

	"github.com/gopacket/gopacket/layers"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// stampOptions are TCP options with timestamps in several places, and without.
func stampOptions() [][]packet.Option {
	nop := packet.TCPOption(layers.TCPOptionKindNop, nil)
	sack := packet.TCPOption(layers.TCPOptionKindSACK, make([]byte, 8))
	unaligned := packet.TCPOption(layers.TCPOptionKindTimestamps, []byte{1, 2, 3, 4, 0xf1, 0xf2, 0xf3, 0xf4})
	return [][]packet.Option{
		{},
		{packet.Timestamps(0x01020304, 0xf1f2f3f5)},
		{packet.Timestamps(0x01020304, 0)},
		{packet.Timestamps(0xffffffff, 0xffffffff)},
		{nop, unaligned},
		{sack, unaligned},
		{packet.MSS(1400), nop, nop, unaligned},
	}
}

// cookieCaptures returns packets of flows with cookies, at the last server and at another one.
func cookieCaptures() (frames [][]byte) {
	for _, way := range leastWays {
		for width := range 4 {
			for _, options := range stampOptions() {
				frames = append(frames, steered(way.kind, way.flow, width, options)...)
				frames = append(frames, offeredWithCookie(way.kind, way.flow, width, options)...)
			}
		}
	}
	return frames
}

// steered returns packets of a flow with the function steer and a cookie of a width.
func steered(kind desired.Encapsulation, f flow, width int, options []packet.Option) (frames [][]byte) {
	own := candidateSID(1, srv6.Steer, srv6.Offer{Cookie: width})
	for _, flags := range []packet.TCPFlags{packet.ACK, packet.FIN | packet.ACK, packet.RST} {
		for _, list := range [][]netip.Addr{{own}, {own, candidateSID(2, srv6.Steer, srv6.Offer{Cookie: width})}} {
			frames = append(frames, to(f.client, f.vip, srv6Encap(kind, list...), append(options, packet.Flags(flags))...))
		}
	}
	return frames
}

// offeredWithCookie returns offers of a connection that ask for a cookie of a width.
func offeredWithCookie(kind desired.Encapsulation, f flow, width int, options []packet.Option) (frames [][]byte) {
	f.client = netip.AddrPortFrom(f.client.Addr(), f.client.Port()+1) // the first port has a connection
	for _, column := range []int{0, 1, 5, srv6.NoColumn} {
		own := candidateSID(1, srv6.ConnectAvail, srv6.Offer{Cookie: width, Column: column})
		forced := candidateSID(1, srv6.ConnectForce, srv6.Offer{Cookie: width, Column: column})
		for _, list := range [][]netip.Addr{{own}, {own, nextSID}, {forced}} {
			frames = append(frames, to(f.client, f.vip, srv6Encap(kind, list...), options...))
		}
	}
	return frames
}

// sentStampCaptures returns packets of the host with timestamps.
func sentStampCaptures() (frames [][]byte) {
	for _, f := range []flow{{client6, vip6}, {client4, vip4}} {
		for _, flags := range []packet.TCPFlags{packet.SYN | packet.ACK, packet.ACK, packet.FIN | packet.ACK, packet.RST} {
			for _, options := range stampOptions() {
				frames = append(frames, packet.TCP(f.vip, f.client, append(options, packet.Flags(flags))...))
			}
		}
	}
	return frames
}
