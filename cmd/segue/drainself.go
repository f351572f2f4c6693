// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/bgp"
	"github.com/segue-lb/segue/internal/l2"
	"github.com/segue-lb/segue/internal/wording"
)

const (
	// selfInterval is the time between two requests for the number of packets that have arrived.
	selfInterval = time.Second
	// quietTime is the time without packets after which the balancer can be stopped.
	quietTime = 2 * selfInterval
)

// selfClient asks a balancer about itself.
type selfClient interface {
	Self(context.Context) (*api.SelfState, error)
	ChangeSelf(context.Context, api.SelfChange) (*api.SelfState, error)
}

// drainSelf withdraws the routes of a balancer, or makes them less preferred, or leaves its VIPs to
// other balancers. Then it waits until no packets arrive any more.
func drainSelf(ctx context.Context, out io.Writer, o *drainOptions) error {
	client, err := balancerOn(ctx, o.instance)
	if err != nil {
		return err
	}
	return drainBalancer(ctx, out, client, o)
}

// drainBalancer is drainSelf with a client.
func drainBalancer(ctx context.Context, out io.Writer, client selfClient, o *drainOptions) error {
	before, err := client.Self(ctx)
	if err != nil {
		return err
	}
	// segue-drain.service drains with --until-restart, also on hosts without BGP or L2. There it must not
	// fail. Without this flag, the balancer refuses the drain below.
	if before.BGP == nil && before.L2 == nil && o.untilRestart {
		_, err := fmt.Fprintln(out, "the balancer does not announce its VIPs: there is nothing to withdraw")
		return err
	}
	if o.dryRun {
		return previewDrain(out, before)
	}
	drain := api.SelfChange{Self: api.Self{Drained: true}, UntilRestart: o.untilRestart}
	state, err := client.ChangeSelf(ctx, drain)
	if err != nil {
		return err
	}
	if before.Drained {
		fmt.Fprintln(out, "the balancer is drained already")
	} else {
		fmt.Fprintf(out, "the balancer is drained: %s\n", drainEffect(before))
	}
	if state.BGP != nil {
		warnOfDeafPeers(out, state.BGP)
	}
	if !o.wait {
		return nil
	}
	return awaitSilence(ctx, out, client, state)
}

// previewDrain prints what a drain would do. It returns an error if the balancer does not announce
// its VIPs.
func previewDrain(out io.Writer, state *api.SelfState) error {
	if state.BGP == nil && state.L2 == nil {
		return errors.New("the balancer does not announce its VIPs, so it cannot be drained")
	}
	if state.Drained {
		_, err := fmt.Fprintln(out, "the balancer is drained already")
		return err
	}
	_, err := fmt.Fprintf(out, "dry run: the balancer is drained: %s\n", drainEffect(state))
	return err
}

// drainEffect says what a drain does to the announced VIPs of a balancer.
func drainEffect(state *api.SelfState) string {
	if state.L2 != nil {
		return wording.Count(answeredVIPs(state.L2), "VIP") + " left to other balancers"
	}
	routes := wording.Count(announcedRoutes(state.BGP), "route")
	if state.BGP != nil && state.BGP.DrainShifts {
		return routes + " less preferred"
	}
	return routes + " withdrawn"
}

// announcedRoutes returns how many routes are announced: 0 if state is nil (without BGP).
func announcedRoutes(state *bgp.State) (announced int) {
	if state == nil {
		return 0
	}
	for _, r := range state.Routes {
		if r.Announced {
			announced++
		}
	}
	return announced
}

// answeredVIPs returns for how many VIPs the balancer answers.
func answeredVIPs(state *l2.LinkState) (answered int) {
	for _, v := range state.VIPs {
		if v.Answers {
			answered++
		}
	}
	return answered
}

// warnOfDeafPeers warns of peers without a session: the balancer cannot withdraw the routes that
// they have from an earlier session.
func warnOfDeafPeers(out io.Writer, state *bgp.State) {
	for _, p := range state.Peers {
		if !p.IsEstablished() {
			fmt.Fprintf(out, "warning: peer %s has no session: it may keep earlier routes until they expire\n", p.Address)
		}
	}
}

// awaitSilence waits until bgp.drain-delay has passed since the drain, so that routers use other
// routes, and until no packets have arrived for quietTime.
func awaitSilence(ctx context.Context, out io.Writer, client selfClient, state *api.SelfState) error {
	packets, changed := state.Packets, time.Now() // the number of packets, and when it last changed
	earliest := changed
	if state.BGP != nil && state.BGP.Drained != nil {
		delay := time.Duration(state.BGP.DrainDelay * float64(time.Second))
		// If the clock was set back since the drain, the rest would be longer than the delay.
		rest := min(delay, time.Until(state.BGP.Drained.Add(delay)))
		earliest = changed.Add(rest)
	}
	for {
		select {
		case <-time.After(selfInterval):
		case <-ctx.Done():
			return stillBusy(ctx, time.Since(changed))
		}
		now, err := client.Self(ctx)
		switch {
		case ctx.Err() != nil:
			return stillBusy(ctx, time.Since(changed))
		case err != nil:
			return err
		case !now.Drained:
			return errors.New("somebody else has undrained the balancer")
		}
		switch {
		case now.Uncounted != "":
			fmt.Fprintf(out, "the packets of the switch cannot be counted: %s\n", now.Uncounted)
			changed = time.Now()
		case now.Packets < packets: // the switch has restarted
			packets, changed = now.Packets, time.Now()
		case now.Packets > packets:
			fmt.Fprintf(out, "%s in the last second\n", wording.Count(int(now.Packets-packets), "packet"))
			packets, changed = now.Packets, time.Now()
		}
		if time.Since(changed) >= quietTime && !time.Now().Before(earliest) {
			_, err := fmt.Fprintln(out, "no packets arrive any more: the balancer can be stopped")
			return err
		}
	}
}

// stillBusy returns the error of a wait that the context has ended.
func stillBusy(ctx context.Context, quiet time.Duration) error {
	left := fmt.Sprintf("the last packet arrived %s ago", quiet.Round(time.Second))
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("--timeout has passed: %s; the balancer stays drained", left)
	}
	return fmt.Errorf("interrupted: %s; the balancer stays drained", left)
}

// undrainSelf announces the routes of a balancer again.
func undrainSelf(ctx context.Context, out io.Writer, o *drainOptions) error {
	client, err := balancerOn(ctx, o.instance)
	if err != nil {
		return err
	}
	return undrainBalancer(ctx, out, client, o)
}

// undrainBalancer is undrainSelf with a client.
func undrainBalancer(ctx context.Context, out io.Writer, client selfClient, o *drainOptions) error {
	if o.dryRun {
		_, err := fmt.Fprintln(out, "dry run: the balancer announces all VIPs that can be served")
		return err
	}
	state, err := client.ChangeSelf(ctx, api.SelfChange{})
	if err != nil {
		return err
	}
	if state.L2 != nil { // other balancers have to learn first that this one can answer again
		_, err = fmt.Fprintf(out, "the balancer takes its share of %s\n", wording.Count(len(state.L2.VIPs), "VIP"))
		return err
	}
	_, err = fmt.Fprintf(out, "the balancer announces %d of %s\n",
		announcedRoutes(state.BGP), wording.Count(len(state.BGP.Routes), "route"))
	return err
}
