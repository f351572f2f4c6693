// SPDX-License-Identifier: Apache-2.0

package config

import (
	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// State is the desired state of a balancer or of an agent.
type State[D any] interface {
	*desired.Balancer | *desired.Agent
	Items() []desired.Item
	Item(service, server string) any
	ChangesFrom(old D) desired.Changes
	OverridesFile() string
	Serving() desired.Serving
}

// Files are the contents of a configuration file and of its file of overrides, and the desired
// state that follows from both.
type Files[D State[D]] struct {
	Text      []byte             // of the configuration file
	Overrides []desired.Override // all that are valid, also those without effect
	InForce   []desired.Override // those with an effect
	Stored    []byte             // the text of the file of overrides; nil: there is no such file
	// Invalid are the overrides that are left out, because they break a rule.
	Invalid []desired.InvalidOverride
	Secrets desired.Secrets // from the files that the configuration file names; see ReadSecrets
	// File is the state that follows from the configuration file alone. Desired is the state that
	// follows from the file with the overrides in force. Both have all defaults and obey all rules.
	// They can be the same.
	File, Desired D
	warnings      fieldpath.Errors // about the configuration file
	// root is the document of the configuration file. If there is a store, it has the store's
	// services.
	root *yaml.Node
	// nodes returns the nodes of the services and servers in root.
	nodes func() map[target]*yaml.Node
	// read is balancerOf or agentOf.
	read func(root *yaml.Node, before *decoded) (state D, warnings, problems fieldpath.Errors)
	// place is where the overrides are, for errors: the path of their file, or storeName.
	place string
}

// BalancerFiles and AgentFiles are the files of a balancer and of an agent.
type (
	BalancerFiles = Files[*desired.Balancer]
	AgentFiles    = Files[*desired.Agent]
)

// ParseBalancerFiles parses a balancer's configuration file, and reads the overrides of its
// instance, unless it has a store. It leaves out invalid overrides.
func ParseBalancerFiles(data []byte) (*BalancerFiles, fieldpath.Errors, error) {
	file, err := parseBalancerFile(data)
	switch {
	case err != nil:
		return nil, nil, err
	case file.File.Store != nil: // the overrides are in the store
		return file, unusedOverrides(file.File), nil
	}
	changed, warnings := file.withStoredOverrides()
	return changed, warnings, nil
}

// ParseAgentFiles parses an agent's configuration file, and reads the overrides of its instance. It
// leaves out invalid overrides.
func ParseAgentFiles(data []byte) (*AgentFiles, fieldpath.Errors, error) {
	file, err := parseAgentFile(data)
	if err != nil {
		return nil, nil, err
	}
	changed, warnings := file.withStoredOverrides()
	return changed, warnings, nil
}

// unusedOverrides warns if a balancer with a store still has overrides in a file, from the time
// before it had the store.
func unusedOverrides(b *desired.Balancer) (warnings fieldpath.Errors) {
	overrides, _, err := readOverrides(b.OverridesFile())
	if len(overrides) > 0 || err != nil {
		warnings.Addf("overrides", "have no effect, because the balancer has a store: import them, and remove "+
			"the file")
	}
	return warnings.In(b.OverridesFile())
}

// parseBalancerFile reads the content of a balancer's configuration file, without overrides.
func parseBalancerFile(data []byte) (*BalancerFiles, error) {
	root, problem := parse(data)
	if problem != nil {
		return nil, fieldpath.Errors{problem}
	}
	b, warnings, problems := balancerOf(root, nil)
	if at := child(resolved(root.Content[0]), "services"); b.Store != nil && at != nil {
		problems = append(problems, &fieldpath.Error{
			Line: at.Line, Path: "services", Problem: "must be absent, because they come from the store",
		})
	}
	if len(problems) > 0 {
		return nil, problems.OrNil()
	}
	return &BalancerFiles{
		Text: data, File: b, Desired: b, warnings: warnings, root: root, nodes: nodesIn(root),
		read: balancerOf, place: b.OverridesFile(),
	}, nil
}

// parseAgentFile reads the content of an agent's configuration file, without overrides.
func parseAgentFile(data []byte) (*AgentFiles, error) {
	root, problem := parse(data)
	if problem != nil {
		return nil, fieldpath.Errors{problem}
	}
	a, warnings, problems := agentOf(root, nil)
	if len(problems) > 0 {
		return nil, problems.OrNil()
	}
	return &AgentFiles{
		Text: data, File: a, Desired: a, warnings: warnings, root: root, nodes: nodesIn(root),
		read: agentOf, place: a.OverridesFile(),
	}, nil
}

// storeName takes the place of a file in errors about the services and overrides of a store.
const storeName = "store"

// WithStored returns a balancer's files with the services and overrides of its store. The warnings
// and the error are about services and overrides. They name fields by service and server, such as
// web/s1.weight. The error is of type fieldpath.Errors.
func WithStored(
	f *BalancerFiles, services []desired.Fields, overrides []desired.Override,
) (*BalancerFiles, fieldpath.Errors, error) {
	list := &yaml.Node{Kind: yaml.SequenceNode}
	for _, service := range services {
		list.Content = append(list.Content, nodeOf(map[string]any(service)))
	}
	root := &yaml.Node{
		Kind:    yaml.DocumentNode,
		Content: []*yaml.Node{with(resolved(f.root.Content[0]), "services", list)},
	}
	_, m := merge(root, nil)
	b, warnings, problems := f.read(root, nil)
	if len(problems) > 0 {
		return nil, nil, m.translated(problems, root).In(storeName).OrNil()
	}
	stored := &BalancerFiles{
		Text: f.Text, File: b, Secrets: f.Secrets, warnings: m.translated(warnings, root), root: root,
		nodes: nodesIn(root), read: f.read, place: storeName,
	}
	next, more, err := stored.WithOverrides(overrides)
	return next, append(stored.warnings.In(storeName), more...), err
}

// WithOverrides returns the files with overrides in place of their own, and without Stored. The
// warnings and the error are about the overrides. They name fields by service and server, such as
// web/s1.weight. The error is of type fieldpath.Errors.
func (f *Files[D]) WithOverrides(
	overrides []desired.Override,
) (changed *Files[D], warnings fieldpath.Errors, err error) {
	next := *f
	next.Overrides, next.InForce, next.Desired, next.Stored = overrides, nil, f.File, nil
	if len(overrides) == 0 {
		return &next, nil, nil
	}
	if problems := f.refuseServers(overrides); len(problems) > 0 {
		return nil, nil, problems.In(f.place).OrNil()
	}
	merged, m := merge(f.root, overrides)
	state, all, problems := f.read(merged, f.decoded())
	if len(problems) > 0 {
		state, all, problems = f.read(merged, nil) // again: errors about reused services lack values
	}
	if len(problems) > 0 {
		return nil, nil, m.translated(problems, merged).In(f.place).OrNil()
	}
	next.Desired = state
	next.InForce, warnings = m.inForce()
	// The caller has the warnings about the configuration file already.
	fresh := notAmong(m.translated(all, merged), m.translated(f.warnings, f.root))
	return &next, append(warnings, fresh...).In(f.place), nil
}

// decoded returns the decoded services of a balancer's configuration file. For an agent it returns
// nil.
func (f *Files[D]) decoded() *decoded {
	if b, isBalancer := any(f.File).(*desired.Balancer); isBalancer {
		return decodedOf(f.root, b)
	}
	return nil
}

// refuseServers returns an error for each override of a server, if f are the files of an agent.
func (f *Files[D]) refuseServers(overrides []desired.Override) (problems fieldpath.Errors) {
	for i := range overrides {
		if problem := f.refuseServer(&overrides[i]); problem != nil {
			problems = append(problems, problem)
		}
	}
	return problems
}

// refuseServer returns an error if an override is of a server, and f are the files of an agent.
func (f *Files[D]) refuseServer(o *desired.Override) *fieldpath.Error {
	if _, isAgent := any(f.File).(*desired.Agent); !isAgent || o.Server == "" {
		return nil
	}
	return &fieldpath.Error{
		Line: o.Line, Path: o.Target(), Problem: "services of an agent have no servers",
	}
}

// notAmong returns the errors or warnings that are not among known ones. Lines do not matter.
func notAmong(all, known fieldpath.Errors) (fresh fieldpath.Errors) {
	isKnown := map[string]bool{}
	for _, w := range known {
		isKnown[w.Path+w.Problem] = true
	}
	for _, w := range all {
		if !isKnown[w.Path+w.Problem] {
			fresh = append(fresh, w)
		}
	}
	return fresh
}

// Has tells whether the configuration file has a server of a service. If server is empty, it tells
// whether the file has the service.
func (f *Files[D]) Has(service, server string) bool {
	return f.nodes()[target{service, server}] != nil
}

// Written returns the fields of a server in the configuration file, without the name. If server is
// empty, it returns those of the service. It returns nil if the file does not have the server or
// service.
func (f *Files[D]) Written(service, server string) desired.Fields {
	if node := f.nodes()[target{service, server}]; node != nil {
		return fieldsOf(node)
	}
	return nil
}
