// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"strings"
	"unicode"
)

// textWidth estimates the width of a text in a sans-serif font, in units of the chart. It is too
// large rather than too small.
func textWidth(text string, size float64) float64 {
	sum := 0.0
	for _, r := range text {
		switch {
		case strings.ContainsRune("ijlI.,:;|!'()[]/ ", r):
			sum += 0.33
		case strings.ContainsRune("ftr-", r):
			sum += 0.4
		case strings.ContainsRune("mwMW%@", r):
			sum += 0.9
		case unicode.IsUpper(r):
			sum += 0.7
		default:
			sum += 0.57
		}
	}
	return sum * size
}

// wrap splits a text at spaces into lines of at most a width. A longer word has its own line.
func wrap(text string, width, size float64) (lines []string) {
	for _, word := range strings.Fields(text) {
		last := len(lines) - 1
		if last >= 0 && textWidth(lines[last]+" "+word, size) <= width {
			lines[last] += " " + word
		} else {
			lines = append(lines, word)
		}
	}
	return lines
}
