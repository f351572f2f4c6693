// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"fmt"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// withoutValue reports fields without a value. YAML treats such a field as missing: a case with
// "events:" would have the events of the file, although its author may mean none. Other
// checks report list elements without a value.
func withoutValue(text []byte) (errs fieldpath.Errors) {
	root, err := config.Document(text)
	if err != nil {
		return nil // reported already
	}
	var walk func(path string, node *yaml.Node)
	walk = func(path string, node *yaml.Node) {
		switch node.Kind {
		case yaml.SequenceNode:
			for i, element := range node.Content {
				walk(fmt.Sprintf("%s[%d]", path, i), element)
			}
		case yaml.MappingNode:
			for i := 0; i < len(node.Content); i += 2 {
				at, value := join(path, node.Content[i].Value), node.Content[i+1]
				if value.Kind == yaml.ScalarNode && value.Tag == "!!null" {
					errs = append(errs, &fieldpath.Error{
						Line: value.Line, Path: at, Problem: "has no value: leave it out, or give it one such as [] or {}",
					})
				}
				walk(at, value)
			}
		}
	}
	walk("", root.Content[0])
	return errs
}
