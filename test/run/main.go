// SPDX-License-Identifier: Apache-2.0

// Command run runs the project's tests by tier and closes with one line of counts.
//
//	make test TIER="[tier...]"
//
// Without arguments it runs every tier. A tier in which no test ran has failed: on a machine that
// lacks what its tests need, all being skipped must not look like success.
//
// The tier soak runs only when it is named: tests that take minutes in their full length, of which
// the tier e2e runs a short form.
//
// It also runs all fuzzers one after the other, each for its share of the time.
//
//	make fuzz FUZZTIME=10m
//
// A fuzzer that finds something writes the input to testdata/fuzz/<name> beside its source, where
// `go test` runs it from then on; the others go on.
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
	args     []string // of the tests themselves
}

var tiers = []tier{
	{
		name:  "unit",
		flags: []string{"-race", "-timeout=10m"},
		// The race detector is linked through cgo; the compiler of the BPF programs serves.
		env: []string{"CGO_ENABLED=1", "CC=clang"},
	},
	{
		// Without the race detector: pure computation, in which it would find nothing, slowly; and
		// reads of memory that faults, which it makes in C, where Go cannot recover.
		name: "unit",
		packages: []string{
			"internal/tables", "internal/sim", "internal/sim/placement", "internal/sim/scenario",
			"internal/repro", "loadshm",
		},
	},
	{
		name: "packet", // BPF programs in the kernel
		packages: []string{
			"internal/balancer", "internal/balancer/dataplane", "internal/agent",
			"internal/nexthop", "internal/loadgen", "internal/bench",
		},
		// More tests and packages than cores: the kernel lets those wait that change tables or routes.
		flags: []string{"-count=1", "-timeout=10m", "-parallel=4", "-p=3"},
	},
	{
		name:     "e2e", // networks of namespaces
		packages: []string{"internal/lab", "test/e2e"},
		// One package at a time: they share the machine.
		flags: []string{"-count=1", "-timeout=15m", "-p=1", "-parallel=3"},
	},
}

// soakTier is the name of the tiers in soak.
const soakTier = "soak"

// soak is the tests whose full length is too long for every run.
var soak = []tier{
	{
		name:     soakTier,
		packages: []string{"./test/e2e"},
		flags: []string{
			"-count=1", "-timeout=60m",
			"-run=^(TestKillsUnderManyConnections|TestServerFailures|TestServersAndABalancerFailAtOnce|" +
				"TestHuntingOverBadLinks)$",
		},
		args: []string{
			"-kills.count=20", "-kills.connections=10000", "-failures.table", "-failover.figure",
			"-badlinks.connections=10000",
		},
	},
	{
		name:     soakTier,
		packages: []string{"./internal/balancer"},
		flags:    []string{"-count=1", "-timeout=30m", "-parallel=4"},
		args:     []string{"-dryruns"},
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
	command, args := run, os.Args[1:]
	if len(args) > 0 && args[0] == "fuzz" {
		command, args = fuzz, args[1:]
	}
	passed, err := command(ctx, args)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "test:", err)
	}
	if !passed {
		os.Exit(1)
	}
}

// run ends its output with the failures again, briefly, and the counts: of a long log people read the end.
func run(ctx context.Context, names []string) (passed bool, err error) {
	chosen, err := choose(names)
	if err != nil {
		return false, err
	}
	all, err := goCommand(ctx, "list", "./...").Output()
	if err != nil {
		return false, fmt.Errorf("go list: %w", err)
	}
	var total result
	var failed []string
	for _, t := range chosen {
		fmt.Printf("== %s\n", t.name)
		packages := t.packages
		if t.name != soakTier {
			packages = t.choosePackages(strings.Fields(string(all)))
		}
		r, err := t.run(ctx, packages)
		total.add(r)
		if err != nil {
			failed = append(failed, fmt.Sprintf("tier %s: %v", t.name, err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	fmt.Println("== slowest")
	for _, t := range total.slowest(10) {
		fmt.Println(t)
	}
	if len(failed) > 0 {
		fmt.Println("== failed")
	}
	for _, f := range total.failures {
		fmt.Print(f)
	}
	for _, f := range failed {
		fmt.Println(f)
	}
	fmt.Println(total.counts)
	return len(failed) == 0, nil
}

func choose(names []string) ([]tier, error) {
	if len(names) == 0 {
		return tiers, nil
	}
	var chosen []tier
	for _, name := range names {
		before := len(chosen)
		for _, t := range slices.Concat(tiers, soak) {
			if t.name == name {
				chosen = append(chosen, t)
			}
		}
		if len(chosen) == before {
			return nil, fmt.Errorf("tier %q: not one of unit, packet, e2e, soak", name)
		}
	}
	return chosen, nil
}

// run tests the packages and reports to standard output as they finish.
func (t tier) run(ctx context.Context, packages []string) (result, error) {
	if len(packages) == 0 {
		return result{counts: counts{failed: 1}}, errors.New("has no package")
	}
	args := slices.Concat([]string{"test", "-json"}, t.flags, packages, t.args)
	cmd := goCommand(ctx, args...)
	cmd.Env = append(os.Environ(), t.env...)
	events, err := cmd.StdoutPipe()
	if err != nil {
		return result{}, err
	}
	if err := cmd.Start(); err != nil {
		return result{}, err
	}
	r, readErr := report(events, os.Stdout)
	err = errors.Join(readErr, cmd.Wait())
	switch {
	case ctx.Err() != nil:
		return r, errors.New("interrupted")
	case err != nil:
		r.failed = max(r.failed, 1)
		return r, err
	case r.passed == 0:
		r.failed++
		return r, errors.New("ran no test")
	}
	return r, nil
}

// goCommand is `go` in a process group of its own, which is interrupted through us alone, once, so that
// tests can clean up whether it was the terminal or another process that asked.
func goCommand(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = time.Minute
	return cmd
}
