// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"fmt"
	"strconv"
)

// Permutation is the order in which a server prefers the buckets: Offset, Offset + Skip, Offset +
// 2·Skip and so on, modulo their number. A Skip of 0 keeps the server out of the table.
type Permutation struct{ Offset, Skip uint32 }

// BuildPermuted is Build for servers whose permutations are given, instead of following from their
// names: algorithm 3 on examples such as figure 6 of 6LB. Servers have the weight 1 and are named by
// their index.
//
// It fails as Build does, and on an offset that is no bucket or a skip that does not visit all.
func BuildPermuted(permutations []Permutation, buckets, candidates int) (*Table, error) {
	if err := validSize(buckets, candidates); err != nil {
		return nil, err
	}
	t := &Table{Buckets: buckets}
	var walks []walk
	var weights []uint32
	for i, p := range permutations {
		server := Server{Name: strconv.Itoa(i)}
		if p.Skip > 0 {
			if p.Offset >= uint32(buckets) {
				return nil, fmt.Errorf("server %d: offset %d: must be below %d", i, p.Offset, buckets)
			}
			if gcd(p.Skip, uint32(buckets)) != 1 {
				return nil, fmt.Errorf("server %d: skip %d: shares a divisor with %d buckets", i, p.Skip, buckets)
			}
			server.Weight = 1
			walks = append(walks, walk{server: uint16(i), bucket: p.Offset, skip: p.Skip % uint32(buckets), left: uint32(buckets)})
			weights = append(weights, 1)
		}
		t.Servers = append(t.Servers, server)
	}
	t.Candidates = min(candidates, len(walks))
	if t.Candidates > 0 {
		g := newGrid(buckets, t.Candidates)
		g.fill(newSchedule(walks, weights))
		t.Rows = g.rows
	}
	return t, nil
}

func gcd(a, b uint32) uint32 {
	for b > 0 {
		a, b = b, a%b
	}
	return a
}
