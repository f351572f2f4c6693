// SPDX-License-Identifier: Apache-2.0

// Package l2 announces the VIPs of a balancer on a link: the balancer answers ARP requests and
// neighbour solicitations for a VIP while it is the VIP's leader. The balancers of a store choose
// the leaders. Every balancer serves every VIP, whoever leads: leaders only decide where packets
// arrive.
package l2

import (
	"cmp"
	"context"
	"crypto/rand"
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

const (
	// announceTimes is how often a new leader announces a VIP, every announceInterval: hosts may miss
	// the first announcements, for example while a switch opens a port.
	announceTimes    = 5
	announceInterval = time.Second
	// questionInterval is the time between two questions whether another host has the VIP.
	questionInterval = 30 * time.Second
	// defendInterval is the shortest time between two announcements because of claims (RFC 5227,
	// section 2.4).
	defendInterval = 10 * time.Second
)

// Presence keeps a balancer present in the store, as store.Store.Present does.
type Presence func(
	ctx context.Context, seconds int64, own <-chan string, heard func(map[string]string, error))

// Speaker answers for the VIPs of a balancer. Only the goroutine in Run uses its fields, except
// those that mu guards. Other goroutines may call the exported methods.
type Speaker struct {
	log      *slog.Logger
	name     string // of this balancer, in the store
	iface    string
	drain    announce.DrainFile
	presence Presence // nil: there are no other balancers
	cfg      *desired.L2
	events   *events.Stream // nil: nobody follows them
	services []balancer.ServiceState
	requests chan request
	ended    chan struct{} // closed when nobody takes requests any more
	// follow and open are followLink and startResponder. Those of tests work in a namespace.
	follow func(context.Context, string, chan<- link, *slog.Logger)
	open   func(link, chan<- message, chan<- error) (*responder, error)

	own       present     // what the store has of this balancer, or soon will have
	toStore   chan string // the newest text of own, for presence
	heard     chan balancers
	others    map[string]present // all balancers that the store knows
	alone     bool               // the store has not answered since the start
	twin      bool               // another balancer has the same name
	link      link
	links     chan link
	responder *responder // nil: the link cannot be used
	claims    chan message
	failures  chan error // of the responder

	mu    sync.Mutex
	state LinkState // without Balancers and VIPs
	vips  map[netip.Addr]*vipState
}

// vipState is a VIP and its history.
type vipState struct {
	LinkVIP
	service  announce.Service // the sum of the services
	isAble   bool             // this balancer can answer for the VIP
	damping  announce.Damping
	left     int       // how often the VIP is still to be announced
	next     time.Time // when it is to be announced, or another host is to be asked for
	defended time.Time // when it was announced last because of a claim
}

// request is a function for the goroutine in Run, and the channel for its result.
type request struct {
	do     func() error
	result chan<- error
}

// balancers is what presence has heard.
type balancers struct {
	values map[string]string
	err    error
}

// New returns a speaker. presence is nil if the balancer has no store. New returns an error if it
// cannot find out whether the balancer is drained.
func New(cfg *desired.Balancer, presence Presence, log *slog.Logger) (*Speaker, error) {
	s := &Speaker{
		log: log, name: cfg.Node.Name, iface: cfg.Node.Interface, presence: presence, cfg: cfg.L2,
		drain:  announce.DrainFileOf(&cfg.Node),
		follow: followLink, open: startResponder,
		requests: make(chan request), ended: make(chan struct{}),
		own: present{ID: rand.Text()}, toStore: make(chan string, 1), heard: make(chan balancers),
		links: make(chan link), claims: make(chan message, 16), failures: make(chan error, 1),
		state: LinkState{Interface: cfg.Node.Interface, Lease: cfg.L2.Lease.Seconds()},
		vips:  map[netip.Addr]*vipState{},
	}
	if presence != nil {
		s.state.Problem = "the store has not answered yet"
	}
	var err error
	s.state.Drained, err = s.drain.Since()
	return s, err
}

// PublishTo makes the speaker publish its events. Call it before Run.
func (s *Speaker) PublishTo(stream *events.Stream) { s.events = stream }

// Run answers for VIPs until the context ends. The channel services tells what each service can do.
// Run begins when it gets the first value, because the data path is attached then. When Run ends,
// other balancers answer for the VIPs.
func (s *Speaker) Run(ctx context.Context, services <-chan []balancer.ServiceState) error {
	defer close(s.ended)
	select {
	case s.services = <-services:
	case <-ctx.Done():
		return nil
	}
	if s.state.Drained != nil {
		s.log.Warn("the balancer is drained: it answers for no VIP", "since", *s.state.Drained,
			"undrain", "segue undrain --self")
	}
	var group sync.WaitGroup
	defer group.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group.Go(func() { s.follow(ctx, s.iface, s.links, s.log) })
	if s.presence != nil {
		group.Go(func() {
			s.presence(ctx, int64(s.cfg.Lease.Seconds()), s.toStore, func(values map[string]string, err error) {
				select {
				case s.heard <- balancers{values, err}:
				case <-ctx.Done():
				}
			})
		})
	}
	defer s.closeResponder()
	s.serve(ctx, services)
	return nil
}

// serve is the loop of Run.
func (s *Speaker) serve(ctx context.Context, services <-chan []balancer.ServiceState) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case s.services = <-services:
		case h := <-s.heard:
			s.takeBalancers(h)
		case l := <-s.links:
			s.takeLink(l)
		case m := <-s.claims:
			s.takeClaim(m, time.Now())
		case err := <-s.failures:
			s.log.Warn("the link fails, and is opened again", "interface", s.iface, "error", err)
			s.closeResponder()
		case r := <-s.requests:
			r.result <- r.do()
		case <-timer.C:
		}
		timer.Stop()
		if next := s.update(time.Now()); !next.IsZero() {
			timer.Reset(time.Until(next))
		}
	}
}

