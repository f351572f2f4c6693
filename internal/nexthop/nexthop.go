// SPDX-License-Identifier: Apache-2.0

// Package nexthop follows the next hops of a set of addresses: the interface and
// the MAC address by which the kernel would reach them. The data path bypasses
// the kernel's routing, so this package follows the kernel's routes, neighbours
// and interfaces.
package nexthop

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Link is the present state of an interface.
type Link struct {
	Index int
	Name  string
	Type  string  // the kernel's name for its kind of driver; "device" if hardware
	MAC   [6]byte // zero if it has no Ethernet address
	MTU   int     // in bytes, without the Ethernet header
}

// Hop is the next hop of an address.
type Hop struct {
	MAC  [6]byte
	Via  netip.Addr // the owner of the MAC address: a gateway, or the address itself on a shared link
	Link Link
	// Silent tells that the kernel asked the neighbour and got no answer (FAILED of
	// ip-neighbour(8)), and has not heard from it since. The MAC address is the last known one.
	Silent bool
	// Default tells that the hop comes from a default route.
	Default bool
}

// Update is the whole state of a resolver.
type Update struct {
	Own  []Link // the resolver's interfaces, in its order; a missing one is zero
	Hops map[netip.Addr]Hop
	// Addresses are those of the host, sorted, without scopes.
	Addresses []netip.Addr
	// Problems has the reasons why targets have no hop.
	Problems map[netip.Addr]string
}

func (u Update) equal(other Update) bool {
	return slices.Equal(u.Own, other.Own) && maps.Equal(u.Hops, other.Hops) &&
		slices.Equal(u.Addresses, other.Addresses) &&
		maps.Equal(u.Problems, other.Problems)
}

// settle is the time for which events are gathered before the tables are read again.
const settle = 20 * time.Millisecond

// refresh is the interval at which the tables are read without an event, because
// the kernel does not report every change (such as one of a setting).
const refresh = 30 * time.Second

// retry is the time until the tables are read again after a failure.
const retry = time.Second

// leisure limits the cost of endless events: after a reading, the tables are not read for leisure
// times the duration of the reading.
const leisure = 9

// Resolver follows interfaces by their names, and the routes and neighbours of its
// targets. It belongs to the network namespace it was started in.
//
// A target's hop comes from the longest prefix in the routing tables, whether or not the neighbour
// answers. A target that once had a longer prefix than the default route does not fall back to the
// default route: it has no hop until it has a route of its own again.
//
// Neighbours in use are "managed": the kernel keeps them resolved. The resolver
// releases the neighbours that it made managed when no target uses them any
// more, and when it ends. A killed process releases nothing: the next one takes
// over the neighbours that it uses, and GiveBack releases the others.
type Resolver struct {
	log     *slog.Logger
	own     []string
	changes chan []netip.Addr // new targets
	updates chan Update

	// The fields below are for the goroutine in Run only.
	targets    targets
	routed     map[netip.Addr]bool   // targets that have had a route of their own
	resumed    map[netip.Addr]Hop    // hops of the earlier process that are not used yet
	found      map[netip.Addr]found  // by target
	last       Update                // the last one that was resolved
	neighbours map[neighbour]*known  // neighbours in use
	managed    map[neighbour]bool    // managed by resolvers, and in use by this one
	problems   map[netip.Addr]string // logged problems of targets that have a hop
}

// New returns a resolver that also follows the named interfaces. It works while
// Run runs.
func New(own []string, log *slog.Logger) *Resolver {
	return &Resolver{
		log:        log,
		own:        own,
		changes:    make(chan []netip.Addr),
		updates:    make(chan Update),
		routed:     map[netip.Addr]bool{},
		neighbours: map[neighbour]*known{},
		managed:    map[neighbour]bool{},
		problems:   map[netip.Addr]string{},
	}
}

// Resume passes the hops of an earlier process to the resolver, before Run: MAC address, index of
// the interface, Silent and Default. If the kernel does not know a neighbour at the moment, its hop
// stays in use, as it would have without the restart. A hop without a MAC address belongs to a
// target that has lost its own route.
func (r *Resolver) Resume(hops map[netip.Addr]Hop) {
	r.resumed = hops
	for target, hop := range hops {
		r.routed[target] = !hop.Default
	}
}

// SetTargets replaces the addresses to resolve. It returns when the resolver has
// received them, or the context ends.
func (r *Resolver) SetTargets(ctx context.Context, targets []netip.Addr) {
	select {
	case r.changes <- targets:
	case <-ctx.Done():
	}
}

