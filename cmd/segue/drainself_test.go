// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/bgp"
)

// fakeBalancer is a balancer whose routers send packets for some time after it was drained.
type fakeBalancer struct {
	bgp     *bgp.State    // nil: it does not announce its VIPs
	drained time.Time     // when it was drained
	packets uint64        // the packets that arrived before the drain
	busy    time.Duration // how long after the drain 10 packets a second arrive
	// undrains is the time after which somebody ends the drain. 0 means that nobody does.
	undrains     time.Duration
	setBack      time.Duration // by how much the clock was set back after the drain
	failure      error         // the error of each request
	uncounted    time.Duration // how long after the drain the switch's packets cannot be counted
	untilRestart bool          // UntilRestart of the last change
}

func (b *fakeBalancer) Self(ctx context.Context) (*api.SelfState, error) {
	if err := errors.Join(b.failure, ctx.Err()); err != nil {
		return nil, err
	}
	state := &api.SelfState{Packets: b.packets}
	if b.bgp != nil {
		copied := *b.bgp
		state.BGP = &copied
	}
	if b.drained.IsZero() {
		return state, nil
	}
	since := time.Since(b.drained)
	state.Drained = b.undrains == 0 || since < b.undrains
	drained := b.drained.Add(b.setBack)
	state.BGP.Drained = &drained
	state.Packets += 10 * uint64(min(since, b.busy)/time.Second)
	if since < b.uncounted {
		state.Uncounted = "no answer"
	}
	return state, nil
}

func (b *fakeBalancer) ChangeSelf(ctx context.Context, change api.SelfChange) (*api.SelfState, error) {
	b.untilRestart = change.UntilRestart
	switch {
	case b.bgp == nil:
		return nil, errors.New("no section bgp")
	case !change.Drained:
		b.drained = time.Time{}
	case b.drained.IsZero():
		b.drained = time.Now()
	}
	return b.Self(ctx)
}

// announcing returns the state of a balancer that announces one of three routes.
func announcing() *bgp.State {
	return &bgp.State{
		DrainDelay: 5,
		Peers:      []bgp.Peer{{Address: "192.0.2.1", State: "established"}},
		Routes: []bgp.Route{
			{Prefix: "203.0.113.1/32", Announced: true},
			{Prefix: "203.0.113.2/32", Reason: bgp.NotServed},
			{Prefix: "2001:db8::1/128", Reason: bgp.NoPeer},
		},
	}
}

// TestDrainSelf checks the output and the duration of drains.
func TestDrainSelf(t *testing.T) {
	const (
		one   = "the balancer is drained: 1 route withdrawn\n"
		quiet = "no packets arrive any more: the balancer can be stopped\n"
		ten   = "10 packets in the last second\n"
		mute  = "the packets of the switch cannot be counted: no answer\n"
	)
	for _, test := range []struct {
		name    string
		b       fakeBalancer
		options drainOptions
		want    string
		err     string
		takes   time.Duration
	}{
		{name: "without traffic: after drain-delay", options: drainOptions{wait: true}, want: one + quiet,
			takes: 5 * time.Second},
		{name: "packets before the drain do not count", b: fakeBalancer{packets: 99}, options: drainOptions{wait: true},
			want: one + quiet, takes: 5 * time.Second},
		{name: "with traffic: two seconds after it", b: fakeBalancer{busy: 8 * time.Second},
			options: drainOptions{wait: true}, want: one + strings.Repeat(ten, 8) + quiet, takes: 10 * time.Second},
		{name: "the clock was set back", b: fakeBalancer{setBack: time.Hour}, options: drainOptions{wait: true},
			want: one + quiet, takes: 5 * time.Second},
		{name: "a switch that does not answer: two seconds after it answers", b: fakeBalancer{uncounted: 6500 * time.Millisecond},
			options: drainOptions{wait: true}, want: one + strings.Repeat(mute, 6) + quiet, takes: 8 * time.Second},
		{name: "without waiting", b: fakeBalancer{busy: time.Hour}, want: one},
		{name: "too much traffic", b: fakeBalancer{busy: time.Hour},
			options: drainOptions{wait: true, timeout: 2500 * time.Millisecond}, want: one + ten + ten,
			err:   "--timeout has passed: the last packet arrived 1s ago; the balancer stays drained",
			takes: 2500 * time.Millisecond},
		{name: "undrained by somebody", b: fakeBalancer{undrains: 3 * time.Second},
			options: drainOptions{wait: true}, want: one, err: "somebody else has undrained the balancer",
			takes: 3 * time.Second},
		{name: "no process", b: fakeBalancer{failure: errors.New("no process")}, options: drainOptions{wait: true},
			err: "no process"},
		{name: "dry run", options: drainOptions{target: target{dryRun: true}}, want: "dry run: the balancer is drained: 1 route withdrawn\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := test.b
				b.bgp = announcing()
				requireDrain(t, &b, &test.options, test.want, test.err, test.takes)
			})
		})
	}
}

