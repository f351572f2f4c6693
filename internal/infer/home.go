// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"
)

// WeightedServer is the name and the weight of a server.
type WeightedServer struct {
	Name string
	// Weight is the capacity, or 0 for a server that takes no new flows. If the balancers do not
	// know the capacities, all other weights are equal.
	Weight float64
}

// seed makes the hashes of homes independent of other hashes of the same names. A new seed means
// new homes: balancers with the old and the new seed disagree.
const seed = "segue home 1\x00"

// Homes returns the home of each server, as an index of balancers. It is the balancer that ranks
// highest for the server by rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings
// to increase hit rates", 1998), among those with room. A balancer has room until its home servers
// have its share of the total weight. All shares are equal: a balancer could not notice that it has
// too few home servers for its traffic. The servers are assigned in the order of their hashes, so
// that each balancer gets some of each kind. Territory infers the state of other servers from a
// balancer's home servers. These inferences are right only if the home servers are like the other
// servers (docs/research/placement.md). Balancers with the same servers agree, whatever the order
// of the servers.
func Homes(servers []WeightedServer, balancers []string) []int32 {
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
	tiny := total * 1e-9 // room that remains only because sums are not exact
	for _, s := range byHash(servers) {
		home := highest(servers[s].Name, balancers, func(b int) bool { return room[b] > tiny })
		room[home] -= servers[s].Weight
		homes[s] = int32(home)
	}
	return homes
}

// byHash returns the servers in the order of their hashes.
func byHash(servers []WeightedServer) []int32 {
	hashes := make([]uint64, len(servers))
	order := make([]int32, len(servers))
	for i := range servers {
		hashes[i], order[i] = hash(servers[i].Name, ""), int32(i)
	}
	slices.SortFunc(order, func(a, b int32) int { return cmp.Compare(hashes[a], hashes[b]) })
	return order
}

// highest returns the balancer with the highest hash for a server, among the fit balancers if
// there are any.
func highest(server string, balancers []string, fit func(int) bool) int {
	best, bestHash, bestIsFit := 0, uint64(0), false
	for i, b := range balancers {
		h, isFit := hash(server, b), fit(i)
		isBetter := h > bestHash
		if isFit != bestIsFit {
			isBetter = isFit
		}
		if i == 0 || isBetter {
			best, bestHash, bestIsFit = i, h, isFit
		}
	}
	return best
}

// Order returns all servers in the order in which a balancer prefers them if they are otherwise
// equal. Its home servers come first, then the servers of the next balancer by name, and so on in a
// circle. So no two balancers turn to the same servers first when they have no room at home. The
// home servers of another balancer are in reverse order: first those that their own balancer fills
// last.
func Order(servers []WeightedServer, balancers []string, homes []int32, self int) []int32 {
	place := make([]int, len(balancers)) // position of each balancer in the order of names
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
		n := 1 // number of servers with the home of the first one
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
