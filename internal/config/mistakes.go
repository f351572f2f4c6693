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

// needsQuotes is what is wrong with an address such as 2001:db8:: that is not quoted.
const needsQuotes = "must be in quotes: " +
	"YAML takes the colon at its end for the end of a field's name"

// misreadAddress returns the address without quotes that YAML takes for a mapping: in a list,
// 2001:db8:: is the field "2001:db8:" without a value.
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

// unknownField says what is wrong with the name of a field that is none of the known ones.
func unknownField(name string, known []string) string {
	for _, field := range known {
		if strings.HasPrefix(name, field+":") {
			return fmt.Sprintf("a space must follow the colon after %s", field)
		}
	}
	return "unknown field; known: " + strings.Join(known, ", ")
}

var (
	quoted = regexp.MustCompile(`"(?:[^"\\]|\\.)*"|'[^']*'`)
	// bracketed is an address and port such as [::1]:9188, whose bracket begins a list in YAML.
	bracketed = regexp.MustCompile(`(?:^|[\s,{\[])(\[[0-9A-Fa-f:.]+\]:\d+)`)
	// unspaced is a field such as port:80 at the beginning of a line.
	unspaced = regexp.MustCompile(`^\s*(?:- +)*([a-z][a-z-]*):[^\s:]`)
)

// findMistake looks for a common mistake in the line where YAML's reader gave up. It says what is
// wrong in terms of the file; empty if it finds nothing.
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
			"YAML takes the bracket for the beginning of a list", match[1])
	}
	// YAML's reader notices only at the next line that this one is no field.
	for _, line := range [][]byte{lines[number-1], lines[max(number-2, 0)]} {
		if match := unspaced.FindSubmatch(line); match != nil {
			return fmt.Sprintf("a space must follow the colon after %s", match[1])
		}
	}
	return ""
}
