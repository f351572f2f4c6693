// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseList(t *testing.T) {
	got := parseList("FuzzA\nFuzzB\nok  \texample.org/a\t0.003s\n?   \texample.org/b\t[no test files]\n" +
		"ok  \texample.org/c\t0.003s\nFuzzD\nok  \texample.org/d\t0.003s\n")
	want := []fuzzer{{"example.org/a", "FuzzA"}, {"example.org/a", "FuzzB"}, {"example.org/d", "FuzzD"}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(fuzzer{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestRanOutOfTime(t *testing.T) {
	const late = "--- FAIL: FuzzA (87.05s)\n    context deadline exceeded\nFAIL\nexit status 1\n"
	for output, want := range map[string]bool{
		late: true,
		"--- FAIL: FuzzA (8.00s)\n    --- FAIL: FuzzA (0.00s)\n        a_test.go:1: no\n": false,
		late + "    Failing input written to testdata/fuzz/FuzzA/1\n":                     false,
		late + "panic: no\n": false,
	} {
		if got := ranOutOfTime(output); got != want {
			t.Errorf("%v, want %v: %q", got, want, output)
		}
	}
}
