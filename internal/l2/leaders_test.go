// SPDX-License-Identifier: Apache-2.0

package l2

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
)

// TestLeaders: VIPs are spread evenly over the balancers that can answer for them. If a balancer
// comes or goes, few other VIPs move.
func TestLeaders(t *testing.T) {
	t.Parallel()
	var vips []netip.Addr
	for i := range 30 {
		vips = append(vips, netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}))
	}
	three := map[string]present{}
	for i := range 3 {
		three[fmt.Sprint("lb", i+1)] = present{VIPs: vips}
	}
	counts := func(leaders map[netip.Addr]string) string {
		has := map[string]int{}
		for _, leader := range leaders {
			has[leader]++
		}
		return fmt.Sprint(has)
	}
	all := leadersOf(three)
	if got := counts(all); got != "map[lb1:10 lb2:10 lb3:10]" {
		t.Error(got)
	}
	two := maps.Clone(three)
	delete(two, "lb2")
	rest := leadersOf(two)
	if got := counts(rest); got != "map[lb1:15 lb3:15]" {
		t.Error(got)
	}
	moved := 0
	for vip, leader := range all {
		if leader != "lb2" && rest[vip] != leader {
			moved++
		}
	}
	if moved > 3 {
		t.Errorf("%d VIPs of other balancers move", moved)
	}

	// A balancer that can answer for one VIP gets no other one. A VIP that nobody serves has no
	// leader.
	three["lb2"], three["lb3"] = present{VIPs: vips[:1]}, present{}
	some := leadersOf(three)
	if len(some) != len(vips) || slices.Contains(slices.Collect(maps.Values(some)), "lb3") {
		t.Errorf("%v", some)
	}
	three["lb1"] = present{}
	if got := leadersOf(three); len(got) != 1 || got[vips[0]] != "lb2" {
		t.Errorf("%v", got)
	}
}
