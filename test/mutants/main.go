// SPDX-License-Identifier: Apache-2.0

// Command mutants shows that the tests of the threat model can fail. Each row of
// docs/operate/security.md describes checks and names tests. The command removes these checks, one
// after the other (mutants.yaml), and runs the tests each time. At least one test must fail.
//
//	make mutants ROW="a flood of SYNs"
//	make mutants FROM="forged answers to probes"
//
// The command takes only rows that begin with ROW. It leaves out the rows before the one that
// begins with FROM, so that a run can go on after an interruption. Without both, it takes all rows.
// It works in a clone of the last commit, so uncommitted changes do not count. It needs root, as
// the tests do.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sync/errgroup"
)

func main() {
	from := flag.String("from", "", "the beginning of the first row")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *from, flag.Args())
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

// run tries the mutants of the rows that begin with any of beginnings, in the order of beginnings.
// Every row begins with an empty text, which the Makefile passes if there is no ROW. run leaves out
// all rows before the first one that begins with from. It returns an error unless every mutant is
// killed.
func run(ctx context.Context, from string, beginnings []string) error {
	all, err := readModel(".")
	if err != nil {
		return err
	}
	first := slices.IndexFunc(all, func(r row) bool { return strings.HasPrefix(r.attack, from) })
	if first < 0 {
		return fmt.Errorf("no row of %s begins with %q", modelPage, from)
	}
	var rows []row
	for _, beginning := range beginnings {
		before := len(rows)
		for _, r := range all[first:] {
			if strings.HasPrefix(r.attack, beginning) {
				rows = append(rows, r)
			}
		}
		if before == len(rows) {
			return fmt.Errorf("no row of %s begins with %q", modelPage, beginning)
		}
	}
	dir, err := os.MkdirTemp("", "segue-mutants")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	t := tree{dir: dir, programs: map[string][]byte{}, passes: map[test]bool{}}
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
	dir      string
	objects  []object
	programs map[string][]byte // the test program of each folder, compiled without a mutant
	passes   map[test]bool     // tests that have passed without a mutant
}

// clone clones the last commit, and compiles its BPF programs. The clone uses the tools of this
// checkout. Its index gets the generated files, so that git can restore them after a mutant.
func (t *tree) clone(ctx context.Context) error {
	here, err := os.Getwd()
	if err != nil {
		return err
	}
	for _, command := range [][]string{
		{"git", "clone", "--quiet", "--shared", here, "."},
		{"ln", "-s", filepath.Join(here, ".tools"), "."},
		{"make", "generate"},
	} {
		if _, err := t.command(ctx, "", command[0], command[1:]...); err != nil {
			return err
		}
	}
	if err := t.findObjects(ctx); err != nil {
		return err
	}
	_, err = t.command(ctx, "", "git", "add", "--all", "--force", ".")
	return err
}

// try makes a mutant, and runs the tests of its row until one fails. Then it restores the files.
// The result is "killed" if a test fails, and "SURVIVED" if none does. It is "BROKEN" if the mutant
// cannot be compiled or undone, or if the test that fails also fails without the mutant.
func (t *tree) try(ctx context.Context, tests []test, m mutant) (result, details string) {
	folders := foldersOf(tests, m.File)
	isBPF := strings.HasPrefix(m.File, "bpf/")
	if isBPF { // firstFailure puts the mutant's objects into these test programs
		if err := t.compile(ctx, folders); err != nil {
			return "BROKEN", err.Error()
		}
	}
	changed, err := t.apply(ctx, folders, m)
	var failed test
	var output string
	for _, folder := range folders {
		if err != nil || output != "" {
			break
		}
		failed, output, err = t.firstFailure(ctx, folder, namesIn(tests, folder), isBPF, changed)
	}
	_, undone := t.command(ctx, "", "git", "checkout", "--quiet", "--", ".")
	if err := errors.Join(err, undone); err != nil {
		return "BROKEN", err.Error()
	}
	if output == "" {
		return "SURVIVED", ""
	}
	if strings.Contains(output, "[build failed]") {
		return "BROKEN", output
	}
	if !t.passes[failed] { // find out whether the test passes without the mutant
		names := namesIn(tests, failed.folder)
		if failed.name != "" {
			names = failed.name
		}
		if _, output, err := t.firstFailure(ctx, failed.folder, names, isBPF, nil); err != nil || output != "" {
			return "BROKEN", fmt.Sprintf("%s fails without a mutant, too (%v)\n%s", failed, err, output)
		}
		t.passes[failed] = true
	}
	return "killed", "by " + failed.String()
}

