// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"math"
	"runtime"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
)

// Packets arrive by every way, on one core and on two.
func TestThroughput(t *testing.T) {
	testhost.NeedNamespaces(t)
	testhost.NeedBPF(t)
	cores := []int{1, 2}[:min(2, runtime.NumCPU())]
	results, err := MeasureThroughput(t.Context(), ThroughputOptions{
		Cores: cores, Duration: 100 * time.Millisecond, Rounds: 1,
	})
	testhost.Must(t, err)
	if want := 9 * len(cores); len(results) != want {
		t.Errorf("%d results, want %d", len(results), want)
	}
	for _, r := range results {
		t.Logf("%+v", r)
		if r.PacketsPerSecond <= 0 || math.IsInf(r.PacketsPerSecond, 0) {
			t.Errorf("%s on %d cores: %v packets per second", r.Way, r.Cores, r.PacketsPerSecond)
		}
	}
}

func TestSpeedup(t *testing.T) {
	results := []Throughput{
		{Way: Dropped, Cores: 1, Mean: 5}, {Way: Balanced, Cores: 2, Mean: 3}, {Way: Balanced, Cores: 1, Mean: 2},
	}
	if got := Speedup(results, Balanced, 2); got != 1.5 {
		t.Errorf("balanced: %v", got)
	}
	if got := Speedup(results, Dropped, 2); !math.IsNaN(got) {
		t.Errorf("what was not measured: %v", got)
	}
}

// If cores are fast in two of three rounds and slow in the third, two such cores have twice the
// throughput of one by the means, but not by the medians.
func TestSpeedupOfUnsteadyCores(t *testing.T) {
	one, two := Throughput{Way: Balanced, Cores: 1}, Throughput{Way: Balanced, Cores: 2}
	one.summarize([]float64{3, 3, 2}, 0)
	two.summarize([]float64{3 + 2, 3 + 3, 2 + 3}, 0)
	if got := Speedup([]Throughput{one, two}, Balanced, 2); math.Abs(got-2) > 1e-9 {
		t.Errorf("two cores are %v times one", got)
	}
}

// A frame that the host itself sends does not count as a generator's.
func TestFlowing(t *testing.T) {
	before := []uint64{1000, 1000, 1000}
	if got := arrivingCPUs(before, []uint64{1003, 5000, 1000}); got != 1 {
		t.Errorf("packets flow on %d CPUs, want 1", got)
	}
}
