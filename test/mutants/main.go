// SPDX-License-Identifier: Apache-2.0

// Command mutants shows that the threat model's tests can fail. For each row of docs/security.md it
// removes the check that the row describes (mutants.yaml), and runs the tests that the row names. At
// least one of them must fail.
//
//	make mutants ROW="a flood of SYNs"
//
// Without ROW it takes all rows. It works in a clone of the last commit, so uncommitted changes do not
// count. Root is needed, as for the tests.
package main

import (
	"context"
	"errors"
	"flag"
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
	row := flag.String("row", "", "only rows whose attack begins so")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *row)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, prefix string) error {
	rows, err := readModel(".", prefix)
	if err != nil {
		return err
	}
	if len(rows) == 0 {
		return fmt.Errorf("-row %q: no row of %s begins so", prefix, modelPage)
	}
	tree, err := cloneTree(ctx)
	if err != nil {
		return err
	}
	defer os.RemoveAll(tree.dir)
	var total tally
	for _, r := range rows {
		total.add(tree.try(ctx, r))
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
	}
	fmt.Println(total)
	if total.survived+total.broken > 0 {
		return errors.New("not every mutant failed a test that its row names")
	}
	return nil
}

// A tally counts mutants by their fate.
type tally struct {
	killed   int
	survived int // all tests of the row passed
	broken   int // it did not compile, or a test of the row fails without a mutant
	without  int // rows without a mutant
}

func (t *tally) add(u tally) {
	t.killed += u.killed
	t.survived += u.survived
	t.broken += u.broken
	t.without += u.without
}

func (t tally) String() string {
	return fmt.Sprintf("%d mutants failed a test, %d survived, %d are broken; %d rows have none",
		t.killed, t.survived, t.broken, t.without)
}

// A tree is a clone of the repository in which mutants are made.
type tree struct{ dir string }

// cloneTree clones the last commit, and compiles its BPF programs. The tools of this checkout serve
// the clone too.
func cloneTree(ctx context.Context) (tree, error) {
	dir, err := os.MkdirTemp("", "segue-mutants")
	if err != nil {
		return tree{}, err
	}
	t := tree{dir}
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
	if err != nil {
		os.RemoveAll(dir)
		return tree{}, err
	}
	return t, nil
}

// try makes each mutant of a row, and runs the row's tests.
func (t tree) try(ctx context.Context, r row) (result tally) {
	fmt.Printf("%s\n", r.attack)
	if r.None != "" {
		fmt.Printf("  no mutant: %s\n", r.None)
		return tally{without: 1}
	}
	if test, out := t.firstFailure(ctx, r.tests); test != "" {
		fmt.Printf("  BROKEN: %s fails without a mutant\n%s\n", test, out)
		return tally{broken: len(r.Mutants)}
	}
	for _, m := range r.Mutants {
		restore, err := t.apply(ctx, m)
		if err != nil {
			fmt.Printf("  BROKEN: %s: %v\n", m, err)
			result.broken++
		} else if test, out := t.firstFailure(ctx, r.tests); test == "" {
			fmt.Printf("  SURVIVED: %s\n", m)
			result.survived++
		} else if strings.Contains(out, "[build failed]") {
			fmt.Printf("  BROKEN: %s\n%s\n", m, out)
			result.broken++
		} else {
			fmt.Printf("  %s fails with %s\n", test, m)
			result.killed++
		}
		if err := restore(); err != nil {
			fmt.Printf("  BROKEN: restore %s: %v\n", m.File, err)
			result.broken++
		}
	}
	return result
}

// apply changes the mutant's file, and compiles what depends on it. restore undoes that.
func (t tree) apply(ctx context.Context, m mutant) (restore func() error, err error) {
	name := filepath.Join(t.dir, m.File)
	before, err := os.ReadFile(name)
	if err != nil {
		return func() error { return nil }, err
	}
	restore = func() error {
		return errors.Join(os.WriteFile(name, before, 0o644), t.generate(ctx, m.File))
	}
	if err := os.WriteFile(name, []byte(strings.Replace(string(before), m.Old, m.New, 1)), 0o644); err != nil {
		return restore, err
	}
	return restore, t.generate(ctx, m.File)
}

// generate compiles the BPF programs that depend on a file of C.
func (t tree) generate(ctx context.Context, file string) error {
	packages, compiled := map[string][]string{
		"bpf/balancer": {"./internal/balancer/..."},
		"bpf/agent":    {"./internal/agent/..."},
		"bpf/net":      {"./internal/balancer/...", "./internal/agent/..."},
	}[filepath.Dir(file)]
	if !compiled {
		return nil
	}
	return command(ctx, t.dir, "go", append([]string{"generate"}, packages...)...)
}

// firstFailure runs tests, package by package and the quickest packages first, until one fails. It
// returns the names of the tests of that package and their output, or two empty strings.
func (t tree) firstFailure(ctx context.Context, tests []test) (failed, output string) {
	byFolder := map[string][]string{}
	for _, test := range tests {
		byFolder[test.folder] = append(byFolder[test.folder], test.name)
	}
	folders := slices.SortedFunc(maps.Keys(byFolder), func(a, b string) int { return cost(a) - cost(b) })
	for _, folder := range folders {
		names := "^(" + strings.Join(byFolder[folder], "|") + ")$"
		cmd := exec.CommandContext(ctx, "go", "test", "-count=1", "-vet=off", "-failfast", "-timeout=10m",
			"-run="+names, "./"+folder)
		cmd.Dir = t.dir
		if out, err := cmd.CombinedOutput(); err != nil {
			return failedTest(string(out), folder), string(out)
		}
	}
	return "", ""
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

// failedTest returns the name of the first test that failed, in the output of `go test`.
func failedTest(output, folder string) string {
	for line := range strings.Lines(output) {
		if name, found := strings.CutPrefix(line, "--- FAIL: "); found {
			return filepath.Base(folder) + "." + strings.Fields(name)[0]
		}
	}
	return folder
}

func command(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}
