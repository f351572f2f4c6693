// SPDX-License-Identifier: Apache-2.0

// Package balancer is the control plane of `segue lb`. It decides what the tables of package
// dataplane contain. The decision follows from the configuration, the routes, and the results of
// health checks and probes.
package balancer

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/health"
	"github.com/segue-lb/segue/internal/health/probe"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/internal/serversets"
)

const (
	// hintInterval is the time between two sweeps of the hint table. A hint that no packet follows
	// stays for one to two intervals.
	hintInterval = 30 * time.Second
	// sweepInterval is the time between two sweeps of the flow table. An entry stays at most that
	// long after its timeout has passed.
	sweepInterval = 5 * time.Second
	// resolveTimeout is how long a start waits for the next hops of all servers.
	resolveTimeout = 3 * time.Second
	// reloadTimeout is how long a reload waits for the next hops of the servers that it adds. The
	// kernel asks for a neighbour again after a second.
	reloadTimeout = 2 * time.Second
	// gather is how long results of health checks and probes are collected before the servers that
	// get new flows are chosen again. Servers often fail together.
	gather = 10 * time.Millisecond
)

// Balancer is a running balancer. The goroutine in control owns all fields. Other goroutines may
// call the exported methods.
type Balancer struct {
	log     *slog.Logger
	cfg     *desired.Balancer
	secrets desired.Secrets
	// generations are those of the configuration's services.
	generations serversets.Generations
	saved       serversets.Generations // what the file of generations contains
	saveProblem string                 // why the last save failed; empty: it has succeeded
	// Both functions may be nil.
	reportUnsaved func(problem string)
	reportReasons func([]rundir.ServerReason)
	reported      []rundir.ServerReason // the last reasons that were reported
	setAside      bool                  // the file of generations could not be read
	plane         *dataplane.Plane
	slots         *dataplane.Slots
	services      *services
	inference     *inference
	own           []nexthop.Link // links of plane.Sides; zero until the resolver's first update
	addresses     []netip.Addr   // of the host, as the data path knows them
	tags          datapath.TagWatch
	hops          map[netip.Addr]nexthop.Hop
	problems      map[netip.Addr]string // why a target has no next hop
	resolver      *nexthop.Resolver
	checker       *health.Checker
	path          *health.HostPath // by which the packets of health checks leave the host
	prober        *probe.Prober
	wire          *dataplane.Wire // the prober's access to the data path
	holding       *holding
	calls         chan call
	ended         chan struct{} // closed when nobody takes calls any more
	attached      bool
	mode          datapath.Mode   // native if at least one interface is
	warned        map[string]bool // names of interfaces that cannot send what XDP forwards
	events        *events.Stream
	stale         map[string]bool // names of services that must choose servers of new flows again
	// The alarms of pending work. When choice goes off, stale services choose their servers. At
	// journal, changes are logged. At slow, servers that start slowly take new flows or rest.
	choice, journal, slow *alarm
	// patience is how long a reload waits for next hops, after the resolver's first update.
	patience  time.Duration
	ready     chan struct{}
	abilities chan []ServiceState // has room for one value
	offload   *offload            // nil: the configuration has no switch
}

// call is a function for the goroutine that owns the balancer, and the channel for its error. The
// function gets the context of Run: the caller may go away while the function works.
type call struct {
	do     func(context.Context) error
	result chan<- error
}

// New loads the data path, and checks that the configuration fits the tables that an earlier
// process has left. The secrets are those of the configuration. New does not change these tables
// and attaches nothing. Run changes the tables and attaches the programs. New returns an error if
// the data path cannot be loaded, or if the tables do not fit.
func New(cfg *desired.Balancer, secrets desired.Secrets, log *slog.Logger) (*Balancer, error) {
	return NewShared(cfg, secrets, nil, log)
}

// NewShared makes a balancer as New does, but one that uses the generations that all balancers of
// the services share. If they are nil, the balancer makes its own.
func NewShared(
	cfg *desired.Balancer, secrets desired.Secrets, shared serversets.Generations, log *slog.Logger,
) (*Balancer, error) {
	clock, err := dataplane.NewFlowClock()
	if err != nil {
		return nil, err
	}
	b, err := newBalancer(cfg, secrets, clock, log)
	if err == nil && shared != nil {
		b.generations = shared
	}
	return b, err
}

