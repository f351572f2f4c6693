// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/segue-lb/segue/internal/desired"
)

// Document is the content of a fleet's store in the form of a configuration file and a file of
// overrides.
type Document struct {
	// Services are in the order of their names, each with its servers in the order of their names.
	Services []desired.Fields
	// Overrides are in the order of their targets.
	Overrides []desired.Override
}

// Document returns the tree as a document. It returns an error that names the first key with an
// invalid name or value, or a service that has servers but no key of its own.
func (t Tree) Document() (*Document, error) {
	d := &Document{}
	services := map[string]desired.Fields{}
	servers := map[string][]any{}
	for _, key := range slices.Sorted(maps.Keys(t)) {
		kind := kindOf(key)
		service, server, err := namesOf(kind, key)
		if err != nil {
			return nil, err
		}
		switch kind {
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
		if list == nil { // a service without servers has an empty list
			list = []any{}
		}
		services[name]["servers"] = list
		d.Services = append(d.Services, services[name])
	}
	return d, nil
}

// fields returns the fields of the service or server at a key, and adds its name to them.
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

// override returns the override at a key, without its target. It is empty if the tree lacks the
// key.
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

// decode reads the JSON value at a key.
func (t Tree) decode(key string, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(t[key]))
	decoder.UseNumber() // a float64 would lose digits of great integers
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
			serverName, err := nameIn(server, at)
			if err != nil {
				return nil, err
			}
			if err := t.put(keyOf(serversKey, name, serverName), without(server, "name")); err != nil {
				return nil, err
			}
		}
	}
	return t, t.putOverrides(d.Overrides)
}

// WithOverrides returns the tree with the given overrides instead of its own.
func (t Tree) WithOverrides(overrides []desired.Override) (Tree, error) {
	next := maps.Clone(t)
	maps.DeleteFunc(next, func(key string, _ json.RawMessage) bool { return kindOf(key) == overridesKey })
	return next, next.putOverrides(overrides)
}

