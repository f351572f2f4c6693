// SPDX-License-Identifier: Apache-2.0

// Package infer contains methods by which a balancer chooses a server. Most of them need only the
// balancer's own observations; Kind.IsPolled tells which need the loads that servers tell. The
// package has the methods of "HLB: Toward Load-Aware Load Balancing" (Yao et al., IEEE/ACM
// Transactions on Networking, 2022). It also has territories, by which several balancers avoid each
// other's servers without communication. docs/research/placement.md describes how well each method
// works, and where the paper is unclear.
//
// Nothing in this package reads a clock or draws random numbers: durations and random bits are
// arguments.
package infer

// State is the state of a flow in a flow table (HLB, figure 4a).
type State uint8

// The states.
const (
	Null State = iota // not in the table
	Syn               // placed; only a SYN was seen
	Conn              // the client has answered
)

// Packet is the kind of a client's packet, as far as the states depend on it.
type Packet uint8

// The kinds. End is a FIN, a RST, or a long time without packets.
const (
	Open Packet = iota // a SYN
	Data
	End
)

// Next returns the state after a packet, and the change of the server's occupancy. The occupancy
// counts only flows in Conn, so that a flood of SYNs does not change it (HLB, section IV-A2).
//
// In HLB's algorithm 1 the packet that moves a flow to Conn may be its FIN. The flow then stays in
// Conn without a start time, and is counted for ever. Here a flow that ends leaves the table from
// any state.
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

// Delay returns the score of the shortest expected delay (HLB, section IV-B3): the load of a
// server per unit of its weight, with one more flow. If all weights are 1, it is the score of the
// shortest queue.
func Delay(flows, weight float64) float64 { return (flows + 1) / weight }