// newBalancer makes a balancer with its own generations. The clock is that of the flow tables.
func newBalancer(
	cfg *desired.Balancer, secrets desired.Secrets, clock *dataplane.FlowClock, log *slog.Logger,
) (*Balancer, error) {
	plane, err := dataplane.Open(cfg, clock, log)
	if err != nil {
		return nil, err
	}
	w := dataplane.NewWire(plane)
	path := health.NewHostPath(dataplane.CheckMark, dataplane.CheckMarkMask)
	b := &Balancer{
		log:       log,
		cfg:       cfg,
		secrets:   secrets,
		plane:     plane,
		own:       make([]nexthop.Link, len(plane.Sides)),
		resolver:  nexthop.New(cfg.Node.Interfaces(), log),
		checker:   health.New(path, log),
		path:      path,
		inference: newInference(plane, log),
		prober:    probe.New(w, &caller{plane, path}, uint16(dataplane.ProtocolVersion), log),
		wire:      w,
		holding:   newHolding(plane.Held, log),
		calls:     make(chan call),
		ended:     make(chan struct{}),
		warned:    map[string]bool{},
		stale:     map[string]bool{},
		choice:    newAlarm(),
		journal:   newAlarm(),
		slow:      newAlarm(),
		patience:  reloadTimeout,
		ready:     make(chan struct{}),
		abilities: make(chan []ServiceState, 1),
		offload:   newOffload(cfg.Node.Switch),
	}
	if err := b.read(); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	b.resolver.Resume(b.nextHops()) // it continues with the next hops of an earlier process
	return b, nil
}

// Close closes the data path. A data path that was attached keeps working. A data path that was
// never attached is removed.
func (b *Balancer) Close() error {
	err := errors.Join(b.path.Close(), b.inference.poller.Close(), b.plane.Close())
	if !b.attached {
		err = errors.Join(err, b.plane.Loader.Undo())
	}
	return err
}

// Collector returns a collector of the balancer's metrics. Close the collector before the balancer.
// Collector returns an error if the tables cannot be opened again.
func (b *Balancer) Collector() (*inspect.Collector, error) {
	view, err := b.View()
	if err != nil {
		return nil, err
	}
	return inspect.NewCollector(view), nil
}

// View returns a view of the balancer's tables. Close the view before the balancer. View returns an
// error if the tables cannot be opened again.
func (b *Balancer) View() (*inspect.View, error) {
	tables, err := b.plane.Reader()
	if err != nil {
		return nil, err
	}
	return inspect.NewView(tables), nil
}

// Ready returns a channel that is closed when the data path is attached.
func (b *Balancer) Ready() <-chan struct{} {
	return b.ready
}

// Steps returns how many steps the goroutine that changes the data path has made. The watchdog sees
// by it if the goroutine hangs. While it works, it makes a step at least every five seconds, and
// one for each service that a reload changes.
func (b *Balancer) Steps() uint64 { return b.services.progress.Load() }

// Reload makes a running balancer follow another desired state with its secrets. The caller must
// not change them afterwards. Reload waits until Run has applied the state. If it returns an error,
// the state before stays in force.
func (b *Balancer) Reload(ctx context.Context, cfg *desired.Balancer, secrets desired.Secrets) error {
	return b.Follow(ctx, cfg, secrets, nil)
}

// Follow makes the balancer follow another desired state as Reload does, with the generations that
// all balancers of the services share. If they are nil, the balancer makes its own.
func (b *Balancer) Follow(
	ctx context.Context, cfg *desired.Balancer, secrets desired.Secrets, shared serversets.Generations,
) error {
	caller := ctx // knows the actor of the change
	return b.call(ctx, func(ctx context.Context) error {
		return b.reload(events.ByActor(ctx, caller), cfg, secrets, shared)
	})
}

var errEnded = errors.New("the balancer has ended")

// call makes the goroutine that owns the balancer call a function, and returns the function's
// error. If the context ends before the goroutine takes the function, call returns the context's
// error. After that, call waits for the function even if the context ends. If the goroutine ends
// before it takes the function, call returns errEnded.
func (b *Balancer) call(ctx context.Context, do func(context.Context) error) error {
	result := make(chan error, 1)
	select {
	case b.calls <- call{do, result}:
		return <-result
	case <-b.ended:
		return errEnded
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Run attaches the data path as soon as all next hops are known, or after resolveTimeout. It then
// keeps the data path up to date until the context ends. The data path stays attached after Run.
// Run returns an error if the instance works in another network namespace, if the data path cannot
// be attached, or if one of its interfaces is removed.
func (b *Balancer) Run(ctx context.Context) error {
	if err := b.plane.Loader.Check(); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return b.resolver.Run(ctx) })
	group.Go(func() error { return b.checker.Run(ctx) })
	group.Go(func() error { return b.prober.Run(ctx) })
	group.Go(func() error { return b.inference.run(ctx, b.ready) })
	group.Go(func() error { return b.holding.run(ctx, b.plane.Held) })
	group.Go(func() error { return b.control(ctx) })
	return group.Wait()
}

