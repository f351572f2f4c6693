// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"math"
	"math/bits"
)

// Ranking finds the server with the smallest score while scores change one at a time. It allocates
// no memory after its creation. It is a binary tree: each node contains the smallest score of the
// servers below it, and the number of servers with this score. A change of a score, and a choice,
// take at most log2(n) steps each.
type Ranking struct {
	nodes []ranked // 1 is the root, 2i and 2i+1 are the children of i
	first int32    // the leaf of server 0
}

type ranked struct {
	score float64
	ties  int32
}

// NewRanking returns a ranking of n servers. All scores are infinite, so none of them can be
// chosen.
func NewRanking(n int) *Ranking {
	first := 1
	for first < n {
		first *= 2
	}
	r := &Ranking{nodes: make([]ranked, 2*first), first: int32(first)}
	for i := range r.nodes {
		r.nodes[i] = ranked{math.Inf(1), 0}
	}
	return r
}

// Set sets the score of a server. A server with +Inf is not chosen. Scores must not be NaN.
func (r *Ranking) Set(server int32, score float64) {
	at := uint(r.first + server)
	r.nodes[at] = ranked{score, 1}
	if math.IsInf(score, 1) {
		r.nodes[at].ties = 0
	}
	for at >>= 1; at > 0; at >>= 1 {
		best, right := r.nodes[2*at], r.nodes[2*at+1]
		switch {
		case right.score < best.score:
			best = right
		case right.score == best.score:
			best.ties += right.ties
		}
		if r.nodes[at] == best {
			return
		}
		r.nodes[at] = best
	}
}

// Score returns the score of a server.
func (r *Ranking) Score(server int32) float64 { return r.nodes[r.first+server].score }

// Best returns the server with the smallest score, or -1 if there is none. Among several such
// servers, random bits choose each with equal probability. The bits 0 choose the first.
func (r *Ranking) Best(random uint64) (server int32, score float64) {
	root := r.nodes[1]
	if root.ties == 0 {
		return -1, root.score
	}
	turn := below(random, root.ties) // the number of the chosen one among servers of this score
	at := int32(1)
	for at < r.first {
		at *= 2 // the left child
		left := r.nodes[at]
		if left.score > root.score {
			left.ties = 0
		}
		if turn >= left.ties {
			turn -= left.ties
			at++ // the right child
		}
	}
	return at - r.first, root.score
}

// BestOf returns the server with the smallest score among some candidates, for example those of a
// bucket. Otherwise it works as Best does.
func (r *Ranking) BestOf(candidates []uint16, random uint64) (server int32, score float64) {
	score, ties := math.Inf(1), int32(0)
	for _, c := range candidates {
		switch s := r.Score(int32(c)); {
		case s < score:
			score, ties = s, 1
		case s == score:
			ties++
		}
	}
	if math.IsInf(score, 1) {
		return -1, score
	}
	turn := below(random, ties)
	for _, c := range candidates {
		if r.Score(int32(c)) != score {
			continue
		}
		server = int32(c)
		if turn--; turn < 0 {
			break
		}
	}
	return server, score
}

// below maps random bits to a number from 0 to n-1.
func below(random uint64, n int32) int32 {
	at, _ := bits.Mul64(random, uint64(n))
	return int32(at)
}
