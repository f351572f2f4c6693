// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// The encapsulation of a signal has the length of 6LB's figure 5 and of RFC 8986. The balancer
// returns the server's packet with a decremented hop limit and with the congestion marks of the
// path.
func TestSignalAndReturn(t *testing.T) {
	server, balancer := MAC{2, 0, 0, 0, 0, 1}, MAC{2, 0, 0, 0, 0, 2}
	e := Encap{
		Sender: netip.MustParseAddr("fd00:5:0:1::"),
		Segments: []netip.Addr{
			srv6.SID{Locator: netip.MustParsePrefix("fd00:6c:0:1::/64"), Function: srv6.CreateStickiness}.Addr(),
		},
		Own: server, NextHop: balancer,
	}
	six := TCP(netip.MustParseAddrPort("[2001:db8:80::1]:80"), netip.MustParseAddrPort("[2001:db8:c::2]:40000"),
		Flags(SYN|ACK), TrafficClass(2), Payload([]byte("data")))
	four := TCP(netip.MustParseAddrPort("198.51.100.1:80"), netip.MustParseAddrPort("192.0.2.2:40000"),
		Flags(SYN|ACK), TrafficClass(2), Payload([]byte("data")))
	for _, c := range []struct {
		name  string
		kind  desired.Encapsulation
		frame []byte
		added int
	}{
		{"srv6-insert", desired.SRv6Insert, six, 56},
		{"srv6-encap", desired.SRv6Encap, six, 40},
		{"srv6-encap of IPv4", desired.SRv6Encap, four, 40},
	} {
		t.Run(c.name, func(t *testing.T) {
			e.Kind = c.kind
			signal, err := Signal(c.frame, e)
			testhost.Must(t, err)
			if added := len(signal) - len(c.frame); added != c.added {
				t.Errorf("%d bytes added, want %d", added, c.added)
			}
			if err := Verify(signal); err != nil {
				t.Error(err)
			}
			back, err := Return(signal, balancer)
			testhost.Must(t, err)
			if want := SetMACs(SetHopLimit(c.frame, 63), balancer, balancer); !bytes.Equal(back, want) {
				t.Errorf("came back as\n%x, want\n%x", back, want)
			}
		})
	}
	e.Kind = desired.GRE
	if _, err := Signal(six, e); !errors.Is(err, ErrEncap) {
		t.Errorf("by gre: error %v, want %v", err, ErrEncap)
	}
	e.Kind, e.Segments = desired.SRv6Encap, nil
	if _, err := Signal(six, e); !errors.Is(err, ErrEncap) {
		t.Errorf("to nobody: error %v, want %v", err, ErrEncap)
	}
}
