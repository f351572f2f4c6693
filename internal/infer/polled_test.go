// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/testhost"
)

// priced returns the units and the extras of servers with these loads, as numbers.
func priced(t *testing.T, kind Kind, weights []float64, loads []*Load) (units, extras []float64) {
	t.Helper()
	e, err := NewEstimator(Settings{Kind: kind})
	testhost.Must(t, err)
	members := make([]WeightedServer, len(loads))
	for i := range loads {
		members[i] = WeightedServer{Name: fmt.Sprint("s", i), Weight: weights[i]}
	}
	testhost.Must(t, e.Arrange(members, nil, "lb"))
	for i, load := range loads {
		e.SetLoad(i, load)
	}
	e.Step(0.5, 1)
	for i := range loads {
		units = append(units, float64(e.Price(i).Unit)/PriceOne)
		extras = append(extras, float64(e.Price(i).Extra)/PriceOne)
	}
	return units, extras
}

func TestPolledWeights(t *testing.T) {
	t.Parallel()
	const never = float64(1<<32-1) / PriceOne
	for _, kind := range []Kind{AWCMP, WeightedRoundRobin} {
		for _, c := range []struct {
			weights []float64
			loads   []*Load
			units   []float64
		}{
			// Weights 8, 4, 2, and their mean for the last one.
			{[]float64{1, 1, 1, 1}, []*Load{{0, 8}, {1, 8}, {7, 16}, nil}, []float64{1, 2, 4, 12. / 7}},
			// The configured weights stand for unknown capacities.
			{[]float64{1, 4}, []*Load{{0, 0}, {1, 0}}, []float64{2, 1}},
			// Without a load the configured weights count.
			{[]float64{1, 4}, []*Load{nil, nil}, []float64{4, 1}},
			// A server of weight 0 gets nothing, whatever it tells.
			{[]float64{1, 0}, []*Load{{3, 4}, {0, 100}}, []float64{1, never}},
		} {
			units, extras := priced(t, kind, c.weights, c.loads)
			for i := range c.units {
				if d := units[i] - c.units[i]; d > 1e-4 || d < -1e-4 || extras[i] != 0 {
					t.Errorf("%s, %v: units %v, want %v; extras %v", kind, c.loads, units, c.units, extras)
					break
				}
			}
		}
	}
}

func TestPolledQueues(t *testing.T) {
	t.Parallel()
	units, extras := priced(t, GSQ2, []float64{1, 1, 5}, []*Load{{3, 8}, nil, {9, 1}})
	if diff := cmp.Diff([]float64{3, 6, 9}, extras); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for i, unit := range units {
		if unit != 1./PriceOne {
			t.Errorf("server %d: unit %v", i, unit)
		}
	}
}
