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
	"os"
	"slices"
	"strings"
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

// New returns a path for packets with these marks. It can be used after Set.
func New(mark, mask uint32) *Path { return &Path{mark: mark, mask: mask} }

// Set makes the path lead through an interface. The VIPs cannot be sources. The wanted addresses
// are preferred as sources, if the host has them.
func (p *Path) Set(by Interface, vips, wanted []netip.Addr) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.by, p.wanted = by, wanted
	p.vips, p.sources = map[netip.Addr]bool{}, map[bool]source{}
	for _, vip := range vips {
		p.vips[vip] = true
	}
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
	var errs []error
	for _, f := range []family{ipv4, ipv6} {
		rules, err := netlink.RuleList(f.number)
		if err != nil {
			errs = append(errs, fmt.Errorf("list the rules: %w", err))
			continue
		}
		for _, rule := range rules {
			if rule.Priority != rulePriority || rule.Mark != mark || rule.Table != firstTable+index {
				continue
			}
			rule.Family = f.number
			errs = append(errs, ignoring(unix.ENOENT, netlink.RuleDel(&rule)), clear(f, index))
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
	return Socket{p.by.Name, s.address}, s.err
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
	for _, scope := range []string{"all", p.by.Name} {
		value, err := os.ReadFile("/proc/sys/net/ipv4/conf/" + scope + "/accept_local")
		if err == nil && strings.TrimSpace(string(value)) == "1" {
			return true
		}
	}
	return false
}
