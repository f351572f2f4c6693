// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/tables"
)

// halfOpenOf returns the flow's bucket of the reference's table of half-open flows.
func (r *reference) halfOpenOf(flow dataplane.Flow) *referenceBucket {
	place, _ := flow.TableHash(r.serviceID(flow), &r.identity)
	number := uint32(bucketNumber(r.plane.HalfOpen, place))
	if r.halfOpen[number] == nil {
		r.halfOpen[number] = &referenceBucket{}
	}
	return r.halfOpen[number]
}

// hunt returns the course of a packet whose flow the flow table does not know for certain.
func (r *reference) hunt(p parsed, svc *desired.Service) (to []stage, reason string) {
	half := r.halfOpenOf(p.flow).find(p.flow, svc.Name)
	if server, reason := r.confirm(p, svc, half); server != nil {
		return toKnown(svc, server), reason
	}
	e := r.bucketOf(p.flow).find(p.flow, svc.Name)
	holder := r.holder(e, svc)
	if p.opens() && holder != nil && r.keepsServer(p, svc, holder, e) {
		return toKnown(svc, holder), "forward_known"
	}
	if p.opens() {
		if e == nil {
			e = half
		}
		return r.offer(p, svc, r.askedFirst(svc, e)), "forward_hunt"
	}
	if holder != nil {
		asked := r.seek(p, svc, holder)
		if len(asked) == 1 { // no other server was asked
			r.renew(p, e)
		}
		return asked, "forward_recover"
	}
	return stages(srv6.RecoverStickiness, r.possible(p.flow, svc)...), "forward_recover"
}

// confirm returns the server of a half-open flow if the packet stays with it, and the reason. A
// packet of the client other than a SYN enters the flow into the flow table.
func (r *reference) confirm(
	p parsed, svc *desired.Service, half *referenceEntry,
) (*desired.Server, string) {
	server := r.holder(half, svc)
	if server == nil || !r.keepsServer(p, svc, server, half) {
		return nil, ""
	}
	next := *half
	if r.renew(p, &next); next.state == stateNew { // a reset may be the answer to a flood
		return server, "forward_known"
	}
	if !r.enter(r.bucketOf(p.flow), p.flow, svc, server, next.state) {
		return server, "forward_no_room"
	}
	*half = referenceEntry{}
	return server, "forward_new"
}

// offer returns the course of a packet that begins a connection. The servers in asked may have the
// connection, and are asked first.
func (r *reference) offer(p parsed, svc *desired.Service, asked []stage) []stage {
	names := r.taking(p.flow, svc, svc.Candidates)
	names = slices.DeleteFunc(names, func(name string) bool {
		return len(asked) > 0 && asked[0].server == name
	})
	spare := ""
	if svc.OrdersByReports() && asked == nil {
		names, spare = r.order(svc, names)
	}
	all := r.fitting(p, svc, asked, names)
	if svc.OrdersByReports() {
		all = asking(all, spare)
	}
	return all
}

// askedFirst returns the server of an entry that a SYN leaves, if the server can be asked. It may
// have the connection nevertheless, and so is asked first.
func (r *reference) askedFirst(svc *desired.Service, e *referenceEntry) []stage {
	server := r.holder(e, svc)
	if server == nil || r.isAvoided(svc, server) || !r.reaches(server.Name) ||
		e.state == stateClosed && !e.lingers(r.now()) {
		return nil
	}
	return stages(srv6.Steer, server.Name)
}

// fitting returns the course of a SYN that first asks the given servers, and then is offered to as
// many others as it has room for, but at least to one. If there is no other, the server that is asked
// has to accept the connection, unless the service takes no new flows.
func (r *reference) fitting(p parsed, svc *desired.Service, asked []stage, names []string) []stage {
	row := r.row(svc, 0, r.bucket(p.flow, svc))
	for n := min(len(names), tables.MaxCandidates-len(asked)); n > 0; n-- {
		all := offers(asked, row, names[:n])
		link := r.linkOf(all[0].server)
		if n == 1 || link == "" || int(p.length)+overheadOf(svc.Encapsulation, len(all), true) <= links[link] {
			return all
		}
	}
	isTaking := func(s desired.Server) bool { return r.takes(svc, s.Name) }
	if len(asked) > 0 && slices.ContainsFunc(svc.Servers, isTaking) {
		return []stage{{srv6.ConnectForce, asked[0].server, srv6.Offer{Column: srv6.NoColumn}.Argument()}}
	}
	return asked
}

// isStale tells whether an entry has been idle for so long that a hunting flow may be elsewhere.
func (r *reference) isStale(e *referenceEntry, svc *desired.Service) bool {
	asksServers := svc.IsAnswered() && !svc.FindsByColumn()
	return asksServers && e.age(r.now()) >= flowMinIdle
}

