// SPDX-License-Identifier: Apache-2.0

package packet_test

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// The last of three candidates hands a SYN back to the first one, in a list without a byte more.
func TestHandBack(t *testing.T) {
	sid := func(i byte, function srv6.Function) netip.Addr {
		locator := netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 7: i}), 64)
		return srv6.SID{Locator: locator, Function: function}.Addr()
	}
	list := []netip.Addr{sid(1, srv6.ConnectAvail), sid(2, srv6.ConnectAvail), sid(3, srv6.ConnectAvail)}
	first := sid(1, srv6.ConnectForce)
	for _, kind := range []desired.Encapsulation{desired.SRv6Insert, desired.SRv6Encap} {
		e := srv6Encap(kind, list...)
		e.Whole = true
		frame, err := packet.Encapsulate(packet.TCP(client6, vip6), e)
		for range 2 {
			if err == nil {
				frame, err = packet.Advance(frame)
			}
		}
		testhost.Must(t, err)
		before := slices.Clone(frame)
		out, err := packet.HandBack(frame, first)
		testhost.Must(t, err)
		if diff := cmp.Diff(before, frame); diff != "" {
			t.Errorf("%s: the argument changed (-want +got):\n%s", kind, diff)
		}
		decoded, err := packet.Decode(out)
		if err := errors.Join(err, packet.Verify(out)); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
		outer := decoded.Headers[0]
		if active, _ := outer.SRH.Active(); outer.Destination != first || active != first {
			t.Errorf("%s: it goes to %v, and its segment is %v; want %v", kind, outer.Destination, active, first)
		}
		if hopLimit(out) != hopLimit(frame)-1 || len(out) != len(frame) {
			t.Errorf("%s: hop limit %d after %d, %d bytes after %d", kind, hopLimit(out), hopLimit(frame), len(out), len(frame))
		}
		want, got := mustDecapsulate(t, frame), mustDecapsulate(t, out)
		if kind == desired.SRv6Insert {
			want = packet.SetHopLimit(want, hopLimit(want)-1)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: the client's packet (-want +got):\n%s", kind, diff)
		}
	}
}

func mustDecapsulate(t *testing.T, frame []byte) []byte {
	t.Helper()
	out, err := packet.Decapsulate(frame)
	testhost.Must(t, err)
	return out
}

// The first segment of a reduced list has no entry.
func TestSetActiveNeedsAnEntry(t *testing.T) {
	for _, segments := range [][]netip.Addr{{deliver1}, {deliver1, deliver2}} {
		frame, err := packet.Encapsulate(packet.TCP(client6, vip6), srv6Encap(desired.SRv6Encap, segments...))
		testhost.Must(t, err)
		if _, err := packet.SetActive(frame, deliver2); !errors.Is(err, packet.ErrSegments) {
			t.Errorf("%d segments: %v, want %v", len(segments), err, packet.ErrSegments)
		}
	}
}