// requireDrain drains a balancer. It fails the test unless output, error and time are as wanted.
func requireDrain(
	t *testing.T, b selfClient, o *drainOptions, want, wantErr string, takes time.Duration,
) {
	t.Helper()
	var out bytes.Buffer
	began := time.Now()
	ctx, cancel := o.limit(t.Context())
	defer cancel()
	err := drainBalancer(ctx, &out, b, o)
	if out.String() != want {
		t.Errorf("output %q, want %q", &out, want)
	}
	got := ""
	if err != nil {
		got = err.Error()
	}
	if got != wantErr {
		t.Errorf("error %q, want %q", got, wantErr)
	}
	if took := time.Since(began); took != takes {
		t.Errorf("it took %v, want %v", took, takes)
	}
}

// TestDrainSelfAgain drains a balancer twice. The second drain waits, and counts no routes.
func TestDrainSelfAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBalancer{bgp: announcing(), busy: 4 * time.Second}
		if _, err := b.ChangeSelf(t.Context(), api.SelfChange{Self: api.Self{Drained: true}}); err != nil {
			t.Fatal(err)
		}
		const drained = "the balancer is drained already\n"
		requireDrain(t, b, &drainOptions{target: target{dryRun: true}}, drained, "", 0)
		time.Sleep(7 * time.Second) // drain-delay and the last packet are over
		requireDrain(t, b, &drainOptions{wait: true}, drained+"no packets arrive any more: the balancer can be stopped\n",
			"", quietTime)
	})
}

// TestDrainSelfUntilRestart checks that drain passes the flag on. The flag needs --self. With the
// flag, drain and its dry run succeed even without BGP, because segue-drain.service uses it on all hosts.
func TestDrainSelfUntilRestart(t *testing.T) {
	for _, untilRestart := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			b, o := &fakeBalancer{bgp: announcing()}, drainOptions{untilRestart: untilRestart}
			requireDrain(t, b, &o, "the balancer is drained: 1 route withdrawn\n", "", 0)
			if b.untilRestart != untilRestart {
				t.Errorf("until the restart: %t", b.untilRestart)
			}
		})
	}
	const nothing = "the balancer does not announce its VIPs: there is nothing to withdraw\n"
	synctest.Test(t, func(t *testing.T) {
		for _, dryRun := range []bool{true, false} {
			o := drainOptions{target: target{dryRun: dryRun}, untilRestart: true}
			requireDrain(t, &fakeBalancer{}, &o, nothing, "", 0)
		}
	})
	_, err := runSegue(t.Context(), "drain", "web/s1", "--until-restart")
	if err == nil || err.Error() != "--until-restart: only with --self" {
		t.Errorf("error %v", err)
	}
}

// TestDrainSelfWarns checks the warning about a peer without a session.
func TestDrainSelfWarns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBalancer{bgp: announcing()}
		b.bgp.Peers = append(b.bgp.Peers, bgp.Peer{Address: "192.0.2.2", State: "down"})
		requireDrain(t, b, &drainOptions{}, "the balancer is drained: 1 route withdrawn\n"+
			"warning: peer 192.0.2.2 has no session: it may keep earlier routes until they expire\n", "", 0)
	})
}

// TestInterruptedDrain checks that an interrupt ends the wait, but not the drain.
func TestInterruptedDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &fakeBalancer{bgp: announcing(), busy: time.Hour}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(2500*time.Millisecond, cancel)
		err := drainBalancer(ctx, &bytes.Buffer{}, b, &drainOptions{wait: true})
		const want = "interrupted: the last packet arrived 1s ago; the balancer stays drained"
		if err == nil || err.Error() != want || b.drained.IsZero() {
			t.Errorf("error %v, want %q; drained since %v", err, want, b.drained)
		}
	})
}

// TestDrainSelfWithoutBGP checks that a drain and its dry run fail if the balancer has no BGP.
func TestDrainSelfWithoutBGP(t *testing.T) {
	for _, o := range []drainOptions{{}, {target: target{dryRun: true}}} {
		if err := drainBalancer(t.Context(), &bytes.Buffer{}, &fakeBalancer{}, &o); err == nil {
			t.Errorf("%+v: no error", o)
		}
	}
}

// TestUndrainSelf checks that undrain tells how many routes are announced again.
func TestUndrainSelf(t *testing.T) {
	b := &fakeBalancer{bgp: announcing(), drained: time.Now()}
	for _, test := range []struct {
		dryRun, drained bool
		want            string
	}{
		{true, true, "dry run: the balancer announces all VIPs that can be served\n"},
		{false, false, "the balancer announces 1 of 3 routes\n"},
	} {
		var out bytes.Buffer
		err := undrainBalancer(t.Context(), &out, b, &drainOptions{target: target{dryRun: test.dryRun}})
		if err != nil || out.String() != test.want || b.drained.IsZero() == test.drained {
			t.Errorf("error %v, output %q, want %q; drained since %v", err, &out, test.want, b.drained)
		}
	}
}
