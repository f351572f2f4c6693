// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// counts are numbers of tests and subtests.
type counts struct{ passed, failed, skipped int }

func (c *counts) add(d counts) {
	c.passed += d.passed
	c.failed += d.failed
	c.skipped += d.skipped
}

func (c counts) String() string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped", c.passed, c.failed, c.skipped)
}

// event is one line of `go test -json`; see `go doc test2json` and `go help buildjson`.
type event struct {
	Time        time.Time
	Action      string
	Package     string
	ImportPath  string // the package, in events about a build
	FailedBuild string // the ImportPath of the package whose build failed
	Test        string // empty in events about the package as a whole
	Elapsed     float64
	Output      string
}

// result sums up the results of tests.
type result struct {
	counts
	failures []failure
	repeated []failure // failures of tests that passed when they were repeated
	timings  []timing
	usage    *usage // CPU time of the test programs
}

// add adds the results of other tests.
func (r *result) add(s result) {
	r.counts.add(s.counts)
	r.failures = append(r.failures, s.failures...)
	r.repeated = append(r.repeated, s.repeated...)
	r.timings = append(r.timings, s.timings...)
	if r.usage == nil {
		r.usage = newUsage()
	}
	if s.usage != nil {
		r.usage.add(s.usage)
	}
}

// detectorFailure is the text that the race detector prints when one of its own checks fails. In
// tests with thousands of goroutines, that happens once in hundreds of runs.
const detectorFailure = "ThreadSanitizer: CHECK failed"

// withdrawBroken finds the packages in which the race detector itself has failed. It removes their
// failures from the result, and returns the packages.
func (r *result) withdrawBroken() (broken []string) {
	for _, f := range r.failures {
		if strings.Contains(f.output, detectorFailure) && !slices.Contains(broken, f.pkg) {
			broken = append(broken, f.pkg)
		}
	}
	before := len(r.failures)
	r.failures = slices.DeleteFunc(r.failures, func(f failure) bool { return slices.Contains(broken, f.pkg) })
	r.failed -= before - len(r.failures)
	return broken
}

// crashes are texts in the output of tests that show a race or a crash. A lack of CPU time does not
// explain these.
var crashes = []string{"WARNING: DATA RACE", "panic: ", "fatal error: "}

// hasCrashed tells whether a test or a package has crashed, or a race was found. A crash ends its
// package. So failures alone do not tell which tests to repeat: those that had not begun have not
// failed.
func (r *result) hasCrashed() bool {
	return slices.ContainsFunc(r.failures, func(f failure) bool {
		return f.test == "" || slices.ContainsFunc(crashes, func(text string) bool {
			return strings.Contains(f.output, text)
		})
	})
}

// failedTests returns the tests that have failed, or whose subtests have. The output is left out.
func (r *result) failedTests() (tests []failure) {
	for _, f := range r.failures {
		name, _, _ := strings.Cut(f.test, "/")
		if test := (failure{pkg: f.pkg, test: name}); name != "" && !slices.Contains(tests, test) {
			tests = append(tests, test)
		}
	}
	return tests
}

// flaky returns the tests that have passed only when they were repeated.
func (r *result) flaky() (tests []failure) {
	repeated := result{failures: r.repeated}
	return repeated.failedTests()
}

// withdraw moves the failures of a test and its subtests from failures to repeated, because the
// test passed when it was repeated.
func (r *result) withdraw(test failure) {
	isOfTest := func(f failure) bool {
		return f.pkg == test.pkg && (f.test == test.test || strings.HasPrefix(f.test, test.test+"/"))
	}
	for _, f := range r.failures {
		if isOfTest(f) {
			r.repeated = append(r.repeated, f)
			r.failed--
			r.passed++
		}
	}
	r.failures = slices.DeleteFunc(r.failures, isOfTest)
}

// timing is the time that a test took with its subtests, in seconds.
type timing struct {
	pkg, test string
	seconds   float64
}

func (t timing) String() string {
	return fmt.Sprintf("%6.1f s %s %s", t.seconds, t.pkg, t.test)
}

// slowest returns the tests that took the longest time, the slowest first.
func (r *result) slowest(count int) []timing {
	sorted := slices.SortedStableFunc(slices.Values(r.timings), func(a, b timing) int {
		return cmp.Compare(b.seconds, a.seconds)
	})
	return sorted[:min(count, len(sorted))]
}

// failure is a failed test. If it has no name of a test, it is a package that failed outside of its
// tests.
type failure struct{ pkg, test, output string }

