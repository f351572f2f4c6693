// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab/bench"
)

// forward measures the CPU time of packets in all cases at all points, once for each seed that the
// results lack.
func (s settings) forward(ctx context.Context, st *store, progress func(string)) error {
	for seed := range s.Seeds {
		plan := s.plan()
		plan = slices.DeleteFunc(plan, func(p planned) bool { return p.seed != uint64(seed+1) })
		isMissing := func(p planned) bool { return st.run(p) == nil }
		if !slices.ContainsFunc(plan, isMissing) {
			continue
		}
		if err := s.forwardOnce(ctx, st, plan, progress); err != nil {
			return err
		}
	}
	return nil
}

// forwardOnce makes the planned runs, which have the same seed. Each round of measurements goes
// through all cases and points. So all of these runs are made together, and replace those that an
// interruption left. Response.Mean is the median of the measurements, because other programs on the
// machine lengthen some of them.
func (s settings) forwardOnce(
	ctx context.Context, st *store, plan []planned, progress func(string),
) error {
	o := bench.DefaultPacketOptions()
	var names []string
	for _, p := range plan {
		names = append(names, regexp.QuoteMeta(p.benchCase()))
	}
	o.Case = regexp.MustCompile("^(" + strings.Join(names, "|") + ")$")
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
	st.results.Runs = slices.DeleteFunc(st.results.Runs, func(r Run) bool {
		return r.Seed == plan[0].seed
	})
	for _, p := range plan {
		i := slices.IndexFunc(times, p.isOf)
		if i < 0 {
			return fmt.Errorf("%s: there is no measurement %s with the encapsulation %q",
				p.name(), p.benchCase(), p.Case.Encapsulation)
		}
		if err := st.add(p.newForwardRun(times[i], o.Packets)); err != nil {
			return err
		}
	}
	return nil
}

// newForwardRun returns the run of measurements, each of which has the given number of packets. The
// papers compare balancers, so the time of the host program is left out.
func (p planned) newForwardRun(t bench.PacketTime, packets uint32) *Run {
	const ns = 1e-9
	host := t.Median - t.Net
	median := t.Net * ns
	return &Run{
		Case: p.Case.Name, Point: p.point, Seed: p.seed, Balancers: 1,
		Requests: uint64(t.Rounds) * uint64(packets), Failures: map[string]uint64{},
		Measured: Response{Mean: median, P50: median, P90: (t.P90 - host) * ns}, Cycles: t.Cycles,
		Shares: []Share{}, Counters: map[string]uint64{},
	}
}

// ofNewFlows tells whether the packets are of flows that the balancer does not know.
func (p planned) ofNewFlows() bool {
	return p.Case.Packets == PacketsSYN || p.Case.Packets == PacketsMix
}

// benchCase returns the name of the measurement of the run.
func (p planned) benchCase() string {
	switch {
	case p.ofNewFlows():
		method := string(p.Case.Placement)
		if p.Case.Infer != nil {
			method = cmp.Or(string(p.Case.Infer.Estimator), method)
		}
		return fmt.Sprintf("%s-%s-%d", p.Case.Packets, method, p.present)
	case p.Case.Placement == desired.PlacementHunt:
		return "known-flow-hunt"
	}
	return "known-flow"
}

// isOf tells whether a measurement is that of the run. The packets are IPv6, as in the papers.
func (p planned) isOf(t bench.PacketTime) bool {
	return t.Case == p.benchCase() && t.Family == "ipv6" &&
		t.Encapsulation == cmp.Or(p.Case.Encapsulation, desired.SRv6Insert) && t.Flows == uint32(p.point)
}
