// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestConditions checks that the samples of segue status and segue server list show conditions that
// a server can have.
func TestConditions(t *testing.T) {
	var known []string
	source := read(t, "internal/balancer/inspect/conditions.go")
	for _, match := range regexp.MustCompile(`Condition = "([a-z-]+)"`).FindAllStringSubmatch(source, -1) {
		known = append(known, match[1])
	}
	header := regexp.MustCompile(`^    (?:server|SERVER)  .*\b(?:condition|CONDITION)\b`)
	shown := 0
	for _, name := range files(t, ".md") {
		at := -1 // column of the condition in the table at hand
		for i, line := range strings.Split(read(t, name), "\n") {
			switch {
			case header.MatchString(line):
				at = strings.Index(strings.ToLower(line), "condition")
			case !strings.HasPrefix(line, "    ") || strings.HasPrefix(line, "    #") || len(line) <= at || at < 0:
				at = -1
			default:
				shown++
				if got, _, _ := strings.Cut(line[at:], " "); !slices.Contains(known, got) {
					t.Errorf("%s:%d: condition %q, which is none of %v", name, i+1, got, known)
				}
			}
		}
	}
	if shown < 10 || len(known) < 10 {
		t.Errorf("%d servers in samples and %d conditions were found", shown, len(known))
	}
}
