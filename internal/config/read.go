// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"os"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/field"
)

// LoadBalancer reads a balancer's configuration file, and the overrides of its instance, of which it
// leaves out the invalid ones. Warnings are about valid settings that are rarely intended. The error
// is of type field.Errors, or that of reading the configuration file.
func LoadBalancer(path string) (*BalancerFiles, field.Errors, error) {
	return load(path, ParseBalancerFiles)
}

// LoadAgent reads an agent's configuration file and its overrides, as LoadBalancer a balancer's.
func LoadAgent(path string) (*AgentFiles, field.Errors, error) {
	return load(path, ParseAgentFiles)
}

// load is Load for a function that also returns warnings.
func load[T any](
	path string, parse func([]byte) (T, field.Errors, error),
) (desired T, warnings field.Errors, err error) {
	desired, err = Load(path, func(data []byte) (T, error) {
		result, warned, err := parse(data)
		warnings = warned.In(path)
		return result, err
	})
	return desired, warnings, err
}

// Load reads a file and parses its content by a function. It adds the file name to the errors of
// the function.
func Load[T any](path string, parse func([]byte) (T, error)) (result T, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return result, err
	}
	result, err = parse(data)
	var problems field.Errors
	if errors.As(err, &problems) {
		return result, problems.In(path)
	}
	return result, err
}

// ParseBalancer reads the content of a balancer's configuration file, without overrides. The result
// has all defaults and obeys all rules. Warnings and errors are those of LoadBalancer.
func ParseBalancer(data []byte) (*desired.Balancer, field.Errors, error) {
	file, err := parseBalancerFile(data)
	if err != nil {
		return nil, nil, err
	}
	return file.File, file.warnings, nil
}

// balancerOf reads a balancer's document. If there are errors, the result is what could be decoded.
func balancerOf(root *yaml.Node) (b *desired.Balancer, warnings, problems field.Errors) {
	b = &desired.Balancer{}
	d := decodeDocument(root, b)
	if d.completeBalancer(b); len(d.problems) > 0 {
		return b, nil, d.problems
	}
	d.warnOfBalancer(b)
	return b, d.warnings.Sorted(), nil
}

// readBalancer is ParseBalancer without warnings. The document has the errors.
func readBalancer(data []byte) (*desired.Balancer, *document) {
	var b desired.Balancer
	d := decode(data, &b)
	d.completeBalancer(&b)
	return &b, d
}

// completeBalancer sets the defaults of a decoded balancer, and checks its rules.
func (d *document) completeBalancer(b *desired.Balancer) {
	b.SetDefaults(d.has)
	d.check(b.Validate)
}

// ParseAgent is ParseBalancer for an agent's file.
func ParseAgent(data []byte) (*desired.Agent, field.Errors, error) {
	file, err := parseAgentFile(data)
	if err != nil {
		return nil, nil, err
	}
	return file.File, file.warnings, nil
}

// agentOf is balancerOf for an agent's document.
func agentOf(root *yaml.Node) (a *desired.Agent, warnings, problems field.Errors) {
	a = &desired.Agent{}
	d := decodeDocument(root, a)
	if d.completeAgent(a); len(d.problems) > 0 {
		return a, nil, d.problems
	}
	d.warnOfAgent(a)
	return a, d.warnings.Sorted(), nil
}

// readAgent is ParseAgent without warnings. The document has the errors.
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

// KindOf guesses what a file describes. A file in which a service has the field servers, which may
// be empty, is a balancer's, and so is a file with the field store. Of the others, a file without
// the field node that has servers, balancers or applications is the topology of a lab, and any
// other is an agent's. The error is of type field.Errors: the file is not a YAML document.
func KindOf(data []byte) (Kind, error) {
	root, problem := parse(data)
	if problem != nil {
		return 0, field.Errors{problem}
	}
	// An invalid file is read as far as possible. The parser of its kind reports its errors.
	top := resolved(root.Content[0])
	has := func(mapping *yaml.Node, name string) bool {
		value := resolved(child(mapping, name))
		return value != nil && value.Tag != "!!null"
	}
	for _, service := range elements(child(top, "services")) {
		if has(resolved(service), "servers") {
			return BalancerFile, nil
		}
	}
	if has(top, "store") {
		return BalancerFile, nil
	}
	if !has(top, "node") && (has(top, "servers") || has(top, "balancers") || has(top, "applications")) {
		return TopologyFile, nil
	}
	return AgentFile, nil
}
