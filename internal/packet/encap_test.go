// SPDX-License-Identifier: Apache-2.0

package packet_test

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/testhost"
)

func TestDecapsulateInvertsEncapsulate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		version := rapid.SampledFrom([]int{4, 6}).Draw(t, "version")
		frame := packettest.Frame(version).Draw(t, "frame")
		e := packettest.Encap(version).Draw(t, "encap")
		sent, err := packet.Encapsulate(frame, e)
		if err != nil {
			t.Fatalf("encapsulate %x: %v", frame, err)
		}
		if err := packet.Verify(sent); err != nil {
			t.Fatalf("encapsulated %x: %v", sent, err)
		}
		got, err := packet.Decapsulate(sent)
		if err != nil {
			t.Fatalf("decapsulate %x: %v", sent, err)
		}
		want := packet.SetMACs(packet.SetHopLimit(frame, hopLimit(frame)-1), e.Own, e.NextHop)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
	})
}

// A packet that every server passes on reaches all servers, and the last one delivers it.
func TestAdvanceVisitsAllSegments(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		version := rapid.SampledFrom([]int{4, 6}).Draw(t, "version")
		frame := packettest.Frame(version).Draw(t, "frame")
		e := packettest.Encap(version).Filter(func(e packet.Encap) bool { return e.Segments != nil }).Draw(t, "encap")
		sent, err := packet.Encapsulate(frame, e)
		if err != nil {
			t.Fatal(err)
		}
		if hopLimit(sent) <= uint8(len(e.Segments)) {
			t.Skip("the packet does not reach the last server")
		}
		for i, segment := range e.Segments {
			decoded, err := packet.Decode(sent)
			if err != nil {
				t.Fatalf("decode %x: %v", sent, err)
			}
			if got := decoded.Headers[0].Destination; got != segment {
				t.Fatalf("packet is on its way to %v, not to segment %d, %v", got, i, segment)
			}
			node := packet.Server{Locator: netip.PrefixFrom(segment, 64)}
			verdict, next, err := node.Receive(sent)
			if last := i == len(e.Segments)-1; last {
				if verdict != packet.Drop || !errors.Is(err, packet.ErrNotServed) {
					t.Fatalf("last server: %v, %v", verdict, err)
				}
				break
			}
			if verdict != packet.Forward || hopLimit(next) != hopLimit(sent)-1 {
				t.Fatalf("server %d: %v, %v", i, verdict, err)
			}
			sent = next
		}
		if _, err := packet.Decapsulate(sent); err != nil {
			t.Fatal(err)
		}
	})
}

func TestEncapsulateRefuses(t *testing.T) {
	syn6, syn4 := packet.TCP(client6, vip6), packet.TCP(client4, vip4)
	jumbo := packet.UDP(client6, vip6, packet.Payload(make([]byte, 65535-8)))
	known := srv6Encap(desired.SRv6Encap, deliver1)
	wideLabel := known
	wideLabel.FlowLabel = 1 << 20
	for _, c := range []struct {
		name  string
		frame []byte
		encap packet.Encap
		want  error
	}{
		{"hop limit 1", packet.SetHopLimit(syn6, 1), known, packet.ErrHopLimit},
		{"TTL 1", packet.SetHopLimit(syn4, 1), known, packet.ErrHopLimit},
		{"TTL 0", packet.SetHopLimit(syn4, 0), known, packet.ErrHopLimit},
		{"no Ethernet header", packet.Truncate(syn6, 13), known, packet.ErrTruncated},
		{"no IP header", packet.Truncate(syn6, 14), known, packet.ErrTruncated},
		{"part of an IPv6 header", packet.Truncate(syn6, 14+39), known, packet.ErrTruncated},
		{"part of an IPv4 header", packet.Truncate(syn4, 14+19), known, packet.ErrTruncated},
		{"part of the payload", packet.Truncate(syn6, len(syn6)-1), known, packet.ErrTruncated},
		{"part of hop-by-hop options",
			packet.SetByte(packet.TCP(client6, vip6, packet.HopByHop(8)), 14+41, 200),
			srv6Encap(desired.SRv6Insert, deliver1), packet.ErrTruncated},
		{"ARP", packet.SetByte(syn6, 13, 0x06), known, packet.ErrNotIP},
		{"version 4 announced as IPv6", packet.SetByte(syn6, 14, 0x45), known, packet.ErrNotIP},
		{"three tags", packet.TCP(client6, vip6, packet.VLAN(1, 2, 3)), known, packet.ErrNotIP},
		{"short IPv4 header length", packet.SetByte(syn4, 14, 0x44), known, packet.ErrHeader},
		{"IPv4 length shorter than header", packet.SetByte(syn4, 17, 19), known, packet.ErrHeader},
		{"IPv4 in srv6-insert", syn4, srv6Encap(desired.SRv6Insert, deliver1), packet.ErrFamily},
		{"IPv4 segment", syn6, srv6Encap(desired.SRv6Encap, outer4[0]), packet.ErrFamily},
		{"mixed outer addresses", syn6, tunnel(desired.GRE, [2]netip.Addr{outer4[0], outer6[1]}), packet.ErrFamily},
		{"no outer addresses", syn6, tunnel(desired.IPIP, [2]netip.Addr{}), packet.ErrFamily},
		{"no segment", syn6, srv6Encap(desired.SRv6Insert), packet.ErrEncap},
		{"no kind", syn6, packet.Encap{}, packet.ErrEncap},
		{"wide flow label", syn6, wideLabel, packet.ErrEncap},
		{"longest packet inserted into", jumbo, srv6Encap(desired.SRv6Insert, deliver1), packet.ErrTooLong},
		{"longest packet wrapped", jumbo, known, packet.ErrTooLong},
		{"longest packet wrapped in IPv4", jumbo, tunnel(desired.IPIP, outer4), packet.ErrTooLong},
	} {
		out, err := packet.Encapsulate(c.frame, c.encap)
		if !errors.Is(err, c.want) || out != nil {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

// An update of the checksum must not repair a damaged header.
func TestForwardingKeepsWrongChecksum(t *testing.T) {
	broken := packet.FlipByte(packet.TCP(client4, vip4), 14+11)
	sent, err := packet.Encapsulate(broken, srv6Encap(desired.SRv6Encap, deliver1))
	testhost.Must(t, err)
	if packet.Verify(sent) == nil {
		t.Error("the inner checksum became right")
	}
}

func TestArgumentsStayUnchanged(t *testing.T) {
	client := packet.TCP(client6, vip6)
	for _, e := range encapsulations {
		sent, err := packet.Encapsulate(client, e.encap)
		testhost.Must(t, err)
		before := slices.Clone(sent)
		_, _, _ = server.Receive(sent)
		_, _ = packet.Advance(sent)
		if diff := cmp.Diff(before, sent); diff != "" {
			t.Errorf("%s: the agent changed its argument (-want +got):\n%s", e.name, diff)
		}
	}
}

func hopLimit(frame []byte) uint8 {
	offset := map[byte]int{4: 8, 6: 7}[frame[packet.NetworkOffset(frame)]>>4]
	return frame[packet.NetworkOffset(frame)+offset]
}
