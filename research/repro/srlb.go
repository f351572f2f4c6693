// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"slices"
)

// srlbFigures are the figures of "SRLB: The Power of Choices in Load Balancing with Segment
// Routing". Its figure 1 is a drawing, and figures 6 to 8 need a trace and a database.
var srlbFigures = []Figure{
	{"srlb-2", "Mean response time by load", "SRLB, section V-C", srlb2},
	{"srlb-3", "Distribution of response times, heavy load", "SRLB, section V-C", srlb3},
	{"srlb-4", "Load of the servers over time, heavy load", "SRLB, section V-C", srlb4},
	{"srlb-5", "Distribution of response times, light load", "SRLB, section V-C", srlb5},
}

// srlbContenders returns the hunters, with the paper's name for the baseline. The paper calls it
// RR, although it is random and not round-robin.
func srlbContenders() []contender {
	contenders := slices.Clone(hunters)
	contenders[0].name = "RR (random)"
	return contenders
}

// srlb2 draws the mean response times of the policies by load.
func srlb2(ctx context.Context, r *run) error {
	contenders := srlbContenders()
	loads := []float64{0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.61,
		0.65, 0.7, 0.73, 0.76, 0.79, 0.82, 0.85, 0.88, 0.9, 0.92, 0.94, 0.96}
	results, err := r.sweep(ctx, srlbTestbed, contenders, loads, pick(r, 8, 20))
	if err != nil {
		return err
	}
	c := meanChart("Mean response time, 12 servers", contenders, loads, results)
	markGain(&c, loads, results, 0.88)
	r.draw(c)
	r.compareHunters(loads, results, 0.88)
	return nil
}

// srlb3 draws the distributions of response times at the load 0.88.
func srlb3(ctx context.Context, r *run) error {
	results, err := r.distributions(ctx, srlbTestbed, srlbContenders(), 0.88, pick(r, 8, 20))
	if err != nil {
		return err
	}
	r.compareAtHighLoad(results, 0.88)
	return nil
}

// srlb4 draws the loads of the servers over time at the load 0.88, for RR and SR4.
func srlb4(ctx context.Context, r *run) error {
	return r.loadsOverTime(ctx, srlbTestbed, srlbContenders()[:2], 0.88)
}

// srlb5 draws the distributions of response times at the load 0.61.
func srlb5(ctx context.Context, r *run) error {
	results, err := r.distributions(ctx, srlbTestbed, srlbContenders(), 0.61, pick(r, 8, 20))
	if err != nil {
		return err
	}
	r.compareAtLightLoad(results, 0.61)
	return nil
}
