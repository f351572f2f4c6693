// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"cmp"
	"fmt"

	"go.yaml.in/yaml/v4"
	"go.yaml.in/yaml/v4/plugin/loaderlimits"

	"github.com/segue-lb/segue/internal/fieldpath"
)

// The bounds of a YAML document. A node is a key, a value, a list or a mapping. By aliases, a short
// text can stand for a document that takes all memory. The kernel may be configured not to kill the
// process that reads the document, so such a document must be refused. The largest configuration
// has 65,535 servers. An override that adds a server with all fields has 21 nodes.
const (
	MostBytes = 32 << 20 // of the text, and of all values with aliases expanded
	mostNodes = 1_500_000
	mostDepth = 100
	// mostSeparators is the greatest number of characters that separate nodes, also in comments.
	mostSeparators = 2_000_000
	// Each byte of the text may stand for mostNodesOfByte nodes, and a small file may have fewNodes in
	// any case. That suffices for 400 services whose aliases stand for the same 160 servers. It does
	// not permit a million nodes in ten kilobytes.
	mostNodesOfByte, fewNodes = 20, 100_000
	// mostErrors is the greatest number of errors that are listed. An error is longer than the node
	// that it is about.
	mostErrors = 1000
	// mostElements is the greatest length of a list. An element can be an empty mapping, which takes
	// three bytes of text and a thousand bytes of memory.
	mostElements = 100_000
)

// loadNodes parses a document whose text is within the bounds. Aliases are not expanded.
func loadNodes(data []byte) (*yaml.Node, *fieldpath.Error) {
	if problem := cmp.Or(checkText(data), checkEncoding(data)); problem != nil {
		return nil, problem
	}
	var root yaml.Node
	depth := loaderlimits.New(loaderlimits.DepthFunc(func(depth int, _ *yaml.DepthContext) error {
		if depth > mostDepth {
			return fmt.Errorf("more than %d levels of lists and mappings", mostDepth)
		}
		return nil
	}))
	if err := yaml.Load(data, &root, yaml.WithPlugin(depth)); err != nil {
		return nil, syntaxError(data, err)
	}
	return &root, nil
}

// checkText returns an error if the parser could need too much memory or time for a text. It counts
// the characters that separate nodes, because a document has at most about two nodes for each of
// them. It also counts directives, because the parser's time grows with the square of their number.
// No file needs more than one.
func checkText(data []byte) *fieldpath.Error {
	if len(data) > MostBytes {
		return &fieldpath.Error{Problem: fmt.Sprintf("the file has %d bytes; at most %d are read", len(data), MostBytes)}
	}
	const mostDirectives = 10
	separators, directives, line := 0, 0, 1
	for i, c := range data {
		switch c {
		case '\n', '\r', ',', '[', '{':
			separators++
		case ':', '-', '?': // they separate nodes only before a space or a quote
			if i+1 == len(data) || bytes.IndexByte([]byte(" \t\r\n\"'"), data[i+1]) >= 0 {
				separators++
			}
		case '%': // at the beginning of a line
			if i == 0 || data[i-1] == '\n' || data[i-1] == '\r' {
				directives++
			}
		}
		if c == '\n' {
			line++
		}
		switch {
		case separators > mostSeparators:
			return &fieldpath.Error{Line: line, Problem: tooManyNodes(mostNodes)}
		case directives > mostDirectives:
			return &fieldpath.Error{Line: line, Problem: fmt.Sprintf("more than %d directives", mostDirectives)}
		}
	}
	return nil
}

func tooManyNodes(most int) string {
	return fmt.Sprintf("the file is too large: it may have %d keys, values, lists and mappings, where an "+
		"alias counts as all that it stands for", most)
}

// extent is the size of a document or of a node, with all aliases expanded.
type extent struct{ nodes, bytes, depth int }

// bounds measures a document.
type bounds struct {
	mostNodes int
	anchors   map[*yaml.Node]*extent // the nodes with an anchor; nil: this node is being measured
	total     extent                 // of the nodes so far; its depth is not used
}

// checkBounds returns an error about the node at which a document exceeds the bounds, or about an
// alias for a value that contains this alias. length is the length of the text in bytes. Values are
// measured only once, even if many aliases stand for them, so the time is linear in the length.
func checkBounds(root *yaml.Node, length int) *fieldpath.Error {
	b := bounds{
		mostNodes: min(max(fewNodes, length*mostNodesOfByte), mostNodes), anchors: map[*yaml.Node]*extent{},
	}
	_, problem := b.add(root, 0)
	return problem
}

// add measures a node at a depth. It returns the depth of the deepest node in it.
func (b *bounds) add(node *yaml.Node, depth int) (deepest int, problem *fieldpath.Error) {
	if node.Kind == yaml.AliasNode {
		aliased, isKnown := b.anchors[node.Alias]
		if isKnown && aliased == nil { // the alias is in the node for which it stands
			return 0, &fieldpath.Error{Line: node.Line, Problem: fmt.Sprintf(
				"the alias *%s stands for a value that contains the alias", node.Value)}
		}
		b.total.nodes += aliased.nodes
		b.total.bytes += aliased.bytes
		deepest = depth + aliased.depth
		return deepest, b.exceeded(node, deepest)
	}
	before := b.total
	if node.Anchor != "" {
		b.anchors[node] = nil
	}
	b.total.nodes++
	b.total.bytes += len(node.Value)
	deepest = depth
	if problem := b.exceeded(node, depth); problem != nil {
		return 0, problem
	}
	for _, inner := range node.Content {
		at, problem := b.add(inner, depth+1)
		if problem != nil {
			return 0, problem
		}
		deepest = max(deepest, at)
	}
	if node.Anchor != "" {
		b.anchors[node] = &extent{b.total.nodes - before.nodes, b.total.bytes - before.bytes, deepest - depth}
	}
	return deepest, nil
}

// exceeded returns an error about a node if the document, up to this node, exceeds a bound.
func (b *bounds) exceeded(node *yaml.Node, depth int) *fieldpath.Error {
	problem := ""
	switch {
	case b.total.nodes > b.mostNodes:
		problem = tooManyNodes(b.mostNodes)
	case b.total.bytes > MostBytes:
		problem = fmt.Sprintf("the values of the file have more than %d bytes, where an alias counts as "+
			"all that it stands for", MostBytes)
	case depth > mostDepth+1: // the document is at depth 0, and does not count as a level
		problem = fmt.Sprintf("more than %d levels of lists and mappings, where an alias counts as all "+
			"that it stands for", mostDepth)
	default:
		return nil
	}
	return &fieldpath.Error{Line: node.Line, Problem: problem}
}
