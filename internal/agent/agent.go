// SPDX-License-Identifier: Apache-2.0

// Package agent is the control plane of `segue agent`. It loads the data path of a server, adapts
// it to the configuration and to the interface, and reads its counters and states.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/poll"
)

// Agent is a running agent. Only the goroutine in Run uses its fields. Other goroutines call the
// exported methods.
type Agent struct {
	log    *slog.Logger
	cfg    *desired.Agent
	keys   desired.SignalKeys
	kernel *kernel
	link   iface
	// attached tells that the programs of this process are attached.
	attached      bool
	polls         *poll.Responder // nil: the configuration has no poll.listen
	watches       watches
	tags          datapath.TagWatch
	absent        map[netip.Addr]bool      // VIPs that are not addresses of the host
	restoreFailed map[netip.Addr]time.Time // when the agent last failed to restore a VIP
	// cookiesLost tells that a balancer asks for cookies, but the host sends no timestamps.
	cookiesLost bool
	others      map[string]othersWarned // the last warnings of followQUIC, by service
	events      *events.Stream
	requests    chan func() // functions for the goroutine in Run
	ready       chan struct{}
	steps       atomic.Uint64
}

// iface holds the properties of the interface that the data path needs.
type iface struct {
	index int
	mac   [6]byte
	mtu   int
}

// New loads the data path. The secrets are those of the configuration. Until Run is called, the
// agent processes no packets and changes nothing on the host.
func New(cfg *desired.Agent, secrets desired.Secrets, log *slog.Logger) (*Agent, error) {
	k, err := openKernel(&cfg.Node, log)
	if err != nil {
		return nil, err
	}
	a := &Agent{
		log:           log,
		cfg:           cfg,
		keys:          secrets.SignalKeys,
		kernel:        k,
		watches:       watches{},
		absent:        map[netip.Addr]bool{},
		restoreFailed: map[netip.Addr]time.Time{},
		requests:      make(chan func()),
		ready:         make(chan struct{}),
	}
	if cfg.Poll.Listen != "" {
		a.polls = poll.NewResponder(a.polledLoad)
	}
	return a, nil
}

// PublishTo makes the agent publish its events. Call it before Run.
func (a *Agent) PublishTo(stream *events.Stream) { a.events = stream }

// Close closes the agent's references to the data path. A data path that was attached keeps
// working. If it was not attached, Close removes what New has pinned.
func (a *Agent) Close() error {
	if a.polls != nil {
		_ = a.polls.Close()
	}
	err := a.kernel.close()
	if !a.attached {
		err = errors.Join(err, a.kernel.loader.Undo())
	}
	return err
}

// Ready returns a channel that is closed when the data path is attached.
func (a *Agent) Ready() <-chan struct{} {
	return a.ready
}

// Steps returns how many steps the goroutine in Run has made. While it works, it makes at least one
// step every ten seconds.
func (a *Agent) Steps() uint64 { return a.steps.Load() }

// Reload applies another configuration with its secrets to a running agent. On an error the agent
// keeps the previous configuration.
func (a *Agent) Reload(ctx context.Context, cfg *desired.Agent, secrets desired.Secrets) error {
	return a.do(ctx, func() error { return a.reload(cfg, secrets.SignalKeys, events.ActorOf(ctx)) })
}

// Losses returns the services that would lose their connections if the agent got the configuration
// cfg: the services whose VIP is not in cfg. The agent delivers the packets of all connections to a
// VIP as long as any service has the VIP.
func (a *Agent) Losses(ctx context.Context, cfg *desired.Agent) (losses []desired.Loss, err error) {
	err = a.do(ctx, func() error {
		losses, err = a.losses(cfg)
		return err
	})
	return losses, err
}

