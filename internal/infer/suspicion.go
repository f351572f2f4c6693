// SPDX-License-Identifier: Apache-2.0

package infer

import "math"

// belief contains the probabilities of two conditions of a server: that it is half ill, and that it
// is ill. Otherwise it is well. Events of its flows, which are good or bad, show the condition. A
// well server has the same share of good events as the other servers at the same time. One that is
// half ill has half of this share, and an ill one nearly none.
//
// Each belief follows Bayes' rule. The condition of a server may change at any time, as in a hidden
// Markov model (Rabiner, "A tutorial on hidden Markov models", 1989). So no belief is so sure that
// a few later events could not outweigh it: two or three good flows show that a server is well
// again, however long it was ill.
type belief struct{ half, ill float64 }

const (
	// halfShare and illShare are the shares of good events in relation to a well server.
	halfShare = 1. / 2
	illShare  = 1. / 64
	// badPrior is the probability of each bad condition if nothing is known.
	badPrior = 0.02
	// constancy is the mean time in seconds for which a condition lasts. After this time, an
	// observation says e times less.
	constancy = 20
	// mostGood is the largest share of good events that a well server is expected to have, because
	// some clients fail.
	mostGood = 0.9
	// mostTold is the largest likelihood ratio of the events of one window. Events of a window
	// often have one cause, such as the beginning of a flood.
	mostTold = 100
	// mostCompared is the largest number of events of a server that count in a window. If there are
	// more, good and bad ones are reduced in proportion. Otherwise servers that get many flows and
	// serve none would make bad events seem normal, and a server that gets most of a flood would
	// seem ill.
	mostCompared = 8
	// doubt is the expected share of good events, in relation to a well server, below which a
	// server is suspect.
	doubt = 0.8
	// littleDoubt is the sum of the probabilities of both bad conditions above which a server is
	// watched. It is more than the sum for a server of which nothing is known.
	littleDoubt = 0.05
	// mostSuspicion is the largest factor by which suspicion multiplies a server's unit.
	mostSuspicion = 64
)

// outcome counts the events of a window. The number of bad events can be a difference of counters
// that were not read at one moment. So it can be below 0.
type outcome struct{ good, bad float64 }

// compared makes the number of bad events at least 0. If there are more than mostCompared events,
// it reduces good and bad ones in proportion.
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

// lower returns the lower bound of Wilson's interval for the share of good events, at two standard
// deviations (Wilson, "Probable inference, the law of succession, and statistical inference",
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

// plus adds another outcome, multiplied by a factor.
func (o outcome) plus(other outcome, factor float64) outcome {
	return outcome{o.good + factor*other.good, o.bad + factor*other.bad}
}

// unknown is the belief about a server of which nothing is known.
var unknown = belief{badPrior, badPrior}

// age lets a time in seconds pass, in which the condition may have changed.
func (b *belief) age(seconds float64) {
	left := math.Exp(-seconds / constancy)
	b.half = left*b.half + (1-left)*badPrior
	b.ill = left*b.ill + (1-left)*badPrior
}

// learn takes the events of a window into account. The second argument is the least share of good
// events that other servers had at the same time. If it is 0, bad events tell nothing.
func (b *belief) learn(o outcome, others float64) {
	p := min(others, mostGood)
	half, ill := o.logRatio(halfShare, p), o.logRatio(illShare, p)
	// The scale reduces both likelihood ratios so that they are at most mostTold.
	scale := min(1, math.Log(mostTold)/max(math.Abs(half), math.Abs(ill), 1e-9))
	well := 1 - b.half - b.ill
	b.half *= math.Exp(scale * half)
	b.ill *= math.Exp(scale * ill)
	sum := well + b.half + b.ill
	b.half /= sum
	b.ill /= sum
}

