// SPDX-License-Identifier: Apache-2.0

// Command notices writes the file "copyright" of a Debian package: the content of the file HEAD,
// and then the licences of all Go modules that are part of the program, and of the Go project.
//
//	notices HEAD PACKAGE >copyright
//
// It runs "go list" in the current directory. So the licences, which are in the module cache, are
// those of the versions that are built. If the command does not know the licence of a module, it
// fails, so that a person looks at it. The format is
// https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: notices HEAD PACKAGE >copyright")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "notices:", err)
		os.Exit(1)
	}
}

// run writes the file head, and then the licences of the package pkg, to standard output.
func run(head, pkg string) error {
	text, err := os.ReadFile(head)
	if err != nil {
		return err
	}
	folders, err := foldersOf(pkg)
	if err != nil {
		return err
	}
	works, err := readWorks(folders)
	if err != nil {
		return err
	}
	out := bytes.NewBuffer(text)
	for _, w := range works {
		w.write(out)
	}
	_, err = os.Stdout.Write(out.Bytes())
	return err
}

// folder is a folder with a licence file: that of a Go module which is part of the program, or a
// folder in it that has a licence of its own.
type folder struct {
	name string // PATH@VERSION
	dir  string
}

// foldersOf returns the folders of all modules on which a package depends, sorted by name. They
// include the folder of the Go project, because its standard library and runtime are part of each
// program.
func foldersOf(pkg string) ([]folder, error) {
	root, err := golang("env", "GOROOT", "GOVERSION")
	if err != nil {
		return nil, err
	}
	goroot, version, _ := strings.Cut(strings.TrimSpace(string(root)), "\n")
	folders := []folder{{"go.dev@" + strings.TrimPrefix(version, "go"), goroot}}
	out, err := golang("list", "-deps", "-json=Dir,Module", pkg)
	if err != nil {
		return nil, err
	}
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			Dir    string
			Module *struct {
				Path, Version, Dir string
				Main               bool
			}
		}
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		if p.Module == nil || p.Module.Main {
			continue
		}
		// Look at the package's folder, and at those above it up to the folder of its module.
		for dir := p.Dir; len(dir) >= len(p.Module.Dir); dir = filepath.Dir(dir) {
			below := filepath.ToSlash(strings.TrimPrefix(dir, p.Module.Dir))
			f := folder{p.Module.Path + below + "@" + p.Module.Version, dir}
			if !slices.Contains(folders, f) && (below == "" || hasLicense(dir)) {
				folders = append(folders, f)
			}
		}
	}
	slices.SortFunc(folders, func(a, b folder) int { return strings.Compare(a.name, b.name) })
	return folders, nil
}

// golang runs the Go command, and returns what it prints.
func golang(args ...string) ([]byte, error) {
	cmd := exec.Command("go", args...)
	cmd.Stderr = os.Stderr
	return cmd.Output()
}

// hasLicense tells whether a folder has a licence file.
func hasLicense(dir string) bool {
	entries, _ := os.ReadDir(dir)
	return slices.ContainsFunc(entries, func(e os.DirEntry) bool { return licenseFile.MatchString(e.Name()) })
}

// work is a licence, with all folders that have the same licence file.
type work struct {
	folders    []string // the names of the folders
	copyrights []string
	license    string // the short name of the licence
	text       string
	notice     string // content of the file NOTICE, which the Apache licence requires to be passed on
}

var (
	licenseFile = regexp.MustCompile(`(?i)^(licen[sc]e|copying)(\.(md|txt))?$`)
	noticeFile  = regexp.MustCompile(`(?i)^notice(\.(md|txt))?$`)
	copyright   = regexp.MustCompile(`(?i)^\W*copyright\s+(\(c\)|©|\d{4}|the )`)
)

