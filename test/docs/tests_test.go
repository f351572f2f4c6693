// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"path"
	"regexp"
	"strings"
	"testing"
)

// testedPages are the documents whose tables name tests.
var testedPages = []string{"docs/operate/security.md", "docs/operate/limits.md", "docs/research/papers.md"}

var (
	// testName matches a test or a fuzzer as these pages write it: with the folder's last element.
	testName = regexp.MustCompile("`([a-z0-9]+)\\.((?:Test|Fuzz)[A-Za-z0-9]+)`")
	// bareTestName matches one without a folder.
	bareTestName = regexp.MustCompile("`(?:Test|Fuzz)[A-Za-z0-9]+`")
	testFunction = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)[A-Za-z0-9]+)\(`)
)

// TestNamedTestsExist checks that each row of a table that ends in tests names at least one, and
// that all of them exist.
func TestNamedTestsExist(t *testing.T) {
	exists := map[string]bool{}
	for _, name := range files(t, ".go") {
		if !strings.HasSuffix(name, "_test.go") {
			continue
		}
		for _, match := range testFunction.FindAllStringSubmatch(read(t, name), -1) {
			exists[path.Base(path.Dir(name))+"."+match[1]] = true
		}
	}
	for _, page := range testedPages {
		named := 0
		isTested := false // the present table has a column of tests
		for i, line := range strings.Split(read(t, page), "\n") {
			for _, match := range testName.FindAllStringSubmatch(line, -1) {
				named++
				if name := match[1] + "." + match[2]; !exists[name] {
					t.Errorf("%s:%d: there is no test %s", page, i+1, name)
				}
			}
			if bare := bareTestName.FindString(line); bare != "" {
				t.Errorf("%s:%d: %s: write its folder and a dot before it", page, i+1, bare)
			}
			switch isRow := strings.HasPrefix(line, "| "); {
			case !isRow && !strings.HasPrefix(line, "|-"):
				isTested = false
			case isRow && strings.Contains(line, "| test |"):
				isTested = true
			case isRow && isTested && !testName.MatchString(line):
				t.Errorf("%s:%d: the row names no test", page, i+1)
			}
		}
		if named < 10 {
			t.Errorf("%s names only %d tests", page, named)
		}
	}
}
