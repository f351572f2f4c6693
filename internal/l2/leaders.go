// SPDX-License-Identifier: Apache-2.0

package l2

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"maps"
	"net/netip"
	"slices"
)

// present is what a balancer tells the others through the store.
type present struct {
	// ID differs between all processes. So a balancer notices if another one has the same name.
	ID  string `json:"id"`
	MAC string `json:"mac"`
	// VIPs are those for which the balancer can answer.
	VIPs []netip.Addr `json:"vips"`
}

// text returns the value for the store.
func (p present) text() string {
	text, err := json.Marshal(p)
	if err != nil {
		panic(err) // it has only texts
	}
	return string(text)
}

// readPresent reads the values of the store. It leaves out values that it cannot read, which come
// from a build of another format: such a balancer answers for no VIP of this build.
func readPresent(values map[string]string) map[string]present {
	all := map[string]present{}
	for name, text := range values {
		var p present
		if json.Unmarshal([]byte(text), &p) == nil {
			all[name] = p
		}
	}
	return all
}

// leadersOf returns the balancer that answers for each VIP. All balancers find the same ones,
// because the result follows from what they tell each other alone. A VIP goes to the balancer that
// ranks highest for it by rendezvous hashing (Thaler and Ravishankar, 1998), among those that can
// answer for it and have room. A balancer has room until it has its share of the VIPs. So VIPs are
// spread evenly even if there are few, and a balancer that comes or goes moves few other VIPs.
func leadersOf(balancers map[string]present) map[netip.Addr]string {
	able := map[netip.Addr][]string{} // the balancers that can answer for a VIP
	for _, name := range slices.Sorted(maps.Keys(balancers)) {
		for _, vip := range balancers[name].VIPs {
			able[vip] = append(able[vip], name)
		}
	}
	inOrder := slices.SortedFunc(maps.Keys(able), func(a, b netip.Addr) int {
		return cmp.Or(bytes.Compare(rank(a, ""), rank(b, "")), a.Compare(b))
	})
	candidates := 0 // balancers that can answer for a VIP
	for _, p := range balancers {
		if len(p.VIPs) > 0 {
			candidates++
		}
	}
	leaders, has := map[netip.Addr]string{}, map[string]int{}
	for _, vip := range inOrder {
		share := (len(able) + candidates - 1) / candidates
		leader := slices.MaxFunc(able[vip], func(a, b string) int {
			hasRoom := func(name string) int { return min(share-has[name], 1) }
			return cmp.Or(cmp.Compare(hasRoom(a), hasRoom(b)), bytes.Compare(rank(vip, a), rank(vip, b)))
		})
		leaders[vip] = leader
		has[leader]++
	}
	return leaders
}

// rank returns how high a balancer ranks for a VIP.
func rank(vip netip.Addr, balancer string) []byte {
	sum := sha256.Sum256([]byte(vip.String() + "\x00" + balancer))
	return sum[:]
}
