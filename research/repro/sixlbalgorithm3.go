// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/segue-lb/segue/internal/tables"
	"github.com/segue-lb/segue/research/chart"
)

// sectionIIIB3 counts the steps of algorithm 3 of 6LB, by the size of the table. Section III-B3
// states that two candidates need at most 1.368 times the steps of one, and that one table with two
// candidates is better than two independent tables: it needs fewer steps and loses fewer flows.
func sectionIIIB3(ctx context.Context, r *run) error {
	const servers = 48
	sizes := []int{1021, 4093, 16381, 65537}
	experiments := pick(r, 4, 20)
	steps := make([][2]float64, len(sizes)) // by size, with one candidate and with two
	for i, m := range sizes {
		for e := range experiments {
			rng := rand.New(rand.NewPCG(r.Seed, uint64(e)))
			permutations := randomPermutations(servers, m, rng)
			for candidates := 1; candidates <= 2; candidates++ {
				_, n := algorithm3(permutations, m, candidates)
				steps[i][candidates-1] += float64(n) / float64(experiments)
			}
			if err := ctx.Err(); err != nil {
				return err
			}
		}
	}
	c := chart.Chart{
		Title: fmt.Sprintf("Steps of algorithm 3 with two candidates, over one, %d servers",
			servers),
		X: chart.Axis{Label: "buckets, M", Log: true},
		Y: chart.Axis{Label: "ratio of steps", Min: 1, Max: 1.4},
		Series: []chart.Series{
			{
				Name:  "counted",
				Style: chart.Marked,
			}, {Name: "1 + log log M / log M", Style: chart.Dashed},
		},
	}
	most := 0.0
	for i, m := range sizes {
		ratio, log := steps[i][1]/steps[i][0], math.Log(float64(m))
		most = max(most, ratio)
		c.Series[0].Points = append(c.Series[0].Points, chart.Point{X: float64(m), Y: ratio})
		c.Series[1].Points = append(c.Series[1].Points,
			chart.Point{X: float64(m), Y: 1 + math.Log(log)/log})
	}
	r.draw(c)
	r.atMost("largest ratio of steps, two candidates / one", "1.368", most, stated, "")
	last := steps[len(sizes)-1]
	r.before("steps of one table with two candidates", "two tables with one", last[1], 2*last[0],
		"M = 65537")
	joint, apart, err := independentTablesFail(r.Seed, experiments)
	if err != nil {
		return err
	}
	r.before("flows that fail at k = 8, one table with two candidates", "two independent tables",
		joint, apart, "N = 1000, M = 65537, as in figure 7")
	r.remark("A step looks at one bucket of a permutation. The permutations have random offsets " +
		"and skips.")
	return nil
}

// randomPermutations returns permutations of a prime number of buckets with random offsets and
// skips.
func randomPermutations(servers, buckets int, rng *rand.Rand) []tables.Permutation {
	permutations := make([]tables.Permutation, servers)
	for i := range permutations {
		permutations[i] = tables.Permutation{
			Offset: rng.Uint32N(uint32(buckets)),
			Skip:   1 + rng.Uint32N(uint32(buckets-1)),
		}
	}
	return permutations
}

// algorithm3 is algorithm 3 of 6LB. Other than package tables, it counts the steps: how often it
// looks at the next bucket of a permutation, free or not. There must be at least as many
// permutations as candidates.
func algorithm3(
	permutations []tables.Permutation,
	buckets, candidates int,
) (rows []uint16, steps int) {
	rows = make([]uint16, buckets*candidates)
	filled := make([]int, buckets)
	next, looked := make([]uint32, len(permutations)), make([]int, len(permutations))
	for i, p := range permutations {
		next[i] = p.Offset
	}
	for n := 0; ; {
		for i, p := range permutations {
			for looked[i] < buckets {
				bucket := next[i]
				next[i] = uint32((uint64(bucket) + uint64(p.Skip)) % uint64(buckets))
				looked[i]++
				steps++
				if filled[bucket] == candidates {
					continue
				}
				rows[int(bucket)*candidates+filled[bucket]] = uint16(i)
				filled[bucket]++
				n++
				break
			}
			if n == buckets*candidates {
				return rows, steps
			}
		}
	}
}

// independentTablesFail returns the failure rates of section III-B1 when 8 servers are removed:
// with one table of two candidates, and with two independent tables of one candidate each.
func independentTablesFail(seed uint64, experiments int) (joint, apart float64, err error) {
	for e := range experiments {
		rng := rand.New(rand.NewPCG(seed, uint64(e)))
		permutations := [2][]tables.Permutation{
			randomPermutations(
				resilientServers,
				resilientBuckets,
				rng,
			), randomPermutations(resilientServers, resilientBuckets, rng),
		}
		removed := rng.Perm(resilientServers)[:8]
		var together, first, second [2]*tables.Table // before and after the removal
		for change := range 2 {
			for _, build := range []struct {
				into         *[2]*tables.Table
				permutations []tables.Permutation
				candidates   int
			}{{&together, permutations[0], 2}, {&first, permutations[0], 1}, {&second, permutations[1], 1}} {
				if build.into[change], err = tables.BuildPermuted(build.permutations, resilientBuckets, build.candidates); err != nil {
					return 0, 0, err
				}
			}
			for _, s := range removed {
				permutations[0][s], permutations[1][s] = tables.Permutation{}, tables.Permutation{}
			}
		}
		rate, err := tables.FailureRate(together[0], together[1])
		if err != nil {
			return 0, 0, err
		}
		joint += rate / float64(experiments)
		rate, err = tables.FailureRate(sideBySide(first[0], second[0]),
			sideBySide(first[1], second[1]))
		if err != nil {
			return 0, 0, err
		}
		apart += rate / float64(experiments)
	}
	return joint, apart, nil
}

// sideBySide returns a table whose rows have the server of the first table and that of the second.
func sideBySide(first, second *tables.Table) *tables.Table {
	t := &tables.Table{Buckets: first.Buckets, Candidates: 2, Servers: first.Servers}
	for b := range first.Buckets {
		t.Rows = append(t.Rows, first.Rows[b], second.Rows[b])
	}
	return t
}
