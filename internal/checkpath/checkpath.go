// SPDX-License-Identifier: Apache-2.0

// Package checkpath makes the host send the packets of health checks to the egress of the interface
// towards the servers, where the data path encapsulates them (bpf/balancer/check.h). A rule sends
// marked packets of sockets that are bound to the interface to a routing table of their own. Its
// only routes lead to a gateway that does not exist, with a permanent neighbour entry. So checks
// need no route to the VIP, no neighbour that answers, and no VIP that is absent from the host.
package checkpath

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
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

// Path is the way of checks through an interface. Its methods may be called from several
// goroutines, in the network namespace of the interface.
type Path struct {
	mark, mask uint32

	mutex sync.Mutex
	by    Interface
	vips  map[netip.Addr]bool
	// wanted are the addresses that are preferred as sources.
	wanted  []netip.Addr
	sources map[bool]source // by whether they are IPv4
	// returns tells for IPv4 VIPs whether the host accepts the answers of servers.
	returns map[netip.Addr]finding
}

// Interface is the interface through which checks leave.
type Interface struct {
	Name  string
	Index int
	MTU   int // in bytes, without the Ethernet header
}

// source is the source address of checks of a family, or the reason why there is none.
type source struct {
	address netip.Addr
	err     error
	found   time.Time
}

// finding is nil if all is well, or the reason why checks cannot work.
type finding struct {
	err   error
	found time.Time
}

// New returns a path for packets with these marks. It can be used after Set.
func New(mark, mask uint32) *Path { return &Path{mark: mark, mask: mask} }

// Set makes the path lead through an interface. The VIPs cannot be sources. The wanted addresses
// are preferred as sources, if the host has them. If the interface is another one than before, Set
// removes the rules that killed processes have left for interfaces that are gone. Its error tells
// that this failed. The path works all the same.
func (p *Path) Set(by Interface, vips, wanted []netip.Addr) error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	isOther := by.Index != p.by.Index
	p.by, p.wanted = by, wanted
	p.vips, p.sources = map[netip.Addr]bool{}, map[bool]source{}
	p.returns = map[netip.Addr]finding{}
	for _, vip := range vips {
		p.vips[vip] = true
	}
	if isOther {
		return RemoveOrphans(p.mark)
	}
	return nil
}

// lead makes the rule, the route and the neighbour entry of a family.
func (p *Path) lead(f family) error {
	err := netlink.NeighSet(&netlink.Neigh{
		LinkIndex: p.by.Index, Family: f.number, State: netlink.NUD_PERMANENT, IP: f.gateway,
		HardwareAddr: gatewayMAC,
	})
	if err != nil {
		return fmt.Errorf("add neighbour %s to %s: %w", f.gateway, p.by.Name, err)
	}
	err = netlink.RouteReplace(&netlink.Route{
		LinkIndex: p.by.Index, Family: f.number, Table: firstTable + p.by.Index, Dst: f.everyone,
		Gw: f.gateway, Flags: int(netlink.FLAG_ONLINK), MTU: max(p.by.MTU-room, leastMTU),
	})
	if err != nil {
		return fmt.Errorf("add a route to table %d: %w", firstTable+p.by.Index, err)
	}
	err = netlink.RuleAdd(p.rule(f))
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add a rule for mark %#x: %w", p.mark, err)
	}
	return nil
}

func (p *Path) rule(f family) *netlink.Rule {
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Table = f.number, rulePriority, firstTable+p.by.Index
	rule.Mark, rule.Mask, rule.OifName = p.mark, &p.mask, p.by.Name
	return rule
}

// Close removes what the path has made in the host.
func (p *Path) Close() error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.by.Index == 0 {
		return nil
	}
	return Remove(p.mark, p.by.Index)
}

// Remove removes what paths of packets with this mark through an interface have made in the
// caller's network namespace, for example those of a process that was killed.
func Remove(mark uint32, index int) error {
	return removeRules(mark, func(f family, rule *netlink.Rule) (remove bool, err error) {
		if rule.Table != firstTable+index {
			return false, nil
		}
		return true, clear(f, index)
	})
}

