// SPDX-License-Identifier: Apache-2.0

// Package nexthop keeps track of how the kernel would reach a set of addresses:
// by which interface and to which MAC address. The data path sends packets past
// the kernel's own routing, so somebody must follow its routes, neighbours and
// interfaces.
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
	// Silent: the kernel has asked the neighbour, which has not answered (FAILED of
	// ip-neighbour(8)), and not been heard of since. Its MAC address is the last that is known.
	Silent bool
	// Default: the way is that of a default route.
	Default bool
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

// settle is how long events are gathered before the tables are read again.
const settle = 20 * time.Millisecond

// refresh is how often the tables are read without any event, in case the kernel
// told nothing of a change (as of settings).
const refresh = 30 * time.Second

// retry is when the tables are read again after that failed.
const retry = time.Second

// leisure limits what events without end cost: after the tables were read they rest for so many
// times as long as that took.
const leisure = 9

// Resolver follows interfaces by their names, and the routes and neighbours of its
// targets. It belongs to the network namespace it was started in.
//
// A target's hop is by the longest prefix in the routing tables, whether the neighbour there
// answers or not. A target that once had a longer prefix than that of the default route does not
// fall back to the default route: it has no hop until it has a route of its own again.
//
// Neighbours in use are "managed": the kernel keeps them resolved. Those that
// nobody else made so are given back when no target uses them any more, or the
// resolver ends. A process that is killed gives back nothing: the one after it
// takes over what it uses too, and GiveBack is for the rest.
type Resolver struct {
	log     *slog.Logger
	own     []string
	changes chan []netip.Addr // of the targets
	updates chan Update

	// Of the goroutine in Run:
	targets    targets
	routed     map[netip.Addr]bool   // targets that have had a route of their own
	resumed    map[netip.Addr]Hop    // of the process before, not yet taken up
	found      map[netip.Addr]found  // of the targets
	last       Update                // that was resolved
	neighbours map[neighbour]*known  // that are in use
	managed    map[neighbour]bool    // by resolvers, and in use by this one
	problems   map[netip.Addr]string // of targets that have a hop, as logged
}

// New returns a resolver that follows the named interfaces, too; it works while
// Run does.
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

// Resume says, before Run, by which hops an earlier process has reached targets: their MAC
// addresses, the indexes of their interfaces, and whether they were silent or by a default route.
// Those of neighbours that the kernel does not know at the moment stay in use, as they would have
// without the restart. A hop without a MAC address is that of a target that has lost its own route.
func (r *Resolver) Resume(hops map[netip.Addr]Hop) {
	r.resumed = hops
	for target, hop := range hops {
		r.routed[target] = !hop.Default
	}
}

// SetTargets says which addresses to resolve from now on. It returns when the
// resolver has taken note, or the context ends.
func (r *Resolver) SetTargets(ctx context.Context, targets []netip.Addr) {
	select {
	case r.changes <- targets:
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
		fresh   bool        // the targets are new: their reader waits
		pending Update      // not yet taken by the reader
		out     chan Update // r.updates while pending
		alarm   = newAlarm(refresh)
		rested  time.Time // when events may have the tables read again
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
			if !open { // it was not read fast enough, and has lost events
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

// retarget takes on other targets, and forgets what is known of those that are none any more.
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
		Own:      kernel.linksNamed(r.own),
		Hops:     make(map[netip.Addr]Hop, len(r.targets)),
		Problems: map[netip.Addr]string{},
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

// lookup looks up every target in the routing tables. A list of routes that the kernel makes while
// some come and others go may lack any (seen of IPv6 on Linux 6.18). So the kernel is asked about
// each target whose route seems to be gone.
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

// errWithdrawn is for a target that once was reached by a route of its own. Its server lies behind
// another neighbour than what default routes are for, which would send the packets elsewhere.
var errWithdrawn = errors.New("no route but the default route, which is not taken: " +
	"there was a longer prefix for it before")

// known is what is known of a neighbour in use.
type known struct {
	mac    [6]byte // the last one; zero: none yet
	silent bool    // it was asked, and not heard of since
}

// differs says whether the kernel's entry of the neighbour tells anything new, or has to be made
// managed.
func (k *known) differs(e entry) bool {
	kept := e.managed || e.fixed
	if e.usable {
		return e.mac != k.mac || k.silent || !kept
	}
	return e.failed && !k.silent || !kept
}

// learn takes on what the kernel knows. An entry that nobody keeps may have failed long ago.
func (k *known) learn(e entry) {
	switch {
	case e.usable:
		k.mac, k.silent = e.mac, false
	case e.failed && (e.managed || e.fixed):
		k.silent = true
	}
}

// follow makes the neighbours that were found the ones in use, and learns what the kernel knows of
// them. The errors are of those that cannot be used.
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

// resume takes up the hop by which an earlier process has reached a target. That does not say which
// neighbour it was: of those on the same interface the preferred one.
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

// hop is by the first neighbour that answers, or else by the first that ever did. While the kernel
// looks for a neighbour, and after it has found none, the last MAC address stays in use: nothing
// better is known, and the neighbour may be back before the kernel asks again.
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
func (r *Resolver) release(all map[neighbour]entry) {
	for way := range r.managed {
		if r.neighbours[way] != nil {
			continue
		}
		delete(r.managed, way)
		if !all[way].ours {
			continue // it is gone, or somebody else's now
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

// report logs the problems that are new, of targets that have a hop all the same.
func (r *Resolver) report(problems map[netip.Addr]string) {
	for target, problem := range problems {
		if r.problems[target] != problem {
			r.log.Warn("next hop of server", "address", target, "error", problem)
		}
	}
	r.problems = problems
}
