// SPDX-License-Identifier: Apache-2.0

package sim_test

import (
	"math"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

// rows counts the flows of each row key that a balancer sees.
func rows(t *testing.T, a *sim.Affinity, seed uint64) map[uint64]int {
	t.Helper()
	c, counts := one(1, sim.ProcessorSharing, 0.5, sim.Constant(0.01)), map[uint64]int{}
	c.Affinity, c.Connections = a, 20_000
	c.Placement = method(func(b *sim.Balancer) sim.Placement {
		return place(func(f *sim.Flow, offer *sim.Offer) {
			counts[b.RowKey(f)]++
			offer.Add(0)
		})
	})
	_, err := sim.Run(t.Context(), c, sim.Options{Seed: seed, Runs: 1, Parallel: 1})
	testhost.Must(t, err)
	return counts
}

// Without affinity, each flow has its own row. With affinity, each client has, and the shares of
// clients follow Zipf's law.
func TestAffinityOfClients(t *testing.T) {
	t.Parallel()
	if got := rows(t, nil, 1); len(got) != 20_000 {
		t.Errorf("without affinity, 20,000 flows have %d rows", len(got))
	}
	counts := rows(t, &sim.Affinity{Clients: 4, Zipf: 1}, 1)
	if len(counts) != 4 {
		t.Fatalf("4 clients have %d rows", len(counts))
	}
	largest := 0
	for _, n := range counts {
		largest = max(largest, n)
	}
	// 1 / (1 + 1/2 + 1/3 + 1/4); the standard deviation of the share is 0.0035.
	if share := float64(largest) / 20_000; math.Abs(share-0.48) > 0.02 {
		t.Errorf("the largest client has a share of %v", share)
	}
	for key := range rows(t, &sim.Affinity{Clients: 4, Zipf: 1}, 2) {
		if counts[key] > 0 {
			t.Error("in another run, a client has the same row")
		}
	}
}
