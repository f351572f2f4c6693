// SPDX-License-Identifier: Apache-2.0

package infer

import "math"

// Price is what the data path knows about a server apart from its flows. Unit and Extra are
// fixed-point numbers with 16 fractional bits: PriceOne is one flow for each unit of capacity.
type Price struct {
	// Unit is what each flow adds to the delay: the inverse of the server's capacity or weight. Its
	// least value is 1, which stands for 1/PriceOne.
	Unit uint32
	// Extra is a delay that the server has without flows of this balancer.
	Extra uint32
	// Position decides between servers of equal delay: the server with the least position is
	// chosen. It is below Positions.
	Position uint16
	// Away tells that the server's home is another balancer.
	Away bool
	// Stale is the number of new flows that do not count, because their clients have sent no second
	// packet in time.
	Stale uint32
}

const (
	// PriceOne is the number 1 in the fields of a Price.
	PriceOne = 1 << 16
	// Positions is the number of different positions.
	Positions = 1 << 12
	// sureNew is the number of new flows of a server that count fully. Of its other new flows, 64
	// (2^floodShift) count as one. So a flood of SYNs does not hide the established flows, and is
	// spread over all servers. In bpf/balancer/tables/loads.h the constants are SURE_NEW and
	// FLOOD_SHIFT.
	sureNew    = 16
	floodShift = 6
	// mostFlows is the largest number of flows that can be compared.
	mostFlows = 1 << 30
	// mostDelay is the largest delay that can be compared.
	mostDelay = 1<<35 - 1
)

// NewPrice returns a price. It rounds numbers down: a server with as many flows as it can serve at
// once must not seem to have a little more. If a number is too large or too small, NewPrice takes
// the nearest possible one.
func NewPrice(unit, extra float64, position int, away bool) Price {
	return Price{
		Unit: max(1, fixed(unit)), Extra: fixed(extra),
		Position: uint16(min(max(position, 0), Positions-1)), Away: away,
	}
}

// fixed converts to a fixed-point number. NaN becomes the largest number.
func fixed(x float64) uint32 {
	switch x = math.Floor(x * PriceOne); {
	case x < 0:
		return 0
	case x < math.MaxUint32:
		return uint32(x)
	}
	return math.MaxUint32
}

// Score is the number by which the data path ranks a server for a new flow: the least is chosen. It
// contains the delay in 35 bits, the position in 12 bits, and the server's slot in 16 bits. fresh
// are the new flows. Most of a flood of them does not count (sureNew).
//
// The order of the delays is that of Territory: the least waiting, then home before away, then the
// shortest delay. With a delay of at most 1 no flow waits. Such a delay on a home server stays as
// it is, and all other delays become longer by 1. So home servers where no flow waits are first,
// then other servers where no flow waits. Among longer delays, the shortest also has the least
// waiting.
func (p Price) Score(established, fresh uint32, slot uint16) uint64 {
	fresh -= min(fresh, p.Stale)
	sure := min(fresh, sureNew)
	flows := uint64(established) + uint64(sure) + (uint64(fresh-sure) >> floodShift)
	delay := uint64(p.Extra) + min(flows+1, mostFlows)*uint64(p.Unit)
	if delay > PriceOne || p.Away {
		delay += PriceOne
	}
	return min(delay, mostDelay)<<28 | uint64(p.Position)<<16 | uint64(slot)
}

// numerator returns the common numerator of SED's units; their denominators are the weights. If
// possible, all units are exact in the fields of a Price. Otherwise rounding would decide between
// servers of equal delay, and always for the same ones. The largest unit is about 1.
func numerator(servers []WeightedServer) float64 {
	// least is the least weight, and multiple a common multiple of the weights.
	least, multiple := math.Inf(1), 1.0
	for _, s := range servers {
		if s.Weight > 0 {
			least = min(least, s.Weight)
		}
	}
	for _, s := range servers {
		if s.Weight > 0 {
			multiple *= s.Weight / divisor(multiple, s.Weight)
		}
		if multiple > PriceOne*least {
			return least // too many different weights
		}
	}
	// The largest common multiple up to PriceOne*least, divided by PriceOne: no unit is above 1.
	return multiple * math.Floor(PriceOne*least/multiple) / PriceOne
}

// divisor returns the greatest common divisor of two positive numbers, or 1 if one of them is not
// whole.
func divisor(a, b float64) float64 {
	if a != math.Trunc(a) || b != math.Trunc(b) {
		return 1
	}
	for b > 0 {
		a, b = b, math.Mod(a, b)
	}
	return a
}
