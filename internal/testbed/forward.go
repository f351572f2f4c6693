// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"fmt"
	"regexp"
	"slices"

	"github.com/segue-lb/segue/internal/bench"
	"github.com/segue-lb/segue/internal/desired"
)

// forward measures the CPU time of packets of known flows in all cases at all points. One
// measurement has all cases in turn, so it is made as a whole. Mean is the median of the
// measurements, too, because other programs on the machine lengthen some of them.
func (s settings) forward(ctx context.Context, st *store, progress func(string)) error {
	plan := s.plan()
	if !slices.ContainsFunc(plan, func(p planned) bool { return !st.has(p) }) {
		return nil
	}
	o := bench.DefaultPacketOptions()
	o.Case = regexp.MustCompile(`^known-flow(-hunt)?$`)
	o.Rounds, o.Progress = s.Connections, progress
	o.Flows = nil
	for _, point := range s.Points {
		o.Flows = append(o.Flows, uint32(point))
	}
	times, err := bench.MeasurePackets(ctx, o)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	st.results.Runs = nil
	for _, p := range plan {
		i := slices.IndexFunc(times, p.isOf)
		if i < 0 {
			return fmt.Errorf("%s: there is no measurement with the encapsulation %q",
				p.name(), p.Case.Encapsulation)
		}
		const ns = 1e-9
		median := times[i].Median * ns
		run := &Run{
			Case: p.Case.Name, Point: p.point, Seed: p.seed, Balancers: 1,
			Requests: uint64(times[i].Rounds) * uint64(o.Packets), Failures: map[string]uint64{},
			Measured: Response{Mean: median, P50: median, P90: times[i].P90 * ns},
			Shares:   []Share{}, Counters: map[string]uint64{},
		}
		if err := st.add(run); err != nil {
			return err
		}
	}
	return nil
}

// isOf tells whether a measurement is that of the run: of IPv6 packets, as in the papers.
func (p planned) isOf(t bench.PacketTime) bool {
	name := "known-flow"
	if p.Case.Placement == desired.PlacementHunt {
		name = "known-flow-hunt"
	}
	return t.Case == name && t.Family == "ipv6" && t.Encapsulation == p.Case.Encapsulation &&
		t.Flows == uint32(p.point)
}