// seek returns the course of a packet whose flow has a stale entry. The course visits the server of
// the entry if it can be reached, then as many candidates as the packet has room for, and at last
// the server of the entry again.
func (r *reference) seek(p parsed, svc *desired.Service, holder *desired.Server) []stage {
	all := stages(srv6.RecoverStickiness, r.possible(p.flow, svc)...)
	all = slices.DeleteFunc(all, func(v stage) bool {
		return v.server == holder.Name && r.reaches(holder.Name)
	})
	if r.reaches(holder.Name) {
		all = slices.Insert(all, 0, stages(srv6.RecoverStickiness, holder.Name)...)
	}
	for n := min(len(all), desired.MaxVisited-1); n > 1 || n == 1 && all[0].server != holder.Name; n-- {
		if int(p.length)+overheadOf(svc.Encapsulation, n+1, false) <= links[r.linkOf(all[0].server)] {
			return append(all[:n], alone(srv6.AckStickiness, holder)...)
		}
	}
	return alone(srv6.AckStickiness, holder)
}

// holder returns the server of an entry, or nil if there is no entry or no such server.
func (r *reference) holder(e *referenceEntry, svc *desired.Service) *desired.Server {
	if e == nil {
		return nil
	}
	return serverOfName(svc, strings.TrimPrefix(e.server, svc.Name+"/"))
}

// enter stores a flow in its own entry, or in the one that yields. It returns false if there is
// neither.
func (r *reference) enter(bucket *referenceBucket, flow dataplane.Flow, svc *desired.Service, server *desired.Server, state dataplane.FlowState) bool {
	e := bucket.find(flow, svc.Name)
	if e == nil {
		e = bucket.yielding(r.preferred(flow), r.now())
	}
	if e == nil {
		return false
	}
	*e = referenceEntry{flow, svc.Name + "/" + server.Name, state, r.now()}
	return true
}

// isSignal tells whether a frame is for the balancer itself, and not TCP or UDP without
// encapsulation.
func (r *reference) isSignal(frame []byte) bool {
	if len(frame) < ethernetLength+40 || packet.MAC(frame) != ownMAC || binary.BigEndian.Uint16(frame[12:]) != 0x86dd {
		return false
	}
	b := frame[ethernetLength:]
	sid := srv6.Parse(netip.AddrFrom16([16]byte(b[24:])))
	length := 40 + int(binary.BigEndian.Uint16(b[4:]))
	if sid.Locator != r.cfg.Node.Locator || b[0]>>4 != 6 || length > len(b) ||
		!slices.Contains([]srv6.Function{srv6.CreateStickiness, srv6.RemoveStickiness, srv6.Return, srv6.Probe}, sid.Function) {
		return false
	}
	next, _, fragment, reason := walk(b[6], b[40:length])
	if fragment != nil {
		return false
	}
	return reason == "drop_routing_header" || reason == "" && next != 6 && next != 17
}

// heard is the content of a signal.
type heard struct {
	flow         dataplane.Flow
	sender       netip.Prefix
	report       uint64 // the other half of the sender's segment
	flags        packet.TCPFlags
	acknowledged uint32
	hopLimit     uint8
}

// hear reads a signal. It returns false if no server sends such a packet.
func hear(b []byte) (h heard, ok bool) {
	next, rest := b[6], b[40:40+int(binary.BigEndian.Uint16(b[4:]))]
	vip, client, protocol := netip.AddrFrom16([16]byte(b[8:])), netip.Addr{}, byte(0)
	h.sender, h.hopLimit = srv6.Parse(vip).Locator, b[7]
	h.report = binary.BigEndian.Uint64(b[16:])
	switch {
	case next == 43: // a segment routing header with three segments, one of them left
		if len(rest) < 56 || rest[1] != 6 || rest[2] != 4 || rest[3] != 1 || rest[4] != 2 {
			return h, false
		}
		client, protocol = netip.AddrFrom16([16]byte(rest[8:])), rest[0]
		h.sender = srv6.Parse(netip.AddrFrom16([16]byte(rest[40:]))).Locator
		h.report = binary.BigEndian.Uint64(rest[48:])
		rest = rest[56:]
	case next == 4 && len(rest) >= 20 && rest[0]>>4 == 4:
		header := int(rest[0]&0xf) * 4
		if header < 20 || int(binary.BigEndian.Uint16(rest[2:])) != len(rest) || len(rest) < header ||
			binary.BigEndian.Uint16(rest[6:])&0x3fff != 0 || congested(b, rest[1]) {
			return h, false
		}
		vip, client = netip.AddrFrom4([4]byte(rest[12:])), netip.AddrFrom4([4]byte(rest[16:]))
		protocol, h.hopLimit, rest = rest[9], rest[8], rest[header:]
	case next == 41 && len(rest) >= 40 && rest[0]>>4 == 6:
		if 40+int(binary.BigEndian.Uint16(rest[4:])) != len(rest) || congested(b, rest[0]<<4|rest[1]>>4) {
			return h, false
		}
		vip, client = netip.AddrFrom16([16]byte(rest[8:])), netip.AddrFrom16([16]byte(rest[24:]))
		protocol, h.hopLimit, rest = rest[6], rest[7], rest[40:]
	default:
		return h, false
	}
	if protocol != 6 || len(rest) < 20 || vip.Is4In6() || client.Is4In6() {
		return h, false
	}
	h.flow = dataplane.Flow{
		Protocol:    desired.TCP,
		Source:      netip.AddrPortFrom(client, binary.BigEndian.Uint16(rest[2:])),
		Destination: netip.AddrPortFrom(vip, binary.BigEndian.Uint16(rest)),
	}
	h.flags, h.acknowledged = packet.TCPFlags(rest[13]), binary.BigEndian.Uint32(rest[8:])
	return h, true
}

