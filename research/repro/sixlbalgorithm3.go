// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/segue-lb/segue/internal/tables"
	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/sim"
)

// sectionIIIB3 counts the steps of algorithm 3 of 6LB, by the size of the table. Section III-B3
// states that two candidates need at most 1.368 times the steps of one, and that one table with two
// candidates is better than two independent tables: it needs fewer steps and loses fewer flows.
func sectionIIIB3(ctx context.Context, r *run) error {
	const servers = 48
	sizes := []int{1021, 4093, 16381, 65537}
	experiments := pick(r, 4, 20)
	steps := make([][2]float64, len(sizes)) // mean steps by size, with one candidate and with two
	ratios := make([][]float64, len(sizes)) // of the steps with two candidates to those with one, by size
	for i, m := range sizes {
		for e := range experiments {
			rng := rand.New(rand.NewPCG(r.Seed, uint64(e)))
			permutations := randomPermutations(servers, m, rng)
			_, one := algorithm3(permutations, m, 1)
			_, two := algorithm3(permutations, m, 2)
			steps[i][0] += float64(one) / float64(experiments)
			steps[i][1] += float64(two) / float64(experiments)
			ratios[i] = append(ratios[i], float64(two)/float64(one))
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
	largest := 0.0
	for i, m := range sizes {
		ratio, log := steps[i][1]/steps[i][0], math.Log(float64(m))
		largest = max(largest, ratio)
		half := sim.EstimateOf(ratios[i]).Half
		c.Series[0].Points = append(c.Series[0].Points, estimated(float64(m), sim.Estimate{Value: ratio, Half: half}))
		c.Series[1].Points = append(c.Series[1].Points,
			chart.Point{X: float64(m), Y: 1 + math.Log(log)/log})
	}
	const most = "1.368" // by the paper
	c.Series = append(c.Series, bound("counted", "at most", mustParse(most).Value))
	r.draw(c)
	r.atMost("largest ratio of steps, two candidates / one", most, largest, stated, "")
	last := steps[len(sizes)-1]
	r.smaller("steps of one table with two candidates", "two tables with one", last[1], 2*last[0],
		"M = 65537")
	joint, apart, err := failuresOfIndependentTables(r.Seed, experiments)
	if err != nil {
		return err
	}
	r.smaller("flows that fail at k = 8, one table with two candidates", "two independent tables",
		joint, apart, "N = 1000, M = 65537, as in figure 7")
	r.remark("A step looks at one bucket of a permutation. The permutations have random offsets " +
		"and skips.")
	return nil
}

// randomPermutations returns a permutation of the buckets for each server, with a random offset and
// a random skip. The number of buckets must be prime.
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

// algorithm3 is algorithm 3 of 6LB. Servers take turns. In its turn, a server looks at the next
// buckets of its permutation, until it finds one with fewer than the given number of candidates. It
// becomes a candidate of that bucket. Unlike package tables, algorithm3 counts the steps: a step
// looks at one bucket. There must be at least as many permutations as candidates.
func algorithm3(
	permutations []tables.Permutation,
	buckets, candidates int,
) (rows []uint16, steps int) {
	rows = make([]uint16, buckets*candidates)
	filled := make([]int, buckets)            // by bucket: the number of candidates so far
	next := make([]uint32, len(permutations)) // by server: the bucket to look at next
	looked := make([]int, len(permutations))  // by server: the number of buckets that it looked at
	for i, p := range permutations {
		next[i] = p.Offset
	}
	entries := 0 // filled entries of rows
	for {
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
				entries++
				break
			}
			if entries == len(rows) {
				return rows, steps
			}
		}
	}
}

// failuresOfIndependentTables returns the failure rates of section III-B1 when 8 servers are
// removed: with one table of two candidates, and with two independent tables of one candidate each.
func failuresOfIndependentTables(seed uint64, experiments int) (joint, apart float64, err error) {
	for e := range experiments {
		rng := rand.New(rand.NewPCG(seed, uint64(e)))
		first := randomPermutations(resilientServers, resilientBuckets, rng)
		second := randomPermutations(resilientServers, resilientBuckets, rng)
		jointBefore, apartBefore, err := bothKinds(first, second)
		if err != nil {
			return 0, 0, err
		}
		// The zero Permutation stands for a removed server.
		for _, s := range rng.Perm(resilientServers)[:8] {
			first[s], second[s] = tables.Permutation{}, tables.Permutation{}
		}
		jointAfter, apartAfter, err := bothKinds(first, second)
		if err != nil {
			return 0, 0, err
		}
		jointRate, err := tables.FailureRate(jointBefore, jointAfter)
		if err != nil {
			return 0, 0, err
		}
		apartRate, err := tables.FailureRate(apartBefore, apartAfter)
		if err != nil {
			return 0, 0, err
		}
		joint += jointRate / float64(experiments)
		apart += apartRate / float64(experiments)
	}
	return joint, apart, nil
}

// bothKinds returns two tables of two candidates. The joint table has the first permutations only.
// The other one consists of two independent tables of one candidate, one for each list of
// permutations.
func bothKinds(first, second []tables.Permutation) (joint, apart *tables.Table, err error) {
	joint, err = tables.BuildPermuted(first, resilientBuckets, 2)
	if err != nil {
		return nil, nil, err
	}
	firstTable, err := tables.BuildPermuted(first, resilientBuckets, 1)
	if err != nil {
		return nil, nil, err
	}
	secondTable, err := tables.BuildPermuted(second, resilientBuckets, 1)
	if err != nil {
		return nil, nil, err
	}
	return joint, sideBySide(firstTable, secondTable), nil
}

// sideBySide joins two tables of one candidate. Each row of the result has the server of the first
// table and that of the second.
func sideBySide(first, second *tables.Table) *tables.Table {
	t := &tables.Table{Buckets: first.Buckets, Candidates: 2, Servers: first.Servers}
	for b := range first.Buckets {
		t.Rows = append(t.Rows, first.Rows[b], second.Rows[b])
	}
	return t
}
