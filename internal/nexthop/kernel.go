package nexthop

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// snapshot is the kernel's interfaces and neighbours at one time.
type snapshot struct {
	links      map[int]Link
	neighbours map[neighbour]entry
}

// neighbour is a key of the kernel's neighbour tables.
type neighbour struct {
	ifindex int
	address netip.Addr
}

// entry is what the kernel knows about a neighbour.
type entry struct {
	mac     [6]byte
	usable  bool // the kernel itself would send there
	managed bool // the kernel keeps it resolved
	fixed   bool // somebody else keeps it: an operator or a routing daemon
}

// usable are the states in which the kernel itself would send to an entry.
const usable = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY |
	netlink.NUD_PROBE | netlink.NUD_PERMANENT | netlink.NUD_NOARP

func readSnapshot() (*snapshot, error) {
	s := &snapshot{map[int]Link{}, map[neighbour]entry{}}
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	for _, l := range links {
		attrs := l.Attrs()
		link := Link{Index: attrs.Index, Name: attrs.Name, Type: l.Type(), MTU: attrs.MTU}
		if len(attrs.HardwareAddr) == len(link.MAC) {
			link.MAC = [6]byte(attrs.HardwareAddr)
		}
		s.links[link.Index] = link
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		neighbours, err := netlink.NeighList(0, family)
		if err != nil {
			return nil, fmt.Errorf("list neighbours: %w", err)
		}
		for i := range neighbours {
			s.add(&neighbours[i])
		}
	}
	return s, nil
}

func (s *snapshot) add(n *netlink.Neigh) {
	address, ok := netip.AddrFromSlice(n.IP)
	if !ok {
		return
	}
	e := entry{
		managed: n.FlagsExt&netlink.NTF_EXT_MANAGED != 0,
		fixed: n.State&(netlink.NUD_PERMANENT|netlink.NUD_NOARP) != 0 ||
			n.Flags&netlink.NTF_EXT_LEARNED != 0,
	}
	if len(n.HardwareAddr) == len(e.mac) {
		e.mac, e.usable = [6]byte(n.HardwareAddr), n.State&usable != 0
	}
	s.neighbours[neighbour{n.LinkIndex, address.Unmap()}] = e
}

// linkNamed is zero if there is no interface of the name.
func (s *snapshot) linkNamed(name string) Link {
	for _, link := range s.links {
		if link.Name == name {
			return link
		}
	}
	return Link{}
}

// route asks the kernel for the gateway and interface towards an address. The
// gateway is the address itself on a shared link.
func route(target netip.Addr) (neighbour, error) {
	routes, err := netlink.RouteGet(target.AsSlice())
	if err != nil {
		return neighbour{}, fmt.Errorf("no route: %w", err)
	}
	if len(routes) == 0 {
		return neighbour{}, errors.New("no route")
	}
	first := routes[0]
	if first.Type == unix.RTN_LOCAL {
		return neighbour{}, errors.New("the address is this host's own")
	}
	gateway := first.Gw
	if v, ok := first.Via.(*netlink.Via); ok {
		gateway = v.Addr
	}
	if gateway == nil {
		return neighbour{first.LinkIndex, target}, nil
	}
	via, _ := netip.AddrFromSlice(gateway)
	return neighbour{first.LinkIndex, via.Unmap()}, nil
}

// setManaged says whether the kernel is to resolve a neighbour and keep it
// resolved although no packet of the kernel's own goes there (NTF_EXT_MANAGED,
// Linux 5.16). With NTF_USE an entry that exists keeps its state and address.
func setManaged(n neighbour, managed bool) error {
	entry := &netlink.Neigh{
		LinkIndex: n.ifindex,
		IP:        net.IP(n.address.AsSlice()),
		Flags:     netlink.NTF_USE,
	}
	if managed {
		entry.FlagsExt = netlink.NTF_EXT_MANAGED
	}
	return netlink.NeighSet(entry)
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
