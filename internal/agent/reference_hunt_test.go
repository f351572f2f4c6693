// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// The functions of a server's SIDs; see docs/understand/protocol.md.
const (
	connectAvail = 1 + iota
	connectForce
	ackStickiness
	recoverStickiness
	deliverAlways
	steer
	probe
)

// flow is a connection, identified by its ends.
type flow struct{ client, vip netip.AddrPort }

// remembered is the server's entry of a flow: table III of the 6LB paper.
type remembered struct {
	state    string // wait, direct, ending, closing, cookie
	balancer netip.Prefix
	kind     desired.Encapsulation
	// wantsReport tells that the balancer takes load reports of the flow.
	wantsReport bool
	// first is what a report tells about the first candidate. The fields about this server are not
	// set.
	first srv6.Report
	// cookie is the flow's cookie, in the state cookie. acknowledged tells that the client has
	// acknowledged the SYN-ACK.
	cookie       cookie
	acknowledged bool
}

// String returns the entry in words.
func (r remembered) String() string {
	if r.state == "" {
		return "none"
	}
	if r.state == "cookie" {
		return fmt.Sprintf("%+v of %v by %s, acknowledged: %t", r.cookie, r.balancer, r.kind, r.acknowledged)
	}
	return fmt.Sprintf("%s of %v by %s, wants reports: %t, first: %+v",
		r.state, r.balancer, r.kind, r.wantsReport, r.first)
}

// flowOf returns the entry of a flow of which the balancer takes no load reports.
func flowOf(state string, balancer netip.Prefix, kind desired.Encapsulation) remembered {
	return remembered{state: state, balancer: balancer, kind: kind, first: unknownFirst()}
}

// sockets are the kernel's sockets for a flow, and the backlog of the listening one.
type sockets struct {
	listening, request, connected, timeWait bool
	cookie                                  bool // the flow's ACK returns a valid SYN cookie
	// waiting connections are in the accept queue, most is the queue's limit, and young ones are
	// half-open, with a SYN-ACK that was sent once.
	waiting, most, young uint32
}

func (s sockets) live() bool { return s.request || s.connected }

// hunter is the reference for the functions about flows.
type hunter struct {
	balancers []netip.Prefix // empty: all
	flows     map[flow]remembered
	fragments map[[3]any]bool // packets whose first fragment was delivered
	sockets   func(flow) sockets
	services  map[netip.AddrPort]*policy
	offers    map[string]int

	initials    map[initial]decision
	udpServices map[netip.AddrPort]*policy
	receives    func(flow) bool // whether a socket of UDP receives the flow; nil: none does
}

// policy is the accept policy of a service.
type policy struct {
	accept.Policy // nil: least, or drained
	drained       bool
	reset         bool
	source        desired.Source
	load          *accept.Load // what the source shows; nil: unknown
}

func newPolicy(s desired.AgentService) *policy {
	p := &policy{drained: s.Drained, reset: s.NotLocal == desired.NotLocalReset, source: s.Load}
	if s.Drained {
		return p
	}
	switch a := s.Accept; a.Policy { // least leaves p.Policy nil
	case desired.AcceptAlways:
		p.Policy = accept.Always{}
	case desired.AcceptNever:
		p.Policy = accept.Never{}
	case desired.AcceptStatic:
		p.Policy = accept.Static{Threshold: *a.Threshold}
	case desired.AcceptDynamic:
		dynamic := accept.NewDynamic(*a.Initial, a.Window, *a.Epsilon)
		if *a.WindowTime > 0 {
			dynamic.WithWindowTime(*a.WindowTime, coarseTime)
		}
		p.Policy = dynamic
	}
	return p
}

// answer returns the result of an offer of a connection.
func (p *policy) answer(w *wrapped, s segment, local sockets) string {
	switch {
	case w.function == connectForce && w.offer().Next != 0:
		return "taken_back"
	case w.function == connectForce:
		return "forced"
	case local.listening && w.left() > 0 && w.cookie().column > 0 && s.tcp != nil && !s.hasTimestamps():
		return "refused"
	case p.Policy == nil, w.left() <= 0 && !local.listening:
		return p.compare(w, local)
	case w.left() <= 0:
		return "forced"
	case !local.listening:
		return "refused_down"
	}
	result := p.offer(local)
	if result == "refused" && p.Policy != (accept.Never{}) {
		w.tell(toldLoad(offerOf(p.now(local))))
	}
	return result
}

