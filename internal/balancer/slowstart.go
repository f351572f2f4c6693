// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
)

// slowTick is the time for which a server that starts slowly either takes new flows or rests.
const slowTick = 100 * time.Millisecond

// slowStart is the state of a server that was unfit and gets new flows again. It takes new flows in
// a share of all ticks that grows from nearly 0 to 1. While it rests, it is drained: it keeps its
// flows, and the candidate table stays. This works for every placement, because all of them skip
// drained servers.
type slowStart struct {
	unfit  bool      // the member gets no new flows, and has had a cause since it got the last ones
	since  time.Time // when the slow start began; zero: there is none
	credit float64   // grows by the member's share with each tick; 1 pays for a tick with new flows
	rests  bool      // it takes no new flows in this tick
}

// note notes whether the member gets new flows (used) and whether there is a cause for which it is
// unfit. If it is not used, note ends its slow start. If it was unfit and is used now, note begins
// a slow start of the duration within, unless that is 0.
func (s *slowStart) note(used, hasCause bool, within time.Duration, now time.Time) {
	switch {
	case !used:
		*s = slowStart{unfit: s.unfit || hasCause}
	case s.unfit:
		*s = slowStart{}
		if within > 0 {
			*s = slowStart{since: now, rests: true}
		}
	}
}

// tick decides whether the member takes new flows in the tick that begins now. It ends a slow start
// that began longer ago than the duration within. If there is no slow start, it does nothing.
func (s *slowStart) tick(within time.Duration, now time.Time) {
	if s.since.IsZero() {
		return
	}
	age := now.Sub(s.since)
	if age >= within {
		*s = slowStart{}
		return
	}
	s.credit += float64(age) / float64(within)
	s.rests = s.credit < 1
	if !s.rests {
		s.credit--
	}
}

// flags returns the flags that a used member has in addition to those of member.flags.
func (s *slowStart) flags() (flags dataplane.ServerFlags) {
	if !s.since.IsZero() {
		flags |= dataplane.FlagStarting
	}
	if s.rests {
		flags |= dataplane.FlagDrained
	}
	return flags
}

// slowStartTime returns the time in which servers of the service come to their full share, or 0.
// Services that infer have a slow start of their own, by prices.
func (svc *service) slowStartTime() time.Duration {
	if svc.SlowStart == nil || svc.Placement.Infers() {
		return 0
	}
	return *svc.SlowStart
}

// pace notes which members are used, and lets servers that were unfit begin slowly. If all used
// members would rest now, none of them rests. A server that only lacked a next hop does not begin
// slowly: it is new, or only its route was gone.
func (s *services) pace(svc *service, used map[*member]bool, now time.Time) {
	resting := 0
	for _, m := range svc.members {
		m.slow.note(used[m], m.Takes() && m.causes != 0, svc.slowStartTime(), now)
		if used[m] && m.slow.rests {
			resting++
		}
	}
	if svc.startsSlowly() {
		s.starting[svc] = true
	} else {
		delete(s.starting, svc)
	}
	if resting < len(used) {
		return
	}
	for m := range used {
		m.slow.rests = false
	}
}

// startsSlowly tells whether a member of the service starts slowly.
func (svc *service) startsSlowly() bool {
	for _, m := range svc.members {
		if !m.slow.since.IsZero() {
			return true
		}
	}
	return false
}

// tickSlowStarts lets each server that starts slowly take new flows or rest until the next tick.
func (s *services) tickSlowStarts(now time.Time) {
	for svc := range s.starting {
		for _, m := range svc.members {
			m.slow.tick(svc.slowStartTime(), now)
		}
		s.admit(svc)
	}
}

// endSlowStarts lets all servers take their full share of new flows. It is for the end of the
// process: the data path continues, and no process would end the slow starts.
func (s *services) endSlowStarts() {
	for svc := range s.starting {
		for _, m := range svc.members {
			if !m.slow.since.IsZero() {
				m.slow = slowStart{}
			}
		}
		s.admit(svc)
	}
}
