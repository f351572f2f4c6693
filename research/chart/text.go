// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"regexp"
	"strings"
	"unicode"
)

// textWidth estimates the width of a text in a sans-serif font, in units of the chart. It is too
// large rather than too small: the widths of letters are those of a wide font, DejaVu Sans.
func textWidth(text string, size float64) float64 {
	sum := 0.0
	for _, r := range text {
		switch {
		case strings.ContainsRune("ijlI.,:;|!'/ \u00a0", r):
			sum += 0.33
		case strings.ContainsRune("ftr-()[]", r):
			sum += 0.41
		case strings.ContainsRune("mwMW%@=+<>", r):
			sum += 0.9
		case unicode.IsUpper(r):
			sum += 0.72
		default:
			sum += 0.63
		}
	}
	return sum * size
}

// relations are the signs before values.
var relations = regexp.MustCompile(` (=|±|≤|≥|<=|>=) `)

// Unbroken returns a text for readers in which a value, such as ρ = 0.88, stays in one line: it has
// no-break spaces around the sign.
func Unbroken(text string) string { return relations.ReplaceAllString(text, "\u00a0$1\u00a0") }

// wrap splits a text at spaces into lines of at most a width. A longer word has its own line.
func wrap(text string, width, size float64) (lines []string) {
	for _, word := range strings.FieldsFunc(Unbroken(text), func(r rune) bool { return r == ' ' }) {
		last := len(lines) - 1
		if last >= 0 && textWidth(lines[last]+" "+word, size) <= width {
			lines[last] += " " + word
		} else {
			lines = append(lines, word)
		}
	}
	return lines
}