// readWorks reads the licences of folders. Folders with the same licence file are in one work.
func readWorks(folders []folder) (works []*work, err error) {
	for _, f := range folders {
		text, err := readAll(f.dir, licenseFile)
		if err != nil {
			return nil, err
		}
		notice, err := readAll(f.dir, noticeFile)
		if err != nil {
			return nil, err
		}
		license, err := name(text)
		if err != nil {
			return nil, fmt.Errorf("%s in %s: %w", f.name, f.dir, err)
		}
		same := slices.IndexFunc(works, func(w *work) bool { return w.text == text && w.notice == notice })
		if same >= 0 {
			works[same].folders = append(works[same].folders, f.name)
			continue
		}
		works = append(works, &work{folders: []string{f.name}, copyrights: holders(text + "\n" + notice), license: license,
			text: text, notice: notice})
	}
	return works, nil
}

// readAll returns the contents of all files of a directory whose names match names.
func readAll(dir string, names *regexp.Regexp) (text string, err error) {
	entries, err := os.ReadDir(dir)
	for _, entry := range entries {
		if err == nil && names.MatchString(entry.Name()) {
			var content []byte
			content, err = os.ReadFile(filepath.Join(dir, entry.Name()))
			text += strings.ReplaceAll(string(content), "\r", "")
		}
	}
	return text, err
}

// holders returns the lines of a text that name the holders of the copyright.
func holders(text string) (lines []string) {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		isExample := strings.ContainsAny(line, "[{") // the appendix of the Apache licence has one
		if copyright.MatchString(line) && !isExample && !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	if len(lines) == 0 {
		lines = []string{"the authors"}
	}
	return lines
}

// licenses are the licences that this command knows: the short name in the format, and a phrase
// that only this licence has, without its commas. A text can have several licences.
var licenses = []struct{ name, phrase string }{
	{"Apache-2.0", "Apache License Version 2.0"},
	{"MPL-2.0", "Mozilla Public License Version 2.0"},
	{"BSD-3-clause", "endorse or promote products derived from"},
	{"BSD-2-clause", "Redistributions in binary form must reproduce the above copyright notice"},
	{"Expat", "Permission is hereby granted free of charge to any person obtaining a copy"},
	{"ISC", "Permission to use copy modify and distribute this software for any purpose"},
	{"CC0-1.0", "CC0 1.0 Universal"},
}

// name returns the short names of the licences in a text.
func name(text string) (string, error) {
	// Copies of a licence differ in commas, line breaks, capitals and signs of quotation.
	words := strings.ToLower(strings.Join(strings.Fields(strings.NewReplacer(",", "", ">", "").Replace(text)), " "))
	var names []string
	for _, l := range licenses {
		if !strings.Contains(words, strings.ToLower(l.phrase)) {
			continue
		}
		if l.name == "BSD-2-clause" && slices.Contains(names, "BSD-3-clause") {
			continue // the text of the three-clause licence also has this phrase
		}
		names = append(names, l.name)
	}
	if len(names) == 0 {
		return "", errors.New("no licence that this command knows")
	}
	return strings.Join(names, " and "), nil
}

// write writes the paragraph of a licence.
func (w *work) write(out *bytes.Buffer) {
	fmt.Fprintf(out, "\nFiles: %s\n", strings.Join(w.folders, "\n "))
	fmt.Fprintf(out, "Copyright: %s\n", strings.Join(w.copyrights, "\n "))
	fmt.Fprintf(out, "License: %s\n%s", w.license, indented(w.text))
	if w.notice != "" {
		fmt.Fprintf(out, "Comment: The file NOTICE:\n%s", indented(w.notice))
	}
}

// indented returns a text as the format wants it: each line begins with a space, and empty lines
// have a dot.
func indented(text string) string {
	var b strings.Builder
	for line := range strings.Lines(strings.Trim(text, "\n") + "\n") {
		line = strings.TrimRight(line, " \t\n\f")
		if line == "" {
			line = "."
		}
		b.WriteString(" " + line + "\n")
	}
	return b.String()
}
