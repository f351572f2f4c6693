// SPDX-License-Identifier: Apache-2.0

package sim

import "math"

// Tournament finds the smallest of n keys that change one at a time. It is a complete binary tree,
// in which each node contains the smaller one of its two children. A change of a key takes log2(n)
// comparisons without branches, and its index alone determines the nodes. Reading the smallest key
// takes constant time. Keys are 0 to infinity. Among equal keys, the one with the smallest index
// wins.
type Tournament struct {
	nodes []contender // 1 is the root, 2i and 2i+1 the children of i
	first int         // the leaf of index 0
}

type contender struct {
	// The bits of a float64; for non-negative numbers, their order is that of the numbers.
	key   uint64
	index int32
}

// NewTournament returns a tournament of n keys, all infinite.
func NewTournament(n int) *Tournament {
	first := 1
	for first < n {
		first *= 2
	}
	t := &Tournament{nodes: make([]contender, 2*first), first: first}
	for i := range t.nodes {
		t.nodes[i].key = math.Float64bits(math.Inf(1))
	}
	for i := range first {
		t.nodes[first+i].index = int32(i)
	}
	for i := first - 1; i > 0; i-- {
		t.nodes[i].index = t.nodes[2*i].index
	}
	return t
}

// Set changes the key of index i.
func (t *Tournament) Set(i int32, key float64) {
	at := uint(t.first) + uint(i)
	nodes := t.nodes
	winner := contender{math.Float64bits(key), i}
	nodes[at] = winner
	for at > 1 {
		sibling := nodes[at^1]
		// at&1 is 1 if the sibling is on the left. Such a sibling also wins if its key is equal.
		if sibling.key < winner.key+uint64(at&1) {
			winner = sibling
		}
		at >>= 1
		nodes[at] = winner
	}
}

// Key returns the key of index i.
func (t *Tournament) Key(i int32) float64 {
	return math.Float64frombits(t.nodes[t.first+int(i)].key)
}

// Min returns the smallest key and its index.
func (t *Tournament) Min() (key float64, index int32) {
	root := &t.nodes[1]
	return math.Float64frombits(root.key), root.index
}
