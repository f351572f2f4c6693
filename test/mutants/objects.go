// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// An object is a BPF program that a //go:generate line compiles. A program of tests includes it. To
// compile that program again for each mutant would take longer than all else, so an object's new
// content replaces the old one in the program. Zeros at the end give both the same length.
type object struct {
	folder     string
	line       string   // the //go:generate line
	file       string   // what the line writes
	isForTests bool     // only tests of the folder use it
	sources    []string // the files that it is compiled from
	content    []byte   // without a mutant
}

// mostGrowth is how much longer than the original an object with a mutant may be.
const mostGrowth = 1 << 16

// testProgram is the program of tests that runs.
const testProgram = "mutant.test"

var generateLine = regexp.MustCompile(`(?m)^//go:generate go tool bpf2go .*? (\w+) (\S+\.c)(?: -- (.*))?$`)

// findObjects finds the objects of balancer and agent: no row names tests of other ones.
func (t *tree) findObjects(ctx context.Context) error {
	var files []string
	for _, folder := range []string{"internal/agent", "internal/balancer", "internal/balancer/dataplane"} {
		found, err := filepath.Glob(filepath.Join(t.dir, folder, "*.go"))
		if err != nil {
			return err
		}
		files = append(files, found...)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		for _, match := range generateLine.FindAllStringSubmatch(string(text), -1) {
			o := object{line: match[0], isForTests: strings.HasSuffix(file, "_test.go")}
			if o.folder, err = filepath.Rel(t.dir, filepath.Dir(file)); err != nil {
				return err
			}
			o.file = filepath.Join(o.folder, strings.ToLower(match[1])+"_bpfel.o")
			if o.isForTests {
				o.file = strings.TrimSuffix(o.file, ".o") + "_test.o"
			}
			if o.sources, err = t.sourcesOf(ctx, o.folder, match[2], match[3]); err != nil {
				return err
			}
			if o.content, err = t.pad(o, 0); err != nil {
				return err
			}
			t.objects = append(t.objects, o)
		}
	}
	return nil
}

// sourcesOf returns the files of bpf/ that a BPF program is compiled from.
func (t *tree) sourcesOf(ctx context.Context, folder, source, flags string) (files []string, err error) {
	args := strings.Fields("-target bpfel -MM " + source + " " + flags + " " + os.Getenv("BPF2GO_CFLAGS"))
	output, err := t.command(ctx, folder, os.Getenv("BPF2GO_CC"), args...)
	for _, word := range strings.Fields(output) {
		if file := filepath.Join(folder, word); strings.HasPrefix(file, "bpf/") {
			files = append(files, file)
		}
	}
	return files, err
}

// pad lengthens the file of an object with zeros, which the loader does not read, and returns its
// content. Length 0 leaves room for growth.
func (t *tree) pad(o object, length int) ([]byte, error) {
	name := filepath.Join(t.dir, o.file)
	content, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	if length == 0 {
		length = len(content) + mostGrowth
	}
	if len(content) > length {
		return nil, fmt.Errorf("%s has %d bytes, and there is room for %d", o.file, len(content), length)
	}
	content = append(content, make([]byte, length-len(content))...)
	return content, os.WriteFile(name, content, 0o644)
}

// generate compiles an object.
func (t *tree) generate(ctx context.Context, o object) error {
	_, err := t.command(ctx, "", "go", "generate", "-run", "^"+regexp.QuoteMeta(o.line)+"$", "./"+o.folder)
	return err
}

// compile compiles the tests of folders once, without a mutant. Tests in test/ compile the programs
// that they run themselves.
func (t *tree) compile(ctx context.Context, folders []string) error {
	for _, folder := range folders {
		if t.programs[folder] != nil || strings.HasPrefix(folder, "test/") {
			continue
		}
		_, err := t.command(ctx, "", "go", "test", "-c", "-vet=off", "-o", testProgram, "./"+folder)
		if err != nil {
			return err
		}
		if t.programs[folder], err = os.ReadFile(filepath.Join(t.dir, testProgram)); err != nil {
			return err
		}
	}
	return nil
}

// writeProgram writes a program of tests with the new content of objects.
func (t *tree) writeProgram(program []byte, changed []object) error {
	program = bytes.Clone(program)
	for _, o := range changed {
		content, err := t.pad(o, len(o.content))
		if err != nil {
			return err
		}
		if at := bytes.Index(program, o.content); at >= 0 { // not every program includes every object
			copy(program[at:], content)
		}
	}
	return os.WriteFile(filepath.Join(t.dir, testProgram), program, 0o755)
}