// do lets the goroutine in Run call a function, and returns its error.
func (a *Agent) do(ctx context.Context, call func() error) error {
	result := make(chan error, 1)
	select {
	case a.requests <- func() { result <- call() }:
		return <-result
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Run attaches the data path and keeps it up to date until the context ends. The data path stays
// attached after that. Run works on the network namespace of the thread that calls it.
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	links, err := followLinks(ctx)
	if err != nil {
		cancel()
		return a.kernel.undo(err)
	}
	addresses, err := addressChanges(ctx)
	if err != nil {
		cancel()
		discard(links)
		return a.kernel.undo(err)
	}
	defer func() {
		cancel()
		discard(links)
		discard(addresses)
		a.watches.stopAll()
	}()
	if err := a.start(); err != nil {
		return err
	}
	defer a.answerPolls(ctx)()
	defer a.auditConnections(ctx)()
	close(a.ready)
	due := time.NewTimer(0) // for the next call of checkHost
	defer due.Stop()
	for {
		a.steps.Add(1) // tells the watchdog that this loop is not stuck
		select {
		case <-ctx.Done():
			return nil
		case update, ok := <-links:
			if !ok { // the context has ended, or a change was lost
				if ctx.Err() != nil {
					return nil
				}
				if links, err = followLinks(ctx); err != nil {
					return err
				}
				continue
			}
			if err := a.followLink(update); err != nil {
				return err
			}
		case _, ok := <-addresses:
			if !ok { // the context has ended, or a change was lost
				if ctx.Err() != nil {
					return nil
				}
				if addresses, err = addressChanges(ctx); err != nil {
					return err
				}
			}
			due.Reset(settleInterval) // also after a lost change: checkHost reads the addresses themselves
		case <-due.C:
			a.checkHost()
			due.Reset(presenceInterval)
		case request := <-a.requests:
			request()
			due.Reset(0) // a reload changes what checkHost checks
		}
	}
}

// checkHost checks the VIPs, the setting of TCP timestamps, the connection IDs, and whether XDP
// sees VLAN tags. It adapts the data path to what it finds, and logs what an operator should
// change.
func (a *Agent) checkHost() {
	if err := a.followVIPs(); err != nil {
		a.log.Error("follow the VIPs", "error", err)
	}
	if err := a.followTimestamps(); err != nil {
		a.log.Error("follow the setting of TCP timestamps", "error", err)
	}
	if err := a.followQUIC(); err != nil {
		a.log.Error("follow the connection IDs of QUIC", "error", err)
	}
	a.tags.Show(a.log, a.cfg.Node.Interface, a.link.index)
}

// start applies the configuration and attaches the programs. If it fails, the data path of the
// previous process keeps working unchanged. If there was none, a failed start leaves nothing
// behind.
func (a *Agent) start() error {
	if err := a.check(); err != nil {
		return a.kernel.undo(err)
	}
	attached, err := a.attach()
	if err != nil {
		return a.kernel.undo(err)
	}
	a.attached = true
	attached.WarnIfGeneric(a.log, a.cfg.Node.Interface)
	a.tags.Show(a.log, a.cfg.Node.Interface, a.link.index)
	a.log.Info("receiving", "interface", a.cfg.Node.Interface, "mode", attached.Mode,
		"services", len(a.cfg.Services), "mtu", a.mtu(a.cfg))
	return nil
}

// find looks up the interface, and sets link.
func (a *Agent) find() error {
	name := a.cfg.Node.Interface
	link, err := netlink.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return fmt.Errorf("node.interface %q: there is no such interface", name)
	}
	if err != nil {
		return fmt.Errorf("node.interface %q: %w", name, err)
	}
	a.link, err = describe(link)
	return err
}

// check makes the steps of a start that change nothing that the previous process uses. It returns
// an error if the agent cannot start.
func (a *Agent) check() (err error) {
	// First: in another network namespace, find would report a missing interface.
	if err := a.kernel.loader.Check(); err != nil {
		return err
	}
	if err := a.find(); err != nil {
		return err
	}
	if err := a.kernel.loader.Check(a.link.index); err != nil {
		return err
	}
	if err := a.listenForPolls(); err != nil {
		return err
	}
	return a.kernel.setHostMAC(a.link.mac)
}

// attach changes the host and the tables, and attaches the programs. If a step fails, attach undoes
// all of them.
func (a *Agent) attach() (attached datapath.Attached, err error) {
	err = datapath.TakeOver(a.log, func(t *datapath.Takeover) error {
		if err := a.fill(t, a.cfg, a.keys); err != nil {
			return err
		}
		attached, err = a.kernel.attach(t, a.link.index)
		return err
	})
	return attached, err
}

// mtu returns the MTU, in bytes, of the path from the balancers to this host.
func (a *Agent) mtu(cfg *desired.Agent) int {
	if cfg.Node.MTU != 0 {
		return cfg.Node.MTU
	}
	return a.link.mtu
}

// tableContent returns the content of the tables for a configuration. It marks the VIPs that are
// absent, and limits the length of signals to the interface's MTU.
func (a *Agent) tableContent(cfg *desired.Agent) *tableContent {
	c := newTableContent(cfg, a.mtu(cfg))
	for vip := range a.absent {
		if _, ok := c.vips[vip.As16()]; ok {
			c.vips[vip.As16()] = absentVIP
		}
	}
	c.signalMTU = min(c.signalMTU, uint32(a.link.mtu))
	return c
}

