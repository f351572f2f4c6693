// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/segue-lb/segue/internal/desired"
)

// Document is the content of a fleet as files have it.
type Document struct {
	// Services are the services of a configuration file, in the order of their names, and so are
	// their servers.
	Services []desired.Fields
	// Overrides are in the order of their targets.
	Overrides []desired.Override
}

// Document returns the tree as a document. It returns an error that names the first key with an
// invalid name or value.
func (t Tree) Document() (*Document, error) {
	d := &Document{}
	services := map[string]desired.Fields{}
	servers := map[string][]any{}
	for _, key := range slices.Sorted(maps.Keys(t)) {
		tree := treeOf(key)
		service, server, err := namesOf(tree, key)
		if err != nil {
			return nil, err
		}
		switch tree {
		case overridesKey:
			var o desired.Override
			if o, err = t.override(key); err == nil {
				o.Service, o.Server = service, server
				d.Overrides = append(d.Overrides, o)
			}
		case servicesKey:
			services[service], err = t.fields(key, service)
		case serversKey:
			var fields desired.Fields
			if fields, err = t.fields(key, server); err == nil {
				servers[service] = append(servers[service], map[string]any(fields))
			}
		}
		if err != nil {
			return nil, err
		}
	}
	for name := range servers {
		if services[name] == nil {
			return nil, fmt.Errorf("key %s: missing, but the service has servers", keyOf(servicesKey, name))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(services)) {
		list := servers[name]
		if list == nil {
			list = []any{}
		}
		services[name]["servers"] = list
		d.Services = append(d.Services, services[name])
	}
	return d, nil
}

// fields returns the fields of a service or a server with a name.
func (t Tree) fields(key, name string) (fields desired.Fields, err error) {
	if err := t.decode(key, &fields); err != nil {
		return nil, err
	}
	if fields == nil {
		return nil, fmt.Errorf("key %s: is null", key)
	}
	fields = fields.WithPlainNumbers()
	fields["name"] = name
	return fields, nil
}

// override returns the override of a key, without its target.
func (t Tree) override(key string) (o desired.Override, err error) {
	if t[key] == nil {
		return o, nil
	}
	if err := t.decode(key, &o); err != nil {
		return o, err
	}
	for _, fields := range []*desired.Fields{&o.Add, &o.Set} {
		if *fields != nil {
			*fields = fields.WithPlainNumbers()
		}
	}
	return o, nil
}

func (t Tree) decode(key string, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(t[key]))
	decoder.UseNumber() // a float64 has not the digits of all integers
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return fmt.Errorf("key %s: %w", key, err)
	}
	return nil
}

// Tree returns the document as a tree. It returns an error if a service or server has no name, or
// the same name as another one.
func (d *Document) Tree() (Tree, error) {
	t := Tree{}
	for i, service := range d.Services {
		name, err := nameIn(service, fmt.Sprintf("services[%d]", i))
		if err != nil {
			return nil, err
		}
		if err := t.put(keyOf(servicesKey, name), without(service, "name", "servers")); err != nil {
			return nil, err
		}
		list, _ := service["servers"].([]any)
		for j, element := range list {
			at := fmt.Sprintf("services[%d].servers[%d]", i, j)
			server, isMapping := element.(map[string]any)
			if !isMapping {
				return nil, fmt.Errorf("%s: must be a mapping", at)
			}
			of, err := nameIn(server, at)
			if err != nil {
				return nil, err
			}
			if err := t.put(keyOf(serversKey, name, of), without(server, "name")); err != nil {
				return nil, err
			}
		}
	}
	return t, t.putOverrides(d.Overrides)
}

// WithOverrides returns the tree with other overrides.
func (t Tree) WithOverrides(overrides []desired.Override) (Tree, error) {
	next := maps.Clone(t)
	maps.DeleteFunc(next, func(key string, _ json.RawMessage) bool { return treeOf(key) == overridesKey })
	return next, next.putOverrides(overrides)
}

