// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// hintUse tells how a hint is used, as docs/operate/stateless.md describes it.
type hintUse uint64

const (
	hintFree hintUse = iota
	hintIdle
	hintRecent
	hintShared
)

// referenceHint is a hint of the reference. A free one is zero.
type referenceHint struct {
	tag, column, mark uint64
	use               hintUse
}

// referenceHints is a word of the reference's hint table.
type referenceHints [4]referenceHint

// word returns the word as the data path stores it.
func (s *referenceHints) word() (word uint64) {
	for i, h := range s {
		word |= (h.tag<<8 | h.column<<5 | h.mark<<2 | uint64(h.use)) << (16 * i)
	}
	return word
}

// last returns the last hint of the word with a use, or nil if there is none.
func (s *referenceHints) last(use hintUse) (last *referenceHint) {
	for i := range s {
		if s[i].use == use {
			last = &s[i]
		}
	}
	return last
}

// referenceSet is the set of a flow: the word to look at first, then the other one.
type referenceSet [2]*referenceHints

// find returns the first hint with a tag, or nil if there is none.
func (s referenceSet) find(tag uint64) *referenceHint {
	for _, word := range s {
		for i := range word {
			if word[i].use != hintFree && word[i].tag == tag {
				return &word[i]
			}
		}
	}
	return nil
}

// room returns the place for a new hint: a free one, or else an idle one, or else nil.
func (s referenceSet) room() *referenceHint {
	for _, use := range []hintUse{hintFree, hintIdle} {
		for _, word := range s {
			if room := word.last(use); room != nil {
				return room
			}
		}
	}
	return nil
}

// hasHints tells whether the balancer has a hint table.
func (r *reference) hasHints() bool { return r.cfg.Node.Limits.Hints > 0 }

// hintPlace returns the number of the word to look at first for a flow, and the flow's tag. The
// set's other word has the number word^1.
func (f *fixture) hintPlace(flow dataplane.Flow) (word int, tag uint64) {
	place, _ := flow.TableHash(f.serviceID(flow), &f.identity)
	bits := 0
	for 1<<bits < len(f.plane.Hints.Words()) {
		bits++
	}
	return int(place >> (64 - bits)), max(1, place<<bits>>56)
}

// setOf returns the set of a flow, and the flow's tag.
func (r *reference) setOf(flow dataplane.Flow) (set referenceSet, tag uint64) {
	first, tag := r.hintPlace(flow)
	for i, number := range []int{first, first ^ 1} {
		if r.hints[number] == nil {
			r.hints[number] = &referenceHints{}
		}
		set[i] = r.hints[number]
	}
	return set, tag
}

// markOf returns the mark of a slot: the highest bits of its product with the golden ratio.
func markOf(slot uint32) uint64 { return uint64(slot * 0x9e3779b9 >> 29) }

func (r *reference) slotOf(svc *desired.Service, server string) uint32 {
	name := svc.Name + "/" + server
	if _, ok := r.loads.slots[name]; !ok {
		r.loads.slots[name] = r.slot(svc.Name, server)
	}
	return r.loads.slots[name]
}

// hinted returns the hint of a flow, and the server that it names. Both are nil if the flow has no
// hint, if the hint is shared, or if its mark names no server of its column or several.
func (r *reference) hinted(p parsed, svc *desired.Service) (*referenceHint, *desired.Server) {
	if !r.hasHints() || p.visitsAll() {
		return nil, nil
	}
	set, tag := r.setOf(p.flow)
	h := set.find(tag)
	if h == nil || h.use == hintShared || int(h.column) >= svc.Candidates {
		return nil, nil
	}
	var named []string
	for _, name := range r.past(svc, r.bucket(p.flow, svc), int(h.column)) {
		if name != "" && markOf(r.slotOf(svc, name)) == h.mark {
			named = append(named, name)
		}
	}
	if len(named) != 1 {
		return nil, nil
	}
	return h, serverOfName(svc, named[0])
}

