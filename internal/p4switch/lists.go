// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"slices"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
)

const (
	// noColumn is the column of packets without a cookie: NO_COLUMN in p4/core/headers.p4.
	noColumn = 8
	// mostVisited is how many servers a packet visits at most: MAX_SEGMENTS in bpf/net/srv6.h.
	mostVisited = 10
)

// Condition is the state of a server that decides which packets it gets.
type Condition struct {
	Takes     bool // it takes new flows
	Reachable bool // its next hop is known and answers
	Failing   bool // it is unfit, and others are not
}

// lists computes which servers packets of a service visit, as bpf/balancer/tables/candidates.h and
// bpf/balancer/persist/stateless.h do for each packet. A switch gets the finished lists.
type lists struct {
	rows       *dataplane.Rows
	sets       int                  // how many generations each row has
	of         map[uint16]Condition // the service's servers, by slot
	takesFlows bool                 // at least one server takes new flows
	hasHints   bool                 // the host has hints
}

// A wanted function tells whether servers in a condition are to be listed.
type wanted func(Condition) bool

func isFit(c Condition) bool       { return c.Reachable && !c.Failing }
func isReachable(c Condition) bool { return c.Reachable }
func isAny(Condition) bool         { return true }
func takes(c Condition) bool       { return c.Takes }

// offered is a list of candidates with their columns.
type offered struct {
	slots   []uint16
	columns []int
}

// offer returns the candidates of new flows of a bucket. If all servers of the row are drained and
// others are not, it returns those that can be reached: later packets would not find any other
// server. It is list_own_row.
func (l *lists) offer(bucket int) offered {
	list := l.own(bucket, takes)
	if len(list.slots) == 0 && l.takesFlows {
		list = l.own(bucket, isReachable)
	}
	return list
}

func (l *lists) own(bucket int, want wanted) (list offered) {
	for column, slot := range l.rows.Candidates(bucket, 0) {
		if c, ok := l.of[slot]; ok && want(c) && !slices.Contains(list.slots, slot) {
			list.slots, list.columns = append(list.slots, slot), append(list.columns, column)
		}
	}
	return list
}

// only returns the server of a column that never had another one. It is only_server_of.
func (l *lists) only(bucket, column int) (slot uint16, ok bool) {
	for generation := range l.sets {
		found := l.rows.Candidates(bucket, generation)[column]
		switch {
		case generation == 0:
			slot = found
		case found != dataplane.NoServer && found != slot:
			return 0, false
		}
	}
	_, ok = l.of[slot]
	return slot, ok
}

// visited returns the servers that a packet of a column visits; noColumn: one without a cookie. It
// is list_for_cookie.
func (l *lists) visited(bucket, column int) []uint16 {
	first, all := column, []wanted{isFit, isReachable, isAny}
	if column == noColumn {
		first = 0
	}
	var list, fit []uint16
	for i, want := range all {
		list = l.appendColumn(list, bucket, first, want)
		if i == 0 {
			fit = list
		}
	}
	if column != noColumn && (len(list) == 1 || len(list) > 1 && !l.hasHints) {
		return list
	}
	list = l.appendRow(slices.Clip(fit), l.sets, bucket, isFit)
	list = l.appendColumn(list, bucket, first, isReachable)
	list = l.appendRow(list, l.sets, bucket, isReachable)
	list = l.appendColumn(list, bucket, first, isAny)
	return l.appendRow(list, 1, bucket, isAny)
}

// appendColumn appends the wanted servers that a column has or had, the newest first.
func (l *lists) appendColumn(list []uint16, bucket, column int, want wanted) []uint16 {
	for generation := range l.sets {
		list = l.append(list, l.rows.Candidates(bucket, generation)[column], want)
	}
	return list
}

// appendRow appends the wanted servers of the first sets of a row.
func (l *lists) appendRow(list []uint16, sets, bucket int, want wanted) []uint16 {
	for generation := range sets {
		for _, slot := range l.rows.Candidates(bucket, generation) {
			list = l.append(list, slot, want)
		}
	}
	return list
}

func (l *lists) append(list []uint16, slot uint16, want wanted) []uint16 {
	c, ok := l.of[slot]
	if !ok || !want(c) || slices.Contains(list, slot) || len(list) == mostVisited {
		return list
	}
	return append(list, slot)
}