// control attaches the data path, and keeps it up to date until the context ends. It runs in the
// only goroutine that changes the data path. It returns an error if the data path cannot be
// attached, or if an update of the resolver cannot be applied.
func (b *Balancer) control(ctx context.Context) error {
	defer close(b.ended)
	if err := b.start(ctx); err != nil || !b.attached { // not attached: the context has ended
		return err
	}
	b.saveGenerations()
	sweep := time.NewTicker(sweepInterval)
	defer sweep.Stop()
	hints := time.NewTicker(hintInterval)
	defer hints.Stop()
	defer b.slow.Stop()
	defer b.choice.Stop()
	defer b.journal.Stop()

	b.setChecks(ctx)
	b.prober.SetTargets(ctx, b.services.probeTargets())
	for {
		b.services.progress.Add(1)
		b.arm()
		var err error
		select {
		case <-ctx.Done():
			b.logChanges()
			b.services.endSlowStarts()
			return nil
		case update := <-b.resolver.Updates():
			err = b.follow(update)
			b.journal.within(journalDelay)
		case result := <-b.checker.Updates():
			b.takeHealth(result)
		case results := <-b.prober.Updates():
			b.takeFaults(results)
		case <-b.choice.C:
			b.choose()
		case now := <-b.slow.C:
			b.tick(now)
		case <-b.journal.C:
			b.journal.armed = false
			b.logChanges()
		case <-sweep.C:
			b.saveGenerations()
			b.trySweep()
			b.showVLANTags()
		case <-hints.C:
			b.plane.Hints.Sweep()
		case c := <-b.calls:
			result := c.do(ctx)
			b.tellSwitch() // before the caller asks whether the switch follows
			c.result <- result
			b.saveGenerations()
			b.journal.within(journalDelay) // after a reload, a new server may have no next hop
		}
		if err != nil {
			return err
		}
	}
}

// arm sets the alarms of pending work, and tells the abilities of the services.
func (b *Balancer) arm() {
	b.tellAbilities()
	b.tellSwitch()
	if len(b.stale) > 0 {
		b.choice.within(gather)
		b.journal.within(journalDelay)
	}
	if len(b.services.starting) > 0 {
		b.slow.within(slowTick)
	}
}

// takeHealth stores the result of a health check, until choose.
func (b *Balancer) takeHealth(result health.Result) {
	if svc := b.services.setHealth(result); svc != nil {
		b.stale[svc.Name] = true
	}
}

// takeFaults stores what probes have found, until choose.
func (b *Balancer) takeFaults(results []probe.Result) {
	for _, result := range results {
		if svc := b.services.setFault(result); svc != nil {
			b.stale[svc.Name] = true
		}
	}
}

// choose handles the alarm choice: it chooses the servers of stale services.
func (b *Balancer) choose() {
	b.choice.armed = false
	b.admit()
}

// tick handles the alarm slow: servers that start slowly begin to take new flows, or to rest.
func (b *Balancer) tick(now time.Time) {
	b.slow.armed = false
	b.services.tickSlowStarts(now)
}

// alarm is a timer for pending work. More work does not postpone an alarm that is set.
type alarm struct {
	*time.Timer
	armed bool // true from within until the owner clears it, after the timer has fired
}

func newAlarm() *alarm {
	a := &alarm{Timer: time.NewTimer(time.Hour)}
	a.Stop()
	return a
}

// within sets the alarm, unless it is set already.
func (a *alarm) within(d time.Duration) {
	if !a.armed {
		a.Reset(d)
		a.armed = true
	}
}

// logChanges logs which servers have become unfit for new flows, or fit again, and reports the
// reasons. It does nothing before the data path is attached, because until then the state of the
// servers is unknown.
func (b *Balancer) logChanges() {
	if b.attached {
		b.services.logChanges(b.log)
		b.tellReasons()
	}
}

