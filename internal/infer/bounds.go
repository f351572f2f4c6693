// SPDX-License-Identifier: Apache-2.0

package infer

import "slices"

// mostUnequal is how many times the median a learned capacity can be, and the median a learned
// capacity. Clients decide when flows begin and end, so they can make a server seem to serve any
// number of flows at once. But for a client to move the median, it must attack half of the servers,
// and then it has little left to attract flows from. Servers of a service rarely differ more.
const mostUnequal = 4

// bounds are what most of the servers of a service have in common. The zero value bounds nothing.
type bounds struct {
	// low and high are the medians of the learned capacities. They differ if the number of servers
	// is even: then no half of the servers decides about the bound of the other half.
	low, high float64
	weight    float64 // the median of the configured weights
}

// boundCapacities computes the bounds of the learned capacities. Servers that take no flows do not
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
	e.usual = bounds{capacities[last/2], capacities[len(weights)/2], weights[last/2]}
}

// capacity returns the learned capacity of a server, between bounds. An operator whose servers
// differ more gives them weights: a weight other than the median widens the bounds.
func (e *Estimator) capacity(server int) float64 {
	learned := e.capacities.Capacity(int32(server))
	if e.usual.weight == 0 {
		return learned
	}
	relative := e.servers[server].Weight / e.usual.weight
	most := e.usual.low * mostUnequal * max(1, relative)
	least := e.usual.high / mostUnequal * min(1, relative)
	return max(1, least, min(learned, most))
}
