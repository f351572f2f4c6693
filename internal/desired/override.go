// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/segue-lb/segue/internal/fieldpath"
)

// Fields are fields of a service or a server by their names in a configuration file. A value is a
// bool, a number, a string, a list ([]any) or further fields (map[string]any). As in a merge patch
// (RFC 7396), nil stands for a field that is to be removed.
type Fields map[string]any

// WithPlainNumbers changes the numbers of JSON in the fields, and returns the fields. Whole numbers
// become int64, and others become text, as if they were read from a file of overrides. A float64
// could be stored as 1e+06.
func (f Fields) WithPlainNumbers() Fields {
	for name := range f {
		f[name] = plainNumbers(f[name])
	}
	return f
}

// plainNumbers does for a value what WithPlainNumbers does for fields.
func plainNumbers(value any) any {
	switch v := value.(type) {
	case map[string]any:
		return map[string]any(Fields(v).WithPlainNumbers())
	case []any:
		for i := range v {
			v[i] = plainNumbers(v[i])
		}
	case json.Number:
		if number, err := v.Int64(); err == nil {
			return number
		}
		return v.String()
	case float64:
		if whole := int64(v); float64(whole) == v {
			return whole
		}
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	return value
}

// Override changes a service or a server for as long as the override exists. It is not part of the
// configuration file. So operators and programs can change a running balancer even if they may not
// change the file.
type Override struct {
	Service string `yaml:"service" json:"service"`
	// Server is a server of the service. It is empty in an override of the service itself.
	Server string `yaml:"server,omitempty" json:"server,omitempty"`
	// Add has the fields, without the name, of a service or server that the file does not have.
	Add Fields `yaml:"add,omitempty" json:"add,omitempty"`
	// Set is a merge patch (RFC 7396) of the service or server. For a service it has no servers:
	// each server has an override of its own.
	Set Fields `yaml:"set,omitempty" json:"set,omitempty"`
	// Remove removes the service or server.
	Remove bool `yaml:"remove,omitempty" json:"remove,omitempty"`
	// Line is the line of the override in its file, from 1; 0: it was not read from a file.
	Line int `yaml:"-" json:"-"`
}

// Target returns the name of the service or server: SERVICE or SERVICE/SERVER.
func (o *Override) Target() string {
	if o.Server == "" {
		return o.Service
	}
	return o.Service + "/" + o.Server
}

// Drains tells whether the override sets the field drained to true. The value may be text.
func (o *Override) Drains() bool { return fmt.Sprint(o.Set["drained"]) == "true" }

// String returns the target and what the override does, such as web/s1 (drained, weight 10).
func (o Override) String() string { return fmt.Sprintf("%s (%s)", o.Target(), o.Does()) }

// Does tells what the override does, such as drained, weight 10.
func (o *Override) Does() string {
	var does []string
	switch {
	case o.Remove:
		does = []string{"removed"}
	case o.Add != nil:
		does = []string{"added"}
	}
	for _, name := range slices.Sorted(maps.Keys(o.Set)) {
		does = append(does, describeSet(name, o.Set[name]))
	}
	return strings.Join(does, ", ")
}

// InvalidOverride is an override that would break a rule together with the configuration file. A
// process that starts leaves it out.
type InvalidOverride struct {
	// Override has no service if the file of overrides as a whole cannot be read.
	Override
	Problems fieldpath.Errors
}

// Texts returns the first problems, and the number of the others: an override of a service can have
// thousands.
func (o *InvalidOverride) Texts() (texts []string) {
	const most = 5
	for _, problem := range o.Problems[:min(len(o.Problems), most)] {
		texts = append(texts, problem.Error())
	}
	if more := len(o.Problems) - most; more > 0 {
		texts = append(texts, fmt.Sprintf("and %d more", more))
	}
	return texts
}

// NewlyInvalid returns the problems of invalid overrides, except those of overrides that a process
// has left out already. An override without a service stands for an unreadable file.
func NewlyInvalid(invalid []InvalidOverride, leftOut []Override) (problems fieldpath.Errors) {
	known := map[string]bool{}
	for _, o := range leftOut {
		known[o.content()] = true
	}
	for _, o := range invalid {
		if o.Service == "" || !known[o.content()] {
			problems = append(problems, o.Problems...)
		}
	}
	return problems
}

// content returns a text that is the same for equal overrides. Their lines do not matter.
func (o *Override) content() string {
	text, err := json.Marshal(o)
	if err != nil {
		panic(err) // overrides have only what JSON can express
	}
	return string(text)
}

// describeSet tells what it means to set a field to a value, such as "weight 10". A section or a
// list has only its name.
func describeSet(name string, value any) string {
	switch v := value.(type) {
	case nil:
		return "default " + name
	case bool:
		if v {
			return name
		}
		return "not " + name
	case map[string]any, Fields, []any:
		return name
	}
	return fmt.Sprintf("%s %v", name, value)
}

// Item is a service, or a server of a service, in a desired state.
type Item struct {
	Service string
	Server  string // empty: the service itself
	// Value is a Service without its servers, a Server, or an AgentService.
	Value any
}

// Items returns the services, each followed by its servers.
func (b *Balancer) Items() (items []Item) {
	for _, s := range b.Services {
		servers := s.Servers
		s.Servers = nil
		items = append(items, Item{Service: s.Name, Value: s})
		for _, server := range servers {
			items = append(items, Item{s.Name, server.Name, server})
		}
	}
	return items
}

// Item returns a server of a service or, if server is empty, the service. It returns nil if there
// is none.
func (b *Balancer) Item(service, server string) any {
	i := slices.IndexFunc(b.Services, func(s Service) bool { return s.Name == service })
	if i < 0 {
		return nil
	}
	if s := b.Services[i]; server == "" {
		s.Servers = nil
		return s
	}
	servers := b.Services[i].Servers
	j := slices.IndexFunc(servers, func(s Server) bool { return s.Name == server })
	if j < 0 {
		return nil
	}
	return servers[j]
}

// Item returns a service. It returns nil if there is none, or if server is not empty: services of
// agents have no servers.
func (a *Agent) Item(service, server string) any {
	i := slices.IndexFunc(a.Services, func(s AgentService) bool { return s.Name == service })
	if i < 0 || server != "" {
		return nil
	}
	return a.Services[i]
}

// Items returns the services.
func (a *Agent) Items() (items []Item) {
	for _, s := range a.Services {
		items = append(items, Item{Service: s.Name, Value: s})
	}
	return items
}

// OverridesFile returns the path of the file with the overrides. It is empty if the balancer has no
// directory for its state.
func (b *Balancer) OverridesFile() string { return overridesFile(b.Node.State, b.Node.Instance) }

// OverridesFile is Balancer.OverridesFile for an agent.
func (a *Agent) OverridesFile() string { return overridesFile(a.Node.State, a.Node.Instance) }

func overridesFile(state, instance string) string {
	if state == "" {
		return ""
	}
	return filepath.Join(state, instance+".overrides.yaml")
}

// Overrides are the overrides of a balancer or an agent.
type Overrides struct {
	Overrides []Override `yaml:"overrides"`
}

// Validate returns an error for every rule that the overrides break. It checks their form alone: an
// override of a server that does not exist, or of an unknown field, is valid here.
func (o *Overrides) Validate() fieldpath.Errors {
	var r rules
	first := map[[2]string]string{}
	for i, override := range o.Overrides {
		at := fieldpath.Item("overrides", i)
		r.errs = append(r.errs, override.Validate(at)...)
		target := [2]string{override.Service, override.Server}
		if before := first[target]; before != "" {
			r.failf(at, "%s is already in %s", override.Target(), before)
		} else if override.Service != "" {
			first[target] = at
		}
	}
	return r.errs
}

// Validate returns an error for every rule that the override breaks. path is the override's path in
// its file.
func (o *Override) Validate(path string) fieldpath.Errors {
	var r rules
	r.checkName(fieldpath.Child(path, "service"), o.Service)
	if o.Server != "" {
		r.checkName(fieldpath.Child(path, "server"), o.Server)
	}
	switch {
	case o.Add != nil && len(o.Add) == 0:
		r.failf(fieldpath.Child(path, "add"), "must have fields")
	case o.Add == nil && len(o.Set) == 0 && !o.Remove:
		r.failf(path, "must have add, set or remove")
	case o.Remove && (o.Add != nil || o.Set != nil):
		r.failf(path, "must not have both remove and another change")
	}
	for _, change := range []struct {
		name   string
		fields Fields
	}{{"add", o.Add}, {"set", o.Set}} {
		if _, ok := change.fields["name"]; ok {
			r.failf(fieldpath.Child(fieldpath.Child(path, change.name), "name"), "a name cannot be changed")
		}
	}
	if _, ok := o.Set["servers"]; ok && o.Server == "" {
		r.failf(fieldpath.Child(path, "set.servers"), "each server needs an override of its own")
	}
	return r.errs
}
