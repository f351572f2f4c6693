// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"fmt"
	"net/netip"
	"slices"
)

// SetActive returns the frame with another segment in that entry of the segment list to which
// segments left points. It keeps the destination. In this way, a candidate tells its load, before
// it passes the packet on by Advance. SetActive does not change the frame itself.
func SetActive(frame []byte, segment netip.Addr) ([]byte, error) {
	out, _, err := setActive(frame, segment)
	return out, err
}

// HandBack returns the frame that the last candidate sends back to an earlier one. segment is the
// SID of the earlier one. It replaces the last candidate's own entry in the segment list, and
// becomes the destination. Segments left does not change, and the hop limit is decremented.
// HandBack keeps the Ethernet addresses, because the kernel sets them when it forwards the frame.
// It does not change the frame itself.
func HandBack(frame []byte, segment netip.Addr) ([]byte, error) {
	out, env, err := setActive(frame, segment)
	if err != nil {
		return nil, err
	}
	p := out[env.network:]
	if err := decrementHopLimit(p, env.ip); err != nil {
		return nil, err
	}
	setIPv6Destination(p, segment)
	return out, nil
}

// setActive does the work of SetActive, and also returns the outer headers.
func setActive(frame []byte, segment netip.Addr) ([]byte, envelope, error) {
	env, err := open(frame)
	if err != nil {
		return nil, env, err
	}
	if env.srh == nil || int(env.srh.SegmentsLeft) >= len(env.srh.Segments) {
		return nil, env, fmt.Errorf("the destination is not in the segment list: %w", ErrSegments)
	}
	out := slices.Clone(frame)
	at := env.network + env.srhAt + srhFixedLength + segmentLength*int(env.srh.SegmentsLeft)
	copy(out[at:], segment.AsSlice())
	return out, env, nil
}
