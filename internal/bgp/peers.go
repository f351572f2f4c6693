// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
)

// peerState is the state of a peer's session.
type peerState struct {
	Peer
	takesIPv6Hops bool // for IPv4 routes (RFC 8950), in the session

	// address is that to which the speaker opens the session; zero: the speaker has no such peer.
	address netip.Addr

	// mu does not guard these fields.
	heard  netip.Addr // of the router that was heard last on the link to an unnumbered peer
	opened time.Time  // when the speaker began to open the session
}

// longestAttempt is how long a session may take to be established. It is much longer than a router
// takes, and much shorter than the time for which peers keep routes. A router may accept a
// connection and then say nothing, for example because it has lost it. For such a router, the
// library itself would wait four minutes.
const longestAttempt = 20 * time.Second

// openAnew opens those sessions anew that take too long to be established. It returns when it must
// be called again, or zero if all sessions are established.
func (a *Announcer) openAnew(ctx context.Context, now time.Time) (next time.Time) {
	for i := range a.plan.bgp.Peers {
		p := &a.plan.bgp.Peers[i]
		state := a.peers[p.Name()] // only this goroutine changes it
		if state.IsEstablished() || !state.address.IsValid() {
			continue
		}
		if !now.Before(state.opened.Add(a.attempt)) {
			a.reopen(ctx, p)
		}
		next = earlier(next, state.opened.Add(a.attempt))
	}
	return next
}

// reopen ends the attempt to open the session with a peer, and begins another one: to an unnumbered
// peer, with the router that was heard last. It does nothing if the session has just been
// established and the event about that is still to come: the end of an established session would
// make the peer remove the routes.
func (a *Announcer) reopen(ctx context.Context, p *desired.BGPPeer) {
	state := a.peers[p.Name()]
	state.opened = time.Now()
	sessions, err := a.speaker.sessions(ctx)
	if _, isEstablished := sessions[state.address]; isEstablished {
		return
	}
	if err = errors.Join(err, a.close(ctx, p, state), a.open(ctx, p, state)); err != nil {
		a.log.Error("bgp session cannot be opened again", "peer", p.Name(), "error", err)
	}
}

// open begins to open the session with a peer. For an unnumbered peer, it does nothing until the
// link can be used, and a router was heard if the configuration has no address.
func (a *Announcer) open(ctx context.Context, p *desired.BGPPeer, state *peerState) error {
	address := p.Address
	switch {
	case p.Interface == "":
	case !a.usable[p.Interface]:
		return nil
	case p.Address.IsValid():
		address = p.Address.WithZone(p.Interface)
	case state.heard.IsValid():
		address = state.heard
	default:
		return nil
	}
	state.opened = time.Now()
	if err := a.speaker.addPeer(ctx, p, address, a.plan.passwords[p.Name()], a.preserved); err != nil {
		return err
	}
	a.setAddress(p, state, address)
	return nil
}

// close ends the session with a peer, or the attempt to open it.
func (a *Announcer) close(ctx context.Context, p *desired.BGPPeer, state *peerState) error {
	address := state.address
	if !address.IsValid() {
		return nil
	}
	a.setAddress(p, state, netip.Addr{})
	return a.speaker.removePeer(ctx, address)
}

// setAddress records to which address the speaker opens the session with a peer.
func (a *Announcer) setAddress(p *desired.BGPPeer, state *peerState, address netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	state.address, state.Neighbor = address, ""
	if p.Interface != "" && address.IsValid() {
		state.Neighbor = address.WithZone("").String()
	}
}

// takeHeard records that a link can be used, and the address of a router there. It opens the
// sessions over the link that the speaker does not have yet. If it has a session with another
// router, reopen takes the new router when that session fails.
func (a *Announcer) takeHeard(ctx context.Context, h heard) {
	a.usable[h.iface] = true
	for i := range a.plan.bgp.Peers {
		p := &a.plan.bgp.Peers[i]
		if p.Interface != h.iface {
			continue
		}
		state := a.peers[p.Name()]
		if h.router.IsValid() {
			state.heard = h.router
		}
		if state.address.IsValid() {
			continue
		}
		if err := a.open(ctx, p, state); err != nil {
			a.log.Error("bgp session cannot be opened", "peer", p.Name(), "error", err)
		}
	}
}

