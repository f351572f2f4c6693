// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// unknownFirst returns what a report tells about a first candidate that is not known.
func unknownFirst() srv6.Report {
	return srv6.Report{First: srv6.FirstCandidate{Column: srv6.NoColumn}}
}

// wantsReport tells whether the balancer takes load reports of a flow, after a packet of the flow.
// Offers and ack-stickiness say so. Another packet of the same balancer changes nothing.
func (w *wrapped) wantsReport(before remembered) bool {
	if w.function <= ackStickiness {
		return w.offer().WantsReport
	}
	return before.balancer == w.sender && before.wantsReport
}

// firstCandidate returns what a report tells about the first candidate of the list.
func (w *wrapped) firstCandidate() srv6.Report {
	for i, segment := range slices.Backward(w.list) {
		if i <= w.segmentsLeft || i < len(w.list)-mostEarlier {
			break
		}
		candidate := srv6.Parse(segment)
		offer := srv6.ParseOffer(candidate.Argument)
		switch {
		case candidate.Function != srv6.ConnectAvail:
			continue
		case candidate.Locator == w.locator():
			return srv6.Report{IsFirst: true}
		case offer.Column == srv6.NoColumn:
			return unknownFirst()
		}
		code := accept.Code(toldLoad(offer))
		return srv6.Report{First: srv6.FirstCandidate{Column: offer.Column, Load: code}}
	}
	return srv6.Report{IsFirst: true}
}

// sent is a packet of the host that can carry a signal.
type sent struct {
	flow
	flags packet.TCPFlags
	gso   bool // the interface cuts it into several packets
}

// readSent reads a packet of the host. It returns false if the packet cannot belong to a flow.
func readSent(frame []byte) (s sent, ok bool) {
	source, tcp := findTCP(frame)
	if len(tcp) < 20 || source.Is4In6() {
		return s, false
	}
	var client netip.Addr
	if source.Is4() {
		client = netip.AddrFrom4([4]byte(frame[14+16:]))
	} else {
		client = netip.AddrFrom16([16]byte(frame[14+24:]))
	}
	s.client = netip.AddrPortFrom(client, binary.BigEndian.Uint16(tcp[2:]))
	s.vip = netip.AddrPortFrom(source, binary.BigEndian.Uint16(tcp))
	s.flags = packet.TCPFlags(tcp[13])
	return s, true
}

// fits tells whether a frame has room for a signal.
func (s sent) fits(frame []byte, kind desired.Encapsulation) bool {
	size := 40
	if kind == desired.SRv6Insert {
		size = 56
	}
	hasMore := s.vip.Addr().Is4() && binary.BigEndian.Uint16(frame[14+6:])&0x2000 != 0
	return !s.gso && !hasMore && len(frame)-14+size <= mtu
}

// signal returns the result under which the signal of a frame is counted, if there is one, the
// frame that is sent, and the entry of the flow afterwards. The serial of the report is 0, and so
// is the flow label of an outer header.
func (r reference) signal(
	s sent, frame []byte, known tableFlow,
) (result string, out []byte, after tableFlow) {
	if known.state == "cookie" {
		return "", stamped(frame, known.cookie), known
	}
	hasExpired := known.state == "closing" && known.age > 10*time.Second
	if known.state == "" || hasExpired || known.told {
		return "", frame, known
	}
	function := srv6.CreateStickiness
	switch {
	case s.flags&(packet.FIN|packet.RST) != 0 || known.state == "ending":
		function = srv6.RemoveStickiness
	case known.state != "wait":
		return "", frame, known
	}
	fits := s.fits(frame, known.kind)
	if function == srv6.RemoveStickiness {
		known.state, known.told = map[bool]string{true: "closing", false: "ending"}[fits], fits
	}
	if !fits {
		return "too_long", frame, known
	}
	result = "create"
	if function == srv6.RemoveStickiness {
		result = "remove"
	}
	report := uint64(0)
	if known.wantsReport {
		report = r.report(s, known, function).Argument()
	}
	own := srv6.SID{Locator: r.locator, Argument: report}.Addr()
	sid := srv6.SID{Locator: known.balancer, Function: function}.Addr()
	if known.kind == desired.SRv6Insert {
		return result, insertSignal(frame, s.client.Addr(), sid, own), known
	}
	return result, wrapSignal(frame, sid, own), known
}

// firstLifetime is the time after which a signal no longer tells what the first candidate has told.
const firstLifetime = 250 * time.Millisecond

// report returns the report for a signal of a flow, without a serial.
func (r reference) report(s sent, known tableFlow, function srv6.Function) srv6.Report {
	report := unknownFirst()
	if function == srv6.CreateStickiness && known.age < firstLifetime {
		report = known.first
	}
	local, p := r.lookup(s.flow), r.service(s.flow)
	if p == nil || !local.listening || !p.isKnown() {
		return report
	}
	load := p.now(local)
	shows := p.source.Kind == desired.LoadApache || p.source.Kind == desired.LoadSharedMemory
	if function == srv6.RemoveStickiness && shows && load.Busy > 0 {
		load.Busy--
	}
	report.Load = accept.Code(toldLoad(offerOf(load)))
	return report
}

// insertSignal inserts a routing header behind the IPv6 header.
func insertSignal(frame []byte, client, sid, own netip.Addr) []byte {
	const size = 56
	out := slices.Clone(frame[:14+40])
	at := out[14:]
	srh := []byte{at[6], size/8 - 1, 4, 1, 2, 0, 0, 0}
	for _, segment := range []netip.Addr{client, sid, own} {
		srh = append(srh, segment.AsSlice()...)
	}
	binary.BigEndian.PutUint16(at[4:], binary.BigEndian.Uint16(at[4:])+size)
	at[6] = 43
	copy(at[24:], sid.AsSlice())
	return slices.Concat(out, srh, frame[14+40:])
}

// wrapSignal puts an IPv6 header in front of the packet, with its traffic class.
func wrapSignal(frame []byte, sid, own netip.Addr) []byte {
	next, class := byte(41), frame[14]<<4|frame[15]>>4
	if frame[14]>>4 == 4 {
		next, class = 4, frame[15]
	}
	ip := []byte{6<<4 | class>>4, class << 4, 0, 0, 0, 0, next, 64}
	binary.BigEndian.PutUint16(ip[4:], uint16(len(frame)-14))
	ip = slices.Concat(ip, own.AsSlice(), sid.AsSlice())
	return slices.Concat(frame[:12], []byte{0x86, 0xdd}, ip, frame[14:])
}