// followHint returns the course of a packet other than a SYN to the server that the flow's hint
// names, or nil if there is none.
func (r *reference) followHint(p parsed, svc *desired.Service) []stage {
	h, server := r.hinted(p, svc)
	if server == nil {
		return nil
	}
	h.use = hintRecent
	return []stage{{srv6.Steer, server.Name, srv6.Offer{Returns: true}.Argument()}}
}

// hintedFirst returns the server that the hint of a SYN's flow names, unless it is unfit.
func (r *reference) hintedFirst(p parsed, svc *desired.Service) *desired.Server {
	_, server := r.hinted(p, svc)
	if server == nil || r.isUnfit(svc, server) {
		return nil
	}
	return server
}

// isUnfit tells whether a server gets no new flows because of its checks or its next hop, while
// others do. A server that only awaits its first check is not unfit.
func (r *reference) isUnfit(svc *desired.Service, server *desired.Server) bool {
	return !r.isUnproven(svc, server) && !r.takes(svc, server.Name) && (server.Takes() || r.failing[svc.Name+"/"+server.Name])
}

// columnWith returns the column of a flow's row that has a server, or else one that had it, the
// last one first. It returns false if there is none.
func (r *reference) columnWith(
	flow dataplane.Flow, svc *desired.Service, server string,
) (uint64, bool) {
	for age := range r.depth(svc) {
		row := r.row(svc, age, r.bucket(flow, svc))
		if column := slices.Index(row, server); column >= 0 {
			return uint64(column), true
		}
	}
	return 0, false
}

// enterHint enters the server that has signalled that it has a flow, if there is a hint table, and
// returns the reason.
func (r *reference) enterHint(h heard, svc *desired.Service, sender *desired.Server) string {
	if !r.hasHints() {
		return "return_create"
	}
	column, ok := r.columnWith(h.flow, svc, sender.Name)
	set, tag := r.setOf(h.flow)
	known := set.find(tag)
	isProven := h.flags&packet.SYN == 0
	wanted := referenceHint{tag, column, markOf(r.slotOf(svc, sender.Name)), hintIdle}
	if isProven {
		wanted.use = hintRecent
	}
	switch {
	case !ok:
		return "return_no_room"
	case known == nil:
		if known = set.room(); known == nil {
			return "return_no_room"
		}
	case known.column == wanted.column && known.mark == wanted.mark:
		wanted.use = max(wanted.use, known.use)
	case !isProven: // the first server that answers a SYN keeps the hint
		return "return_no_room"
	case known.use != hintIdle: // the tag is probably that of two flows
		wanted.use = hintShared
	}
	*known = wanted
	return "return_create"
}

// removeHint removes the hint of a flow that its server has ended.
func (r *reference) removeHint(h heard, svc *desired.Service, sender *desired.Server) {
	if !r.hasHints() {
		return
	}
	set, tag := r.setOf(h.flow)
	known, mark := set.find(tag), markOf(r.slotOf(svc, sender.Name))
	if known != nil && known.use != hintShared && known.mark == mark {
		*known = referenceHint{}
	}
}

// sweepHints makes recent hints idle, and frees the others.
func (r *reference) sweepHints() {
	for _, word := range r.hints {
		for i := range word {
			if word[i].use == hintRecent {
				word[i].use = hintIdle
			} else {
				word[i] = referenceHint{}
			}
		}
	}
}

// explainHints describes the differences between the hint table and that of the reference.
func (r *reference) explainHints() string {
	var s strings.Builder
	for number := range r.plane.Hints.Words() {
		want := r.hints[number]
		if want == nil {
			want = &referenceHints{}
		}
		if got := atomic.LoadUint64(&r.plane.Hints.Words()[number]); got != want.word() {
			fmt.Fprintf(&s, "the word %d of hints is %016x, want %016x: %+v\n",
				number, got, want.word(), *want)
		}
	}
	return s.String()
}
