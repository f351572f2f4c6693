// SPDX-License-Identifier: Apache-2.0

// Package docs checks the project's documentation: links, anchors, the index, and line lengths.
package docs

import (
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// root is the project's folder. Paths below are relative to it.
const root = "../.."

// mostColumns is the longest line that CONTRIBUTING.md allows.
const mostColumns = 100

// files returns the paths of all files with one of the endings, except in folders of tools and
// binaries.
func files(t *testing.T, endings ...string) (found []string) {
	t.Helper()
	err := fs.WalkDir(os.DirFS(root), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && slices.Contains([]string{".git", ".tools", "bin"}, name) {
			return fs.SkipDir
		}
		if !entry.IsDir() && slices.Contains(endings, path.Ext(name)) {
			found = append(found, name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(path.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// prose returns the lines of a Markdown text. Lines of code blocks, which are indented by four
// spaces, are empty.
func prose(text string) []string {
	lines := strings.Split(text, "\n")
	isCode := false
	for i, line := range lines {
		afterBlank := i == 0 || lines[i-1] == ""
		isCode = strings.HasPrefix(line, "    ") && (afterBlank || isCode)
		if isCode {
			lines[i] = ""
		}
	}
	return lines
}

var (
	link = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	// codeSpan matches code. Brackets in code are not links.
	codeSpan = regexp.MustCompile("`[^`]*`")
)

// TestLinks follows every relative link, and every anchor in a Markdown file.
func TestLinks(t *testing.T) {
	links := 0
	for _, name := range files(t, ".md") {
		for i, line := range prose(read(t, name)) {
			for _, match := range link.FindAllStringSubmatch(codeSpan.ReplaceAllString(line, ""), -1) {
				if strings.Contains(match[1], "://") {
					continue
				}
				links++
				if problem := follow(t, name, match[1]); problem != "" {
					t.Errorf("%s:%d: link %s: %s", name, i+1, match[1], problem)
				}
			}
		}
	}
	if links < 100 {
		t.Errorf("only %d links were found", links)
	}
}

// follow returns the problem of a link in a file, or an empty text.
func follow(t *testing.T, from, to string) (problem string) {
	t.Helper()
	target, anchor, _ := strings.Cut(to, "#")
	if target == "" {
		target = from
	} else {
		target = path.Join(path.Dir(from), target)
	}
	if _, err := os.Stat(path.Join(root, target)); err != nil {
		return "no file " + target
	}
	if anchor != "" && !slices.Contains(anchors(read(t, target)), anchor) {
		return "no heading of " + target + " has this anchor"
	}
	return ""
}

// anchors returns the anchors of a text's headings, as code hosts derive them: lower-case letters,
// digits, hyphens and underscores, and a number if a heading occurs twice.
func anchors(text string) (all []string) {
	for _, line := range prose(text) {
		marks := len(line) - len(strings.TrimLeft(line, "#"))
		if marks == 0 || !strings.HasPrefix(line[marks:], " ") {
			continue
		}
		anchor := strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
				return unicode.ToLower(r)
			}
			return -1
		}, line[marks+1:])
		unique := anchor
		for n := 1; slices.Contains(all, unique); n++ {
			unique = anchor + "-" + strconv.Itoa(n)
		}
		all = append(all, unique)
	}
	return all
}

var documentName = regexp.MustCompile(`\bdocs/[A-Za-z0-9/_-]+\.md\b`)

// TestDocumentsExist finds every document that code, output or another document names by its path.
func TestDocumentsExist(t *testing.T) {
	names := 0
	for _, name := range files(t, ".md", ".go", ".c", ".h", ".py", ".yaml", ".service") {
		for i, line := range strings.Split(read(t, name), "\n") {
			for _, document := range documentName.FindAllString(line, -1) {
				names++
				if _, err := os.Stat(path.Join(root, document)); err != nil {
					t.Errorf("%s:%d: there is no %s", name, i+1, document)
				}
			}
		}
	}
	if names < 30 {
		t.Errorf("only %d names of documents were found", names)
	}
}

// TestIndex checks that the index lists every document.
func TestIndex(t *testing.T) {
	index := read(t, "docs/README.md")
	for _, name := range files(t, ".md") {
		document, below := strings.CutPrefix(name, "docs/")
		if below && document != "README.md" && !strings.Contains(index, "]("+document+")") {
			t.Errorf("docs/README.md does not list %s", document)
		}
	}
}

// TestLineLength checks all lines except tables, code, and lines of a single word, such as a URL.
func TestLineLength(t *testing.T) {
	for _, name := range files(t, ".md") {
		for i, line := range prose(read(t, name)) {
			n := utf8.RuneCountInString(line)
			isTable := strings.HasPrefix(strings.TrimSpace(line), "|")
			if n > mostColumns && !isTable && strings.Contains(strings.TrimSpace(line), " ") {
				t.Errorf("%s:%d: %d columns, more than %d", name, i+1, n, mostColumns)
			}
		}
	}
}

// mostWordsInCell is the longest cell of a table in reference pages. A longer text is a list, or has
// a heading of its own.
const mostWordsInCell = 30

var cellEnd = regexp.MustCompile(`[^\\]\|`)

// TestCells checks that the tables of reference pages have no paragraphs in their cells.
func TestCells(t *testing.T) {
	cells := 0
	for _, name := range files(t, ".md") {
		if !strings.HasPrefix(name, "docs/reference/") && !strings.HasPrefix(name, "docs/understand/") &&
			name != "docs/research/papers.md" {
			continue
		}
		for i, line := range prose(read(t, name)) {
			if !strings.HasPrefix(line, "|") {
				continue
			}
			for _, cell := range cellEnd.Split(line, -1) {
				cells++
				if n := len(strings.Fields(cell)); n > mostWordsInCell {
					t.Errorf("%s:%d: a cell of %d words, more than %d", name, i+1, n, mostWordsInCell)
				}
			}
		}
	}
	if cells < 1000 {
		t.Errorf("only %d cells were found", cells)
	}
}

// warningInStatus matches what segue status and segue store status print in capitals.
var warningInStatus = regexp.MustCompile(`(?:"|, )([A-Z]{2,}(?: [A-Z]{2,})+)`)

// TestIncidentsHaveWarnings checks that docs/operate/incidents.md has a row for each line in
// capitals.
func TestIncidentsHaveWarnings(t *testing.T) {
	page := read(t, "docs/operate/incidents.md")
	warnings := 0
	for _, name := range files(t, ".go") {
		isStatus := strings.HasPrefix(name, "cmd/segue/status") || name == "cmd/segue/store.go"
		if !isStatus || strings.HasSuffix(name, "_test.go") {
			continue
		}
		for _, match := range warningInStatus.FindAllStringSubmatch(read(t, name), -1) {
			warnings++
			if !strings.Contains(page, "`"+match[1]) && !strings.Contains(page, ": "+match[1]) {
				t.Errorf("%s prints %q, which docs/operate/incidents.md does not have", name, match[1])
			}
		}
	}
	if warnings < 10 {
		t.Errorf("only %d warnings were found", warnings)
	}
}

var fuzzFunction = regexp.MustCompile(`(?m)^func (Fuzz[A-Za-z]+)\(f \*testing\.F\) `)

// TestFuzzersAreListed checks that CONTRIBUTING.md describes each fuzzer, and no others.
func TestFuzzersAreListed(t *testing.T) {
	rows := map[string]bool{}
	for _, line := range strings.Split(read(t, "CONTRIBUTING.md"), "\n") {
		if cells := strings.Split(line, " | "); strings.HasPrefix(line, "| `Fuzz") && len(cells) == 3 {
			for name := range strings.SplitSeq(strings.TrimPrefix(cells[0], "| "), ", ") {
				rows[strings.Trim(name, "`")+" in "+strings.Trim(cells[1], "`")] = true
			}
		}
	}
	for _, name := range files(t, ".go") {
		if !strings.HasSuffix(name, "_test.go") {
			continue
		}
		for _, match := range fuzzFunction.FindAllStringSubmatch(read(t, name), -1) {
			row := match[1] + " in " + path.Dir(name)
			if !rows[row] {
				t.Errorf("CONTRIBUTING.md does not list %s", row)
			}
			delete(rows, row)
		}
	}
	for row := range rows {
		t.Errorf("CONTRIBUTING.md lists %s, which does not exist", row)
	}
}