// follow applies an update of the resolver: the interfaces, the addresses of the host and the next
// hops. While the data path is not attached, follow only stores the next hops. When all targets
// have one, it attaches the data path. It returns an error if the data path cannot be attached, or
// if an interface of the data path no longer exists.
func (b *Balancer) follow(update nexthop.Update) error {
	if err := b.followInterfaces(update.Own); err != nil {
		return err
	}
	b.followAddresses(update.Addresses)
	if b.attached {
		b.takeHops(update)
		return nil
	}
	b.hops, b.problems = update.Hops, update.Problems
	if b.resolved(targetsOf(b.cfg)) {
		return b.attach()
	}
	return nil
}

// followAddresses tells the data path the addresses of the host. It only logs an error: without an
// address, the data path just cannot deliver the packets of clients on the host that use it.
func (b *Balancer) followAddresses(now []netip.Addr) {
	if slices.Equal(now, b.addresses) {
		return
	}
	if err := b.plane.SetOwnAddresses(now); err != nil {
		b.log.Error("tell the data path the addresses of this host", "error", err)
		return
	}
	b.addresses = now
}

// showVLANTags lets XDP see the VLAN tags of frames.
func (b *Balancer) showVLANTags() {
	for _, link := range b.own {
		b.tags.Show(b.log, link.Name, link.Index)
	}
}

// followInterfaces stores the current links of the sides' interfaces, and tells the programs and
// the path of checks what has changed. It returns an error if an interface was removed or created
// again: the new interface has no program, and only a restart attaches one.
func (b *Balancer) followInterfaces(now []nexthop.Link) error {
	changed, egressBefore := false, b.own[len(b.own)-1]
	for i, name := range b.cfg.Node.Interfaces() {
		before := b.own[i]
		if b.attached && now[i].Index != before.Index {
			return fmt.Errorf("%s %q is gone", b.plane.Sides[i].Setting, name)
		}
		if b.attached && now[i].MAC != before.MAC {
			b.log.Info("the interface changed", "interface", name, "mac", fmt.Sprintf("%x", now[i].MAC))
			changed = true
		}
	}
	b.own = now
	if b.attached && egressBefore != now[len(now)-1] {
		b.leadChecks()
	}
	if changed {
		return b.setHost()
	}
	return nil
}

// setHost describes the interfaces to the programs on them.
func (b *Balancer) setHost() error {
	for i, link := range b.own {
		if link.MAC == [6]byte{} {
			return fmt.Errorf("%s %q has no Ethernet address", b.plane.Sides[i].Setting, link.Name)
		}
	}
	return b.plane.SetHost(b.own)
}

// reload applies another configuration, with its secrets and the generations of its services. If
// the generations are nil, reload makes them from the present ones. If a step fails, reload
// restores the running configuration.
func (b *Balancer) reload(
	ctx context.Context, cfg *desired.Balancer, secrets desired.Secrets, generations serversets.Generations,
) error {
	if err := cfg.ReloadableFrom(b.cfg); err != nil {
		return err
	}
	// everything tells that the reload can affect services that do not differ.
	everything := !b.services.isSure || !reflect.DeepEqual(cfg.Node, b.cfg.Node)
	diff := diffOf(b.cfg.Services, cfg.Services)
	if err := b.widen(cfg); err != nil {
		return err
	}
	awaited := diff.addsTargets() // the resolver then gets other targets
	if awaited {
		b.awaitHops(ctx, cfg)
	}
	if generations == nil {
		generations = b.generations.NextOf(cfg.Services, diff.has)
	}
	losses := b.losses(diff) // after reconcile, the numbers of lost flows would be unknown
	// If the change does not concern the resolver, the checker and the prober, they keep their
	// targets.
	watched := b.services.watchedOf(diff)
	if err := b.reconcile(cfg, secrets.SignalKeys, generations); err != nil {
		b.restore(ctx)
		return err
	}
	// From here on, the new state is in force. The rest cannot fail.
	changes := cfg.ChangesFrom(b.cfg).
		WithKeys(!slices.Equal(secrets.SignalKeys, b.secrets.SignalKeys)).
		WithPasswords(secrets.Passwords.ChangedFrom(b.secrets.Passwords))
	by := events.ActorOf(ctx)
	b.log.Info("reloaded", append(changes.Attributes(), "by", by)...)
	b.cfg, b.secrets, b.generations = cfg, secrets, generations
	if everything || awaited || !watched.equals(b.services.watchedOf(diff)) {
		b.setTargets(ctx)
	}
	b.publishReload(diff, losses, changes, by)
	if everything {
		b.applyHops()
		b.publishAll()
		return nil
	}
	for name := range diff.after {
		b.applyHopsOf(name)
	}
	b.admit()
	for name := range diff.after {
		b.publish(b.services.byName[name])
	}
	return nil
}

