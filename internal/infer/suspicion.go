// SPDX-License-Identifier: Apache-2.0

package infer

import "math"

// belief is how likely it is that a server is ill, judged by events of its flows that are good or
// bad. A well server has as many good events as the other servers at the same time. One that is
// half ill has half of that, and an ill one nearly none.
//
// Each belief follows Bayes' rule. The condition of a server may change at any time, as in a hidden
// Markov model (Rabiner, "A tutorial on hidden Markov models", 1989). So no belief is so sure that
// a few later events could not outweigh it: a server that is well again has to show this by two or
// three flows, however long it was ill.
type belief struct{ half, ill float64 }

const (
	// halfShare and illShare are the shares of good events in relation to a well server.
	halfShare = 1. / 2
	illShare  = 1. / 64
	// usually is the probability of each bad condition if nothing is known.
	usually = 0.02
	// constancy is the time in seconds for which a condition lasts: after it, an observation says
	// e times less.
	constancy = 20
	// mostGood is the largest share of good events that a well server is expected to have, because
	// some clients fail.
	mostGood = 0.9
	// mostTold is the largest likelihood ratio of the events of one window. Events of a window
	// often have one cause, such as the beginning of a flood.
	mostTold = 100
	// mostCompared is the number of events that a server has in a window at most. More events count
	// in proportion. So servers that get many flows and serve none do not make each other normal,
	// and a server that gets most of a flood does not seem ill.
	mostCompared = 8
	// doubt is the expected share of good events below which a server is suspect.
	doubt = 0.8
	// littleDoubt is the probability of both bad conditions from which on a server is watched. It is
	// more than that of a server of which nothing is known.
	littleDoubt = 0.05
	// mostSuspicion is the largest factor.
	mostSuspicion = 64
)

// outcome counts the events of a window. Bad events are below 0 if some that were counted did not
// happen.
type outcome struct{ good, bad float64 }

// compared returns the part of the outcome that counts.
func (o outcome) compared() outcome {
	o.bad = max(0, o.bad)
	if n := o.good + o.bad; n > mostCompared {
		return outcome{o.good / n * mostCompared, o.bad / n * mostCompared}
	}
	return o
}

// share returns the share of good events, or 0 without events.
func (o outcome) share() float64 {
	if o.good <= 0 {
		return 0
	}
	return o.good / (o.good + o.bad)
}

// lower returns the lower bound of Wilson's interval for the share of good events, two standard
// deviations wide (Wilson, "Probable inference, the law of succession, and statistical inference",
// 1927). Without events it is 0.
func (o outcome) lower() float64 {
	const z2 = 2 * 2
	n, share := o.good+o.bad, o.share()
	if n <= 0 {
		return 0
	}
	spread := math.Sqrt(z2 * (share*(1-share)/n + z2/(4*n*n)))
	return max(0, (share+z2/(2*n)-spread)/(1+z2/n))
}

func (o outcome) plus(other outcome, factor float64) outcome {
	return outcome{o.good + factor*other.good, o.bad + factor*other.bad}
}

// unknown is the belief about a server of which nothing is known.
var unknown = belief{usually, usually}

// age lets a time in seconds pass, in which the condition may have changed.
func (b *belief) age(seconds float64) {
	left := math.Exp(-seconds / constancy)
	b.half = left*b.half + (1-left)*usually
	b.ill = left*b.ill + (1-left)*usually
}

// learn takes the events of a window into account. At the same time, other servers had at least
// this share of good events. If they had none, bad events tell nothing.
func (b *belief) learn(o outcome, others float64) {
	p := min(others, mostGood)
	half, ill := o.likelihood(halfShare, p), o.likelihood(illShare, p)
	scale := min(1, math.Log(mostTold)/max(math.Abs(half), math.Abs(ill), 1e-9))
	well := 1 - b.half - b.ill
	b.half *= math.Exp(scale * half)
	b.ill *= math.Exp(scale * ill)
	sum := well + b.half + b.ill
	b.half /= sum
	b.ill /= sum
}

// likelihood returns the logarithm of the ratio of two likelihoods of the outcome: that of a server
// with a relative share of good events, and that of a well server, whose share is p.
func (o outcome) likelihood(relative, p float64) float64 {
	return o.good*math.Log(relative) + o.bad*math.Log((1-relative*p)/(1-p))
}

// factor returns the factor by which the server's unit is multiplied: 1 to mostSuspicion. It is 1
// unless the server is suspect. The third power makes it large soon.
func (b *belief) factor() float64 {
	good := 1 - b.half*(1-halfShare) - b.ill*(1-illShare)
	if good > doubt {
		return 1
	}
	return min(1/(good*good*good), mostSuspicion)
}

// conduct is the belief about a server, and the events that others are compared with.
type conduct struct {
	belief
	now    outcome // of the window that ends
	recent outcome // of the last windows; older ones count less
}

// comparedFor is the time in seconds after which an event is compared e times less.
const comparedFor = 2