// fill changes the host and the data path to match the configuration. It adds new objects before a
// packet can need them, and removes old ones when no packet can need them any more. keys are those
// in the configuration's file of signal keys.
func (a *Agent) fill(t *datapath.Takeover, cfg *desired.Agent, keys desired.SignalKeys) error {
	want := a.tableContent(cfg)
	if err := a.kernel.assigned.assign(t, want.assigned); err != nil {
		return err
	}
	if err := a.kernel.fill(t, want); err != nil {
		return err
	}
	if err := datapath.SetSignalKeys(a.kernel.objects.SignalKeys, keys); err != nil {
		return err
	}
	a.followConnections(t, cfg)
	a.watches.follow(loadTables{a.kernel.objects.Loads, a.kernel.objects.LoadMaps}, cfg, a.log)
	t.OnCommit(func() error { return a.kernel.assigned.release(want.assigned) })
	return nil
}

// apply runs fill in a takeover of its own, for a running agent.
func (a *Agent) apply(cfg *desired.Agent, keys desired.SignalKeys) error {
	return datapath.TakeOver(a.log, func(t *datapath.Takeover) error {
		return a.fill(t, cfg, keys)
	})
}

// reload applies another configuration with its signal keys. The log and the event of the change
// name the actor, who has asked for it. If a step fails, reload restores the running configuration.
func (a *Agent) reload(cfg *desired.Agent, keys desired.SignalKeys, actor string) error {
	if err := cfg.ReloadableFrom(a.cfg); err != nil {
		return err
	}
	if err := a.apply(cfg, keys); err != nil {
		if undo := a.apply(a.cfg, a.keys); undo != nil {
			a.log.Error("restore the configuration before", "error", undo)
		}
		return err
	}
	changes := cfg.ChangesFrom(a.cfg).WithKeys(!slices.Equal(keys, a.keys))
	a.log.Info("reloaded", append(changes.Attributes(), "by", actor)...)
	if len(changes) > 0 {
		a.events.Publish(events.Event{Kind: events.Changed, By: actor, Changes: changes.Summary()})
	}
	a.cfg, a.keys = cfg, keys
	if a.polls != nil {
		a.polls.SetKeys(keys)
	}
	return nil
}

// losses does the work of Losses, in the goroutine of Run.
func (a *Agent) losses(cfg *desired.Agent) (losses []desired.Loss, err error) {
	kept := map[netip.Addr]bool{}
	for i := range cfg.Services {
		for _, vip := range cfg.Services[i].AllVIPs() {
			kept[vip] = true
		}
	}
	for _, s := range a.cfg.Services {
		if !slices.ContainsFunc(s.AllVIPs(), func(vip netip.Addr) bool { return !kept[vip] }) {
			continue
		}
		loss := desired.Loss{Service: s.Name, Cause: desired.LossRemoved}
		connections, _, err := a.kernel.view().countedConnections(serviceKey(s))
		if err != nil {
			return nil, err
		}
		if connections != nil && s.Accept.Policy != "" { // otherwise the count is an old one, or none
			flows := uint64(*connections)
			loss.Flows = &flows
		}
		losses = append(losses, loss)
	}
	return losses, nil
}

// followLink adapts the data path to a changed MAC address or MTU of the agent's interface. It
// ignores other interfaces. It returns an error if the agent's interface was deleted.
func (a *Agent) followLink(update netlink.LinkUpdate) error {
	if int(update.Index) != a.link.index {
		return nil
	}
	if update.Header.Type == unix.RTM_DELLINK {
		return fmt.Errorf("node.interface %q is gone", a.cfg.Node.Interface)
	}
	now, err := describe(update.Link)
	if err != nil || now == a.link {
		return err
	}
	a.log.Info("the interface changed", "interface", a.cfg.Node.Interface,
		"mac", fmt.Sprintf("%x", now.mac), "mtu", now.mtu)
	a.link = now
	if err := a.kernel.setHostMAC(now.mac); err != nil {
		return err
	}
	return a.kernel.write(a.tableContent(a.cfg))
}

// describe returns the properties of an interface that the data path needs.
func describe(link netlink.Link) (iface, error) {
	attrs := link.Attrs()
	if len(attrs.HardwareAddr) != 6 {
		return iface{}, fmt.Errorf("node.interface %q has no Ethernet address", attrs.Name)
	}
	return iface{attrs.Index, [6]byte(attrs.HardwareAddr), attrs.MTU}, nil
}

// followLinks returns a channel of the current state of every interface, and of each change. The
// channel closes when the context ends, or when a change was lost.
func followLinks(ctx context.Context) (<-chan netlink.LinkUpdate, error) {
	links := make(chan netlink.LinkUpdate)
	err := netlink.LinkSubscribeWithOptions(links, ctx.Done(), netlink.LinkSubscribeOptions{
		ListExisting:  true,
		ErrorCallback: func(error) {}, // the channel is closed on an error
	})
	if err != nil {
		return nil, fmt.Errorf("follow the interfaces: %w", err)
	}
	return links, nil
}

// discard receives until the channel is closed, so that its sender can end. If the channel is nil,
// discard returns at once.
func discard[T any](updates <-chan T) {
	if updates == nil {
		return
	}
	for range updates {
	}
}