// isKnown tells whether the load of a service with a listening socket is known.
func (p *policy) isKnown() bool { return p.load != nil || p.source.Kind == desired.LoadAcceptQueue }

// now returns the present load of a service with a listening socket: what the source shows, and the
// connections that it does not show yet.
func (p *policy) now(local sockets) accept.Load {
	load := accept.Load{Busy: local.waiting, Capacity: accept.NoCapacity}
	if p.source.Kind != desired.LoadAcceptQueue {
		load = *p.load
	}
	if p.source.Kind == desired.LoadConnections && p.source.Workers != 0 {
		load.Capacity = p.source.Workers
	}
	if p.source.Capacity != 0 {
		load.Capacity = p.source.Capacity
	}
	// A flood makes half-open connections, too.
	most := load.Capacity
	if most == accept.NoCapacity {
		most = load.Busy
	}
	missing := uint64(min(local.young, max(most, 16)))
	switch p.source.Kind {
	case desired.LoadCgroup: // CPU time
		return load
	case desired.LoadApache, desired.LoadSharedMemory, desired.LoadSharedMap:
		missing += uint64(local.waiting)
	}
	load.Busy = uint32(min(uint64(load.Busy)+missing, math.MaxUint32))
	return load
}

// offer asks the policy. Policies that use the load accept all offers while the load is unknown.
func (p *policy) offer(local sockets) string {
	load := accept.Load{}
	switch p.Policy.(type) {
	case accept.Always, accept.Never:
	default:
		if !p.isKnown() {
			return "accepted_stale"
		}
		load = p.now(local)
	}
	// The dynamic policy bounds its threshold by the capacity.
	if load.Capacity == accept.NoCapacity {
		load.Capacity = local.most
	}
	if p.Accepts(load) {
		return "accepted"
	}
	return "refused"
}

// segment is a packet of a flow.
type segment struct {
	flow
	source   netip.Addr // of the packet itself
	flags    packet.TCPFlags
	isError  bool // ICMP error about the flow
	later    bool // later fragment, whose flow is unknown
	fragment uint32
	tcp      []byte // from the TCP header on; nil: the packet is not of TCP
	udp      []byte // the same for UDP
}

// isBalancer tells whether the node accepts functions about flows from a sender with this locator.
func (h *hunter) isBalancer(sender netip.Prefix) bool {
	has := func(p netip.Prefix) bool { return p.Contains(sender.Addr()) }
	return len(h.balancers) == 0 || slices.ContainsFunc(h.balancers, has)
}

// handshake returns the reason for a packet to a VIP of the server. "" means that the packet is
// delivered.
func (h *hunter) handshake(w *wrapped) string {
	if !h.isBalancer(w.sender) {
		return "drop_sender"
	}
	s, ok := readClient(*w)
	if !ok || s.isError && w.function != steer {
		if w.function == ackStickiness {
			return ""
		}
		return "drop_transport"
	}
	piece := [3]any{s.source, w.vip, s.fragment}
	if s.later {
		if w.function != steer || h.fragments[piece] {
			return ""
		}
		return notLocal(w)
	}
	if s.udp != nil {
		if w.function == ackStickiness {
			return ""
		}
		return h.initial(w, s)
	}
	var reason string
	switch w.function {
	case connectAvail, connectForce:
		if s.flags&(packet.SYN|packet.FIN|packet.RST|packet.ACK) != packet.SYN {
			return "drop_tcp_flags"
		}
		reason = h.connect(w, s)
	case ackStickiness:
		h.acknowledge(w, s)
	default:
		reason = h.recover(w, s)
	}
	if reason == "" && s.fragment != 0 {
		h.fragments[piece] = true
	}
	return reason
}

func notLocal(w *wrapped) string {
	if w.left() > 0 {
		return "next_not_local"
	}
	return "drop_not_local"
}

func (h *hunter) lookup(f flow) sockets {
	if h.sockets == nil {
		return sockets{}
	}
	return h.sockets(f)
}

