// SPDX-License-Identifier: Apache-2.0

package infer

import "math"

// answers is the recent evidence that a server answers new flows. A server that refuses or loses
// SYNs has no flows, so it would attract all new ones.
type answers struct {
	// placed and answered count recent flows. A flow is counted when its client has had the time
	// patienceForAnswer for its second packet.
	placed, answered float64
	early            float64 // answers to flows that placed does not count yet
	old, young       float64 // flows placed in the last and in the present window
	window           float64 // age of the present window, in seconds
	factor           float64 // by which the server's unit is multiplied: 1 to mostSuspicion
}

const (
	// answerTime is the least time in seconds that a client has for its second packet. It has up
	// to twice this time.
	answerTime = 0.5
	// answerMemory is the time in seconds after which evidence counts e times less.
	answerMemory = 5
	// mostPlaced bounds the evidence, so that a server that lost many SYNs recovers as soon as one
	// that lost few.
	mostPlaced = 32
	// mostCompared is the number of flows that a server contributes to the share that others are
	// compared with. So servers that get many flows and answer none do not make each other normal.
	mostCompared = 8
	// certainty is the number of standard deviations of a bound: 3 is a chance of 1 in 700.
	certainty = 3
	// mostSuspicion is the largest factor.
	mostSuspicion = 64
)

// add adds what happened in a time in seconds.
func (a *answers) add(placed, answered, seconds float64) {
	a.answered += a.early + answered
	a.young += placed
	if a.window += seconds; a.window >= answerTime {
		a.fade(math.Exp(-a.window / answerMemory))
		a.placed += a.old
		a.old, a.young, a.window = a.young, 0, 0
	}
	a.early = min(max(0, a.answered-a.placed), a.old+a.young)
	a.answered = min(a.answered, a.placed)
	if a.placed > mostPlaced {
		a.fade(mostPlaced / a.placed)
	}
}

func (a *answers) fade(factor float64) {
	a.placed *= factor
	a.answered *= factor
}

// compared returns the server's contribution to the share of answered flows.
func (a *answers) compared() (placed, answered float64) {
	if a.placed <= mostCompared {
		return a.placed, a.answered
	}
	return mostCompared, a.answered / a.placed * mostCompared
}

// upper returns the upper bound of Wilson's interval for the share of flows that a server answers
// (Wilson, "Probable inference, the law of succession, and statistical inference", 1927).
func (a *answers) upper() float64 {
	if a.placed <= 0 {
		return 1
	}
	const z2 = certainty * certainty
	share := a.answered / a.placed
	spread := math.Sqrt(share*(1-share)/a.placed + z2/(4*a.placed*a.placed))
	return min(1, (share+z2/(2*a.placed)+certainty*spread)/(1+z2/a.placed))
}

// judge computes the factors of all servers. A server is suspect if even the upper bound of its
// share is below the share of the others. The third power makes the factor large soon: with others
// that answer everything, it is 2.4 after 3 flows without an answer, 9 after 10 and 64 after 27.
func judge(servers []server) {
	placed, answered := 0.0, 0.0
	for i := range servers {
		p, a := servers[i].answers.compared()
		placed, answered = placed+p, answered+a
	}
	for i := range servers {
		a := &servers[i].answers
		a.factor = 1
		p, ans := a.compared()
		if others := placed - p; others > 1e-9 {
			excess := (answered - ans) / others / a.upper()
			a.factor = min(max(1, excess*excess*excess), mostSuspicion)
		}
	}
}
