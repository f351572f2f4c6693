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
			if i == len(e.Segments)-1 {
				break
			}
			next, err := packet.Advance(sent)
			if err != nil || hopLimit(next) != hopLimit(sent)-1 {
				t.Fatalf("server %d: hop limit %d after %d, %v", i, hopLimit(next), hopLimit(sent), err)
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

// Offsets in an untagged frame.
const (
	outerHeader = 14
	outerSRH    = outerHeader + 40
)

func TestDecapsulateRefuses(t *testing.T) {
	syn6, syn4 := packet.TCP(client6, vip6), packet.TCP(client4, vip4)
	inserted := encapsulated(t, syn6, srv6Encap(desired.SRv6Insert, deliver1, deliver2))
	wrapped := encapsulated(t, syn6, srv6Encap(desired.SRv6Encap, deliver1, deliver2))
	known := encapsulated(t, syn6, srv6Encap(desired.SRv6Encap, deliver1))
	gre4 := encapsulated(t, syn4, tunnel(desired.GRE, outer4))
	for _, c := range []struct {
		name  string
		frame []byte
		want  error
	}{
		{"TCP to a SID", packet.TCP(client6, netip.AddrPortFrom(deliver1, 22)), packet.ErrNotEncapsulated},
		{"segments left past the last entry", packet.SetByte(inserted, outerSRH+3, 5), packet.ErrSegments},
		{"no segment left", packet.SetByte(inserted, outerSRH+3, 0), packet.ErrSegments},
		{"a last entry past the header", packet.SetByte(inserted, outerSRH+4, 4), packet.ErrSegments},
		{"a routing header of another type", packet.SetByte(inserted, outerSRH+2, 2), packet.ErrSegments},
		{"a header past the packet", packet.SetByte(inserted, outerSRH+1, 200), packet.ErrTruncated},
		{"an empty list", packet.SetByte(wrapped, outerSRH+1, 0), packet.ErrSegments},
		{"inner version", packet.FlipByte(known, outerHeader+40), packet.ErrNotIP},
		{"inner length", packet.SetByte(known, outerHeader+40+4, 1), packet.ErrTruncated},
		{"a key in GRE", packet.SetByte(gre4, outerHeader+20, 0x20), packet.ErrGRE},
		{"bridging in GRE", packet.SetByte(packet.SetByte(gre4, outerHeader+22, 0x65), outerHeader+23, 0x58), packet.ErrGRE},
		{"a fragment of a tunnel", packet.SetByte(gre4, outerHeader+6, 0x20), packet.ErrFragment},
		{"the last fragment of a tunnel", packet.SetByte(gre4, outerHeader+7, 1), packet.ErrFragment},
	} {
		if out, err := packet.Decapsulate(c.frame); !errors.Is(err, c.want) || out != nil {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

func TestAdvanceRefuses(t *testing.T) {
	for _, kind := range []desired.Encapsulation{desired.SRv6Insert, desired.SRv6Encap} {
		sent := encapsulated(t, packet.TCP(client6, vip6), srv6Encap(kind, deliver1, deliver2))
		if _, err := packet.Advance(packet.SetHopLimit(sent, 1)); !errors.Is(err, packet.ErrHopLimit) {
			t.Errorf("%s, hop limit 1: %v", kind, err)
		}
		if _, err := packet.Advance(packet.SetByte(sent, outerSRH+3, 0)); !errors.Is(err, packet.ErrSegments) {
			t.Errorf("%s, no segment left: %v", kind, err)
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
		_, _ = packet.Decapsulate(sent)
		_, _ = packet.Advance(sent)
		if diff := cmp.Diff(before, sent); diff != "" {
			t.Errorf("%s: the agent changed its argument (-want +got):\n%s", e.name, diff)
		}
	}
}

func encapsulated(t *testing.T, client []byte, e packet.Encap) []byte {
	t.Helper()
	sent, err := packet.Encapsulate(client, e)
	testhost.Must(t, err)
	return sent
}

func hopLimit(frame []byte) uint8 {
	offset := map[byte]int{4: 8, 6: 7}[frame[packet.NetworkOffset(frame)]>>4]
	return frame[packet.NetworkOffset(frame)+offset]
}