// takeBalancers notes which balancers there are. If the store does not answer, those that were
// there last stay: the leaders go on, because nobody can take their VIPs over. If the store has not
// answered since the start, the balancer answers for all VIPs: another one that does so, too, harms
// no connection, and nobody may be left that answers.
func (s *Speaker) takeBalancers(h balancers) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.err != nil {
		if s.others == nil {
			s.alone, s.others = true, map[string]present{s.name: s.own}
			s.log.Warn("the store has not answered since the start: this balancer answers for all vips",
				"error", h.err)
		} else if s.state.Problem == "" {
			s.log.Warn("the other balancers of the link are unknown: vips stay where they are", "error", h.err)
		}
		s.state.Problem = h.err.Error()
		return
	}
	before := s.others
	s.state.Problem, s.alone, s.others = "", false, readPresent(h.values)
	if s.hasNewcomer(before) {
		s.announceAgain()
	}
	me, isHere := s.others[s.name]
	isTwin := isHere && me.ID != s.own.ID
	if isTwin && !s.twin {
		s.log.Error("another balancer of the store has the same name: both answer for the same vips; "+
			"node.name must be unique", "mac", me.MAC)
	}
	s.twin = isTwin
}

// hasNewcomer tells whether another balancer is present that was not there before. It may have
// answered for VIPs of this one, because a balancer that cannot reach the store goes on.
func (s *Speaker) hasNewcomer(before map[string]present) bool {
	for name, other := range s.others {
		if name != s.name && before[name].ID != other.ID {
			return true
		}
	}
	return false
}

// announceAgain makes the next update announce all VIPs for which the balancer answers.
func (s *Speaker) announceAgain() {
	for _, v := range s.vips {
		v.left, v.next = announceTimes, time.Time{}
	}
}

// takeLink notes that the link has changed.
func (s *Speaker) takeLink(l link) {
	if l.equals(s.link) {
		return
	}
	s.closeResponder()
	s.link = l
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state.IsUp, s.state.MAC = l.isUp(), l.mac.String()
}

// closeResponder ends the answers. The VIPs are announced anew when the link can be used again.
func (s *Speaker) closeResponder() {
	if s.responder == nil {
		return
	}
	s.mu.Lock()
	s.state.Answers += s.responder.answers.Load()
	s.announceAgain()
	responder := s.responder
	s.responder = nil
	s.mu.Unlock()
	if err := responder.close(); err != nil {
		s.log.Warn("the link cannot be closed", "interface", s.iface, "error", err)
	}
}

