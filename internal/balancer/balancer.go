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
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/generation"
	"github.com/segue-lb/segue/internal/health"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/probe"
	"github.com/segue-lb/segue/internal/srv6"
)

const (
	// sweepInterval is the time between two sweeps of the flow table. An entry stays at most that
	// long after its timeout has passed.
	sweepInterval = 5 * time.Second
	// resolveTimeout is how long a start waits for the next hops of all servers.
	resolveTimeout = 3 * time.Second
	// gather is how long results of health checks and probes are collected before the servers that
	// get new flows are chosen again. Servers often fail together.
	gather = 10 * time.Millisecond
)

// Balancer is a running balancer. The goroutine in Run owns all fields. Other goroutines may call
// the exported methods.
type Balancer struct {
	log  *slog.Logger
	cfg  *desired.Balancer
	keys config.SignalKeys
	// generations are those of the configuration's services.
	generations generation.Generations
	saved       generation.Generations // what the file of generations contains
	saveProblem string                 // why they could not be saved; logged once
	setAside    bool                   // the file of generations could not be read
	plane       *dataplane.Plane
	slots       *dataplane.Slots
	services    *services
	own         []nexthop.Link // links of plane.Sides; zero until the resolver's first update
	hops        map[netip.Addr]nexthop.Hop
	problems    map[netip.Addr]string // why a target has no next hop
	resolver    *nexthop.Resolver
	checker     *health.Checker
	prober      *probe.Prober
	wire        *dataplane.Wire // the prober's access to the data path
	reloads     chan reload
	attached    bool
	mode        datapath.Mode   // native if at least one interface is
	warned      map[string]bool // names of interfaces that cannot send what XDP forwards
	stale       map[string]bool // services whose servers that get new flows must be chosen again
	swept       inspect.LastSweep
	ready       chan struct{}
}

// reload is a new configuration, and the channel for the result.
type reload struct {
	cfg    *desired.Balancer
	result chan<- error
}

// New loads the data path, and checks that the configuration fits the tables that an earlier
// process has left. New does not change these tables and attaches nothing. Run changes the tables
// and attaches the programs. New returns an error if the data path cannot be loaded, or if the
// tables do not fit.
func New(cfg *desired.Balancer, log *slog.Logger) (*Balancer, error) {
	clock, err := dataplane.NewFlowClock()
	if err != nil {
		return nil, err
	}
	return newBalancer(cfg, clock, log)
}

func newBalancer(cfg *desired.Balancer, clock *dataplane.FlowClock, log *slog.Logger) (*Balancer, error) {
	plane, err := dataplane.Open(cfg, clock, log)
	if err != nil {
		return nil, err
	}
	w := dataplane.NewWire(plane)
	b := &Balancer{
		log:      log,
		cfg:      cfg,
		plane:    plane,
		own:      make([]nexthop.Link, len(plane.Sides)),
		resolver: nexthop.New(cfg.Node.Interfaces(), log),
		checker:  health.New(log),
		prober:   probe.New(w, uint16(dataplane.ProtocolVersion), log),
		wire:     w,
		reloads:  make(chan reload),
		warned:   map[string]bool{},
		stale:    map[string]bool{},
		ready:    make(chan struct{}),
	}
	if err := b.read(); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	b.resolver.Resume(b.nextHops())
	return b, nil
}

// read reads the tables that an earlier process has left. It returns an error if they have no room
// for the services and servers that the configuration adds.
func (b *Balancer) read() (err error) {
	if b.keys, err = config.ReadSignalKeys(b.cfg.Node.SignalKey); err != nil {
		return err
	}
	b.generations = b.loadGenerations().Next(b.cfg.Services)
	if b.slots, err = dataplane.LoadSlots(b.plane); err != nil {
		return err
	}
	if b.services, err = loadServices(b.plane, b.slots, b.applyHop); err != nil {
		return err
	}
	added := 0
	for _, service := range b.cfg.Services {
		if b.services.byName[service.Name] == nil {
			added++
		}
	}
	return errors.Join(b.services.checkRoom(added), b.slots.CheckRoom(keysOf(b.cfg)))
}

// fill applies the configuration to the tables that an earlier process has left.
func (b *Balancer) fill(t *datapath.Takeover) error {
	if err := b.plane.BackUp(t); err != nil {
		return err
	}
	if err := b.plane.WriteIdentity(); err != nil {
		return err
	}
	if err := b.slots.Reclaim(keysOf(b.cfg)); err != nil {
		return err
	}
	return b.apply(b.cfg, b.keys, b.generations)
}

