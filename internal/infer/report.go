// SPDX-License-Identifier: Apache-2.0

package infer

// Report is what an operator sees of a server.
type Report struct {
	// Capacity is the number of flows that the server serves at once, for territories.
	Capacity float64
	// Weight depends on the kind. For HLB and Durations it is relative to the average weight. For
	// SED it is the configured one. For AWCMP and WeightedRoundRobin it follows from the server's
	// load, and is relative to the highest weight.
	Weight float64
	// Wait is the mean time that flows wait, for each second of service, for territories.
	Wait float64
	// Duration is a mean time in seconds, or 0 if it is not known. For territories it is the
	// duration of a flow while it is the server's only one. For HLB it is the mean of the
	// reservoir, and for Durations that of the flows that ended last.
	Duration float64
	// Away tells that the server's home is another balancer.
	Away bool
	// SlowStart, NoAnswers and SilentFlows are factors by which the server seems slower. Each is 1
	// or more, and has a reason of its own. SlowStart: the server has taken new flows only for a
	// short time. NoAnswers: it does not answer new flows as others do. SilentFlows: its flows fall
	// silent while flows of other servers end. Of the last two, only the larger one counts.
	SlowStart, NoAnswers, SilentFlows float64
}

// Report returns what is known of a server now.
func (e *Estimator) Report(server int) Report {
	s := &e.servers[server]
	unit, _ := e.base(server)
	r := Report{
		Away: s.away, SlowStart: e.slow(s.age, unit), NoAnswers: s.answers.factor(),
		SilentFlows: s.endings.factor(),
	}
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
	return r
}