func (h *hunter) service(f flow) *policy {
	if p := h.services[f.vip]; p != nil {
		return p
	}
	return h.services[netip.AddrPortFrom(f.vip.Addr(), 0)]
}

// set updates the entry of a flow. It keeps an entry that does not change.
func (h *hunter) set(f flow, state string, w *wrapped) {
	before, now := h.flows[f], flowOf(state, w.sender, w.kind)
	now.wantsReport = w.wantsReport(before)
	same := before
	same.first = now.first
	if same != now {
		h.flows[f] = now
	}
}

// accept enters a flow that the server has accepted.
func (h *hunter) accept(f flow, w *wrapped) {
	if w.offer().Cookie > 0 {
		h.acceptWithCookie(f, w)
		return
	}
	now := flowOf("wait", w.sender, w.kind)
	if now.wantsReport = w.wantsReport(h.flows[f]); now.wantsReport {
		now.first = w.firstCandidate()
	}
	h.flows[f] = now
}

// connect returns the reason for an offer. "" means that the packet is delivered.
func (h *hunter) connect(w *wrapped, s segment) string {
	known, local := h.flows[s.flow], h.lookup(s.flow)
	isAwaited := known.state == "wait" || known.state == "cookie" && !known.acknowledged
	switch {
	case local.request && w.offer().Cookie > 0:
		h.accept(s.flow, w)
		return ""
	case local.connected && w.offer().Cookie > 0: // the socket has the cookie
		return ""
	case local.request && known.state == "cookie": // no socket has the cookie yet
		return ""
	case local.request, local.connected && known.state == "wait":
		h.set(s.flow, "wait", w)
		return ""
	case local.connected:
		if known.state == "" {
			h.set(s.flow, "direct", w)
		}
		return ""
	case local.listening && !local.timeWait && isAwaited: // repeated
		h.accept(s.flow, w)
		return ""
	}
	if p := h.service(s.flow); p != nil {
		result := p.answer(w, s, local)
		h.offers[result]++
		switch result {
		case "refused", "refused_down":
			return "next_refused"
		case "returned":
			return "next_returned"
		}
	} else if w.function != connectForce && w.left() > 0 {
		return "next_refused"
	}
	h.accept(s.flow, w)
	return ""
}

func ends(s segment) bool { return s.flags&(packet.FIN|packet.RST) != 0 }

// acknowledge handles ack-stickiness.
func (h *hunter) acknowledge(w *wrapped, s segment) {
	if h.flows[s.flow].state != "" || s.flags&(packet.SYN|packet.FIN|packet.RST) == 0 || h.lookup(s.flow).live() {
		h.noteKnown(w, s)
	}
}

// noteKnown notes that the balancer knows the flow of a packet.
func (h *hunter) noteKnown(w *wrapped, s segment) {
	switch state := h.flows[s.flow].state; {
	case state == "ending", state == "closing":
		h.set(s.flow, state, w)
	case ends(s):
		h.set(s.flow, "closing", w)
	default:
		h.set(s.flow, "direct", w)
	}
}

// recover returns the reason for recover-stickiness and steer. "" means that the packet is
// delivered.
func (h *hunter) recover(w *wrapped, s segment) string {
	local := h.lookup(s.flow)
	switch here := local.live() || local.cookie && s.flags&packet.ACK != 0 && s.flags&(packet.SYN|packet.RST) == 0; {
	case !here && w.left() > 0:
		return "next_not_local"
	case !here && local.timeWait && (!w.wantsReturn() || w.offer().Cookie > 0):
		return ""
	case !here && w.wantsReturn():
		return "return_not_local"
	case !here && h.service(s.flow) != nil && h.service(s.flow).reset && !s.isError:
		return "deliver_not_local" // TestResetRate tests the limit
	case !here:
		return "drop_not_local"
	case w.function == steer && w.offer().Cookie > 0:
		h.takeCookie(w, s, local)
	case local.request && h.flows[s.flow].state == "cookie": // no socket has the cookie yet
	case w.function == steer && w.wantsReturn():
		h.noteKnown(w, s)
	case w.function == steer:
	case h.flows[s.flow].state == "ending":
		h.set(s.flow, "ending", w)
	case ends(s):
		h.set(s.flow, "closing", w)
	default:
		h.set(s.flow, "wait", w)
	}
	return ""
}

