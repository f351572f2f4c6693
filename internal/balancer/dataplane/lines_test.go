// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// services are rankings of services whose servers come and go, as Rankings has them.
type services struct {
	space   lineSpace
	present map[int]region
}

// change gives a service another number of servers. The new ranking is beside the old one.
func (s *services) change(t *rapid.T, service int, servers uint32) {
	at, ok := s.space.take(linesOf(servers))
	if !ok {
		t.Fatalf("no room for %d servers in %+v", servers, s.space)
	}
	if at.count != linesOf(servers) || at.end() > s.space.size {
		t.Fatalf("%+v for %d servers", at, servers)
	}
	if old, ok := s.present[service]; ok {
		s.space.release(old)
	}
	s.present[service] = at
	s.check(t)
}

// check requires that exactly the rankings are in use, in order and apart.
func (s *services) check(t *rapid.T) {
	var all []region
	for _, at := range s.present {
		all = append(all, at)
	}
	slices.SortFunc(all, func(a, b region) int { return int(a.first) - int(b.first) })
	if !slices.Equal(all, s.space.used) {
		t.Fatalf("in use are %v, want %v", s.space.used, all)
	}
	for i := range all[1:] {
		if all[i].end() > all[i+1].first {
			t.Fatalf("%v and %v overlap", all[i], all[i+1])
		}
	}
}

// Services with any numbers of servers, up to node.limits.servers together, change in any order.
// Each change finds room, and a restart finds the same lines in use.
func TestLinesSuffice(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.Uint32Range(1, 3000).Draw(t, "servers")
		s := services{space: lineSpace{size: rankLines(serverSlots(limit))}, present: map[int]region{}}
		count := map[int]uint32{}
		total := uint32(0)
		for range rapid.IntRange(1, 200).Draw(t, "changes") {
			service := rapid.IntRange(0, 40).Draw(t, "service")
			left := limit - (total - count[service])
			servers := rapid.Uint32Range(0, left).Draw(t, "count")
			if rapid.Bool().Draw(t, "small") {
				servers = min(servers, 20)
			}
			if servers == 0 {
				if at, ok := s.present[service]; ok {
					s.space.release(at)
					delete(s.present, service)
				}
			} else {
				s.change(t, service, servers)
			}
			total += servers - count[service]
			count[service] = servers
		}
		again := lineSpace{size: s.space.size}
		for _, at := range s.present {
			if !again.occupy(at) {
				t.Fatalf("%v is not free in %v", at, again.used)
			}
		}
		if !slices.Equal(again.used, s.space.used) {
			t.Fatalf("after a restart %v are in use, before %v", again.used, s.space.used)
		}
	})
}

// occupy refuses a region that overlaps a used one, or that is partly outside of the table.
func TestOccupyRefuses(t *testing.T) {
	t.Parallel()
	s := lineSpace{size: 20}
	for _, c := range []struct {
		at   region
		want bool
	}{
		{region{4, 4}, true}, {region{4, 4}, false}, {region{0, 5}, false}, {region{7, 1}, false},
		{region{8, 2}, true}, {region{0, 4}, true}, {region{9, 12}, false}, {region{19, 2}, false},
		{region{1<<32 - 1, 4}, false}, {region{10, 10}, true},
	} {
		if got := s.occupy(c.at); got != c.want {
			t.Errorf("%v: %t, want %t; in use are %v", c.at, got, c.want, s.used)
		}
	}
}

// All slots get different places from 0 on. Those whose place still exists keep it.
func TestArrange(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		slots := rapid.SliceOfNDistinct(rapid.Uint32Range(0, 300), 1, 100, rapid.ID).Draw(t, "slots")
		before := rapid.MapOfN(rapid.Uint32Range(0, 300), rapid.Uint32Range(0, 120), 0, 100).Draw(t, "before")
		placed := arrange(slots, before)
		if !slices.Equal(slices.Sorted(slices.Values(placed)), slices.Sorted(slices.Values(slots))) {
			t.Fatalf("%v of %v", placed, slots)
		}
		claims := map[uint32]int{}
		for _, slot := range slots {
			if place, ok := before[slot]; ok {
				claims[place]++
			}
		}
		for at, slot := range placed {
			place, ok := before[slot]
			if ok && int(place) < len(placed) && claims[place] == 1 && int(place) != at {
				t.Errorf("slot %d has place %d, before %d", slot, at, place)
			}
		}
	})
}

// The top line of a tree has the lowest ranks, and each node the lowest of its line.
func TestFillTree(t *testing.T) {
	t.Parallel()
	for _, n := range []uint32{1, 7, 8, 9, 64, 65, 512, 513, 5000} {
		ranks := make([]uint64, n)
		for i := range ranks {
			ranks[i] = rand.Uint64N(rankNone)
		}
		lines := make([]balancerRankLine, linesOf(n))
		fillTree(lines, ranks)
		top := lines[len(lines)-1]
		if got := slices.Min(top.Node[:]); got != slices.Min(ranks) {
			t.Errorf("%d: the lowest is %d, want %d", n, got, slices.Min(ranks))
		}
		// level has the lines that are left, the lowest level first. below has the numbers that
		// this level must contain.
		level, below := lines, ranks
		for len(below) > 1 || len(level) == len(lines) {
			var nodes, lowest []uint64
			for _, line := range level[:(len(below)+7)/8] {
				nodes = append(nodes, line.Node[:]...)
				lowest = append(lowest, slices.Min(line.Node[:]))
			}
			if !slices.Equal(nodes[:len(below)], below) || slices.ContainsFunc(nodes[len(below):], func(rank uint64) bool { return rank != rankNone }) {
				t.Fatalf("%d: a level has %v, want %v", n, nodes, below)
			}
			level, below = level[len(lowest):], lowest
			if len(level) == 0 {
				break
			}
		}
	}
}
