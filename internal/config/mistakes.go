// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/wording"
)

// needsQuotes is the error about an unquoted address such as 2001:db8::.
const needsQuotes = "must be in quotes: " +
	"YAML reads the colon at its end as the end of a field name"

// misreadAddress returns the address if YAML has read an unquoted address as a mapping. For
// example, the element 2001:db8:: of a list is read as the field "2001:db8:" without a value.
func misreadAddress(node *yaml.Node) (address string, ok bool) {
	if node.Kind != yaml.MappingNode || len(node.Content) != 2 || node.Content[1].Tag != "!!null" {
		return "", false
	}
	key := node.Content[0]
	address = key.Value + ":"
	isUnquoted := key.Style == 0
	return address, isUnquoted && endsInColon(address)
}

// endsInColon tells whether a text is an IPv6 address that ends in a colon.
func endsInColon(text string) bool {
	_, err := netip.ParseAddr(text)
	return err == nil && strings.HasSuffix(text, ":")
}

// noMergeKeys is the error about the key "<<", which YAML 1.2 does not have.
const noMergeKeys = "merge keys are not read: write the fields out, or use an alias for a whole value"

// describeUnknown returns the error about an unknown field, and the field that its name probably
// means, if there is one. missing are the fields that the section lacks; known are all its fields.
func describeUnknown(name string, missing, known []string) (problem, meant string) {
	for _, field := range known {
		if strings.HasPrefix(name, field+":") {
			return fmt.Sprintf("a space must follow the colon after %s", field), field
		}
	}
	if near := wording.Nearest(name, missing...); near != "" {
		return fmt.Sprintf("unknown field; did you mean %s?", near), near
	}
	return "unknown field; must be one of: " + strings.Join(known, ", "), ""
}

var (
	quoted = regexp.MustCompile(`"(?:[^"\\]|\\.)*"|'[^']*'`)
	// bracketed is an address and port such as [::1]:9188. Its bracket begins a list in YAML.
	bracketed = regexp.MustCompile(`(?:^|[\s,{\[])(\[[0-9A-Fa-f:.]+\]:\d+)`)
	// reserved is a value that begins with a character that no plain value may begin with.
	reserved = regexp.MustCompile("[\\s,{\\[]([@%`][^\\s,]*)")
	// unspaced is a field such as port:80 at the beginning of a line.
	unspaced = regexp.MustCompile(`^\s*(?:- +)*([a-z][a-z-]*):[^\s:]`)
	// noAnchor is the error of YAML's reader about an alias without an anchor.
	noAnchor = regexp.MustCompile(`^unknown anchor '(.*)' referenced$`)
)

// describeSyntax returns the error of YAML's reader in terms of the file.
func describeSyntax(message string, load *yaml.LoadError) string {
	began := load.ContextMark.Line
	if match := noAnchor.FindStringSubmatch(message); match != nil {
		return fmt.Sprintf("the alias *%s stands for nothing: no value before it has the anchor &%s", match[1], match[1])
	}
	switch message {
	case "did not find expected ',' or '}'":
		return fmt.Sprintf("the { of line %d must continue here with a comma, or end with }", began)
	case "did not find expected ',' or ']'":
		return fmt.Sprintf("the [ of line %d must continue here with a comma, or end with ]", began)
	case "did not find expected '-' indicator":
		return fmt.Sprintf("wrong indentation: the list of line %d must continue here with a -, or end", began)
	case "did not find expected key":
		return fmt.Sprintf("wrong indentation: the fields of line %d must continue here, or end", began)
	case "did not find expected node content":
		return "a value is missing here, or a bracket before it is not closed"
	case "mapping values are not allowed in this context":
		return "no field can begin here: indent the line as the one before, or put a value with a colon in quotes"
	}
	isDepth := strings.HasPrefix(load.ContextMsg, "while increasing") // an error of loadNodes, without context
	if load.ContextMsg != "" && !isDepth {
		return load.ContextMsg + ": " + message
	}
	return message
}

// findMistake looks for a common mistake that explains why YAML's reader stopped at the line
// number. It returns the line of the mistake, which can be another one, and an error in terms of
// the file. If it finds no mistake, the error is empty.
func findMistake(data []byte, number int) (line int, problem string) {
	lines := bytes.Split(data, []byte("\n"))
	if number < 1 || number > len(lines) {
		return 0, ""
	}
	if at, quote := openQuote(data, number); at > 0 {
		return at, fmt.Sprintf("a quoted text begins in this line, and has no closing %c", quote)
	}
	for _, at := range []int{number, number - 1, number + 1} {
		if at >= 1 && at <= len(lines) && isIndentedByTab(lines[at-1]) {
			return at, "a tab indents this line: YAML takes only spaces there"
		}
	}
	return number, findMistakeIn(lines, number)
}

// isIndentedByTab tells whether a line has text, and a tab before the text as the first character
// after leading spaces.
func isIndentedByTab(line []byte) bool {
	rest := bytes.TrimLeft(line, " ")
	return len(rest) > 0 && rest[0] == '\t' && len(bytes.TrimSpace(rest)) > 0
}

// openQuote returns the line in which an unclosed quoted text begins, and its quote. It looks in
// lines up to most, and returns line 0 if there is no such text. The quote that begins a later text
// may seem to close the unclosed text. openQuote notices that, because a letter follows that quote.
func openQuote(data []byte, most int) (line int, quote byte) {
	line = 1
	before := byte('\n') // the last character that is not a space
	for i := 0; i < len(data) && line <= most; i++ {
		switch c := data[i]; {
		case c == '#' && (i == 0 || isSpace(data[i-1])): // skip the comment
			for i+1 < len(data) && data[i+1] != '\n' {
				i++
			}
		case (c == '"' || c == '\'') && bytes.IndexByte([]byte("\n:-?[{,"), before) >= 0:
			end := closingQuote(data, i)
			if end < 0 {
				return line, c
			}
			isAtEnd := end+1 == len(data)
			if !isAtEnd && !isSpace(data[end+1]) && bytes.IndexByte([]byte(":,]}"), data[end+1]) < 0 {
				return line, c
			}
			line += bytes.Count(data[i:end], []byte("\n"))
			i, before = end, c
		case c == '\n':
			line++
			before = c
		case !isSpace(c):
			before = c
		}
	}
	return 0, 0
}

// closingQuote returns the place of the quote that closes the quoted text at i, or -1.
func closingQuote(data []byte, i int) int {
	quote := data[i]
	for i++; i < len(data); i++ {
		switch {
		case data[i] == '\\' && quote == '"':
			i++ // the escaped character
		case data[i] != quote:
		case quote == '\'' && i+1 < len(data) && data[i+1] == quote:
			i++ // two quotes stand for one quote in the text
		default:
			return i
		}
	}
	return -1
}

func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\r' || c == '\n' }

// findMistakeIn looks for a mistake in a line. It looks for a colon without a space behind it in the
// line before, too, because YAML's reader notices that only at the next line.
func findMistakeIn(lines [][]byte, number int) string {
	if bytes.HasPrefix(lines[number-1], []byte("%")) {
		return fmt.Sprintf("%q: this directive is not read: remove the line, no file needs one",
			bytes.TrimSpace(lines[number-1]))
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
	if match := reserved.FindStringSubmatch(line); match != nil {
		return fmt.Sprintf("%q must be in quotes: YAML reserves its first character", match[1])
	}
	for _, line := range [][]byte{lines[number-1], lines[max(number-2, 0)]} {
		if match := unspaced.FindSubmatch(line); match != nil {
			return fmt.Sprintf("a space must follow the colon after %s", match[1])
		}
	}
	return ""
}
