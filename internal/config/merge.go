// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"maps"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// merger makes a document of a configuration file and overrides. It changes no node of the file,
// because aliases may stand for a node in several places.
type merger struct {
	overrides []desired.Override
	services  map[string]*serviceOverrides // by name
	// hasService and hasServer tell which services and servers (SERVICE, SERVER) the file has. If
	// an override adds a service with servers, hasServer has these, too.
	hasService map[string]bool
	hasServer  map[[2]string]bool
}

// serviceOverrides are the overrides of one service and its servers, as indexes of
// merger.overrides.
type serviceOverrides struct {
	own     int            // of the service itself; -1: none
	servers map[string]int // by the names of the servers
	ordered []int          // the same as servers, in the order of merger.overrides
}

// merge returns the document of a file to which overrides were applied.
func merge(root *yaml.Node, overrides []desired.Override) (*yaml.Node, *merger) {
	m := &merger{
		overrides: overrides, services: map[string]*serviceOverrides{},
		hasService: map[string]bool{}, hasServer: map[[2]string]bool{},
	}
	for i, o := range overrides {
		s := m.services[o.Service]
		if s == nil {
			s = &serviceOverrides{own: -1, servers: map[string]int{}}
			m.services[o.Service] = s
		}
		if o.Server == "" {
			s.own = i
			continue
		}
		s.servers[o.Server] = i
		s.ordered = append(s.ordered, i)
	}
	top := resolved(root.Content[0])
	return &yaml.Node{
		Kind:    yaml.DocumentNode,
		Content: []*yaml.Node{with(top, "services", m.mergeServices(child(top, "services")))},
	}, m
}

// mergeServices returns the list of services after the overrides: those of the file, and then added
// ones.
func (m *merger) mergeServices(list *yaml.Node) *yaml.Node {
	merged := sequenceLike(list)
	for _, item := range elements(list) {
		name := nameOf(item)
		m.hasService[name] = true
		s := m.services[name]
		if s == nil {
			merged.Content = append(merged.Content, item)
			continue
		}
		for _, server := range elements(child(resolved(item), "servers")) {
			m.hasServer[[2]string{name, nameOf(server)}] = true
		}
		if s.own < 0 || !m.overrides[s.own].Remove {
			merged.Content = append(merged.Content, m.mergeService(item, s))
		}
	}
	for i := range m.overrides {
		o := &m.overrides[i]
		if o.Server == "" && o.Add != nil && !m.hasService[o.Service] {
			added := nodeOf(map[string]any(o.Add))
			for _, server := range elements(child(added, "servers")) {
				m.hasServer[[2]string{o.Service, nameOf(server)}] = true
			}
			merged.Content = append(merged.Content,
				m.mergeService(with(added, "name", scalar(o.Service)), m.services[o.Service]))
		}
	}
	return merged
}

// mergeService returns a service after its own override and those of its servers.
func (m *merger) mergeService(item *yaml.Node, s *serviceOverrides) *yaml.Node {
	service := resolved(item)
	if s.own >= 0 {
		service = patched(service, m.overrides[s.own].Set)
	}
	if len(s.servers) == 0 {
		return service
	}
	name, list := nameOf(service), child(service, "servers")
	merged := sequenceLike(list)
	for _, server := range elements(list) {
		i, ok := s.servers[nameOf(server)]
		switch {
		case !ok:
			merged.Content = append(merged.Content, server)
		case !m.overrides[i].Remove: // if the override adds this server again, only its patch counts
			merged.Content = append(merged.Content, patched(resolved(server), m.overrides[i].Set))
		}
	}
	for _, i := range s.ordered {
		o := &m.overrides[i]
		if o.Add != nil && !m.hasServer[[2]string{name, o.Server}] {
			added := with(nodeOf(map[string]any(o.Add)), "name", scalar(o.Server))
			merged.Content = append(merged.Content, patched(added, o.Set))
		}
	}
	return with(service, "servers", merged)
}

// exists tells whether the target of an override exists. A service exists if the file has it, or if
// the override adds it. A server exists if its service exists and is not removed, and one of these
// has the server: the file, the override that adds the service, or the server's own override.
func (m *merger) exists(o *desired.Override) bool {
	if o.Server == "" {
		return m.hasService[o.Service] || o.Add != nil
	}
	var ofService desired.Override // empty: the service has none
	if i := m.services[o.Service].own; i >= 0 {
		ofService = m.overrides[i]
	}
	hasService := (m.hasService[o.Service] || ofService.Add != nil) && !ofService.Remove
	hasServer := m.hasServer[[2]string{o.Service, o.Server}] || o.Add != nil
	return hasService && hasServer
}