// restore puts the running configuration in force again, after a reload has failed.
func (b *Balancer) restore(ctx context.Context) {
	if err := b.reconcile(b.cfg, b.secrets.SignalKeys, b.generations); err != nil {
		b.log.Error("restore the configuration before", "error", err)
		b.resolver.SetTargets(ctx, b.waysTo(targetsOf(b.cfg)))
		return
	}
	b.setTargets(ctx) // the restored servers may have other slots than before
}

// widen replaces the programs if they lack features that a desired state needs. It is called before
// the tables use these features.
func (b *Balancer) widen(cfg *desired.Balancer) error {
	return datapath.TakeOver(b.log, func(t *datapath.Takeover) error { return b.plane.Widen(t, cfg) })
}

// setTargets passes the servers of the configuration to the resolver, the checker and the prober.
func (b *Balancer) setTargets(ctx context.Context) {
	b.resolver.SetTargets(ctx, b.waysTo(targetsOf(b.cfg)))
	b.setChecks(ctx)
	b.prober.SetTargets(ctx, b.services.probeTargets())
}

// setChecks passes the servers with health checks to the checker, the data path and the host.
func (b *Balancer) setChecks(ctx context.Context) {
	targets, onPath := b.services.healthTargets(b.cfg.Services)
	b.plane.Checks.Replace(onPath)
	b.leadChecks()
	b.checker.SetTargets(ctx, targets)
}

// leadChecks tells the path of checks through which interface they leave, and which addresses
// cannot be their sources, because they are VIPs.
func (b *Balancer) leadChecks() {
	var vips []netip.Addr
	for i := range b.cfg.Services {
		vips = append(vips, b.cfg.Services[i].AllVIPs()...)
	}
	link := b.own[len(b.own)-1] // towards the servers
	egress := health.PathInterface{Name: link.Name, Index: link.Index, MTU: link.MTU}
	if b.cfg.Node.Underlay != nil {
		egress.MTU -= desired.UnderlayOverhead
	}
	if err := b.path.Set(egress, vips, b.cfg.Node.Addresses); err != nil {
		b.log.Warn("cannot remove the rules of interfaces that are gone", "error", err)
	}
}

// admit chooses again which servers get new flows, for all services whose choice is stale.
func (b *Balancer) admit() {
	for name := range b.stale {
		if svc := b.services.byName[name]; svc != nil {
			b.services.admit(svc)
			b.publish(svc)
		}
		delete(b.stale, name)
	}
}

// trySweep sweeps the flow tables. It logs an error, and the next sweep tries again.
func (b *Balancer) trySweep() {
	if err := b.sweep(); err != nil {
		b.log.Error("sweep the flow tables", "error", err)
	}
}

// sweep frees the entries of flows whose timeout has passed, and of flows whose server was removed.
// It stores the numbers of all other flows for readers. It then ends transitions that were waiting
// for former flows. It removes candidate tables that are not in force, and removed VIPs whose time
// is over. It frees the slots of servers that were removed some sweeps ago.
func (b *Balancer) sweep() error {
	kept, err := b.plane.Sweeper.Sweep(b.lifetimes())
	if err != nil {
		return err
	}
	b.services.endHunts(time.Now())
	defer b.publishDrained() // after Swept has stored the numbers of flows
	b.services.endFormerFlows(kept, time.Now())
	return errors.Join(b.services.removeSpares(), b.services.forgetVIPs(), b.slots.Swept(kept))
}

// lifetimes iterates over the slots of the configured servers, with the ages at which a sweep frees
// their entries or makes them silent: the first tick after the timeout.
func (b *Balancer) lifetimes() iter.Seq2[uint32, dataplane.FlowLifetimes] {
	clock := b.plane.Clock
	end := func(timeout time.Duration) uint16 { return clock.Ticks(timeout) + 1 }
	return func(yield func(uint32, dataplane.FlowLifetimes) bool) {
		for _, svc := range b.services.byName {
			lifetimes := dataplane.FlowLifetimes{
				New:         end(svc.Timeouts.New),
				Established: end(svc.Timeouts.Established),
				Closed:      clock.EndedTicks(svc.Timeouts.Closing) + 1,
				Silent:      end(svc.Timeouts.Silent),
			}
			for _, m := range svc.members {
				if !yield(m.slot, lifetimes) {
					return
				}
			}
		}
	}
}
