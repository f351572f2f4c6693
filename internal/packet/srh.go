// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

const (
	routingTypeSRH = 4
	srhFixedLength = 8
	segmentLength  = 16
	// maxSegments is the largest number of segments that the 8-bit length of a routing header
	// allows.
	maxSegments = 127
)

// SRH is a segment routing header (RFC 8754 section 2). It is a gopacket layer.
type SRH struct {
	NextHeader   layers.IPProtocol
	SegmentsLeft uint8
	LastEntry    uint8
	Flags        uint8
	Tag          uint16
	// Segments is the segment list as in the header, in the reverse order of travel: the first
	// entry is the last segment of the path.
	Segments []netip.Addr
	// TLVs are the bytes after the segment list, a multiple of 8.
	TLVs []byte
}

// NewSRH returns a header for a path of 1 to 127 segments in the order of travel. segmentsLeft is
// the number of segments after the packet's present destination.
func NewSRH(segmentsLeft int, path ...netip.Addr) *SRH {
	segments := slices.Clone(path)
	slices.Reverse(segments)
	return &SRH{SegmentsLeft: uint8(segmentsLeft), LastEntry: uint8(len(path) - 1), Segments: segments}
}

// Active returns the segment to which segments left points. It returns false if the packet travels
// to the first segment of a reduced header, which does not contain this segment (RFC 8754 section
// 4.1.1).
func (s *SRH) Active() (netip.Addr, bool) {
	if int(s.SegmentsLeft) >= len(s.Segments) {
		return netip.Addr{}, false
	}
	return s.Segments[s.SegmentsLeft], true
}

// Len returns the length of the header in bytes.
func (s *SRH) Len() int { return srhFixedLength + segmentLength*len(s.Segments) + len(s.TLVs) }

// Bytes returns the header as it is sent. It computes the length. It copies the other fields, even
// if they contradict each other.
func (s *SRH) Bytes() []byte {
	b := []byte{
		uint8(s.NextHeader), uint8(s.Len()/extensionUnit - 1), routingTypeSRH, s.SegmentsLeft, s.LastEntry, s.Flags,
	}
	b = binary.BigEndian.AppendUint16(b, s.Tag)
	for _, segment := range s.Segments {
		b = append(b, segment.AsSlice()...)
	}
	return append(b, s.TLVs...)
}

// LayerType returns gopacket's type of all routing headers.
func (s *SRH) LayerType() gopacket.LayerType { return layers.LayerTypeIPv6Routing }

// SerializeTo implements gopacket.SerializableLayer.
func (s *SRH) SerializeTo(b gopacket.SerializeBuffer, _ gopacket.SerializeOptions) error {
	if len(s.Segments) > maxSegments || len(s.TLVs)%extensionUnit != 0 || s.Len() > 256*extensionUnit {
		return fmt.Errorf("segment routing header of %d segments and %d bytes of TLVs: %w",
			len(s.Segments), len(s.TLVs), ErrSegments)
	}
	header, err := b.PrependBytes(s.Len())
	if err != nil {
		return err
	}
	copy(header, s.Bytes())
	return nil
}

// parseSRH reads the segment routing header at the start of p, with the checks of RFC 8754 section
// 4.3.1.1. The field last entry gives the number of segments. The bytes after the segments are
// TLVs.
func parseSRH(p []byte) (*SRH, error) {
	length, err := extensionLength(p)
	if err != nil {
		return nil, fmt.Errorf("segment routing header: %w", err)
	}
	if p[2] != routingTypeSRH {
		return nil, fmt.Errorf("routing header of type %d: %w", p[2], ErrSegments)
	}
	s := &SRH{
		NextHeader:   layers.IPProtocol(p[0]),
		SegmentsLeft: p[3],
		LastEntry:    p[4],
		Flags:        p[5],
		Tag:          binary.BigEndian.Uint16(p[6:]),
	}
	maxLastEntry := int(p[1])/2 - 1 // the header length is in units of 8 bytes, a segment has 16
	if int(s.LastEntry) > maxLastEntry || int(s.SegmentsLeft) > int(s.LastEntry)+1 {
		return nil, fmt.Errorf("last entry %d of at most %d, segments left %d: %w",
			s.LastEntry, maxLastEntry, s.SegmentsLeft, ErrSegments)
	}
	end := srhFixedLength + segmentLength*(int(s.LastEntry)+1)
	for at := srhFixedLength; at < end; at += segmentLength {
		s.Segments = append(s.Segments, netip.AddrFrom16([16]byte(p[at:at+segmentLength])))
	}
	s.TLVs = slices.Clone(p[end:length])
	return s, nil
}
