// SPDX-License-Identifier: Apache-2.0

package probe

import "time"

// server is the state of a target.
type server struct {
	target Target
	fault  Fault // the reported fault
	asked  bool  // a probe was sent

	// Findings from probes:
	probed  Fault
	hits    int    // successive probes with an answer
	lost    int    // successive probes without an answer
	misses  int    // of these, those since the last signal
	signals uint64 // of the server, when the last probe had no answer

	// Findings from offers:
	counted bool   // the counters have been read before
	offers  Offers // counters at the last reading
	pending uint64 // unanswered at the last reading; their signals may be under way
	score   float64
	share   share
	unheard bool
	trial   time.Duration
	retry   time.Time // when an unheard server gets another chance
}

// newServer returns a server with the finding of an earlier process.
func newServer(t Target) *server {
	s := &server{target: t, fault: t.Fault, trial: firstTrial}
	if t.Fault == Unheard { // Unheard is possible only for a server that is offered connections
		s.unheard, s.retry = t.Offered, time.Now().Add(firstTrial)
	} else {
		s.probed = t.Fault
	}
	return s
}

// noteProbe records the result of a probe, and tells whether it is the first proof of a fault. One
// answer of an agent is proof. A missing answer is not, because a probe may be lost.
func (s *server) noteProbe(found Fault) (proof bool) {
	before := s.probed
	switch found {
	case None:
		s.misses, s.lost = 0, 0
		s.hits++
		if s.hits >= Rise {
			s.probed = None
		}
	case Silent:
		s.hits = 0
		s.misses++
		s.lost++
		if s.misses >= Fall || s.lost >= fallDespiteSignals {
			s.probed = Silent
		}
	default:
		s.misses, s.lost, s.hits = 0, 0, 0
		s.probed = found
	}
	return before == None && s.probed != None
}

// noteSignals takes the number of a server's signals when a probe has no answer. If the server has
// signalled since the last probe without an answer, the count of such probes begins anew.
func (s *server) noteSignals(now uint64) {
	if now != s.signals {
		s.misses = 0
	}
	s.signals = now
}

// noteOffers reads the counters of offers and signals.
//
// The score is a cumulative sum (Page, "Continuous inspection schemes", 1954). It rises by one for
// each offer without an answer, and falls by answerWorth for each with one. So it stays near zero
// while more than three of four offers are answered, also if a tenth of all packets is lost. A
// server that drops accepted connections is still detected if it refuses half of its offers, as by
// policy `dynamic`, and others accept those. The field share finds a server that drops connections
// which were offered to others first.
//
// A refused connection may be lost at the next server, and then clients repeat their SYN. So among
// two or three servers, one that does not answer makes most offers of the others look unanswered.
// But the others accept connections themselves, and each of these subtracts takenWorth from the
// score.
//
// The score is bounded, so that the first answered offers have an effect.
//
// noteOffers adds the new outcomes to those of the service.
func (s *server) noteOffers(now Offers, all *service, at time.Time) {
	newOffers, newAnswers := now.Offered-s.offers.Offered, now.Answered-s.offers.Answered
	newTaken := now.Taken - s.offers.Taken
	s.offers = now
	switch {
	case !s.counted:
		s.counted = true
	case s.probed != None: // this fault explains the unanswered offers
		s.forget()
		s.trial = firstTrial
	case s.unheard:
		if at.After(s.retry) {
			if all.isDown() { // the server was not the cause
				s.trial = firstTrial
			}
			s.forget()
		}
	default:
		late := newAnswers - min(newAnswers, newOffers)
		lost := s.pending - min(s.pending, late)
		s.pending = newOffers - min(newOffers, newAnswers)
		s.score += float64(lost) - answerWorth*float64(newAnswers) - takenWorth*float64(newTaken)
		s.score = min(max(0, s.score), UnansweredOffers)
		all.add(outcomes{newTaken, lost})
		if newTaken > 0 {
			s.share.forget()
		} else if newOffers > 0 { // otherwise it may be drained
			s.share.add(all.outcomes, len(all.servers))
		}
	}
	s.share.seen = all.outcomes
}

// forget forgets unanswered offers.
func (s *server) forget() {
	s.unheard, s.score, s.pending = false, 0, 0
	s.share.forget()
}

// suspect tells whether many offers are unanswered.
func (s *server) suspect() bool {
	return s.unheard || s.score >= UnansweredOffers/2 || s.share.isMissing(UnansweredOffers/2)
}

// mayGiveUp tells whether too many offers are unanswered.
func (s *server) mayGiveUp() bool {
	return !s.unheard && (s.score >= UnansweredOffers || s.share.isMissing(UnansweredOffers))
}

// giveUp makes a server Unheard for a time.
func (s *server) giveUp(now time.Time) {
	if now.Sub(s.retry) > lastTrial { // the last chance went well
		s.trial = firstTrial
	}
	s.unheard, s.retry = true, now.Add(s.trial)
	s.trial = min(2*s.trial, lastTrial)
}
