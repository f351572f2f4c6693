// SPDX-License-Identifier: Apache-2.0

// Command run runs the project's tests by tier, and prints one line of counts at the end.
//
//	make test TIER="[tier...]"
//
// Without arguments it runs the tiers unit, packet and e2e. If no test of a tier has run, the tier
// has failed. Otherwise a run would seem to pass if the machine lacks something and all tests are
// skipped.
//
// The tiers long, race, package and soak run only when they are named. .ci/run names the first
// three. The tier soak runs the long forms of some tests. The other tiers run short forms of them.
//
// The command also runs all fuzzers one after the other. Each fuzzer gets an equal share of the
// time.
//
//	make fuzz FUZZTIME=10m
//
// A fuzzer that finds a fault writes the input to testdata/fuzz/<name> in the folder of its
// package. From then on, `go test` runs this input as a test. The other fuzzers still run.
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
	"sync"
	"syscall"
	"time"
)

const module = "github.com/segue-lb/segue"

// A tier is a set of packages with the options by which `go test` runs them. Several tiers may have
// the same name. They are then parts of one tier for the user.
type tier struct {
	name string
	// packages are folders of the module. Those that begin with "./" are arguments of `go test`,
	// and other tiers may have the same ones. A folder without "./" is only in this tier. If this
	// list is empty, the tier has all packages that no other tier has.
	packages []string
	flags    []string
	env      []string
	args     []string // arguments of the test programs
	// beside tells that the tier runs at the same time as the tier before it. Both tiers
	// wait more than they compute.
	beside bool
}

// tiers are those that run if none is named.
var tiers = []tier{
	{
		// More packages and tests run at a time than there are cores, because many of them wait.
		name:  "unit",
		flags: []string{"-timeout=10m", "-p=6", "-parallel=6"},
	},
	{
		name:     "packet", // tests that run BPF programs in the kernel
		packages: packetPackages,
		// More tests and packages run at a time than there are cores, because many of them wait
		// for the kernel to change tables or routes.
		flags: []string{"-count=1", "-timeout=40m", "-parallel=4", "-p=3", "-skip=" + longPacketTests},
	},
	{
		name:     "e2e", // tests with networks of namespaces
		packages: []string{"lab", "test/e2e", "test/modules"},
		// More tests run at a time than there are cores, because most of them wait. But only one package
		// runs at a time: some of its tests compare the state of the machine before and after themselves.
		flags: []string{"-count=1", "-timeout=30m", "-p=1", "-parallel=6", "-skip=" + longTests},
	},
}

// packetPackages are the packages of the tier packet.
var packetPackages = []string{
	"internal/balancer", "internal/balancer/dataplane", "internal/agent", "internal/nexthop",
	"lab/bench", "lab/pktgen",
}

// behind are the tiers that .ci/run runs after the others. They run only when they are named.
var behind = []tier{
	{
		name:     "long", // tests that wait or compute for long
		packages: []string{"./test/e2e"},
		flags:    []string{"-count=1", "-timeout=30m", "-parallel=6", "-run=" + longTests},
	},
	{
		name:     "long",
		packages: []string{"./internal/agent", "./internal/balancer/dataplane", "./lab/bench"},
		flags:    []string{"-count=1", "-timeout=30m", "-parallel=4", "-run=" + longPacketTests},
	},
	{
		name:     "long",
		packages: []string{"./internal/balancer"},
		flags:    []string{"-count=1", "-timeout=30m", "-parallel=4", "-run=" + longPacketTests},
		args:     []string{"-crashes=2"},
	},
	{
		name:     "long",
		packages: []string{"./research/sim/placement"},
		flags:    []string{"-count=1", "-timeout=30m", "-run=^TestFigures$"},
		args:     []string{"-figures"},
		beside:   true,
	},
	{
		name:     "long",
		packages: []string{"./internal/store"},
		flags:    []string{"-count=1", "-timeout=30m", "-run=^Test(ManyBalancers|Bulk)$"},
		args:     []string{"-balancers=25", "-bulk=2000"},
		beside:   true,
	},
	{
		// Packages that start goroutines. Only this tier is built with -race, so it compiles the Go
		// library and all that it tests anew. Without data for debuggers, the compiler takes a
		// sixth less time. Stack traces still name files and lines.
		name: "race",
		packages: []string{
			"./cmd/segue", "./cmd/segue-lab", "./internal/api", "./internal/bgp", "./internal/cli",
			"./internal/control", "./internal/daemon", "./internal/datapath", "./internal/events",
			"./internal/health", "./internal/health/probe", "./internal/l2", "./internal/load", "./internal/netdev",
			"./internal/poll", "./internal/rundir", "./internal/store/...", "./lab/application",
			"./lab/httpload", "./quiclb/quicgo", "./research/testbed", "./test/run",
		},
		flags: []string{"-race", "-gcflags=all=-dwarf=false", "-timeout=30m", "-p=4", "-parallel=4"},
		// The race detector is linked through cgo, which needs a C compiler. clang is installed
		// already, for the BPF programs.
		env: []string{"CGO_ENABLED=1", "CC=clang"},
	},
	{
		name:     "package", // tests of the Debian packages, on bare hosts in namespaces
		packages: []string{"test/packages"},
		flags:    []string{"-count=1", "-timeout=30m"},
	},
}

