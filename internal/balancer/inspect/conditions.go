// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"github.com/segue-lb/segue/internal/balancer/dataplane"
)

// Condition describes the state of a server in one word, as `segue status` shows it.
type Condition string

// The conditions of a server. A condition that follows from a cause is also the name of the cause.
const (
	ServerUp Condition = "up" // it passes its health checks and gets new flows
	// ServerUnchecked: it has no health checks, or none of them has had a result. It gets new
	// flows, unless other servers have passed their checks.
	ServerUnchecked  Condition = "unchecked"
	ServerStarting   Condition = "starting"   // it was unfit, and gets a growing share of new flows
	ServerDrained    Condition = "drained"    // it keeps its flows and gets no new ones
	ServerUnresolved Condition = "unresolved" // it has no next hop: its packets are dropped
	// ServerUnreachable: the next hop does not answer the kernel. The server gets no new flows. It
	// keeps its flows, because the next hop may be back before the kernel notices.
	ServerUnreachable Condition = "unreachable"
	ServerFailing     Condition = "failing" // its health checks fail: it gets no new flows
	ServerRemoved     Condition = "removed" // not configured; its slot is about to be freed

	// Probes find the following conditions. The server keeps its flows and gets no new ones.
	ServerSilent       Condition = "silent"       // its agent does not answer probes
	ServerIncompatible Condition = "incompatible" // its agent uses another version of the protocol
	ServerNotServed    Condition = "not-served"   // its agent does not have the VIP
	ServerRefusing     Condition = "refusing"     // its application has stopped listening
	ServerUnheard      Condition = "unheard"      // offers that it gets first are not answered
)

// conditions are all conditions that a configured server can have.
var conditions = []Condition{
	ServerUp, ServerUnchecked, ServerStarting, ServerDrained, ServerUnresolved, ServerUnreachable, ServerFailing,
	ServerSilent, ServerIncompatible, ServerNotServed, ServerRefusing, ServerUnheard,
}

// conditionsOfCauses maps each single cause to the condition of a server that has it.
var conditionsOfCauses = map[dataplane.Causes]Condition{
	dataplane.Unresolved:   ServerUnresolved,
	dataplane.Unreachable:  ServerUnreachable,
	dataplane.Failing:      ServerFailing,
	dataplane.Silent:       ServerSilent,
	dataplane.Incompatible: ServerIncompatible,
	dataplane.NotServed:    ServerNotServed,
	dataplane.Refusing:     ServerRefusing,
	dataplane.Unheard:      ServerUnheard,
}

// ConditionOf returns the condition of a server that has one cause.
func ConditionOf(cause dataplane.Causes) Condition { return conditionsOfCauses[cause] }

// conditionsOf returns the names of the causes as conditions, the most severe first.
func conditionsOf(c dataplane.Causes) []Condition {
	names := []Condition{}
	for _, cause := range c.Each() {
		names = append(names, conditionsOfCauses[cause])
	}
	return names
}

// isOnlyPaused tells whether a server has FlagDrained although nobody has drained it: it starts
// slowly, it awaits its first check, or it has failed and keeps its flows. A drained server with a
// cause also has FlagFailing (member.flags in package balancer).
func isOnlyPaused(flags dataplane.ServerFlags, causes dataplane.Causes) bool {
	keepsFlows := causes != 0 && flags&dataplane.FlagFailing == 0 // although it has failed
	return flags&(dataplane.FlagStarting|dataplane.FlagUnproven) != 0 || keepsFlows
}

// conditionOf returns the one condition that describes a server with these flags and causes. If the
// server was removed, or the operator has drained it, the condition says so. For all others, the
// most severe cause comes first, then a slow start, then a missing first check.
func conditionOf(flags dataplane.ServerFlags, causes dataplane.Causes) Condition {
	switch {
	case flags&dataplane.FlagInUse == 0:
		return ServerRemoved
	case flags&dataplane.FlagDrained != 0 && !isOnlyPaused(flags, causes):
		return ServerDrained
	case causes != 0:
		return conditionsOf(causes)[0]
	case flags&dataplane.FlagStarting != 0:
		return ServerStarting
	case flags&dataplane.FlagUnchecked != 0:
		return ServerUnchecked
	}
	return ServerUp
}
