// Command run runs the project's tests by tier and closes with one line of counts.
//
//	make test TIER="[tier...]"
//
// Without arguments it runs every tier. A tier in which no test ran has failed: on a machine that
// lacks what its tests need, all being skipped must not look like success.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

const module = "github.com/segue-lb/segue"

// A tier is a set of packages and how `go test` runs them. Tiers of the same name are one to the
// user.
type tier struct {
	name     string
	packages []string // below the module; none: all that no other tier has
	flags    []string
	env      []string
}

var tiers = []tier{
	{
		name:  "unit",
		flags: []string{"-race", "-timeout=10m"},
		// The race detector is linked through cgo; the compiler of the BPF programs serves.
		env: []string{"CGO_ENABLED=1", "CC=clang"},
	},
	{
		name:     "unit", // pure computation, in which the detector would find nothing, slowly
		packages: []string{"internal/tables"},
	},
	{
		name:     "packet", // BPF programs in the kernel
		packages: []string{"internal/balancer", "internal/agent"},
		flags:    []string{"-count=1", "-timeout=10m"},
	},
	{
		name:     "e2e", // networks of namespaces
		packages: []string{"internal/nexthop", "internal/loadgen", "internal/bench", "internal/lab", "test/e2e"},
		// One package at a time: they share the machine.
		flags: []string{"-count=1", "-timeout=15m", "-p=1"},
	},
}

// choosePackages picks a tier's packages out of all of the module's.
func (t tier) choosePackages(all []string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(pkg string) bool {
		return !slices.Equal(tierOf(pkg), t.packages)
	})
}

// tierOf returns the packages of the tier that a package belongs to.
func tierOf(pkg string) []string {
	for _, t := range tiers {
		if slices.Contains(t.packages, strings.TrimPrefix(pkg, module+"/")) {
			return t.packages
		}
	}
	return nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "test:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, names []string) error {
	chosen, err := choose(names)
	if err != nil {
		return err
	}
	list := exec.CommandContext(ctx, "go", "list", "./...")
	list.Stderr = os.Stderr
	all, err := list.Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	var total counts
	var failed []string
	for _, t := range chosen {
		fmt.Printf("== %s\n", t.name)
		c, err := t.run(ctx, t.choosePackages(strings.Fields(string(all))))
		total.add(c)
		if err != nil {
			fmt.Printf("tier %s: %v\n", t.name, err)
			failed = append(failed, t.name)
		}
		if ctx.Err() != nil {
			break
		}
	}
	fmt.Println(total)
	if len(failed) > 0 {
		return fmt.Errorf("failed: %s", strings.Join(failed, ", "))
	}
	return nil
}

func choose(names []string) ([]tier, error) {
	if len(names) == 0 {
		return tiers, nil
	}
	var chosen []tier
	for _, name := range names {
		before := len(chosen)
		for _, t := range tiers {
			if t.name == name {
				chosen = append(chosen, t)
			}
		}
		if len(chosen) == before {
			return nil, fmt.Errorf("tier %q: not one of unit, packet, e2e", name)
		}
	}
	return chosen, nil
}

// run tests the packages and reports to standard output as they finish.
func (t tier) run(ctx context.Context, packages []string) (counts, error) {
	if len(packages) == 0 {
		return counts{failed: 1}, errors.New("has no package")
	}
	args := slices.Concat([]string{"test", "-json"}, t.flags, packages)
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), t.env...)
	cmd.Stderr = os.Stderr
	// The tests are in a process group of their own and are interrupted through us alone, once, so
	// that they can clean up whether it was the terminal or another process that asked.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = time.Minute
	events, err := cmd.StdoutPipe()
	if err != nil {
		return counts{}, err
	}
	if err := cmd.Start(); err != nil {
		return counts{}, err
	}
	c, readErr := report(events, os.Stdout)
	err = errors.Join(readErr, cmd.Wait())
	switch {
	case ctx.Err() != nil:
		return c, errors.New("interrupted")
	case err != nil:
		c.failed = max(c.failed, 1)
		return c, err
	case c.passed == 0:
		c.failed++
		return c, errors.New("ran no test")
	}
	return c, nil
}