// existsWithout tells whether the target of an override exists even without this override: whether
// it is in the file or, for a server, in the override that adds its service.
func (m *merger) existsWithout(o *desired.Override) bool {
	if o.Server == "" {
		return m.hasService[o.Service]
	}
	return m.hasServer[[2]string{o.Service, o.Server}]
}

// inForce returns the overrides that have an effect. It warns about each override whose target does
// not exist, and about each that adds what the file has. An override that adds what the file has
// takes effect only if it also has a patch.
func (m *merger) inForce() (effective []desired.Override, warnings fieldpath.Errors) {
	warn := func(o *desired.Override, format string, args ...any) {
		problem := fmt.Sprintf(format, args...)
		warnings = append(warnings, &fieldpath.Error{Line: o.Line, Path: o.Target(), Problem: problem})
	}
	for i := range m.overrides {
		o := &m.overrides[i]
		switch {
		case !m.exists(o):
			warn(o, "does not exist: the override has no effect")
			continue
		case o.Add != nil && m.existsWithout(o):
			warn(o, "is in the file, which takes precedence: the override adds nothing")
			if o.Set == nil {
				continue
			}
		}
		effective = append(effective, *o)
	}
	return effective, warnings
}

// translated changes the paths and lines of errors or warnings about a merged document, because the
// indexes in these paths are not those of the file. A path in a service begins with the name of the
// service or server instead, as in web/s1.weight. The line is that of the server's override. If
// there is none, it is the line of the service's override, or else 0. An error outside the services
// keeps its path, and has line 0.
func (m *merger) translated(problems fieldpath.Errors, root *yaml.Node) fieldpath.Errors {
	services := servicesOf(root)
	all := make(fieldpath.Errors, len(problems))
	for i, problem := range problems {
		all[i] = m.translatedOne(problem, services)
	}
	return all
}

// translatedOne does for one error what translated does for all.
func (m *merger) translatedOne(problem *fieldpath.Error, services []*yaml.Node) *fieldpath.Error {
	t := *problem
	t.Line = 0
	at := m.placeOf(problem.Path, services)
	if at.target.Service == "" {
		return &t
	}
	if at.override >= 0 {
		t.Line = m.overrides[at.override].Line
	}
	t.Path = at.target.Target()
	if at.rest != "" {
		t.Path = fieldpath.Child(t.Path, at.rest)
	}
	return &t
}

// mergedPlace is a place in a merged document.
type mergedPlace struct {
	target   desired.Override // only its names; empty: the place is not in a service
	rest     string           // the path below the target
	override int              // index of the server's override, or else of the service's; -1: none
}

// placeOf returns the place of a path in a merged document with these services.
func (m *merger) placeOf(path string, services []*yaml.Node) *mergedPlace {
	at := &mergedPlace{override: -1}
	service, rest := indexed(path, "services")
	if service < 0 || service >= len(services) {
		return at
	}
	at.target.Service, at.rest = nameOf(services[service]), rest
	overrides := m.services[at.target.Service]
	if overrides != nil {
		at.override = overrides.own
	}
	servers := elements(child(resolved(services[service]), "servers"))
	if i, below := indexed(rest, "servers"); i >= 0 && i < len(servers) {
		at.target.Server, at.rest = nameOf(servers[i]), below
		if overrides != nil {
			if ofServer, ok := overrides.servers[at.target.Server]; ok {
				at.override = ofServer
			}
		}
	}
	return at
}

// indexed splits a path such as list[2].rest into 2 and rest. If the path does not begin with list
// and an index, i is -1.
func indexed(path, list string) (i int, rest string) {
	if _, err := fmt.Sscanf(path, list+"[%d]", &i); err != nil {
		return -1, path
	}
	rest = path[len(fieldpath.Item(list, i)):]
	if rest != "" && rest[0] == '.' {
		rest = rest[1:]
	}
	return i, rest
}

// patched returns a mapping to which a merge patch was applied (RFC 7396 section 2). A null in the
// patch removes the field.
func patched(node *yaml.Node, patch map[string]any) *yaml.Node {
	for _, name := range slices.Sorted(maps.Keys(patch)) {
		var value *yaml.Node
		switch v := patch[name].(type) {
		case nil:
		case map[string]any:
			before := resolved(child(node, name))
			if before == nil || before.Kind != yaml.MappingNode {
				before = &yaml.Node{Kind: yaml.MappingNode}
			}
			value = patched(before, v)
		default:
			value = nodeOf(v)
		}
		node = with(node, name, value)
	}
	return node
}