// judge learns from the window that ends, which lasted for a time in seconds.
func judge(servers []server, of func(*server) *conduct, seconds float64) {
	var now, recent outcome
	left := math.Exp(-seconds / comparedFor)
	for i := range servers {
		c := of(&servers[i])
		c.now = c.now.compared()
		c.recent = c.now.plus(c.recent, left)
		now, recent = now.plus(c.now, 1), recent.plus(c.recent, 1)
	}
	for i := range servers {
		c := of(&servers[i])
		c.age(seconds)
		c.learn(c.now, leastGood(now.plus(c.now, -1), recent.plus(c.recent, -1)))
	}
}

// leastGood returns the share of good events that servers have at least, if they had these events
// in the window that ends, and recently. A flood can begin at any moment, and on any server. So what
// was before does not count if it contradicts this window, and without events in this window there
// is nothing to compare with. In a flood few events are good, and servers get SYNs at different
// moments. So the share is squared: then bad events tell next to nothing.
func leastGood(now, recent outcome) float64 {
	p := min(recent.lower(), now.share())
	return p * p
}

// answers is the belief that a server answers new flows. A server that refuses or loses SYNs has no
// flows, so it would attract all new ones. A flow is good when its client's second packet comes. It
// is bad if this has not happened by the end of the next window.
type answers struct {
	conduct
	open float64 // flows of the last window without an answer
}

// pass ends a window. The answers are those of the newest flows, if possible: a flow that was lost
// must not take the answer of a later one.
func (a *answers) pass(placed, answered float64) {
	late := max(0, answered-placed)
	a.now = outcome{good: answered, bad: max(0, a.open-late)}
	a.open = max(0, placed-answered)
}

const (
	// windowTime is the least duration of a window in seconds. A client has this time for its
	// second packet, and at most twice this time.
	windowTime = 0.5
	// trialShare is the share of its usual number of flows that a server gets while it is watched.
	trialShare = 0.25
	// trialAnswers is the number of answers of a well server that suffice in a window.
	trialAnswers = 2
)

// suspect judges all servers at the end of a window. The argument is the time since the last step.
func (e *Estimator) suspect(seconds float64) {
	if e.window += seconds; e.window < windowTime {
		return
	}
	for i := range e.servers {
		s := &e.servers[i]
		s.answers.pass(s.since.placed, s.since.answered)
		s.endings.now = outcome{s.since.ended, s.since.left - s.since.ended}
	}
	judge(e.servers, func(s *server) *conduct { return &s.answers.conduct }, e.window)
	judge(e.servers, func(s *server) *conduct { return &s.endings }, e.window)
	trials, most := e.trickle()
	for i := range e.servers {
		e.treat(i, trials, most)
		e.servers[i].since = events{}
	}
	e.window = 0
}

// treat does what follows from the belief about a server. A server that is watched gets a number of
// trials in this window, and keeps at most so many for later. A suspect begins a slow start when it
// is none any more. What was learned from flows that fell silent, before the server was known to be
// ill, is not true.
func (e *Estimator) treat(server int, trials, most float64) {
	s := &e.servers[server]
	was := s.isSuspect
	s.isSuspect = s.suspicion() > 1
	s.aftermath = max(0, s.aftermath-e.window)
	if s.isSuspect {
		s.aftermath = e.settings.Silent
	}
	if was && !s.isSuspect {
		s.age = 0
	}
	if s.endings.factor() > 1 && e.capacities != nil {
		e.capacities.Forget(int32(server))
	}
	s.stale = uint32(max(0, float64(count(s.last.New))-s.answers.open))
	switch {
	case s.isWatched():
		s.credit = min(max(0, s.credit-s.since.placed)+trials, most)
	case e.settings.Kind == TerritoryLearned && s.isIdle():
		s.credit = min(s.credit+trials/trialShare, 1) // so that no flow waits for another
	default:
		s.credit = 0
	}
}

// isIdle tells whether a home server had no flow in this window. A flow would not wait there. But if
// a low capacity was learned, servers with more flows attract all new ones while they have little to
// do. Without flows, nothing would show that the capacity is higher.
func (s *server) isIdle() bool {
	return s.Weight > 0 && !s.away && s.since.placed+s.since.left == 0 &&
		s.last.Established+s.last.New == 0
}

// isWatched tells whether it is to be found out if the server is well: it gets flows in any case.
func (s *server) isWatched() bool {
	return s.Weight > 0 &&
		max(s.answers.half+s.answers.ill, s.endings.half+s.endings.ill) > littleDoubt
}

// trickle returns how many trials a server that is watched gets in a window, and the most that it
// keeps: so many that a well server would answer trialAnswers of them.
func (e *Estimator) trickle() (trials, most float64) {
	var all events
	servers := 0.0
	for i := range e.servers {
		s := &e.servers[i]
		all.placed, all.answered = all.placed+s.since.placed, all.answered+s.since.answered
		if s.Weight > 0 {
			servers++
		}
	}
	return trialShare * all.placed / max(1, servers), trialAnswers * all.placed / max(1, all.answered)
}

// Trials returns how many of the next flows a server is to get, whatever its price. These flows
// show whether the server is well, even if the other servers have so little to do that its price
// attracts none.
func (e *Estimator) Trials(server int) uint32 {
	return uint32(e.servers[server].credit)
}
