// SPDX-License-Identifier: Apache-2.0

package health

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"
)

const (
	// rulePriority is the priority of the rules. The host's own rules are usually from 100 on.
	rulePriority = 94
	// firstTable plus the index of the interface is the number of the routing table.
	firstTable = 0x5e6c0000
	// room is the size of the longest encapsulation, in bytes: srv6-insert with one server adds 56.
	room = 56
	// leastMTU is the least MTU of IPv6 (RFC 8200, section 5).
	leastMTU = 1280
	// addressLife is how long a source address is used before it is chosen again. With each choice,
	// the routes and neighbour entries are made again, because the kernel removes those of an
	// interface that goes down.
	addressLife = 5 * time.Second
	// recheckPause is the shortest time between two searches for the reason why a VIP does not
	// answer. It is shorter than any timeout of checks.
	recheckPause = 50 * time.Millisecond
)

// gatewayMAC is the MAC address in the permanent neighbour entries. No host has it. So a packet
// that the data path does not encapsulate reaches nobody.
var gatewayMAC = net.HardwareAddr{0x02, 0x5e, 0x6c, 0, 0, 0}

// family is an IP version, with its gateway that does not exist.
type family struct {
	number   int
	gateway  net.IP
	everyone *net.IPNet // the prefix of all addresses
}

var (
	ipv4 = family{
		unix.AF_INET, net.IPv4(192, 0, 0, 8), // the IPv4 dummy address (RFC 7600)
		&net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)},
	}
	ipv6 = family{
		unix.AF_INET6, net.ParseIP("fe80::5e6c:6865:616c:7468"),
		&net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)},
	}
)

// HostPath makes the host send the packets of health checks out of the interface towards the
// servers. At its egress, the data path encapsulates them (bpf/balancer/signal/check.h). A rule
// makes the kernel use another routing table for packets that have the mark and come from sockets
// bound to the interface. The routes of this table lead to a gateway that does not exist, but has a
// permanent neighbour entry. So checks work without a route to the VIP, without a neighbour that
// answers, and even if the host itself has the VIP.
//
// Its methods may be called from several goroutines, in the network namespace of the interface.
type HostPath struct {
	mark, mask uint32

	mutex sync.Mutex
	state *pathState
}

// pathState has the arguments of one Set, and the findings since. Each Set makes a new state. So a
// call of find that began before a Set leaves its result in the old state, which is no longer used.
type pathState struct {
	mark, mask uint32
	by         PathInterface
	vips       map[netip.Addr]bool
	// wanted are the addresses that are preferred as sources.
	wanted []netip.Addr

	// running has the calls of find that have not ended. They do not hold the mutex. So a check
	// waits only for those that it needs itself.
	running singleflight.Group
	mutex   sync.Mutex      // of the fields below
	sources map[bool]source // the keys are true for IPv4, false for IPv6
	// answers tells for each IPv4 VIP whether the host accepts the answers of servers.
	answers map[netip.Addr]finding
}

// PathInterface is the interface through which checks leave.
type PathInterface struct {
	Name  string
	Index int
	MTU   int // in bytes, without the Ethernet header
}

// source is the source address of checks of a family, or the reason why there is none.
type source struct {
	address netip.Addr
	err     error
	isReady bool // the neighbour entry, the route and the rule of the family were made
	found   time.Time
}

// finding tells whether checks of a VIP can work.
type finding struct {
	err   error // why they cannot work; nil: they can
	found time.Time
}

// NewHostPath returns a path for packets whose mark, within the bits of mask, is mark. It can be
// used after Set.
func NewHostPath(mark, mask uint32) *HostPath {
	return &HostPath{mark: mark, mask: mask, state: &pathState{}}
}

// Set makes the path lead through an interface. The VIPs cannot be source addresses. The wanted
// addresses are preferred as source addresses, if the host has them. If the interface is another
// one than before, Set also removes the rules that killed processes have left for interfaces that
// are gone. An error is about this removal only: the path works nevertheless.
func (p *HostPath) Set(by PathInterface, vips, wanted []netip.Addr) error {
	next := &pathState{
		mark: p.mark, mask: p.mask, by: by, vips: map[netip.Addr]bool{}, wanted: wanted,
		sources: map[bool]source{}, answers: map[netip.Addr]finding{},
	}
	for _, vip := range vips {
		next.vips[vip] = true
	}
	p.mutex.Lock()
	before := p.state
	p.state = next
	p.mutex.Unlock()
	if by.Index != before.by.Index {
		return RemoveOrphanPaths(p.mark)
	}
	return nil
}

// present returns the present state. It returns false before the first Set.
func (p *HostPath) present() (*pathState, bool) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.state, p.state.by.Index != 0
}