// report reads the events of one `go test -json`, passes them to used, and returns the results. For
// each package with tests, it writes the whole output of failed tests, the reasons of skipped
// tests, and a line with the counts.
func report(events io.Reader, w io.Writer, used *usage) (result, error) {
	total := result{usage: used}
	packages := map[string]*result{}
	// The output of the tests, packages and builds that have not ended yet, by package and name of the
	// test. A package and a build have no name here, and a build has its import path as the package.
	output := map[[2]string][]byte{}
	lines := json.NewDecoder(events)
	for {
		var e event
		if err := lines.Decode(&e); errors.Is(err, io.EOF) {
			return total, nil
		} else if err != nil {
			return total, fmt.Errorf("reading the output of go test: %w", err)
		}
		used.see(e)
		at := [2]string{e.Package, e.Test}
		switch e.Action {
		case "start":
			packages[e.Package] = &result{}
		case "build-output":
			fmt.Fprint(w, e.Output)
			at[0] = e.ImportPath
			output[at] = append(output[at], e.Output...)
		case "output":
			output[at] = append(output[at], e.Output...)
		case "pass", "fail", "skip":
			text := string(output[at])
			delete(output, at)
			p := packages[e.Package]
			if e.Test != "" {
				p.endTest(e, text, w)
				continue
			}
			// The package has ended.
			for _, test := range unfinished(output, e.Package) {
				died := event{Action: "fail", Package: e.Package, Test: test}
				p.endTest(died, string(output[[2]string{e.Package, test}]), w)
			}
			p.endPackage(e, text, string(output[[2]string{e.FailedBuild}]), w)
			total.add(*p)
		}
	}
}

// unfinished returns the names of the tests that were running when their package was killed.
func unfinished(output map[[2]string][]byte, pkg string) (tests []string) {
	for at := range output {
		if at[0] == pkg && at[1] != "" {
			tests = append(tests, at[1])
		}
	}
	slices.Sort(tests)
	return tests
}

// endTest records the end of a test.
func (r *result) endTest(e event, output string, w io.Writer) {
	if !strings.Contains(e.Test, "/") {
		r.timings = append(r.timings, timing{e.Package, e.Test, e.Elapsed})
	}
	switch e.Action {
	case "pass":
		r.passed++
	case "fail":
		r.failed++
		r.failures = append(r.failures, failure{e.Package, e.Test, output})
		fmt.Fprint(w, output)
	case "skip":
		r.skipped++
		fmt.Fprintf(w, "skip %s: %s\n", e.Test, skipReason(output))
	}
}

// endPackage records the end of a package. output is the package's output outside of its tests, and
// build is the compiler's output.
func (r *result) endPackage(e event, output, build string, w io.Writer) {
	if e.Action == "fail" {
		fmt.Fprint(w, output)
		if r.failed == 0 || strings.Contains(output, "panic: ") {
			// The package did not build, or has ended in the middle of its tests.
			r.failed++
			r.failures = append(r.failures, failure{pkg: e.Package, output: build + output})
		}
	}
	if r.counts != (counts{}) {
		fmt.Fprintf(w, "%-4s %s: %v (%.1f s)\n", e.Action, e.Package, r.counts, e.Elapsed)
	}
}

// skipReason returns the reason for a skip: the line of the output before "--- SKIP".
func skipReason(output string) string {
	before, _, _ := strings.Cut(output, "--- SKIP")
	before = strings.TrimSpace(before)
	return strings.TrimSpace(before[strings.LastIndex(before, "\n")+1:])
}

// Limits for the output of a failure that is printed again at the end.
const (
	briefLines = 15  // lines from its beginning, and as many from its end
	briefWidth = 300 // bytes of a line
)

func (f failure) String() string {
	name := strings.TrimSuffix(f.pkg+" "+f.test, " ")
	return "FAIL " + name + "\n" + brief(f.output)
}

// brief returns the beginning and the end of a test's output, without lines about values that
// package rapid has drawn.
func brief(output string) string {
	lines := slices.DeleteFunc(slices.Collect(strings.Lines(output)), func(line string) bool {
		return strings.Contains(line, "[rapid] draw")
	})
	if left := len(lines) - 2*briefLines; left > 0 {
		lines = slices.Replace(lines, briefLines, briefLines+left, fmt.Sprintf("... %d lines ...\n", left))
	}
	var out strings.Builder
	for _, line := range lines {
		line = strings.TrimSuffix(line, "\n")
		if len(line) > briefWidth {
			line = strings.ToValidUTF8(line[:briefWidth], "") + "..."
		}
		fmt.Fprintf(&out, "    %s\n", line)
	}
	return out.String()
}
