// Package balancer is the control plane of `segue lb`: it loads the data path,
// makes it follow the configuration, the routes and the servers' health, and
// reads back what it does.
package balancer

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/health"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/srv6"
)

const (
	// sweepInterval is how often the flow table is rid of flows past their
	// timeouts; a flow stays at most as much longer.
	sweepInterval = 5 * time.Second
	// resolveTimeout is how long a start waits for the next hops of all servers.
	resolveTimeout = 3 * time.Second
	// gather is how long results of health checks and changes of next hops are
	// gathered before a service's table is built again: servers often fail together.
	gather = 10 * time.Millisecond
)

// Balancer is a running balancer. All but the exported methods belongs to the
// goroutine in Run.
type Balancer struct {
	log      *slog.Logger
	cfg      *config.Balancer
	kernel   *kernel
	slots    *slots
	services *services
	ports    *ports
	hops     map[netip.Addr]nexthop.Hop
	resolver *nexthop.Resolver
	checker  *health.Checker
	reloads  chan reload
	attached bool
	stale    map[string]bool // services whose table is to follow their servers' state
	flows    flowCounts      // that the last sweep left
	ready    chan struct{}

	published atomic.Pointer[published] // for scrapes
}

// reload is a new configuration, and where its result goes.
type reload struct {
	cfg    *config.Balancer
	result chan<- error
}

// New loads the data path and applies the configuration to it; no packet is
// touched before Run attaches it.
func New(cfg *config.Balancer, log *slog.Logger) (*Balancer, error) {
	k, err := openKernel(cfg)
	if err != nil {
		return nil, err
	}
	b := &Balancer{
		log:      log,
		cfg:      cfg,
		kernel:   k,
		resolver: nexthop.New(log),
		checker:  health.New(log),
		reloads:  make(chan reload),
		stale:    map[string]bool{},
		ready:    make(chan struct{}),
	}
	if err := b.load(); err != nil {
		_ = k.close()
		return nil, err
	}
	return b, nil
}

func (b *Balancer) load() (err error) {
	if b.slots, err = loadSlots(b.kernel); err != nil {
		return err
	}
	if b.ports, err = loadPorts(b.kernel); err != nil {
		return err
	}
	if b.services, err = loadServices(b.kernel, b.slots); err != nil {
		return err
	}
	return b.services.apply(b.cfg)
}

// Close lets go of the data path, which works on.
func (b *Balancer) Close() error {
	return b.kernel.close()
}

// Ready is closed when the data path is attached.
func (b *Balancer) Ready() <-chan struct{} {
	return b.ready
}

// Reload makes a running balancer follow another configuration. On an error the
// one before stays in force.
func (b *Balancer) Reload(ctx context.Context, cfg *config.Balancer) error {
	result := make(chan error, 1)
	select {
	case b.reloads <- reload{cfg, result}:
		return <-result
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Run attaches the data path as soon as its next hops are known, and keeps it
// true until the context ends. The data path stays.
func (b *Balancer) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return b.resolver.Run(ctx) })
	group.Go(func() error { return b.checker.Run(ctx) })
	group.Go(func() error { return b.control(ctx) })
	return group.Wait()
}

// control is the one goroutine that changes the data path.
func (b *Balancer) control(ctx context.Context) error {
	sweep := time.NewTicker(sweepInterval)
	defer sweep.Stop()
	patience := time.NewTimer(resolveTimeout)
	defer patience.Stop()

	rebuild := time.NewTimer(gather)
	defer rebuild.Stop()

	b.resolver.SetTargets(ctx, b.targets())
	b.checker.SetTargets(ctx, health.Targets(b.cfg.Services))
	for {
		b.publish()
		var err error
		select {
		case <-ctx.Done():
			return nil
		case hops := <-b.resolver.Updates():
			b.hops = hops
			b.applyHops()
			if len(b.unresolved()) == 0 {
				err = b.attach()
			}
		case result := <-b.checker.Updates():
			if svc := b.services.setHealth(result); svc != nil {
				b.stale[svc.Name] = true
			}
		case <-rebuild.C:
			b.rebuild()
		case <-patience.C:
			err = b.attach()
		case <-sweep.C:
			if err := b.sweep(); err != nil {
				b.log.Error("sweep the flow table", "error", err)
			}
		case r := <-b.reloads:
			r.result <- b.reload(ctx, r.cfg)
		}
		if err != nil {
			return err
		}
		if len(b.stale) > 0 {
			rebuild.Reset(gather)
		}
	}
}

// attach starts steering, once.
func (b *Balancer) attach() error {
	if b.attached {
		return nil
	}
	for _, name := range b.unresolved() {
		b.log.Warn("no next hop yet: it gets no new flows", "server", name)
	}
	link, err := netlink.LinkByName(b.cfg.Node.Interface)
	if err != nil {
		return fmt.Errorf("node.interface %q: %w", b.cfg.Node.Interface, err)
	}
	if err := b.followInterface(); err != nil {
		return err
	}
	attached, err := b.kernel.attach(link.Attrs().Index)
	if err != nil {
		return err
	}
	attached.WarnIfGeneric(b.log, b.cfg.Node.Interface)
	b.log.Info("steering", "interface", b.cfg.Node.Interface, "mode", attached.Mode,
		"services", len(b.services.byName), "servers", len(b.services.members()))
	b.attached = true
	b.applyHops()
	close(b.ready)
	return nil
}

