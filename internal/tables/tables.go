// SPDX-License-Identifier: Apache-2.0

// Package tables builds the consistent-hash tables that map a bucket to an ordered list of candidate
// servers, by algorithm 3 of "6LB: Scalable and Application-Aware Load Balancing with Segment
// Routing" (section III). With one candidate a bucket it is Maglev's. A table follows from the set
// of servers and its own size alone, so balancers that agree on those agree on every row without
// talking to each other.
package tables

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/big"
	"slices"
)

const (
	// DefaultBuckets is the papers' M, a prime that leaves 65 buckets to each of 1000 servers.
	DefaultBuckets = 65537
	// MinBuckets and MaxBuckets bound the number of buckets of a table.
	MinBuckets, MaxBuckets = 2, 1 << 24
	// MaxCandidates is the longest list of candidates that a bucket can hold.
	MaxCandidates = 8
	// MaxServers is how many servers the 16-bit entries of a row can tell apart.
	MaxServers = 65535
)

// Version says which candidates a flow has. Builds of one Version make the same table of the same
// servers, and find a flow in the same bucket (balancer.Flow). A change of either needs another
// Version: balancers of the builds before and after it place flows on different servers.
const Version = 1

// seed makes the permutations independent of other hashes of the same names. To change it is to
// change every table.
const seed = "segue consistent-hash table 1\x00"

// Server is a server to be placed in a table.
type Server struct {
	// Name alone decides in which order the server prefers the buckets. It is unique in a table.
	Name string
	// Weight is the server's share relative to the others' weights; 0 keeps it out of the table.
	Weight uint32
}

// Table maps every bucket to a list of distinct servers, the first candidate first.
type Table struct {
	// Buckets is the number of rows, M in the papers.
	Buckets int
	// Candidates is the length of a row, C in the papers: as asked for, or the number of servers of
	// positive weight where that is smaller.
	Candidates int
	// Servers is a copy of the servers that the table was built from, in the order they came in.
	Servers []Server
	// Rows holds one row after the other: Rows[b*Candidates+i] indexes Servers.
	Rows []uint16
}

// Row returns the candidates of bucket b, 0 to Buckets-1, as indexes of Servers. It shares memory
// with the table.
func (t *Table) Row(b int) []uint16 {
	return t.Rows[b*t.Candidates : (b+1)*t.Candidates]
}

// ValidBuckets tells whether a table can have m buckets: a prime or a power of two, from MinBuckets
// to MaxBuckets. For both, skips coprime with m are cheap to draw.
func ValidBuckets(m int) error {
	if m < MinBuckets || m > MaxBuckets {
		return fmt.Errorf("%d buckets: out of range %d to %d", m, MinBuckets, MaxBuckets)
	}
	if !powerOfTwo(m) && !prime(m) {
		return fmt.Errorf("%d buckets: neither a prime nor a power of two", m)
	}
	return nil
}

func validSize(buckets, candidates int) error {
	if candidates < 1 || candidates > MaxCandidates {
		return fmt.Errorf("%d candidates: out of range 1 to %d", candidates, MaxCandidates)
	}
	return ValidBuckets(buckets)
}

func powerOfTwo(m int) bool { return m&(m-1) == 0 }

// prime is exact: ProbablyPrime(0), the Baillie-PSW test, makes no mistake below 2^64.
func prime(m int) bool { return big.NewInt(int64(m)).ProbablyPrime(0) }

// Build places servers in a table with the given number of buckets (see ValidBuckets) and of
// candidates in each (1 to MaxCandidates). The order of servers matters for nothing but the indexes
// in the rows.
//
// Entries are in proportion to weights as far as a row, which lists a server once at most, permits:
// a server whose share exceeds 1/candidates is in nearly every row, and the others share the rest.
// Where no server has a positive weight the table is empty: no candidates and no rows.
//
// It fails on an invalid number of buckets or candidates, on more than MaxServers servers, and on a
// name used twice.
func Build(servers []Server, buckets, candidates int) (*Table, error) {
	return build(servers, buckets, candidates, func(g *grid, walks []walk, weights []uint32) {
		g.fill(newSchedule(walks, weights))
	})
}

