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
	// Room for the longest encapsulation, in bytes: srv6-insert with one server adds 56.
	room = 56
	// leastMTU is the least MTU of IPv6 (RFC 8200, section 5).
	leastMTU = 1280
	// addressLife is how long a source address is used before it is chosen again.
	// The kernel removes the routes and the neighbour entries of an interface that goes down. So
	// they are made again with each choice.
	addressLife = 5 * time.Second
	// recheckPause is the shortest time from one search for the reason of a missing answer to the
	// next one for the same VIP. It is shorter than any timeout of checks.
	recheckPause = 50 * time.Millisecond
)

// gatewayMAC is the address in the permanent neighbour entries. No host has it: a packet that the
// data path does not encapsulate reaches nobody.
var gatewayMAC = net.HardwareAddr{0x02, 0x5e, 0x6c, 0, 0, 0}

// family is an IP version, with its gateway.
type family struct {
	number   int
	gateway  net.IP
	everyone *net.IPNet
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

// HostPath makes the host send the packets of health checks to the egress of the interface towards
// the servers, where the data path encapsulates them (bpf/balancer/signal/check.h). A rule sends
// marked packets of sockets that are bound to the interface to a routing table of their own. Its
// only routes lead to a gateway that does not exist, with a permanent neighbour entry. So checks
// need no route to the VIP, no neighbour that answers, and no VIP that is absent from the host.
//
// Its methods may be called from several goroutines, in the network namespace of the interface.
type HostPath struct {
	mark, mask uint32

	mutex sync.Mutex
	way   *way
}

// way is what Set has set, and what was found since. A lookup that has begun before another Set
// leaves its result in a way that is no longer used.
type way struct {
	mark, mask uint32
	by         PathInterface
	vips       map[netip.Addr]bool
	// wanted are the addresses that are preferred as sources.
	wanted []netip.Addr

	// lookups are under way. They work without the mutex, so no check waits for a lookup that it
	// does not need itself.
	lookups singleflight.Group
	mutex   sync.Mutex      // of what follows
	sources map[bool]source // by whether they are IPv4
	// returns tells for IPv4 VIPs whether the host accepts the answers of servers.
	returns map[netip.Addr]finding
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
	isLed   bool // the route and the rule of the family were made
	found   time.Time
}

// finding is nil if all is well, or the reason why checks cannot work.
type finding struct {
	err   error
	found time.Time
}

// NewHostPath returns a path for packets with these marks. It can be used after Set.
func NewHostPath(mark, mask uint32) *HostPath { return &HostPath{mark: mark, mask: mask, way: &way{}} }

// Set makes the path lead through an interface. The VIPs cannot be sources. The wanted addresses
// are preferred as sources, if the host has them. If the interface is another one than before, Set
// removes the rules that killed processes have left for interfaces that are gone. Its error tells
// that this failed. The path works all the same.
func (p *HostPath) Set(by PathInterface, vips, wanted []netip.Addr) error {
	next := &way{
		mark: p.mark, mask: p.mask, by: by, vips: map[netip.Addr]bool{}, wanted: wanted,
		sources: map[bool]source{}, returns: map[netip.Addr]finding{},
	}
	for _, vip := range vips {
		next.vips[vip] = true
	}
	p.mutex.Lock()
	before := p.way
	p.way = next
	p.mutex.Unlock()
	if by.Index != before.by.Index {
		return RemoveOrphanPaths(p.mark)
	}
	return nil
}

// present returns the present way. It returns false if there is none.
func (p *HostPath) present() (*way, bool) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.way, p.way.by.Index != 0
}

// lead makes the rule, the route and the neighbour entry of a family. If they are there already, it
// changes nothing: the kernel would tell every listener of a route that is written again. The first
// lead of a way writes the route in any case, because its MTU may be another one than before.
func (w *way) lead(f family, isLed bool) error {
	err := netlink.NeighSet(&netlink.Neigh{
		LinkIndex: w.by.Index, Family: f.number, State: netlink.NUD_PERMANENT, IP: f.gateway,
		HardwareAddr: gatewayMAC,
	})
	if err != nil {
		return fmt.Errorf("add neighbour %s to %s: %w", f.gateway, w.by.Name, err)
	}
	write := netlink.RouteReplace
	if isLed {
		write = netlink.RouteAdd
	}
	err = write(&netlink.Route{
		LinkIndex: w.by.Index, Family: f.number, Table: firstTable + w.by.Index, Dst: f.everyone,
		Gw: f.gateway, Flags: int(netlink.FLAG_ONLINK), MTU: max(w.by.MTU-room, leastMTU),
	})
	if err = ignoring(unix.EEXIST, err); err != nil {
		return fmt.Errorf("add a route to table %d: %w", firstTable+w.by.Index, err)
	}
	err = netlink.RuleAdd(w.rule(f))
	if err = ignoring(unix.EEXIST, err); err != nil {
		return fmt.Errorf("add a rule for mark %#x: %w", w.mark, err)
	}
	return nil
}

func (w *way) rule(f family) *netlink.Rule {
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Table = f.number, rulePriority, firstTable+w.by.Index
	rule.Mark, rule.Mask, rule.OifName = w.mark, &w.mask, w.by.Name
	return rule
}

// Close removes what the path has made in the host. No check may be under way.
func (p *HostPath) Close() error {
	w, ok := p.present()
	if !ok {
		return nil
	}
	return RemovePath(p.mark, w.by.Index)
}

// RemovePath removes what paths of packets with this mark through an interface have made in the
// caller's network namespace, for example those of a process that was killed.
func RemovePath(mark uint32, index int) error {
	return removeRules(mark, func(f family, rule *netlink.Rule) (remove bool, err error) {
		if rule.Table != firstTable+index {
			return false, nil
		}
		return true, clear(f, index)
	})
}

