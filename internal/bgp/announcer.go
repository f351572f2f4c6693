// SPDX-License-Identifier: Apache-2.0

// Package bgp announces the VIPs of a balancer to routers. A VIP is announced while the balancer can
// serve it. The BGP speaker itself is a library.
package bgp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/segue-lb/segue/internal/atomicfile"
	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
)

// Announcer announces the VIPs of a balancer. The goroutine in Run owns all fields, except those
// behind mu. Other goroutines may call the exported methods.
type Announcer struct {
	log        *slog.Logger
	file       string // tells that the balancer is drained; empty: it forgets that
	forwarding Forwarding
	preserved  bool // the data path has worked since the sessions before
	plan       *Plan
	services   []balancer.ServiceState // nil: not known yet
	requests   chan request
	ended      chan struct{} // closed when nobody takes requests any more
	speaker    *speaker
	events     *events.Stream // nil: nobody follows them

	// attempt is how long a session may take to be established. Then it is opened anew.
	attempt time.Duration
	// retry is the time after which a route is announced or withdrawn that could not be.
	retry time.Duration

	mu      sync.Mutex
	state   State // without what the speaker knows
	peers   map[netip.Addr]*peerState
	routes  map[netip.Addr]*routeState
	stopped bool
}

// peerState is the state of a peer's session.
type peerState struct {
	Peer
	opened time.Time // when the speaker began to open the session; of the goroutine in Run
}

// routeState is a VIP's route and its history.
type routeState struct {
	Route
	vip     *vip
	sent    route // what was announced last
	damping damping
}

// request is a change, and the channel for the result.
type request struct {
	make   func(context.Context) error
	result chan<- error
}

// Plan is a configuration with the passwords of its peers.
type Plan struct {
	bgp       *desired.BGP
	passwords desired.Passwords
}

// NewPlan returns the plan of a configuration.
func NewPlan(b *desired.BGP, passwords desired.Passwords) *Plan { return &Plan{b, passwords} }

// Forwarding tells whether packets are forwarded while no process runs.
type Forwarding struct {
	// EndsWithProcess: the data path ends with the process, in whatever way that ends.
	EndsWithProcess bool
	// Works tells whether the instance has a data path now. It can be asked at any time.
	Works func() (bool, error)
}

// DrainedFile returns the path of the file that tells that an instance is drained. It is empty if
// the balancer has no directory for its state.
func DrainedFile(node *desired.BalancerNode) string {
	if node.State == "" {
		return ""
	}
	return filepath.Join(node.State, node.Instance+".drained")
}

// New returns an announcer. If a data path works already, an earlier process has left it, and it has
// worked ever since: peers then keep its routes. So call New before the data path is attached. New
// returns an error if it cannot find out whether the balancer is drained.
func New(cfg *desired.Balancer, plan *Plan, forwarding Forwarding, log *slog.Logger) (*Announcer, error) {
	a := &Announcer{
		log: log, file: DrainedFile(&cfg.Node), forwarding: forwarding, plan: plan,
		requests: make(chan request), ended: make(chan struct{}), attempt: longestAttempt, retry: routeRetry,
		state: State{
			ASN: plan.bgp.ASN, RouterID: plan.bgp.RouterID.String(),
			DrainDelay: plan.bgp.DrainDelay.Seconds(),
		},
		peers: map[netip.Addr]*peerState{}, routes: map[netip.Addr]*routeState{},
	}
	if !forwarding.EndsWithProcess {
		// An error is no reason to refuse the start. Peers then remove the routes until they get new ones.
		a.preserved, _ = forwarding.Works()
	}
	if a.file == "" {
		return a, nil
	}
	info, err := os.Stat(a.file)
	switch {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("find out whether the balancer is drained: %w", err)
	default:
		since := info.ModTime()
		a.state.Drained = &since
	}
	return a, nil
}

// PublishTo makes the announcer publish its events. Call it before Run.
func (a *Announcer) PublishTo(stream *events.Stream) { a.events = stream }

// Run announces the VIPs that can be served, as the channel tells, until the context ends. It
// begins when the channel tells for the first time: the data path is attached then. In the end,
// peers keep the routes if the data path continues. Run returns an error if the speaker cannot be
// started.
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
	if a.state.Drained != nil {
		a.log.Warn("the balancer is drained: no route is announced", "since", *a.state.Drained,
			"undrain", "segue undrain --self")
	}
	due := a.update(time.Now()) // before there are sessions, so that they begin with all routes
	if err := a.follow(ctx, &Plan{bgp: &desired.BGP{}}); err != nil {
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
		case r := <-a.requests:
			r.result <- r.make(ctx)
		case <-timer.C:
		}
		due = a.update(time.Now())
	}
}