// congested tells whether a router has marked a packet whose inner header does not support such
// marks.
func congested(outer []byte, innerClass byte) bool { return outer[1]>>4&3 == 3 && innerClass&3 == 0 }

// answerIn returns the content of an answer to a probe, and the reason under which it is counted.
func (r *reference) answerIn(frame []byte) (answer []byte, reason string) {
	ip := frame[ethernetLength:]
	answer = ip[40 : 40+int(binary.BigEndian.Uint16(ip[4:]))]
	if ip[6] != 59 || len(answer) < 16 {
		return answer, "drop_signal"
	}
	token := binary.NativeEndian.Uint64(answer)
	if slot := uint32(token & 0xffff); token == 0 || r.plane.Probes.Token(slot) != token {
		return answer, "drop_sender"
	}
	return answer, "take_probe"
}

// takeAnswer returns the outcome for an answer to a probe.
func (r *reference) takeAnswer(frame []byte) outcome {
	answer, reason := r.answerIn(frame)
	if reason == "take_probe" {
		r.noteClock(answer)
	}
	return refused(frame, reason, layer3(frame))
}

// senderOf returns the service of a signal, and the server that has sent it. Both are nil if there
// is no such service, and the server is nil if it is not one of the service.
func (r *reference) senderOf(h heard) (svc *desired.Service, sender *desired.Server) {
	if svc = r.classify(h.flow); svc == nil || !admits(svc, h.flow.Source.Addr()) {
		return nil, nil
	}
	i := slices.IndexFunc(svc.Servers, func(s desired.Server) bool { return s.Locator == h.sender })
	if i < 0 {
		return svc, nil
	}
	return svc, &svc.Servers[i]
}

// takeSignal returns the outcome for a packet to the balancer itself.
func (r *reference) takeSignal(frame []byte) outcome {
	if functionOf(frame) == srv6.Probe && !r.guards() {
		return r.takeAnswer(frame)
	}
	h, ok := hear(frame[ethernetLength:])
	if r.guards() {
		return refused(frame, "drop_outside", layer3(frame))
	}
	if !ok {
		return refused(frame, "drop_signal", layer3(frame))
	}
	if functionOf(frame) == srv6.Return {
		return r.takeReturned(frame, h)
	}
	svc, sender := r.senderOf(h)
	switch {
	case sender == nil:
		return refused(frame, "drop_sender", layer3(frame))
	case !r.vouches(frame, h):
		return refused(frame, "drop_tag", layer3(frame))
	case h.hopLimit <= 1:
		return refused(frame, "drop_hop_limit", layer3(frame))
	}
	r.takeReport(h, svc, sender)
	if functionOf(frame) == srv6.RemoveStickiness {
		if svc.FindsByColumn() {
			r.removeHint(h, svc, sender)
		}
		if _, ok := r.tabled(svc); ok {
			r.remove(h, svc, sender)
		}
		return r.returned(frame, "return_remove")
	}
	if !r.entersFlow(h.flow, svc) {
		return r.returned(frame, r.enterHint(h, svc, sender))
	}
	reason := r.create(h, svc, sender)
	if reason == "forward_reset" {
		return r.resetSender(frame, h, svc, sender)
	}
	return r.returned(frame, reason)
}

// entersFlow tells whether the flow table enters the server that has a flow, by create-stickiness.
// If the service finds flows by hints, the flow table does so only for flows that have an entry.
func (r *reference) entersFlow(flow dataplane.Flow, svc *desired.Service) bool {
	tabled, isTabled := r.tabled(svc)
	if !isTabled || !svc.FindsByColumn() || !r.hasHints() {
		return isTabled
	}
	return r.bucketOf(flow).find(flow, svc.Name) != nil ||
		tabled.Placement.Method().ServersDecide && r.halfOpenOf(flow).find(flow, svc.Name) != nil
}