// RemoveOrphans removes the rules for packets with this mark whose interface is gone from the
// caller's network namespace, whether or not another interface has its name. Only killed processes
// leave such rules. The routes and the neighbour entries have gone with the interface.
func RemoveOrphans(mark uint32) error {
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
func (p *Path) Socket(vip netip.Addr) (Socket, error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.by.Index == 0 {
		return Socket{}, errors.New("the data path is not attached")
	}
	is4 := vip.Is4()
	s, ok := p.sources[is4]
	if !ok || time.Since(s.found) > addressLife {
		s = p.find(is4)
		p.sources[is4] = s
	}
	if s.err == nil && is4 {
		s.err = p.return4(vip)
	}
	return Socket{p.by.Name, s.address}, s.err
}

// Recheck tells why the host would drop the answers of a VIP at this moment, after a check without an
// answer. It returns nil if it would not.
func (p *Path) Recheck(vip netip.Addr) error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.by.Index == 0 || !vip.Is4() {
		return nil
	}
	if time.Since(p.returns[vip].found) > recheckPause {
		delete(p.returns, vip)
	}
	return p.return4(vip)
}

// return4 tells why the host would drop the answers of an IPv4 VIP. It returns nil if it accepts
// them.
func (p *Path) return4(vip netip.Addr) error {
	f, ok := p.returns[vip]
	if !ok || time.Since(f.found) > addressLife {
		f = finding{findReturn4(p.by, vip), time.Now()}
		p.returns[vip] = f
	}
	return f.err
}

// find makes the host's part of the path for a family, and chooses the source address.
func (p *Path) find(is4 bool) (s source) {
	f := ipv6
	if is4 {
		f = ipv4
	}
	s.found = time.Now()
	if s.err = p.lead(f); s.err == nil {
		s.address, s.err = p.choose(is4)
	}
	return s
}

// choose returns the source address of a family: a preferred address, or else the first address of
// the interface, or else of any other one. Servers must have a route to it. A VIP cannot be a
// source, because the servers have it, too.
func (p *Path) choose(is4 bool) (netip.Addr, error) {
	number := unix.AF_INET6
	if is4 {
		number = unix.AF_INET
	}
	all, err := netlink.AddrList(nil, number)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("list the addresses of the host: %w", err)
	}
	if is4 && !p.accepts(all) {
		return netip.Addr{}, fmt.Errorf("an IPv4 VIP is an address of this host: set the sysctl "+
			"net.ipv4.conf.%s.accept_local to 1, or the kernel drops the answers of servers", p.by.Name)
	}
	var best netip.Addr
	score := 0
	for _, a := range all {
		address, ok := netip.AddrFromSlice(a.IP)
		if address = address.Unmap(); !ok || !p.canBeSource(address, a) {
			continue
		}
		if s := p.score(address, a.LinkIndex); s > score {
			best, score = address, s
		}
	}
	if score == 0 {
		return best, fmt.Errorf("%s has no address from which it can check servers", p.by.Name)
	}
	return best, nil
}

func (p *Path) canBeSource(address netip.Addr, a netlink.Addr) bool {
	const unusable = unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED | unix.IFA_F_DEPRECATED
	return address.IsGlobalUnicast() && !p.vips[address] && a.Flags&unusable == 0
}

// score is higher for better sources.
func (p *Path) score(address netip.Addr, index int) int {
	switch {
	case slices.Contains(p.wanted, address):
		return 3
	case index == p.by.Index:
		return 2
	}
	return 1
}

// accepts tells whether the host accepts packets from IPv4 VIPs. By default it does not if it has a
// VIP itself (fib_validate_source in the kernel).
func (p *Path) accepts(all []netlink.Addr) bool {
	has := slices.ContainsFunc(all, func(a netlink.Addr) bool {
		address, _ := netip.AddrFromSlice(a.IP)
		return p.vips[address.Unmap()]
	})
	if !has {
		return true
	}
	return sysctl4("all", "accept_local") == 1 || sysctl4(p.by.Name, "accept_local") == 1
}
