// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Change is one kind of difference between two configurations.
type Change struct {
	What  string // such as servers_added
	Names Names  // the changed items, in the order of the file
}

// Changes are all differences between two configurations.
type Changes []Change

// Attributes returns the changes as attributes of a log line.
func (c Changes) Attributes() []any {
	if len(c) == 0 {
		return []any{"changes", "none"}
	}
	var attributes []any
	for _, change := range c {
		attributes = append(attributes, change.What, change.Names.String())
	}
	return attributes
}

// Lines returns a line for each changed item, such as "server web/s1 (weight 1 to 2) changed".
func (c Changes) Lines() (lines []string) {
	for _, change := range c {
		what, how, _ := strings.Cut(change.What, "_")
		for _, name := range change.Names {
			lines = append(lines, fmt.Sprintf("%s %s %s", strings.TrimSuffix(what, "s"), name, how))
		}
	}
	return lines
}

// Summary returns the first lines, and the number of the others.
func (c Changes) Summary() []string {
	const most = 100
	lines := c.Lines()
	if len(lines) <= most {
		return lines
	}
	return append(lines[:most:most], fmt.Sprintf("and %d more", len(lines)-most))
}

// WithKeys adds a change of the keys in the file of node.signal-key, if they changed.
func (c Changes) WithKeys(changed bool) Changes {
	if !changed {
		return c
	}
	return append(c, Change{"keys_changed", Names{SignalKeyField}})
}

// WithPasswords adds a change of the passwords in the files of these BGP peers, if there are any. It
// resets their sessions.
func (c Changes) WithPasswords(peers []string) Changes {
	if len(peers) == 0 {
		return c
	}
	return append(c, Change{"passwords_changed", Names(peers)})
}

// ChangesFrom lists the differences between a running configuration and b. It does not list servers
// of added or removed services.
func (b *Balancer) ChangesFrom(old *Balancer) Changes {
	nameOf := func(s *Service) string { return s.Name }
	services := compare(b.Services, old.Services, "", nameOf, deeplyEqual, "servers")
	before := map[string][]Server{}
	for i := range old.Services {
		before[old.Services[i].Name] = old.Services[i].Servers
	}
	var servers difference
	for i := range b.Services {
		s := &b.Services[i]
		if was, ok := before[s.Name]; ok && !slices.EqualFunc(s.Servers, was, Server.equals) {
			name := func(server *Server) string { return server.Name }
			equal := func(a, b *Server) bool { return a.equals(*b) }
			servers = servers.and(compare(s.Servers, was, s.Name+"/", name, equal))
		}
	}
	node := Change{"node_changed", changedFields(b.Node, old.Node)}
	return named(node, bgpChanges(b.BGP, old.BGP), services.changes("services"), servers.changes("servers"))
}

// equals is reflect.DeepEqual for servers, which a change compares by the thousand.
func (s Server) equals(other Server) bool {
	if (s.Weight == nil) != (other.Weight == nil) || s.Weight != nil && *s.Weight != *other.Weight {
		return false
	}
	s.Weight, other.Weight = nil, nil
	return s == other
}

// ChangesFrom lists the differences between a running configuration and a, as that of Balancer
// does.
func (a *Agent) ChangesFrom(old *Agent) Changes {
	services := compare(a.Services, old.Services, "", func(s *AgentService) string { return s.Name }, deeplyEqual)
	node := Change{"node_changed", changedFields(a.Node, old.Node)}
	return named(node, services.changes("services"))
}

// bgpChanges lists the differences of announcements, with those of each peer.
func bgpChanges(now, before *BGP) Changes {
	if now == nil || before == nil { // then ASN differs, and needs a restart
		return nil
	}
	peers := compare(now.Peers, before.Peers, "", func(p *BGPPeer) string { return p.Address.String() }, deeplyEqual)
	fields := changedFields(*now, *before, "peers")
	return append(Changes{{"bgp_changed", fields}}, peers.changes("peers")...)
}

// difference is how two lists of named items differ.
type difference struct{ added, removed, changed Names }

