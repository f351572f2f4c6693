// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"github.com/segue-lb/segue/internal/balancer/dataplane"
)

// Condition is what a server is used for.
type Condition string

// The conditions of a server. ServerUnresolved and ServerFailing are also the names of causes.
const (
	ServerUp         Condition = "up"         // passes its health checks, and gets new flows
	ServerUnchecked  Condition = "unchecked"  // gets new flows; it has no health checks
	ServerDrained    Condition = "drained"    // weight 0: keeps its flows, gets no new ones
	ServerUnresolved Condition = "unresolved" // no next hop: its packets are dropped
	// ServerUnreachable says that the next hop does not answer the kernel: the server keeps its connections,
	// for the next hop may be back before the kernel knows, and gets no new ones.
	ServerUnreachable Condition = "unreachable"
	ServerFailing     Condition = "failing" // its checks: keeps its connections, gets no new ones
	ServerRemoved     Condition = "removed" // no longer configured: its slot is about to be freed

	// What probes find: the server keeps its connections and gets no new ones.
	ServerSilent       Condition = "silent"       // its agent does not answer
	ServerIncompatible Condition = "incompatible" // its agent speaks another version of the protocol
	ServerNotServed    Condition = "not-served"   // its agent does not have the VIP
	ServerUnheard      Condition = "unheard"      // connections that it is offered first are not answered
)

// conditions are all that a configured server can be in.
var conditions = []Condition{
	ServerUp, ServerUnchecked, ServerDrained, ServerUnresolved, ServerUnreachable, ServerFailing,
	ServerSilent, ServerIncompatible, ServerNotServed, ServerUnheard,
}

// conditionsOfCauses are the conditions of servers that have one cause alone.
var conditionsOfCauses = map[dataplane.Causes]Condition{
	dataplane.Unresolved:   ServerUnresolved,
	dataplane.Unreachable:  ServerUnreachable,
	dataplane.Failing:      ServerFailing,
	dataplane.Silent:       ServerSilent,
	dataplane.Incompatible: ServerIncompatible,
	dataplane.NotServed:    ServerNotServed,
	dataplane.Unheard:      ServerUnheard,
}

// conditionsOf names causes, the weightiest first, as the conditions that they lead to.
func conditionsOf(c dataplane.Causes) []Condition {
	names := []Condition{}
	for _, cause := range c.Each() {
		names = append(names, conditionsOfCauses[cause])
	}
	return names
}

// conditionOf is the one condition that stands for all that is known of a server.
func conditionOf(flags dataplane.ServerFlags, all dataplane.Causes) Condition {
	switch {
	case flags&dataplane.FlagInUse == 0:
		return ServerRemoved
	case flags&dataplane.FlagDrained != 0:
		return ServerDrained
	case all != 0:
		return conditionsOf(all)[0]
	case flags&dataplane.FlagUnchecked != 0:
		return ServerUnchecked
	}
	return ServerUp
}