// longTests are the end-to-end tests of the tier long.
const longTests = "^(TestInfer|TestInferFaults|TestServerFailures|TestBalancersComeAndGo|TestBFD|" +
	"TestBGPUnnumbered|TestBGPRoutes|TestRoutersOfTheGuide|TestRoutesOfNoDataPath|" +
	"TestKillsUnderManyConnections|TestStoreFaults|" +
	"TestStoreClusterFaults|TestSchemathesis|TestPersistenceChangesUnderLoad|TestSYNFlood|" +
	"TestSYNFloodOfAServiceThatHunts|TestSYNFloodWithoutFlowTable|TestHuntingOverBadLinks|" +
	"TestServersAndABalancerFailAtOnce|TestHistoryKeepsConnections|TestHintsKeepConnections|" +
	"TestServersWithoutTimestamps|TestServerWithoutWayToBalancers|TestKilledApplication|" +
	"TestToolsWithoutFlowTable|TestFailedStartsUnderLoad|TestDeadServer|" +
	"TestTwoArmedBalancersAreKilled|TestUpgradeOfAFleet|TestKeepalived)$"

// longPacketTests are the packet tests of the tier long: processes that are killed or fail at each
// step of their start, and the measurements.
const longPacketTests = "^(TestKilledWithTwoInterfaces|TestFirstStartKilledAtEveryStep|" +
	"TestKilledAtEveryStep|TestFailedStartChangesNothing|TestFailedFirstStartLeavesNothing|" +
	"TestMeasurePackets|TestEveryMethodLoads)$"

// soakTier is the name of all tiers in soak.
const soakTier = "soak"

// soak has the tests whose long forms take too long for every run.
var soak = []tier{
	{
		name:     soakTier,
		packages: []string{"./test/e2e"},
		flags: []string{
			"-count=1", "-timeout=60m",
			"-run=^(TestKillsUnderManyConnections|TestServerFailures|TestServersAndABalancerFailAtOnce|" +
				"TestHuntingOverBadLinks|TestLongTransferWithCookie|TestHistoryKeepsConnections|" +
				"TestSYNFlood|TestSYNFloodOfAServiceThatHunts|TestSYNFloodWithoutFlowTable|" +
				"TestReloadsUnderLoad|TestToolsWithoutFlowTable|TestBalancersComeAndGo|TestUpgradeOfAFleet|" +
				"TestSchemathesis|TestServersWithoutTimestamps|TestHintsKeepConnections|TestInferFaults|" +
				"TestMemoryOfTheProcess|TestBFD|TestBGPUnnumbered|TestRoutesOfNoDataPath|TestSwitch|" +
				"TestConnectionsMoveBetweenSwitchAndBalancer|TestL2)$",
		},
		args: []string{
			"-kills.count=20", "-kills.connections=10000", "-failures.all", "-failover.figure",
			"-badlinks.connections=10000", "-cookies.downloads=999", "-history.changes=20",
			"-history.servers=36", "-history.connections=400", "-flood=20s", "-flood.rate=0",
			"-flood.syns=200000", "-reloads=40", "-iperf=500M", "-bgp.routers=frr,bird",
			"-bgp.connections=1000", "-l2.connections=1000", "-l2.all", "-bgp.arrivals=200",
			"-schemathesis.examples=100", "-timestamps.connections=100",
			"-hints.servers=9", "-hints.connections=2800", "-infer.apart", "-memory.servers=10000",
			"-switch.requests=10000", "-switch.connections=1000", "-switch.changes=20",
			// An upgrade should be from the last release, but there is none yet.
			"-previous=HEAD", "-upgrade.connections=1000",
		},
	},
	{
		name:     soakTier,
		packages: []string{"./internal/balancer"},
		flags:    []string{"-count=1", "-timeout=30m", "-parallel=4"},
		args:     []string{"-dryruns", "-crashes=9", "-mutants=2000", "-collisions=15"},
	},
	{
		name:     soakTier,
		packages: []string{"./internal/agent"},
		flags:    []string{"-count=1", "-timeout=30m", "-run=^Test(Failed|.*Mutants)"},
		args:     []string{"-crashes=6", "-mutants=5000"},
	},
	{
		name:     soakTier,
		packages: []string{"./internal/store"},
		flags:    []string{"-count=1", "-timeout=30m", "-run=^Test(ManyBalancers|Bulk)$"},
		args:     []string{"-balancers=100", "-bulk=10000"},
	},
	{
		name:     soakTier,
		packages: []string{"./research/sim/placement"},
		flags:    []string{"-count=1", "-timeout=30m"},
		args:     []string{"-figures"},
	},
	{
		name:     soakTier,
		packages: []string{"./test/packages"},
		flags:    []string{"-count=1", "-timeout=30m", "-run=^Test(Foreign|Image)$"},
		args:     []string{"-foreign", "-image"},
	},
}