func (d difference) and(other difference) difference {
	return difference{
		slices.Concat(d.added, other.added),
		slices.Concat(d.removed, other.removed),
		slices.Concat(d.changed, other.changed),
	}
}

func (d difference) changes(what string) Changes {
	return Changes{
		{what + "_added", d.added},
		{what + "_removed", d.removed},
		{what + "_changed", d.changed},
	}
}

// deeplyEqual is soon done if both share memory.
func deeplyEqual[T any](a, b *T) bool { return reflect.DeepEqual(a, b) }

// compare finds the items that are in only one of two lists, and the items whose fields differ,
// except for the fields in leaveOut. It puts the prefix before their names.
func compare[T any](
	now, before []T, prefix string, name func(*T) string, equal func(a, b *T) bool, leaveOut ...string,
) (d difference) {
	old := make(map[string]*T, len(before))
	for i := range before {
		old[name(&before[i])] = &before[i]
	}
	for i := range now {
		item := &now[i]
		was, ok := old[name(item)]
		delete(old, name(item))
		if !ok {
			d.added = append(d.added, prefix+name(item))
			continue
		}
		if equal(item, was) {
			continue
		}
		if fields := changedFields(*item, *was, leaveOut...); len(fields) > 0 {
			what := fmt.Sprintf("%s%s (%s)", prefix, name(item), strings.Join(fields, ", "))
			d.changed = append(d.changed, what)
		}
	}
	for i := range before {
		if name := name(&before[i]); old[name] != nil {
			d.removed = append(d.removed, prefix+name)
		}
	}
	return d
}

// changedFields returns the names of the fields in which two structs differ, as in the file, except
// for the fields in leaveOut. For a weight it also gives the values.
func changedFields(now, before any, leaveOut ...string) (names []string) {
	a, b := reflect.ValueOf(now), reflect.ValueOf(before)
	for i := range a.NumField() {
		name, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("yaml"), ",")
		if slices.Contains(leaveOut, name) ||
			reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
			continue
		}
		switch value := a.Field(i).Interface().(type) {
		case *uint32: // a weight
			name = fmt.Sprintf("%s %d to %d", name, *b.Field(i).Interface().(*uint32), *value)
		case bool: // whether a server or a service is drained
			name = fmt.Sprintf("%s %t to %t", name, !value, value)
		}
		names = append(names, name)
	}
	return names
}

// named concatenates changes, without empty ones.
func named(first Change, more ...Changes) Changes {
	all := slices.Concat(append([]Changes{{first}}, more...)...)
	return slices.DeleteFunc(all, func(c Change) bool { return len(c.Names) == 0 })
}

// mostNames is the number of names to list.
const mostNames = 5

// Names is a list of names for output.
type Names []string

// String lists at most five names, and the number of the others.
func (n Names) String() string {
	shown := n[:min(len(n), mostNames)]
	list := strings.Join(shown, ", ")
	if more := len(n) - len(shown); more > 0 {
		return fmt.Sprintf("%s and %d more", list, more)
	}
	return list
}

// Loss is a server, or without one a service of an agent, whose flows a change affects.
type Loss struct {
	Service, Server string
	Cause           LossCause
	Flows           *uint64 // live flows before the change; nil: not known
}

// LossCause is why a change affects the flows of a server.
type LossCause string

// The causes of losses.
const (
	// LossRemoved: the server is removed. Its flows go to other servers, which reset them.
	LossRemoved LossCause = "removed"
	// LossMoved: the server gets another address, or its service another VIP, port or protocol. Its
	// flows do not find the server any more.
	LossMoved LossCause = "moved"
	// LossNarrowed: the service gets the packets of fewer ports. The flows of the other ports do not
	// find the server any more. The balancer does not know how many they are.
	LossNarrowed LossCause = "narrowed"
	// LossForgotten: the server is in none of the kept generations any more. The balancer still
	// knows the flows in its flow table. Packets of other flows do not find the server.
	LossForgotten LossCause = "forgotten"
)
