// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"
)

// Member is a server that is to have a home.
type Member struct {
	Name   string
	Weight float64 // its capacity, above 0, as all balancers know it; the same for all where they do not
}

// seed makes the hashes of homes independent of others of the same names. To change it is to change
// homes: balancers of the version before and after disagree.
const seed = "segue home 1\x00"

// Homes returns the home of each server, an index of balancers: the one that ranks highest for it by
// rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998)
// among those with room. A balancer has room until its servers have its share of all weight, because
// one with fewer than it has traffic for would not be able to tell. Servers go in the order of their
// hashes, so that each balancer has some of every kind: what Territory concludes from its own servers
// about others is right only if those are like its own (docs/placement.md). Balancers that know the same
// members agree, in whatever order they know them.
func Homes(servers []Member, balancers []string) []int32 {
	homes := make([]int32, len(servers))
	if len(balancers) == 0 {
		return homes
	}
	room := make([]float64, len(balancers))
	total := 0.0
	for _, s := range servers {
		total += s.Weight
	}
	for i := range room {
		room[i] = total / float64(len(balancers))
	}
	tiny := total * 1e-9 // of what is left for want of exact sums
	for _, s := range byHash(servers) {
		home := highest(servers[s].Name, balancers, func(b int) bool { return room[b] > tiny })
		room[home] -= servers[s].Weight
		homes[s] = int32(home)
	}
	return homes
}

// byHash returns the servers in the order of their hashes.
func byHash(servers []Member) []int32 {
	hashes := make([]uint64, len(servers))
	order := make([]int32, len(servers))
	for i := range servers {
		hashes[i], order[i] = hash(servers[i].Name, ""), int32(i)
	}
	slices.SortFunc(order, func(a, b int32) int { return cmp.Compare(hashes[a], hashes[b]) })
	return order
}

// highest is the balancer of the highest hash with a server, among those that are fit if any is.
func highest(server string, balancers []string, fit func(int) bool) int {
	best, highest, found := 0, uint64(0), false
	for i, b := range balancers {
		h, ok := hash(server, b), fit(i)
		if i == 0 || ok && !found || ok == found && h > highest {
			best, highest, found = i, h, ok || found
		}
	}
	return best
}

// Order returns all servers as a balancer prefers them among equals: those at home first, then those
// of the balancer that comes next by name, and so on around. So what does not find room at home goes
// from each balancer to servers of another one, and there first to those that their own balancer fills
// last.
func Order(servers []Member, balancers []string, homes []int32, self int) []int32 {
	place := make([]int, len(balancers)) // by name
	for i := range balancers {
		for _, other := range balancers {
			if other < balancers[i] {
				place[i]++
			}
		}
	}
	distance := func(s int32) int {
		if len(balancers) == 0 {
			return 0
		}
		return (place[homes[s]] - place[self] + len(balancers)) % len(balancers)
	}
	order := byHash(servers)
	slices.SortStableFunc(order, func(a, b int32) int { return cmp.Compare(distance(a), distance(b)) })
	for rest := order; len(rest) > 0; {
		n := 1
		for n < len(rest) && homes[rest[n]] == homes[rest[0]] {
			n++
		}
		if distance(rest[0]) > 0 {
			slices.Reverse(rest[:n])
		}
		rest = rest[n:]
	}
	return order
}

func hash(server, balancer string) uint64 {
	digest := sha256.Sum256([]byte(seed + server + "\x00" + balancer))
	return binary.BigEndian.Uint64(digest[:])
}
