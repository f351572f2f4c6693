// SPDX-License-Identifier: Apache-2.0

// Package wording writes words into messages: numbers with their nouns, and the name that a
// mistyped one probably stands for.
package wording

import "strings"

// Nearest returns the name that differs least from a word, or an empty string if no name is near.
// A name is near if at most two edits turn the word into it. If the word has at most four letters,
// only one edit is allowed. An edit adds, removes or replaces a letter, or swaps two neighbours. A
// name is also near if it begins with the word, and the word has at least three letters.
func Nearest(word string, names ...string) string {
	const shortestBeginning = 3
	allowed := 2
	if len(word) <= 4 {
		allowed = 1
	}
	nearest, least := "", allowed+1
	for _, name := range names {
		// The word needs at least as many edits as the lengths differ.
		difference := max(len(word), len(name)) - min(len(word), len(name))
		edits := least // too many, unless one of the cases holds
		switch {
		case len(word) >= shortestBeginning && strings.HasPrefix(name, word):
			edits = min(difference, allowed)
		case difference < least && len(name) < longest:
			edits = distance(word, name)
		}
		if edits < least && edits < len(name) { // with len(name) edits, any short word is near
			nearest, least = name, edits
		}
	}
	return nearest
}

// longest bounds the length of names, so that distance allocates no memory. All fields and commands
// are shorter.
const longest = 64

// distance returns the least number of edits that turn one word into another, as Nearest counts
// them (the optimal string alignment distance).
func distance(a, b string) int {
	var rows [3][longest]int
	before, last, row := &rows[0], &rows[1], &rows[2]
	for j := range len(b) + 1 {
		last[j] = j
	}
	for i := range len(a) {
		row[0] = i + 1
		for j := range len(b) {
			replaced := last[j]
			if a[i] != b[j] {
				replaced++
			}
			row[j+1] = min(last[j+1]+1, row[j]+1, replaced)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(b)]
}
