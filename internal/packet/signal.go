// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"fmt"

	"github.com/segue-lb/segue/internal/config"
)

// Signal is what a server makes of a frame with a packet to a client that is to pass a balancer: wrapped on
// the way to the one segment that there is, the balancer's SID, with the server as its sender. It does not
// forward, so that the packet keeps its hop limit. The frame itself is not changed.
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
	case config.SRv6Insert:
		p, err = e.insert(p, ip)
	case config.SRv6Encap:
		p, err = e.encapSRv6(p, ip)
	default:
		err = fmt.Errorf("kind %q: %w", e.Kind, ErrEncap)
	}
	if err != nil {
		return nil, err
	}
	return append(SetMACs(link(frame[:network], 6), e.Own, e.NextHop), p...), nil
}

// Return is what a balancer makes of a signal: the packet for the client, marked with the congestion met on
// the way (RFC 6040) and forwarded by one hop. Who forwards the frame is for the host to say: until then it
// comes from the balancer and is for it.
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
