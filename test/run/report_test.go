// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReport(t *testing.T) {
	const start = `{"Action":"start","Package":"p"}`
	for _, c := range []struct {
		name   string
		events []string
		want   counts
		prints []string
		hides  string
		fails  []string // the lines that the end of the output repeats
	}{
		{
			name: "one of each, with the output of those that did not pass",
			events: []string{
				start,
				`{"Action":"output","Package":"p","Test":"A","Output":"all is well\n"}`,
				`{"Action":"pass","Package":"p","Test":"A"}`,
				`{"Action":"output","Package":"p","Test":"B","Output":"got 1, want 2\n"}`,
				`{"Action":"fail","Package":"p","Test":"B"}`,
				`{"Action":"output","Package":"p","Test":"C","Output":"=== RUN   C\n"}`,
				`{"Action":"output","Package":"p","Test":"C","Output":"a long story\n"}`,
				`{"Action":"output","Package":"p","Test":"C","Output":"    c_test.go:1: needs root\n"}`,
				`{"Action":"output","Package":"p","Test":"C","Output":"--- SKIP: C (0.00s)\n"}`,
				`{"Action":"skip","Package":"p","Test":"C"}`,
				`{"Action":"fail","Package":"p","Elapsed":0.2}`,
			},
			want:   counts{1, 1, 1},
			prints: []string{"got 1, want 2", "skip C: c_test.go:1: needs root\n", "fail p: 1 passed, 1 failed, 1 skipped (0.2 s)"},
			hides:  "all is well",
			fails:  []string{"FAIL p B\n    got 1, want 2\n"},
		},
		{
			name: "a skipped test's story",
			events: []string{
				start,
				`{"Action":"output","Package":"p","Test":"C","Output":"    [rapid] draw x: 1\n"}`,
				`{"Action":"output","Package":"p","Test":"C","Output":"    needs root\n"}`,
				`{"Action":"skip","Package":"p","Test":"C"}`,
				`{"Action":"pass","Package":"p"}`,
			},
			want:   counts{skipped: 1},
			prints: []string{"skip C: needs root\n"},
			hides:  "rapid",
		},
		{
			name: "a package that does not build",
			events: []string{
				`{"ImportPath":"p","Action":"build-output","Output":"undefined: x\n"}`,
				`{"ImportPath":"p","Action":"build-fail"}`,
				start,
				`{"Action":"output","Package":"p","Output":"FAIL\tp [build failed]\n"}`,
				`{"Action":"fail","Package":"p","FailedBuild":"p"}`,
			},
			want:   counts{failed: 1},
			prints: []string{"undefined: x", "[build failed]"},
			fails:  []string{"FAIL p\n    undefined: x\n    FAIL\tp [build failed]\n"},
		},
		{
			name: "a package that dies outside of its tests",
			events: []string{
				start,
				`{"Action":"pass","Package":"p","Test":"A"}`,
				`{"Action":"output","Package":"p","Output":"panic: in TestMain\n"}`,
				`{"Action":"fail","Package":"p"}`,
			},
			want:   counts{passed: 1, failed: 1},
			prints: []string{"panic: in TestMain"},
			fails:  []string{"FAIL p\n    panic: in TestMain\n"},
		},
		{
			name: "a package that is killed in a test",
			events: []string{
				start,
				`{"Action":"output","Package":"p","Test":"A","Output":"so far so good\n"}`,
				`{"Action":"output","Package":"p","Output":"signal: killed\n"}`,
				`{"Action":"fail","Package":"p"}`,
			},
			want:   counts{failed: 1},
			prints: []string{"so far so good", "signal: killed"},
			fails:  []string{"FAIL p A\n    so far so good\n"},
		},
		{
			name:   "a package without tests",
			events: []string{start, `{"Action":"skip","Package":"p"}`},
			hides:  "p:",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			got, err := report(strings.NewReader(strings.Join(c.events, "\n")), &out, newUsage())
			if err != nil {
				t.Fatal(err)
			}
			if got.counts != c.want {
				t.Errorf("counts: %v, want %v", got.counts, c.want)
			}
			var fails []string
			for _, f := range got.failures {
				fails = append(fails, f.String())
			}
			if diff := cmp.Diff(c.fails, fails); diff != "" {
				t.Errorf("failures (-want +got):\n%s", diff)
			}
			for _, text := range c.prints {
				if !strings.Contains(out.String(), text) {
					t.Errorf("does not print %q:\n%s", text, &out)
				}
			}
			if c.hides != "" && strings.Contains(out.String(), c.hides) {
				t.Errorf("prints %q:\n%s", c.hides, &out)
			}
		})
	}
}

