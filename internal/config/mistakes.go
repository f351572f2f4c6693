// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v4"
)

// needsQuotes is the error about an unquoted address such as 2001:db8::.
const needsQuotes = "must be in quotes: " +
	"YAML reads the colon at its end as the end of a field name"

// misreadAddress returns an unquoted address that YAML reads as a mapping: in a list, 2001:db8:: is
// the field "2001:db8:" without a value.
func misreadAddress(node *yaml.Node) (address string, ok bool) {
	if node.Kind != yaml.MappingNode || len(node.Content) != 2 || node.Content[1].Tag != "!!null" {
		return "", false
	}
	address = node.Content[0].Value + ":"
	return address, node.Content[0].Style == 0 && endsInColon(address)
}

// endsInColon tells whether a text is an IPv6 address that ends in a colon.
func endsInColon(text string) bool {
	_, err := netip.ParseAddr(text)
	return err == nil && strings.HasSuffix(text, ":")
}

// unknownField returns the error about the name of an unknown field.
func unknownField(name string, known []string) string {
	for _, field := range known {
		if strings.HasPrefix(name, field+":") {
			return fmt.Sprintf("a space must follow the colon after %s", field)
		}
	}
	return "unknown field; must be one of: " + strings.Join(known, ", ")
}

var (
	quoted = regexp.MustCompile(`"(?:[^"\\]|\\.)*"|'[^']*'`)
	// bracketed is an address and port such as [::1]:9188. Its bracket begins a list in YAML.
	bracketed = regexp.MustCompile(`(?:^|[\s,{\[])(\[[0-9A-Fa-f:.]+\]:\d+)`)
	// unspaced is a field such as port:80 at the beginning of a line.
	unspaced = regexp.MustCompile(`^\s*(?:- +)*([a-z][a-z-]*):[^\s:]`)
)

// findMistake looks for a common mistake in the line at which YAML's reader stopped. It returns the
// error in terms of the file, or an empty string.
func findMistake(data []byte, number int) string {
	lines := bytes.Split(data, []byte("\n"))
	if number < 1 || number > len(lines) {
		return ""
	}
	line := quoted.ReplaceAllString(string(lines[number-1]), `""`)
	line, _, _ = strings.Cut(line, " #")
	isBreak := func(r rune) bool { return strings.ContainsRune(" \t\r,{}[]", r) }
	for _, word := range strings.FieldsFunc(line, isBreak) {
		if endsInColon(word) {
			return fmt.Sprintf("%q %s", word, needsQuotes)
		}
	}
	if match := bracketed.FindStringSubmatch(line); match != nil {
		return fmt.Sprintf("%q must be in quotes: "+
			"YAML reads the bracket as the beginning of a list", match[1])
	}
	// YAML's reader notices a missing space only at the next line.
	for _, line := range [][]byte{lines[number-1], lines[max(number-2, 0)]} {
		if match := unspaced.FindSubmatch(line); match != nil {
			return fmt.Sprintf("a space must follow the colon after %s", match[1])
		}
	}
	return ""
}
