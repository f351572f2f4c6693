// SPDX-License-Identifier: Apache-2.0

package packet_test

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// Offsets in an untagged frame.
const (
	outerHeader = 14
	outerSRH    = outerHeader + 40
)

func encapsulated(t *testing.T, client []byte, e packet.Encap) []byte {
	t.Helper()
	sent, err := packet.Encapsulate(client, e)
	testhost.Must(t, err)
	return sent
}

func TestServerVerdicts(t *testing.T) {
	syn6, syn4 := packet.TCP(client6, vip6), packet.TCP(client4, vip4)
	inserted := encapsulated(t, syn6, srv6Encap(desired.SRv6Insert, deliver1, deliver2))
	wrapped := encapsulated(t, syn6, srv6Encap(desired.SRv6Encap, deliver1, deliver2))
	known := encapsulated(t, syn6, srv6Encap(desired.SRv6Encap, deliver1))
	gre4 := encapsulated(t, syn4, tunnel(desired.GRE, outer4))
	ipip6 := encapsulated(t, syn4, tunnel(desired.IPIP, outer6))
	elsewhere := encapsulated(t, syn4, tunnel(desired.GRE, [2]netip.Addr{outer4[1], outer4[0]}))
	sid := outerHeader + 24 + 8 // the function in the outer destination

	for _, c := range []struct {
		name  string
		frame []byte
		want  packet.Verdict
		err   error
	}{
		{"a client's packet", syn6, packet.Pass, nil},
		{"an ARP frame", packet.SetByte(syn6, 13, 0x06), packet.Pass, nil},
		{"the locator without a function", packet.SetByte(known, sid+1, 0), packet.Pass, nil},
		{"an unknown function", packet.SetByte(known, sid+1, 0x99), packet.Drop, packet.ErrFunction},
		{"a balancer's function", packet.SetByte(known, sid+1, 0x11), packet.Drop, packet.ErrFunction},
		{"an argument", packet.SetByte(known, sid+7, 1), packet.Deliver, nil},
		{"someone else's SID", packet.SetByte(known, sid-1, 9), packet.Pass, nil},
		{"someone else's tunnel", elsewhere, packet.Pass, nil},
		{"TCP to a tunnel's end", packet.TCP(client4, netip.AddrPortFrom(outer4[1], 22)), packet.Pass, nil},
		{"TCP to a SID", packet.TCP(client6, netip.AddrPortFrom(deliver1, 22)), packet.Drop, packet.ErrNotEncapsulated},

		{"segments left past the last entry", packet.SetByte(inserted, outerSRH+3, 5), packet.Drop, packet.ErrSegments},
		{"no segment left", packet.SetByte(inserted, outerSRH+3, 0), packet.Drop, packet.ErrSegments},
		{"a last entry past the header", packet.SetByte(inserted, outerSRH+4, 4), packet.Drop, packet.ErrSegments},
		{"a routing header of another type", packet.SetByte(inserted, outerSRH+2, 2), packet.Drop, packet.ErrSegments},
		{"a header past the packet", packet.SetByte(inserted, outerSRH+1, 200), packet.Drop, packet.ErrTruncated},
		{"an empty list", packet.SetByte(wrapped, outerSRH+1, 0), packet.Drop, packet.ErrSegments},

		{"inner version", packet.FlipByte(known, outerHeader+40), packet.Drop, packet.ErrNotIP},
		{"inner length", packet.SetByte(known, outerHeader+40+4, 1), packet.Drop, packet.ErrTruncated},
		{"a key in GRE", packet.SetByte(gre4, outerHeader+20, 0x20), packet.Drop, packet.ErrGRE},
		{"bridging in GRE", packet.SetByte(packet.SetByte(gre4, outerHeader+22, 0x65), outerHeader+23, 0x58),
			packet.Drop, packet.ErrGRE},
		{"a fragment of a tunnel", packet.SetByte(gre4, outerHeader+6, 0x20), packet.Drop, packet.ErrFragment},
		{"the last fragment of a tunnel", packet.SetByte(gre4, outerHeader+7, 1), packet.Drop, packet.ErrFragment},
		{"a VIP not served", packet.FlipByte(ipip6, outerHeader+40+19), packet.Drop, packet.ErrNotServed},
	} {
		verdict, out, err := server.Receive(c.frame)
		if verdict != c.want || !errors.Is(err, c.err) {
			t.Errorf("%s: %v, %v; want %v, %v", c.name, verdict, err, c.want, c.err)
		}
		if (out == nil) != (verdict == packet.Drop) {
			t.Errorf("%s: %v with %d bytes", c.name, verdict, len(out))
		}
		if verdict == packet.Pass && cmp.Diff(c.frame, out) != "" {
			t.Errorf("%s: passed, but changed", c.name)
		}
	}
}

