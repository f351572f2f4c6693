// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// toRest is a flow to the service "rest" of openStateless, whose VIP has no other service.
var toRest = flowTo(netip.MustParseAddr("2001:db8:80::a12"), 4711, desired.TCP)

// openStateless opens the standard balancer, whose services of TCP have persistence stateless. The
// service "one" has not: it has one port of a VIP, and a stateless service has all others.
func openStateless(t testing.TB) *reference {
	t.Helper()
	cfg := standard()
	rest := serviceOf("rest", toRest.Destination.Addr(), desired.AllPorts, desired.TCP, desired.SRv6Insert,
		srv6Server("r1", 12, 1), srv6Server("r2", 13, 1))
	cfg.Services = append(cfg.Services, rest)
	for i := range cfg.Services {
		svc := &cfg.Services[i]
		if svc.Protocol == desired.TCP && svc.Name != "one" {
			svc.Persistence, svc.Generations, svc.History = desired.PersistenceStateless, 32, 3
			svc.BucketHash, svc.Buckets = desired.BucketHashCRC32, 256
		}
	}
	f := open(t, cfg)
	f.via["u"], f.via["n"], f.via["h"] = "", "narrow", "bridge"
	f.route()
	return newReference(f)
}

// All packets of visits have the outcomes of the reference, if the services are stateless.
func TestStatelessVisits(t *testing.T) {
	t.Parallel()
	r := openStateless(t)
	for _, v := range visits {
		frames := [][]byte{v.frame}
		if v.before != nil {
			frames = [][]byte{v.before, v.frame}
		}
		t.Run(v.name, func(t *testing.T) { r.compare(t, frames) })
	}
	for _, flow := range []dataplane.Flow{web, web4, insert, hunt, hunt4, toRest, toAll, toOne} {
		version := 6
		if flow.Source.Addr().Is4() {
			version = 4
		}
		for _, options := range shapes(version) {
			ack := append([]packet.Option{packet.Flags(packet.ACK), packet.Timestamps(1, 5)}, options...)
			r.compare(t, [][]byte{frameOf(flow, options...), frameOf(flow, ack...)})
		}
	}
}

// Malformed packets to stateless services have the outcomes of the reference.
func TestStatelessMalformed(t *testing.T) {
	t.Parallel()
	r := openStateless(t)
	for name, frames := range malformed() {
		t.Run(name, func(t *testing.T) {
			t.Logf("%d frames", len(frames))
			r.compare(t, frames)
		})
	}
}

// malformed returns packets to stateless services, most of which have headers that contradict each
// other, by kind.
func malformed() map[string][][]byte {
	kinds := map[string][][]byte{}
	add := func(kind string, frames ...[]byte) { kinds[kind] = append(kinds[kind], frames...) }
	ack := []packet.Option{packet.Flags(packet.ACK), packet.Timestamps(1, 5), packet.Payload([]byte("data"))}
	with := func(flow dataplane.Flow, options ...packet.Option) []byte {
		return frameOf(flow, append(options, ack...)...)
	}
	const ipv6 = 40
	for _, flow := range []dataplane.Flow{hunt, insert} {
		for _, srh := range []*packet.SRH{
			packet.NewSRH(0, otherIP6, vip6), packet.NewSRH(1, vip6, otherIP6), packet.NewSRH(0, vip6),
			{Segments: packet.NewSRH(0, vip6).Segments, TLVs: []byte{4, 6, 0, 0, 0, 0, 0, 0}},
		} {
			frame := with(flow, packet.Routing(srh))
			add("SRH", append(lies(frame, ipv6, ipv6+8), cuts(frame)...)...)
		}
		add("SRH", with(flow, packet.Routing(packet.NewSRH(0, vip6)), packet.Routing(packet.NewSRH(0, vip6))))
		for _, extension := range []packet.Option{packet.HopByHop(16), packet.DestinationOptions(16)} {
			frame := with(flow, extension)
			add("extension headers", append(lies(frame, ipv6, ipv6+4), cuts(frame)...)...)
			add("extension headers", lies(frame, 6, 7)...) // the first next header
			add("extension headers", with(flow, extension, packet.DestinationOptions(8), packet.Routing(packet.NewSRH(0, vip6))))
		}
	}
	const ipv4 = 20
	for _, flow := range []dataplane.Flow{hunt4, web4} {
		for _, options := range [][]byte{
			slices.Repeat([]byte{1}, 40), {131, 7, 4, 198, 51, 100, 1}, {7, 0, 4}, {148, 255}, {0}, nil,
		} {
			frame := with(flow, packet.IPOptions(options))
			header := 4 * int(frame[ethernetLength]&0xf)
			add("IPv4 header", append(lies(frame, 0, 10), lies(frame, ipv4, header)...)...)
			for words := byte(0); words < 16; words++ {
				add("IPv4 header", setByte(frame, 0, 0x40|words))
			}
			add("IPv4 header", cuts(frame)...)
		}
	}
	timestamps := packet.TCPOption(8, []byte{0, 0, 0, 1, 0, 0, 0, 5})
	for _, flow := range []dataplane.Flow{hunt, hunt4, insert} {
		for _, options := range [][]packet.Option{
			{packet.Timestamps(1, 5)},
			{packet.MSS(1440), packet.TCPOption(4, nil), timestamps, packet.TCPOption(1, nil), packet.TCPOption(3, []byte{7})},
			{packet.TCPOption(layers.TCPOptionKind(253), make([]byte, 28)), timestamps},
		} {
			syn := frameOf(flow, options...)
			frame := frameOf(flow, append(options, packet.Flags(packet.ACK))...)
			at := packet.TransportOffset(frame) - ethernetLength
			add("TCP", append(lies(syn, at+12, at+14), lies(syn, at+20, at+24)...)...)
			add("TCP", append(lies(frame, at+12, at+14), lies(frame, at+20, len(frame)-ethernetLength-8)...)...)
			add("TCP", cuts(frame)...)
		}
		for _, size := range []int{8, 24, 64} {
			fragments := packet.Fragments(with(flow, large), size, uint32(size))
			add("fragments", fragments...)
			for _, fragment := range [][]byte{fragments[0], fragments[len(fragments)-1]} {
				at := map[bool]int{true: ipv6, false: 4}[fragment[12] == 0x86]
				add("fragments", lies(fragment, at, at+4)...)
			}
		}
		for _, frame := range [][]byte{with(flow), frameOf(flow)} {
			add("truncated", cuts(frame)...)
			add("truncated", cuts(packet.Pad(frame, make([]byte, 6)...))...)
		}
	}
	return kinds
}

// lies returns copies of a frame. In each of them, one byte of layer 3 in a range has another value.
func lies(frame []byte, from, to int) (frames [][]byte) {
	for at := from; at < to; at++ {
		for _, value := range []byte{0, 1, 2, 3, 4, 8, 11, 43, 128, 255} {
			frames = append(frames, setByte(frame, at, value))
		}
	}
	return frames
}

// cuts returns copies of a frame that are cut at each length, with the former length in the IP
// header and with the right one, and copies whose IP header has each shorter length.
func cuts(frame []byte) (frames [][]byte) {
	header := map[byte]int{4: 20, 6: 40}[frame[ethernetLength]>>4]
	for length := ethernetLength; length < len(frame); length++ {
		cut := packet.Truncate(frame, length)
		frames = append(frames, cut)
		if layer3 := length - ethernetLength; layer3 >= header {
			frames = append(frames, withLength(cut, layer3), withLength(frame, layer3))
		}
	}
	return frames
}