// earlier returns the earlier one of two times. A zero time stands for never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// longestAttempt is how long a session may take to be established. It is much longer than a router
// takes, and much shorter than the time for which peers keep routes. The library itself would wait
// for four minutes for a router that accepts a connection and says nothing, as when the router
// has lost it.
const longestAttempt = 20 * time.Second

// routeRetry is the time until a route is announced or withdrawn that the library has refused. A
// change of the services ends the wait.
const routeRetry = time.Minute

// openAnew opens sessions anew that have taken too long. It returns when it must be called again, or
// zero.
func (a *Announcer) openAnew(ctx context.Context, now time.Time) (next time.Time) {
	for i := range a.plan.bgp.Peers {
		p := &a.plan.bgp.Peers[i]
		state := a.peers[p.Address] // only this goroutine changes it
		if state.IsEstablished() {
			continue
		}
		if !now.Before(state.opened.Add(a.attempt)) {
			a.reopen(ctx, p)
		}
		next = earlier(next, state.opened.Add(a.attempt))
	}
	return next
}

// reopen begins to open the session with a peer anew. It does nothing if the session is established,
// which an event is going to tell: its end would make the peer remove the routes.
func (a *Announcer) reopen(ctx context.Context, p *desired.BGPPeer) {
	a.peers[p.Address].opened = time.Now()
	sessions, err := a.speaker.sessions(ctx)
	if _, isEstablished := sessions[p.Address]; isEstablished {
		return
	}
	err = errors.Join(err, a.speaker.removePeer(ctx, p.Address),
		a.speaker.addPeer(ctx, p, a.plan.passwords[p.Address], a.preserved))
	if err != nil {
		a.log.Error("bgp session cannot be opened again", "peer", p.Address, "error", err)
	}
}

// stop ends the sessions, and refuses further questions to the speaker. Peers must not keep the
// routes of a data path that is gone, as when its interface was removed.
func (a *Announcer) stop() {
	a.mu.Lock()
	a.stopped = true
	a.mu.Unlock()
	works, err := a.forwarding.Works()
	switch {
	case a.forwarding.EndsWithProcess: // peers know, and keep nothing
	case err != nil:
		a.log.Warn("cannot find out whether the data path works: bgp peers keep the routes", "error", err)
		works = true
	case !works:
		a.log.Error("the data path is gone: bgp peers are told to remove the routes")
	}
	a.speaker.stop(works && !a.forwarding.EndsWithProcess)
}

var errEnded = errors.New("the announcer has ended")

