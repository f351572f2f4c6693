// SPDX-License-Identifier: Apache-2.0

// Command spdx finds source files that do not say their licence.
//
//	go run ./test/spdx       # lists them; the exit code is 1 if there are any
//	go run ./test/spdx -w    # gives those without a licence theirs
//
// It looks at the files below the current folder, the root of the project. Each must have an SPDX line
// such as `SPDX-License-Identifier: Apache-2.0` (https://spdx.dev/ids) among its first three. Data
// and generated files need none.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
)

const (
	tag     = "SPDX-License-Identifier: "
	project = "Apache-2.0"
	// cSources is the licence of all C. LICENSE in the BPF programs tells the kernel the same, and a
	// program of either licence may include loadshm/segue_load.h.
	cSources = "GPL-2.0-only OR BSD-2-Clause"
)

// comments are how a source file's comments begin and end, by the ending of its name, or all of it.
var comments = map[string][2]string{
	".go": {"// ", ""}, ".ts": {"// ", ""}, ".js": {"// ", ""}, ".proto": {"// ", ""},
	".c": {"/* ", " */"}, ".h": {"/* ", " */"}, ".css": {"/* ", " */"},
	".sh": {"# ", ""}, ".py": {"# ", ""}, ".service": {"# ", ""}, ".conf": {"# ", ""},
	".yaml": {"# ", ""}, ".yml": {"# ", ""}, "Makefile": {"# ", ""}, "Dockerfile": {"# ", ""},
	".html": {"<!-- ", " -->"},

	".ci/run":                      {"# ", ""},
	"internal/lab/templates/parts": {"{{/* ", " */}}"},
}

// notSource are folders of tools, of what was built, and of tests' data.
var notSource = []string{".git", ".tools", "bin", "figures", "testdata"}

var generated = regexp.MustCompile(`^// Code generated .* DO NOT EDIT\.\n`)

func main() {
	write := flag.Bool("w", false, "give files without a licence theirs")
	flag.Parse()
	if err := run(*write); err != nil {
		fmt.Fprintln(os.Stderr, "spdx:", err)
		os.Exit(1)
	}
}

func run(write bool) error {
	problems, err := check(os.DirFS("."))
	if err != nil {
		return err
	}
	left := 0
	for _, p := range problems {
		if write && p.found == "" {
			if err := mend(p.file); err != nil {
				return err
			}
			continue
		}
		fmt.Println(p)
		left++
	}
	if left > 0 {
		return fmt.Errorf("%d files must say their licence", left)
	}
	return nil
}

// problem is a file that does not say its licence.
type problem struct {
	file  string
	found string // another licence, or nothing
}

func (p problem) String() string {
	if p.found == "" {
		return fmt.Sprintf("%s: no line %q among the first three", p.file, tag+licenceOf(p.file))
	}
	return fmt.Sprintf("%s: licence %q, must be %q", p.file, p.found, licenceOf(p.file))
}

// check returns the source files that do not say their licence.
func check(root fs.FS) (problems []problem, err error) {
	err = fs.WalkDir(root, ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && slices.Contains(notSource, entry.Name()):
			return fs.SkipDir
		case !entry.Type().IsRegular() || commentOf(name) == [2]string{}:
			return nil
		}
		text, err := fs.ReadFile(root, name)
		if err != nil {
			return err
		}
		if found := declared(text); found != licenceOf(name) && !generated.Match(text) {
			problems = append(problems, problem{name, found})
		}
		return nil
	})
	return problems, err
}

// commentOf is empty for files that are not source.
func commentOf(name string) [2]string {
	for _, key := range []string{name, path.Base(name), path.Ext(name)} {
		if c, ok := comments[key]; ok {
			return c
		}
	}
	return [2]string{}
}

// licenceOf is the licence that a file must have.
func licenceOf(name string) string {
	if ext := path.Ext(name); ext == ".c" || ext == ".h" {
		return cSources
	}
	return project
}

// declared is the licence that a file has.
func declared(text []byte) string {
	lines := bytes.SplitN(text, []byte("\n"), 4)
	for _, line := range lines[:min(3, len(lines))] {
		if _, after, ok := strings.Cut(string(line), tag); ok {
			after, _, _ = strings.Cut(after, "*/")
			after, _, _ = strings.Cut(after, "-->")
			return strings.TrimSpace(after)
		}
	}
	return ""
}

// mend writes the licence into a file.
func mend(name string) error {
	text, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	info, err := os.Stat(name)
	if err != nil {
		return err
	}
	return os.WriteFile(name, insert(name, text), info.Mode())
}

// insert puts the line first, or second where the first says what runs the file. A comment that ends
// with its line is kept apart from what follows, which may be the comment of a package.
func insert(name string, text []byte) []byte {
	var first []byte
	if bytes.HasPrefix(text, []byte("#!")) {
		end := bytes.IndexByte(text, '\n') + 1
		first, text = text[:end:end], text[end:]
	}
	comment := commentOf(name)
	line := comment[0] + tag + licenceOf(name) + comment[1] + "\n"
	if comment[1] == "" {
		line += "\n"
	}
	return slices.Concat(first, []byte(line), text)
}
