// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/testhost"
)

// slowSwitch is a switch that follows after some time; a negative time: never.
type slowSwitch struct {
	began   time.Time
	follows time.Duration
	missing bool // the balancer has no switch
}

func (s *slowSwitch) Switch(context.Context) (*p4switch.Status, error) {
	if s.missing {
		return nil, errors.New("no section node.switch")
	}
	if s.follows >= 0 && time.Since(s.began) >= s.follows {
		return &p4switch.Status{Follows: true}, nil
	}
	return &p4switch.Status{Problem: "no answer"}, nil
}

// A drain waits for the switch in front of the balancer, but not for ever.
func TestDrainAwaitsSwitch(t *testing.T) {
	const waiting = "waiting for the switch in front of the balancer: no answer\n"
	for name, test := range map[string]struct {
		sw    slowSwitch
		want  string
		takes time.Duration
	}{
		"no switch":                    {sw: slowSwitch{missing: true}},
		"a switch that has the change": {},
		"a slow switch":                {slowSwitch{follows: time.Second}, waiting, time.Second},
		"a switch that does not answer": {
			slowSwitch{follows: -1},
			waiting + "warning: the switch in front of the balancer does not have the change: no answer\n",
			10*time.Second + switchInterval,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var out bytes.Buffer
				test.sw.began = time.Now()
				testhost.Must(t, awaitSwitch(t.Context(), &out, &test.sw, 10*time.Second))
				if took := time.Since(test.sw.began); out.String() != test.want || took != test.takes {
					t.Errorf("output %q after %v, want %q after %v", &out, took, test.want, test.takes)
				}
			})
		})
	}
}
