// SPDX-License-Identifier: Apache-2.0

// Package tables builds the consistent-hash tables that map a bucket to an ordered list of
// candidate servers, by algorithm 3 of "6LB: Scalable and Application-Aware Load Balancing with
// Segment Routing" (section III). With one candidate per bucket, the table is Maglev's. A table
// depends only on the set of servers and on its size. So balancers with the same set and size have
// the same rows, without communication.
package tables

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/big"
	"math/bits"
	"slices"
)

const (
	// DefaultBuckets is the papers' M: a prime that gives each of 1000 servers 65 buckets.
	DefaultBuckets = 65537
	// MinBuckets and MaxBuckets bound the number of buckets of a table.
	MinBuckets, MaxBuckets = 2, 1 << 24
	// MaxCandidates is the maximum number of candidates of a bucket.
	MaxCandidates = 8
	// MaxServers is the maximum number of servers that fits the 16-bit entries of a row.
	MaxServers = 65535
)

// Version is the version of the algorithm that determines the candidates of a flow. Builds of the
// same Version make the same table for the same servers, and find a flow in the same bucket
// (balancer.Flow). A change of either needs a new Version, because balancers of the old and the
// new build would place flows on different servers.
const Version = 1

// seed makes the permutations independent of other hashes of the same names. A new seed changes
// every table.
const seed = "segue consistent-hash table 1\x00"

// Server is a server that a table can contain.
type Server struct {
	// Name determines the order in which the server prefers the buckets. It is unique in a table.
	Name string
	// Weight is the server's share relative to the weights of the other servers. A server with
	// weight 0 is not in the table.
	Weight uint32
}

// Table maps every bucket to a list of distinct servers, the first candidate first.
type Table struct {
	// Buckets is the number of rows, M in the papers.
	Buckets int
	// Candidates is the length of a row, C in the papers. It is the requested number, or the
	// number of servers with positive weight if that is smaller.
	Candidates int
	// Servers is a copy of the servers from which the table was built, in their original order.
	Servers []Server
	// Rows contains the rows one after the other. Rows[b*Candidates+i] is an index in Servers.
	Rows []uint16
}

// Row returns the candidates of bucket b, 0 to Buckets-1, as indexes of Servers. It shares memory
// with the table.
func (t *Table) Row(b int) []uint16 {
	return t.Rows[b*t.Candidates : (b+1)*t.Candidates]
}

// ValidBuckets returns an error unless a table can have m buckets: a prime or a power of two, from
// MinBuckets to MaxBuckets. For these numbers, skips that are coprime with m are easy to draw.
func ValidBuckets(m int) error {
	if m < MinBuckets || m > MaxBuckets {
		return fmt.Errorf("%d buckets: out of range %d to %d", m, MinBuckets, MaxBuckets)
	}
	if !powerOfTwo(m) && !prime(m) {
		return fmt.Errorf("%d buckets: neither a prime nor a power of two; the nearest prime is %d, and the "+
			"nearest powers of two are %d and %d", m, nearestPrime(m), 1<<(bits.Len(uint(m))-1), 1<<bits.Len(uint(m)))
	}
	return nil
}

func validSize(buckets, candidates int) error {
	if candidates < 1 || candidates > MaxCandidates {
		return fmt.Errorf("%d candidates: out of range 1 to %d", candidates, MaxCandidates)
	}
	return ValidBuckets(buckets)
}

// nearestPrime returns the prime that is nearest to a number above 2.
func nearestPrime(m int) int {
	for distance := 0; ; distance++ {
		for _, near := range []int{m - distance, m + distance} {
			if prime(near) && near <= MaxBuckets {
				return near
			}
		}
	}
}

func powerOfTwo(m int) bool { return m&(m-1) == 0 }

// prime is exact: ProbablyPrime(0), the Baillie-PSW test, makes no mistake below 2^64. For
// DefaultBuckets, which is a prime, it saves the test.
func prime(m int) bool { return m == DefaultBuckets || big.NewInt(int64(m)).ProbablyPrime(0) }

// Build builds a table with the given number of buckets (see ValidBuckets) and of candidates in
// each (1 to MaxCandidates). The order of servers affects only the indexes in the rows.
//
// The numbers of entries are in proportion to the weights, as far as this is possible: a row
// contains a server only once. A server whose share exceeds 1/candidates is in nearly every row,
// and the other servers share the rest. If no server has a positive weight, the table is empty: it
// has no candidates and no rows.
//
// Errors are an invalid number of buckets or candidates, more than MaxServers servers, and a name
// that occurs twice.
func Build(servers []Server, buckets, candidates int) (*Table, error) {
	return build(servers, buckets, candidates, func(g *grid, walks []walk, weights []uint32) {
		g.fill(newSchedule(walks, weights))
	})
}

// BuildColumns works as Build does, but fills one column after the other. The first column is the
// table with one candidate (Maglev's). So the first candidates are in proportion to the weights,
// whatever the number of candidates. Each further column is also in proportion, as far as this is
// possible: a row contains a server only once. BuildColumns is for placements that use a further
// candidate only if they cannot use the first one. Errors are those of Build.
func BuildColumns(servers []Server, buckets, candidates int) (*Table, error) {
	return build(servers, buckets, candidates, (*grid).fillColumns)
}

