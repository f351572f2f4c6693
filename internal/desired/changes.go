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

// Summary returns the first 100 lines, and the number of the others as a further line.
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

// WithPasswords adds a change of the passwords of BGP peers, unless the list is empty. The change
// resets the sessions of these peers.
func (c Changes) WithPasswords(peers []string) Changes {
	if len(peers) == 0 {
		return c
	}
	return append(c, Change{"passwords_changed", Names(peers)})
}

// Differing compares two lists of services. changed has the services of now that are new or have
// changed. former has the services of before that are removed or have changed. Both are in the
// order of their list.
func Differing(now, before []Service) (changed, former []*Service) {
	// Most services have the same place in both lists, and are found without their names.
	isSame := func(i int) bool { return i < len(now) && i < len(before) && now[i].Same(&before[i]) }
	others := map[string]*Service{} // the other services of before, without those found to be equal
	for i := range before {
		if !isSame(i) {
			others[before[i].Name] = &before[i]
		}
	}
	for i := range now {
		s := &now[i]
		was := others[s.Name]
		switch {
		case isSame(i):
		case was == nil || !s.Same(was):
			changed = append(changed, s)
		default:
			delete(others, s.Name)
		}
	}
	for i := range before {
		if s := &before[i]; others[s.Name] == s {
			former = append(former, s)
		}
	}
	return changed, former
}

// ChangesFrom lists the differences between the configuration old and b. It does not list servers
// of added or removed services.
func (b *Balancer) ChangesFrom(old *Balancer) Changes {
	now, before := Differing(b.Services, old.Services)
	services := compare(now, before, "", func(s *Service) string { return s.Name }, "servers")
	former := map[string]*Service{}
	for _, s := range before {
		former[s.Name] = s
	}
	var servers difference
	for _, s := range now {
		if was := former[s.Name]; was != nil {
			name := func(server *Server) string { return server.Name }
			servers = servers.plus(compare(serversThatDiffer(s.Servers, was.Servers),
				serversThatDiffer(was.Servers, s.Servers), s.Name+"/", name))
		}
	}
	node := Change{"node_changed", changedFields(b.Node, old.Node)}
	return named(node, bgpChanges(b.BGP, old.BGP), l2Changes(b.L2, old.L2), services.changes("services"),
		servers.changes("servers"))
}

// serversThatDiffer returns the servers that differ from the one at the same index of another list,
// or have no index there. So compare has fewer servers to compare.
func serversThatDiffer(servers, other []Server) (all []*Server) {
	for i := range servers {
		if i >= len(other) || !servers[i].equals(other[i]) {
			all = append(all, &servers[i])
		}
	}
	return all
}

// equals is a fast reflect.DeepEqual for servers: a change can compare thousands.
func (s Server) equals(other Server) bool {
	isSameWeight := s.Weight == other.Weight
	if s.Weight != nil && other.Weight != nil {
		isSameWeight = *s.Weight == *other.Weight
	}
	s.Weight, other.Weight = nil, nil
	return isSameWeight && s == other
}

// ChangesFrom lists the differences between the configuration old and a.
func (a *Agent) ChangesFrom(old *Agent) Changes {
	services := compare(
		pointers(a.Services), pointers(old.Services), "", func(s *AgentService) string { return s.Name })
	node := Change{"node_changed", changedFields(a.Node, old.Node)}
	return named(node, services.changes("services"))
}

// bgpChanges lists the differences of the section bgp and of its peers.
func bgpChanges(now, before *BGP) Changes {
	if now == nil || before == nil { // to add or remove the section needs a restart
		return nil
	}
	peers := compare(
		pointers(now.Peers), pointers(before.Peers), "", (*BGPPeer).Name)
	fields := changedFields(*now, *before, "peers")
	return append(Changes{{"bgp_changed", fields}}, peers.changes("peers")...)
}

