// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"cmp"
	"container/heap"
)

// BuildTurns builds the table of round-robin: its rows are turns, and the first candidate of a row
// has the row's turn. The table is one cycle, in which each server has as many turns as its weight
// says, divided by the greatest common divisor of all weights. So equal weights give a row for each
// server, in the order of names. A cycle of more turns than buckets is cut off at that number.
//
// Turns are spread evenly: after some turns, the number of turns that a server has had differs from
// its share of them by less than one. The turns of a server are scheduled by their deadlines
// (Tijdeman, "The chairman assignment problem", 1980; Baruah et al., "Proportionate progress",
// 1996). If a server has the share x of all turns, its turn n, counted from 1, may take place from
// the time (n-1)/x on, and its deadline is n/x. At each time, of the turns that may take place, the
// one with the earliest deadline does.
//
// The other candidates of a row are the servers that follow the first candidate in the order of
// weights and names. With no more servers than candidates, each row contains all servers.
//
// Errors are those of Build.
func BuildTurns(servers []Server, buckets, candidates int) (*Table, error) {
	placed, err := validPlacing(servers, buckets, candidates)
	if err != nil {
		return nil, err
	}
	t := newTable(servers, buckets, min(candidates, len(placed)))
	if len(placed) == 0 {
		return t, nil
	}
	weights := make([]uint32, len(placed))
	for i, server := range placed {
		weights[i] = servers[server].Weight
	}
	turns := spreadTurns(weights, buckets)
	t.Buckets, t.Rows = len(turns), make([]uint16, 0, len(turns)*t.Candidates)
	for _, first := range turns {
		for i := range t.Candidates {
			t.Rows = append(t.Rows, placed[(first+i)%len(placed)])
		}
	}
	return t, nil
}

// spreadTurns returns the servers of one cycle of turns, as indexes of weights. If the cycle has
// more turns than most, it returns the beginning.
func spreadTurns(weights []uint32, most int) []int {
	sum, divisor := uint64(0), uint32(0)
	for _, w := range weights {
		sum += uint64(w)
		divisor = gcd(w, divisor)
	}
	cycle := make([]int, min(sum/uint64(divisor), uint64(most)))
	begin := make([][]turn, len(cycle)) // the turns that may take place from a time on
	for i, w := range weights {
		begin[0] = append(begin[0], turn{server: i, weight: uint64(w), number: 1})
	}
	var open turnHeap
	for now := range cycle {
		for _, t := range begin[now] {
			heap.Push(&open, t)
		}
		begin[now] = nil
		t := heap.Pop(&open).(turn)
		cycle[now] = t.server
		// The server's next turn may take place from the time number/share on, rounded up, where
		// share is weight/sum. The product number·sum is at most now·weight + sum: it fits 64 bits.
		if next := (t.number*sum + t.weight - 1) / t.weight; next < uint64(len(cycle)) {
			t.number++
			begin[next] = append(begin[next], t)
		}
	}
	return cycle
}

// turn is a turn of a server. It has to take place before its deadline, the time number·sum/weight.
type turn struct {
	server int
	weight uint64
	number uint64 // of the server's turns, counted from 1
}

// before tells whether a turn has an earlier deadline. Turns of the same deadline are in the order
// of servers. The comparison is exact: the products are at most MaxBuckets times the largest
// weight, which has 32 bits.
func (t turn) before(u turn) bool {
	deadlines := cmp.Compare(t.number*u.weight, u.number*t.weight)
	return cmp.Or(deadlines, cmp.Compare(t.server, u.server)) < 0
}

// turnHeap is a heap of turns, the one with the earliest deadline first.
type turnHeap []turn

func (h turnHeap) Len() int           { return len(h) }
func (h turnHeap) Less(i, j int) bool { return h[i].before(h[j]) }
func (h turnHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *turnHeap) Push(t any)        { *h = append(*h, t.(turn)) }
func (h *turnHeap) Pop() any {
	last := len(*h) - 1
	t := (*h)[last]
	*h = (*h)[:last]
	return t
}
