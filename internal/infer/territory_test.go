// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func members(n int) []WeightedServer {
	list := make([]WeightedServer, n)
	for i := range list {
		list[i] = WeightedServer{Name: fmt.Sprintf("s%d", i), Weight: 1}
	}
	return list
}

// TestTerritoryByHand has the home servers 0 and 1 and the other servers 2 and 3. The capacities
// are 1, 2, 1, 2.
func TestTerritoryByHand(t *testing.T) {
	for _, c := range []struct {
		name  string
		flows [4]float64
		want  int32
	}{
		{"idle: at home, the shortest delay", [4]float64{0, 0, 0, 0}, 1},
		// Server 1 has room: 2/2 - 1. The number of waiting flows is never below 0.
		{"still no wait at home", [4]float64{1, 1, 0, 0}, 1},
		// The home servers are full: 3 flows for a capacity of 3. So other servers are assumed to
		// have the maximum, 0.9. One more flow means a wait of 1 on server 0, 3/2-1 = 1/2 on
		// server 1, 1+0.9-1 on server 2, and 1/2+0.9-1 on server 3.
		{"home is full", [4]float64{1, 2, 0, 0}, 3},
		// Server 3 has one flow of this balancer: 2/2+0.9-1 = 0.9, as server 2. On server 1 the
		// wait is 1/2.
		{"not abroad again", [4]float64{1, 2, 0, 1}, 1},
		// The waits are 5/2-1 on server 1, 1 on server 0, and 0.9 on servers 2 and 3. These two
		// have a delay of 1.9, and server 2 is first in the order.
		{"what waits at home goes abroad", [4]float64{1, 4, 0, 1}, 2},
		// The home servers carry 2/3. The wait is 1/2+2/3-1 = 1/6 on server 3, and 0 on server 1.
		{"abroad is not free either", [4]float64{2, 0, 0, 0}, 1},
	} {
		territory := NewTerritory([]float64{1, 2, 1, 2}, []int32{0, 1, 2, 3}, 2)
		for s, n := range c.flows {
			territory.Add(int32(s), n)
		}
		if got := territory.Best(); got != c.want {
			t.Errorf("%s: server %d, want %d", c.name, got, c.want)
		}
		if got := territory.BestOf([]uint16{0, 1, 2, 3}); got != c.want {
			t.Errorf("%s: server %d of all candidates, want %d", c.name, got, c.want)
		}
	}
}

// TestTerritoryWithoutHome checks that a balancer without home servers assumes nothing about other
// servers.
func TestTerritoryWithoutHome(t *testing.T) {
	territory := NewTerritory([]float64{1, 2}, []int32{0, 1}, 0)
	for i, want := range []int32{1, 0, 1} { // the delays are 1 and 1/2, then 1 and 1, then 2 and 1
		got := territory.Best()
		if got != want {
			t.Errorf("flow %d: server %d, want %d", i, got, want)
		}
		territory.Add(got, 1)
	}
	territory.SetCapacity(0, 0)
	territory.SetCapacity(1, 0)
	if got := territory.Best(); got != -1 {
		t.Errorf("server %d of none", got)
	}
}

// plainTerritory computes the choice of Territory directly, from all servers.
func plainTerritory(flows, capacity []float64, order []int32, homes int) int32 {
	carried, room := 0.0, 0.0
	for _, s := range order[:homes] {
		room += capacity[s]
		carried += flows[s]
	}
	best, bestScore := int32(-1), [3]float64{}
	for at, s := range order {
		c := capacity[s]
		if c == 0 {
			continue
		}
		load, away := flows[s], 0.0
		if at >= homes {
			away = 1
			if room > 0 {
				load += min(carried/room, mostOthers) * c
			}
		}
		// The least waiting, then home servers, then the shortest delay.
		score := [3]float64{math.Max(0, load+1-c) / c, away, (load + 1) / c}
		if best < 0 || slices.Compare(score[:], bestScore[:]) < 0 {
			best, bestScore = s, score
		}
	}
	return best
}

// TestTerritoryIsPlain compares with plainTerritory. The quotients of its capacities and loads are
// exact, so equal delays compare as equal.
func TestTerritoryIsPlain(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 20).Draw(t, "servers")
		homes := rapid.IntRange(0, n).Draw(t, "homes")
		order := rapid.Permutation(Order(members(n), []string{"a"}, make([]int32, n), 0)).Draw(t, "order")
		capacity := rapid.SliceOfN(rapid.SampledFrom([]float64{0, 1, 2, 4}), n, n).Draw(t, "capacity")
		room := 0.0
		for _, s := range order[:homes] {
			room += capacity[s]
		}
		if math.Log2(room) != math.Trunc(math.Log2(room)) {
			homes = 0
		}
		territory, flows := NewTerritory(capacity, order, homes), make([]float64, n)
		all := make([]uint16, n)
		for i := range all {
			all[i] = uint16(i)
		}
		for range rapid.IntRange(0, 60).Draw(t, "flows") {
			want := plainTerritory(flows, capacity, order, homes)
			if got := territory.Best(); got != want {
				t.Fatalf("server %d, want %d; flows %v", got, want, flows)
			}
			if got := territory.BestOf(all); got != want {
				t.Fatalf("server %d of all candidates, want %d; flows %v", got, want, flows)
			}
			s := rapid.IntRange(0, n-1).Draw(t, "ends")
			if flows[s] > 0 {
				flows[s]--
				territory.Add(int32(s), -1)
			}
			if want >= 0 {
				flows[want]++
				territory.Add(want, 1)
			}
		}
	})
}