// install makes the neighbour entry, the route and the rule of a family, unless they exist. isReady
// tells that install has made them before in this state. Then it does not replace the route,
// because the kernel would tell every listener of the change. The first time, it replaces the
// route, because its MTU may differ.
func (state *pathState) install(f family, isReady bool) error {
	err := netlink.NeighSet(&netlink.Neigh{
		LinkIndex: state.by.Index, Family: f.number, State: netlink.NUD_PERMANENT, IP: f.gateway,
		HardwareAddr: gatewayMAC,
	})
	if err != nil {
		return fmt.Errorf("add neighbour %s to %s: %w", f.gateway, state.by.Name, err)
	}
	write := netlink.RouteReplace
	if isReady {
		write = netlink.RouteAdd
	}
	err = write(&netlink.Route{
		LinkIndex: state.by.Index, Family: f.number, Table: firstTable + state.by.Index,
		Dst: f.everyone, Gw: f.gateway, Flags: int(netlink.FLAG_ONLINK),
		MTU: max(state.by.MTU-room, leastMTU),
	})
	if err = ignoring(unix.EEXIST, err); err != nil {
		return fmt.Errorf("add a route to table %d: %w", firstTable+state.by.Index, err)
	}
	err = netlink.RuleAdd(state.rule(f))
	if err = ignoring(unix.EEXIST, err); err != nil {
		return fmt.Errorf("add a rule for mark %#x: %w", state.mark, err)
	}
	return nil
}

// rule returns the rule of a family.
func (state *pathState) rule(f family) *netlink.Rule {
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Table = f.number, rulePriority, firstTable+state.by.Index
	rule.Mark, rule.Mask, rule.OifName = state.mark, &state.mask, state.by.Name
	return rule
}

// Close removes the rules, routes and neighbour entries of the path. No check may be under way.
func (p *HostPath) Close() error {
	state, ok := p.present()
	if !ok {
		return nil
	}
	return RemovePath(p.mark, state.by.Index)
}

// RemovePath removes the rules, routes and neighbour entries of paths with this mark, through the
// interface with this index, from the caller's network namespace. It also removes those that a
// killed process has left.
func RemovePath(mark uint32, index int) error {
	return removeRules(mark, func(f family, rule *netlink.Rule) (remove bool, err error) {
		if rule.Table != firstTable+index {
			return false, nil
		}
		return true, removeRoute(f, index)
	})
}

// RemoveOrphanPaths removes the rules of paths with this mark whose interface is gone from the
// caller's network namespace, even if a new interface has its name. Only killed processes leave
// such rules. The kernel has removed the routes and the neighbour entries together with the
// interface.
func RemoveOrphanPaths(mark uint32) error {
	return removeRules(mark, func(_ family, rule *netlink.Rule) (remove bool, err error) {
		link, err := netlink.LinkByIndex(rule.Table - firstTable)
		var gone netlink.LinkNotFoundError
		switch {
		case errors.As(err, &gone):
			return true, nil
		case err != nil:
			return false, fmt.Errorf("find the interface of the rule %v: %w", rule, err)
		}
		return link.Attrs().Name != rule.OifName, nil
	})
}

// removeRules removes those rules of paths with this mark for which choose returns true.
func removeRules(mark uint32, choose func(family, *netlink.Rule) (remove bool, err error)) error {
	var errs []error
	for _, f := range []family{ipv4, ipv6} {
		rules, err := netlink.RuleList(f.number)
		if err != nil {
			errs = append(errs, fmt.Errorf("list the rules: %w", err))
			continue
		}
		for _, rule := range rules {
			if rule.Priority != rulePriority || rule.Mark != mark || rule.Table <= firstTable {
				continue
			}
			remove, err := choose(f, &rule)
			errs = append(errs, err)
			if remove {
				rule.Family = f.number
				errs = append(errs, ignoring(unix.ENOENT, netlink.RuleDel(&rule)))
			}
		}
	}
	return errors.Join(errs...)
}

// removeRoute removes the route and the neighbour entry of a family.
func removeRoute(f family, index int) error {
	route := netlink.RouteDel(&netlink.Route{
		LinkIndex: index, Family: f.number, Table: firstTable + index, Dst: f.everyone, Gw: f.gateway,
		Flags: int(netlink.FLAG_ONLINK),
	})
	neighbour := netlink.NeighDel(&netlink.Neigh{
		LinkIndex: index, Family: f.number, IP: f.gateway, State: netlink.NUD_PERMANENT,
	})
	// If the interface is gone, the kernel has removed both.
	for _, gone := range []error{unix.ESRCH, unix.ENOENT, unix.ENODEV} {
		route, neighbour = ignoring(gone, route), ignoring(gone, neighbour)
	}
	return errors.Join(route, neighbour)
}

// ignoring returns err, or nil if err is the ignored error.
func ignoring(ignored, err error) error {
	if errors.Is(err, ignored) {
		return nil
	}
	return err
}

// Socket has the settings of a socket that sends on the path: the interface to bind to, and the
// source address.
type Socket struct {
	Device string
	Source netip.Addr
}

