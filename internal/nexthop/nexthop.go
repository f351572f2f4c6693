// SPDX-License-Identifier: Apache-2.0

// Package nexthop keeps track of how the kernel would reach a set of addresses:
// by which interface and to which MAC address. The data path sends packets past
// the kernel's own routing, so somebody must follow its routes, neighbours and
// interfaces.
package nexthop

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Link is an interface as it is now.
type Link struct {
	Index int
	Name  string
	Type  string  // the kernel's name for its kind of driver; "device" if hardware
	MAC   [6]byte // zero if it has no Ethernet address
	MTU   int     // in bytes, without the Ethernet header
}

// Hop is the first step of the way to an address.
type Hop struct {
	MAC  [6]byte
	Via  netip.Addr // whose MAC address it is: a gateway, or the address itself on a shared link
	Link Link
}

// Update is everything that a resolver knows.
type Update struct {
	Own  []Link // the resolver's interfaces, in its order; zero while there is none of the name
	Hops map[netip.Addr]Hop
	// Problems say why targets have no hop.
	Problems map[netip.Addr]string
}

func (u Update) equal(other Update) bool {
	return slices.Equal(u.Own, other.Own) && maps.Equal(u.Hops, other.Hops) &&
		maps.Equal(u.Problems, other.Problems)
}

// settle is how long events are gathered before the routes are read again.
const settle = 20 * time.Millisecond

// refresh is how often the routes are read without any event, in case one was
// lost (netlink drops messages when a socket's buffer is full).
const refresh = 30 * time.Second

// Resolver follows interfaces by their names, and the routes and neighbours of its
// targets. It belongs to the network namespace it was started in.
//
// Neighbours in use are "managed": the kernel keeps them resolved. Those that
// nobody else made so are given back when no target uses them any more, or the
// resolver ends. A process that is killed gives back nothing: the one after it
// takes over what it uses too, and GiveBack is for the rest.
type Resolver struct {
	log     *slog.Logger
	own     []string
	targets chan []netip.Addr
	updates chan Update

	// Of the goroutine in Run:
	last     Update                // that was resolved
	managed  map[neighbour]bool    // by resolvers, and in use by this one
	problems map[netip.Addr]string // of targets that have a hop, as logged
}

// New returns a resolver that follows the named interfaces, too; it works while
// Run does.
func New(own []string, log *slog.Logger) *Resolver {
	return &Resolver{
		log:      log,
		own:      own,
		targets:  make(chan []netip.Addr),
		updates:  make(chan Update),
		managed:  map[neighbour]bool{},
		problems: map[netip.Addr]string{},
	}
}

// Resume says, before Run, by which hops an earlier process has reached targets: their MAC addresses
// and the indexes of their interfaces. Those of neighbours that the kernel does not know at the
// moment stay in use, as they would have without the restart.
func (r *Resolver) Resume(hops map[netip.Addr]Hop) {
	r.last.Hops = hops
}

// SetTargets says which addresses to resolve from now on. It returns when the
// resolver has taken note, or the context ends.
func (r *Resolver) SetTargets(ctx context.Context, targets []netip.Addr) {
	select {
	case r.targets <- targets:
	case <-ctx.Done():
	}
}

// Updates delivers the interfaces and the hops of all targets that can be
// reached, whenever any of them changed. After SetTargets there is always one.
func (r *Resolver) Updates() <-chan Update {
	return r.updates
}

// Run resolves until the context ends.
func (r *Resolver) Run(ctx context.Context) error {
	defer r.releaseAll()
	events, err := subscribe(ctx)
	if err != nil {
		return err
	}
	var (
		targets []netip.Addr
		fresh   bool        // the targets are new: their reader waits
		pending Update      // not yet taken by the reader
		out     chan Update // r.updates while pending
		alarm   = newAlarm(refresh)
	)
	defer alarm.timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case targets = <-r.targets:
			fresh = true
			alarm.within(0)
		case _, open := <-events:
			if !open { // it was not read fast enough, and has lost events
				if events, err = subscribe(ctx); err != nil {
					return err
				}
			}
			alarm.within(settle)
		case <-alarm.timer.C:
			now := r.resolve(targets)
			if fresh || !now.equal(r.last) {
				pending, out = now, r.updates
			}
			r.last, fresh = now, false
			alarm = newAlarm(refresh)
		case out <- pending:
			out = nil
		}
	}
}

