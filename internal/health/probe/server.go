// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"errors"
	"slices"
)

// server is the state of a target.
type server struct {
	target Target
	fault  Fault // the reported fault
	asked  bool  // a probe was sent

	// Findings from probes:
	probed  Fault
	hits    int    // successive probes with a good answer
	lost    int    // successive probes without an answer
	misses  int    // of the lost probes, those since the last signal
	signals uint64 // the number of the server's signals when a probe last had no answer

	// Suspicions from offers:
	counted bool    // the counters have been read before
	offers  Offers  // the counters at the last reading
	pending uint64  // new offers at the last reading that had no answer yet
	score   float64 // rises with unanswered offers: see noteOffers
	share   share

	// Findings from calls:
	call        *call   // the last call, until its result is noted; nil: there is none
	nextThrough bool    // the next call goes through the server to a peer
	peer        *server // the peer of the last call; nil: the call went to the server itself
	turn        int     // the index after which peerOf looks for the next peer; it only rises
	reached     int     // successive calls with an answer
	unreached   int     // successive calls without an answer, by the server's fault
	unheard     bool
	// accused are the servers through which calls to this server went without an answer. If this
	// server answers a call that goes to it directly, the accused were at fault.
	accused []*server
}

// newServer returns a server with the finding of an earlier process.
func newServer(t Target) *server {
	s := &server{target: t, fault: t.Fault}
	if t.Fault == Unheard {
		s.unheard = t.Offered // the service may have had another placement then
	} else {
		s.probed = t.Fault
	}
	return s
}

// noteProbe records the result of a probe, and tells whether a fault begins with it. One answer
// that shows a fault is proof. One missing answer is not, because a probe may be lost. A signal of
// the server resets misses (noteSignals), but not lost.
func (s *server) noteProbe(found Fault) (begins bool) {
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

// noteSignals notes the number of a server's signals, when a probe has no answer. If the server has
// sent signals since the last such probe, the count of misses begins anew.
func (s *server) noteSignals(now uint64) {
	if now != s.signals {
		s.misses = 0
	}
	s.signals = now
}

// noteOffers takes the counters of offers and signals, and adds the new outcomes to those of the
// service.
//
// Clients can make offers look unanswered: for example, a server's stack drops a SYN with a wrong
// checksum. So noteOffers only makes a server suspect, and calls decide.
//
// The score is a cumulative sum (Page, "Continuous inspection schemes", 1954). It rises by one for
// each offer without an answer, and falls by answerWorth for each offer with one. So it stays near
// zero while more than three of four offers are answered, even if a tenth of all packets is lost.
// The score is bounded, so that the first answered offers have an effect.
//
// A server may refuse half of its offers, as under policy `dynamic`, and drop the connections of
// the other half. Other servers answer the refused half. The server is still suspect: half of its
// offers have no answer. The field share finds a server that drops connections which were offered
// to others first.
//
// A refused connection may be lost at the next server, and then clients repeat their SYN. So among
// two or three servers, one that does not answer makes most offers of the others look unanswered.
// Then all of them are suspect, and calls tell which one is the cause.
func (s *server) noteOffers(now Offers, svc *service) {
	newOffers, newAnswers := now.Offered-s.offers.Offered, now.Answered-s.offers.Answered
	newTaken := now.Taken - s.offers.Taken
	s.offers = now
	switch {
	case !s.counted: // the first reading is only the base of the next one
		s.counted = true
	case s.probed != None: // this fault explains the unanswered offers
		s.acquit()
	case s.unheard: // it gets no offers
	default:
		// If there are more answers than new offers, the surplus is late: it answers pending offers
		// of the reading before. Pending offers without such an answer are lost.
		lateAnswers := newAnswers - min(newAnswers, newOffers)
		lost := s.pending - min(s.pending, lateAnswers)
		s.pending = newOffers - min(newOffers, newAnswers)
		s.score += float64(lost) - answerWorth*float64(newAnswers)
		s.score = min(max(0, s.score), UnansweredOffers)
		svc.add(outcomes{newTaken, lost})
		if newTaken > 0 {
			s.share.forget()
		} else if newOffers > 0 { // otherwise it may be drained
			s.share.add(svc.outcomes, len(svc.servers))
		}
	}
	s.share.seen = svc.outcomes
}

// isSuspect tells whether too many offers are unanswered.
func (s *server) isSuspect() bool {
	return s.score >= UnansweredOffers || s.share.isMissing(UnansweredOffers)
}

// forget forgets unanswered offers.
func (s *server) forget() {
	s.score, s.pending = 0, 0
	s.share.forget()
}

// acquit forgets unanswered offers and unanswered calls.
func (s *server) acquit() {
	s.forget()
	s.unheard, s.nextThrough, s.reached, s.unreached, s.accused = false, false, 0, 0, nil
}

// needsCall tells whether a call is needed, to test whether the server answers offers and passes
// them on. Calls go on until the server is acquitted.
func (s *server) needsCall() bool {
	hasBegun := s.unheard || s.nextThrough || s.reached+s.unreached > 0
	return s.probed == None && s.call == nil && (hasBegun || s.isSuspect())
}

// noteCall records the result of a call. If a call to the server and a call through it both have an
// answer, the suspicion and the fault Unheard end. If Fall calls in a row have no answer, the
// server is Unheard, unless too many servers of the service do not answer calls.
//
// If a call through the server has no answer, the cause may be its peer. If the last call to the
// peer had an answer, the failure counts for the server. Otherwise the peer is called, and the
// failure counts for the server only if the peer answers.
func (s *server) noteCall(err error, svc *service) {
	if s.peer == nil {
		s.judgeAccused(err == nil, svc)
	}
	switch {
	case errors.Is(err, ErrUntried): // nothing is known about the server, so it gets offers again
		if s.unheard {
			s.acquit()
		}
	case err == nil:
		s.unreached = 0
		svc.withdraw(s)
		s.reached++
		s.nextThrough = !s.nextThrough
		if s.reached >= Rise { // a call to the server, and one through it
			s.acquit()
		}
	default:
		s.reached = 0
		if s.peer != nil && s.peer.reached == 0 {
			s.peer.accuse(s)
		} else {
			s.fail(svc)
		}
	}
}

// fail counts a call that had no answer by the server's fault. After Fall such calls in a row, the
// server is Unheard, unless too many servers of the service do not answer calls.
func (s *server) fail(svc *service) {
	s.unreached++
	if s.unreached >= Fall && !svc.isOverloaded() {
		s.unheard = true
	}
}

// accuse notes that a call to this server, through another one, had no answer. It makes this server
// suspect, so that it is called itself.
func (s *server) accuse(through *server) {
	s.score = UnansweredOffers
	if !slices.Contains(s.accused, through) {
		s.accused = append(s.accused, through)
	}
}

// judgeAccused uses the result of a call to this server itself. If this server answers, the accused
// are at fault: calls through them to this server had no answer, and these calls now count against
// them. In any case, judgeAccused then forgets the accused.
func (s *server) judgeAccused(answers bool, svc *service) {
	if answers {
		for _, through := range s.accused {
			through.fail(svc)
		}
	}
	s.accused = nil
}
