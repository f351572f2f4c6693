// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"os"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/field"
)

// BalancerFiles are the contents of a balancer's configuration file and of its file of overrides,
// and the desired state that follows from both.
type BalancerFiles struct {
	Text      []byte             // of the configuration file
	Overrides []desired.Override // also those without effect
	Stored    []byte             // the text of the overrides; nil: there is no file
	// File is what the configuration file wants, and Desired what the overrides make of it. Both
	// have all defaults and obey all rules. They can be the same.
	File, Desired *desired.Balancer
	// warnings of the configuration file
	warnings field.Errors
	// root is the document of the configuration file, with the services of the store if it has one.
	root *yaml.Node
}

// LoadBalancer reads a balancer's configuration file, and the overrides of its instance. Warnings
// are about valid settings that are rarely intended. The error is of type field.Errors, or that of
// reading a file.
func LoadBalancer(path string) (*BalancerFiles, field.Errors, error) {
	return load(path, ParseBalancerFiles)
}

// ParseBalancerFiles is LoadBalancer for the content of a configuration file.
func ParseBalancerFiles(data []byte) (*BalancerFiles, field.Errors, error) {
	file, err := parseFile(data)
	if err != nil {
		return nil, nil, err
	}
	overrides, stored, err := readOverrides(file.File)
	if file.File.Store != nil { // it has the overrides
		return file, unusedOverrides(file.File, overrides, err), nil
	}
	if err != nil {
		return nil, nil, err
	}
	f, more, err := file.WithOverrides(overrides)
	if err != nil {
		return nil, nil, err
	}
	f.Stored = stored
	return f, append(file.warnings, more...), nil
}

// unusedOverrides warns about overrides from the time before a balancer had a store.
func unusedOverrides(b *desired.Balancer, overrides []desired.Override, err error) (warnings field.Errors) {
	if len(overrides) > 0 || err != nil {
		warnings.Addf("overrides", "have no effect, because the balancer has a store: import them, and remove "+
			"the file")
	}
	return warnings.In(OverridesFile(&b.Node))
}

// parseFile reads the content of a configuration file, without overrides.
func parseFile(data []byte) (*BalancerFiles, error) {
	root, problem := parse(data)
	if problem != nil {
		return nil, field.Errors{problem}
	}
	b, warnings, problems := parseDocument(root)
	if at := child(resolved(root.Content[0]), "services"); b.Store != nil && at != nil {
		problems = append(problems, &field.Error{
			Line: at.Line, Path: "services", Problem: "must be absent, because they come from the store",
		})
	}
	if len(problems) > 0 {
		return nil, problems.OrNil()
	}
	return &BalancerFiles{Text: data, File: b, Desired: b, warnings: warnings, root: root}, nil
}

// WithStored returns the files with services and overrides from the store of the balancer, instead
// of those in files. Warnings are about both, and so is the error, which is of type field.Errors.
// Both name fields as those of WithOverrides do.
func (f *BalancerFiles) WithStored(
	services []desired.Fields, overrides []desired.Override,
) (*BalancerFiles, field.Errors, error) {
	list := &yaml.Node{Kind: yaml.SequenceNode}
	for _, service := range services {
		list.Content = append(list.Content, nodeOf(map[string]any(service)))
	}
	root := &yaml.Node{
		Kind:    yaml.DocumentNode,
		Content: []*yaml.Node{with(resolved(f.root.Content[0]), "services", list)},
	}
	_, m := merge(root, nil)
	b, warnings, problems := parseDocument(root)
	if len(problems) > 0 {
		for i, problem := range problems {
			problems[i] = m.translated(problem, b)
		}
		return nil, nil, problems.In(storeName).OrNil()
	}
	for i, warning := range warnings {
		warnings[i] = m.translated(warning, b)
	}
	stored := &BalancerFiles{Text: f.Text, File: b, warnings: warnings, root: root}
	next, more, err := stored.WithOverrides(overrides)
	return next, append(warnings.In(storeName), more...), err
}

// storeName is where errors in the services and overrides of a store are.
const storeName = "store"