// build builds a table whose rows the function fill fills.
func build(
	servers []Server, buckets, candidates int, fill func(*grid, []walk, []uint32),
) (*Table, error) {
	placed, err := validPlacing(servers, buckets, candidates)
	if err != nil {
		return nil, err
	}
	t := newTable(servers, buckets, min(candidates, len(placed)))
	if len(placed) == 0 {
		return t, nil
	}
	walks, weights := make([]walk, len(placed)), make([]uint32, len(placed))
	for i, server := range placed {
		walks[i] = newWalk(server, servers[server].Name, uint32(buckets))
		weights[i] = servers[server].Weight
	}
	g := newGrid(buckets, t.Candidates)
	fill(g, walks, weights)
	t.Rows = g.rows
	return t, nil
}

// newTable returns a table without rows.
func newTable(servers []Server, buckets, candidates int) *Table {
	return &Table{Buckets: buckets, Candidates: candidates, Servers: slices.Clone(servers)}
}

// validPlacing returns the indexes of the servers that a table contains, heaviest first. It returns
// an error if a table cannot have this size or this number of servers, or if a name occurs twice.
func validPlacing(servers []Server, buckets, candidates int) ([]uint16, error) {
	if err := validSize(buckets, candidates); err != nil {
		return nil, err
	}
	if len(servers) > MaxServers {
		return nil, fmt.Errorf("%d servers: more than %d", len(servers), MaxServers)
	}
	return placing(servers)
}

// placing returns the indexes of the servers with positive weight. The heaviest server is first;
// servers of the same weight are in the order of names. A name that occurs twice, for servers of
// any weight, is an error.
func placing(servers []Server) ([]uint16, error) {
	names := make(map[string]struct{}, len(servers))
	placed := make([]uint16, 0, len(servers))
	for i, s := range servers {
		if _, used := names[s.Name]; used {
			return nil, fmt.Errorf("server %q: name used twice", s.Name)
		}
		names[s.Name] = struct{}{}
		if s.Weight > 0 {
			placed = append(placed, uint16(i))
		}
	}
	slices.SortFunc(placed, func(i, j uint16) int {
		a, b := servers[i], servers[j]
		return cmp.Or(cmp.Compare(b.Weight, a.Weight), cmp.Compare(a.Name, b.Name))
	})
	return placed, nil
}

// walk is the state of a server in its permutation of the buckets, p[j] = (offset + j·skip) mod M.
type walk struct {
	server uint16
	bucket uint32 // p[nextIndex] of algorithm 3
	skip   uint32 // coprime with M, so that M steps visit every bucket
	left   uint32 // M - nextIndex; 0 if the permutation is exhausted
}

// newWalk computes a server's offset and skip from its name. It uses SHA-256 because that will
// never change, needs no shared key, and is cheap compared with the filling.
func newWalk(server uint16, name string, buckets uint32) walk {
	sum := sha256.Sum256([]byte(seed + name))
	m := uint64(buckets)
	offset, skip := binary.LittleEndian.Uint64(sum[0:])%m, binary.LittleEndian.Uint64(sum[8:])
	if powerOfTwo(int(buckets)) {
		skip = skip%m | 1 // an odd number
	} else {
		skip = 1 + skip%(m-1) // m is a prime
	}
	return walk{server: server, bucket: uint32(offset), skip: uint32(skip), left: buckets}
}

// grid is a table while it is filled.
type grid struct {
	buckets, candidates uint32
	rows                []uint16
	filled              []uint8 // number of entries in each row
	room                uint32  // maximum number of entries in each row at present
	free                int     // number of free entries in all rows
	// isLaterPass tells that the servers have begun their permutations again. In the first pass a
	// server comes to each row only once. In a later pass, the row can contain the server already.
	isLaterPass bool
}

func newGrid(buckets, candidates int) *grid {
	return &grid{
		buckets: uint32(buckets), candidates: uint32(candidates),
		rows: make([]uint16, buckets*candidates), filled: make([]uint8, buckets),
	}
}

// fill is algorithm 3: the servers take turns, and each enters the next bucket of its permutation
// that has room, until no bucket has room. There must be at least as many servers as candidates.
// Then fill ends: a server skips a bucket only if the bucket is full. So a bucket with room still
// has to be reached by some server.
func (g *grid) fill(s schedule) {
	g.fillTo(g.candidates, s)
}

// fillColumns fills the first column as fill fills a table with one candidate, then the next
// column, and so on. In each column, the servers begin their permutations again. A server skips
// the buckets that already contain it.
func (g *grid) fillColumns(walks []walk, weights []uint32) {
	for column := range g.candidates {
		g.isLaterPass = column > 0
		g.fillTo(column+1, newSchedule(slices.Clone(walks), weights))
	}
}

// fillTo fills all rows up to the given number of entries.
func (g *grid) fillTo(room uint32, s schedule) {
	g.free += int((room - g.room) * g.buckets)
	g.room = room
	for g.free > 0 {
		s.round(g)
	}
}

// take is one turn. The server enters the next bucket of its permutation that has room, as the
// last candidate so far. If there is no such bucket, the permutation is exhausted.
func (g *grid) take(w *walk) {
	bucket, left := w.bucket, w.left
	for taken := false; left > 0 && !taken; left-- {
		isTwice := g.isLaterPass && g.has(bucket, w.server)
		if n := uint32(g.filled[bucket]); n < g.room && !isTwice {
			g.rows[bucket*g.candidates+n] = w.server
			g.filled[bucket]++
			g.free--
			taken = true
		}
		if bucket += w.skip; bucket >= g.buckets {
			bucket -= g.buckets
		}
	}
	w.bucket, w.left = bucket, left
}

// has tells whether a row contains the server.
func (g *grid) has(bucket uint32, server uint16) bool {
	first := bucket * g.candidates
	return slices.Contains(g.rows[first:first+uint32(g.filled[bucket])], server)
}
