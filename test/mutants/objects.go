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

// An object is the object file of a BPF program, which a //go:generate line compiles. Go embeds it
// in test programs. To compile a test program again for each mutant would take longer than all
// else. So the object's new content replaces the old one in the test program. Zeros at the end give
// both contents the same length.
type object struct {
	folder     string
	line       string   // the //go:generate line
	file       string   // the object file
	isForTests bool     // only tests of the folder use the object
	sources    []string // the files from which the object is compiled
	content    []byte   // the content without a mutant
}

// mostGrowth is the largest number of bytes by which a mutant may lengthen an object.
const mostGrowth = 1 << 16

// testProgram is the name of the test program that runs.
const testProgram = "mutant.test"

var generateLine = regexp.MustCompile(`(?m)^//go:generate go tool bpf2go .*? (\w+) (\S+\.c)(?: -- (.*))?$`)

// findObjects finds the objects of the balancer and the agent: the threat model names no tests that
// use other objects. It also lengthens each object by zeros, so that a longer mutant has room.
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
			if o.isForTests { // bpf2go ends the names of these files with _test
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

// sourcesOf returns the files in bpf/ from which a BPF program is compiled.
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

// pad appends zeros, which the loader does not read, to the file of an object. It returns the
// content, which then has the given length. If the length is 0, pad appends mostGrowth zeros.
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

// compile compiles the test program of each folder without a mutant, unless it did so before. It
// leaves out those in test/: their tests themselves compile the programs that they run.
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

// writeProgram writes a test program with the new contents of the changed objects.
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
