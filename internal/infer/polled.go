// SPDX-License-Identifier: Apache-2.0

package infer

// Load is the load of a server by its own account.
type Load struct {
	Busy float64 // flows, or another unit that the server counts; 0 or more
	// Capacity is how much the server can serve at once, in the same unit. 0: not known.
	Capacity float64
}

// IsPolled tells whether the kind needs the loads that servers tell (SetLoad).
func (k Kind) IsPolled() bool {
	return k == AWCMP || k == WeightedRoundRobin || k == GSQ2
}

// SetLoad sets the load of a server, or nil if it is not known. It counts from the next Step on. A
// server whose load is not known counts as the average of the others.
func (e *Estimator) SetLoad(server int, load *Load) { e.servers[server].load = load }

// polled has the values on which the price of a polled server depends, beside its own load.
type polled struct {
	mean float64 // of the weights, or of the queues, of servers whose loads are known
	most float64 // the highest weight
}

// comparePolled computes e.polled, on which the prices of all servers depend.
func (e *Estimator) comparePolled() {
	sum, n := 0.0, 0.0
	e.polled = polled{}
	for i := range e.servers {
		if s := &e.servers[i]; s.load != nil && s.Weight > 0 {
			sum, n = sum+e.toldBy(s), n+1
		}
	}
	if n > 0 {
		e.polled.mean = sum / n
	}
	for i := range e.servers {
		e.polled.most = max(e.polled.most, e.measureOf(&e.servers[i]))
	}
}

// toldBy returns the queue of a server for GSQ2, and otherwise its weight: capacity / (busy + 1).
// The configured weight stands for an unknown capacity.
func (e *Estimator) toldBy(s *server) float64 {
	if e.settings.Kind == GSQ2 {
		return s.load.Busy
	}
	capacity := s.load.Capacity
	if capacity == 0 {
		capacity = s.Weight
	}
	return capacity / (s.load.Busy + 1)
}

// measureOf returns the queue of a server for GSQ2, and otherwise its weight. If the load of the
// server is not known, it returns the mean of the servers whose loads are known. If no load is
// known, the weight is the configured one, as under WCMP. A server that takes no new flows has 0.
func (e *Estimator) measureOf(s *server) float64 {
	switch {
	case s.Weight == 0:
		return 0
	case s.load != nil:
		return e.toldBy(s)
	case e.polled.mean == 0 && e.settings.Kind != GSQ2:
		return s.Weight
	}
	return e.polled.mean
}

// polledPrice returns the unit and the extra delay of a server. For GSQ2 the queue is the delay,
// and this balancer's flows only decide between equal queues. Otherwise the unit is 1 for the
// server with the highest weight, and the data path takes each server with a probability of 1 /
// unit.
func (e *Estimator) polledPrice(s *server) (unit, extra float64) {
	if e.settings.Kind == GSQ2 {
		return 0, e.measureOf(s)
	}
	return e.polled.most / e.measureOf(s), 0
}
