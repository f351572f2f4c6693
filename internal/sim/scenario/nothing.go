package scenario

import (
	"fmt"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/config"
)

// nothing reports the fields that a file names without a value. To YAML they are not there, so that a case
// with "events:" would have the file's events, and not none.
func nothing(text []byte) (errs config.Errors) {
	var root yaml.Node
	if yaml.Load(text, &root) != nil || len(root.Content) == 0 {
		return nil // which is reported already
	}
	var walk func(path string, node *yaml.Node)
	walk = func(path string, node *yaml.Node) {
		switch {
		case node.Kind == yaml.SequenceNode:
			for i, element := range node.Content {
				walk(fmt.Sprintf("%s[%d]", path, i), element)
			}
		case node.Kind == yaml.MappingNode:
			for i := 0; i < len(node.Content); i += 2 {
				walk(join(path, node.Content[i].Value), node.Content[i+1])
			}
		case node.Kind == yaml.ScalarNode && node.Tag == "!!null":
			errs = append(errs, &config.Error{
				Line: node.Line, Path: path, Problem: "has no value: leave it out, or give it one such as [] or {}",
			})
		}
	}
	walk("", root.Content[0])
	return errs
}
