// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"fmt"

	"github.com/segue-lb/segue/internal/desired"
)

// Signal returns the frame by which a server sends a packet to a client through a balancer. The
// packet is encapsulated with one segment, which is the balancer's SID. The sender in e is the
// server. Signal does not decrement the hop limit, because the packet is the server's own. It does
// not change the frame itself.
func Signal(frame []byte, e Encap) ([]byte, error) {
	network, ip, err := parseFrame(frame)
	if err != nil {
		return nil, err
	}
	if len(e.Segments) != 1 {
		return nil, fmt.Errorf("a signal with %d segments: %w", len(e.Segments), ErrEncap)
	}
	p := append([]byte(nil), frame[network:]...)
	switch e.Kind {
	case desired.SRv6Insert:
		p, err = e.insert(p, ip)
	case desired.SRv6Encap:
		p, err = e.encapSRv6(p, ip)
	default:
		err = fmt.Errorf("kind %q: %w", e.Kind, ErrEncap)
	}
	if err != nil {
		return nil, err
	}
	return append(SetMACs(link(frame[:network], 6), e.Own, e.NextHop), p...), nil
}

// Return returns the frame that a balancer makes of a signal: the packet for the client, with the
// congestion marks of the path (RFC 6040) and a decremented hop limit. Both Ethernet addresses are
// the balancer's own, because the kernel sets them when it forwards the frame.
func Return(frame []byte, own MAC) ([]byte, error) {
	out, err := Decapsulate(frame)
	if err != nil {
		return nil, err
	}
	network, ip, err := parseFrame(out)
	if err != nil {
		return nil, err
	}
	if err := decrementHopLimit(out[network:], ip); err != nil {
		return nil, err
	}
	return SetMACs(out, own, own), nil
}
