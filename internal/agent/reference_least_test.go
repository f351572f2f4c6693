// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"net/netip"
	"slices"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/srv6"
)

// mostEarlier is the number of entries in front of a candidate that it reads.
const mostEarlier = 8

// offer returns the argument of the server's own SID.
func (w *wrapped) offer() srv6.Offer { return srv6.ParseOffer(srv6.Parse(w.destination).Argument) }

// earlier returns the candidates that the packet has visited, in the order of travel. first tells
// that the segment before this one is not a candidate.
func (w *wrapped) earlier() (candidates []srv6.SID, first bool) {
	first = true
	for i, segment := range slices.Backward(w.list) {
		if i <= w.segmentsLeft || i < len(w.list)-mostEarlier {
			break
		}
		candidate := srv6.Parse(segment)
		if candidate.Function == srv6.ConnectAvail && isOtherServer(w.locator(), segment) {
			candidates = append(candidates, candidate)
		}
	}
	if before := w.segmentsLeft + 1; before < len(w.list) {
		candidate := srv6.Parse(w.list[before])
		first = candidate.Function != srv6.ConnectAvail || !isOtherServer(w.locator(), w.list[before])
	}
	return candidates, first
}

// locator returns the server's own locator.
func (w *wrapped) locator() netip.Prefix { return srv6.Parse(w.destination).Locator }

// isListed tells whether the server has an entry of its own in the list.
func (w *wrapped) isListed() bool {
	return w.segmentsLeft < len(w.list) && w.list[w.segmentsLeft] == w.destination
}

// compare returns the result of an offer by policy least. It sets what the server writes into its
// own entry.
func (p *policy) compare(w *wrapped, local sockets) string {
	own, free := accept.Unknown, false
	if local.listening && !p.drained && p.isKnown() {
		load := p.now(local)
		free = load.Capacity != accept.NoCapacity && load.Busy < load.Capacity
		own = toldLoad(offerOf(load))
	}
	candidates, first := w.earlier()
	passed := make([]accept.Load, len(candidates))
	for i, candidate := range candidates {
		passed[i] = toldLoad(srv6.ParseOffer(candidate.Argument))
	}
	place := accept.Middle
	switch {
	case w.left() <= 0:
		place = accept.Last
	case first:
		place = accept.First
	}
	answer, back := accept.Least(own, passed, place)
	switch {
	case free:
		return "accepted"
	case place != accept.Last && !local.listening:
		return "refused_down"
	case place != accept.Last && answer == accept.Take && !p.drained:
		return "accepted_stale"
	case place != accept.Last:
		w.tell(own)
		return "refused"
	case answer == accept.Return && w.hopLimit > 1 && w.isListed():
		to := candidates[back]
		to.Function = srv6.ConnectForce
		w.own = to.Addr()
		return "returned"
	case own != accept.Unknown:
		return "accepted_least"
	}
	return "forced"
}

// tell writes a load into the server's own entry.
func (w *wrapped) tell(load accept.Load) {
	if load == accept.Unknown || !w.isListed() {
		return
	}
	sid := srv6.Parse(w.destination)
	const loadBits = 1<<40 - 1 // only these bits change: the balancer has set the others
	sid.Argument = sid.Argument&^loadBits | offerOf(load).Argument()&loadBits
	w.own = sid.Addr()
}

// offerOf returns a load as an offer's argument tells it.
func offerOf(load accept.Load) srv6.Offer {
	n, c := uint64(load.Busy)+1, load.Capacity
	if c == accept.NoCapacity {
		c = 0
	}
	for c > 1 && (n > srv6.MaxLoad || c > srv6.MaxLoad) {
		n, c = (n+1)/2, c/2
	}
	return srv6.Offer{Next: uint32(min(n, srv6.MaxLoad)), Capacity: c}
}

// toldLoad returns the load of an offer's argument.
func toldLoad(o srv6.Offer) accept.Load {
	switch {
	case o.Next == 0:
		return accept.Unknown
	case o.Capacity == 0:
		return accept.Load{Busy: o.Next - 1, Capacity: accept.NoCapacity}
	}
	return accept.Load{Busy: o.Next - 1, Capacity: o.Capacity}
}
