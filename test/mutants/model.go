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
	"slices"
	"strings"

	"go.yaml.in/yaml/v4"
)

const (
	modelPage  = "docs/security.md"
	mutantFile = "test/mutants/mutants.yaml"
)

// A row of the threat model, with the mutants that remove its checks.
type row struct {
	attack string // the first cell of the row
	tests  []test

	Row     string   // how the first cell begins
	None    string   // why the row has no mutant
	Mutants []mutant // at least one, unless None says why not
}

// A test that a row names.
type test struct{ folder, name string }

// A mutant is a change of one place in a file.
type mutant struct {
	File string
	Old  string // is in the file once
	New  string
}

// String returns the place and what stands there instead.
func (m mutant) String() string {
	return fmt.Sprintf("%s: %q -> %q", m.File, short(m.Old), short(m.New))
}

func short(text string) string {
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > 60 {
		return text[:57] + "..."
	}
	return text
}

// readModel reads the rows of the threat model whose attack begins with a prefix, and their mutants,
// below a checkout's root. An error names each row without mutants, each entry without a row, and each
// mutant whose text is not in its file once.
func readModel(root, prefix string) ([]row, error) {
	text, err := os.ReadFile(filepath.Join(root, mutantFile))
	if err != nil {
		return nil, err
	}
	var entries []row
	if err := yaml.Unmarshal(text, &entries); err != nil {
		return nil, fmt.Errorf("%s: %w", mutantFile, err)
	}
	rows, err := readRows(root)
	if err != nil {
		return nil, err
	}
	isOther := func(attack string) bool { return !strings.HasPrefix(attack, prefix) }
	rows = slices.DeleteFunc(rows, func(r row) bool { return isOther(r.attack) })
	if prefix != "" {
		entries = slices.DeleteFunc(entries, func(e row) bool { return find([]row{e}, prefix) < 0 && isOther(e.Row) })
	}
	var errs []error
	used := map[int]bool{}
	for i := range rows {
		n := find(entries, rows[i].attack)
		if n < 0 {
			errs = append(errs, fmt.Errorf("%s: no entry for the row %q", mutantFile, rows[i].attack))
			continue
		}
		used[n] = true
		rows[i].Row, rows[i].None, rows[i].Mutants = entries[n].Row, entries[n].None, entries[n].Mutants
		errs = append(errs, rows[i].check(root))
	}
	for i, e := range entries {
		if !used[i] {
			errs = append(errs, fmt.Errorf("%s: %q: no row of %s begins so", mutantFile, e.Row, modelPage))
		}
	}
	return rows, errors.Join(errs...)
}

// find returns the index of the entry for an attack, or -1.
func find(entries []row, attack string) int {
	for i, e := range entries {
		if e.Row != "" && strings.HasPrefix(attack, e.Row) {
			return i
		}
	}
	return -1
}

// check checks that the row has mutants, or a reason, and that each mutant can be made.
func (r row) check(root string) error {
	if (len(r.Mutants) == 0) == (r.None == "") {
		return fmt.Errorf("%s: %q: needs either mutants or `none`", mutantFile, r.Row)
	}
	var errs []error
	for _, m := range r.Mutants {
		content, err := os.ReadFile(filepath.Join(root, m.File))
		if err != nil {
			errs = append(errs, err)
		} else if n := strings.Count(string(content), m.Old); m.Old == "" || n != 1 {
			errs = append(errs, fmt.Errorf("%s: %q: %q is in %s %d times; it must be there once",
				mutantFile, r.Row, short(m.Old), m.File, n))
		}
	}
	return errors.Join(errs...)
}

var testName = regexp.MustCompile("`([a-z0-9]+)\\.((?:Test|Fuzz)[A-Za-z0-9]+)`")

// readRows reads the rows of all tables whose last column names tests.
func readRows(root string) (rows []row, err error) {
	text, err := os.ReadFile(filepath.Join(root, modelPage))
	if err != nil {
		return nil, err
	}
	folders, err := testFolders(root)
	if err != nil {
		return nil, err
	}
	isTested := false // the present table has a column of tests
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.TrimSpace(line), " | ")
		switch {
		case !strings.HasPrefix(line, "|"):
			isTested = false
		case strings.Contains(line, "| test |"):
			isTested = true
		case isTested && strings.HasPrefix(line, "| "):
			r := row{attack: strings.TrimPrefix(cells[0], "| ")}
			for _, match := range testName.FindAllStringSubmatch(cells[len(cells)-1], -1) {
				r.tests = append(r.tests, test{folders[match[1]+"."+match[2]], match[2]})
			}
			rows = append(rows, r)
		}
	}
	return rows, nil
}

var testFunction = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)[A-Za-z0-9]+)\(`)

// testFolders returns the folder of each test, by the folder's last element and the test's name.
func testFolders(root string) (map[string]string, error) {
	folders := map[string]string{}
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && strings.HasPrefix(entry.Name(), ".") && name != root {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(name, "_test.go") {
			return nil
		}
		content, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		folder, err := filepath.Rel(root, filepath.Dir(name))
		if err != nil {
			return err
		}
		for _, match := range testFunction.FindAllStringSubmatch(string(content), -1) {
			folders[path.Base(folder)+"."+match[1]] = folder
		}
		return nil
	})
	return folders, err
}