// A server without the VIP passes the packet on to the next, which delivers the client's packet.
func TestForwardToNextServer(t *testing.T) {
	first := packet.Server{Locator: locator1}
	second := packet.Server{Locator: netip.PrefixFrom(deliver2, 64), VIPs: server.VIPs}
	for _, kind := range []desired.Encapsulation{desired.SRv6Insert, desired.SRv6Encap} {
		sent := encapsulated(t, packet.TCP(client6, vip6), srv6Encap(kind, deliver1, deliver2))
		verdict, forwarded, err := first.Receive(sent)
		if verdict != packet.Forward {
			t.Fatalf("%s: %v, %v", kind, verdict, err)
		}
		want := packet.SetHopLimit(sent, hopLimit(sent)-1)
		want[outerSRH+3]--
		copy(want[outerHeader+24:], deliver2.AsSlice())
		if diff := cmp.Diff(want, forwarded); diff != "" {
			t.Errorf("%s: forwarded (-want +got):\n%s", kind, diff)
		}
		verdict, delivered, err := second.Receive(forwarded)
		if verdict != packet.Deliver {
			t.Fatalf("%s: second server: %v, %v", kind, verdict, err)
		}
		if err := packet.Verify(delivered); err != nil {
			t.Errorf("%s: delivered: %v", kind, err)
		}
		expired := packet.SetHopLimit(sent, 1)
		if verdict, _, err := first.Receive(expired); verdict != packet.Drop || !errors.Is(err, packet.ErrHopLimit) {
			t.Errorf("%s: hop limit 1: %v, %v", kind, verdict, err)
		}
	}
}

// A server passes packets on only to other servers. A balancer would take them for the server's
// signals.
func TestForwardToServersOnly(t *testing.T) {
	first := packet.Server{Locator: locator1}
	for _, next := range []string{
		"fd00:6c:0:1:11::", "fd00:6c:0:1:12::", // signals
		"fd00:5:0:2::", "fd00:5:0:2:99::", "fd00:5:0:1:5::", "ff02::5:0:0:0",
	} {
		segments := []netip.Addr{deliver1, netip.MustParseAddr(next), deliver2}
		for _, kind := range []desired.Encapsulation{desired.SRv6Insert, desired.SRv6Encap} {
			sent := encapsulated(t, packet.TCP(client6, vip6), srv6Encap(kind, segments...))
			verdict, _, err := first.Receive(sent)
			if verdict != packet.Drop || !errors.Is(err, packet.ErrNextSegment) {
				t.Errorf("%s, then %s: %v, %v", kind, next, verdict, err)
			}
		}
	}
}

// Figure 4 of RFC 6040.
func TestCongestionMarks(t *testing.T) {
	const notECT, ect1, ect0, ce, drop = 0, 1, 2, 3, 4
	want := [4][4]int{ // [inner][outer]
		notECT: {notECT: notECT, ect0: notECT, ect1: notECT, ce: drop},
		ect0:   {notECT: ect0, ect0: ect0, ect1: ect1, ce: ce},
		ect1:   {notECT: ect1, ect0: ect1, ect1: ect1, ce: ce},
		ce:     {notECT: ce, ect0: ce, ect1: ce, ce: ce},
	}
	const dscp = 0xb8
	for _, client := range []struct{ src, dst netip.AddrPort }{{client4, vip4}, {client6, vip6}} {
		for inner := range want {
			frame := packet.TCP(client.src, client.dst, packet.TrafficClass(dscp|uint8(inner)))
			for outer, mark := range want[inner] {
				sent := encapsulated(t, frame, srv6Encap(desired.SRv6Encap, deliver1))
				sent[outerHeader+1] = sent[outerHeader+1]&0xcf | uint8(outer)<<4
				verdict, out, err := server.Receive(sent)
				if mark == drop {
					if verdict != packet.Drop || !errors.Is(err, packet.ErrCongestion) {
						t.Errorf("%v inner %d outer %d: %v, %v", client.dst, inner, outer, verdict, err)
					}
					continue
				}
				got, err := packet.Decode(out)
				testhost.Must(t, err)
				if class := got.Headers[0].TrafficClass; int(class) != dscp|mark {
					t.Errorf("%v inner %d outer %d: class %#x, want mark %d", client.dst, inner, outer, class, mark)
				}
				if err := packet.Verify(out); err != nil {
					t.Errorf("%v inner %d outer %d: %v", client.dst, inner, outer, err)
				}
			}
		}
	}
}
