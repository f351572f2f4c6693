// SPDX-License-Identifier: Apache-2.0

// Package nexthop follows the next hops of a set of addresses: the interface and the MAC address by
// which the kernel would reach each address. The data path bypasses the kernel's routing. So this
// package follows the kernel's routes, neighbours and interfaces.
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
	Type  string  // the kernel's name for the kind of interface, such as "veth"; "device": hardware
	MAC   [6]byte // zero if it has no Ethernet address
	MTU   int     // in bytes, without the Ethernet header
}

// Hop is the next hop of an address.
type Hop struct {
	MAC  [6]byte
	Via  netip.Addr // the owner of the MAC address: a gateway, or the address itself on a shared link
	Link Link
	// Silent tells that the kernel has asked the neighbour and got no answer (FAILED of
	// ip-neighbour(8)), and has not heard from it since. MAC is then the last known one.
	Silent bool
	// Default tells that the hop comes from a default route.
	Default bool
}

// Update is the whole state of a resolver.
type Update struct {
	Own  []Link // the interfaces named to New, in that order; one that does not exist is zero
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

// settle is the time from an event to a reading of the kernel's tables, so that one reading
// suffices for several events.
const settle = 20 * time.Millisecond

// refresh is the interval at which the tables are read without an event. The kernel does not report
// every change: for example, it does not report a changed setting.
const refresh = 30 * time.Second

// retry is the time until the tables are read again after a failure.
const retry = time.Second

// leisure limits the cost of endless events. After a reading, events cause no other reading for
// leisure times the duration of this reading.
const leisure = 9

// Resolver follows interfaces by their names, and the routes and neighbours of its
// targets. It belongs to the network namespace it was started in.
//
// A target's hop comes from the longest prefix in the routing tables, whether or not the neighbour
// answers. A route of its own is a route to the target with a longer prefix than the default route.
// If a target that once had a route of its own has only the default route left, it has no hop until
// it has a route of its own again.
//
// Neighbours in use are "managed": the kernel keeps them resolved. When no target uses a neighbour
// any more, the resolver releases it, if a resolver made it managed. When the resolver ends, it
// releases all of them. A killed process releases nothing. The next process takes over the
// neighbours that it uses, and GiveBack releases the others.
type Resolver struct {
	log     *slog.Logger
	own     []string
	changes chan []netip.Addr // new targets
	updates chan Update

	// Only the goroutine in Run uses the fields below.
	targets    targets
	routed     map[netip.Addr]bool   // targets that have had a route of their own
	resumed    map[netip.Addr]Hop    // hops of the earlier process, until their targets are looked up
	results    map[netip.Addr]result // the last lookup of each target
	last       Update                // the result of the last reading
	neighbours map[neighbour]*known  // neighbours in use
	managed    map[neighbour]bool    // neighbours in use that this or an earlier resolver made managed
	problems   map[netip.Addr]string // logged problems of targets that have a hop
}

// New returns a resolver. It also follows the interfaces with the names in own. It works while Run
// runs.
func New(own []string, log *slog.Logger) *Resolver {
	return &Resolver{
		log: log, own: own, changes: make(chan []netip.Addr), updates: make(chan Update),
		routed: map[netip.Addr]bool{}, problems: map[netip.Addr]string{},
		neighbours: map[neighbour]*known{}, managed: map[neighbour]bool{},
	}
}

// Resume passes the hops of an earlier process to the resolver, before Run. Of a hop, only the MAC
// address, the index of its interface, Silent and Default are used. If the kernel does not know a
// neighbour at the moment, its hop stays in use, as it would have without the restart. A hop
// without a MAC address belongs to a target that has lost its own route.
func (r *Resolver) Resume(hops map[netip.Addr]Hop) {
	r.resumed = hops
	for target, hop := range hops {
		r.routed[target] = !hop.Default
	}
}

// SetTargets replaces the addresses to resolve. It returns when the resolver has received them, or
// the context ends.
func (r *Resolver) SetTargets(ctx context.Context, targets []netip.Addr) {
	select {
	case r.changes <- targets:
	case <-ctx.Done():
	}
}

// Updates delivers the whole state whenever any of it has changed. After SetTargets there is always
// an update.
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
		pending Update      // an update that was not delivered yet
		out     chan Update // r.updates if there is a pending update, otherwise nil
		alarm   = newAlarm(refresh)
		rested  time.Time // events cause no reading before this time
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
			if !open { // events were lost: read the tables again
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

// alarm is a timer that can only be moved to an earlier time. So endless events cannot delay it.
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

// retarget replaces the targets. It forgets which former targets had routes of their own, and their
// hops of the earlier process.
func (r *Resolver) retarget(addresses []netip.Addr) {
	r.targets = newTargets(addresses)
	gone := func(target netip.Addr) bool {
		_, ok := slices.BinarySearchFunc(r.targets, target, netip.Addr.Compare)
		return !ok
	}
	maps.DeleteFunc(r.routed, func(target netip.Addr, _ bool) bool { return gone(target) })
	maps.DeleteFunc(r.resumed, func(target netip.Addr, _ Hop) bool { return gone(target) })
}

// resolve reads the kernel's tables, and finds the hop of every target, or the reason why there is
// none. If a target has both a hop and a problem, resolve logs the problem.
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
	r.results = r.lookup(kernel)
	failures := r.follow(kernel)
	problems := map[netip.Addr]string{}
	for _, target := range r.targets {
		f := r.results[target]
		for _, n := range f.neighbours { // the first error is enough
			f.err = cmp.Or(f.err, failures[n])
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
		default: // the kernel keeps asking for the neighbours, and none has answered yet
			now.Problems[target] = fmt.Sprintf("%s does not answer on %s", f.neighbours[0].address,
				kernel.links[f.neighbours[0].ifindex].Name)
		}
	}
	r.report(problems)
	return now, nil
}

// lookup looks up every target in the routing tables. If routes change while the kernel lists them,
// any route may be missing from the list (observed for IPv6 on Linux 6.18). So if the prefix of a
// target's route is shorter than at the last lookup, lookup asks the kernel about this target.
func (r *Resolver) lookup(kernel *snapshot) map[netip.Addr]result {
	all := make(map[netip.Addr]result, len(r.targets))
	for _, target := range r.targets {
		f := kernel.policies[familyOf(target)].lookup(target)
		if f.bits < r.results[target].bits { // the route seems to be gone
			if asked := ask(target); asked.bits > f.bits {
				f = asked
			}
		}
		switch {
		case f.err != nil:
		case f.bits > 0:
			r.routed[target] = true
		case r.routed[target]: // and only the default route is left
			f = result{bits: -1, err: errWithdrawn}
		}
		all[target] = f
	}
	return all
}

// errWithdrawn is the error about a target that once had a route of its own, and has only the
// default route now. The router of the default route would not send packets to such a server.
var errWithdrawn = errors.New("only the default route is left, and it is not used: " +
	"the server had a route of its own before")

// known is the state of a neighbour in use.
type known struct {
	mac    [6]byte // the last known one; zero: none yet
	silent bool    // it was asked and has not answered since
}

// differs tells whether the kernel's entry shows something new about the neighbour, or must be made
// managed.
func (k *known) differs(e entry) bool {
	isNew := e.failed && !k.silent
	if e.usable {
		isNew = e.mac != k.mac || k.silent
	}
	return isNew || !e.managed && !e.fixed
}

// learn takes the state of the kernel's entry. A failure counts only if the kernel keeps the entry
// resolved: another entry may have failed long ago.
func (k *known) learn(e entry) {
	switch {
	case e.usable:
		k.mac, k.silent = e.mac, false
	case e.failed && (e.managed || e.fixed):
		k.silent = true
	}
}

// follow puts the neighbours of all found routes in use, and releases the others. It learns their
// states from the kernel's entries. The errors tell which neighbours cannot be made managed, and
// why.
func (r *Resolver) follow(kernel *snapshot) map[neighbour]error {
	used := map[neighbour]*known{}
	for target, f := range r.results {
		for _, n := range f.neighbours {
			if used[n] == nil {
				used[n] = cmp.Or(r.neighbours[n], &known{})
			}
		}
		r.resume(target, used)
	}
	r.neighbours = used
	failures := map[neighbour]error{}
	for n, known := range used {
		known.learn(kernel.neighbours[n])
		if err := r.manage(kernel, n); err != nil {
			failures[n] = err
		}
	}
	r.release(kernel.neighbours)
	return failures
}

// resume gives a target's neighbour the state of the earlier process's hop. A hop does not name its
// neighbour, so resume takes the preferred one on the hop's interface.
func (r *Resolver) resume(target netip.Addr, neighbours map[neighbour]*known) {
	hop, ok := r.resumed[target]
	if !ok {
		return
	}
	delete(r.resumed, target)
	for _, n := range r.results[target].neighbours {
		if n.ifindex == hop.Link.Index {
			*neighbours[n] = known{hop.MAC, hop.Silent}
			return
		}
	}
}

// hop returns the next hop by the first neighbour of a route that answers, or else by the first one
// whose MAC address is known. The last known MAC address stays in use while the kernel looks for a
// neighbour, and after that has failed: the neighbour may be back before the kernel asks again. hop
// returns false if no neighbour of the route has a known MAC address.
func (r *Resolver) hop(kernel *snapshot, f result) (Hop, bool) {
	var best Hop
	for _, n := range f.neighbours {
		k, link := r.neighbours[n], kernel.links[n.ifindex]
		if k.mac == [6]byte{} || link.MAC == [6]byte{} {
			continue
		}
		if !best.Via.IsValid() || !k.silent { // it is the first one, or answers
			best = Hop{MAC: k.mac, Via: n.address, Link: link, Silent: k.silent, Default: f.bits == 0}
		}
		if !k.silent {
			break
		}
	}
	return best, best.Via.IsValid()
}

// manage makes the kernel keep a neighbour resolved, unless it does so already. If the entry is
// from a resolver, this resolver will release it.
func (r *Resolver) manage(s *snapshot, n neighbour) error {
	link := s.links[n.ifindex]
	if link.MAC == [6]byte{} {
		return fmt.Errorf("interface %s has no Ethernet address", link.Name)
	}
	if e := s.neighbours[n]; e.managed || e.fixed {
		if e.ours {
			// This resolver also releases entries that a killed process has left. If a running process
			// still needs the entry, that process makes it managed again.
			r.managed[n] = true
		}
		return nil
	}
	if err := setManaged(n, true); err != nil {
		return fmt.Errorf("resolve %s on %s: %w", n.address, link.Name, err)
	}
	r.managed[n] = true
	return nil
}

// release releases the neighbours that are not used any more.
func (r *Resolver) release(all map[neighbour]entry) {
	for n := range r.managed {
		if r.neighbours[n] != nil {
			continue
		}
		delete(r.managed, n)
		if !all[n].ours {
			continue // the entry is gone, or somebody else keeps it now
		}
		if err := setManaged(n, false); err != nil {
			r.log.Error("give back a neighbour", "address", n.address, "error", err)
		}
	}
}

// releaseAll releases all neighbours, when the resolver ends.
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
