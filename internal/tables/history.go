// SPDX-License-Identifier: Apache-2.0

package tables

import "fmt"

// History contains the servers that each place of a table had: SHELL's choice history ("Stateless
// Load-Aware Load Balancing in P4", section III-B). A packet of a flow that the bucket's i-th
// candidate took visits the servers of place i, the newest first, until it reaches the one that
// has the flow.
//
// Algorithm 1 of the paper moves every place down by one at each change of the table and then
// removes duplicates. So the oldest server is lost even if nothing changed in a place.
// History removes duplicates first. It contains as many different servers as its depth, the last
// ones.
type History struct {
	depth   int
	latest  *Table
	servers []uint16 // depth entries for each place of a row
	held    []uint8  // number of known servers for each place
}

// MaxDepth is the maximum depth of a history.
const MaxDepth = 255

// NewHistory returns a history that begins with a table. It keeps 1 to MaxDepth servers for each
// place, including the present one.
func NewHistory(t *Table, depth int) (*History, error) {
	if depth < 1 || depth > MaxDepth {
		return nil, fmt.Errorf("history of depth %d: out of range 1 to %d", depth, MaxDepth)
	}
	h := &History{depth: depth, latest: t, servers: make([]uint16, depth*len(t.Rows)), held: make([]uint8, len(t.Rows))}
	for place, server := range t.Rows {
		h.servers[place*depth] = server
		h.held[place] = 1
	}
	return h, nil
}

// Push adds the next table. It must have the same size, and list the same servers in the same
// order. Servers without weight are not in the table.
func (h *History) Push(t *Table) error {
	if t.Buckets != h.latest.Buckets || t.Candidates != h.latest.Candidates {
		return fmt.Errorf("history of %d buckets with %d candidates: a table has %d with %d",
			h.latest.Buckets, h.latest.Candidates, t.Buckets, t.Candidates)
	}
	if len(t.Servers) != len(h.latest.Servers) {
		return fmt.Errorf("history of %d servers: a table has %d", len(h.latest.Servers), len(t.Servers))
	}
	for i, s := range t.Servers {
		if before := h.latest.Servers[i].Name; s.Name != before {
			return fmt.Errorf("history: server %d was %q, is %q", i, before, s.Name)
		}
	}
	h.latest = t
	for place, server := range t.Rows {
		h.insert(place, server)
	}
	return nil
}

// insert makes a server the first one of its place. The servers before its former position move
// down by one. If it is new, all move down.
func (h *History) insert(place int, server uint16) {
	column := h.servers[place*h.depth : (place+1)*h.depth]
	end := int(h.held[place])
	for i, other := range column[:end] {
		if other == server {
			end = i
		}
	}
	if end == int(h.held[place]) {
		if end == h.depth {
			end--
		} else {
			h.held[place]++
		}
	}
	copy(column[1:end+1], column[:end])
	column[0] = server
}

// Column returns the servers of a bucket's candidate i, the newest first, as indexes of the tables'
// Servers. It shares memory with the history.
func (h *History) Column(bucket, i int) []uint16 {
	place := bucket*h.latest.Candidates + i
	return h.servers[place*h.depth : place*h.depth+int(h.held[place])]
}
