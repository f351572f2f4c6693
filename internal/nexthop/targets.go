// SPDX-License-Identifier: Apache-2.0

package nexthop

import (
	"net/netip"
	"slices"
)

// targets is a list of different addresses in ascending order.
type targets []netip.Addr

func newTargets(addresses []netip.Addr) targets {
	sorted := slices.Clone(addresses)
	slices.SortFunc(sorted, netip.Addr.Compare)
	return slices.Compact(sorted)
}

// any tells whether there is a target in a prefix.
func (t targets) any(prefix netip.Prefix) bool {
	prefix = prefix.Masked()
	i, _ := slices.BinarySearchFunc(t, prefix.Addr(), netip.Addr.Compare)
	return i < len(t) && prefix.Contains(t[i])
}

// has tells whether there is a target of a family.
func (t targets) has(family byte) bool {
	return slices.ContainsFunc(t, func(a netip.Addr) bool { return familyOf(a) == family })
}