// WithOverrides returns the files with other overrides. The text of the overrides is not set.
// Warnings are about the overrides, and so is the error, which is of type field.Errors. Both name
// fields by service and server, such as web/s1.weight.
func (f *BalancerFiles) WithOverrides(
	overrides []desired.Override,
) (changed *BalancerFiles, warnings field.Errors, err error) {
	changed = &BalancerFiles{
		Text: f.Text, Overrides: overrides, File: f.File, Desired: f.File, warnings: f.warnings,
		root: f.root,
	}
	if len(overrides) == 0 {
		return changed, nil, nil
	}
	file := OverridesFile(&f.File.Node)
	if f.File.Store != nil {
		file = storeName
	}
	merged, m := merge(f.root, overrides)
	b, all, problems := parseDocument(merged)
	if len(problems) > 0 {
		for i, problem := range problems {
			problems[i] = m.translated(problem, b)
		}
		return nil, nil, problems.In(file).OrNil()
	}
	changed.Desired = b
	b.Overrides, warnings = m.inForce()
	return changed, append(warnings, m.newWarnings(all, f, b)...).In(file), nil
}

// Written returns the fields that the configuration file gives a service or, with a server, a server
// of it, without the name. It is nil if the file does not have the service or server.
func (f *BalancerFiles) Written(service, server string) desired.Fields {
	node := item(child(resolved(f.root.Content[0]), "services"), service)
	if node != nil && server != "" {
		node = item(child(node, "servers"), server)
	}
	if node == nil {
		return nil
	}
	return fieldsOf(node)
}

// newWarnings returns the warnings about the merged document that are not about the file, too.
func (m *merger) newWarnings(all field.Errors, f *BalancerFiles, b *desired.Balancer) (fresh field.Errors) {
	known := map[string]bool{}
	for _, warning := range f.warnings {
		t := m.translated(warning, f.File)
		known[t.Path+t.Problem] = true
	}
	for _, warning := range all {
		if t := m.translated(warning, b); !known[t.Path+t.Problem] {
			fresh = append(fresh, t)
		}
	}
	return fresh
}

// LoadAgent reads an agent's configuration file, as LoadBalancer a balancer's.
func LoadAgent(path string) (*desired.Agent, field.Errors, error) {
	return load(path, ParseAgent)
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
	file, err := parseFile(data)
	if err != nil {
		return nil, nil, err
	}
	return file.File, file.warnings, nil
}

// parseDocument is ParseBalancer for a document. If there are errors, the result is what could be
// decoded.
func parseDocument(root *yaml.Node) (b *desired.Balancer, warnings, problems field.Errors) {
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

// ParseAgent is LoadAgent for a file's content.
func ParseAgent(data []byte) (*desired.Agent, field.Errors, error) {
	a, d := readAgent(data)
	if len(d.problems) > 0 {
		return nil, nil, d.problems.OrNil()
	}
	d.warnOfAgent(a)
	return a, d.warnings.Sorted(), nil
}

// readAgent is ParseAgent without warnings. The document has the errors.
func readAgent(data []byte) (*desired.Agent, *document) {
	var a desired.Agent
	d := decode(data, &a)
	a.SetDefaults(d.has)
	d.check(a.Validate)
	return &a, d
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
	var file struct {
		Node         any `yaml:"node"`
		Store        any `yaml:"store"`
		Servers      any `yaml:"servers"`
		Balancers    any `yaml:"balancers"`
		Applications any `yaml:"applications"`
		Services     []struct {
			Servers *[]any `yaml:"servers"`
		} `yaml:"services"`
	}
	// An invalid file is read as far as possible. The parser of its kind reports its errors.
	_ = root.Load(&file, yaml.WithUniqueKeys(false))
	for _, service := range file.Services {
		if service.Servers != nil {
			return BalancerFile, nil
		}
	}
	if file.Store != nil {
		return BalancerFile, nil
	}
	if file.Node == nil && (file.Servers != nil || file.Balancers != nil || file.Applications != nil) {
		return TopologyFile, nil
	}
	return AgentFile, nil
}
