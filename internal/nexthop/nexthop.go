// Package nexthop keeps track of how the kernel would reach a set of addresses:
// by which interface and to which MAC address. The data path sends packets past
// the kernel's own routing, so somebody must follow its routes and neighbours.
package nexthop

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Hop is the first step of the way to an address.
type Hop struct {
	MAC     [6]byte
	Ifindex int
}

// settle is how long events are gathered before the routes are read again.
const settle = 20 * time.Millisecond

// refresh is how often the routes are read without any event, in case one was
// lost (netlink drops messages when a socket's buffer is full).
const refresh = 30 * time.Second

// Resolver follows the routes and neighbours of its targets. It belongs to the
// network namespace it was started in.
type Resolver struct {
	log     *slog.Logger
	targets chan []netip.Addr
	updates chan map[netip.Addr]Hop
}

// New returns a resolver; it works while Run does.
func New(log *slog.Logger) *Resolver {
	return &Resolver{
		log:     log,
		targets: make(chan []netip.Addr),
		updates: make(chan map[netip.Addr]Hop),
	}
}

// SetTargets says which addresses to resolve from now on. It returns when the
// resolver has taken note, or the context ends.
func (r *Resolver) SetTargets(ctx context.Context, targets []netip.Addr) {
	select {
	case r.targets <- targets:
	case <-ctx.Done():
	}
}

// Updates delivers the hops of all targets that can be reached, whenever any of
// them changed. After SetTargets there is always one.
func (r *Resolver) Updates() <-chan map[netip.Addr]Hop {
	return r.updates
}

// Run resolves until the context ends.
func (r *Resolver) Run(ctx context.Context) error {
	events, err := subscribe(ctx)
	if err != nil {
		return err
	}
	var (
		targets []netip.Addr
		fresh   bool // the targets are new: their reader waits
		last    map[netip.Addr]Hop
		pending map[netip.Addr]Hop       // not yet taken by the reader
		out     chan map[netip.Addr]Hop  // r.updates while pending
		timer   = time.NewTimer(refresh) // the next time to resolve
	)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case targets = <-r.targets:
			fresh = true
			timer.Reset(0)
		case _, open := <-events:
			if !open { // it was not read fast enough, and has lost events
				if events, err = subscribe(ctx); err != nil {
					return err
				}
			}
			timer.Reset(settle)
		case <-timer.C:
			hops := r.resolve(targets, last)
			if fresh || !maps.Equal(hops, last) {
				pending, out = hops, r.updates
			}
			last, fresh = hops, false
			timer.Reset(refresh)
		case out <- pending:
			out = nil
		}
	}
}

// resolve looks up every target. One whose neighbour entry failed keeps its last
// MAC address while its route is the same: nothing better is known.
func (r *Resolver) resolve(targets []netip.Addr, last map[netip.Addr]Hop) map[netip.Addr]Hop {
	neighbours, err := readNeighbours()
	if err != nil {
		r.log.Error("read the neighbour tables", "error", err)
		return last
	}
	hops := make(map[netip.Addr]Hop, len(targets))
	for _, target := range targets {
		via, ifindex, err := route(target)
		if err != nil {
			r.log.Warn("no route to server", "address", target, "error", err)
			continue
		}
		mac, ok := neighbours[neighbour{ifindex, via}]
		if !ok {
			if err := solicit(ifindex, via); err != nil {
				r.log.Error("resolve next hop", "address", via, "error", err)
			}
			if old := last[target]; old.Ifindex == ifindex {
				mac, ok = old.MAC, true
			}
		}
		if ok {
			hops[target] = Hop{MAC: mac, Ifindex: ifindex}
		}
	}
	return hops
}

// route asks the kernel for the gateway and interface towards an address. The
// gateway is the address itself on a shared link.
func route(target netip.Addr) (via netip.Addr, ifindex int, err error) {
	routes, err := netlink.RouteGet(target.AsSlice())
	if err != nil {
		return netip.Addr{}, 0, err
	}
	if len(routes) == 0 {
		return netip.Addr{}, 0, unix.ENETUNREACH
	}
	first := routes[0]
	if first.Type == unix.RTN_LOCAL {
		return netip.Addr{}, 0, errors.New("the address is this host's own")
	}
	gateway := first.Gw
	if v, ok := first.Via.(*netlink.Via); ok {
		gateway = v.Addr
	}
	if gateway == nil {
		return target, first.LinkIndex, nil
	}
	via, _ = netip.AddrFromSlice(gateway)
	return via.Unmap(), first.LinkIndex, nil
}

// neighbour is a key of the kernel's neighbour tables.
type neighbour struct {
	ifindex int
	address netip.Addr
}

// usable are the states in which the kernel itself would send to an entry.
const usable = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY |
	netlink.NUD_PROBE | netlink.NUD_PERMANENT | netlink.NUD_NOARP

func readNeighbours() (map[neighbour][6]byte, error) {
	found := map[neighbour][6]byte{}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		entries, err := netlink.NeighList(0, family)
		if err != nil {
			return nil, err
		}
		for _, entry := range entries {
			address, ok := netip.AddrFromSlice(entry.IP)
			if ok && entry.State&usable != 0 && len(entry.HardwareAddr) == 6 {
				found[neighbour{entry.LinkIndex, address.Unmap()}] = [6]byte(entry.HardwareAddr)
			}
		}
	}
	return found, nil
}

// solicit makes the kernel resolve a neighbour, and keep it resolved although no
// packet of the kernel's own goes there (NTF_EXT_MANAGED, Linux 5.16).
func solicit(ifindex int, address netip.Addr) error {
	return netlink.NeighSet(&netlink.Neigh{
		LinkIndex: ifindex,
		IP:        net.IP(address.AsSlice()),
		Flags:     netlink.NTF_USE,
		FlagsExt:  netlink.NTF_EXT_MANAGED,
	})
}

// subscribe returns a channel that gets a value after changes of routes,
// neighbours or links, and holds one at most. It closes when the context ends or
// one of the three does.
func subscribe(ctx context.Context) (<-chan struct{}, error) {
	ctx, cancel := context.WithCancel(ctx)
	events, err := merge(ctx, cancel)
	if err != nil {
		cancel()
	}
	return events, err
}

func merge(ctx context.Context, cancel func()) (<-chan struct{}, error) {
	routes := make(chan netlink.RouteUpdate, 64)
	neighbours := make(chan netlink.NeighUpdate, 64)
	links := make(chan netlink.LinkUpdate, 64)
	if err := netlink.RouteSubscribe(routes, ctx.Done()); err != nil {
		return nil, fmt.Errorf("subscribe to routes: %w", err)
	}
	if err := netlink.NeighSubscribe(neighbours, ctx.Done()); err != nil {
		return nil, fmt.Errorf("subscribe to neighbours: %w", err)
	}
	if err := netlink.LinkSubscribe(links, ctx.Done()); err != nil {
		return nil, fmt.Errorf("subscribe to links: %w", err)
	}
	events := make(chan struct{}, 1)
	go func() {
		defer close(events)
		defer cancel()
		open := true
		for open {
			select {
			case _, open = <-routes:
			case _, open = <-neighbours:
			case _, open = <-links:
			}
			select {
			case events <- struct{}{}:
			default: // one is waiting already
			}
		}
	}()
	return events, nil
}
