// SPDX-License-Identifier: Apache-2.0

package tables

import "slices"

// schedule decides which server has the next turn. A server of weight w has its turns at the times
// (k + 1/2)/w for k = 0, 1, …: at any time t it has had t·w turns, rounded to the nearest integer
// (Webster's method of apportionment). The order of two servers' turns depends on their own
// weights only. So it does not change when a third server is added or removed, or changes its
// weight.
//
// Servers of the same weight are a class. They have their turns at the same times, in the order of
// their names. If all weights are equal, there is one class, and its rounds are those of algorithm
// 3.
//
// A schedule is a heap. The class with the next turn is at index 0.
type schedule []class

// class contains the servers of one weight.
type class struct {
	weight uint64
	half   uint64 // 2k + 1; the next turn is at half/(2·weight)
	walks  []walk // in the order of names, without those whose permutation is exhausted
}

// newSchedule makes a class of each sequence of equal weights. weights[i] is the weight of
// walks[i]. The weights descend, so the first turns of the classes ascend, and the result is
// already a heap.
func newSchedule(walks []walk, weights []uint32) schedule {
	var s schedule
	for start, end := 0, 1; end <= len(walks); end++ {
		if end == len(walks) || weights[end] != weights[start] {
			s = append(s, class{weight: uint64(weights[start]), half: 1, walks: walks[start:end]})
			start = end
		}
	}
	return s
}

// round gives a turn to every server of the class with the next turn, until the table is full. It
// then removes servers whose permutation is exhausted, and the class if it has no server left.
func (s *schedule) round(g *grid) {
	c := &(*s)[0]
	exhausted := false
	for i := range c.walks {
		if g.free == 0 {
			return
		}
		g.take(&c.walks[i])
		exhausted = exhausted || c.walks[i].left == 0
	}
	if exhausted {
		c.walks = slices.DeleteFunc(c.walks, func(w walk) bool { return w.left == 0 })
	}
	c.half += 2 // the next turn of these servers is 1/weight later
	if len(c.walks) == 0 {
		last := len(*s) - 1
		(*s)[0] = (*s)[last]
		*s = (*s)[:last]
	}
	s.sink()
}

// sink restores the heap after a change of the class at index 0.
func (s schedule) sink() {
	for i := 0; ; {
		first := i
		for child := 2*i + 1; child <= 2*i+2 && child < len(s); child++ {
			if s[child].before(&s[first]) {
				first = child
			}
		}
		if first == i {
			return
		}
		s[i], s[first] = s[first], s[i]
		i = first
	}
}

// before compares the times of the next turns, which are half/(2·weight). At the same time, the
// class with the larger weight comes first. The comparison is exact: half is at most
// 2·MaxBuckets + 1, so the products fit.
func (c *class) before(d *class) bool {
	a, b := c.half*d.weight, d.half*c.weight
	return a < b || a == b && c.weight > d.weight
}
