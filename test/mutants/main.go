// SPDX-License-Identifier: Apache-2.0

// Command mutants shows that the threat model's tests can fail. For each row of docs/security.md it
// removes the checks that the row describes (mutants.yaml), one after the other, and runs the tests
// that the row names. At least one test must fail each time.
//
//	make mutants ROW="a flood of SYNs"
//
// Arguments are the beginnings of rows; without one, the command takes all rows. It works in a clone
// of the last commit, so uncommitted changes do not count. Root is needed, as for the tests.
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
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, beginnings []string) error {
	rows, err := readModel(".")
	if err == nil {
		rows, err = choose(rows, beginnings)
	}
	if err != nil {
		return err
	}
	tree, err := cloneTree(ctx)
	if err != nil {
		return err
	}
	defer os.RemoveAll(tree.dir)
	for _, r := range rows {
		tree.tests = append(tree.tests, r.tests...)
	}
	counts := map[fate]int{}
	for _, r := range rows {
		fmt.Println(r.attack)
		if r.None != "" {
			fmt.Println("  no mutant:", r.None)
		}
		for _, m := range r.Mutants {
			fate, details := tree.try(ctx, r.tests, m)
			if ctx.Err() != nil {
				return errors.New("interrupted")
			}
			fmt.Printf("  %s: %s %s\n", fate, m, details)
			counts[fate]++
		}
	}
	fmt.Printf("%d mutants failed a test, %d survived, %d are broken\n",
		counts[killed], counts[survived], counts[broken])
	if counts[survived]+counts[broken] > 0 {
		return errors.New("not every mutant failed a test that its row names")
	}
	return nil
}

// What happens to a mutant.
type fate string

const (
	killed   fate = "killed"
	survived fate = "SURVIVED" // all tests of the row pass
	broken   fate = "BROKEN"   // it does not compile, or tests of that package fail without it
)

// A tree is a clone of the repository in which mutants are made.
type tree struct {
	dir    string
	tests  []test          // of all rows
	passes map[string]bool // folders whose tests were seen to pass without a mutant
}

// cloneTree clones the last commit, and compiles its BPF programs. The tools of this checkout serve
// the clone too.
func cloneTree(ctx context.Context) (tree, error) {
	dir, err := os.MkdirTemp("", "segue-mutants")
	if err != nil {
		return tree{}, err
	}
	t := tree{dir: dir, passes: map[string]bool{}}
	tools, err := filepath.Abs(".tools")
	if err == nil {
		err = command(ctx, ".", "git", "clone", "--quiet", "--shared", ".", dir)
	}
	if err == nil {
		err = os.Symlink(tools, filepath.Join(dir, ".tools"))
	}
	if err == nil {
		err = command(ctx, dir, "make", "generate")
	}
	if err == nil {
		// The index has the generated files too, so that restore brings them back.
		err = command(ctx, dir, "git", "add", "--all", "--force", ".")
	}
	if err != nil {
		os.RemoveAll(dir)
	}
	return t, err
}

// try makes a mutant, and runs tests. The details say which test has failed, or why the mutant is
// broken.
func (t tree) try(ctx context.Context, tests []test, m mutant) (result fate, details string) {
	err := t.apply(ctx, m)
	var failed test
	var output string
	if err == nil {
		failed, output = t.firstFailure(ctx, tests)
	}
	err = errors.Join(err, t.restore(ctx))
	switch {
	case err != nil:
		return broken, err.Error()
	case output == "":
		return survived, ""
	case strings.Contains(output, "[build failed]"):
		return broken, output
	}
	if !t.passes[failed.folder] {
		same := slices.DeleteFunc(slices.Clone(t.tests), func(s test) bool { return s.folder != failed.folder })
		if alone, output := t.firstFailure(ctx, same); output != "" {
			return broken, fmt.Sprintf("by %s, and %s fails without a mutant\n%s", failed, alone, output)
		}
		t.passes[failed.folder] = true
	}
	return killed, fmt.Sprintf("by %s", failed)
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
	packages := map[string][]string{
		"bpf/balancer": {"./internal/balancer/..."},
		"bpf/agent":    {"./internal/agent/..."},
		"bpf/net":      {"./internal/balancer/...", "./internal/agent/..."},
	}[filepath.Dir(m.File)]
	if packages == nil {
		return nil
	}
	return command(ctx, t.dir, "go", append([]string{"generate"}, packages...)...)
}

// restore undoes apply.
func (t tree) restore(ctx context.Context) error {
	return command(ctx, t.dir, "git", "checkout", "--quiet", "--", ".")
}

// firstFailure runs tests, package by package and the quickest packages first, until one fails. It
// returns that test and the output. If no test fails, the output is empty.
func (t tree) firstFailure(ctx context.Context, tests []test) (failed test, output string) {
	names := map[string][]string{}
	for _, test := range tests {
		names[test.folder] = append(names[test.folder], test.name)
	}
	folders := slices.SortedFunc(maps.Keys(names), func(a, b string) int { return cost(a) - cost(b) })
	for _, folder := range folders {
		pattern := "^(" + strings.Join(names[folder], "|") + ")$"
		cmd := exec.CommandContext(ctx, "go", "test", "-count=1", "-vet=off", "-failfast", "-timeout=10m",
			"-run="+pattern, "./"+folder)
		cmd.Dir = t.dir
		if out, err := cmd.CombinedOutput(); err != nil {
			return test{folder, failedTest(string(out))}, string(out)
		}
	}
	return test{}, ""
}

// cost orders folders by how long their tests take.
func cost(folder string) int {
	switch {
	case folder == "test/packages":
		return 3
	case strings.HasPrefix(folder, "test/"):
		return 2
	case folder == "internal/balancer", folder == "internal/agent":
		return 1
	default:
		return 0
	}
}

// failedTest returns the name of the first test that failed, by the output of `go test`. It is empty
// if the program of the tests has ended otherwise.
func failedTest(output string) string {
	for line := range strings.Lines(output) {
		if rest, found := strings.CutPrefix(line, "--- FAIL: "); found {
			return strings.Fields(rest)[0]
		}
	}
	return ""
}

func command(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}
