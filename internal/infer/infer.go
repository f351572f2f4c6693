// SPDX-License-Identifier: Apache-2.0

// Package infer holds what lets a balancer choose a server for a flow by what it sees itself, without
// asking anyone: "HLB: Toward Load-Aware Load Balancing" (Yao et al., IEEE/ACM Transactions on
// Networking, 2022), and territories, by which several balancers that cannot talk keep out of each
// other's way. docs/placement.md says what each is worth and where the paper is unclear.
//
// Nothing here has a clock or a source of randomness: durations and random bits are arguments.
package infer

// State is what a flow table knows of a flow (HLB, figure 4a).
type State uint8

// The states.
const (
	Null State = iota // not in the table
	Syn               // placed, and not known to be more than a SYN
	Conn              // the client has answered
)

// Packet is a client's packet as the states see it.
type Packet uint8

// The packets. End is a FIN, a RST or that nothing came for long.
const (
	Open Packet = iota // a SYN
	Data
	End
)

// Next returns the state after a packet, and by how much it changes the server's occupancy. That counts
// flows in Conn only, so that a flood of SYNs does not move it (HLB, section IV-A2).
//
// In HLB's algorithm 1 the packet that takes a flow to Conn may be its FIN: then it stays in Conn with
// no start time, and is counted for ever. Here a flow that ends is in no table, whatever it was.
func (s State) Next(p Packet) (next State, occupancy int32) {
	switch {
	case p == End && s == Conn:
		return Null, -1
	case p == End:
		return Null, 0
	case s == Null && p == Open:
		return Syn, 0
	case s == Syn && p == Data:
		return Conn, 1
	}
	return s, 0
}

// Delay is the score of the shortest expected delay (HLB, section IV-B3): what a server of this weight
// would have per unit of it with one more flow. All weights 1 make it that of the shortest queue.
func Delay(flows, weight float64) float64 { return (flows + 1) / weight }
