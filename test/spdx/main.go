// SPDX-License-Identifier: Apache-2.0

// Command spdx finds source files without the right licence line.
//
//	go run ./test/spdx       # lists these files; the exit code is 1 if there are any
//	go run ./test/spdx -w    # adds the licence line to files that have none
//
// It searches the current folder, which must be the root of the project. One of the first three
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
	// cSources is the licence of all C files. The variable LICENSE of each BPF program tells the
	// kernel the same. loadshm/segue_load.h has this licence, too, so programs under either may
	// include it.
	cSources = "GPL-2.0-only OR BSD-2-Clause"
)

// comments has the marks that begin and end a comment in a source file. A key is a file's path, its
// name, or the ending of its name. Files without a key are not source files.
var comments = map[string][2]string{
	".go": {"// ", ""}, ".ts": {"// ", ""}, ".js": {"// ", ""}, ".proto": {"// ", ""},
	".c": {"/* ", " */"}, ".h": {"/* ", " */"}, ".css": {"/* ", " */"}, ".p4": {"/* ", " */"},
	".sh": {"# ", ""}, ".py": {"# ", ""}, ".service": {"# ", ""}, ".conf": {"# ", ""},
	".yaml": {"# ", ""}, ".yml": {"# ", ""}, "Makefile": {"# ", ""}, "Dockerfile": {"# ", ""},
	".html": {"<!-- ", " -->"},

	".ci/run":             {"# ", ""},
	"lab/templates/parts": {"{{/* ", " */}}"},
}

var (
	// notSource are names of folders that contain tools, build results or test data.
	notSource = []string{".git", ".tools", "bin", "testdata"}
	// results are folders at the root in which commands put their results.
	results = []string{"figures", "testbed"}
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

// run prints the files without the right licence line. With write, it first adds the line to those
// that have none.
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

// commentOf returns the comment marks of a source file. They are empty for other files.
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

// declared returns the licence that a file names in its first three lines, or an empty string.
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

// insert returns the text of a file with the licence line. It is the first line, or the second one
// after a shebang. If comments end with the line, an empty line follows, so that the licence does
// not become part of the comment of a package.
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