// takeReturned returns the outcome for a client's packet that a server returns, with what was read
// of it as of a signal.
func (r *reference) takeReturned(frame []byte, h heard) outcome {
	h.flow.Source, h.flow.Destination = h.flow.Destination, h.flow.Source
	if _, sender := r.senderOf(h); sender == nil {
		return refused(frame, "drop_sender", layer3(frame))
	}
	if h.hopLimit <= 1 {
		return refused(frame, "drop_hop_limit", layer3(frame))
	}
	inner, err := packet.Return(frame, ownMAC)
	if err != nil {
		panic(err)
	}
	p, reason := parse(inner)
	if reason != "" {
		return refused(inner, "drop_signal", layer3(inner))
	}
	p.returned = true
	return r.handle(inner, p, reason)
}

// vouches tells whether a signal has a tag by one of the node's keys. It returns true if the node
// has no keys.
func (r *reference) vouches(frame []byte, h heard) bool {
	return len(r.secrets.SignalKeys) == 0 || slices.ContainsFunc(r.secrets.SignalKeys, func(key desired.SignalKey) bool {
		return sidOf(frame).Argument == packettest.Tag(key, functionOf(frame), h.sender, h.report, h.flow.Source, h.flow.Destination)
	})
}

// guards tells whether frames arrive from outside the domain.
func (r *reference) guards() bool { return !r.cfg.Node.IsInternal() && !r.inside }

// intrudes tells whether a packet without a service is forbidden, because it arrives from outside
// the domain.
func (r *reference) intrudes(p parsed, reason string) bool {
	if !r.guards() {
		return false
	}
	if reason == "drop_routing_header" {
		return true
	}
	address := p.flow.Destination.Addr()
	if reason != "pass_not_vip" || !address.Is6() {
		return false
	}
	sid := srv6.Parse(address)
	isServer := func(s desired.Server) bool { return s.Locator == sid.Locator }
	return sid.Function != srv6.Host && (sid.Locator == r.cfg.Node.Locator ||
		slices.ContainsFunc(r.cfg.Services, func(s desired.Service) bool { return slices.ContainsFunc(s.Servers, isServer) }))
}

// create stores the flow of a create-stickiness signal, and returns the reason.
func (r *reference) create(h heard, svc *desired.Service, sender *desired.Server) string {
	answers := h.flags&packet.SYN != 0
	known := r.bucketOf(h.flow).find(h.flow, svc.Name)
	half := r.halfOpenOf(h.flow).find(h.flow, svc.Name)
	e := known
	if e == nil {
		e = half
	}
	if server := r.holder(e, svc); server != nil && !r.isStale(e, svc) {
		opening := parsed{flow: h.flow, flags: packet.SYN}
		overtaken := server == sender && e.age(r.now()) < flowLinger
		if answers && r.keepsServer(opening, svc, server, e) || !answers && (e.state != stateClosed || overtaken) {
			if server == sender {
				return "return_create"
			}
			return "forward_reset"
		}
	}
	if answers && known == nil {
		if !r.enter(r.halfOpenOf(h.flow), h.flow, svc, sender, stateNew) {
			return "return_no_room"
		}
		return "return_create"
	}
	state := stateEstablished
	if answers {
		state = stateNew
	}
	if !r.enter(r.bucketOf(h.flow), h.flow, svc, sender, state) {
		return "return_no_room"
	}
	if half != nil {
		*half = referenceEntry{}
	}
	return "return_create"
}

// remove ends the flow of a remove-stickiness signal.
func (r *reference) remove(h heard, svc *desired.Service, sender *desired.Server) {
	known := r.bucketOf(h.flow).find(h.flow, svc.Name)
	half := r.halfOpenOf(h.flow).find(h.flow, svc.Name)
	switch {
	case known != nil && r.holder(known, svc) == sender:
		known.state, known.seen = stateClosed, r.now()
	case known == nil && half != nil && r.holder(half, svc) == sender:
		*half = referenceEntry{}
	}
}

// resetSender returns the outcome for a signal from a server that accepted a connection too late.
func (r *reference) resetSender(frame []byte, h heard, svc *desired.Service, sender *desired.Server) outcome {
	rst := frameOf(h.flow, packet.Flags(packet.RST), packet.Sequence(h.acknowledged, 0), packet.Window(0))
	if r.linkOf(sender.Name) == "" { // the packet was replaced already
		return refused(append(slices.Clone(frame[:ethernetLength]), rst[ethernetLength:]...), "drop_no_next_hop", layer3(rst))
	}
	return r.offered(rst, h.flow, svc.Name, "forward_reset", srv6.Deliver, sender.Name)
}
