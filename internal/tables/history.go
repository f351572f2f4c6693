// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"fmt"
	"slices"
)

// NoServer stands for a place without a server, or for a server that is not known any more.
const NoServer = 0xffff

// History contains the present and former servers of each place of a table: SHELL's choice history
// ("Stateless Load-Aware Load Balancing in P4", section III-B). A place is an entry of a row. A
// packet of an unknown flow visits the servers of a place, the newest first, until it reaches the
// server that has the flow.
//
// At each change of the table, algorithm 1 of the paper moves the servers of every place down by
// one, and then removes duplicates. So the oldest server is lost even if a place keeps its server.
// History removes duplicates first. So each place keeps its last different servers, up to the depth
// of the history.
type History struct {
	depth   int
	servers []uint16 // depth entries for each place, the newest first
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

// insert makes a server the first one of its place. If it is there already, the servers before it
// move down by one. Otherwise all move down, and a full place loses the last one.
func (h *History) insert(place int, server uint16) {
	servers := h.servers[place*h.depth : (place+1)*h.depth]
	held := int(h.held[place])
	moving := slices.Index(servers[:held], server) // number of servers that move down
	switch {
	case moving >= 0:
	case held == h.depth:
		moving = held - 1
	default:
		moving = held
		h.held[place]++
	}
	copy(servers[1:moving+1], servers[:moving])
	servers[0] = server
}

// ServersOf returns the servers of a place, the newest first. It shares memory with the history.
func (h *History) ServersOf(place int) []uint16 {
	return h.servers[place*h.depth : place*h.depth+int(h.held[place])]
}