// readClient reads the flow of the client's packet. It returns false if the packet is neither of TCP
// nor of UDP.
func readClient(w wrapped) (s segment, ok bool) {
	next, b, v6 := w.next, w.inner, w.kind == desired.SRv6Insert || w.inner[0]>>4 == 6
	s.source = w.source
	switch {
	case w.kind == desired.SRv6Insert:
	case v6:
		s.source = netip.AddrFrom16([16]byte(b[8:]))
		next, b = b[6], b[40:40+int(binary.BigEndian.Uint16(b[4:]))]
	default:
		header, length, flags := int(b[0]&0xf)*4, int(binary.BigEndian.Uint16(b[2:])), binary.BigEndian.Uint16(b[6:])
		s.source = netip.AddrFrom4([4]byte(b[12:]))
		if flags&0x3fff != 0 {
			s.fragment = uint32(binary.BigEndian.Uint16(b[4:]))
			s.later = flags&0x1fff != 0
		}
		next, b = b[9], b[header:length]
	}
	if v6 {
		if next, b, ok = skipExtensions(next, b, &s); !ok {
			return s, false
		}
	}
	if s.later {
		return s, true
	}
	if !v6 && next == 1 || v6 && next == 58 {
		return s, len(b) >= 8 && readQuote(b[8:], v6, w.vip, &s)
	}
	isUDP := next == 17 && len(b) >= 8 && binary.BigEndian.Uint16(b[4:]) >= 8
	isTCP := next == 6 && len(b) >= 20 && b[12]>>4 >= 5 && int(b[12]>>4)*4 <= len(b)
	if !isTCP && !isUDP {
		return s, false
	}
	s.flow = flow{
		netip.AddrPortFrom(s.source, binary.BigEndian.Uint16(b)), netip.AddrPortFrom(w.vip, binary.BigEndian.Uint16(b[2:])),
	}
	if isUDP {
		s.udp = b
	} else {
		s.flags, s.tcp = packet.TCPFlags(b[13]), b
	}
	return s, true
}

// skipExtensions skips to the transport header, or to a fragment's data.
func skipExtensions(next byte, b []byte, s *segment) (byte, []byte, bool) {
	for i := 0; i <= 8; i++ {
		if !slices.Contains([]byte{0, 43, 44, 60}, next) {
			return next, b, true
		}
		if len(b) < 8 {
			break
		}
		size := 8 + int(b[1])*8
		switch {
		case next == 44:
			size = 8
			if offset := binary.BigEndian.Uint16(b[2:]); offset&0xfff9 != 0 {
				s.fragment = binary.NativeEndian.Uint32(b[4:])
				s.later = offset&0xfff8 != 0
				if s.later {
					return next, b, true
				}
			}
		case next == 0 && i > 0, next == 43 && b[3] > 0:
			return next, b, false
		}
		if size > len(b) {
			break
		}
		next, b = b[0], b[size:]
	}
	return next, b, false
}

// readQuote reads the packet that an ICMP error is about: a packet that the VIP sent.
func readQuote(b []byte, v6 bool, vip netip.Addr, s *segment) bool {
	var next byte
	var from, to netip.Addr
	s.isError = true
	if v6 {
		if len(b) < 40 || b[0]>>4 != 6 {
			return false
		}
		var ok bool
		quoted := segment{}
		from, to = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
		if next, b, ok = skipExtensions(b[6], b[40:], &quoted); !ok || quoted.later {
			return false
		}
	} else {
		if len(b) < 20 || b[0]>>4 != 4 || b[0]&0xf < 5 || int(b[0]&0xf)*4 > len(b) || binary.BigEndian.Uint16(b[6:])&0x1fff != 0 {
			return false
		}
		from, to = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
		next, b = b[9], b[int(b[0]&0xf)*4:]
	}
	if next != 6 || len(b) < 8 || from != vip {
		return false
	}
	s.flow = flow{netip.AddrPortFrom(to, binary.BigEndian.Uint16(b[2:])), netip.AddrPortFrom(from, binary.BigEndian.Uint16(b))}
	return true
}
