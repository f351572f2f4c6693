// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/sim/placement"
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
