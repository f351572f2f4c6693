// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"

	"github.com/segue-lb/segue/research/sim"
)

// hlb22 compares placements for the types of application in table IV. Flows have three stages: CPU,
// IO and CPU. Those of the type pure CPU have a single stage.
func hlb22(ctx context.Context, r *run) error {
	rivals, err := rivals(realRivals...)
	if err != nil {
		return err
	}
	var clusters []hlbCluster
	for _, cpu := range []float64{1, 0.75, 0.5, 0.25} {
		c := newHLBCluster()
		if cpu == 1 {
			c.jobs = []sim.Stage{{Queue: sim.CPU, Work: sim.Exponential(1)}}
		} else {
			half := sim.Stage{Queue: sim.CPU, Work: sim.Exponential(cpu / 2)}
			c.jobs = []sim.Stage{half, {Queue: sim.IO, Work: sim.Exponential(1 - cpu)}, half}
		}
		clusters = append(clusters, c)
	}
	axis := categories("type of application", "pure CPU", "CPU intensive", "balanced", "IO intensive")
	c, err := r.compete(ctx, settings(clusters, 0.9, rivals), r.hlbRuns())
	if err != nil {
		return err
	}
	r.drawFCT(c, "FCT, three stages, 90%", axis, false)
	for i, kind := range axis.axis.Categories {
		r.fastest(c, i, "HLB", ", "+kind, "better for all types, says the text")
		r.because("flows of the balanced type wait for IO, which all servers have equally, and LSQ takes "+
			"all servers for equal; %s, HLB takes 1.01 of LSQ's time", ifAtEnd)
	}
	const balanced = 2
	at80, err := r.compete(ctx, settings(clusters[balanced:balanced+1], 0.8, rivals), r.hlbRuns())
	if err != nil {
		return err
	}
	r.remark("With the balanced type and IO used by 80%%, HLB / best of the others is %.3f.",
		ratio(at80.of(0, "HLB"), at80.best(0, "HLB")))
	r.remark("The Oracle is left out, because that of the simulator only knows the work of " +
		"processors.")
	r.remark("The rate uses 90%% of the resource that flows use most. From the balanced type on, " +
		"this is IO, of which all servers have the same.")
	return nil
}