// follow gives the speaker the peers of the present plan in place of those of before, the earlier
// plan. It does not touch peers whose configuration and password are the same in both plans.
func (a *Announcer) follow(ctx context.Context, before *Plan) error {
	present := map[string]*desired.BGPPeer{}
	for i := range a.plan.bgp.Peers {
		present[a.plan.bgp.Peers[i].Name()] = &a.plan.bgp.Peers[i]
	}
	var problems error
	changed := map[string]*peerState{}
	for i := range before.bgp.Peers { // first, because a new peer may have the address of a former one
		was := &before.bgp.Peers[i]
		name := was.Name()
		now := present[name]
		if now != nil && reflect.DeepEqual(was, now) && a.plan.passwords[name] == before.passwords[name] {
			continue // nothing has changed: the session continues
		}
		if now == nil {
			a.log.Info("bgp peer is removed", "peer", name)
		} else {
			a.log.Info("bgp session is reset: the configuration of the peer has changed", "peer", name)
			changed[name] = a.peers[name]
		}
		problems = errors.Join(problems, a.close(ctx, was, a.peers[name]))
		a.mu.Lock()
		delete(a.peers, name)
		a.mu.Unlock()
	}
	for i := range a.plan.bgp.Peers {
		p := &a.plan.bgp.Peers[i]
		name := p.Name()
		if a.peers[name] != nil {
			continue
		}
		state := &peerState{Peer: Peer{Address: name, ASN: p.ASN, State: down, Since: time.Now()}}
		if was := changed[name]; was != nil {
			state.heard = was.heard
		}
		problems = errors.Join(problems, a.open(ctx, p, state))
		a.mu.Lock()
		a.peers[name] = state
		a.mu.Unlock()
	}
	a.followLinks(ctx)
	return problems
}

// followLinks starts the links of unnumbered peers that have none yet, and stops those without a
// peer. A router of FRR finds the balancer by the link, even if the configuration has the router's
// address.
func (a *Announcer) followLinks(ctx context.Context) {
	wanted := map[string]bool{}
	for _, p := range a.plan.bgp.Peers {
		if p.Interface == "" {
			continue
		}
		wanted[p.Interface] = true
		if a.links[p.Interface] == nil {
			a.links[p.Interface] = startLink(context.WithoutCancel(ctx), p.Interface, a.heard, a.log)
		}
	}
	for name, stop := range a.links {
		if !wanted[name] {
			stop()
			delete(a.links, name)
			delete(a.usable, name)
		}
	}
}

// takeEvent records a change of a session's state. When a session has ended, takeEvent opens it
// anew by reopen, which removes the peer and adds it again: the library asks a peer to keep the
// routes only in the first session after the peer was added.
func (a *Announcer) takeEvent(ctx context.Context, e sessionEvent) {
	i := slices.IndexFunc(a.plan.bgp.Peers, func(p desired.BGPPeer) bool {
		return a.peers[p.Name()].address == e.peer
	})
	if i < 0 { // a removed peer
		return
	}
	peer := &a.plan.bgp.Peers[i]
	name := peer.Name()
	p := a.peers[name]
	a.mu.Lock()
	if p.IsEstablished() == e.isEstablished { // nothing new
		a.mu.Unlock()
		return
	}
	e.keepsRoutes = e.keepsRoutes && !a.forwarding.EndsWithProcess
	p.takesIPv6Hops = e.takesIPv6Hops
	p.Since, p.State, p.KeepsRoutes = time.Now(), down, e.keepsRoutes && e.isEstablished
	if e.isEstablished {
		p.State = established
		p.Sessions++
	} else {
		p.Reason = e.reason
	}
	a.mu.Unlock()
	if e.isEstablished {
		a.events.Publish(events.Event{Kind: events.SessionUp, Peer: name})
		a.log.Info("bgp session established", "peer", name, "asn", p.ASN)
		if !a.isTaken(desired.IPv4, peer, p) {
			a.log.Error("bgp peer takes no IPv4 routes: it does not support their IPv6 next hops (RFC 8950)",
				"peer", name)
		}
		if !e.keepsRoutes && !a.forwarding.EndsWithProcess {
			a.log.Warn("bgp peer does not support graceful restarts: it removes the routes whenever the "+
				"process restarts", "peer", name)
		}
		return
	}
	a.events.Publish(events.Event{Kind: events.SessionDown, Peer: name, Reason: e.reason})
	a.log.Warn("bgp session ended", "peer", name, "asn", p.ASN, "reason", e.reason)
	a.reopen(ctx, peer)
}

// isTaken tells whether a peer with a session takes the next hops of a family's routes.
func (a *Announcer) isTaken(family desired.Family, p *desired.BGPPeer, state *peerState) bool {
	return family == desired.IPv6 || state.takesIPv6Hops || !slices.Contains(p.Families, family) ||
		!a.plan.bgp.NextHopsAreIPv6(p, family)
}

// byAddress compares peers by the addresses of the configuration, and then by name.
func byAddress(a, b *peerState) int {
	first, _ := netip.ParseAddr(a.Address) // zero for an interface
	second, _ := netip.ParseAddr(b.Address)
	return cmp.Or(first.Compare(second), cmp.Compare(a.Address, b.Address))
}

// peersOf returns the number of peers that take routes of a family, and the number of those that
// have an established session in which they accept such routes.
func (a *Announcer) peersOf(family desired.Family) (all, established int) {
	for i := range a.plan.bgp.Peers {
		p := &a.plan.bgp.Peers[i]
		if !slices.Contains(p.Families, family) {
			continue
		}
		all++
		s := a.peers[p.Name()]
		if s != nil && s.IsEstablished() && a.isTaken(family, p, s) {
			established++
		}
	}
	return all, established
}
