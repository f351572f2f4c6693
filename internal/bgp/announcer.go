// SPDX-License-Identifier: Apache-2.0

// Package bgp announces the VIPs of a balancer to routers. It announces a VIP while the balancer
// can serve it. The BGP speaker itself is a library.
package bgp

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/segue-lb/segue/internal/announce"
	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
)

// Announcer announces the VIPs of a balancer. Only the goroutine in Run uses its fields, except
// those that mu guards. Other goroutines may call the exported methods.
type Announcer struct {
	log        *slog.Logger
	file       announce.DrainFile
	forwarding Forwarding
	preserved  bool // the data path has worked without a break since the sessions of the process before
	plan       *Plan
	services   []balancer.ServiceState // nil: not known yet
	requests   chan request
	ended      chan struct{} // closed when nobody takes requests any more
	speaker    *speaker
	links      map[string]func() // the functions that stop the links, by interface
	heard      chan heard        // from these links
	usable     map[string]bool   // the links that could be used, by interface
	events     *events.Stream    // nil: nobody follows them

	attempt time.Duration // longestAttempt, except in tests
	retry   time.Duration // routeRetry, except in tests

	mu      sync.Mutex
	state   State                 // without Peers and Routes
	peers   map[string]*peerState // by name
	routes  map[netip.Prefix]*routeState
	stopped bool
}

// routeState is the route of a VIP or of an aggregate, and its history.
type routeState struct {
	Route
	of      *destination
	sent    route // as it was announced last
	damping announce.Damping
}

// request is a function for the goroutine in Run, and the channel for its result.
type request struct {
	do     func(context.Context) error
	result chan<- error
}

// Plan is a configuration with the passwords of its peers.
type Plan struct {
	bgp       *desired.BGP
	passwords desired.Passwords
}

// NewPlan returns the plan of a configuration.
func NewPlan(b *desired.BGP, passwords desired.Passwords) *Plan { return &Plan{b, passwords} }

// Forwarding tells whether the balancer forwards packets while no process runs.
type Forwarding struct {
	// EndsWithProcess: the data path ends with the process, even if the process is killed.
	EndsWithProcess bool
	// Works tells whether the instance has a data path now. It may be called at any time.
	Works func() (bool, error)
}

// New returns an announcer. Call New before the data path is attached. If a data path works
// already, an earlier process has left it. Then the data path has worked without a break, and peers
// may keep the routes. New returns an error if it cannot find out whether the balancer is drained.
func New(cfg *desired.Balancer, plan *Plan, forwarding Forwarding, log *slog.Logger) (*Announcer, error) {
	a := &Announcer{
		log: log, file: announce.DrainFileOf(&cfg.Node), forwarding: forwarding, plan: plan,
		requests: make(chan request), ended: make(chan struct{}), attempt: longestAttempt, retry: routeRetry,
		state: State{
			ASN: plan.bgp.ASN, RouterID: plan.bgp.RouterID.String(),
			DrainDelay: plan.bgp.DrainDelay.Seconds(), DrainShifts: plan.bgp.Drain != nil,
		},
		peers: map[string]*peerState{}, routes: map[netip.Prefix]*routeState{},
		links: map[string]func(){}, heard: make(chan heard), usable: map[string]bool{},
	}
	if !forwarding.EndsWithProcess {
		// On an error, preserved is false, and peers remove the routes until they get new ones.
		// That is no reason to refuse the start.
		a.preserved, _ = forwarding.Works()
	}
	var err error
	if a.state.Drained, err = a.file.Since(); err != nil {
		return nil, err
	}
	return a, nil
}

// PublishTo makes the announcer publish its events. Call it before Run.
func (a *Announcer) PublishTo(stream *events.Stream) { a.events = stream }

