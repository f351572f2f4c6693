// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func members(n int) []Member {
	list := make([]Member, n)
	for i := range list {
		list[i] = Member{Name: fmt.Sprintf("s%d", i), Weight: 1}
	}
	return list
}

// TestTerritoryByHand: servers 0 and 1 are at home, 2 and 3 abroad, of capacities 1, 2, 1, 2.
func TestTerritoryByHand(t *testing.T) {
	for _, c := range []struct {
		name  string
		flows [4]float64
		want  int32
	}{
		{"idle: at home, the shortest delay", [4]float64{0, 0, 0, 0}, 1},
		// Server 1 has room: 2/2 - 1. Nobody has less than 0 waiting.
		{"still no wait at home", [4]float64{1, 1, 0, 0}, 1},
		// Home is full: 3 flows on a capacity of 3, so others are taken to have the most, 0.9. One more
		// waits 1 on server 0, 3/2-1 = 1/2 on server 1; abroad 1+0.9-1 on server 2, 1/2+0.9-1 on 3.
		{"home is full", [4]float64{1, 2, 0, 0}, 3},
		// Server 3 has one of ours: 2/2+0.9-1 = 0.9, as server 2. At home 1/2 waits.
		{"not abroad again", [4]float64{1, 2, 0, 1}, 1},
		// 5/2-1 on server 1, 1 on server 0, 0.9 on servers 2 and 3, of which 2 is preferred by position
		// when both have a delay of 1.9.
		{"what waits at home goes abroad", [4]float64{1, 4, 0, 1}, 2},
		// Carried 2/3. Abroad 1/2+2/3-1 = 1/6; at home 0 waits on server 1.
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

// TestTerritoryWithoutHome: what has no servers at home knows nothing of others.
func TestTerritoryWithoutHome(t *testing.T) {
	territory := NewTerritory([]float64{1, 2}, []int32{0, 1}, 0)
	for i, want := range []int32{1, 0, 1} { // delays of 1 and 1/2, 1 and 1, 2 and 1
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

// plainTerritory is the rule in as many words, over all servers.
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
		l, abroad := flows[s], 0.0
		if at >= homes {
			abroad = 1
			if room > 0 {
				l += min(carried/room, mostOthers) * c
			}
		}
		now := [3]float64{math.Max(0, l+1-c) / c, abroad, (l + 1) / c}
		if best < 0 || slices.Compare(now[:], bestScore[:]) < 0 {
			best, bestScore = s, now
		}
	}
	return best
}

// TestTerritoryIsPlain uses capacities and loads whose quotients are exact, so that ties are ties.
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

// TestHomes: balancers agree, shares are even, and no more servers move than must.
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

// TestHomesStay: when one of 8 balancers goes, most servers of the others stay where they are.
func TestHomesStay(t *testing.T) {
	all := []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	before, after := Homes(members(1000), all), Homes(members(1000), all[:7])
	moved := 0
	for i := range before {
		if before[i] < 7 && before[i] != after[i] {
			moved++
		}
	}
	if moved > 200 { // 125 had to find another home
		t.Errorf("%d servers of balancers that stay have moved", moved)
	}
}

func TestOrder(t *testing.T) {
	list, balancers := members(30), []string{"y", "x", "z"}
	homes := Homes(list, balancers)
	for self, want := range map[int][]int32{0: {0, 2, 1}, 1: {1, 0, 2}, 2: {2, 1, 0}} { // x, y, z, and around
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

// TestTerritoryWithWaits: server 0 is at home, 1 and 2 abroad, all of capacity 1, and flows were seen to
// wait on the latter.
func TestTerritoryWithWaits(t *testing.T) {
	territory := NewTerritory([]float64{1, 1, 1}, []int32{0, 1, 2}, 1)
	territory.SetWait(0, 5) // is known better at home
	territory.SetWait(1, 0.75)
	territory.SetWait(2, 0.5)
	// Delays at home 1, 2, 3; on server 1 1.75, 2.75; on server 2 1.5, 2.5. At home goes first.
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
