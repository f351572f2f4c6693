// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"maps"
	"slices"

	"github.com/segue-lb/segue/internal/srv6"
)

// initial is a connection of QUIC, as its Initial and 0-RTT packets tell it: the flow, and the first
// eight octets of the destination ID. The octets are 0 if the ID is shorter.
type initial struct {
	flow
	id [8]byte
}

// decision is what a server has decided about a connection of QUIC.
type decision struct {
	result string // taken, passed on, or returned
	// locator and column are those of the candidate to which the connection was returned.
	locator [8]byte
	column  uint64
}

// initialIn reads the Initial or 0-RTT packet at the beginning of a datagram of UDP. It returns false
// if there is none.
func initialIn(s segment) (initial, bool) {
	length := int(binary.BigEndian.Uint16(s.udp[4:]))
	if length > len(s.udp) || length < 8+6 {
		return initial{}, false
	}
	p := s.udp[8:length]
	opening := map[uint32][]byte{1: {0, 1}, 0x6b3343cf: {1, 2}} // RFC 9000, RFC 9369
	id, _, ok := cutID(p[5:])
	if !ok || p[0]&0x80 == 0 || !slices.Contains(opening[binary.BigEndian.Uint32(p[1:])], p[0]>>4&3) {
		return initial{}, false
	}
	of := initial{flow: s.flow}
	if len(id) >= len(of.id) {
		copy(of.id[:], id)
	}
	return of, true
}

// candidateOf returns the candidate of a SID in the form of a decision.
func candidateOf(result string, sid srv6.SID) decision {
	locator := sid.Locator.Addr().As16()
	return decision{result, [8]byte(locator[:]), sid.Argument >> 44}
}

// initial returns the reason for a datagram of UDP. "" means that the packet is delivered.
func (h *hunter) initial(w *wrapped, s segment) string {
	of, ok := initialIn(s)
	if !ok {
		return "drop_tcp_flags"
	}
	before, isKnown := h.initials[of]
	switch isTaken := func(other initial) bool {
		return other.flow == of.flow && h.initials[other].result == "taken"
	}; {
	case w.function == recoverStickiness || w.function == steer:
		if slices.ContainsFunc(slices.Collect(maps.Keys(h.initials)), isTaken) {
			return ""
		}
		return notLocal(w)
	case before.result == "taken":
		return ""
	case w.function == connectForce || !isKnown:
	case w.left() > 0 && before.result == "passed on":
		return "next_refused"
	case w.left() <= 0 && before.result == "returned" && h.returnAgain(w, before):
		return "next_returned"
	}
	return h.decideInitial(w, of)
}

// returnAgain hands a connection back to the same candidate as before. It returns false if the list
// does not have the candidate any more.
func (h *hunter) returnAgain(w *wrapped, to decision) bool {
	candidates, _ := w.earlier()
	i := slices.IndexFunc(candidates, func(c srv6.SID) bool { return candidateOf("returned", c) == to })
	if i < 0 || w.hopLimit <= 1 || !w.isListed() {
		return false
	}
	candidates[i].Function = srv6.ConnectForce
	w.own = candidates[i].Addr()
	return true
}

// decideInitial decides about a connection, and remembers that.
func (h *hunter) decideInitial(w *wrapped, of initial) string {
	result := "accepted"
	if p := h.udpServices[of.vip]; p != nil {
		result = p.answer(w, segment{flow: of.flow}, sockets{listening: h.receives != nil && h.receives(of.flow)})
		h.offers[result]++
	} else if w.function != connectForce && w.left() > 0 {
		result = "refused"
	}
	switch result {
	case "refused", "refused_down":
		h.initials[of] = decision{result: "passed on"}
		return "next_refused"
	case "returned":
		h.initials[of] = candidateOf(result, srv6.Parse(w.own))
		return "next_returned"
	}
	h.initials[of] = decision{result: "taken"}
	return ""
}
