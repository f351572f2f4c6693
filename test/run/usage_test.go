// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"slices"
	"testing"
	"time"
)

// Tests that run at the same time share the CPU time of their package. A waiting test gets none.
func TestUsageOfTests(t *testing.T) {
	u, start := newUsage(), time.Now()
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	for _, e := range []event{
		{Action: "run", Test: "A", Time: at(0)},
		{Action: "pause", Test: "A", Time: at(1)},
		{Action: "run", Test: "B", Time: at(1)},
		{Action: "run", Test: "B/sub", Time: at(1)},
		{Action: "cont", Test: "A", Time: at(3)},
		{Action: "pass", Test: "A", Time: at(5)},
	} {
		e.Package = "p"
		u.see(e)
	}
	u.sample("p", 12*time.Second, at(6))
	u.see(event{Package: "p", Action: "pass", Test: "B", Time: at(6)})
	u.sample("p", 11*time.Second, at(7)) // an ended process is not counted any more
	want := map[[2]string]time.Duration{{"p", "A"}: 4 * time.Second, {"p", "B"}: 8 * time.Second}
	for test, used := range want {
		if got := u.tests[test]; got.Round(time.Millisecond) != used {
			t.Errorf("%v: %v, want %v", test, got, used)
		}
	}
	if len(u.tests) != len(want) || u.total["p"] != 12*time.Second {
		t.Errorf("tests: %v, packages: %v", u.tests, u.total)
	}
}

func TestExpensive(t *testing.T) {
	of := map[string]time.Duration{"a": 3 * time.Second, "b": 9 * time.Second, "c": time.Millisecond, "d": time.Second}
	if got := expensive(of, 2); !slices.Equal(got, []string{"b", "a"}) {
		t.Errorf("the two most expensive: %v", got)
	}
	if got := expensive(of, 9); len(got) != 3 {
		t.Errorf("expensive: %v", got)
	}
}

func TestParseStat(t *testing.T) {
	const stat = "7 (a) b 9) S 42 7 7 0 -1 4194560 10 20 0 0 100 20 3 400 20 0 1 0 33"
	if got, want := parseStat([]byte(stat)), (process{42, 5230 * time.Millisecond}); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
	if own := processes()[os.Getpid()]; own.parent != os.Getppid() {
		t.Errorf("the parent of this process is %d, want %d", own.parent, os.Getppid())
	}
}

// The CPU time of a process that a test has started is the test's, also if the test goes to another
// folder.
func TestUsageOfProcesses(t *testing.T) {
	const busy = `package busy

import ("os/exec"; "testing")

func TestBusy(t *testing.T) {
	t.Chdir("/")
	loop := "i=0; while [ $i -lt 1000000 ]; do i=$((i+1)); done"
	if err := exec.Command("sh", "-c", loop).Run(); err != nil { t.Fatal(err) }
}
`
	t.Chdir(t.TempDir())
	if err := os.Mkdir("busy", 0o700); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"go.mod": "module " + module + "\n", "busy/busy_test.go": busy} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	of := tier{name: "busy", packages: []string{"./busy"}, flags: []string{"-count=1"}}
	r, err := of.runOnce(t.Context(), of.packages)
	if err != nil {
		t.Fatal(err)
	}
	if r.usage.tests[[2]string{module + "/busy", "TestBusy"}] == 0 {
		t.Errorf("CPU time of tests: %v", r.usage.tests)
	}
}