// with returns a mapping in which a field has another value. If value is nil, the result lacks the
// field. A node that is not a mapping stays as it is: decoding reports the error.
func with(mapping *yaml.Node, name string, value *yaml.Node) *yaml.Node {
	if mapping.Kind != yaml.MappingNode {
		return mapping
	}
	changed := *mapping
	changed.Content = nil
	found := false
	for i := 0; i < len(mapping.Content); i += 2 {
		key, field := mapping.Content[i], mapping.Content[i+1]
		if key.Value == name {
			if found || value == nil { // found: the field is given twice, and occurs once in the result
				continue
			}
			field, found = value, true
		}
		changed.Content = append(changed.Content, key, field)
	}
	if !found && value != nil {
		changed.Content = append(changed.Content, scalar(name), value)
	}
	return &changed
}

// child returns a field of a mapping, or nil.
func child(mapping *yaml.Node, name string) *yaml.Node {
	if mapping == nil || mapping.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i < len(mapping.Content); i += 2 {
		if mapping.Content[i].Value == name {
			return mapping.Content[i+1]
		}
	}
	return nil
}

// elements returns the elements of a list, or nothing if the node is not a list.
func elements(list *yaml.Node) []*yaml.Node {
	if list = resolved(list); list == nil || list.Kind != yaml.SequenceNode {
		return nil
	}
	return list.Content
}

// sequenceLike returns an empty list with the line of another list.
func sequenceLike(list *yaml.Node) *yaml.Node {
	empty := &yaml.Node{Kind: yaml.SequenceNode}
	if list != nil {
		empty.Line = list.Line
	}
	return empty
}

// nameOf returns the name of a service or server.
func nameOf(item *yaml.Node) string {
	if name := resolved(child(resolved(item), "name")); name != nil {
		return name.Value
	}
	return ""
}

// resolved returns the node for which an alias stands, and any other node as it is.
func resolved(node *yaml.Node) *yaml.Node {
	for node != nil && node.Kind == yaml.AliasNode {
		node = node.Alias
	}
	return node
}

// scalar returns the node of a string.
func scalar(text string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text}
}

// nodeOf returns the node of a value of desired.Fields.
func nodeOf(value any) *yaml.Node {
	switch v := value.(type) {
	case map[string]any:
		node := &yaml.Node{Kind: yaml.MappingNode}
		for _, name := range slices.Sorted(maps.Keys(v)) {
			node.Content = append(node.Content, scalar(name), nodeOf(v[name]))
		}
		return node
	case []any:
		node := &yaml.Node{Kind: yaml.SequenceNode}
		for _, element := range v {
			node.Content = append(node.Content, nodeOf(element))
		}
		return node
	case nil:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!null"}
	case float64: // a number of JSON
		return scalar(strconv.FormatFloat(v, 'f', -1, 64))
	}
	return scalar(fmt.Sprint(value))
}

// checkTree reports what a tree of fields must not have: aliases, addresses without quotes, and
// fields that are given twice. An alias can stand for a node that contains the alias. Then the tree
// would have no end.
func (d *document) checkTree(path string, node *yaml.Node) {
	d.fields[path] = place{line: node.Line, text: node.Value}
	if node.Kind == yaml.AliasNode {
		d.badf(path, "must not be an alias")
		return
	}
	if address, ok := misreadAddress(node); ok {
		d.fields[path] = place{line: node.Line, text: address}
		d.badf(path, "%s", needsQuotes)
		return
	}
	switch node.Kind {
	case yaml.MappingNode:
		seen := map[string]int{}
		for i := 0; i < len(node.Content); i += 2 {
			key := node.Content[i]
			at := fieldpath.Child(path, plain(key.Value))
			if first, twice := seen[key.Value]; twice {
				d.reportAt(key.Line, at, "", fmt.Sprintf("given twice; first in line %d", first))
			}
			seen[key.Value] = key.Line
			d.checkTree(at, node.Content[i+1])
		}
	case yaml.SequenceNode:
		for i, element := range node.Content {
			d.checkTree(fieldpath.Item(path, i), element)
		}
	}
}

// treeOf returns the value of a node, in the types of desired.Fields.
func treeOf(node *yaml.Node) any {
	node = resolved(node)
	switch node.Kind {
	case yaml.MappingNode:
		fields := map[string]any{}
		for i := 0; i < len(node.Content); i += 2 {
			fields[node.Content[i].Value] = treeOf(node.Content[i+1])
		}
		return fields
	case yaml.SequenceNode:
		list := make([]any, len(node.Content))
		for i, element := range node.Content {
			list[i] = treeOf(element)
		}
		return list
	}
	switch node.Tag {
	case "!!null":
		return nil
	case "!!bool":
		// Decoding refuses other spellings, such as True: they stay as they are written.
		switch node.Value {
		case "true":
			return true
		case "false":
			return false
		}
	case "!!int":
		// A name or a hexadecimal ID, such as 007, can look like a number. If the number would be written
		// otherwise, the text stays a string.
		number, err := strconv.ParseInt(node.Value, 10, 64)
		if err == nil && strconv.FormatInt(number, 10) == node.Value {
			return number
		}
	}
	return node.Value
}
