// SPDX-License-Identifier: Apache-2.0

package tables

import "slices"

// schedule decides whose turn it is. A server of weight w has its turns at the times (k + 1/2)/w for
// k = 0, 1, …: after any time t it has had t·w of them, rounded to the nearest integer (Webster's
// method of apportionment). The order of two servers' turns follows from their own weights alone, so
// that a third one may come, go or change its weight without disturbing it.
//
// Servers of one weight, a class, have their turns at the same times and take them in the order of
// their names. With equal weights there is one class, and its rounds are those of algorithm 3.
//
// It is a heap: the class whose turn is next is at index 0.
type schedule []class

// class is the servers of one weight.
type class struct {
	weight uint64
	half   uint64 // 2k + 1: the next turn is at half/(2·weight)
	walks  []walk // by name; those whose permutation is exhausted are gone
}

// newSchedule makes a class of each run of equal weights. weights[i] is that of walks[i]; they
// descend, so the classes' first turns ascend, and that is a heap already.
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

// round lets every server of the next class have its turn.
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
	c.half += 2
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

// before compares the times of the next turns; at one time the heavier class goes first. It is
// exact: half is at most 2·MaxBuckets + 1, so the products fit.
func (c *class) before(d *class) bool {
	a, b := c.half*d.weight, d.half*c.weight
	return a < b || a == b && c.weight > d.weight
}