// Updates delivers the interfaces and the hops of all reachable targets, whenever
// one of them changed. After SetTargets there is always an update.
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
		fresh   bool        // the targets are new: the reader waits for an update
		pending Update      // not yet read
		out     chan Update // r.updates while pending
		alarm   = newAlarm(refresh)
		rested  time.Time // time from which on an event causes a new reading
	)
	defer func() { alarm.timer.Stop() }()
	for {
		select {
		case <-ctx.Done():
			return nil
		case targets := <-r.changes:
			r.retarget(targets)
			fresh = true
			alarm.within(0)
		case event, open := <-events:
			if !open { // events were lost, because the channel was not read fast enough
				if events, err = subscribe(ctx); err != nil {
					return err
				}
			} else if !r.matters(event) {
				continue
			}
			alarm.within(max(settle, time.Until(rested)))
		case <-alarm.timer.C:
			alarm = newAlarm(refresh)
			began := time.Now()
			now, err := r.resolve()
			rested = time.Now().Add(leisure * time.Since(began))
			if err != nil {
				r.log.Error("read the interfaces, neighbours and routes", "error", err)
				alarm.within(retry)
				continue
			}
			if fresh || !now.equal(r.last) {
				pending, out = now, r.updates
			}
			r.last, fresh = now, false
		case out <- pending:
			out = nil
		}
	}
}

// alarm is a timer that can only be moved to an earlier time, so that endless
// events cannot delay it.
type alarm struct {
	timer *time.Timer
	due   time.Time
}

func newAlarm(after time.Duration) *alarm {
	return &alarm{time.NewTimer(after), time.Now().Add(after)}
}

// within makes the alarm go off after a duration at the latest.
func (a *alarm) within(d time.Duration) {
	if due := time.Now().Add(d); due.Before(a.due) {
		a.due = due
		a.timer.Reset(d)
	}
}

// retarget replaces the targets, and forgets the state of former ones.
func (r *Resolver) retarget(addresses []netip.Addr) {
	r.targets = newTargets(addresses)
	gone := func(target netip.Addr) bool {
		_, ok := slices.BinarySearchFunc(r.targets, target, netip.Addr.Compare)
		return !ok
	}
	maps.DeleteFunc(r.routed, func(target netip.Addr, _ bool) bool { return gone(target) })
	maps.DeleteFunc(r.resumed, func(target netip.Addr, _ Hop) bool { return gone(target) })
}

// resolve looks up the interfaces and every target.
func (r *Resolver) resolve() (Update, error) {
	kernel, err := readSnapshot(r.targets)
	if err != nil {
		return Update{}, err
	}
	now := Update{
		Own:       kernel.linksNamed(r.own),
		Hops:      make(map[netip.Addr]Hop, len(r.targets)),
		Addresses: kernel.addresses,
		Problems:  map[netip.Addr]string{},
	}
	r.found = r.lookup(kernel)
	failures := r.follow(kernel)
	problems := map[netip.Addr]string{}
	for _, target := range r.targets {
		f := r.found[target]
		for _, way := range f.ways {
			f.err = cmp.Or(f.err, failures[way])
		}
		hop, ok := r.hop(kernel, f)
		switch {
		case ok:
			now.Hops[target] = hop
			if f.err != nil {
				problems[target] = f.err.Error()
			}
		case f.err != nil:
			now.Problems[target] = f.err.Error()
		default:
			now.Problems[target] = fmt.Sprintf("%s does not answer on %s", f.ways[0].address,
				kernel.links[f.ways[0].ifindex].Name)
		}
	}
	r.report(problems)
	return now, nil
}

// lookup looks up every target in the routing tables. If routes change while the kernel lists them,
// any route may be missing from the list (observed for IPv6 on Linux 6.18). So lookup asks the
// kernel about each target whose route seems to be gone.
func (r *Resolver) lookup(kernel *snapshot) map[netip.Addr]found {
	all := make(map[netip.Addr]found, len(r.targets))
	for _, target := range r.targets {
		f := kernel.policies[familyOf(target)].lookup(target)
		if f.bits < r.found[target].bits {
			if asked := ask(target); asked.bits > f.bits {
				f = asked
			}
		}
		switch {
		case f.err != nil:
		case f.bits > 0:
			r.routed[target] = true
		case r.routed[target]:
			f = found{bits: -1, err: errWithdrawn}
		}
		all[target] = f
	}
	return all
}

