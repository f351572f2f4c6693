// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v4"
)

const modelPage, mutantFile = "docs/operate/security.md", "test/mutants/mutants.yaml"

// A row of the threat model, with the mutants that remove its checks. The exported fields are those
// of an entry of mutants.yaml.
type row struct {
	attack string // the first cell of the row
	tests  []test

	Row     string   // how the first cell begins
	None    string   // why the row has no mutants
	Mutants []mutant // empty only if None says why
}

// A test that a row names. Without a name, it stands for the tests of a folder.
type test struct{ folder, name string }

func (t test) String() string { return strings.TrimSuffix(path.Base(t.folder)+"."+t.name, ".") }

// A mutant is a change of one place in a file.
type mutant struct {
	File string
	Old  string // occurs in the file once
	New  string
}

// String returns the file, the old text and the new text.
func (m mutant) String() string {
	return fmt.Sprintf("%s: %.60q -> %.60q", m.File, m.Old, m.New)
}

// readModel reads the rows of the threat model, and their mutants, in the checkout at root. It
// returns an error unless the entries of mutants.yaml have the order of the rows.
func readModel(root string) ([]row, error) {
	rows, err := readRows(root)
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(root, mutantFile))
	if err != nil {
		return nil, err
	}
	var entries []row
	if err := yaml.Unmarshal(text, &entries); err != nil {
		return nil, fmt.Errorf("%s: %w", mutantFile, err)
	}
	if len(entries) != len(rows) {
		err = fmt.Errorf("%s has %d entries, and %s %d rows", mutantFile, len(entries), modelPage, len(rows))
	}
	for i := range min(len(rows), len(entries)) {
		r, e := &rows[i], entries[i]
		if !strings.HasPrefix(r.attack, e.Row) || e.Row == "" {
			return nil, fmt.Errorf("%s: the entry %q is at the place of the row %q", mutantFile, e.Row, r.attack)
		}
		r.Row, r.None, r.Mutants = e.Row, e.None, e.Mutants
		err = errors.Join(err, r.check(root))
	}
	return rows, err
}

// check returns an error if the row has no tests, or has neither mutants nor a reason, or if a
// mutant cannot be made.
func (r row) check(root string) error {
	if len(r.tests) == 0 {
		return fmt.Errorf("%s: %q: names no test", modelPage, r.attack)
	}
	if (len(r.Mutants) == 0) == (r.None == "") {
		return fmt.Errorf("%s: %q: needs either mutants or `none`", mutantFile, r.Row)
	}
	for _, m := range r.Mutants {
		content, err := os.ReadFile(filepath.Join(root, m.File))
		if err != nil {
			return err
		}
		if n := strings.Count(string(content), m.Old); n != 1 {
			return fmt.Errorf("%s: %q: the text %q is %d times in %s, not once", mutantFile, r.Row, m.Old, n, m.File)
		}
	}
	return nil
}

var (
	testName     = regexp.MustCompile("`([a-z0-9]+\\.(?:Test|Fuzz)[A-Za-z0-9]+)`")
	testFunction = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)[A-Za-z0-9]+)\(`)
)

// readRows reads the rows of the threat model: those of all tables with four columns.
func readRows(root string) (rows []row, err error) {
	text, err := os.ReadFile(filepath.Join(root, modelPage))
	tests, findErr := findTests(root)
	if err := errors.Join(err, findErr); err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(line, "| \n"), " | ")
		if len(cells) != 4 || cells[3] == "test" {
			continue
		}
		r := row{attack: cells[0]}
		for _, match := range testName.FindAllStringSubmatch(cells[3], -1) {
			found, exists := tests[match[1]]
			if !exists {
				return nil, fmt.Errorf("%s: %q: there is no test %s", modelPage, r.attack, match[1])
			}
			r.tests = append(r.tests, found)
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// findTests returns all tests by the names that rows use, such as "package.TestName".
func findTests(root string) (map[string]test, error) {
	tests := map[string]test{}
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() && strings.HasPrefix(entry.Name(), ".") && name != root {
			return filepath.SkipDir
		}
		if err != nil || !strings.HasSuffix(name, "_test.go") {
			return err
		}
		content, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		folder, err := filepath.Rel(root, filepath.Dir(name))
		for _, match := range testFunction.FindAllStringSubmatch(string(content), -1) {
			found := test{folder, match[1]}
			tests[found.String()] = found
		}
		return err
	})
	return tests, err
}