// ask makes the goroutine in Run do something. The context may outlive Run: ask then returns
// errEnded.
func (a *Announcer) ask(ctx context.Context, do func(context.Context) error) error {
	result := make(chan error, 1)
	select {
	case a.requests <- request{do, result}:
		return <-result
	case <-a.ended:
		return errEnded
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Apply makes a running announcer follow another configuration. Sessions whose peers have not
// changed continue. It returns an error if a peer cannot be added or removed, which no valid
// configuration causes.
func (a *Announcer) Apply(ctx context.Context, plan *Plan) error {
	return a.ask(ctx, func(ctx context.Context) error {
		before := a.plan
		a.plan = plan
		a.mu.Lock()
		a.state.DrainDelay = plan.bgp.DrainDelay.Seconds()
		a.mu.Unlock()
		return a.follow(ctx, before)
	})
}

// follow adds, removes and changes peers, from those of the plan before.
func (a *Announcer) follow(ctx context.Context, before *Plan) error {
	old := map[netip.Addr]desired.BGPPeer{}
	for _, p := range before.bgp.Peers {
		old[p.Address] = p
	}
	var problems error
	for i := range a.plan.bgp.Peers {
		p := &a.plan.bgp.Peers[i]
		password := a.plan.passwords[p.Address]
		was, exists := old[p.Address]
		delete(old, p.Address)
		if exists && reflect.DeepEqual(was, *p) && password == before.passwords[p.Address] {
			continue
		}
		if exists {
			a.log.Info("bgp session is reset: the configuration of the peer has changed", "peer", p.Address)
			problems = errors.Join(problems, a.speaker.removePeer(ctx, p.Address))
		}
		problems = errors.Join(problems, a.speaker.addPeer(ctx, p, password, a.preserved))
		a.mu.Lock()
		now := time.Now()
		a.peers[p.Address] = &peerState{
			Peer{Address: p.Address.String(), ASN: p.ASN, State: down, Since: now}, now,
		}
		a.mu.Unlock()
	}
	for address := range old {
		problems = errors.Join(problems, a.speaker.removePeer(ctx, address))
		a.mu.Lock()
		delete(a.peers, address)
		a.mu.Unlock()
		a.log.Info("bgp peer is removed", "peer", address)
	}
	return problems
}

// takeEvent follows the state of a session. When a session has ended, its peer is added anew, so
// that the next session tells the peer to keep the routes: for the library, only the first session
// after a restart does.
func (a *Announcer) takeEvent(ctx context.Context, e sessionEvent) {
	a.mu.Lock()
	p := a.peers[e.peer]
	if p == nil || p.IsEstablished() == e.isEstablished {
		a.mu.Unlock()
		return
	}
	e.keepsRoutes = e.keepsRoutes && !a.forwarding.EndsWithProcess
	p.Since, p.State, p.KeepsRoutes = time.Now(), down, e.keepsRoutes && e.isEstablished
	if e.isEstablished {
		p.State = established
		p.Sessions++
	} else {
		p.Reason = e.reason
	}
	a.mu.Unlock()
	if e.isEstablished {
		a.events.Publish(events.Event{Kind: events.SessionUp, Peer: e.peer.String()})
		a.log.Info("bgp session established", "peer", e.peer, "asn", p.ASN)
		if !e.keepsRoutes && !a.forwarding.EndsWithProcess {
			a.log.Warn("bgp peer does not support graceful restarts: it removes the routes whenever the "+
				"process restarts", "peer", e.peer)
		}
		return
	}
	a.events.Publish(events.Event{Kind: events.SessionDown, Peer: e.peer.String(), Reason: e.reason})
	a.log.Warn("bgp session ended", "peer", e.peer, "asn", p.ASN, "reason", e.reason)
	i := slices.IndexFunc(a.plan.bgp.Peers, func(p desired.BGPPeer) bool { return p.Address == e.peer })
	if i >= 0 {
		a.reopen(ctx, &a.plan.bgp.Peers[i])
	}
}

// update announces and withdraws routes. It returns when it must be called again, or zero.
func (a *Announcer) update(now time.Time) (next time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	vips := vipsOf(a.plan.bgp, a.services)
	for address, r := range a.routes {
		if vips[address] != nil {
			continue
		}
		if retry := a.withdraw(r, now, ""); !retry.IsZero() {
			next = earlier(next, retry)
			continue
		}
		delete(a.routes, address)
	}
	for _, address := range slices.SortedFunc(maps.Keys(vips), netip.Addr.Compare) {
		r := a.routes[address]
		if r == nil {
			r = &routeState{Route: Route{Since: now}}
			a.routes[address] = r
		}
		r.take(vips[address])
		next = earlier(next, a.updateRoute(r, now))
	}
	return next
}

func (r *routeState) take(v *vip) {
	r.vip, r.Prefix, r.Services = v, v.prefix().String(), v.services
	r.Communities = []string{}
	for _, c := range v.communities {
		r.Communities = append(r.Communities, string(c))
	}
}

// updateRoute announces or withdraws a route. It returns when it must be called again, or zero.
func (a *Announcer) updateRoute(r *routeState, now time.Time) (next time.Time) {
	holdDown := a.plan.bgp.HoldDown
	due := now
	// While results of health checks are missing, a route neither begins nor ends.
	isServed := r.vip.isServed || r.vip.isUnchecked && r.Announced
	if isServed { // also while the balancer is drained
		due = r.damping.due(now, holdDown)
	}
	switch {
	case !r.vip.hasPeer:
		return a.withdraw(r, now, NoPeer)
	case !isServed:
		wasAnnounced, reason := r.Announced, NotServed
		if r.vip.isUnchecked {
			reason = Unchecked
		}
		retry := a.withdraw(r, now, reason)
		if wasAnnounced && !r.Announced {
			r.damping.withdrawn(now, holdDown)
		}
		if !r.vip.isUnchecked {
			r.damping.served = time.Time{}
		}
		return retry
	case a.state.Drained != nil:
		return a.withdraw(r, now, Drained)
	case r.Announced && r.vip.equals(r.sent):
		return time.Time{}
	case !r.Announced:
		if due.After(now) {
			if r.Reason != HeldDown {
				a.log.Info("route is held down: a service of the VIP can serve again", "prefix", r.Prefix,
					"services", desired.Names(r.Services), "until", due.Format(time.RFC3339))
			}
			r.Reason = HeldDown
			return due
		}
	}
	if err := a.speaker.announce(r.vip.route); err != nil {
		a.log.Error("route cannot be announced", "prefix", r.Prefix, "error", err)
		return now.Add(a.retry)
	}
	r.sent = r.vip.route
	if !r.Announced {
		r.Announced, r.Since, r.Reason, r.damping.announced = true, now, "", now
		a.events.Publish(events.Event{Kind: events.RouteAnnounced, Prefix: r.Prefix})
		a.log.Info("route announced", "prefix", r.Prefix, "services", desired.Names(r.Services))
	}
	return time.Time{}
}

// withdraw withdraws a route, unless it is not announced. An empty reason means that the VIP was
// removed from the configuration. It returns zero, or when it must be called again because it has
// failed.
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
	names := desired.Names(r.Services)
	if wasAnnounced {
		a.events.Publish(events.Event{
			Kind: events.RouteWithdrawn, Prefix: r.Prefix, Reason: reason.text(),
		})
	}
	switch {
	case reason == NotServed && wasAnnounced:
		a.log.Error("route WITHDRAWN: no service of the VIP can serve", "prefix", r.Prefix, "services", names)
	case reason == NotServed && before != NotServed && before != HeldDown:
		a.log.Error("route is NOT announced: no service of the VIP can serve", "prefix", r.Prefix,
			"services", names)
	case reason == Unchecked && before != Unchecked:
		a.log.Info("route is not announced yet: no server has passed a health check", "prefix", r.Prefix,
			"services", names)
	case reason == NoPeer && before != NoPeer:
		a.log.Error("route is NOT announced: no peer takes routes of the VIP's family", "prefix", r.Prefix,
			"services", names)
	case !wasAnnounced:
	case reason == Drained:
		a.log.Info("route withdrawn: the balancer is drained", "prefix", r.Prefix, "services", names)
	default:
		a.log.Info("route withdrawn: the VIP is no longer configured", "prefix", r.Prefix, "services", names)
	}
	return time.Time{}
}

// Drain withdraws all routes. It holds across restarts, unless it is wanted until the next restart
// only. It returns an error, and changes nothing, if it cannot store that.
func (a *Announcer) Drain(ctx context.Context, untilRestart bool) error {
	by := events.ActorOf(ctx)
	return a.ask(ctx, func(context.Context) error {
		if !untilRestart {
			if err := a.store(); err != nil {
				return fmt.Errorf("store that the balancer is drained: %w", err)
			}
		}
		if a.state.Drained == nil {
			now := time.Now()
			a.setDrained(&now, events.Drained, by)
		}
		return nil
	})
}

// Undrain ends a drain. It returns an error, and changes nothing, if it cannot store that.
func (a *Announcer) Undrain(ctx context.Context) error {
	by := events.ActorOf(ctx)
	return a.ask(ctx, func(context.Context) error {
		if a.state.Drained == nil {
			return nil
		}
		if err := os.Remove(a.file); a.file != "" && err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("store that the balancer is no longer drained: %w", err)
		}
		a.log.Info("the balancer is no longer drained", "by", by)
		a.setDrained(nil, events.Undrained, by)
		return nil
	})
}

