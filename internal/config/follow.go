// SPDX-License-Identifier: Apache-2.0

package config

import (
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// FollowingFile returns f with new overrides, which change its services to those of another
// configuration file. text is the content of that file. A service or server that an override drains
// stays drained if the other file has it and it can be drained there. Other sections of that file
// have no effect: there is a warning about each section that differs from the file in f.
// FollowingFile removes invalid overrides, with a warning about each. The error is of type
// fieldpath.Errors.
func (f *Files[D]) FollowingFile(text []byte) (*Files[D], fieldpath.Errors, error) {
	root, problem := parse(text)
	if problem != nil {
		return nil, nil, fieldpath.Errors{problem}
	}
	root = f.withSections(root)
	wanted, _, problems := f.read(root, nil)
	if len(problems) > 0 {
		return nil, nil, problems.OrNil()
	}
	after := itemsOf(wanted.Items(), root)
	overrides := differences(itemsOf(f.File.Items(), f.root), after)
	overrides, ended := keepDrains(overrides, f.InForce, after)
	valid, gone := f.WithoutInvalid(func(*desired.InvalidOverride) bool { return true })
	next, warnings, err := valid.WithOverrides(overrides)
	if err != nil {
		return nil, nil, err
	}
	return next, slices.Concat(f.otherSections(wanted), gone, ended, warnings), nil
}

// section is a section of a configuration file other than services.
type section struct {
	name  string
	value any
}

// sectionsOf returns the sections of a *desired.Balancer or *desired.Agent.
func sectionsOf(state any) (sections []section) {
	value := reflect.ValueOf(state).Elem()
	for i := range value.NumField() {
		name, _, _ := strings.Cut(value.Type().Field(i).Tag.Get("yaml"), ",")
		if name != "services" {
			sections = append(sections, section{name, value.Field(i).Interface()})
		}
	}
	return sections
}

// withSections returns the document root, with those sections of f's configuration file that root
// lacks, except services.
func (f *Files[D]) withSections(root *yaml.Node) *yaml.Node {
	top := resolved(root.Content[0])
	for _, s := range sectionsOf(f.File) {
		if child(top, s.name) == nil {
			top = with(top, s.name, child(resolved(f.root.Content[0]), s.name))
		}
	}
	return &yaml.Node{Kind: yaml.DocumentNode, Content: []*yaml.Node{top}}
}

// otherSections warns about each section other than services that differs between wanted and f's
// configuration file, because such a section of wanted has no effect.
func (f *Files[D]) otherSections(wanted D) (warnings fieldpath.Errors) {
	own := sectionsOf(f.File)
	for i, s := range sectionsOf(wanted) {
		if !reflect.DeepEqual(s.value, own[i].value) {
			warnings.Addf(s.name, "differs from the configuration file of the process, and has no effect: "+
				"only services are applied")
		}
	}
	return warnings
}

// items are services and servers in their order, with their nodes in a document.
type items struct {
	list  []desired.Item
	at    map[target]int // indexes in list
	nodes map[target]*yaml.Node
}

// target names a service, or a server of it.
type target struct{ service, server string }

func targetOf(i *desired.Item) target { return target{i.Service, i.Server} }

// itemsOf finds the nodes of items in a document.
func itemsOf(list []desired.Item, root *yaml.Node) *items {
	all := &items{list, map[target]int{}, nodesOf(root)}
	for i := range list {
		all.at[targetOf(&list[i])] = i
	}
	return all
}

// nodesIn returns a function that returns the result of nodesOf, and calls it only once.
func nodesIn(root *yaml.Node) func() map[target]*yaml.Node {
	return sync.OnceValue(func() map[target]*yaml.Node { return nodesOf(root) })
}

// nodesOf finds the nodes of services and servers in a document.
func nodesOf(root *yaml.Node) map[target]*yaml.Node {
	nodes := map[target]*yaml.Node{}
	for _, service := range elements(child(resolved(root.Content[0]), "services")) {
		name := nameOf(service)
		nodes[target{name, ""}] = resolved(service)
		for _, server := range elements(child(resolved(service), "servers")) {
			nodes[target{name, nameOf(server)}] = resolved(server)
		}
	}
	return nodes
}

func (i *items) has(t target) bool { _, ok := i.at[t]; return ok }

// written returns the fields of a service or server as the document has them, without defaults. The
// fields of a service lack its servers.
func (i *items) written(t target) desired.Fields {
	fields := fieldsOf(i.nodes[t])
	if t.server == "" {
		delete(fields, "servers")
	}
	return fields
}

// differences returns the overrides that change the items before to the items after.
func differences(before, after *items) (overrides []desired.Override) {
	for i := range before.list {
		t := targetOf(&before.list[i])
		// The override that removes a service also removes its servers.
		if !after.has(t) && (t.server == "" || after.has(target{t.service, ""})) {
			overrides = append(overrides, desired.Override{Service: t.service, Server: t.server, Remove: true})
		}
	}
	for i := range after.list {
		t := targetOf(&after.list[i])
		o := desired.Override{Service: t.service, Server: t.server}
		at, existed := before.at[t]
		isOfNewService := t.server != "" && !before.has(target{t.service, ""})
		switch {
		case !existed && isOfNewService:
			continue // the override that adds the service has its servers
		case !existed:
			o.Add = fieldsOf(after.nodes[t])
		case reflect.DeepEqual(before.list[at].Value, after.list[i].Value):
			continue
		default:
			o.Set = patch(before.written(t), after.written(t))
		}
		// If the values differ and the fields in both files are the same, a default differs because of a
		// field that another override sets. Then no override is needed here.
		if o.Add != nil || len(o.Set) > 0 {
			overrides = append(overrides, o)
		}
	}
	return overrides
}

// fieldsOf returns the fields of a service or server, without its name.
func fieldsOf(node *yaml.Node) desired.Fields {
	fields := treeOf(node).(map[string]any)
	delete(fields, "name")
	return fields
}

// patch returns the merge patch (RFC 7396) that changes one mapping to another.
func patch(from, to map[string]any) map[string]any {
	changes := map[string]any{}
	for name := range from {
		if _, ok := to[name]; !ok {
			changes[name] = nil
		}
	}
	for name, value := range to {
		was, ok := from[name]
		if ok && reflect.DeepEqual(was, value) {
			continue
		}
		before, both := was.(map[string]any)
		if after, isMap := value.(map[string]any); isMap && both {
			value = patch(before, after)
		}
		changes[name] = value
	}
	return changes
}

// keepDrains adds the drains of inForce to overrides. It leaves out the drain of a service or
// server that wanted does not have. It also leaves out the drain of an agent's service that cannot
// be drained any more, and warns about this drain.
func keepDrains(
	overrides, inForce []desired.Override, wanted *items,
) (kept []desired.Override, ended fieldpath.Errors) {
	at := map[target]int{} // indexes in overrides
	for i, o := range overrides {
		at[target{o.Service, o.Server}] = i
	}
	for _, o := range inForce {
		t := target{o.Service, o.Server}
		if !o.Drains() || !wanted.has(t) {
			continue
		}
		if s, isAgent := wanted.list[wanted.at[t]].Value.(desired.AgentService); isAgent && !s.Hunts() {
			ended.Addf(o.Target(), "the drain ends, because balancers do not ask the servers of a service that "+
				"does not hunt: drain the server at the balancers")
			continue
		}
		i, ok := at[t]
		if !ok {
			i = len(overrides)
			at[t] = i
			overrides = append(overrides, desired.Override{Service: o.Service, Server: o.Server})
		}
		set := maps.Clone(overrides[i].Set)
		if set == nil {
			set = desired.Fields{}
		}
		set["drained"] = true
		overrides[i].Set = set
	}
	return overrides, ended
}
