// SPDX-License-Identifier: Apache-2.0

// Command spdx finds source files without a licence line.
//
//	go run ./test/spdx       # lists these files; the exit code is 1 if there are any
//	go run ./test/spdx -w    # adds the licence line to these files
//
// Spdx searches the current folder, which must be the root of the project. One of the first three
// lines of each source file must be an SPDX line, such as `SPDX-License-Identifier: Apache-2.0`
// (https://spdx.dev/ids). Data and generated files need no such line.
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
	// cSources is the licence of all C files. The LICENSE variable of each BPF program tells the
	// kernel the same. A program under either licence may include loadshm/segue_load.h.
	cSources = "GPL-2.0-only OR BSD-2-Clause"
)

// comments maps the ending of a file's name, or the whole name, to the marks that begin and end a
// comment in the file.
var comments = map[string][2]string{
	".go": {"// ", ""}, ".ts": {"// ", ""}, ".js": {"// ", ""}, ".proto": {"// ", ""},
	".c": {"/* ", " */"}, ".h": {"/* ", " */"}, ".css": {"/* ", " */"},
	".sh": {"# ", ""}, ".py": {"# ", ""}, ".service": {"# ", ""}, ".conf": {"# ", ""},
	".yaml": {"# ", ""}, ".yml": {"# ", ""}, "Makefile": {"# ", ""}, "Dockerfile": {"# ", ""},
	".html": {"<!-- ", " -->"},

	".ci/run":             {"# ", ""},
	"lab/templates/parts": {"{{/* ", " */}}"},
}

// notSource lists the folders that contain tools, build results or test data, and results those at
// the root that commands make.
var (
	notSource = []string{".git", ".tools", "bin", "testdata"}
	results   = []string{"figures", "testbed"}
)

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

// problem is a file without the licence line that it must have.
type problem struct {
	file  string
	found string // the licence that the file names, or empty if there is none
}

func (p problem) String() string {
	if p.found == "" {
		return fmt.Sprintf("%s: no line %q among the first three", p.file, tag+licenceOf(p.file))
	}
	return fmt.Sprintf("%s: licence %q, must be %q", p.file, p.found, licenceOf(p.file))
}

// check returns the source files without the licence line that they must have.
func check(root fs.FS) (problems []problem, err error) {
	err = fs.WalkDir(root, ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (slices.Contains(notSource, entry.Name()) || slices.Contains(results, name)):
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

// commentOf returns the comment marks of a source file. For other files it returns an empty value.
func commentOf(name string) [2]string {
	for _, key := range []string{name, path.Base(name), path.Ext(name)} {
		if c, ok := comments[key]; ok {
			return c
		}
	}
	return [2]string{}
}

// licenceOf returns the licence that a file must have.
func licenceOf(name string) string {
	if ext := path.Ext(name); ext == ".c" || ext == ".h" {
		return cSources
	}
	return project
}

// declared returns the licence that a file names.
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

// mend writes the licence line into a file.
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

// insert makes the licence line the first line. If the first line is a shebang, the licence line
// becomes the second. After a line comment, insert adds an empty line, so that the licence does not
// become part of the comment of a package.
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