// WithOverridesOf returns the tree with the overrides of another one, also those that Document cannot
// read. A service of the tree takes precedence over an override that adds it: the override, and the
// servers that it has brought, no longer add anything.
func (t Tree) WithOverridesOf(other Tree) Tree {
	next, _ := t.WithOverrides(nil) // without overrides there is no error
	for key, value := range other {
		if treeOf(key) == overridesKey {
			next[key] = value
		}
	}
	var adopted []string // keys
	for key := range next {
		if next.isAdopted(key) {
			adopted = append(adopted, key)
		}
	}
	for _, key := range adopted {
		next.dropAdd(key)
	}
	return next
}

// isAdopted tells whether a key is an override that adds a service of the tree, or a server that such
// an override has brought. If apart has left the servers in the override, other servers are not of it.
func (t Tree) isAdopted(key string) bool {
	if treeOf(key) != overridesKey {
		return false
	}
	service, server, err := namesOf(overridesKey, key)
	if err != nil || t[keyOf(servicesKey, service)] == nil {
		return false
	}
	own, err := t.override(overrideKey(service, ""))
	list, _ := own.Add["servers"].([]any)
	return err == nil && own.Add != nil && (server == "" || len(list) == 0)
}

// dropAdd makes an override that can be read add nothing. Its other fields stay.
func (t Tree) dropAdd(key string) {
	o, err := t.override(key)
	if err != nil || o.Add == nil {
		return
	}
	if delete(t, key); len(o.Set) > 0 {
		_ = t.put(key, bareOverride{Set: o.Set}) // it was read from JSON, and the key is free
	}
}

func (t Tree) putOverrides(overrides []desired.Override) error {
	overrides, err := t.apart(overrides)
	if err != nil {
		return err
	}
	for _, o := range overrides {
		if err := t.put(overrideKey(o.Service, o.Server), bare(o)); err != nil {
			return err
		}
	}
	return nil
}

// apart returns overrides with the same effect, in which each server of a service that an override
// adds has an override of its own. A key with all servers could be larger than the store takes, and
// a drain could not take effect before other changes of the service. If the tree has the service
// itself, the override adds nothing, and neither must its servers: they stay in it.
func (t Tree) apart(overrides []desired.Override) (all []desired.Override, err error) {
	added := map[string]int{} // indexes in all
	for _, o := range overrides {
		for i, element := range t.addedServers(o) {
			at := fmt.Sprintf("overrides of %s: add.servers[%d]", o.Service, i)
			server, isMapping := element.(map[string]any)
			if !isMapping {
				return nil, fmt.Errorf("%s: must be a mapping", at)
			}
			name, err := nameIn(server, at)
			if err != nil {
				return nil, err
			}
			added[overrideKey(o.Service, name)] = len(all)
			all = append(all, desired.Override{
				Service: o.Service, Server: name, Add: without(server, "name"),
			})
		}
	}
	removed := map[int]bool{}
	for _, o := range overrides {
		i, isAdded := added[overrideKey(o.Service, o.Server)]
		switch {
		case isAdded && o.Remove:
			removed[i] = true
		case isAdded:
			all[i].Set = o.Set
		case len(t.addedServers(o)) > 0:
			o.Add = without(o.Add, "servers")
			o.Add["servers"] = []any{}
			all = append(all, o)
		default:
			all = append(all, o)
		}
	}
	kept := all[:0]
	for i, o := range all {
		if !removed[i] {
			kept = append(kept, o)
		}
	}
	return kept, nil
}

// addedServers returns the list of the servers of a service that an override adds. There is none if
// the tree has the service itself.
func (t Tree) addedServers(o desired.Override) []any {
	if o.Server != "" || t[keyOf(servicesKey, o.Service)] != nil {
		return nil
	}
	list, _ := o.Add["servers"].([]any)
	return list
}