// logRatio returns the logarithm of the ratio of two likelihoods of the outcome. The first is for
// a server whose share of good events is relative·p, and the second for a well server, whose share
// is p.
func (o outcome) logRatio(relative, p float64) float64 {
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

// comparedFor is the time in seconds after which an event counts e times less in comparisons.
const comparedFor = 2

// judge updates one belief about each server after a window of the given time in seconds. The
// function beliefAbout returns this belief, whose field now has the events of the window. judge
// compares the events of each server with the sums of those of the other servers.
func judge(servers []server, beliefAbout func(*server) *conduct, seconds float64) {
	var now, recent outcome
	left := math.Exp(-seconds / comparedFor)
	for i := range servers {
		c := beliefAbout(&servers[i])
		c.now = c.now.compared()
		c.recent = c.now.plus(c.recent, left)
		now, recent = now.plus(c.now, 1), recent.plus(c.recent, 1)
	}
	// Without the server's own events, the sums are those of the other servers.
	for i := range servers {
		c := beliefAbout(&servers[i])
		c.age(seconds)
		c.learn(c.now, leastGood(now.plus(c.now, -1), recent.plus(c.recent, -1)))
	}
}

// leastGood returns the least share of good events that is to be expected of a well server. The
// arguments are the events of the other servers in the window that ends, and recently. A flood can
// begin at any moment, and on any server. So the share in this window is an upper bound, and
// without events in it there is nothing to compare with. In a flood few events are good, and
// servers get SYNs at different moments. So the share is squared: the square of a small share is
// next to 0, and bad events then tell next to nothing.
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

// endWindow ends a window, in which the given numbers of flows were placed and answered. It assigns
// answers to the flows of this window first, so that a lost flow does not take the answer of a
// later one. The surplus answers belong to open flows, which the last window has left without an
// answer. Open flows that get none are lost.
func (a *answers) endWindow(placed, answered float64) {
	surplus := max(0, answered-placed)
	a.now = outcome{good: answered, bad: max(0, a.open-surplus)}
	a.open = max(0, placed-answered)
}

const (
	// windowTime is the least duration of a window in seconds. A client has one to two windows for
	// its second packet.
	windowTime = 0.5
	// trialShare is the number of trials that a watched server gets, as a share of the average
	// number of new flows of a server.
	trialShare = 0.25
	// trialAnswers is the number of answers that a well server would give to the trials that a
	// watched server can save up.
	trialAnswers = 2
)

// suspect judges all servers at the end of a window, and begins the next window. Until the window
// has lasted for windowTime, it does nothing. The argument is the time since the last step.
func (e *Estimator) suspect(seconds float64) {
	if e.window += seconds; e.window < windowTime {
		return
	}
	for i := range e.servers {
		s := &e.servers[i]
		s.answers.endWindow(s.since.placed, s.since.answered)
		s.endings.now = outcome{s.since.ended, s.since.left - s.since.ended}
	}
	judge(e.servers, func(s *server) *conduct { return &s.answers.conduct }, e.window)
	judge(e.servers, func(s *server) *conduct { return &s.endings }, e.window)
	trials, most := e.trialsOfWindow()
	for i := range e.servers {
		e.treat(i, trials, most)
		e.servers[i].since = events{}
	}
	e.window = 0
}

// treat acts on the belief about a server. A server that is watched gets the given number of trials
// for this window: new flows that show its condition. It can save up at most the number most. A
// home server without flows gets trials too if capacities are learned. All other servers have none.
// When a server is no longer suspect, it begins a slow start. If the flows of a server fall silent,
// treat forgets the learned capacity: such flows had a part in it before the server was known to be
// ill.
func (e *Estimator) treat(server int, trials, most float64) {
	s := &e.servers[server]
	wasSuspect := s.isSuspect
	s.isSuspect = s.suspicion() > 1
	s.aftermath = max(0, s.aftermath-e.window)
	if s.isSuspect {
		s.aftermath = e.settings.Silent
	}
	if wasSuspect && !s.isSuspect {
		s.age = 0
	}
	if s.endings.factor() > 1 && e.capacities != nil {
		e.capacities.Forget(int32(server))
	}
	// New flows of earlier windows do not count: only those of this window may be answered in time.
	s.stale = uint32(max(0, float64(count(s.last.New))-s.answers.open))
	switch {
	case s.isWatched(): // the flows of this window have used trials
		s.credit = min(max(0, s.credit-s.since.placed)+trials, most)
	case e.settings.Kind == TerritoryLearned && s.isIdle():
		// As many trials as the average server got flows, but at most one, so that no flow waits.
		s.credit = min(s.credit+trials/trialShare, 1)
	default:
		s.credit = 0
	}
}

// isIdle tells whether the server is a home server that had no flow in this window. It gets a trial
// because its learned capacity may be too low. Then other servers, of higher capacity, attract all
// new flows as long as they have few. Without flows, nothing would show that the idle server's
// capacity is higher.
func (s *server) isIdle() bool {
	return s.Weight > 0 && !s.away && s.since.placed+s.since.left == 0 &&
		s.last.Established+s.last.New == 0
}

// isWatched tells whether the server may be ill, and gets trials that show its condition.
func (s *server) isWatched() bool {
	return s.Weight > 0 &&
		max(s.answers.half+s.answers.ill, s.endings.half+s.endings.ill) > littleDoubt
}

// trialsOfWindow returns the number of trials (new flows) that a watched server gets in a window,
// and the largest number that it can save up. Of this largest number, a well server would answer
// trialAnswers.
func (e *Estimator) trialsOfWindow() (trials, most float64) {
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