// errWithdrawn is the error about a target that once had a route of its own. The router of the
// default route would not send its packets to the server.
var errWithdrawn = errors.New("only the default route is left, and it is not used: " +
	"the server had a route of its own before")

// known is the state of a neighbour in use.
type known struct {
	mac    [6]byte // the last known one; zero: none yet
	silent bool    // it was asked and has not answered since
}

// differs tells whether the kernel's entry of the neighbour has news, or must be made managed.
func (k *known) differs(e entry) bool {
	kept := e.managed || e.fixed
	if e.usable {
		return e.mac != k.mac || k.silent || !kept
	}
	return e.failed && !k.silent || !kept
}

// learn takes the state of the kernel's entry. An entry that is not kept may have failed long ago.
func (k *known) learn(e entry) {
	switch {
	case e.usable:
		k.mac, k.silent = e.mac, false
	case e.failed && (e.managed || e.fixed):
		k.silent = true
	}
}

// follow puts the found neighbours in use, and learns their states from the kernel. The errors are
// about neighbours that cannot be used.
func (r *Resolver) follow(kernel *snapshot) map[neighbour]error {
	used := map[neighbour]*known{}
	for target, f := range r.found {
		for _, way := range f.ways {
			if used[way] == nil {
				used[way] = cmp.Or(r.neighbours[way], &known{})
			}
		}
		r.resume(target, used)
	}
	r.neighbours = used
	failures := map[neighbour]error{}
	for way, known := range used {
		known.learn(kernel.neighbours[way])
		if err := r.manage(kernel, way); err != nil {
			failures[way] = err
		}
	}
	r.release(kernel.neighbours)
	return failures
}

// resume uses the hop of an earlier process for a target. The hop does not name its neighbour, so
// resume assumes the preferred one on the same interface.
func (r *Resolver) resume(target netip.Addr, neighbours map[neighbour]*known) {
	hop, ok := r.resumed[target]
	if !ok {
		return
	}
	delete(r.resumed, target)
	for _, way := range r.found[target].ways {
		if way.ifindex == hop.Link.Index {
			*neighbours[way] = known{hop.MAC, hop.Silent}
			return
		}
	}
}

// hop uses the first neighbour that answers, or else the first that ever did. While the kernel
// looks for a neighbour, and after it has failed, the last MAC address stays in use, because the
// neighbour may be back before the kernel asks again.
func (r *Resolver) hop(kernel *snapshot, f found) (Hop, bool) {
	var best Hop
	for _, way := range f.ways {
		k, link := r.neighbours[way], kernel.links[way.ifindex]
		if k.mac == [6]byte{} || link.MAC == [6]byte{} {
			continue
		}
		if best.Via.IsValid() && k.silent {
			continue
		}
		best = Hop{MAC: k.mac, Via: way.address, Link: link, Silent: k.silent, Default: f.bits == 0}
		if !k.silent {
			break
		}
	}
	return best, best.Via.IsValid()
}

// manage makes the kernel keep a neighbour resolved.
func (r *Resolver) manage(s *snapshot, way neighbour) error {
	link := s.links[way.ifindex]
	if link.MAC == [6]byte{} {
		return fmt.Errorf("interface %s has no Ethernet address", link.Name)
	}
	if e := s.neighbours[way]; e.managed || e.fixed {
		if e.ours { // made by a killed process, or by a running one, which repairs the entry itself
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

// release releases the neighbours that are not used any more.
func (r *Resolver) release(all map[neighbour]entry) {
	for way := range r.managed {
		if r.neighbours[way] != nil {
			continue
		}
		delete(r.managed, way)
		if !all[way].ours {
			continue // it is gone, or kept by others now
		}
		if err := setManaged(way, false); err != nil {
			r.log.Error("give back a neighbour", "address", way.address, "error", err)
		}
	}
}

func (r *Resolver) releaseAll() {
	all, err := readNeighbours()
	if err != nil {
		r.log.Error("give back the neighbours", "error", err)
		return
	}
	r.neighbours = nil
	r.release(all)
}

// report logs new problems of targets that still have a hop.
func (r *Resolver) report(problems map[netip.Addr]string) {
	for target, problem := range problems {
		if r.problems[target] != problem {
			r.log.Warn("next hop of server", "address", target, "error", problem)
		}
	}
	r.problems = problems
}