// apply makes the data path follow a configuration, the signal keys and the generations of the
// services.
func (b *Balancer) apply(cfg *desired.Balancer, keys config.SignalKeys, generations generation.Generations) error {
	if err := b.services.apply(cfg, generations); err != nil {
		return err
	}
	return b.plane.SetSignalKeys(keys)
}

// Close closes the data path. A data path that was attached keeps working. A data path that was
// never attached is removed.
func (b *Balancer) Close() error {
	err := b.plane.Close()
	if !b.attached {
		err = errors.Join(err, b.plane.Undo())
	}
	return err
}

// Collector returns a collector of the balancer's metrics. Close the collector before the balancer.
// Collector returns an error if the tables cannot be opened again.
func (b *Balancer) Collector() (*inspect.Collector, error) {
	tables, err := b.plane.Reader()
	if err != nil {
		return nil, err
	}
	return inspect.NewCollector(inspect.NewView(tables), &b.swept), nil
}

// Ready returns a channel that is closed when the data path is attached.
func (b *Balancer) Ready() <-chan struct{} {
	return b.ready
}

// Reload applies another configuration to a running balancer. It waits until Run has applied it. If
// Reload returns an error, the configuration before stays in force.
func (b *Balancer) Reload(ctx context.Context, cfg *desired.Balancer) error {
	result := make(chan error, 1)
	select {
	case b.reloads <- reload{cfg, result}:
		return <-result
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Run attaches the data path as soon as all next hops are known, or after resolveTimeout. It then
// keeps the data path up to date until the context ends. The data path stays attached after Run.
// Run returns an error if the instance works in another network namespace, if the data path cannot
// be attached, or if one of its interfaces is removed.
func (b *Balancer) Run(ctx context.Context) error {
	if err := b.plane.CheckNamespace(); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return b.resolver.Run(ctx) })
	group.Go(func() error { return b.checker.Run(ctx) })
	group.Go(func() error { return b.prober.Run(ctx) })
	group.Go(func() error { return b.control(ctx) })
	return group.Wait()
}

