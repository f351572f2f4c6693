// SPDX-License-Identifier: Apache-2.0

package infer

import "fmt"

// Report is what an operator sees of a server.
type Report struct {
	// Capacity is the number of flows that the server serves at once, for territories.
	Capacity float64
	// Weight is the weight relative to the average one, for HLB, the configured one, for SED, or
	// the one that follows from the server's load relative to the highest one, for AWCMP and
	// WeightedRoundRobin.
	Weight float64
	// Wait is the mean time that flows wait, for each second of service, for territories.
	Wait float64
	// Duration is a mean time in seconds: that of a flow while it is the server's only one, for
	// territories; that of the flows that ended last, for HLB. It is 0 if it is not known.
	Duration float64
	// Away tells that the server's home is another balancer.
	Away bool
	// SlowStart and Suspicion are the factors by which the server seems slower, 1 or more.
	SlowStart, Suspicion float64
	// Reasons are the reasons for factors above 1, as words for an operator.
	Reasons []string
}

// Report returns what is known of a server now.
func (e *Estimator) Report(server int) Report {
	s := &e.servers[server]
	unit, _ := e.base(server)
	r := Report{Away: s.away, SlowStart: e.slow(s.age, unit), Suspicion: s.suspicion()}
	switch {
	case e.capacities != nil:
		r.Capacity, r.Wait = 1/unit, e.capacities.Wait(int32(server))
		r.Duration = e.capacities.alone(int32(server))
	case e.speeds != nil:
		r.Weight = 1 / unit
		r.Duration, _ = e.speeds.servers[server].reservoir.Mean()
	case e.settings.Kind == GSQ2: // it has no weights
	case e.settings.Kind.IsPolled():
		r.Weight = e.measureOf(s) / e.polled.most
	default:
		r.Weight = 1 / unit
	}
	if r.SlowStart > 1 {
		r.Reasons = append(r.Reasons, fmt.Sprintf("slow start since %.1f s", s.age))
	}
	if b := &s.answers.belief; b.factor() > 1 {
		r.Reasons = append(r.Reasons, b.reason("does not answer new flows as others do"))
	}
	if b := &s.endings.belief; b.factor() > 1 {
		r.Reasons = append(r.Reasons, b.reason("flows fall silent, those of others end"))
	}
	return r
}

// reason returns the reason why a server is suspect, and how sure it is.
func (b *belief) reason(what string) string {
	return fmt.Sprintf("%s: %.1f%% sure", what, 100*(b.half+b.ill))
}