// foldersOf returns the folders of tests. Those that probably notice a change of the file come
// first. The slow ones in test/ come last.
func foldersOf(tests []test, file string) []string {
	rank := func(folder string) int {
		switch {
		case strings.HasPrefix(folder, "test/"):
			return 2
		case folder == filepath.Dir(file), filepath.Base(folder) == filepath.Base(filepath.Dir(file)):
			return 0
		default:
			return 1
		}
	}
	var folders []string
	for _, t := range tests {
		if !slices.Contains(folders, t.folder) {
			folders = append(folders, t.folder)
		}
	}
	slices.SortStableFunc(folders, func(a, b string) int { return rank(a) - rank(b) })
	return folders
}

// namesIn returns a regular expression of the names of the tests that are in a folder.
func namesIn(tests []test, folder string) string {
	var names []string
	for _, t := range tests {
		if t.folder == folder {
			names = append(names, t.name)
		}
	}
	return strings.Join(names, "|")
}

// apply changes the mutant's file. Then it compiles the BPF programs that depend on it, all at the
// same time. It leaves out programs for tests of other folders. It returns the objects that have
// changed.
func (t *tree) apply(ctx context.Context, folders []string, m mutant) (changed []object, err error) {
	name := filepath.Join(t.dir, m.File)
	before, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(name, []byte(strings.Replace(string(before), m.Old, m.New, 1)), 0o644); err != nil {
		return nil, err
	}
	var group errgroup.Group
	for _, o := range t.objects {
		if slices.Contains(o.sources, m.File) && (!o.isForTests || slices.Contains(folders, o.folder)) {
			changed = append(changed, o)
			group.Go(func() error { return t.generate(ctx, o) })
		}
	}
	return changed, group.Wait()
}

// firstFailure runs the tests of a folder with these names, until one fails. It returns that test
// and the output. If no test fails, the output is empty. If the test program has failed outside of
// a test, the returned test has no name. isBPF tells that only the BPF programs in changed differ
// from the last commit. If the folder's test program is compiled already, firstFailure then puts
// these programs into it. Otherwise Go compiles the tests.
func (t *tree) firstFailure(ctx context.Context, folder, names string, isBPF bool, changed []object) (
	failed test, output string, err error,
) {
	names = "^(" + names + ")$"
	var failure error
	if program := t.programs[folder]; program != nil && isBPF {
		if err := t.writeProgram(program, changed); err != nil {
			return test{}, "", err
		}
		output, failure = t.command(ctx, folder, filepath.Join(t.dir, testProgram),
			"-test.failfast", "-test.timeout=10m", "-test.run="+names)
	} else {
		output, failure = t.command(ctx, "", "go", "test", "-count=1", "-vet=off", "-failfast", "-timeout=10m",
			"-run="+names, "./"+folder)
	}
	if failure == nil {
		return test{}, "", nil
	}
	_, after, _ := strings.Cut(output, "--- FAIL: ")
	name, _, _ := strings.Cut(after, " ")
	return test{folder, name}, output + failure.Error(), nil
}

// command runs a command in a folder of the clone.
func (t *tree) command(ctx context.Context, folder, name string, args ...string) (output string, err error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = filepath.Join(t.dir, folder)
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out), err
}