// l2Changes lists the differences of the section l2.
func l2Changes(now, before *L2) Changes {
	if now == nil || before == nil { // to add or remove the section needs a restart
		return nil
	}
	return Changes{{"l2_changed", changedFields(*now, *before)}}
}

// difference is how two lists of named items differ.
type difference struct{ added, removed, changed Names }

// plus returns the items of both differences.
func (d difference) plus(other difference) difference {
	return difference{
		slices.Concat(d.added, other.added),
		slices.Concat(d.removed, other.removed),
		slices.Concat(d.changed, other.changed),
	}
}

// changes returns the difference as changes. what is the kind of the items, such as "servers".
func (d difference) changes(what string) Changes {
	return Changes{
		{what + "_added", d.added},
		{what + "_removed", d.removed},
		{what + "_changed", d.changed},
	}
}

func pointers[T any](list []T) []*T {
	all := make([]*T, len(list))
	for i := range list {
		all[i] = &list[i]
	}
	return all
}

// compare finds the items that are in only one of two lists, and the items whose fields differ. It
// ignores the fields in leaveOut. The names in the result begin with prefix.
func compare[T any](
	now, before []*T, prefix string, name func(*T) string, leaveOut ...string,
) (d difference) {
	old := make(map[string]*T, len(before))
	for _, item := range before {
		old[name(item)] = item
	}
	for _, item := range now {
		was, ok := old[name(item)]
		delete(old, name(item))
		if !ok {
			d.added = append(d.added, prefix+name(item))
			continue
		}
		if fields := changedFields(*item, *was, leaveOut...); len(fields) > 0 {
			what := fmt.Sprintf("%s%s (%s)", prefix, name(item), strings.Join(fields, ", "))
			d.changed = append(d.changed, what)
		}
	}
	for _, item := range before {
		if old[name(item)] != nil {
			d.removed = append(d.removed, prefix+name(item))
		}
	}
	return d
}

// changedFields returns the fields in which two structs differ, by their names in configuration
// files. It ignores the fields in leaveOut. For a weight, or a field that is true or false, the
// result also has both values.
func changedFields(now, before any, leaveOut ...string) (names []string) {
	a, b := reflect.ValueOf(now), reflect.ValueOf(before)
	for _, f := range reflect.VisibleFields(a.Type()) {
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		is, was := a.FieldByIndex(f.Index).Interface(), b.FieldByIndex(f.Index).Interface()
		if f.Anonymous || slices.Contains(leaveOut, name) || reflect.DeepEqual(is, was) {
			continue
		}
		switch value := is.(type) {
		case *uint32: // such as a weight
			if before := was.(*uint32); value != nil && before != nil {
				name = fmt.Sprintf("%s %d to %d", name, *before, *value)
			}
		case bool: // such as drained
			name = fmt.Sprintf("%s %t to %t", name, !value, value)
		}
		names = append(names, name)
	}
	return names
}

// named concatenates changes, without those that name no items.
func named(first Change, more ...Changes) Changes {
	all := slices.Concat(append([]Changes{{first}}, more...)...)
	return slices.DeleteFunc(all, func(c Change) bool { return len(c.Names) == 0 })
}

// mostNames is how many names Names.String lists.
const mostNames = 5

// Names is a list of names for output.
type Names []string

// String returns the first names, and the number of the others.
func (n Names) String() string {
	shown := n[:min(len(n), mostNames)]
	list := strings.Join(shown, ", ")
	if more := len(n) - len(shown); more > 0 {
		return fmt.Sprintf("%s and %d more", list, more)
	}
	return list
}

// Loss is a server whose flows a change of a balancer affects. Without a server, it is a service of
// an agent.
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
	// LossNarrowed: the service gets the packets of fewer VIPs or ports. The flows of the others do
	// not find the server any more. The balancer does not know how many they are.
	LossNarrowed LossCause = "narrowed"
	// LossForgotten: the server is in none of the kept generations any more. The balancer still
	// knows the flows in its flow table. Packets of other flows do not find the server.
	LossForgotten LossCause = "forgotten"
)
