// SPDX-License-Identifier: Apache-2.0

package nexthop

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// policy is the routing policy of a family: the rules, and the routes by their tables.
type policy struct {
	rules  []rule
	tables map[uint32]*table
}

// table is a routing table, reduced to routes that lead to targets.
type table struct {
	routes  map[netip.Prefix][]*route // ordered by metric, then by rank
	lengths []int                     // the lengths of the prefixes in bits, the longest first
}

// readPolicy reads the rules of a family, and the routes that lead to one of the targets.
func readPolicy(family byte, targets targets) (*policy, error) {
	rules, err := readRules(family)
	if err != nil {
		return nil, fmt.Errorf("list rules: %w", err)
	}
	var routes []*route
	err = readRoutes(family, func(r *route) {
		if targets.any(r.prefix) {
			routes = append(routes, r)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	if err := resolveObjects(routes); err != nil {
		return nil, fmt.Errorf("list nexthop objects: %w", err)
	}
	return newPolicy(rules, routes), nil
}

// resolveObjects gives paths to those routes that name only a nexthop object.
func resolveObjects(routes []*route) error {
	unresolved := func(r *route) bool {
		return r.kind == unix.RTN_UNICAST && len(r.paths) == 0 && r.object != 0
	}
	if !slices.ContainsFunc(routes, unresolved) {
		return nil
	}
	all, err := readObjects()
	for _, r := range routes {
		if unresolved(r) {
			all.resolve(r)
		}
	}
	return err
}

// newPolicy arranges the routes in tables. It leaves out routes that the kernel does not use now.
func newPolicy(rules []rule, routes []*route) *policy {
	p := &policy{rules, map[uint32]*table{}}
	for _, r := range routes {
		t := p.tables[r.table]
		if t == nil {
			t = &table{routes: map[netip.Prefix][]*route{}}
			p.tables[r.table] = t
		}
		if r.inUse() {
			t.routes[r.prefix] = append(t.routes[r.prefix], r)
		}
	}
	for _, t := range p.tables {
		t.sort()
	}
	return p
}

// inUse tells whether the kernel uses the route now. It does not if all interfaces of the route are
// down.
func (r *route) inUse() bool {
	return r.kind != unix.RTN_UNICAST ||
		slices.ContainsFunc(r.paths, func(p path) bool { return !p.dead })
}

// sort orders the routes of each prefix, and lists the lengths of the prefixes.
func (t *table) sort() {
	lengths := map[int]bool{}
	for prefix, routes := range t.routes {
		lengths[prefix.Bits()] = true
		slices.SortStableFunc(routes, func(a, b *route) int {
			return cmp.Or(cmp.Compare(a.metric, b.metric), cmp.Compare(a.rank, b.rank))
		})
	}
	for bits := range lengths {
		t.lengths = append(t.lengths, bits)
	}
	slices.SortFunc(t.lengths, func(a, b int) int { return cmp.Compare(b, a) })
}

// find returns the routes with the longest prefix that contains the target.
func (t *table) find(target netip.Addr) []*route {
	if t == nil {
		return nil
	}
	for _, bits := range t.lengths {
		prefix, _ := target.Prefix(bits)
		if routes := t.routes[prefix]; len(routes) > 0 {
			return routes
		}
	}
	return nil
}

// result is the outcome of the lookup of a target in the routing tables.
type result struct {
	neighbours []neighbour // the preferred one first; none if there is an error
	bits       int         // length of the route's prefix; 0: default route; -1: no route
	err        error
}

// nowhere is the result for a target without a route.
var nowhere = result{bits: -1, err: errors.New("no route")}

// errOwn is the error about a target that is an address of this host.
var errOwn = errors.New("the address is this host's own")

// lookup finds the neighbours through which the kernel would send a packet of this host to an
// address. The result comes from the first matching rule that drops packets, or whose table has a
// route that the rule does not ignore. Without such a rule, it is nowhere.
//
// Unlike a lookup by the kernel (ask), it ignores the states of neighbours. For IPv6, the kernel
// skips a route whose neighbour has failed, and tries shorter prefixes (rt6_score_route in
// net/ipv6/route.c). It does not do so if the sysctl net.ipv6.conf.all.forwarding is set.
func (p *policy) lookup(target netip.Addr) result {
	for i := 0; i < len(p.rules); i++ {
		rule := &p.rules[i]
		if !rule.matches(target) {
			continue
		}
		switch rule.action {
		case unix.FR_ACT_GOTO:
			if to := p.ruleAt(rule.jump); to > i { // a jump leads forward only
				i = to - 1 // the loop adds 1
			}
		case unix.FR_ACT_BLACKHOLE, unix.FR_ACT_UNREACHABLE, unix.FR_ACT_PROHIBIT:
			return result{bits: -1, err: fmt.Errorf("no route: rule %d forbids it", rule.priority)}
		case unix.FR_ACT_TO_TBL:
			routes := p.tables[rule.table].find(target)
			if len(routes) == 0 || rule.passesOver(routes[0]) {
				continue
			}
			neighbours, err := neighboursOf(routes, target)
			return result{neighbours, routes[0].prefix.Bits(), err}
		}
	}
	return nowhere
}

// ask makes the kernel look up an address. If the kernel has no usable route, or refuses the
// request, the result is nowhere.
func ask(target netip.Addr) result {
	request := nl.NewNetlinkRequest(unix.RTM_GETROUTE, 0)
	request.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{
		Family: familyOf(target), Dst_len: byte(target.BitLen()), Flags: unix.RTM_F_FIB_MATCH,
	}})
	request.AddData(nl.NewRtAttr(unix.RTA_DST, target.AsSlice()))
	messages, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE)
	if err != nil || len(messages) == 0 {
		return nowhere
	}
	r, ok := parseRoute(messages[0])
	// For IPv6 the kernel may report another route with the same nexthop object.
	if !ok || !r.prefix.Contains(target) || resolveObjects([]*route{r}) != nil || !r.inUse() {
		return nowhere
	}
	neighbours, err := neighboursOf([]*route{r}, target)
	return result{neighbours, r.prefix.Bits(), err}
}