// Run announces the VIPs that can be served until the context ends. The channel services tells what
// each service can do. Run begins when it gets the first value, because the data path is attached
// then. When Run ends, peers keep the routes if the data path continues. Run returns an error if
// the speaker cannot be started.
func (a *Announcer) Run(ctx context.Context, services <-chan []balancer.ServiceState) error {
	defer close(a.ended)
	select {
	case a.services = <-services:
	case <-ctx.Done():
		return nil
	}
	var err error
	a.speaker, err = startSpeaker(context.WithoutCancel(ctx), a.plan.bgp, !a.forwarding.EndsWithProcess, a.log)
	if err != nil {
		return err
	}
	defer a.stop()
	if a.forwarding.EndsWithProcess {
		a.log.Warn("the data path ends with the process: bgp peers remove the routes whenever it ends")
	}
	a.warnOfDrain()
	due := a.update(time.Now()) // before there are sessions, so that they begin with all routes
	noPeers := &Plan{bgp: &desired.BGP{}}
	if err := a.follow(ctx, noPeers); err != nil { // begins to open all sessions
		return err
	}
	a.preserved = !a.forwarding.EndsWithProcess // from now on, this process has a data path
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		if next := earlier(due, a.openAnew(ctx, time.Now())); next.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(time.Until(next))
		}
		select {
		case <-ctx.Done():
			return nil
		case a.services = <-services:
		case event := <-a.speaker.events:
			a.takeEvent(ctx, event)
		case h := <-a.heard:
			a.takeHeard(ctx, h)
		case r := <-a.requests:
			r.result <- r.do(ctx)
		case <-timer.C:
		}
		due = a.update(time.Now())
	}
}

// warnOfDrain logs that the balancer is drained since an earlier process.
func (a *Announcer) warnOfDrain() {
	const undrain = "segue undrain --self"
	switch {
	case a.state.Drained == nil:
	case a.plan.bgp.Drain != nil:
		a.log.Warn("the balancer is drained: its routes are less preferred", "since", *a.state.Drained,
			"undrain", undrain)
	default:
		a.log.Warn("the balancer is drained: no route is announced", "since", *a.state.Drained,
			"undrain", undrain)
	}
}

// earlier returns the earlier one of two times. A zero time stands for never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// routeRetry is the time until an announcement or withdrawal that the library has refused is tried
// again. It is tried earlier if the services change.
const routeRetry = time.Minute

// stop ends the sessions. From then on, State does not ask the speaker. Peers keep the routes if
// the data path goes on without the process, or if stop cannot find that out. They remove the
// routes if the data path ends with the process, or is gone because its interface was removed.
func (a *Announcer) stop() {
	for _, stop := range a.links {
		stop()
	}
	a.mu.Lock()
	a.stopped = true
	a.mu.Unlock()
	works, err := a.forwarding.Works()
	switch {
	case a.forwarding.EndsWithProcess: // the sessions were opened without graceful restart
	case err != nil:
		a.log.Warn("cannot find out whether the data path works: bgp peers keep the routes", "error", err)
		works = true
	case !works:
		a.log.Error("the data path is gone: bgp peers are told to remove the routes")
	}
	// A drained balancer may be stopped for good. So peers do not keep its routes, which shift traffic
	// only while there are others (RFC 8326, section 4).
	a.speaker.stop(works && !a.forwarding.EndsWithProcess && a.drain() == nil)
}

// drain returns the attributes that routes have because the balancer is drained. It returns nil if
// the balancer is not drained, or if the drain withdraws the routes.
func (a *Announcer) drain() *desired.RouteAttributes {
	if a.state.Drained == nil {
		return nil
	}
	return a.plan.bgp.Drain
}

var errEnded = errors.New("the announcer has ended")

