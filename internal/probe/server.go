// SPDX-License-Identifier: Apache-2.0

package probe

import "time"

// server is what is known of a target.
type server struct {
	target Target
	fault  Fault // as it was told
	asked  bool  // a probe was sent

	// From probes:
	probed       Fault
	misses, hits int // in a row

	// From offers:
	counted bool   // the counters have been read before
	offers  Offers // as they were last read
	pending uint64 // unanswered at the last reading: the answers may be under way
	score   float64
	unheard bool
	trial   time.Duration
	retry   time.Time // when an unheard server gets another chance
}

// newServer begins with what an earlier process has found.
func newServer(t Target) *server {
	s := &server{target: t, fault: t.Fault, trial: firstTrial}
	if t.Fault == Unheard { // which only a server that is offered connections can be
		s.unheard, s.retry = t.Offered, time.Now().Add(firstTrial)
	} else {
		s.probed = t.Fault
	}
	return s
}

// noteProbe takes note of what a probe has shown, and tells whether that is the first proof of a fault.
// An agent's own word is believed at once; a probe may be lost.
func (s *server) noteProbe(found Fault) (proof bool) {
	before := s.probed
	switch found {
	case None:
		s.misses = 0
		s.hits++
		if s.hits >= Rise {
			s.probed = None
		}
	case Silent:
		s.hits = 0
		s.misses++
		if s.misses >= Fall {
			s.probed = Silent
		}
	default:
		s.misses, s.hits = 0, 0
		s.probed = found
	}
	return before == None && s.probed != None
}

// noteOffers takes note of the counters of offers and answers.
//
// The score is a cumulative sum (Page, "Continuous inspection schemes", 1954). It rises by one for
// each offer without an answer, and falls by answerWorth for each with one. So it stays near zero
// while more than three of four offers are answered, also if a tenth of all packets is lost. A server
// that drops what it takes cannot hide behind the offers that it refuses and others take: by policy
// `dynamic` a server refuses half.
//
// What a server refuses may be lost at the next one, and then clients offer it again: of two or three
// servers, one that does not answer makes most offers of the others look unanswered, too. But these
// are heard of, by what they take themselves, and each such connection takes takenWorth from the score.
//
// The score is bounded, so that the first good news counts.
func (s *server) noteOffers(now Offers, at time.Time) {
	newOffers, newAnswers := now.Offered-s.offers.Offered, now.Answered-s.offers.Answered
	newTaken := now.Taken - s.offers.Taken
	s.offers = now
	switch {
	case !s.counted:
		s.counted = true
	case s.probed != None: // which explains what is not answered
		s.forget()
		s.trial = firstTrial
	case s.unheard:
		if at.After(s.retry) {
			s.forget()
		}
	default:
		late := newAnswers - min(newAnswers, newOffers)
		lost := s.pending - min(s.pending, late)
		s.pending = newOffers - min(newOffers, newAnswers)
		s.score += float64(lost) - answerWorth*float64(newAnswers) - takenWorth*float64(newTaken)
		s.score = min(max(0, s.score), UnansweredOffers)
	}
}

// forget forgets which offers were not answered.
func (s *server) forget() { s.unheard, s.score, s.pending = false, 0, 0 }

// suspect tells whether many offers are without an answer.
func (s *server) suspect() bool { return s.unheard || s.score >= UnansweredOffers/2 }

// mayGiveUp tells whether too many offers are without an answer.
func (s *server) mayGiveUp() bool { return !s.unheard && s.score >= UnansweredOffers }

// giveUp makes a server unheard for a time.
func (s *server) giveUp(now time.Time) {
	if now.Sub(s.retry) > lastTrial { // the last trial went well
		s.trial = firstTrial
	}
	s.unheard, s.retry = true, now.Add(s.trial)
	s.trial = min(2*s.trial, lastTrial)
}