// TestHomes checks that balancers agree, whatever the order of their names, and that shares are
// even.
func TestHomes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, b := rapid.IntRange(0, 100).Draw(t, "servers"), rapid.IntRange(1, 8).Draw(t, "balancers")
		list, balancers := members(n), make([]string, b)
		for i := range list {
			list[i].Weight = rapid.SampledFrom([]float64{1, 1, 2, 5}).Draw(t, "weight")
		}
		for i := range balancers {
			balancers[i] = fmt.Sprintf("b%d", i)
		}
		homes := Homes(list, balancers)

		other := rapid.Permutation(balancers).Draw(t, "other order")
		for i, home := range Homes(list, other) {
			if other[home] != balancers[homes[i]] {
				t.Fatalf("%s has home %s, or %s in another order", list[i].Name, balancers[homes[i]], other[home])
			}
		}
		share, total := make([]float64, b), 0.0
		for i, home := range homes {
			share[home] += list[i].Weight
			total += list[i].Weight
		}
		for i, got := range share {
			if got > total/float64(b)+5+1e-9 {
				t.Fatalf("%s has %v of %v, shares %v", balancers[i], got, total, share)
			}
		}
	})
}

func TestHomesOfEqualServersAreEven(t *testing.T) {
	homes := Homes(members(128), []string{"a", "b", "c", "d", "e", "f", "g", "h"})
	counts := map[int32]int{}
	for _, home := range homes {
		counts[home]++
	}
	for b, n := range counts {
		if n != 16 {
			t.Errorf("balancer %d is home of %d servers, want 16", b, n)
		}
	}
}

// TestHomesStay checks that most servers of the other balancers keep their home when one of 8
// balancers is removed.
func TestHomesStay(t *testing.T) {
	all := []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	before, after := Homes(members(1000), all), Homes(members(1000), all[:7])
	moved := 0
	for i := range before {
		if before[i] < 7 && before[i] != after[i] {
			moved++
		}
	}
	if moved > 200 { // 125 servers need another home
		t.Errorf("%d servers of balancers that stay have moved", moved)
	}
}

func TestOrder(t *testing.T) {
	list, balancers := members(30), []string{"y", "x", "z"}
	homes := Homes(list, balancers)
	// The balancers x, y, z, in a cycle.
	for self, want := range map[int][]int32{0: {0, 2, 1}, 1: {1, 0, 2}, 2: {2, 1, 0}} {
		var got []int32
		order := Order(list, balancers, homes, self)
		for _, s := range order {
			got = append(got, homes[s])
		}
		if got = slices.Compact(got); !slices.Equal(got, want) {
			t.Errorf("balancer %s prefers the servers of %v, want %v", balancers[self], got, want)
		}
		if back := len(order) - 1; hash(list[order[0]].Name, "") > hash(list[order[1]].Name, "") ||
			hash(list[order[back]].Name, "") > hash(list[order[back-1]].Name, "") {
			t.Errorf("balancer %s does not go through its servers forwards, and others' backwards", balancers[self])
		}
		if sorted := slices.Sorted(slices.Values(order)); len(slices.Compact(sorted)) != 30 {
			t.Errorf("order %v", order)
		}
	}
}

// TestTerritoryWithWaits has the home server 0 and the other servers 1 and 2, all of capacity 1.
// Flows were seen to wait on servers 1 and 2.
func TestTerritoryWithWaits(t *testing.T) {
	territory := NewTerritory([]float64{1, 1, 1}, []int32{0, 1, 2}, 1)
	territory.SetWait(0, 5) // has no effect on a home server, whose flows are known
	territory.SetWait(1, 0.75)
	territory.SetWait(2, 0.5)
	// The delays are 1, 2, 3 on server 0, then 1.75, 2.75 on server 1, and 1.5, 2.5 on server 2.
	// Server 0 is first among equals.
	for i, want := range []int32{0, 2, 1, 0, 2, 1, 0} {
		if got := territory.BestOf([]uint16{0, 1, 2}); got != want {
			t.Errorf("flow %d: server %d of all candidates, want %d", i, got, want)
		}
		got := territory.Best()
		if got != want {
			t.Errorf("flow %d: server %d, want %d", i, got, want)
		}
		territory.Add(got, 1)
	}
}
