// SPDX-License-Identifier: Apache-2.0

package dataplane

import "slices"

// region is a run of lines of the map rank_lines.
type region struct{ first, count uint32 }

func (r region) end() uint32 { return r.first + r.count }

// lineSpace says which lines of rank_lines are in use.
type lineSpace struct {
	size uint32
	used []region // in order; they do not overlap
}

// take returns the first free region with the given number of lines, and puts it into use. It
// returns false if there is none.
func (s *lineSpace) take(count uint32) (region, bool) {
	r := region{count: count}
	for i, used := range s.used {
		if r.end() <= used.first {
			s.used = slices.Insert(s.used, i, r)
			return r, true
		}
		r.first = used.end()
	}
	if r.end() > s.size {
		return region{}, false
	}
	s.used = append(s.used, r)
	return r, true
}

// occupy puts a region into use. It returns false, and changes nothing, if a line of the region is
// in use already, or does not exist.
func (s *lineSpace) occupy(r region) bool {
	i := 0
	for i < len(s.used) && s.used[i].first < r.first {
		i++
	}
	end := uint64(r.first) + uint64(r.count) // r.end() can overflow
	overlapsBefore := i > 0 && s.used[i-1].end() > r.first
	overlapsNext := i < len(s.used) && end > uint64(s.used[i].first)
	if overlapsBefore || overlapsNext || end > uint64(s.size) {
		return false
	}
	s.used = slices.Insert(s.used, i, r)
	return true
}

// release ends the use of a region that take or occupy has put into use.
func (s *lineSpace) release(r region) {
	s.used = slices.DeleteFunc(s.used, func(used region) bool { return used == r })
}

// linesOf returns the number of lines of a ranking with this number of places. The lowest level has
// a node for each place. Each higher level has a node for each line of the level below. The highest
// level has one line.
func linesOf(places uint32) (lines uint32) {
	for level := places; level > 0; {
		level = (level + ranksPerLine - 1) / ranksPerLine
		lines += level
		if level == 1 {
			break
		}
	}
	return lines
}

// arrange gives each slot a place from 0 to len(slots)-1, and returns the slots by place. A slot
// keeps the place that it has in before, if this place still exists and no other slot has it.
func arrange(slots []uint32, before map[uint32]uint32) []uint32 {
	const vacant = NoServer
	placed := slices.Repeat([]uint32{vacant}, len(slots))
	var others []uint32
	for _, slot := range slots {
		place, ok := before[slot]
		if ok && int(place) < len(placed) && placed[place] == vacant {
			placed[place] = slot
		} else {
			others = append(others, slot)
		}
	}
	for place := range placed {
		if placed[place] == vacant {
			placed[place], others = others[0], others[1:]
		}
	}
	return placed
}

// fillTree fills the lines of a ranking whose leaves have these ranks
// (bpf/balancer/tables/ranking.h). Each node of a higher level gets the lowest rank of a line of
// the level below. Nodes without a server get rankNone.
func fillTree(lines []balancerRankLine, ranks []uint64) {
	for len(lines) > 0 { // one level at a time, the leaves first
		var lowest []uint64
		for chunk := range slices.Chunk(ranks, int(ranksPerLine)) {
			line := &lines[len(lowest)]
			for at := copy(line.Node[:], chunk); at < len(line.Node); at++ {
				line.Node[at] = rankNone
			}
			lowest = append(lowest, slices.Min(chunk))
		}
		lines, ranks = lines[len(lowest):], lowest
	}
}