// setDrained announces or withdraws the routes, which somebody has asked for.
func (a *Announcer) setDrained(since *time.Time, kind events.Kind, by string) {
	a.mu.Lock()
	a.state.Drained = since
	a.mu.Unlock()
	a.update(time.Now())
	a.events.Publish(events.Event{Kind: kind, By: by})
}

// store makes the file that tells that the balancer is drained. Its time is that of the drain.
func (a *Announcer) store() error {
	if a.file == "" {
		return nil
	}
	if _, err := os.Stat(a.file); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(a.file), 0o755); err != nil {
		return err
	}
	return atomicfile.Write(a.file, []byte("segue undrain --self removes this file.\n"), 0o644)
}

// State returns the present state.
func (a *Announcer) State(ctx context.Context) (*State, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	state := a.state
	state.Peers, state.Routes = []Peer{}, []Route{}
	sessions := map[netip.Addr]session{}
	if len(a.peers) > 0 && !a.stopped { // then there is a speaker
		var err error
		if sessions, err = a.speaker.sessions(ctx); err != nil {
			return nil, err
		}
	}
	for _, address := range slices.SortedFunc(maps.Keys(a.peers), netip.Addr.Compare) {
		p := a.peers[address].Peer
		if s, ok := sessions[address]; ok && p.IsEstablished() {
			p.LocalAddress, p.HoldTime = s.localAddress.String(), s.holdTime.Seconds()
			p.Prefixes = s.prefixes
		}
		state.Peers = append(state.Peers, p)
	}
	for _, r := range a.routes {
		route := r.Route
		route.Peers, route.Established = a.peersOf(desired.FamilyOf(r.vip.route.vip))
		state.Routes = append(state.Routes, route)
	}
	slices.SortFunc(state.Routes, func(a, b Route) int { return cmp.Compare(a.Prefix, b.Prefix) })
	return &state, nil
}

// peersOf counts the peers that take routes of a family, and those of them that have a session.
func (a *Announcer) peersOf(family desired.Family) (all, established int) {
	for i := range a.plan.bgp.Peers {
		p := &a.plan.bgp.Peers[i]
		if !slices.Contains(p.Families, family) {
			continue
		}
		all++
		if s := a.peers[p.Address]; s != nil && s.IsEstablished() {
			established++
		}
	}
	return all, established
}