func overrideKey(service, server string) string {
	if server == "" {
		return keyOf(overridesKey, service)
	}
	return keyOf(overridesKey, service, server)
}

// bareOverride is an override whose target is in its key.
type bareOverride struct {
	Add    desired.Fields `json:"add,omitzero"`
	Set    desired.Fields `json:"set,omitempty"`
	Remove bool           `json:"remove,omitempty"`
}

func bare(o desired.Override) bareOverride { return bareOverride{o.Add, o.Set, o.Remove} }

// put adds a value, whose fields are then in the order of their names.
func (t Tree) put(key string, value any) error {
	if _, ok := t[key]; ok {
		return fmt.Errorf("%s: occurs twice", key)
	}
	text, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	t[key] = text
	return nil
}

func nameIn(fields map[string]any, at string) (string, error) {
	name := fmt.Sprint(fields["name"])
	if fields["name"] == nil || name == "" {
		return "", fmt.Errorf("%s.name: required", at)
	}
	return name, nil
}

func without(fields map[string]any, names ...string) map[string]any {
	rest := maps.Clone(fields)
	for _, name := range names {
		delete(rest, name)
	}
	return rest
}

// drainedField is the field of a server that gives it no new connections.
const drainedField = "drained"

// withDrainsOf returns the tree in which servers are drained as they are in a later one. Balancers
// follow a drain at once, because it does not change a set of servers.
func (t Tree) withDrainsOf(later Tree) (Tree, error) {
	result := maps.Clone(t)
	for _, c := range t.changesTo(later) {
		tree := treeOf(c.key)
		service, server, err := namesOf(tree, c.key)
		if err != nil {
			return nil, err
		}
		if server == "" {
			continue
		}
		stays, err := bothHave(t, later, service, server)
		switch {
		case err != nil:
		case !stays: // it is added or removed, which waits for the release
		case tree == overridesKey:
			err = result.followOverride(c.key, later)
		default:
			err = result.followServer(c.key, later)
		}
		if err != nil {
			return nil, err
		}
	}
	return result, nil
}

// bothHave tells whether both trees have a server in the same way.
func bothHave(t, later Tree, service, server string) (bool, error) {
	key := overrideKey(service, server)
	before, err := t.override(key)
	after, problem := later.override(key)
	if err := errors.Join(err, problem); err != nil {
		return false, err
	}
	own := keyOf(serversKey, service, server)
	return (t[own] == nil) == (later[own] == nil) && (t[own] != nil || before.Add != nil) &&
		(before.Add == nil) == (after.Add == nil) && !before.Remove && !after.Remove, nil
}

// followServer makes a server as drained as in a later tree.
func (t Tree) followServer(key string, later Tree) error {
	before, err := t.fields(key, "")
	after, problem := later.fields(key, "")
	if err := errors.Join(err, problem); err != nil {
		return err
	}
	delete(t, key)
	return t.put(key, without(withDrainOf(before, after), "name"))
}

// followOverride makes an override drain its server as in a later tree.
func (t Tree) followOverride(key string, later Tree) error {
	before, err := t.override(key)
	after, problem := later.override(key)
	if err := errors.Join(err, problem); err != nil {
		return err
	}
	before.Set = withDrainOf(before.Set, after.Set)
	if before.Add != nil {
		before.Add = withDrainOf(before.Add, after.Add)
	}
	delete(t, key)
	if reflect.DeepEqual(bare(before), bareOverride{Set: before.Set}) && len(before.Set) == 0 {
		return nil
	}
	return t.put(key, bare(before))
}

// withDrainOf returns fields with the drain of other fields.
func withDrainOf(fields, other map[string]any) map[string]any {
	result := without(fields, drainedField)
	if drained, ok := other[drainedField]; ok {
		if result == nil {
			result = map[string]any{}
		}
		result[drainedField] = drained
	}
	return result
}
