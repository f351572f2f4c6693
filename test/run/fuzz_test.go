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
