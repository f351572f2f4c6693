// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"fmt"
	"strconv"
)

// Permutation is the order in which a server prefers the buckets: Offset, Offset + Skip, Offset +
// 2·Skip and so on, modulo the number of buckets. A server with Skip 0 is not in the table.
type Permutation struct{ Offset, Skip uint32 }

// BuildPermuted works as Build does, but the caller gives the permutations of the servers. Build
// derives them from the names. It is for examples of algorithm 3, such as figure 6 of 6LB. All
// servers have weight 1, and their indexes are their names.
//
// Errors are those of Build. An offset that is not a bucket, and a skip that does not visit all
// buckets, are also errors.
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
			walks = append(walks, walk{
				server: uint16(i), bucket: p.Offset, skip: p.Skip % uint32(buckets), left: uint32(buckets),
			})
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