func TestSlowest(t *testing.T) {
	events := `{"Action":"start","Package":"p"}
		{"Action":"pass","Package":"p","Test":"A","Elapsed":1}
		{"Action":"pass","Package":"p","Test":"B/sub","Elapsed":30}
		{"Action":"fail","Package":"p","Test":"B","Elapsed":30.04}
		{"Action":"skip","Package":"p","Test":"C","Elapsed":2}
		{"Action":"fail","Package":"p"}`
	r, err := report(strings.NewReader(events), io.Discard, newUsage())
	if err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprint(r.slowest(2), len(r.slowest(9)))
	if want := "[  30.0 s p B    2.0 s p C] 3"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestBrief(t *testing.T) {
	var output, want strings.Builder
	for i := range 40 {
		fmt.Fprintf(&output, "line %d\n    [rapid] draw number: %d\n", i, i)
		switch {
		case i < 15 || i >= 25:
			fmt.Fprintf(&want, "    line %d\n", i)
		case i == 15:
			want.WriteString("    ... 10 lines ...\n")
		}
	}
	if diff := cmp.Diff(want.String(), brief(output.String())); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got, want := brief(strings.Repeat("x", 1000)), "    "+strings.Repeat("x", 300)+"...\n"; got != want {
		t.Errorf("a long line becomes %q", got)
	}
}

func TestTiersDivideThePackages(t *testing.T) {
	all := []string{
		module + "/cmd/segue", module + "/internal/tables", module + "/internal/balancers",
		module + "/internal/balancer", module + "/internal/nexthop", module + "/test/e2e",
		module + "/test/packages", module + "/internal/control",
	}
	found := map[string][]string{}
	for _, tier := range slices.Concat(tiers, behind) {
		for _, p := range tier.choosePackages(all) {
			found[p] = append(found[p], tier.name)
		}
	}
	for i, want := range []string{"unit", "unit", "unit", "packet", "packet", "e2e", "package", "unit"} {
		if got := strings.Join(found[all[i]], " "); got != want {
			t.Errorf("%s is in tier %q, want %q", all[i], got, want)
		}
	}
}

func TestStages(t *testing.T) {
	x, y := tier{name: "x"}, tier{name: "y", beside: true}
	for _, c := range []struct {
		tiers []tier
		want  []string
	}{
		{[]tier{x, y, x}, []string{"x, y", "x"}},
		{[]tier{x, {name: "x", beside: true}, y}, []string{"x, y"}},
		{[]tier{y}, []string{"y"}},
	} {
		var got []string
		for _, s := range stages(c.tiers) {
			got = append(got, s.String())
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

// The failures of a test that passes when it is repeated, and of its subtests, are withdrawn. The
// failures of other tests stay.
func TestWithdraw(t *testing.T) {
	r := result{counts: counts{passed: 3, failed: 5}, failures: []failure{
		{"a", "TestParent", "=== RUN TestParent"},
		{"a", "TestParent/child", "got 1"},
		{"a", "TestParents", "got 2"},
		{"b", "TestParent", "got 3"},
		{"b", "", "panic"},
	}}
	want := []failure{{pkg: "a", test: "TestParent"}, {pkg: "a", test: "TestParents"}, {pkg: "b", test: "TestParent"}}
	if got := r.failedTests(); !slices.Equal(got, want) {
		t.Errorf("failed: %v", got)
	}
	r.withdraw(want[0])
	if r.counts != (counts{passed: 5, failed: 3}) || len(r.failures) != 3 || len(r.repeated) != 2 {
		t.Errorf("%v, failed: %v, repeated: %v", r.counts, r.failures, r.repeated)
	}
}

// A failure of the race detector itself withdraws all failures of its package, and no other.
func TestWithdrawBroken(t *testing.T) {
	r := result{counts: counts{passed: 3, failed: 3}, failures: []failure{
		{"a", "TestParent", "=== RUN TestParent"},
		{"a", "TestParent/child", "x\nThreadSanitizer: CHECK failed: tsan_rtl.cpp:346\n"},
		{"b", "TestOther", "WARNING: DATA RACE"},
	}}
	if broken := r.withdrawBroken(); !slices.Equal(broken, []string{"a"}) {
		t.Errorf("broken: %v", broken)
	}
	if len(r.failures) != 1 || r.failures[0].pkg != "b" || r.failed != 1 || r.passed != 3 {
		t.Errorf("left: %+v", r)
	}
	if broken := r.withdrawBroken(); len(broken) > 0 || r.failed != 1 {
		t.Errorf("a data race is withdrawn: %v", broken)
	}
}
