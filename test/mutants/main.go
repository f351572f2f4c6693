// SPDX-License-Identifier: Apache-2.0

// Command mutants shows that the threat model's tests can fail. For each row of docs/security.md it
// removes the checks that the row describes (mutants.yaml), one after the other, and runs the tests
// that the row names. At least one test must fail each time.
//
//	make mutants ROW="a flood of SYNs"
//
// ROW is the beginning of rows; without it, the command takes all rows. It works in a clone of the
// last commit, so uncommitted changes do not count. Root is needed, as for the tests.
package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, strings.Join(os.Args[1:], " "))
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, beginning string) error {
	rows, err := readModel(".")
	if err != nil {
		return err
	}
	rows = slices.DeleteFunc(rows, func(r row) bool { return !strings.HasPrefix(r.attack, beginning) })
	if len(rows) == 0 {
		return fmt.Errorf("no row of %s begins with %q", modelPage, beginning)
	}
	dir, err := os.MkdirTemp("", "segue-mutants")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	t := tree{dir: dir, passes: map[string]bool{}}
	for _, r := range rows {
		t.tests = append(t.tests, r.tests...)
	}
	if err := t.clone(ctx); err != nil {
		return err
	}
	counts := map[string]int{}
	for _, r := range rows {
		fmt.Println(r.attack)
		if r.None != "" {
			fmt.Println("  no mutant:", r.None)
		}
		for _, m := range r.Mutants {
			result, details := t.try(ctx, r.tests, m)
			if ctx.Err() != nil {
				return errors.New("interrupted")
			}
			fmt.Printf("  %s: %s %s\n", result, m, details)
			counts[result]++
		}
	}
	fmt.Printf("%d killed, %d survived, %d broken\n", counts["killed"], counts["SURVIVED"], counts["BROKEN"])
	if counts["SURVIVED"]+counts["BROKEN"] > 0 {
		return errors.New("not every mutant failed a test that its row names")
	}
	return nil
}

// A tree is a clone of the repository in which mutants are made.
type tree struct {
	dir    string
	tests  []test          // of all rows
	passes map[string]bool // folders whose tests were seen to pass without a mutant
}

// clone clones the last commit, and compiles its BPF programs. The tools of this checkout serve the
// clone too. The clone's index gets the generated files, so that they can be brought back.
func (t tree) clone(ctx context.Context) error {
	here, err := os.Getwd()
	if err != nil {
		return err
	}
	for _, command := range [][]string{
		{"git", "clone", "--quiet", "--shared", here, "."},
		{"ln", "-s", filepath.Join(here, ".tools"), "."},
		{"make", "generate"},
		{"git", "add", "--all", "--force", "."},
	} {
		if _, err := t.command(ctx, command[0], command[1:]...); err != nil {
			return err
		}
	}
	return nil
}

// try makes a mutant, and runs tests. It is BROKEN if it does not compile, or if tests fail without
// it, too.
func (t tree) try(ctx context.Context, tests []test, m mutant) (result, details string) {
	var failed test
	var output string
	err := t.apply(ctx, m)
	if err == nil {
		failed, output = t.firstFailure(ctx, tests)
	}
	_, undone := t.command(ctx, "git", "checkout", "--quiet", "--", ".")
	if err := errors.Join(err, undone); err != nil {
		return "BROKEN", err.Error()
	}
	if output == "" {
		return "SURVIVED", ""
	}
	if strings.Contains(output, "[build failed]") {
		return "BROKEN", output
	}
	if !t.passes[failed.folder] {
		same := slices.DeleteFunc(slices.Clone(t.tests), func(s test) bool { return s.folder != failed.folder })
		if alone, output := t.firstFailure(ctx, same); output != "" {
			return "BROKEN", fmt.Sprintf("%s fails, and %s without a mutant\n%s", failed, alone, output)
		}
		t.passes[failed.folder] = true
	}
	return "killed", "by " + failed.String()
}

// apply changes the mutant's file, and compiles the BPF programs that depend on it.
func (t tree) apply(ctx context.Context, m mutant) error {
	name := filepath.Join(t.dir, m.File)
	before, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	if err := os.WriteFile(name, []byte(strings.Replace(string(before), m.Old, m.New, 1)), 0o644); err != nil {
		return err
	}
	for _, packages := range map[string][]string{
		"bpf/balancer": {"./internal/balancer/..."},
		"bpf/agent":    {"./internal/agent/..."},
		"bpf/net":      {"./internal/balancer/...", "./internal/agent/..."},
	}[filepath.Dir(m.File)] {
		if _, err := t.command(ctx, "go", "generate", packages); err != nil {
			return err
		}
	}
	return nil
}

// firstFailure runs tests until one fails, package by package in the order of their names: the slow
// ones in test/ come last. It returns that test and the output. If no test fails, the output is
// empty. The test has no name if the program of the tests has ended otherwise.
func (t tree) firstFailure(ctx context.Context, tests []test) (failed test, output string) {
	names := map[string][]string{}
	for _, test := range tests {
		names[test.folder] = append(names[test.folder], test.name)
	}
	for _, folder := range slices.Sorted(maps.Keys(names)) {
		output, err := t.command(ctx, "go", "test", "-count=1", "-vet=off", "-failfast", "-timeout=10m",
			"-run=^("+strings.Join(names[folder], "|")+")$", "./"+folder)
		if err == nil {
			continue
		}
		_, after, _ := strings.Cut(output, "--- FAIL: ")
		name, _, _ := strings.Cut(after, " ")
		return test{folder, name}, output
	}
	return test{}, ""
}

// command runs a command in the clone.
func (t tree) command(ctx context.Context, name string, args ...string) (output string, err error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = t.dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out), err
}