// control runs in the only goroutine that changes the data path.
func (b *Balancer) control(ctx context.Context) error {
	if err := b.start(ctx); err != nil || !b.attached {
		return err
	}
	b.saveGenerations()
	sweep := time.NewTicker(sweepInterval)
	defer sweep.Stop()
	admit, journal := newAlarm(), newAlarm()
	defer admit.Stop()
	defer journal.Stop()

	b.checker.SetTargets(ctx, b.services.healthTargets(b.cfg.Services))
	b.prober.SetTargets(ctx, b.services.probeTargets())
	for {
		if len(b.stale) > 0 {
			admit.within(gather)
			journal.within(journalDelay)
		}
		var err error
		select {
		case <-ctx.Done():
			b.logChanges()
			return nil
		case update := <-b.resolver.Updates():
			err = b.follow(update)
			journal.within(journalDelay)
		case result := <-b.checker.Updates():
			if svc := b.services.setHealth(result); svc != nil {
				b.stale[svc.Name] = true
			}
		case results := <-b.prober.Updates():
			for _, result := range results {
				if svc := b.services.setFault(result); svc != nil {
					b.stale[svc.Name] = true
				}
			}
		case <-admit.C:
			admit.armed = false
			b.admit()
		case <-journal.C:
			journal.armed = false
			b.logChanges()
		case <-sweep.C:
			b.saveGenerations()
			if err := b.sweep(); err != nil {
				b.log.Error("sweep the flow table", "error", err)
			}
		case r := <-b.reloads:
			r.result <- b.reload(ctx, r.cfg)
			b.saveGenerations()
			journal.within(journalDelay) // a new server may have no next hop
		}
		if err != nil {
			return err
		}
	}
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

// start attaches the data path when all next hops are known, or resolveTimeout after the resolver's
// first update.
func (b *Balancer) start(ctx context.Context) error {
	b.resolver.SetTargets(ctx, b.targets())
	// It starts at the resolver's first update. Before that update, no next hop can be known.
	var patience <-chan time.Time
	for !b.attached {
		var err error
		select {
		case <-ctx.Done():
			return nil
		case update := <-b.resolver.Updates():
			err = b.follow(update)
			if patience == nil {
				patience = time.After(resolveTimeout)
			}
		case <-patience:
			err = b.attach()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// attach applies the configuration and attaches the programs. If attach fails, the data path of an
// earlier process continues unchanged.
func (b *Balancer) attach() error {
	for i, name := range b.cfg.Node.Interfaces() {
		if b.own[i].Index == 0 {
			return fmt.Errorf("%s %q: there is no such interface", b.plane.Sides[i].Setting, name)
		}
	}
	if err := b.setHost(); err != nil {
		return err
	}
	if err := b.plane.CheckInterfaces(b.own); err != nil {
		return err
	}
	attached, err := b.takeOver()
	if err != nil {
		return err
	}
	b.attached, b.mode = true, datapath.Generic
	for i, a := range attached {
		a.WarnIfGeneric(b.log, b.own[i].Name)
		b.log.Info("steering", "interface", b.own[i].Name, "mode", a.Mode,
			"services", len(b.services.byName), "servers", len(b.services.members()))
		if a.Mode == datapath.Native {
			b.mode = a.Mode
		}
	}
	inside := len(attached) - 1
	b.wire.LeaveBy(b.own[inside].Index, attached[inside].Mode)
	b.applyHops()
	b.logChanges()
	close(b.ready)
	return nil
}

// logChanges logs which servers have become unfit for new flows, or fit again. It logs nothing
// before the data path is attached, because until then the state of the servers is unknown.
func (b *Balancer) logChanges() {
	if b.attached {
		b.services.logChanges(b.log)
	}
}

// takeOver applies the configuration and attaches the programs. On an error it restores the tables
// and the programs.
func (b *Balancer) takeOver() (attached []datapath.Attached, err error) {
	err = datapath.TakeOver(b.log, func(t *datapath.Takeover) error {
		if err := b.fill(t); err != nil {
			return err
		}
		attached, err = b.plane.Attach(t, b.own)
		return err
	})
	return attached, err
}

// follow applies an update of the resolver. It returns an error if the data path cannot be
// attached, or if an interface of the data path no longer exists.
func (b *Balancer) follow(update nexthop.Update) error {
	if err := b.followInterfaces(update.Own); err != nil {
		return err
	}
	b.hops, b.problems = update.Hops, update.Problems
	switch {
	case b.attached:
		b.applyHops()
	case b.resolved():
		return b.attach()
	}
	return nil
}

// followInterfaces stores the current links of the sides' interfaces, and writes changed MAC
// addresses to the programs. It returns an error if an interface was removed or created again: the
// new interface has no program, and only another start attaches one.
func (b *Balancer) followInterfaces(now []nexthop.Link) error {
	changed := false
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

// reload applies another configuration. If that fails, reload restores the running configuration.
func (b *Balancer) reload(ctx context.Context, cfg *desired.Balancer) error {
	if err := cfg.ReloadableFrom(b.cfg); err != nil {
		return err
	}
	keys, err := config.ReadSignalKeys(cfg.Node.SignalKey)
	if err != nil {
		return err
	}
	generations := b.generations.Next(cfg.Services)
	if err := b.apply(cfg, keys, generations); err != nil {
		if undo := b.apply(b.cfg, b.keys, b.generations); undo != nil {
			b.log.Error("restore the configuration before", "error", undo)
			return err
		}
		b.setTargets(ctx) // the restored servers may have other slots than before
		return err
	}
	changes := cfg.ChangesFrom(b.cfg).WithKeys(!slices.Equal(keys, b.keys))
	b.log.Info("reloaded", changes.Attributes()...)
	b.cfg, b.keys, b.generations = cfg, keys, generations
	b.setTargets(ctx)
	b.applyHops()
	return nil
}

// setTargets passes the servers of the configuration to the resolver, the checker and the prober.
func (b *Balancer) setTargets(ctx context.Context) {
	b.resolver.SetTargets(ctx, b.targets())
	b.checker.SetTargets(ctx, b.services.healthTargets(b.cfg.Services))
	b.prober.SetTargets(ctx, b.services.probeTargets())
}

// admit chooses the servers that get new flows for all stale services.
func (b *Balancer) admit() {
	for name := range b.stale {
		if svc := b.services.byName[name]; svc != nil {
			b.services.admit(svc)
		}
		delete(b.stale, name)
	}
}

// target returns the address whose route the packets to a server take.
func target(server *desired.Server) netip.Addr {
	if server.Locator.IsValid() {
		return srv6.SID{Locator: server.Locator, Function: srv6.Deliver}.Addr()
	}
	return server.Address
}

// servers iterates over the servers of the configuration, each with its service.
func (b *Balancer) servers() iter.Seq2[*desired.Service, *desired.Server] {
	return func(yield func(*desired.Service, *desired.Server) bool) {
		for i := range b.cfg.Services {
			svc := &b.cfg.Services[i]
			for j := range svc.Servers {
				if !yield(svc, &svc.Servers[j]) {
					return
				}
			}
		}
	}
}

func (b *Balancer) targets() []netip.Addr {
	seen := map[netip.Addr]bool{}
	var targets []netip.Addr
	for _, server := range b.servers() {
		if t := target(server); !seen[t] {
			seen[t] = true
			targets = append(targets, t)
		}
	}
	return targets
}

// applyHops writes the next hops into the server table. A server without a next hop gets no new
// flows, and its packets are dropped and counted. A server whose next hop does not answer keeps its
// flows and gets no new ones. Until this process has attached the data path, a server for which the
// resolver has no next hop keeps the next hop that the earlier process has written.
func (b *Balancer) applyHops() {
	for name, svc := range b.services.byName {
		for _, m := range svc.members {
			causes, routed := b.services.causes(m), m.routed
			b.applyHop(m)
			if b.services.causes(m) != causes || m.routed != routed {
				b.stale[name] = true
			}
		}
	}
	b.admit()
}

func (b *Balancer) applyHop(m *member) {
	to := target(&m.Server)
	hop, ok := b.hops[to]
	m.setReason(dataplane.Unresolved, true, b.problems[to])
	if !ok {
		if b.attached {
			b.plane.Servers.ClearNextHop(m.slot)
			m.set(dataplane.Unreachable, false) // it is unresolved instead
		}
		return
	}
	b.checkEgress(hop.Link)
	port, err := b.plane.Ports.Number(hop.Link)
	if err != nil {
		b.log.Error("next hop", "server", m.Name, "error", err)
		return
	}
	m.set(dataplane.Unreachable, hop.Silent)
	m.routed = m.routed || !hop.Default
	b.plane.Servers.SetNextHop(m.slot, hop.MAC, port)
}

// checkEgress warns once of each interface that drops all packets that XDP redirects to it. In
// generic mode the kernel can send through any interface.
func (b *Balancer) checkEgress(link nexthop.Link) {
	if b.mode != datapath.Native || dataplane.CanTransmit(link) || b.warned[link.Name] {
		return
	}
	b.warned[link.Name] = true
	b.log.Warn("servers are reached by an interface that cannot send what XDP forwards: their packets "+
		"are lost, and counted as forwarded; route to them by a physical interface",
		"interface", link.Name, "type", link.Type)
}

// nextHops returns the next hops in the server table, by target. A server that had a route of its
// own and has no next hop now is in the map as well, with a Hop that has neither MAC address nor
// interface.
func (b *Balancer) nextHops() map[netip.Addr]nexthop.Hop {
	hops := map[netip.Addr]nexthop.Hop{}
	for svc, server := range b.servers() {
		key := keyOfServer(svc, server, &b.cfg.Node)
		slot, ok := b.slots.Of(key)
		if !ok {
			continue
		}
		noted, routed := b.slots.Noted(key)
		mac, port, known := b.plane.Servers.NextHop(slot)
		if !known && !routed {
			continue
		}
		hop, seen := hops[target(server)] // known if another service has the target
		hop.Default = !routed && (hop.Default || !seen)
		if known {
			hop.MAC, hop.Silent = mac, noted.Has(dataplane.Unreachable)
			hop.Link.Index = b.plane.Ports.Ifindex(port)
		}
		hops[target(server)] = hop
	}
	return hops
}

// resolved tells whether all servers have a next hop.
func (b *Balancer) resolved() bool {
	for _, server := range b.servers() {
		if _, ok := b.hops[target(server)]; !ok {
			return false
		}
	}
	return true
}

// sweep frees the entries of flows whose timeout has passed, and of flows whose server was removed.
func (b *Balancer) sweep() error {
	kept, err := b.plane.Sweeper.Sweep(b.lifetimes())
	if err != nil {
		return err
	}
	b.swept.Set(kept)
	b.services.endHunts(time.Now())
	return errors.Join(b.services.removeSpares(), b.slots.Swept())
}

// lifetimes iterates over the slots of the configured servers, with the ages at which their entries
// are freed: the first tick after the timeout.
func (b *Balancer) lifetimes() iter.Seq2[uint32, dataplane.FlowLifetimes] {
	end := func(timeout time.Duration) uint16 { return b.plane.Clock.Ticks(timeout) + 1 }
	return func(yield func(uint32, dataplane.FlowLifetimes) bool) {
		for _, svc := range b.services.byName {
			lifetimes := dataplane.FlowLifetimes{
				dataplane.FlowNew:         end(svc.Timeouts.New),
				dataplane.FlowEstablished: end(svc.Timeouts.Established),
				dataplane.FlowClosing:     end(svc.Timeouts.Closing),
			}
			for _, m := range svc.members {
				if !yield(m.slot, lifetimes) {
					return
				}
			}
		}
	}
}
