// SPDX-License-Identifier: Apache-2.0

package infer

import "slices"

// mostUnequal bounds learned capacities: from the median divided by it to the median times it.
// Clients decide when flows begin and end, so they can make a server seem to serve any number of
// flows at once. But to move the median, a client must attack half of the servers. Then few other
// servers are left, from which it could attract flows. Servers of a service rarely differ by more
// than this factor.
const mostUnequal = 4

// bounds has the medians from which the bounds of learned capacities follow. The zero value bounds
// nothing.
type bounds struct {
	// low and high are the two middle ones of the learned capacities. If the number of servers is
	// odd, both are the median. The upper bound follows from low, and the lower one from high. So
	// if half of the servers have wrong capacities, the other half bounds them.
	low, high float64
	weight    float64 // the median of the configured weights
}

// boundCapacities computes the bounds of learned capacities. Servers that take no flows do not
// count.
func (e *Estimator) boundCapacities() {
	var capacities, weights []float64
	for i := range e.servers {
		if s := &e.servers[i]; s.Weight > 0 {
			capacities = append(capacities, e.capacities.Capacity(int32(i)))
			weights = append(weights, s.Weight)
		}
	}
	if len(weights) == 0 {
		e.usual = bounds{}
		return
	}
	slices.Sort(capacities)
	slices.Sort(weights)
	last := len(weights) - 1
	e.usual = bounds{
		low: capacities[last/2], high: capacities[len(weights)/2], weight: weights[last/2],
	}
}

// capacity returns the learned capacity of a server, between bounds. If the servers differ by more
// than mostUnequal, the operator gives them weights. A weight above the median raises the server's
// upper bound, and a weight below it lowers the server's lower bound.
func (e *Estimator) capacity(server int) float64 {
	learned := e.capacities.Capacity(int32(server))
	if e.usual.weight == 0 { // no bounds
		return learned
	}
	relative := e.servers[server].Weight / e.usual.weight
	most := e.usual.low * mostUnequal * max(1, relative)
	least := e.usual.high / mostUnequal * min(1, relative)
	return max(1, least, min(learned, most))
}
