// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"math"
	"sort"
)

// Affinity makes the flows of a client have the same row of the balancers' tables. The clients are
// unequal, as are networks behind address translation: the k-th largest client has a share of the
// flows in proportion to 1/k^Zipf.
type Affinity struct {
	Clients int // 1 to MostClients
	// Zipf is the exponent, 0 (all clients are equal) to 10.
	Zipf float64
}

// MostClients is the largest number of clients of an Affinity.
const MostClients = 1_000_000

// clients draws the clients of flows.
type clients struct {
	sums []float64 // sums[k] is the share of the first k+1 clients, not divided by the last sum
	salt uint64    // so that other runs give the clients other rows
}

// newClients returns nil without an affinity.
func newClients(a *Affinity, seed uint64) *clients {
	if a == nil {
		return nil
	}
	c := &clients{sums: make([]float64, a.Clients), salt: newRand(seed, streamClients, 0).Uint64()}
	sum := 0.0
	for k := range c.sums {
		sum += math.Pow(float64(k+1), -a.Zipf)
		c.sums[k] = sum
	}
	return c
}

// of returns the hash of the client of a flow. It follows from the flow's own hash, so all
// balancers find the same client.
func (c *clients) of(flow uint64) uint64 {
	draw := unit(mix(flow^c.salt)) * c.sums[len(c.sums)-1]
	return mix(c.salt + uint64(sort.SearchFloat64s(c.sums, draw)+1)*golden)
}

// RowKey returns the hash that selects the flow's row in a table: 64 random bits, of the flow or,
// under affinity, of its client.
func (b *Balancer) RowKey(f *Flow) uint64 {
	if b.e.clients == nil {
		return f.Key
	}
	return b.e.clients.of(f.Key)
}

// checkAffinity checks the affinity.
func (c *Config) checkAffinity(p *problems) {
	if a := c.Affinity; a != nil {
		p.require(a.Clients >= 1 && a.Clients <= MostClients, "affinity of %d clients: must be 1 to %d", a.Clients, MostClients)
		p.require(a.Zipf >= 0 && a.Zipf <= 10, "affinity with a Zipf exponent of %v: must be 0 to 10", a.Zipf)
	}
}
