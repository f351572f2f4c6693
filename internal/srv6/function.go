// SPDX-License-Identifier: Apache-2.0

package srv6

import "fmt"

// Function is a code that tells what a host does with a packet whose destination is one of its
// SIDs.
type Function uint16

// Host is the code in addresses that name the host itself, such as the sender in a segment list. It
// is no function.
const Host Function = 0

// The functions of a server.
const (
	// ConnectAvail offers a new connection. The server takes it, or passes it to the next segment.
	ConnectAvail Function = 0x0001
	// ConnectForce makes the server take a new connection.
	ConnectForce Function = 0x0002
	// AckStickiness delivers the packet. The balancer knows that this server has the flow.
	AckStickiness Function = 0x0003
	// RecoverStickiness delivers the packet if the flow is local, and tells the balancer so.
	// Otherwise it passes the packet on.
	RecoverStickiness Function = 0x0004
	// Deliver delivers the packet in any case.
	Deliver Function = 0x0005
	// Steer delivers the packet if the flow is local. Otherwise it passes the packet on. The
	// balancer needs no answer.
	Steer Function = 0x0006
)

// Probe asks an agent for an answer. The answer goes to the same function of the balancer.
const Probe Function = 0x0007

// The functions of a balancer.
const (
	// CreateStickiness says that the sender took the flow of the signal.
	CreateStickiness Function = 0x0011
	// RemoveStickiness says that the flow of the signal is ending.
	RemoveStickiness Function = 0x0012
	// Return says that the sender does not have the flow of the client's packet.
	Return Function = 0x0013
)

var functionNames = map[Function]struct{ long, short string }{
	Host:              {"host", ""},
	ConnectAvail:      {"connect-avail", "ca"},
	ConnectForce:      {"connect-force", "cf"},
	AckStickiness:     {"ack-stickiness", "as"},
	RecoverStickiness: {"recover-stickiness", "rs"},
	Deliver:           {"deliver", "dv"},
	Steer:             {"steer", "st"},
	Probe:             {"probe", "pr"},
	CreateStickiness:  {"create-stickiness", "cs"},
	RemoveStickiness:  {"remove-stickiness", "rms"},
	Return:            {"return", "rt"},
}

// AtServer tells whether the function is one that servers apply to packets to VIPs. is_vip_function
// in bpf/agent/envelope.h does the same.
func (f Function) AtServer() bool { return f >= ConnectAvail && f <= Steer }

// IsOffer tells whether the function offers a new connection to a server.
func (f Function) IsOffer() bool { return f == ConnectAvail || f == ConnectForce }

// String returns the function's name, or its code if it has none.
func (f Function) String() string {
	if name, ok := functionNames[f]; ok {
		return name.long
	}
	return fmt.Sprintf("function 0x%04x", uint16(f))
}

// Short returns the abbreviation of the function's name in segment lists. It is empty for Host and
// for codes without a name.
func (f Function) Short() string { return functionNames[f].short }
