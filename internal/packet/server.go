// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/segue-lb/segue/internal/srv6"
)

// Server is a node with an agent. Its fields are from the agent's configuration.
type Server struct {
	Locator   netip.Prefix // of its SIDs
	Addresses []netip.Addr // ends of gre and ipip tunnels
	VIPs      []netip.Addr // of its services
}

// Verdict is what an agent does with a frame.
type Verdict int

const (
	// Pass leaves the frame to the host, unchanged. The frame is not for the agent.
	Pass Verdict = iota
	// Deliver passes the client's packet to the host.
	Deliver
	// Forward sends the frame to the next segment.
	Forward
	// Drop discards the frame.
	Drop
)

func (v Verdict) String() string {
	return [...]string{"pass", "deliver", "forward", "drop"}[v]
}

// Receive returns what the server's agent does with a frame. SIDs of the locator with a function
// belong to the agent, and so do tunnels to one of the addresses. All other frames belong to the
// host. With Drop, Receive returns an error with the reason, and no frame.
func (s Server) Receive(frame []byte) (Verdict, []byte, error) {
	mine, err := s.isMine(frame)
	if err != nil {
		return Drop, nil, err
	}
	if !mine {
		return Pass, frame, nil
	}
	verdict, out, err := s.execute(frame)
	if err != nil {
		return Drop, nil, err
	}
	return verdict, out, nil
}

// isMine returns an error for a SID whose function an agent does not have.
func (s Server) isMine(frame []byte) (bool, error) {
	_, ip, err := parseFrame(frame)
	if err != nil {
		return false, nil // malformed: the host refuses it
	}
	if s.Locator.Contains(ip.destination) {
		sid := srv6.Parse(ip.destination)
		if sid.Function != srv6.Host && sid.Function != srv6.Deliver {
			return false, fmt.Errorf("%v at %v: %w", sid.Function, ip.destination, ErrFunction)
		}
		return sid.Function == srv6.Deliver, nil
	}
	isTunnel := ip.protocol == protocolGRE || ip.protocol == protocolIPv4 || ip.protocol == protocolIPv6
	return isTunnel && slices.Contains(s.Addresses, ip.destination), nil
}

// execute is the function deliver (srv6.Deliver).
func (s Server) execute(frame []byte) (Verdict, []byte, error) {
	env, err := open(frame)
	if err != nil {
		return Drop, nil, err
	}
	vip, err := env.vip(frame)
	if err != nil {
		return Drop, nil, err
	}
	if slices.Contains(s.VIPs, vip) {
		out, err := Decapsulate(frame)
		return Deliver, out, err
	}
	if env.remaining() == 0 {
		return Drop, nil, fmt.Errorf("%v: %w", vip, ErrNotServed)
	}
	if next := env.srh.Segments[env.srh.SegmentsLeft-1]; !s.mayPassTo(next) {
		return Drop, nil, fmt.Errorf("%v: %w", next, ErrNextSegment)
	}
	out, err := Advance(frame)
	return Forward, out, err
}

// mayPassTo tells whether a packet may be passed on to a segment. The segment must be a function of
// another server.
func (s Server) mayPassTo(segment netip.Addr) bool {
	return srv6.Parse(segment).Function.AtServer() &&
		!s.Locator.Contains(segment) && !segment.IsMulticast()
}
