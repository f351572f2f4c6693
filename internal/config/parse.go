// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"os"
	"reflect"
	"slices"
	"sync"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/wording"
)

// LoadBalancer reads a balancer's configuration file and the overrides of its instance. It leaves
// out invalid overrides. Warnings are about valid settings that are rarely intended. The error is
// of type fieldpath.Errors, or that of reading the configuration file.
func LoadBalancer(path string) (*BalancerFiles, fieldpath.Errors, error) {
	return load(path, ParseBalancerFiles)
}

// LoadAgent reads the files of an agent, as LoadBalancer reads those of a balancer.
func LoadAgent(path string) (*AgentFiles, fieldpath.Errors, error) {
	return load(path, ParseAgentFiles)
}

// load reads a file and parses its content by a function that also returns warnings.
func load[T any](
	path string, parse func([]byte) (T, fieldpath.Errors, error),
) (desired T, warnings fieldpath.Errors, err error) {
	desired, err = Load(path, func(data []byte) (T, error) {
		result, warned, err := parse(data)
		warnings = warned.In(path)
		return result, err
	})
	return desired, warnings, err
}

// Load reads a file and parses its content by a function. It adds the name of the file to the
// function's errors.
func Load[T any](path string, parse func([]byte) (T, error)) (result T, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return result, err
	}
	result, err = parse(data)
	if problems, ok := errors.AsType[fieldpath.Errors](err); ok {
		return result, problems.In(path)
	}
	return result, err
}

// ParseBalancer reads the content of a balancer's configuration file, without overrides. The result
// has all defaults and obeys all rules. Warnings and errors are those of LoadBalancer.
func ParseBalancer(data []byte) (*desired.Balancer, fieldpath.Errors, error) {
	file, err := parseBalancerFile(data)
	if err != nil {
		return nil, nil, err
	}
	return file.File, file.warnings, nil
}

// balancerOf reads a balancer's document. If there are errors, the result is what could be decoded.
//
// If before is not nil, balancerOf reuses services and servers in before. An error or warning about
// a reused service or server has neither the value nor the line of the field.
func balancerOf(
	root *yaml.Node, before *decoded,
) (b *desired.Balancer, warnings, problems fieldpath.Errors) {
	b = &desired.Balancer{}
	d := newDocument()
	d.before, d.reused = before, map[string]bool{}
	d.root(root, b)
	if d.completeBalancer(b); len(d.problems) > 0 {
		return b, nil, d.problems
	}
	d.warnOfBalancer(b)
	return b, d.warnings.Sorted(), nil
}

// readBalancer reads the content of a balancer's configuration file. The document has the errors,
// and no warnings.
func readBalancer(data []byte) (*desired.Balancer, *document) {
	var b desired.Balancer
	d := decode(data, &b)
	d.completeBalancer(&b)
	return &b, d
}

// completeBalancer sets the defaults of a decoded balancer, and checks its rules.
func (d *document) completeBalancer(b *desired.Balancer) {
	b.SetDefaults(d.has)
	d.completeServices(b)
	d.check(func() fieldpath.Errors { return b.ValidateChanged(d.isNew) })
}

// ParseAgent reads the content of an agent's file, as ParseBalancer does for a balancer.
func ParseAgent(data []byte) (*desired.Agent, fieldpath.Errors, error) {
	file, err := parseAgentFile(data)
	if err != nil {
		return nil, nil, err
	}
	return file.File, file.warnings, nil
}

// agentOf reads an agent's document, as balancerOf does for a balancer. It decodes all services.
func agentOf(root *yaml.Node, _ *decoded) (a *desired.Agent, warnings, problems fieldpath.Errors) {
	a = &desired.Agent{}
	d := decodeDocument(root, a)
	if d.completeAgent(a); len(d.problems) > 0 {
		return a, nil, d.problems
	}
	d.warnOfAgent(a)
	return a, d.warnings.Sorted(), nil
}

// readAgent reads the content of an agent's configuration file. The document has the errors, and no
// warnings.
func readAgent(data []byte) (*desired.Agent, *document) {
	var a desired.Agent
	d := decode(data, &a)
	d.completeAgent(&a)
	return &a, d
}

// completeAgent sets the defaults of a decoded agent, and checks its rules.
func (d *document) completeAgent(a *desired.Agent) {
	a.SetDefaults(d.has)
	d.check(a.Validate)
}

// Kind is a kind of files.
type Kind int

// The kinds of files.
const (
	AgentFile Kind = iota
	BalancerFile
	TopologyFile // of a lab
)

// KindOf guesses what a file describes. A file that has one of TopologyFields, and not the field
// node, is the topology of a lab. Any other file is of the role that its fields fit better, or an
// agent's if they fit both roles equally. A mistyped field counts as the field that was probably
// meant. If the file is not a YAML document, the error is of type fieldpath.Errors.
func KindOf(data []byte) (Kind, error) {
	root, problem := parse(data)
	if problem != nil {
		return 0, fieldpath.Errors{problem}
	}
	top := resolved(root.Content[0])
	if isTopology(top) {
		return TopologyFile, nil
	}
	if misfit(top, reflect.TypeFor[desired.Balancer]()) < misfit(top, reflect.TypeFor[desired.Agent]()) {
		return BalancerFile, nil
	}
	return AgentFile, nil
}

// TopologyFields are the fields at the top of a lab's topology that other files do not have there.
var TopologyFields = []string{
	"apache", "applications", "balancers", "bare", "edge", "emulated", "impair", "ipv4-only", "mediawiki",
	"mtu", "name", "proxy", "servers", "switches", "two-armed",
}

// isTopology tells whether a document has a field of a topology, and no field node.
func isTopology(top *yaml.Node) bool {
	if top.Kind != yaml.MappingNode {
		return false
	}
	known, _ := fieldsOfType(reflect.TypeFor[desired.Balancer]())
	known = append(slices.Clone(TopologyFields), known...)
	found := false
	for i := 0; i < len(top.Content); i += 2 {
		meant := wording.Nearest(top.Content[i].Value, known...)
		if meant == "node" {
			return false
		}
		found = found || slices.Contains(TopologyFields, meant)
	}
	return found
}

// misfit returns how badly a node fits a type; 0 means that it has only known fields. A mistyped
// field adds 1. An unknown field adds 2, and 1 for each node in its value. misfit follows no alias,
// and does not look into a Variant.
func misfit(node *yaml.Node, into reflect.Type) (n int) {
	if reflect.PointerTo(into).Implements(reflect.TypeFor[Variant]()) {
		return 0
	}
	switch {
	case into.Kind() == reflect.Pointer:
		return misfit(node, into.Elem())
	case into.Kind() == reflect.Slice && node.Kind == yaml.SequenceNode:
		for _, element := range node.Content {
			n += misfit(element, into.Elem())
		}
	case into.Kind() == reflect.Struct && node.Kind == yaml.MappingNode:
		names, fields := fieldsOfType(into)
		absent := sync.OnceValue(func() []string { return missing(names, node) })
		for i := 0; i < len(node.Content); i += 2 {
			name := node.Content[i].Value
			if _, ok := fields[name]; !ok {
				if name = wording.Nearest(name, absent()...); name == "" {
					n += 1 + size(node.Content[i+1])
					continue
				}
				n++
			}
			n += misfit(node.Content[i+1], fields[name].Type)
		}
	}
	return n
}

// size returns the number of nodes in a tree. It follows no alias.
func size(node *yaml.Node) int {
	n := 1
	for _, inner := range node.Content {
		n += size(inner)
	}
	return n
}
