// SPDX-License-Identifier: Apache-2.0

package nexthop

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
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
	ours    bool // because a resolver asked for it
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
		if err := s.addNeighbours(family); err != nil {
			return nil, fmt.Errorf("list neighbours: %w", err)
		}
	}
	return s, nil
}

// addNeighbours asks the kernel itself: what the library makes of its answer lacks the originator.
func (s *snapshot) addNeighbours(family int) error {
	request := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, unix.NLM_F_DUMP)
	request.AddData(&netlink.Ndmsg{Family: uint8(family)})
	messages, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH)
	if err != nil {
		return err
	}
	for _, message := range messages {
		n, err := netlink.NeighDeserialize(message)
		if err != nil {
			return err
		}
		attributes, err := nl.ParseRouteAttr(message[unix.SizeofNdMsg:])
		if err != nil {
			return err
		}
		s.add(n, slices.ContainsFunc(attributes, func(a syscall.NetlinkRouteAttr) bool {
			return a.Attr.Type == netlink.NDA_PROTOCOL && bytes.Equal(a.Value, []byte{originator})
		}))
	}
	return nil
}

// add takes note of a neighbour, which a resolver has asked for some day or not.
func (s *snapshot) add(n *netlink.Neigh, asked bool) {
	address, ok := netip.AddrFromSlice(n.IP)
	if !ok {
		return
	}
	managed := n.FlagsExt&netlink.NTF_EXT_MANAGED != 0
	e := entry{
		managed: managed,
		ours:    managed && asked,
		fixed: n.State&(netlink.NUD_PERMANENT|netlink.NUD_NOARP) != 0 ||
			n.Flags&netlink.NTF_EXT_LEARNED != 0,
	}
	if len(n.HardwareAddr) == len(e.mac) {
		e.mac, e.usable = [6]byte(n.HardwareAddr), n.State&usable != 0
	}
	s.neighbours[neighbour{n.LinkIndex, address.Unmap()}] = e
}

// linksNamed are the interfaces of these names, zero where there is none.
func (s *snapshot) linksNamed(names []string) []Link {
	found := make([]Link, len(names))
	for _, link := range s.links {
		if i := slices.Index(names, link.Name); i >= 0 {
			found[i] = link
		}
	}
	return found
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

// originator is what resolvers give as the originator of entries that they ask for, "proto" of
// ip-neighbour(8): a number that neither the kernel's rtnetlink.h nor iproute2 has a name for.
const originator = 83

// setManaged says whether the kernel is to resolve a neighbour and keep it
// resolved although no packet of the kernel's own goes there (NTF_EXT_MANAGED,
// Linux 5.16). With NTF_USE an entry that exists keeps its state and address.
func setManaged(n neighbour, managed bool) error {
	family := unix.AF_INET6
	if n.address.Is4() {
		family = unix.AF_INET
	}
	request := nl.NewNetlinkRequest(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE|unix.NLM_F_ACK)
	request.AddData(&netlink.Ndmsg{Family: uint8(family), Index: uint32(n.ifindex), Flags: netlink.NTF_USE})
	request.AddData(nl.NewRtAttr(netlink.NDA_DST, n.address.AsSlice()))
	if managed {
		request.AddData(nl.NewRtAttr(netlink.NDA_FLAGS_EXT, nl.Uint32Attr(netlink.NTF_EXT_MANAGED)))
		request.AddData(nl.NewRtAttr(netlink.NDA_PROTOCOL, nl.Uint8Attr(originator)))
	}
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// GiveBack takes the mark from all neighbours that resolvers have made managed in this network
// namespace: after resolvers that were killed. One at work marks its own again.
func GiveBack() error {
	s, err := readSnapshot()
	if err != nil {
		return err
	}
	for n, e := range s.neighbours {
		if e.ours {
			if failed := setManaged(n, false); failed != nil {
				err = errors.Join(err, fmt.Errorf("give back neighbour %s: %w", n.address, failed))
			}
		}
	}
	return err
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
