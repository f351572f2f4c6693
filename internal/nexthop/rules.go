// SPDX-License-Identifier: Apache-2.0

package nexthop

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// rule is a rule of the kernel's routing policy (ip-rule(8)), reduced to one kind of packets: those
// that the host itself sends as root, without a source address, mark or port.
type rule struct {
	priority uint32
	to       netip.Prefix // the destinations of the rule; invalid: all
	applies  bool         // all other conditions of the rule are true for such packets
	inverted bool         // "not": the rule is for packets that do not match
	action   byte         // FR_ACT_*
	table    uint32       // the routing table, for FR_ACT_TO_TBL
	jump     uint32       // the priority of the next rule, for FR_ACT_GOTO
	// suppress is suppress_prefixlength: the rule ignores a route whose prefix has at most this
	// many bits. With -1, it ignores none.
	suppress int
}

// matches tells whether the rule is for a packet to an address.
func (r *rule) matches(target netip.Addr) bool {
	isMatch := r.applies && (!r.to.IsValid() || r.to.Contains(target))
	return isMatch != r.inverted
}

// passesOver tells whether the rule ignores a route that was found in its table. The lookup then
// goes on with the next rule. A route that drops packets is never ignored.
func (r *rule) passesOver(route *route) bool {
	if _, refused := refusals[route.kind]; refused {
		return false
	}
	return route.kind == unix.RTN_THROW || route.prefix.Bits() <= r.suppress
}

// defaultRules are the rules of a kernel without policy routing.
var defaultRules = []rule{
	{action: unix.FR_ACT_TO_TBL, table: unix.RT_TABLE_LOCAL, applies: true, suppress: -1},
	{action: unix.FR_ACT_TO_TBL, table: unix.RT_TABLE_MAIN, applies: true, suppress: -1},
}

// readRules returns the rules of a family in their order.
func readRules(family byte) ([]rule, error) {
	var rules []rule
	err := dump(unix.RTM_GETRULE, unix.RTM_NEWRULE, family, unix.SizeofRtMsg, func(message []byte) {
		rules = append(rules, parseRule(message))
	})
	if errors.Is(err, unix.EOPNOTSUPP) { // the kernel has no policy routing
		return defaultRules, nil
	}
	slices.SortStableFunc(rules, func(a, b rule) int { return cmp.Compare(a.priority, b.priority) })
	return rules, err
}

// parseRule reads a struct fib_rule_hdr and the attributes after it.
func parseRule(message []byte) rule {
	r := rule{
		action: message[7], table: uint32(message[4]), suppress: -1,
		inverted: binary.NativeEndian.Uint32(message[8:])&unix.FIB_RULE_INVERT != 0,
		applies:  message[3] == 0, // the type of service that the rule is for
	}
	var mark, mask uint32
	for kind, value := range attributes(message[unix.SizeofRtMsg:]) {
		switch kind {
		case unix.FRA_PRIORITY:
			r.priority = number(value)
		case unix.FRA_TABLE:
			r.table = number(value)
		case unix.FRA_GOTO:
			r.jump = number(value)
		case unix.FRA_SUPPRESS_PREFIXLEN:
			r.suppress = int(int32(number(value)))
		case unix.FRA_DST:
			r.to = netip.PrefixFrom(addressOf(value), int(message[1]))
		case unix.FRA_FWMARK:
			mark = number(value)
		case unix.FRA_FWMASK:
			mask = number(value)
		case unix.FRA_IIFNAME: // "lo" stands for packets that the host itself sends
			r.applies = r.applies && string(bytes.TrimRight(value, "\x00")) == "lo"
		case unix.FRA_UID_RANGE: // the range must begin at 0, which is root
			r.applies = r.applies && number(value) == 0
		case unix.FRA_L3MDEV: // if set, the rule is for packets of a VRF
			r.applies = r.applies && (len(value) == 0 || value[0] == 0)
		case unix.FRA_SRC, unix.FRA_OIFNAME, unix.FRA_TUN_ID, unix.FRA_IP_PROTO,
			unix.FRA_SPORT_RANGE, unix.FRA_DPORT_RANGE, fraDSCP:
			r.applies = false
		}
	}
	r.applies = r.applies && mark&mask == 0 // the packets have the mark 0
	return r
}

// fraDSCP is FRA_DSCP, since Linux 6.13.
const fraDSCP = 25
