// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Change is what one configuration has other than the one before, in one respect.
type Change struct {
	What  string // such as servers_added
	Names Names  // of what changed, in the order of the file
}

// Changes are all that one configuration has other than the one before.
type Changes []Change

// Attributes are the changes as a line of the log has them.
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

// WithKeys adds that the keys in the file of node.signal-key are others, if they are.
func (c Changes) WithKeys(changed bool) Changes {
	if !changed {
		return c
	}
	return append(c, Change{"keys_changed", Names{signalKeyPath}})
}

// ChangesFrom lists what b changes of a running configuration. Servers of services that come or go
// are not listed.
func (b *Balancer) ChangesFrom(old *Balancer) Changes {
	nameOf := func(s Service) string { return s.Name }
	services := compare(b.Services, old.Services, "", nameOf, "servers")
	before := map[string][]Server{}
	for _, s := range old.Services {
		before[s.Name] = s.Servers
	}
	var servers difference
	for _, s := range b.Services {
		if was, ok := before[s.Name]; ok {
			name := func(server Server) string { return server.Name }
			servers = servers.and(compare(s.Servers, was, s.Name+"/", name))
		}
	}
	node := Change{"node_changed", changedFields(b.Node, old.Node)}
	return named(node, services.changes("services"), servers.changes("servers"))
}

// ChangesFrom lists what a changes of a running configuration, as that of Balancer does.
func (a *Agent) ChangesFrom(old *Agent) Changes {
	services := compare(a.Services, old.Services, "", func(s AgentService) string { return s.Name })
	node := Change{"node_changed", changedFields(a.Node, old.Node)}
	return named(node, services.changes("services"))
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

// compare finds the items that only one of two lists has, and those that both have with other
// fields, apart from the fields to leave out. It names them with the prefix.
func compare[T any](
	now, before []T, prefix string, name func(T) string, leaveOut ...string,
) (d difference) {
	old := map[string]T{}
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
		fields := slices.DeleteFunc(changedFields(item, was), func(field string) bool {
			return slices.Contains(leaveOut, field)
		})
		if len(fields) > 0 {
			what := fmt.Sprintf("%s%s (%s)", prefix, name(item), strings.Join(fields, ", "))
			d.changed = append(d.changed, what)
		}
	}
	for _, item := range before {
		if _, gone := old[name(item)]; gone {
			d.removed = append(d.removed, prefix+name(item))
		}
	}
	return d
}

// changedFields names the fields in which two structs differ as the file does; of a weight it tells
// the values, too.
func changedFields(now, before any) (names []string) {
	a, b := reflect.ValueOf(now), reflect.ValueOf(before)
	for i := range a.NumField() {
		if reflect.DeepEqual(a.Field(i).Interface(), b.Field(i).Interface()) {
			continue
		}
		name, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("yaml"), ",")
		if weight, ok := a.Field(i).Interface().(*uint32); ok && name == "weight" {
			name = fmt.Sprintf("weight %d to %d", *b.Field(i).Interface().(*uint32), *weight)
		}
		names = append(names, name)
	}
	return names
}

// named puts changes together without those of nothing.
func named(first Change, more ...Changes) Changes {
	all := slices.Concat(append([]Changes{{first}}, more...)...)
	return slices.DeleteFunc(all, func(c Change) bool { return len(c.Names) == 0 })
}

// mostNames is how many of many names are listed.
const mostNames = 5

// Names is a list for people to read.
type Names []string

// String lists the names; of more than five, which need not be known one by one, the first five,
// and how many more there are.
func (n Names) String() string {
	shown := n[:min(len(n), mostNames)]
	list := strings.Join(shown, ", ")
	if more := len(n) - len(shown); more > 0 {
		return fmt.Sprintf("%s and %d more", list, more)
	}
	return list
}