// IsOwn tells whether the kernel delivers packets to an address on this host.
func IsOwn(address netip.Addr) bool { return errors.Is(ask(address).err, errOwn) }

// ruleAt returns the position of the first rule with a priority; -1: none.
func (p *policy) ruleAt(priority uint32) int {
	return slices.IndexFunc(p.rules, func(r rule) bool { return r.priority == priority })
}

// neighboursOf lists the neighbours that the routes of a prefix lead to, in the order of the
// routes. It stops at the first route that does not lead to another host. If that is the very first
// route, it returns the reason as an error.
func neighboursOf(routes []*route, target netip.Addr) (neighbours []neighbour, err error) {
	for _, r := range routes {
		if r.kind != unix.RTN_UNICAST {
			err = refusal(r)
			break
		}
		neighbours = append(neighbours, r.neighbours(target)...)
	}
	if len(neighbours) > 0 {
		return neighbours, nil
	}
	return nil, err
}

// neighbours returns the neighbours of those paths that are in use, in the order for the target.
func (r *route) neighbours(target netip.Addr) []neighbour {
	paths := slices.DeleteFunc(slices.Clone(r.paths), func(p path) bool { return p.dead })
	if len(paths) > 1 {
		slices.SortFunc(paths, func(a, b path) int {
			return cmp.Compare(a.order(target), b.order(target))
		})
	}
	neighbours := make([]neighbour, 0, len(paths))
	for _, p := range paths {
		if !p.gateway.IsValid() {
			p.gateway = target
		}
		neighbours = append(neighbours, neighbour{p.ifindex, p.gateway})
	}
	return neighbours
}

// refusals are the kinds of routes that drop packets, with their names.
var refusals = map[byte]string{
	unix.RTN_BLACKHOLE:   "blackhole",
	unix.RTN_UNREACHABLE: "unreachable",
	unix.RTN_PROHIBIT:    "prohibit",
}

// refusal returns the reason why a route does not lead to another host.
func refusal(r *route) error {
	if kind, ok := refusals[r.kind]; ok {
		return fmt.Errorf("no route: %s is routed as %s", r.prefix, kind)
	}
	return errOwn
}
