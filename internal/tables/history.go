// SPDX-License-Identifier: Apache-2.0

package tables

import "fmt"

// NoServer stands for a place without a server, or for a server that is not known any more.
const NoServer = 0xffff

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
	servers []uint16 // depth entries for each place
	held    []uint8  // number of known servers for each place
}

// MaxDepth is the maximum depth of a history.
const MaxDepth = 255

// NewHistory returns a history that begins with the servers of the places of a table, such as
// Table.Rows. NoServer stands for no server. The history keeps 1 to MaxDepth servers for each
// place, including the present one.
func NewHistory(places []uint16, depth int) (*History, error) {
	if depth < 1 || depth > MaxDepth {
		return nil, fmt.Errorf("history of depth %d: out of range 1 to %d", depth, MaxDepth)
	}
	h := &History{depth: depth, servers: make([]uint16, depth*len(places)), held: make([]uint8, len(places))}
	return h, h.Push(places)
}

// Push adds the places of the next table. There must be as many as before, and a number must stand
// for the same server as before.
func (h *History) Push(places []uint16) error {
	if len(places) != len(h.held) {
		return fmt.Errorf("history of %d places: a table has %d", len(h.held), len(places))
	}
	for place, server := range places {
		if server != NoServer {
			h.insert(place, server)
		}
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

// Column returns the servers of a place, the newest first. It shares memory with the history.
func (h *History) Column(place int) []uint16 {
	return h.servers[place*h.depth : place*h.depth+int(h.held[place])]
}
