// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// usage measures the CPU time of the test programs of one `go test`, with all processes that they
// start. The kernel knows only the time of a program, which is that of a package. usage divides it
// among the tests that run at the same time.
type usage struct {
	mu    sync.Mutex
	tests map[[2]string]time.Duration // CPU time by package and test
	total map[string]time.Duration    // CPU time by package
	// For each package:
	running map[string]map[string]bool    // the tests that run now
	weights map[string]map[string]float64 // seconds since the last sample, divided among the tests
	changed map[string]time.Time          // the time until which weights are complete
}

// samplePeriod is the time between two samples. The CPU time that a package takes after the last
// sample is lost. A sample reads /proc of all processes, which takes tens of milliseconds.
const samplePeriod = time.Second

func newUsage() *usage {
	return &usage{
		tests: map[[2]string]time.Duration{}, total: map[string]time.Duration{},
		running: map[string]map[string]bool{}, weights: map[string]map[string]float64{},
		changed: map[string]time.Time{},
	}
}

// watch takes samples of the test programs that the process pid has started, until ctx ends.
func (u *usage) watch(ctx context.Context, pid int) {
	tick := time.NewTicker(samplePeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			for pkg, used := range testPrograms(pid) {
				u.sample(pkg, used, time.Now())
			}
		}
	}
}

// see takes an event. It notes whether a test begins to run, or stops running.
func (u *usage) see(e event) {
	if e.Test == "" || strings.Contains(e.Test, "/") { // the time of a subtest is that of its test
		return
	}
	var runs bool
	switch e.Action {
	case "run", "cont":
		runs = true
	case "pause", "pass", "fail", "skip":
	default:
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.weigh(e.Package, e.Time)
	if runs {
		u.running[e.Package][e.Test] = true
	} else {
		delete(u.running[e.Package], e.Test)
	}
}

// weigh divides the wall time since the last change among the tests that have been running since
// then.
func (u *usage) weigh(pkg string, now time.Time) {
	if u.running[pkg] == nil {
		u.running[pkg], u.weights[pkg] = map[string]bool{}, map[string]float64{}
	}
	elapsed := now.Sub(u.changed[pkg])
	for test := range u.running[pkg] {
		u.weights[pkg][test] += max(elapsed.Seconds(), 0) / float64(len(u.running[pkg]))
	}
	u.changed[pkg] = now
}

// sample takes the CPU time that a package has used until now. It divides the CPU time since the
// last sample among the tests, by their weights.
func (u *usage) sample(pkg string, used time.Duration, now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.weigh(pkg, now)
	// used can fall: the time of an ended process is lost if nobody has waited for the process.
	added := max(used-u.total[pkg], 0)
	u.total[pkg] += added
	all := 0.0
	for _, weight := range u.weights[pkg] {
		all += weight
	}
	for test, weight := range u.weights[pkg] {
		if all > 0 {
			u.tests[[2]string{pkg, test}] += time.Duration(float64(added) * weight / all)
		}
	}
	clear(u.weights[pkg])
}

// print writes the packages and the tests that have taken the most CPU time: at most so many
// packages, and so many tests.
func (u *usage) print(packages, tests int) {
	fmt.Println("== CPU time of packages")
	for _, pkg := range expensive(u.total, packages) {
		fmt.Printf("%6.1f s %s\n", u.total[pkg].Seconds(), pkg)
	}
	fmt.Println("== CPU time of tests; tests that run at the same time share it")
	for _, at := range expensive(u.tests, tests) {
		fmt.Printf("%6.1f s %s %s\n", u.tests[at].Seconds(), at[0], at[1])
	}
}

// expensive returns at most count keys, those with the largest values first. It leaves out values
// of less than half a second.
func expensive[K comparable](of map[K]time.Duration, count int) []K {
	sorted := slices.SortedFunc(maps.Keys(of), func(a, b K) int { return cmp.Compare(of[b], of[a]) })
	sorted = slices.DeleteFunc(sorted, func(k K) bool { return of[k] < time.Second/2 })
	return sorted[:min(count, len(sorted))]
}

func (u *usage) add(v *usage) {
	for at, used := range v.tests {
		u.tests[at] += used
	}
	for pkg, used := range v.total {
		u.total[pkg] += used
	}
}

// process is what /proc tells about a process.
type process struct {
	parent int
	used   time.Duration // CPU time, with that of the ended children for which the process has waited
}

// testPrograms returns the CPU time of each package whose test program is a child of the process
// goTest. The processes that a test program has started count for its package.
func testPrograms(goTest int) map[string]time.Duration {
	all := processes()
	root, err := os.Getwd()
	if err != nil {
		return nil
	}
	used := map[string]time.Duration{}
	for pid, p := range all {
		program := pid // becomes the ancestor of pid that is a child of goTest
		for p.parent > 1 && p.parent != goTest {
			program, p = p.parent, all[p.parent]
		}
		if p.parent != goTest {
			continue
		}
		exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", program))
		below, err := filepath.Rel(root, startFolder(program))
		// Test programs in other folders do not count: tests of this command start some.
		if err == nil && filepath.IsLocal(below) && strings.HasSuffix(exe, ".test") {
			used[module+"/"+below] += all[pid].used
		}
	}
	return used
}

// startFolder returns the folder in which `go test` has started a test program: the folder of the
// package. The environment names it. The program's present folder may be another one, because a
// test has changed it.
func startFolder(pid int) (folder string) {
	environment, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	for variable := range strings.SplitSeq(string(environment), "\x00") {
		if value, found := strings.CutPrefix(variable, "PWD="); found {
			folder = value // if there are several, the last one is valid
		}
	}
	return folder
}

// processes returns all processes of the machine.
func processes() map[int]process {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil
	}
	all := map[int]process{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // the process has ended
		}
		pid, _ := strconv.Atoi(strings.Split(file, "/")[2])
		all[pid] = parseStat(text)
	}
	return all
}

// tick is the unit of the CPU times in /proc.
const tick = time.Second / 100

// parseStat reads the text of /proc/PID/stat (proc_pid_stat(5)). It begins after the second field,
// which is in parentheses and can contain anything.
func parseStat(text []byte) (p process) {
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if len(fields) < 15 {
		return p
	}
	p.parent, _ = strconv.Atoi(fields[1])
	for _, field := range fields[11:15] { // utime, stime, cutime and cstime
		ticks, _ := strconv.Atoi(field)
		p.used += time.Duration(ticks) * tick
	}
	return p
}
