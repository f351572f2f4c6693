// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/research/sim/placement"
)

// TestWindowTime checks that the policy dynamic is the paper's unless the experiment sets a
// shortest time of its window. That time is emulated: the agent has it by the clock, the simulator
// as it is.
func TestWindowTime(t *testing.T) {
	four := 4 * time.Second
	for name, test := range map[string]struct {
		policy    desired.AcceptPolicy
		set       *time.Duration
		agent     *time.Duration
		simulator time.Duration
	}{
		"dynamic":           {desired.AcceptDynamic, nil, new(time.Duration(0)), 0},
		"dynamic with time": {desired.AcceptDynamic, &four, new(2 * time.Second), four},
		"static":            {desired.AcceptStatic, nil, nil, 0},
	} {
		var s settings
		s.Speed = 2
		c := Case{
			Placement: desired.PlacementHunt,
			Accept: desired.Accept{
				Policy:     test.policy,
				WindowTime: test.set,
				Threshold:  new(uint32(4)),
			},
		}
		got := c.service(0, s).Accept.WindowTime
		if (got == nil) != (test.agent == nil) || got != nil && *got != *test.agent {
			t.Errorf("%s: the agent has %v, want %v", name, got, test.agent)
		}
		if spec, ok := (planned{settings: s, Case: c}).spec().(*placement.SRDyn); ok &&
			spec.WindowTime != test.simulator {
			t.Errorf("%s: the simulator has %v, want %v", name, spec.WindowTime, test.simulator)
		}
	}
}

// TestLeastInTheSimulator checks which placement of the simulator stands for the policy least.
// Balancers age reports by the clock, so an experiment that runs faster ages them more slowly.
func TestLeastInTheSimulator(t *testing.T) {
	const least = desired.AcceptLeast
	const random, reports, spare = desired.SelectRandom, desired.SelectReports, desired.SelectSpare
	for name, test := range map[string]struct {
		policy     desired.AcceptPolicy
		selection  desired.Selection
		candidates int
		source     desired.Source
		want       placement.Spec
	}{
		"least": {policy: least, candidates: 4, want: &placement.Least{
			Hunt: placement.Hunt{Candidates: 4},
		}},
		"by default": {want: &placement.Least{Hunt: placement.Hunt{Candidates: 4}}},
		"random least": {policy: least, selection: random, candidates: 3, want: &placement.Least{
			Hunt: placement.Hunt{Candidates: 3, Random: true},
		}},
		"reports": {policy: least, selection: reports, want: &placement.Least{
			Hunt: placement.Hunt{Candidates: 8}, Chain: 3, Reports: true,
			ReportOthers: placement.ReportFirst, Coded: true, Age: 800 * time.Millisecond,
		}},
		"few candidates": {policy: least, selection: reports, candidates: 2, want: &placement.Least{
			Hunt: placement.Hunt{Candidates: 2}, Chain: 2, Reports: true,
			ReportOthers: placement.ReportFirst, Coded: true, Age: 800 * time.Millisecond,
		}},
		"spare": {policy: least, selection: spare, candidates: 4, want: &placement.Least{
			Hunt: placement.Hunt{Candidates: 4}, Chain: 3, Reports: true,
			ReportOthers: placement.ReportFirst, Coded: true, Age: 800 * time.Millisecond, Spare: 4,
		}},
		"without capacity": {
			policy: least, candidates: 4, source: desired.Source{Kind: desired.LoadConnections},
		},
		"thresholds with reports": {policy: desired.AcceptStatic, selection: reports},
	} {
		p := planned{Case: Case{
			Placement: desired.PlacementHunt,
			Selection: test.selection, Candidates: test.candidates,
			Accept: desired.Accept{Policy: test.policy, Threshold: new(uint32(4))},
			Source: test.source,
		}}
		p.Speed = 4
		got := p.spec()
		diff := cmp.Diff(test.want, got, cmpopts.IgnoreUnexported(placement.Hunt{}))
		if diff != "" {
			t.Errorf("%s, -want +got:\n%s", name, diff)
		}
		if got == nil {
			continue
		}
		if _, _, err := got.Build(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestWeightedInTheSimulator checks for which placements the simulator has weights.
func TestWeightedInTheSimulator(t *testing.T) {
	for selection, want := range map[desired.Selection]bool{"": true, desired.SelectRandom: false} {
		p := planned{Case: Case{
			Placement: desired.PlacementHunt, Selection: selection, Weighted: true,
			Accept: desired.Accept{Policy: desired.AcceptStatic, Threshold: new(uint32(4))},
		}}
		spec, ok := p.spec().(*placement.SR)
		if ok != want || ok && !spec.Weighted {
			t.Errorf("selection %q: placement %+v", selection, spec)
		}
	}
	p := planned{Case: Case{Placement: desired.PlacementHash, Weighted: true}}
	if spec, ok := p.spec().(*placement.WCMP); !ok {
		t.Errorf("hash: placement %+v, want WCMP", spec)
	}
	p.Case.Placement = desired.PlacementRoundRobin
	if spec := p.spec(); spec != nil {
		t.Errorf("round-robin: placement %+v, want none", spec)
	}
}

// TestWhoTellsLoads requires that agents read the workers of servers that hunt or are polled, as
// often in emulated time at any speed.
func TestWhoTellsLoads(t *testing.T) {
	workers := desired.Source{Kind: desired.LoadSharedMemory, Interval: 5 * time.Millisecond}
	for placement, want := range map[desired.Placement]desired.Source{
		desired.PlacementHash: {}, desired.PlacementSED: {}, desired.PlacementHunt: workers,
		desired.PlacementAWCMP: workers, desired.PlacementGSQ2: workers,
	} {
		var s settings
		s.Speed = 2
		service := Case{Placement: placement}.service(0, s)
		if service.Load != want {
			t.Errorf("%s: %+v, want %+v", placement, service.Load, want)
		}
		if placement.Polls() && service.Infer.Poll != 250*time.Millisecond {
			t.Errorf("%s: polls every %s, want half of 500ms", placement, service.Infer.Poll)
		}
	}
}