// BuildColumns builds a table like Build, but fills one column after the other. The first column is
// the table with one candidate (Maglev's), so the first candidates are in proportion to weights, and
// more candidates do not change them. Each further column is again in proportion, as far as a row
// lists a server once. It is for placements that use the first candidate, and the next ones only in
// its place. Its errors are those of Build.
func BuildColumns(servers []Server, buckets, candidates int) (*Table, error) {
	return build(servers, buckets, candidates, (*grid).fillColumns)
}

func build(
	servers []Server, buckets, candidates int, fill func(*grid, []walk, []uint32),
) (*Table, error) {
	if err := validSize(buckets, candidates); err != nil {
		return nil, err
	}
	if len(servers) > MaxServers {
		return nil, fmt.Errorf("%d servers: more than %d", len(servers), MaxServers)
	}
	placed, err := placing(servers)
	if err != nil {
		return nil, err
	}

	t := &Table{
		Buckets:    buckets,
		Candidates: min(candidates, len(placed)),
		Servers:    slices.Clone(servers),
	}
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

// placing returns the indexes of the servers of positive weight, the heaviest first and by name
// among equals. It fails on a name used twice, by servers of whatever weight.
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

// walk is a server's way through its permutation of the buckets, p[j] = (offset + j·skip) mod M.
type walk struct {
	server uint16
	bucket uint32 // p[nextIndex] of algorithm 3
	skip   uint32 // coprime with M, so that M steps visit every bucket
	left   uint32 // M - nextIndex; 0 when the permutation is exhausted
}

// newWalk draws a server's offset and skip from its name. SHA-256 because it is defined for good,
// needs no seed shared at run time, and costs little next to the fill.
func newWalk(server uint16, name string, buckets uint32) walk {
	sum := sha256.Sum256([]byte(seed + name))
	m := uint64(buckets)
	offset, skip := binary.LittleEndian.Uint64(sum[0:])%m, binary.LittleEndian.Uint64(sum[8:])
	if powerOfTwo(int(buckets)) {
		skip = skip%m | 1
	} else {
		skip = 1 + skip%(m-1)
	}
	return walk{server: server, bucket: uint32(offset), skip: uint32(skip), left: buckets}
}

// grid is a table that is being filled.
type grid struct {
	buckets, candidates uint32
	rows                []uint16
	filled              []uint8 // how many entries of each row are taken
	room                uint32  // how many entries of each row can be taken now
	free                int     // entries that can be taken now, in all rows
}

func newGrid(buckets, candidates int) *grid {
	return &grid{
		buckets:    uint32(buckets),
		candidates: uint32(candidates),
		rows:       make([]uint16, buckets*candidates),
		filled:     make([]uint8, buckets),
	}
}

// fill is algorithm 3: in turn, each server enters the next bucket of its permutation that has room,
// until none has. It needs as many servers as candidates, and then it ends: a server passes over a
// bucket only if it is full, so one with room lacks a server that has yet to come there.
func (g *grid) fill(s schedule) {
	g.fillTo(g.candidates, s)
}

// fillColumns fills a column as fill does a table with one candidate, then the next column, where
// each server begins its permutation again. A server passes over the buckets that have it already.
func (g *grid) fillColumns(walks []walk, weights []uint32) {
	for column := range g.candidates {
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

// take is one turn: the server enters the next bucket of its permutation that has room, as the last
// of those in it so far. If there is none its permutation is exhausted.
func (g *grid) take(w *walk) {
	bucket, left := w.bucket, w.left
	for taken := false; left > 0 && !taken; left-- {
		if n := uint32(g.filled[bucket]); n < g.room && !g.has(bucket, w.server) {
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

// has tells whether a row has the server.
func (g *grid) has(bucket uint32, server uint16) bool {
	first := bucket * g.candidates
	return slices.Contains(g.rows[first:first+uint32(g.filled[bucket])], server)
}