// openResponder begins to answer, if the link can be used. It returns when to try again, or zero.
func (s *Speaker) openResponder(now time.Time) (retry time.Time) {
	if s.responder != nil || !s.link.isUp() {
		return time.Time{}
	}
	responder, err := s.open(s.link, s.claims, s.failures)
	if err != nil {
		s.log.Warn("the link cannot be opened", "interface", s.iface, "error", err)
		return now.Add(linkRetry)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.responder = responder
	return time.Time{}
}

// update makes the balancer answer for the VIPs that it leads, and tells the other balancers for
// which it can answer. It returns when it must be called again even if nothing changes until then.
func (s *Speaker) update(now time.Time) (next time.Time) {
	next = s.openResponder(now)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.takeServices(now)
	able := []netip.Addr{}
	for vip, v := range s.vips {
		next = earlier(next, s.judge(v, now))
		if v.isAble {
			able = append(able, vip)
		}
	}
	slices.SortFunc(able, netip.Addr.Compare)
	s.tell(present{s.own.ID, s.link.mac.String(), able})
	leaders := leadersOf(s.others)
	var led []netip.Addr
	for vip, v := range s.vips {
		v.Leader = leaders[vip]
		s.setAnswers(v, v.isAble && v.Leader == s.name, now)
		if v.Answers {
			led = append(led, vip)
		}
	}
	if s.responder == nil {
		return next
	}
	slices.SortFunc(led, netip.Addr.Compare)
	if err := s.responder.answerFor(led); err != nil {
		s.log.Warn("questions for some VIPs may not arrive", "interface", s.iface, "error", err)
	}
	for _, vip := range led {
		next = earlier(next, s.announceDue(vip, s.vips[vip], now))
	}
	return next
}

// takeServices notes the services of each VIP. A VIP that is no longer configured is forgotten.
func (s *Speaker) takeServices(now time.Time) {
	names, sums := map[netip.Addr][]string{}, map[netip.Addr]announce.Service{}
	for _, service := range s.services {
		if service.Service.Announcement() == desired.AnnounceNever {
			continue
		}
		for _, vip := range service.Service.AllVIPs() {
			names[vip] = append(names[vip], service.Service.Name)
			sums[vip] = sums[vip].Or(announce.Of(service))
		}
	}
	for vip, v := range s.vips {
		if names[vip] == nil {
			s.setAnswers(v, false, now)
			delete(s.vips, vip)
		}
	}
	for vip := range names {
		if s.vips[vip] == nil {
			s.vips[vip] = &vipState{LinkVIP: LinkVIP{Address: vip.String(), Since: now}}
		}
		s.vips[vip].service, s.vips[vip].Services = sums[vip], names[vip]
	}
}

// judge decides whether the balancer can answer for a VIP: it is served, the balancer is not
// drained, the link can be used, and the hold-down time is over. It returns when it must be called
// again, or zero.
func (s *Speaker) judge(v *vipState, now time.Time) (next time.Time) {
	isServed, wasAble, before := v.service.MayBe(v.isAble), v.isAble, v.Reason
	due := now
	if isServed {
		due = v.damping.Due(now, s.cfg.HoldDown)
	}
	v.isAble, v.Reason = false, ""
	switch {
	case !isServed:
		v.Reason = NotServed
		if v.service.IsUnchecked {
			v.Reason = Unchecked
		} else {
			v.damping.Unserved()
		}
		if wasAble {
			v.damping.Withdrawn(now, s.cfg.HoldDown)
		}
	case s.state.Drained != nil:
		v.Reason = Drained
	case s.responder == nil:
		v.Reason = LinkDown
	case due.After(now):
		v.Reason, next = HeldDown, due
	default:
		v.isAble = true
		if !wasAble {
			v.damping.Announced(now)
		}
	}
	if v.Reason == NotServed && before != NotServed && before != HeldDown {
		s.log.Error("this balancer cannot answer for the vip: none of its services can serve", "vip", v.Address,
			"services", desired.Names(v.Services))
	}
	return next
}

// tell passes what this balancer tells the others to the store, if it has changed. Without a store,
// this is the only balancer.
func (s *Speaker) tell(now present) {
	if s.presence == nil || s.alone {
		s.others = map[string]present{s.name: now}
	}
	if s.presence == nil {
		return
	}
	if text := now.text(); text != s.own.text() { // at first own has no list, not even an empty one
		select { // remove a value that was not read; nobody else sends
		case <-s.toStore:
		default:
		}
		s.toStore <- text
		s.own = now
	}
}

// setAnswers notes whether the balancer answers for a VIP. If that has changed, it is logged, and
// published as an event.
func (s *Speaker) setAnswers(v *vipState, answers bool, now time.Time) {
	if v.Answers == answers {
		return
	}
	v.Answers, v.Since, v.left, v.next = answers, now, announceTimes, now
	if answers {
		s.events.Publish(events.Event{Kind: events.VIPTaken, Prefix: v.Address})
		s.log.Info("this balancer answers for the vip", "vip", v.Address, "services", desired.Names(v.Services))
		return
	}
	why := v.Reason.text()
	s.events.Publish(events.Event{Kind: events.VIPLeft, Prefix: v.Address, Reason: why})
	s.log.Info("this balancer no longer answers for the vip", "vip", v.Address, "reason", why,
		"leader", v.Leader)
}

// announceDue announces a VIP if that is due, and asks whether another host has the VIP. It returns
// when it must be called again.
func (s *Speaker) announceDue(vip netip.Addr, v *vipState, now time.Time) (next time.Time) {
	if now.Before(v.next) {
		return v.next
	}
	frames := [][]byte{question(s.link.mac, vip)}
	v.next = now.Add(questionInterval)
	if v.left > 0 {
		frames = announcements(s.link.mac, vip)
		v.left--
		v.next = now.Add(announceInterval)
	}
	s.send(vip, frames)
	return v.next
}

// send sends frames about a VIP. After a failure, the next ones are tried all the same.
func (s *Speaker) send(vip netip.Addr, frames [][]byte) {
	if err := s.responder.sendAll(frames...); err != nil {
		s.log.Warn("the vip cannot be announced", "vip", vip, "error", err)
	}
}

// takeClaim takes the claim of another host to have a VIP for which this balancer answers. The
// claim of another balancer is no surprise: it has been the leader until now, or will be. A
// stranger is answered by an announcement, at most every defendInterval.
func (s *Speaker) takeClaim(m message, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.vips[m.claims]
	isBalancer := slices.ContainsFunc(slices.Collect(maps.Values(s.others)), func(p present) bool {
		return p.MAC == m.mac.String()
	})
	if v == nil || !v.Answers || isBalancer || s.responder == nil {
		return
	}
	s.state.Claims++
	if now.Sub(v.defended) < defendInterval {
		return
	}
	v.defended = now
	s.log.Error("another host claims the vip: some hosts of the link send it the packets", "vip", v.Address,
		"mac", m.mac.String())
	s.send(m.claims, announcements(s.link.mac, m.claims))
}

// earlier returns the earlier one of two times. A zero time stands for never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

var errEnded = errors.New("the speaker has ended")

// ask makes the goroutine in Run call a function, and returns its result.
func (s *Speaker) ask(ctx context.Context, do func() error) error {
	result := make(chan error, 1)
	select {
	case s.requests <- request{do, result}:
		return <-result
	case <-s.ended:
		return errEnded
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Apply makes a running speaker follow another configuration.
func (s *Speaker) Apply(ctx context.Context, cfg *desired.L2) error {
	return s.ask(ctx, func() error {
		s.cfg = cfg
		return nil
	})
}

// Drain gives up all VIPs. If untilRestart is true, the drain ends with the process. Otherwise it
// lasts until Undrain, if the balancer has a directory for its state. If the file about the drain
// cannot be written there, Drain returns an error and changes nothing.
func (s *Speaker) Drain(ctx context.Context, untilRestart bool) error {
	by := events.ActorOf(ctx)
	return s.ask(ctx, func() error {
		if !untilRestart {
			if err := s.drain.Make(); err != nil {
				return err
			}
		}
		if s.state.Drained == nil {
			now := time.Now()
			s.setDrained(&now, events.Drained, by)
		}
		return nil
	})
}

// Undrain ends a drain. If the file about the drain cannot be removed, Undrain returns an error and
// changes nothing.
func (s *Speaker) Undrain(ctx context.Context) error {
	by := events.ActorOf(ctx)
	return s.ask(ctx, func() error {
		if s.state.Drained == nil {
			return nil
		}
		if err := s.drain.Remove(); err != nil {
			return err
		}
		s.log.Info("the balancer is no longer drained", "by", by)
		s.setDrained(nil, events.Undrained, by)
		return nil
	})
}

// setDrained begins a drain at the time since, or ends it if since is nil. kind is the event to
// publish, and by is the user who has asked for it.
func (s *Speaker) setDrained(since *time.Time, kind events.Kind, by string) {
	s.mu.Lock()
	s.state.Drained = since
	s.mu.Unlock()
	s.update(time.Now())
	s.events.Publish(events.Event{Kind: kind, By: by})
}

// State returns the present state.
func (s *Speaker) State() *LinkState {
	s.mu.Lock()
	defer s.mu.Unlock()
	state := s.state
	if s.responder != nil {
		state.Answers += s.responder.answers.Load()
	}
	state.Balancers, state.VIPs = []LinkBalancer{}, []LinkVIP{}
	leads := map[string]int{}
	for _, leader := range leadersOf(s.others) {
		leads[leader]++
	}
	for _, name := range slices.Sorted(maps.Keys(s.others)) {
		p := s.others[name]
		state.Balancers = append(state.Balancers, LinkBalancer{name, p.MAC, len(p.VIPs), leads[name]})
	}
	for _, v := range s.vips {
		state.VIPs = append(state.VIPs, v.LinkVIP)
	}
	slices.SortFunc(state.VIPs, func(a, b LinkVIP) int { return cmp.Compare(a.Address, b.Address) })
	return &state
}