// followInterface tells the program the MAC address of the interface, which an
// operator may change.
func (b *Balancer) followInterface() error {
	link, err := netlink.LinkByName(b.cfg.Node.Interface)
	if err != nil {
		return fmt.Errorf("node.interface %q: %w", b.cfg.Node.Interface, err)
	}
	mac := link.Attrs().HardwareAddr
	if len(mac) != 6 {
		return fmt.Errorf("node.interface %q has no Ethernet address", b.cfg.Node.Interface)
	}
	return b.kernel.setHostMAC([6]byte(mac))
}

// reload applies another configuration; a failure on the way brings the running
// one back.
func (b *Balancer) reload(ctx context.Context, cfg *config.Balancer) error {
	if err := cfg.ReloadableFrom(b.cfg); err != nil {
		return err
	}
	if err := b.services.apply(cfg); err != nil {
		if undo := b.services.apply(b.cfg); undo != nil {
			b.log.Error("restore the configuration before", "error", undo)
		}
		return err
	}
	b.cfg = cfg
	b.resolver.SetTargets(ctx, b.targets())
	b.checker.SetTargets(ctx, health.Targets(cfg.Services))
	b.applyHops()
	return nil
}

// rebuild swaps in new tables for the stale services, where they still exist and
// other servers are usable.
func (b *Balancer) rebuild() {
	for name := range b.stale {
		svc := b.services.byName[name]
		if svc == nil || slices.Equal(svc.placed, b.services.usable(svc)) {
			continue
		}
		if err := b.services.place(svc); err != nil {
			b.log.Error("new flows are placed as before", "service", name, "error", err)
		}
	}
	clear(b.stale)
}

// target is the address whose route a server's packets take.
func target(m *member) netip.Addr {
	if m.Locator.IsValid() {
		return srv6.SID{Locator: m.Locator, Function: srv6.Deliver}.Addr()
	}
	return m.Address
}

func (b *Balancer) targets() []netip.Addr {
	seen := map[netip.Addr]bool{}
	var targets []netip.Addr
	for _, m := range b.services.members() {
		if t := target(m); !seen[t] {
			seen[t] = true
			targets = append(targets, t)
		}
	}
	return targets
}

// applyHops writes the next hops into the server table. A server without keeps
// none: its packets are dropped and counted, and it gets no new flow. Before the
// start is over its next hop is not known yet, and that of the process before is
// kept.
func (b *Balancer) applyHops() {
	if b.attached {
		if err := b.followInterface(); err != nil {
			b.log.Error("follow the interface", "error", err)
		}
	}
	for name, svc := range b.services.byName {
		for _, m := range svc.members {
			reachable := b.kernel.servers.hasNextHop(m.slot)
			b.applyHop(m)
			if b.kernel.servers.hasNextHop(m.slot) != reachable {
				b.stale[name] = true
			}
		}
	}
}

func (b *Balancer) applyHop(m *member) {
	hop, ok := b.hops[target(m)]
	if !ok {
		if b.attached {
			b.kernel.servers.clearNextHop(m.slot)
		}
		return
	}
	port, err := b.ports.number(hop)
	if err != nil {
		b.log.Error("next hop", "server", m.Name, "error", err)
		return
	}
	b.kernel.servers.setNextHop(m.slot, hop.MAC, port)
}

// unresolved names the servers without a next hop.
func (b *Balancer) unresolved() []string {
	var names []string
	for _, m := range b.services.members() {
		if _, ok := b.hops[target(m)]; !ok {
			names = append(names, m.Name)
		}
	}
	return names
}

// sweep frees the flows past their timeouts and those of servers that are gone.
func (b *Balancer) sweep() error {
	now, err := flowClock()
	if err != nil {
		return err
	}
	timeouts := b.timeouts()
	b.flows = b.kernel.flows.sweep(func(e flowEntry) bool {
		limits, ok := timeouts[e.server()]
		return ok && e.age(now) <= limits[e.state()]
	})
	return b.slots.swept()
}

// timeouts are the ticks that flows in each state are kept, by server slot.
func (b *Balancer) timeouts() map[uint32][4]uint16 {
	timeouts := map[uint32][4]uint16{}
	for _, svc := range b.services.byName {
		var limits [4]uint16
		limits[balancerFlowStateFLOW_NEW] = ticks(svc.Timeouts.New)
		limits[balancerFlowStateFLOW_ESTABLISHED] = ticks(svc.Timeouts.Established)
		limits[balancerFlowStateFLOW_CLOSING] = ticks(svc.Timeouts.Closing)
		for _, m := range svc.members {
			timeouts[m.slot] = limits
		}
	}
	return timeouts
}