// WithOverridesOf returns the tree with the overrides of another tree, even those that Document
// cannot read. If an override adds a service that the tree itself has, WithOverridesOf makes it add
// nothing. It does the same to the overrides of the servers that were added with the service.
func (t Tree) WithOverridesOf(other Tree) Tree {
	next, _ := t.WithOverrides(nil) // without overrides there is no error
	for key, value := range other {
		if kindOf(key) == overridesKey {
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

// isAdopted tells whether a key has an override that adds a service which the tree itself has, or
// an override that adds a server of this service. A server's override counts only if it was split
// off the service's override (splitServersOff). If the service's override still lists servers, none
// was split off: the overrides that add servers were made independently of it.
func (t Tree) isAdopted(key string) bool {
	if kindOf(key) != overridesKey {
		return false
	}
	service, server, err := namesOf(overridesKey, key)
	if err != nil || t[keyOf(servicesKey, service)] == nil {
		return false
	}
	ofService, err := t.override(overrideKey(service, ""))
	if err != nil || ofService.Add == nil {
		return false
	}
	servers, _ := ofService.Add["servers"].([]any)
	return server == "" || len(servers) == 0
}

// dropAdd makes the override at a key add nothing. What the override sets stays. If it sets
// nothing, dropAdd deletes the key. An override that cannot be read stays as it is.
func (t Tree) dropAdd(key string) {
	o, err := t.override(key)
	if err != nil || o.Add == nil {
		return
	}
	delete(t, key)
	if len(o.Set) > 0 {
		_ = t.put(key, bareOverride{Set: o.Set}) // no error: Set was read from JSON, and the key is free
	}
}

// putOverrides adds overrides to the tree, each at its own key.
func (t Tree) putOverrides(overrides []desired.Override) error {
	overrides, err := t.splitServersOff(overrides)
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

// splitServersOff splits each override that adds a service with its servers: every server gets an
// override of its own. The effect stays the same. One key with all servers could be too large for
// the store, and a drain of one server would have to wait for other changes of the service.
//
// An override that adds a service which the tree has already is without effect. Its servers are not
// split off, because overrides of their own would add them to the tree's service.
func (t Tree) splitServersOff(overrides []desired.Override) (all []desired.Override, err error) {
	added := map[string]int{} // by the key of an added server's override: its index in the list all
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
	removed := map[int]bool{} // the indexes of added servers that another override removes
	// The list all has the added servers now. Add the other overrides.
	for _, o := range overrides {
		i, isAdded := added[overrideKey(o.Service, o.Server)]
		switch {
		case isAdded && o.Remove:
			removed[i] = true
		case isAdded: // the server has one override already, so it must also have what o sets
			all[i].Set = o.Set
		case len(t.addedServers(o)) > 0: // the service stays in its override, but not its servers
			o.Add = maps.Clone(o.Add)
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

// addedServers returns the servers of the service that an override adds. It returns nothing if the
// tree itself has the service: then the override adds nothing.
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

// bareOverride is an override without its target, as a value in the store. The key names the
// target.
type bareOverride struct {
	Add    desired.Fields `json:"add,omitzero"`
	Set    desired.Fields `json:"set,omitempty"`
	Remove bool           `json:"remove,omitempty"`
}

func bare(o desired.Override) bareOverride { return bareOverride{o.Add, o.Set, o.Remove} }

// put adds the JSON of a value. The fields of a map are in the order of their names, so equal
// values have the same JSON.
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

// nameIn returns the name in the fields of a service or server. at is the path of the fields, for
// errors.
func nameIn(fields map[string]any, at string) (string, error) {
	name := fmt.Sprint(fields["name"])
	if fields["name"] == nil || name == "" {
		return "", fmt.Errorf("%s.name: required", at)
	}
	return name, nil
}

// without returns a copy of fields that lacks the named fields.
func without(fields map[string]any, names ...string) map[string]any {
	rest := maps.Clone(fields)
	for _, name := range names {
		delete(rest, name)
	}
	return rest
}

// drainedField is the field of a server that tells whether the server is drained.
const drainedField = "drained"

// withDrainsOf returns the tree with the drains of a later tree: a server that both trees have is
// drained if the later tree drains it, and otherwise not. Balancers follow drains of a change before
// the change is released, because a drain does not change a set of servers.
func (t Tree) withDrainsOf(later Tree) (Tree, error) {
	result := maps.Clone(t)
	for _, c := range t.changesTo(later) {
		kind := kindOf(c.key)
		service, server, err := namesOf(kind, c.key)
		if err != nil {
			return nil, err
		}
		if server == "" {
			continue
		}
		stays, err := bothHave(t, later, service, server)
		switch {
		case err != nil:
		case !stays: // the server is added or removed, which waits for the release
		case kind == overridesKey:
			err = result.copyOverrideDrain(c.key, later)
		default:
			err = result.copyServerDrain(c.key, later)
		}
		if err != nil {
			return nil, err
		}
	}
	return result, nil
}

// bothHave tells whether both trees have a server, by the same keys: its own key, an override that
// adds it, or both. An override that removes the server means that a tree does not have it.
func bothHave(t, later Tree, service, server string) (bool, error) {
	key := overrideKey(service, server)
	before, err := t.override(key)
	after, problem := later.override(key)
	if err := errors.Join(err, problem); err != nil {
		return false, err
	}
	own := keyOf(serversKey, service, server)
	hasOwn, isAdded := t[own] != nil, before.Add != nil
	isSame := hasOwn == (later[own] != nil) && isAdded == (after.Add != nil)
	isThere, isRemoved := hasOwn || isAdded, before.Remove || after.Remove
	return isSame && isThere && !isRemoved, nil
}

// copyServerDrain makes the server at a key drained if it is drained in a later tree, and not
// drained if it is not.
func (t Tree) copyServerDrain(key string, later Tree) error {
	before, err := t.fields(key, "")
	after, problem := later.fields(key, "")
	if err := errors.Join(err, problem); err != nil {
		return err
	}
	delete(t, key)
	return t.put(key, without(withDrainOf(before, after), "name")) // fields has added the name
}

// copyOverrideDrain makes the override at a key drain its server, or not, as the override at this
// key in a later tree does. If the override then has no effect, copyOverrideDrain deletes it.
func (t Tree) copyOverrideDrain(key string, later Tree) error {
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
	if before.Add == nil && len(before.Set) == 0 && !before.Remove {
		return nil
	}
	return t.put(key, bare(before))
}

// withDrainOf returns a copy of fields in which the field drained is the same as in other, or is
// missing if other lacks it.
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