// alarm is a timer that is only ever moved to an earlier time, so that events
// without end cannot put it off.
type alarm struct {
	timer *time.Timer
	due   time.Time
}

func newAlarm(after time.Duration) *alarm {
	return &alarm{time.NewTimer(after), time.Now().Add(after)}
}

// within makes it go off after a duration at the latest.
func (a *alarm) within(d time.Duration) {
	if due := time.Now().Add(d); due.Before(a.due) {
		a.due = due
		a.timer.Reset(d)
	}
}

// resolve looks up the interfaces and every target.
func (r *Resolver) resolve(targets []netip.Addr) Update {
	kernel, err := readSnapshot()
	if err != nil {
		r.log.Error("read the interfaces and neighbours", "error", err)
		return r.last
	}
	now := Update{
		Own:      kernel.linksNamed(r.own),
		Hops:     make(map[netip.Addr]Hop, len(targets)),
		Problems: map[netip.Addr]string{},
	}
	used := map[neighbour]bool{}
	problems := map[netip.Addr]string{}
	for _, target := range targets {
		way, err := route(target)
		if err == nil {
			used[way] = true
			err = r.manage(kernel, way)
		}
		hop, ok := kernel.hop(way, r.last.Hops[target])
		switch {
		case ok:
			now.Hops[target] = hop
			if err != nil {
				problems[target] = err.Error()
			}
		case err != nil:
			now.Problems[target] = err.Error()
		default:
			now.Problems[target] = fmt.Sprintf("%s does not answer on %s", way.address, hop.Link.Name)
		}
	}
	r.release(kernel, used)
	r.report(problems)
	return now
}

// hop is the hop by way of a neighbour. If its entry failed it keeps its last MAC
// address: nothing better is known, and it may be back before the kernel asks
// again. An earlier process's last hop does not say which neighbour it was.
func (s *snapshot) hop(way neighbour, last Hop) (Hop, bool) {
	hop := Hop{Via: way.address, Link: s.links[way.ifindex]}
	if hop.Link.MAC == [6]byte{} {
		return Hop{}, false
	}
	if e := s.neighbours[way]; e.usable {
		hop.MAC = e.mac
		return hop, true
	}
	hop.MAC = last.MAC
	sameVia := last.Via == way.address || !last.Via.IsValid()
	return hop, sameVia && last.Link.Index == way.ifindex
}

// manage makes the kernel keep a neighbour resolved.
func (r *Resolver) manage(s *snapshot, way neighbour) error {
	link := s.links[way.ifindex]
	if link.MAC == [6]byte{} {
		return fmt.Errorf("interface %s has no Ethernet address", link.Name)
	}
	if e := s.neighbours[way]; e.managed || e.fixed {
		if e.ours { // of a process that was killed, or is at work and will ask again if it has to
			r.managed[way] = true
		}
		return nil
	}
	if err := setManaged(way, true); err != nil {
		return fmt.Errorf("resolve %s on %s: %w", way.address, link.Name, err)
	}
	r.managed[way] = true
	return nil
}

// release gives back the neighbours that are not used any more.
func (r *Resolver) release(s *snapshot, used map[neighbour]bool) {
	for way := range r.managed {
		if used[way] {
			continue
		}
		delete(r.managed, way)
		if !s.neighbours[way].ours {
			continue // it is gone, or somebody else's now
		}
		if err := setManaged(way, false); err != nil {
			r.log.Error("give back a neighbour", "address", way.address, "error", err)
		}
	}
}

func (r *Resolver) releaseAll() {
	s, err := readSnapshot()
	if err != nil {
		r.log.Error("give back the neighbours", "error", err)
		return
	}
	r.release(s, nil)
}

// report logs the problems that are new, of targets that have a hop all the same.
func (r *Resolver) report(problems map[netip.Addr]string) {
	for target, problem := range problems {
		if r.problems[target] != problem {
			r.log.Warn("next hop of server", "address", target, "error", problem)
		}
	}
	r.problems = problems
}