// ask makes the goroutine in Run call a function, and returns its result. If Run has ended, ask
// returns errEnded.
func (a *Announcer) ask(ctx context.Context, do func(context.Context) error) error {
	result := make(chan error, 1)
	select {
	case a.requests <- request{do: do, result: result}:
		return <-result
	case <-a.ended:
		return errEnded
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Apply makes a running announcer follow another configuration. If the configuration of a peer has
// not changed, its session continues. Apply returns an error if a peer cannot be added or removed.
// No valid configuration causes that.
func (a *Announcer) Apply(ctx context.Context, plan *Plan) error {
	return a.ask(ctx, func(ctx context.Context) error {
		before := a.plan
		a.plan = plan
		a.mu.Lock()
		a.state.DrainDelay, a.state.DrainShifts = plan.bgp.DrainDelay.Seconds(), plan.bgp.Drain != nil
		a.mu.Unlock()
		return a.follow(ctx, before)
	})
}

// update announces and withdraws routes, by the present state of the services. It returns when it
// must be called again even if no state changes until then. Zero means never.
func (a *Announcer) update(now time.Time) (next time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := destinationsOf(a.plan.bgp, a.services, a.drain())
	for prefix, r := range a.routes {
		if all[prefix] != nil {
			continue
		}
		// The route is no longer configured. It is forgotten when it is withdrawn.
		if retry := a.withdraw(r, now, ""); !retry.IsZero() {
			next = earlier(next, retry)
			continue
		}
		delete(a.routes, prefix)
	}
	for _, prefix := range slices.SortedFunc(maps.Keys(all), netip.Prefix.Compare) {
		r := a.routes[prefix]
		if r == nil {
			r = &routeState{Route: Route{Since: now}}
			a.routes[prefix] = r
		}
		r.take(all[prefix])
		next = earlier(next, a.updateRoute(r, now))
	}
	return next
}

// take gives a route the properties of its destination.
func (r *routeState) take(d *destination) {
	r.of, r.Prefix, r.Services = d, d.prefix.String(), d.services
	r.Prepend, r.MED, r.LocalPref = d.prepend, d.med.pointer(), d.localPref.pointer()
	r.Communities = []string{}
	for _, c := range d.communities {
		r.Communities = append(r.Communities, string(c))
	}
}

// updateRoute announces a route if a peer takes it, it is served, no drain withdraws it and the
// hold-down time is over. If one of the first three conditions is not met, it withdraws the route. A
// hold-down only delays a new announcement. If the attributes of an announced route have
// changed, updateRoute announces the route again. It returns when it must be called again, or zero.
func (a *Announcer) updateRoute(r *routeState, now time.Time) (next time.Time) {
	due := now // when the route may be announced
	isServed := r.of.service.MayBe(r.Announced)
	if isServed { // also while the balancer is drained, because the hold-down time passes meanwhile
		due = r.damping.Due(now, a.plan.bgp.HoldDown)
	}
	switch {
	case !r.of.hasPeer:
		return a.withdraw(r, now, NoPeer)
	case !isServed:
		return a.withdrawUnserved(r, now)
	case a.state.Drained != nil && a.drain() == nil:
		return a.withdraw(r, now, Drained)
	case r.Announced && r.of.equals(r.sent):
		return time.Time{}
	case !r.Announced && due.After(now):
		if r.Reason != HeldDown {
			a.log.Info("route is held down: one of its services can serve again", "prefix", r.Prefix,
				"services", desired.Names(r.Services), "until", due.Format(time.RFC3339))
		}
		r.Reason = HeldDown
		return due
	}
	return a.announce(r, now)
}

// withdrawUnserved withdraws a route that is not served, as withdraw does.
func (a *Announcer) withdrawUnserved(r *routeState, now time.Time) (retry time.Time) {
	wasAnnounced, reason := r.Announced, NotServed
	if r.of.service.IsUnchecked {
		reason = Unchecked
	}
	retry = a.withdraw(r, now, reason)
	if wasAnnounced && !r.Announced {
		r.damping.Withdrawn(now, a.plan.bgp.HoldDown)
	}
	if !r.of.service.IsUnchecked { // certainly not served, so a hold-down time begins anew
		r.damping.Unserved()
	}
	return retry
}

// announce announces a route, or changes its attributes. It returns zero, or if that has failed,
// the time of the next attempt.
func (a *Announcer) announce(r *routeState, now time.Time) (retry time.Time) {
	if err := a.speaker.announce(r.of.route); err != nil {
		a.log.Error("route cannot be announced", "prefix", r.Prefix, "error", err)
		return now.Add(a.retry)
	}
	r.sent = r.of.route
	if !r.Announced {
		r.Announced, r.Since, r.Reason = true, now, ""
		r.damping.Announced(now)
		a.events.Publish(events.Event{Kind: events.RouteAnnounced, Prefix: r.Prefix})
		a.log.Info("route announced", "prefix", r.Prefix, "services", desired.Names(r.Services))
	}
	return time.Time{}
}

// withdraw withdraws a route if it is announced, and notes the reason why it is not announced. The
// reason is empty if the route is no longer configured. withdraw returns zero, or if the
// withdrawal has failed, the time of the next attempt.
func (a *Announcer) withdraw(r *routeState, now time.Time, reason Reason) (retry time.Time) {
	wasAnnounced, before := r.Announced, r.Reason
	if wasAnnounced {
		if err := a.speaker.withdraw(r.sent); err != nil {
			a.log.Error("route cannot be withdrawn", "prefix", r.Prefix, "error", err)
			return now.Add(a.retry)
		}
		r.Announced, r.Since = false, now
	}
	r.Reason = reason
	if wasAnnounced {
		a.events.Publish(events.Event{
			Kind: events.RouteWithdrawn, Prefix: r.Prefix, Reason: reason.text(),
		})
	}
	a.logReason(r, wasAnnounced, before)
	return time.Time{}
}

// logReason logs the reason of a route that is not announced, if the route was withdrawn now, or if
// the reason differs from the one before. HeldDown counts there as NotServed. For a drain or the
// end of a route's configuration, logReason logs only withdrawals.
func (a *Announcer) logReason(r *routeState, wasAnnounced bool, before Reason) {
	reason, names := r.Reason, desired.Names(r.Services)
	switch {
	case reason == NotServed && wasAnnounced:
		a.log.Error("route WITHDRAWN: none of its services can serve", "prefix", r.Prefix, "services", names)
	case reason == NotServed && before != NotServed && before != HeldDown:
		a.log.Error("route is NOT announced: none of its services can serve", "prefix", r.Prefix,
			"services", names)
	case reason == Unchecked && before != Unchecked:
		a.log.Info("route is not announced yet: no server has passed a health check", "prefix", r.Prefix,
			"services", names)
	case reason == NoPeer && before != NoPeer:
		a.log.Error("route is NOT announced: no peer takes routes of its family", "prefix", r.Prefix,
			"services", names)
	case !wasAnnounced: // nothing more to log
	case reason == Drained:
		a.log.Info("route withdrawn: the balancer is drained", "prefix", r.Prefix, "services", names)
	default:
		a.log.Info("route withdrawn: it is no longer configured", "prefix", r.Prefix, "services", names)
	}
}

// Drain withdraws all routes, or makes them less preferred if the configuration says so. If
// untilRestart is true, the drain ends with the process. Otherwise it lasts until Undrain, if the
// balancer has a directory for its state. If the file about the drain cannot be written there, Drain
// returns an error and changes nothing.
func (a *Announcer) Drain(ctx context.Context, untilRestart bool) error {
	by := events.ActorOf(ctx)
	return a.ask(ctx, func(context.Context) error {
		if !untilRestart {
			if err := a.file.Make(); err != nil {
				return err
			}
		}
		if a.state.Drained == nil {
			now := time.Now()
			if a.plan.bgp.Drain != nil {
				a.log.Info("the balancer is drained: its routes become less preferred", "by", by)
			}
			a.setDrained(&now, events.Drained, by)
		}
		return nil
	})
}

// Undrain ends a drain. If the file about the drain cannot be removed, Undrain returns an error and
// changes nothing.
func (a *Announcer) Undrain(ctx context.Context) error {
	by := events.ActorOf(ctx)
	return a.ask(ctx, func(context.Context) error {
		if a.state.Drained == nil {
			return nil
		}
		if err := a.file.Remove(); err != nil {
			return err
		}
		a.log.Info("the balancer is no longer drained", "by", by)
		a.setDrained(nil, events.Undrained, by)
		return nil
	})
}

// setDrained begins a drain at the time since, or ends it if since is nil. kind is the event to
// publish, and by is the user who has asked for it.
func (a *Announcer) setDrained(since *time.Time, kind events.Kind, by string) {
	a.mu.Lock()
	a.state.Drained = since
	a.mu.Unlock()
	a.update(time.Now())
	a.events.Publish(events.Event{Kind: kind, By: by})
}

// State returns the present state. It returns an error if the speaker cannot list its sessions.
func (a *Announcer) State(ctx context.Context) (*State, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	state := a.state
	state.Peers, state.Routes = []Peer{}, []Route{}
	sessions := map[netip.Addr]session{}
	if len(a.peers) > 0 && !a.stopped { // otherwise there is no speaker
		var err error
		if sessions, err = a.speaker.sessions(ctx); err != nil {
			return nil, err
		}
	}
	for _, peer := range slices.SortedFunc(maps.Values(a.peers), byAddress) {
		p := peer.Peer
		if s, ok := sessions[peer.address]; ok && p.IsEstablished() {
			p.LocalAddress, p.HoldTime = s.localAddress.String(), s.holdTime.Seconds()
			p.Prefixes = s.prefixes
		}
		state.Peers = append(state.Peers, p)
	}
	for _, r := range a.routes {
		route := r.Route
		route.Peers, route.Established = a.peersOf(desired.FamilyOf(r.of.prefix.Addr()))
		state.Routes = append(state.Routes, route)
	}
	slices.SortFunc(state.Routes, func(a, b Route) int { return cmp.Compare(a.Prefix, b.Prefix) })
	return &state, nil
}
