// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/l2"
	"github.com/segue-lb/segue/internal/testhost"
)

// someL2 returns the state of a balancer that answers for one of two VIPs.
func someL2(now time.Time) *l2.LinkState {
	drained := now.Add(-time.Minute)
	return &l2.LinkState{
		Interface: "eth0", MAC: "02:00:00:00:00:11", IsUp: true, Lease: 3, Drained: &drained, Problem: "no answer",
		Balancers: []l2.LinkBalancer{
			{Name: "lb1", MAC: "02:00:00:00:00:11", Able: 1, VIPs: 1},
			{Name: "lb2", MAC: "02:00:00:00:00:12", Able: 1},
		},
		VIPs: []l2.LinkVIP{
			{Address: "2001:db8:80::10", Answers: true, Since: now.Add(-2 * time.Hour), Leader: "lb1", Services: []string{"web6"}},
			{Address: "203.0.113.10", Since: now.Add(-12 * time.Second), Reason: l2.NotServed, Services: []string{"web"}},
		},
	}
}

// TestStatusOfL2 compares the output with the golden file.
func TestStatusOfL2(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	now := time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)
	testhost.Must(t, printL2(&out, someL2(now), now))
	clitest.Golden(t, "status-l2.txt", &out)
}

// onLink is a balancer that answers for VIPs on its link, and is idle.
type onLink struct{ drained bool }

func (b *onLink) Self(context.Context) (*api.SelfState, error) {
	state := someL2(time.Now())
	return &api.SelfState{Self: api.Self{Drained: b.drained}, L2: state}, nil
}

func (b *onLink) ChangeSelf(ctx context.Context, change api.SelfChange) (*api.SelfState, error) {
	b.drained = change.Drained
	return b.Self(ctx)
}

// TestDrainOfL2: a drain and its end tell what becomes of the VIPs.
func TestDrainOfL2(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	b := &onLink{}
	testhost.Must(t, drainBalancer(t.Context(), &out, b, &drainOptions{target: target{dryRun: true}}))
	testhost.Must(t, drainBalancer(t.Context(), &out, b, &drainOptions{untilRestart: true}))
	if !b.drained {
		t.Error("the balancer is not drained")
	}
	testhost.Must(t, undrainBalancer(t.Context(), &out, b, &drainOptions{}))
	for _, want := range []string{
		"dry run: the balancer is drained: 1 VIP left to other balancers\n",
		"\nthe balancer is drained: 1 VIP left to other balancers\n",
		"\nthe balancer takes its share of 2 VIPs\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in %s", want, &out)
		}
	}
}