// RemoveOrphanPaths removes the rules for packets with this mark whose interface is gone from the
// caller's network namespace, whether or not another interface has its name. Only killed processes
// leave such rules. The routes and the neighbour entries have gone with the interface.
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

// removeRules removes the paths' rules for packets with this mark for which choose returns true.
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

// clear removes the route and the neighbour entry of a family.
func clear(f family, index int) error {
	route := netlink.RouteDel(&netlink.Route{
		LinkIndex: index, Family: f.number, Table: firstTable + index, Dst: f.everyone, Gw: f.gateway,
		Flags: int(netlink.FLAG_ONLINK),
	})
	neighbour := netlink.NeighDel(&netlink.Neigh{
		LinkIndex: index, Family: f.number, IP: f.gateway, State: netlink.NUD_PERMANENT,
	})
	// They went with the interface, if it is gone.
	for _, gone := range []error{unix.ESRCH, unix.ENOENT, unix.ENODEV} {
		route, neighbour = ignoring(gone, route), ignoring(gone, neighbour)
	}
	return errors.Join(route, neighbour)
}

func ignoring(this, err error) error {
	if errors.Is(err, this) {
		return nil
	}
	return err
}

// Socket is what a socket needs to send on the path: the interface to bind to, and the source
// address.
type Socket struct {
	Device string
	Source netip.Addr
}

// Socket returns what a socket to a VIP needs. It returns an error if the host has no address from
// which it can check the VIP, or would drop the answers.
func (p *HostPath) Socket(vip netip.Addr) (Socket, error) {
	w, ok := p.present()
	if !ok {
		return Socket{}, errors.New("the data path is not attached")
	}
	s := w.source(vip.Is4())
	if s.err == nil && vip.Is4() {
		s.err = w.return4(vip, addressLife)
	}
	return Socket{w.by.Name, s.address}, s.err
}

// Recheck tells why the host would drop the answers of a VIP at this moment, after a check without
// an answer. It returns nil if it would not.
func (p *HostPath) Recheck(vip netip.Addr) error {
	w, ok := p.present()
	if !ok || !vip.Is4() {
		return nil
	}
	return w.return4(vip, recheckPause)
}

// return4 tells why the host would drop the answers of an IPv4 VIP. It returns nil if it accepts
// them. It uses what was found at most the given time ago.
func (w *way) return4(vip netip.Addr, life time.Duration) error {
	known := func() finding {
		w.mutex.Lock()
		defer w.mutex.Unlock()
		return w.returns[vip]
	}
	isFresh := func() bool { return time.Since(known().found) <= life }
	w.lookUp(vip.String(), isFresh, func() {
		err := findOwn(w.by, vip)
		if err == nil {
			err = findReturn4(w.by, vip)
		}
		w.mutex.Lock()
		defer w.mutex.Unlock()
		w.returns[vip] = finding{err, time.Now()}
	})
	return known().err
}

// source returns the source address of a family.
func (w *way) source(is4 bool) source {
	known := func() source {
		w.mutex.Lock()
		defer w.mutex.Unlock()
		return w.sources[is4]
	}
	isFresh := func() bool { return time.Since(known().found) <= addressLife }
	w.lookUp(fmt.Sprint(is4), isFresh, func() {
		s := w.find(is4, known().isLed)
		w.mutex.Lock()
		defer w.mutex.Unlock()
		w.sources[is4] = s
	})
	return known()
}

// lookUp makes one goroutine find what has this key, unless that is fresh. All others that need the
// same wait for it.
func (w *way) lookUp(key string, isFresh func() bool, find func()) {
	if isFresh() {
		return
	}
	_, _, _ = w.lookups.Do(key, func() (any, error) {
		if !isFresh() { // after a lookup that has just ended
			find()
		}
		return nil, nil
	})
}

// find makes the host's part of the path for a family, and chooses the source address.
func (w *way) find(is4, isLed bool) source {
	f := ipv6
	if is4 {
		f = ipv4
	}
	s := source{isLed: isLed, found: time.Now()}
	if s.err = w.lead(f, isLed); s.err == nil {
		s.isLed = true
		s.address, s.err = w.choose(f)
	}
	return s
}

// choose returns the source address of a family: a preferred address, or else the first address of
// the interface, or else of any other one. Servers must have a route to it. A VIP cannot be a
// source, because the servers have it, too.
func (w *way) choose(f family) (netip.Addr, error) {
	all, err := netlink.AddrList(nil, f.number)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("list the addresses of the host: %w", err)
	}
	var best netip.Addr
	score := 0
	for _, a := range all {
		address, ok := netip.AddrFromSlice(a.IP)
		if address = address.Unmap(); !ok || !w.canBeSource(address, a) {
			continue
		}
		if s := w.score(address, a.LinkIndex); s > score {
			best, score = address, s
		}
	}
	if score == 0 {
		return best, fmt.Errorf("%s has no address from which it can check servers", w.by.Name)
	}
	return best, nil
}

func (w *way) canBeSource(address netip.Addr, a netlink.Addr) bool {
	const unusable = unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED | unix.IFA_F_DEPRECATED
	return address.IsGlobalUnicast() && !w.vips[address] && a.Flags&unusable == 0
}

// score is higher for better sources.
func (w *way) score(address netip.Addr, index int) int {
	switch {
	case slices.Contains(w.wanted, address):
		return 3
	case index == w.by.Index:
		return 2
	}
	return 1
}

// findOwn tells why the kernel would drop the answers of an IPv4 VIP that the host has itself
// (fib_validate_source in the kernel). It returns nil if the host does not have the VIP, or accepts
// packets from its own addresses.
func findOwn(by PathInterface, vip netip.Addr) error {
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