// choosePackages returns the packages that belong to the tier (tierOf). all are the packages of the
// module. The tier must not be one that names its packages (isNamed).
func (t tier) choosePackages(all []string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(pkg string) bool {
		return !slices.Equal(tierOf(pkg), t.packages)
	})
}

// isNamed tells whether the tier names its packages as arguments of `go test`. All other tiers
// divide the packages of the module: each package is in one of them.
func (t tier) isNamed() bool {
	return len(t.packages) > 0 && strings.HasPrefix(t.packages[0], "./")
}

// tierOf returns the field packages of the tier to which a package belongs. It is nil for the tier
// that has all packages that no other tier has.
func tierOf(pkg string) []string {
	for _, t := range slices.Concat(tiers, behind) {
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

// run runs the tiers with these names. At the end it prints all failures again, in short form, and
// then the counts: people read the end of a long log.
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
	for _, stage := range stages(chosen) {
		r, failures := stage.run(ctx, strings.Fields(string(all)))
		total.add(r)
		failed = append(failed, failures...)
		if ctx.Err() != nil {
			break // interrupted: print what there is
		}
	}
	const packages, tests, slowest = 30, 40, 10 // the lengths of the lists
	total.usage.print(packages, tests)
	fmt.Println("== slowest")
	for _, t := range total.slowest(slowest) {
		fmt.Println(t)
	}
	if err := total.judgeFlaky(); err != nil {
		failed = append(failed, err.Error())
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

// mostFlaky is the largest number of flaky tests with which a run passes.
const mostFlaky = 2

// judgeFlaky prints the flaky tests, and returns an error if there are too many.
func (r *result) judgeFlaky() error {
	tests := r.flaky()
	if len(tests) == 0 {
		return nil
	}
	fmt.Println("== flaky: passed only when repeated alone")
	for _, f := range r.repeated {
		fmt.Print(f)
	}
	fmt.Printf("%d flaky\n", len(tests))
	if len(tests) > mostFlaky {
		return fmt.Errorf("%d tests are flaky: at most %d may be", len(tests), mostFlaky)
	}
	return nil
}

// A stage is a list of tiers that run at the same time.
type stage []tier

// stages divides tiers into stages, in their order. A tier with beside is in the stage of the tier
// before it.
func stages(tiers []tier) (all []stage) {
	for _, t := range tiers {
		if last := len(all) - 1; t.beside && last >= 0 {
			all[last] = append(all[last], t)
		} else {
			all = append(all, stage{t})
		}
	}
	return all
}

// run runs the tiers of the stage at the same time. When all have ended, it repeats failed tests.
// all are all packages of the module. run returns the results, and a line for each tier that has
// failed.
func (s stage) run(ctx context.Context, all []string) (total result, failed []string) {
	fmt.Printf("== %s\n", s)
	began, before := time.Now(), processorTime()
	results, errs := make([]result, len(s)), make([]error, len(s))
	var running sync.WaitGroup
	for i, t := range s {
		packages := t.packages
		if !t.isNamed() {
			packages = t.choosePackages(all)
		}
		running.Go(func() { results[i], errs[i] = t.run(ctx, packages) })
	}
	running.Wait()
	for i, t := range s {
		errs[i] = t.repeat(ctx, &results[i], errs[i])
	}
	fmt.Printf("took %.0f s, and %.0f s of CPU time\n",
		time.Since(began).Seconds(), (processorTime() - before).Seconds())
	for i, t := range s {
		total.add(results[i])
		if errs[i] != nil {
			failed = append(failed, fmt.Sprintf("tier %s: %v", t.name, errs[i]))
		}
	}
	return total, failed
}

// String returns the names of the stage's tiers.
func (s stage) String() string {
	var names []string
	for _, t := range s {
		if !slices.Contains(names, t.name) {
			names = append(names, t.name)
		}
	}
	return strings.Join(names, ", ")
}

// processorTime returns the CPU time of all child processes that have ended, with their own
// children. If a tier takes less CPU time than the CPUs have in its wall time, more of its tests
// can run at a time.
func processorTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_CHILDREN, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// choose returns the tiers with these names, or without names those that run if none is named.
func choose(names []string) ([]tier, error) {
	if len(names) == 0 {
		return tiers, nil
	}
	var chosen []tier
	for _, name := range names {
		before := len(chosen)
		for _, t := range slices.Concat(tiers, behind, soak) {
			if t.name == name {
				chosen = append(chosen, t)
			}
		}
		if len(chosen) == before {
			return nil, fmt.Errorf("tier %q: not one of unit, packet, e2e, long, race, package, soak", name)
		}
	}
	return chosen, nil
}

// run tests the packages of the tier. If the race detector itself has failed in a package, run
// tests the package a second time: such a failure ends all tests of the package, and is not their
// fault.
func (t tier) run(ctx context.Context, packages []string) (result, error) {
	r, err := t.runOnce(ctx, packages)
	broken := r.withdrawBroken()
	if len(broken) == 0 || ctx.Err() != nil {
		return r, err
	}
	fmt.Printf("again, because the race detector itself failed: %s\n", strings.Join(broken, ", "))
	again, againErr := t.runOnce(ctx, broken)
	if len(r.failures) == 0 {
		err = nil // all failures were those of the race detector
	}
	r.add(again)
	return r, errors.Join(err, againErr)
}

// mostRepeated is the largest number of failed tests of a tier that are repeated. If there are
// more, they have a common cause.
const mostRepeated = 5

// repeat runs the failed tests of the tier once more, one at a time. Nothing else of the run is
// running then. On a shared machine, a test may get no processor for seconds, and fail. A test that
// passes now counts as passed, but is flaky: the end of the output shows how it failed the first
// time. repeat repeats nothing if more than mostRepeated tests have failed, or if a test has
// crashed. err is the tier's error before the repetition. repeat returns nil if no failure is left,
// and otherwise err.
func (t tier) repeat(ctx context.Context, r *result, err error) error {
	tests := r.failedTests()
	if len(tests) == 0 || len(tests) > mostRepeated || r.hasCrashed() {
		return err
	}
	for _, f := range tests {
		if ctx.Err() != nil {
			return err
		}
		fmt.Printf("again, alone: %s of %s\n", f.test, f.pkg)
		_, againErr := t.runOnce(ctx, []string{f.pkg}, "-count=1", "-parallel=1", "-run=^"+f.test+"$")
		if againErr == nil {
			r.withdraw(f)
		}
	}
	if len(r.failures) == 0 {
		return nil
	}
	return err
}

// runOnce tests packages. It reports each package to standard output when the package has finished.
// It returns an error if a test or `go test` itself fails, if no test has run, or if it is
// interrupted.
func (t tier) runOnce(ctx context.Context, packages []string, flags ...string) (result, error) {
	if len(packages) == 0 {
		return result{counts: counts{failed: 1}}, errors.New("has no package")
	}
	// `make lint` runs vet. Here vet would take more time: it would read all packages on which the
	// tests depend, and again for the race detector.
	args := slices.Concat([]string{"test", "-json", "-vet=off"}, t.flags, flags, packages, t.args)
	cmd := goCommand(ctx, args...)
	cmd.Env = append(os.Environ(), t.env...)
	events, err := cmd.StdoutPipe()
	if err != nil {
		return result{}, err
	}
	if err := cmd.Start(); err != nil {
		return result{}, err
	}
	watching, stop := context.WithCancel(ctx)
	used := newUsage()
	var watch sync.WaitGroup
	watch.Go(func() { used.watch(watching, cmd.Process.Pid) })
	r, readErr := report(events, os.Stdout, used)
	stop()
	watch.Wait()
	err = errors.Join(readErr, cmd.Wait())
	switch {
	case ctx.Err() != nil:
		return r, errors.New("interrupted")
	case err != nil:
		r.failed = max(r.failed, 1) // go test can fail without a failed test
		return r, err
	case r.passed == 0:
		r.failed++
		return r, errors.New("ran no test")
	}
	return r, nil
}

// goCommand returns a `go` command in its own process group. So an interrupt from a terminal does
// not reach the command directly. Only this process interrupts it, and only once, so that tests can
// clean up.
func goCommand(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = time.Minute
	return cmd
}
