// SPDX-License-Identifier: Apache-2.0

// Package accept has the policies by which a server accepts or refuses an offered connection: those
// of "6LB: Scalable and Application-Aware Load Balancing with Segment Routing", section II-B, and
// Least. It also has the 8-bit codes of loads in load reports, and Spare, a balancer's list of free
// servers. The agent's data path has its own form of the policies in bpf/agent. Tests of the agent
// compare the two forms.
package accept

import "math"

// Load is the load of a server.
type Load struct {
	// Busy is the number of connections that the application serves or has waiting, as the load
	// source counts them.
	Busy uint32
	// Capacity is the number of connections that the application can serve at a time. It is
	// NoCapacity if the load source does not know it, and 0 if the whole load is unknown.
	Capacity uint32
}

// NoCapacity is the Capacity of a load whose source does not know it. For Least, a server with such
// a load is never free, and its load is compared with others as if Capacity were 1.
const NoCapacity = math.MaxUint32

// Unknown is the load of a server whose source has no reading, or a reading that is too old.
var Unknown = Load{}

// Policy decides for one server about connections that are offered by connect-avail. Connections
// with connect-force are accepted without a decision.
type Policy interface {
	// Accepts tells whether a server with this load accepts an offered connection.
	Accepts(Load) bool
}

// Always accepts all offers, so the first candidate gets all connections.
type Always struct{}

// Accepts returns true.
func (Always) Accepts(Load) bool { return true }

// Never refuses all offers, so the last candidate gets all connections.
type Never struct{}

// Accepts returns false.
func (Never) Accepts(Load) bool { return false }

// Static is 6LB's algorithm 1, SRc: a server accepts while its load is less than Threshold.
type Static struct {
	Threshold uint32 // c in the paper
}

// Accepts tells whether the load is less than the threshold.
func (s Static) Accepts(l Load) bool { return l.Busy < s.Threshold }