// Socket returns the settings of a socket to a VIP. It returns an error if the host has no address
// from which it can check the VIP, or would drop the answers.
func (p *HostPath) Socket(vip netip.Addr) (Socket, error) {
	state, ok := p.present()
	if !ok {
		return Socket{}, errors.New("the data path is not attached")
	}
	s := state.source(vip.Is4())
	if s.err == nil && vip.Is4() {
		s.err = state.checkReturn4(vip, addressLife)
	}
	return Socket{state.by.Name, s.address}, s.err
}

// Recheck returns why the host would drop the answers of a VIP at this moment, or nil if it would
// accept them. It is for use after a check without an answer.
func (p *HostPath) Recheck(vip netip.Addr) error {
	state, ok := p.present()
	if !ok || !vip.Is4() {
		return nil
	}
	return state.checkReturn4(vip, recheckPause)
}

// checkReturn4 returns why the host would drop the answers of an IPv4 VIP, or nil if it would
// accept them. It uses a finding that is at most as old as life, or else makes a new one.
func (state *pathState) checkReturn4(vip netip.Addr, life time.Duration) error {
	known := func() finding {
		state.mutex.Lock()
		defer state.mutex.Unlock()
		return state.answers[vip]
	}
	isFresh := func() bool { return time.Since(known().found) <= life }
	state.refresh(vip.String(), isFresh, func() {
		err := checkNotOwn4(state.by, vip)
		if err == nil {
			err = checkReverse4(state.by, vip)
		}
		state.mutex.Lock()
		defer state.mutex.Unlock()
		state.answers[vip] = finding{err, time.Now()}
	})
	return known().err
}

// source returns the source address of a family. It ensures that the family's route and rule exist.
func (state *pathState) source(is4 bool) source {
	known := func() source {
		state.mutex.Lock()
		defer state.mutex.Unlock()
		return state.sources[is4]
	}
	isFresh := func() bool { return time.Since(known().found) <= addressLife }
	state.refresh(fmt.Sprint(is4), isFresh, func() {
		s := state.find(is4, known().isReady)
		state.mutex.Lock()
		defer state.mutex.Unlock()
		state.sources[is4] = s
	})
	return known()
}

// refresh calls find, unless isFresh returns true. If several goroutines call refresh with the same
// key, one of them calls find, and the others wait for it.
func (state *pathState) refresh(key string, isFresh func() bool, find func()) {
	if isFresh() {
		return
	}
	_, _, _ = state.running.Do(key, func() (any, error) {
		if !isFresh() { // it is fresh if another call of find has just ended
			find()
		}
		return nil, nil
	})
}

// find makes the route and the rule of a family, and chooses the source address.
func (state *pathState) find(is4, isReady bool) source {
	f := ipv6
	if is4 {
		f = ipv4
	}
	s := source{isReady: isReady, found: time.Now()}
	if s.err = state.install(f, isReady); s.err == nil {
		s.isReady = true
		s.address, s.err = state.choose(f)
	}
	return s
}

// choose returns the source address of a family: a preferred address, or else the first address of
// the interface, or else the first address of any other interface. Servers must have a route to
// this address. A VIP cannot be a source, because the servers have it, too.
func (state *pathState) choose(f family) (netip.Addr, error) {
	all, err := netlink.AddrList(nil, f.number)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("list the addresses of the host: %w", err)
	}
	var best netip.Addr
	score := 0
	for _, a := range all {
		address, ok := netip.AddrFromSlice(a.IP)
		if address = address.Unmap(); !ok || !state.canBeSource(address, a) {
			continue
		}
		if s := state.score(address, a.LinkIndex); s > score {
			best, score = address, s
		}
	}
	if score == 0 {
		return best, fmt.Errorf("%s has no address from which it can check servers", state.by.Name)
	}
	return best, nil
}

// canBeSource tells whether an address can be a source: it is usable, and no VIP.
func (state *pathState) canBeSource(address netip.Addr, a netlink.Addr) bool {
	const unusable = unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED | unix.IFA_F_DEPRECATED
	return address.IsGlobalUnicast() && !state.vips[address] && a.Flags&unusable == 0
}

// score is higher for better sources.
func (state *pathState) score(address netip.Addr, index int) int {
	switch {
	case slices.Contains(state.wanted, address):
		return 3
	case index == state.by.Index:
		return 2
	}
	return 1
}

// checkNotOwn4 returns an error if the kernel would drop the answers of an IPv4 VIP because the VIP
// is an address of the host itself (fib_validate_source in the kernel). It returns nil if the host
// does not have the VIP, or accepts packets from its own addresses.
func checkNotOwn4(by PathInterface, vip netip.Addr) error {
	if sysctl4("all", "accept_local") == 1 || sysctl4(by.Name, "accept_local") == 1 {
		return nil
	}
	routes, err := netlink.RouteGet(vip.AsSlice())
	if err != nil || len(routes) == 0 || routes[0].Type != unix.RTN_LOCAL || isInVRF(by.Index) {
		return nil
	}
	return fmt.Errorf("the VIP %s is an address of this host: set the sysctl "+
		"net.ipv4.conf.%s.accept_local to 1, or the kernel drops the answers of servers", vip, by.Name)
}
