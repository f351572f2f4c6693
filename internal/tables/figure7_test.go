// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"flag"
	"math"
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

var experiments = flag.Int("figure7.experiments", 3,
	"experiments for each point of figure 7 of 6LB; the paper averages 20")

var buckets = flag.Int("figure7.buckets", DefaultBuckets,
	"M of figure 7; only with the paper's number, the paper's results are required")

// TestFigure7 computes figure 7 of 6LB: N = 1000 servers, M = 65537 buckets, and the failure rate
// when k servers are removed, for one candidate and for two. The text of section III-B1 gives one
// number: two candidates have up to 44% fewer failures, at k = 8.
func TestFigure7(t *testing.T) {
	const servers, most = 1000, 30
	var one, two [most + 1]float64
	for experiment := range *experiments {
		addRates(t, &one, servers, 1, experiment)
		addRates(t, &two, servers, 2, experiment)
	}

	var fewer [most + 1]float64 // percent
	sum, best := 0.0, 1
	t.Log(" k   C=1, %   C=2, %   fewer, %")
	for k := range one {
		if k > 0 {
			fewer[k] = 100 * (1 - two[k]/one[k])
		}
		if fewer[k] > fewer[best] {
			best = k
		}
		sum += fewer[k]
		n := float64(*experiments)
		t.Logf("%2d   %6.3f   %6.3f   %6.1f", k, 100*one[k]/n, 100*two[k]/n, fewer[k])
	}
	t.Logf("mean of the last column over k = 1 to %d: %.1f", most, sum/most)

	if one[0] != 0 || two[0] != 0 {
		t.Error("failures although no server was removed")
	}
	for k := 1; k <= most; k++ {
		if two[k] >= one[k] {
			t.Errorf("k = %d: two candidates fail no less than one", k)
		}
	}
	if *buckets != DefaultBuckets {
		return
	}
	if best != 8 {
		t.Errorf("two candidates help most at k = %d, not 8", best)
	}
	// Single experiments have a mean of 45.2 and a standard deviation of 1.5 (40 experiments). So
	// the mean of 3 is within 2.5 of 45, except for one time in 200. The paper's 44 is in this
	// range, too.
	if math.Abs(fewer[8]-45) > 2.5 {
		t.Errorf("k = 8: %.1f%% fewer failures with two candidates, want 45 ± 2.5", fewer[8])
	}
}

// addRates adds to rates[k] the failure rate of one experiment in which k random servers are
// removed.
func addRates(t *testing.T, rates *[31]float64, n, candidates, experiment int) {
	t.Helper()
	rng := rand.New(rand.NewPCG(7, uint64(experiment)))
	servers := numbered(n)
	for i := range servers {
		servers[i].Name += "/" + strconv.Itoa(experiment)
	}
	before := mustBuild(t, servers, *buckets, candidates)
	for k := range rates {
		remaining := make([]Server, 0, n)
		for _, i := range rng.Perm(n)[k:] {
			remaining = append(remaining, servers[i])
		}
		rate, err := FailureRate(before, mustBuild(t, remaining, *buckets, candidates))
		testhost.Must(t, err)
		rates[k] += rate
	}
}
