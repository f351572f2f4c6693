// SPDX-License-Identifier: Apache-2.0

package config

import (
	"maps"
	"reflect"
	"slices"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/field"
)

// FollowingFile returns the files with the overrides that make the services those of another
// configuration file. Servers that an override drains stay drained. Other sections of the file have
// no effect: there is a warning if they differ from those in force. The error is of type
// field.Errors.
func (f *BalancerFiles) FollowingFile(text []byte) (*BalancerFiles, field.Errors, error) {
	own := f.root
	root, problem := parse(text)
	if problem != nil {
		return nil, nil, field.Errors{problem}
	}
	root = withSections(root, own)
	wanted, _, problems := parseDocument(root)
	if len(problems) > 0 {
		return nil, nil, problems.OrNil()
	}
	d := differ{
		from: named(child(own.Content[0], "services")), to: named(child(root.Content[0], "services")),
	}
	overrides := d.services(f.File, wanted)
	overrides = keepDrains(overrides, f.Desired.Overrides, wanted)
	next, warnings, err := f.WithOverrides(overrides)
	if err != nil {
		return nil, nil, err
	}
	return next, append(f.otherSections(wanted), warnings...), nil
}

// ownSections are the sections of a balancer's file that are about this balancer alone.
var ownSections = []string{"node", "api", "metrics", "bgp", "store"}

// withSections returns a document with the sections of another one that it lacks.
func withSections(root, other *yaml.Node) *yaml.Node {
	top := resolved(root.Content[0])
	for _, section := range ownSections {
		if child(top, section) == nil {
			top = with(top, section, child(other.Content[0], section))
		}
	}
	return &yaml.Node{Kind: yaml.DocumentNode, Content: []*yaml.Node{top}}
}

// otherSections returns a warning for each section of a file that has no effect.
func (f *BalancerFiles) otherSections(wanted *desired.Balancer) (warnings field.Errors) {
	for _, section := range []struct {
		name    string
		is, was any
	}{
		{"node", wanted.Node, f.File.Node}, {"api", wanted.API, f.File.API},
		{"metrics", wanted.Metrics, f.File.Metrics}, {"store", wanted.Store, f.File.Store},
		{"bgp", wanted.BGP, f.File.BGP},
	} {
		if !reflect.DeepEqual(section.is, section.was) {
			warnings.Addf(section.name, "differs from the balancer's configuration file, and has no effect: "+
				"only services are applied")
		}
	}
	return warnings
}

// differ finds the overrides by which the services of one document become those of another.
type differ struct {
	from, to  map[string]*yaml.Node // the services by name
	overrides []desired.Override
}

// named returns the items of a list by name.
func named(list *yaml.Node) map[string]*yaml.Node {
	items := map[string]*yaml.Node{}
	for _, item := range elements(list) {
		items[nameOf(item)] = resolved(item)
	}
	return items
}

func (d *differ) services(before, after *desired.Balancer) []desired.Override {
	for _, s := range before.Services {
		if d.to[s.Name] == nil {
			d.add(desired.Override{Service: s.Name, Remove: true})
		}
	}
	for i := range after.Services {
		s := &after.Services[i]
		if d.from[s.Name] == nil {
			d.add(desired.Override{Service: s.Name, Add: fieldsOf(d.to[s.Name])})
			continue
		}
		d.service(before.Service(s.Name), s)
	}
	return d.overrides
}

// service finds the overrides of a service that is in both documents.
func (d *differ) service(before, after *desired.Service) {
	from, to := d.from[after.Name], d.to[after.Name]
	if !sameSettings(*before, *after) {
		was, is := fieldsOf(from), fieldsOf(to)
		delete(was, "servers")
		delete(is, "servers")
		d.add(desired.Override{Service: after.Name, Set: patch(was, is)})
	}
	fromServers, toServers := named(child(from, "servers")), named(child(to, "servers"))
	was := map[string]desired.Server{}
	for _, s := range before.Servers {
		was[s.Name] = s
		if toServers[s.Name] == nil {
			d.add(desired.Override{Service: after.Name, Server: s.Name, Remove: true})
		}
	}
	for _, s := range after.Servers {
		o := desired.Override{Service: after.Name, Server: s.Name}
		old, ok := was[s.Name]
		switch {
		case !ok:
			o.Add = fieldsOf(toServers[s.Name])
		case reflect.DeepEqual(s, old):
			continue
		default:
			o.Set = patch(fieldsOf(fromServers[s.Name]), fieldsOf(toServers[s.Name]))
		}
		d.add(o)
	}
}

// add adds an override, unless it is empty: the default of a field can differ because of another
// override.
func (d *differ) add(o desired.Override) {
	if o.Add != nil || len(o.Set) > 0 || o.Remove {
		d.overrides = append(d.overrides, o)
	}
}

// sameSettings tells whether two services differ in nothing but their servers.
func sameSettings(a, b desired.Service) bool {
	a.Servers, b.Servers = nil, nil
	return reflect.DeepEqual(a, b)
}

// fieldsOf returns the fields of a service or server, without its name.
func fieldsOf(node *yaml.Node) desired.Fields {
	fields := treeOf(node).(map[string]any)
	delete(fields, "name")
	return fields
}

// patch returns the merge patch (RFC 7396) that makes one mapping another.
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

// keepDrains adds the drains of overrides that were in force to others, for servers that there are.
func keepDrains(overrides, inForce []desired.Override, wanted *desired.Balancer) []desired.Override {
	for _, o := range inForce {
		if o.Set["drained"] != true || wanted.Server(o.Service, o.Server) == nil {
			continue
		}
		i := slices.IndexFunc(overrides, func(other desired.Override) bool {
			return other.Service == o.Service && other.Server == o.Server
		})
		if i < 0 {
			i = len(overrides)
			overrides = append(overrides, desired.Override{Service: o.Service, Server: o.Server})
		}
		set := maps.Clone(overrides[i].Set)
		if set == nil {
			set = desired.Fields{}
		}
		set["drained"] = true
		overrides[i].Set = set
	}
	return overrides
}
