// SPDX-License-Identifier: Apache-2.0

package infer

// Algorithm1 follows HLB's algorithm 1 line by line, for one flow. Its fields are the flow's
// entries in the paper's t0Table and stateTable. Samplings AsPrinted and EveryPacket use it. It
// differs from sampling FlowEnds and State.Next in three points. A duration begins with the SYN.
// Each packet in Conn gives a duration. A flow whose first packet after the SYN is a FIN stays in
// Conn. The zero value is a flow that is not in the tables.
type Algorithm1 struct {
	state State
	t0    float64
	timed bool // t0Table has the flow; the paper's value for false is t0 = 0
}

// Packet handles a client's packet at a time in seconds. If HLB's algorithm 1 registers a duration
// in its line 20, Packet returns it, in seconds.
func (a *Algorithm1) Packet(p Packet, now float64) (duration float64, registered bool) {
	if !a.timed {
		if p == Open {
			a.state, a.t0, a.timed = Syn, now, true
		}
		return 0, false
	}
	if p == Open { // a repeated SYN
		return 0, false
	}
	last := a.state
	if last == Conn {
		duration, registered = now-a.t0, true
	} else {
		a.state = Conn
	}
	if p == End {
		a.timed = false
		if last == Conn {
			a.state = Null
		}
	}
	return duration, registered
}
