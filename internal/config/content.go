// SPDX-License-Identifier: Apache-2.0

package config

import (
	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// Content is the content of a fleet's store as a file. The file has the section services of a
// configuration file, and the section overrides of a file of overrides.
type Content struct {
	Services  []desired.Fields   `yaml:"services"`
	Overrides []desired.Override `yaml:"overrides,omitempty"`
}

// ParseContent reads a file with the content of a store: the services, and the overrides if there
// are any. The file may be a configuration file: its other sections have no effect. ParseContent
// returns an error of type fieldpath.Errors if the balancer whose files are f could not follow the
// content.
func ParseContent(f *BalancerFiles, text []byte) (*Content, fieldpath.Errors, error) {
	root, problem := parse(text)
	if problem != nil {
		return nil, nil, fieldpath.Errors{problem}
	}
	top := resolved(root.Content[0])
	overrides := child(top, "overrides")
	// Check the services together with the other sections of the balancer's own file.
	top = with(top, "overrides", nil)
	for _, s := range sectionsOf(f.File) {
		top = with(top, s.name, child(resolved(f.root.Content[0]), s.name))
	}
	document := &yaml.Node{Kind: yaml.DocumentNode, Content: []*yaml.Node{top}}
	if _, _, problems := balancerOf(document, nil); len(problems) > 0 {
		return nil, nil, problems.OrNil()
	}
	c := &Content{}
	for _, item := range elements(child(top, "services")) {
		c.Services = append(c.Services, treeOf(item).(map[string]any))
	}
	if overrides != nil {
		var o desired.Overrides
		d := decodeDocument(&yaml.Node{Kind: yaml.DocumentNode, Content: []*yaml.Node{
			with(&yaml.Node{Kind: yaml.MappingNode}, "overrides", overrides),
		}}, &o)
		if d.check(o.Validate); len(d.problems) > 0 {
			return nil, nil, d.problems.OrNil()
		}
		c.Overrides = o.Overrides
	}
	_, warnings, err := WithStored(f, c.Services, c.Overrides)
	return c, warnings, err
}

// YAML returns the content as a file that ParseContent can read.
func (c *Content) YAML() ([]byte, error) { return yaml.Dump(c) }
