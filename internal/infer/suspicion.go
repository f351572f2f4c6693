// SPDX-License-Identifier: Apache-2.0

package infer

import "math"

// evidence counts recent events of a server, and how many of them were good. Servers whose share of
// good events is less than that of the others are suspect.
type evidence struct {
	events, good float64
	factor       float64 // by which the server's unit is multiplied: 1 to mostSuspicion
}

const (
	// evidenceMemory tells how fast evidence fades: n events count half after evidenceMemory / n
	// seconds. So a server that has failed at much recovers nearly as soon as one that has failed
	// at little, and one that is seldom tried is not forgotten at once.
	evidenceMemory = 60
	// mostCompared is the number of events that a server contributes to the share that others are
	// compared with. So servers that get many flows and serve none do not make each other normal.
	mostCompared = 8
	// certainty is the number of standard deviations of a bound: 2.5 is a chance of 1 in 160.
	certainty = 2.5
	// mostSuspicion is the largest factor.
	mostSuspicion = 64
	// doubt is the factor above which the observations of a server's flows are not used, and
	// distrust the one above which earlier observations are forgotten.
	doubt    = 1.2
	distrust = 2
)

// add adds events and good ones. Either may be below 0, if some that were counted did not happen.
func (e *evidence) add(events, good float64) {
	e.events = max(0, e.events+events)
	e.good = min(max(0, e.good+good), e.events)
}

// fade lets a time in seconds pass.
func (e *evidence) fade(seconds float64) {
	left := 1 / (1 + e.events*seconds/evidenceMemory)
	e.events *= left
	e.good *= left
}

// compared returns the server's contribution to the share of good events.
func (e *evidence) compared() (events, good float64) {
	if e.events <= mostCompared {
		return e.events, e.good
	}
	return mostCompared, e.good / e.events * mostCompared
}

// upper returns the upper bound of Wilson's interval for the share of good events (Wilson,
// "Probable inference, the law of succession, and statistical inference", 1927).
func (e *evidence) upper() float64 {
	if e.events <= 0 {
		return 1
	}
	const z2 = certainty * certainty
	share := e.good / e.events
	spread := math.Sqrt(share*(1-share)/e.events + z2/(4*e.events*e.events))
	return min(1, (share+z2/(2*e.events)+certainty*spread)/(1+z2/e.events))
}

// judge computes the factors of all servers. A server is suspect if even the upper bound of its
// share is below the share of the others. The third power makes the factor large soon: if all
// events of others are good, it is 3 after 3 bad events, 18 after 10, and 64 after 19.
func judge(servers []server, of func(*server) *evidence) {
	events, good := 0.0, 0.0
	for i := range servers {
		n, g := of(&servers[i]).compared()
		events, good = events+n, good+g
	}
	for i := range servers {
		e := of(&servers[i])
		e.factor = 1
		n, g := e.compared()
		if others := events - n; others > 1e-9 {
			if excess := (good - g) / others / e.upper(); excess > 1+1e-9 {
				e.factor = min(excess*excess*excess, mostSuspicion)
			}
		}
	}
}

// answers is the evidence that a server answers new flows. A server that refuses or loses SYNs has
// no flows, so it would attract all new ones. An event is a new flow whose client has had the time
// for its second packet. It is good if the packet has come.
type answers struct {
	evidence
	early      float64 // answers to flows that are no events yet
	old, young float64 // flows placed in the last and in the present window
	window     float64 // age of the present window, in seconds
}

// answerTime is the least time in seconds that a client has for its second packet. It has up to
// twice this time.
const answerTime = 0.5

// pass adds what happened in a time in seconds.
func (a *answers) pass(placed, answered, seconds float64) {
	a.fade(seconds)
	a.young += placed
	events := 0.0
	if a.window += seconds; a.window >= answerTime {
		events = a.old
		a.old, a.young, a.window = a.young, 0, 0
	}
	answered += a.early
	a.early = min(max(0, a.good+answered-a.events-events), a.old+a.young)
	a.add(events, answered)
}
