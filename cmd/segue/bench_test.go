// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"
)

func TestParseFlowCounts(t *testing.T) {
	got, err := parseFlowCounts("--flows", "1", "64k", "10M", "100M")
	if want := []uint32{1, 64_000, 10_000_000, 100_000_000}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	for _, word := range []string{"", "0", "-1", "k", "1G", "101M", "4294967297", "1.5k"} {
		if _, err := parseFlowCounts("--room", word); err == nil || !strings.Contains(err.Error(), `--room "`+word+`"`) {
			t.Errorf("%q: error %v does not name it", word, err)
		}
	}
}

func TestBenchRefuses(t *testing.T) {
	for want, args := range map[string][]string{
		"--rounds 0":                            {"bench", "--rounds", "0"},
		"--packets 0":                           {"bench", "--packets", "0"},
		`--case "("`:                            {"bench", "--case", "("},
		"--changes 0":                           {"bench", "tables", "--changes", "0"},
		`"nosuch"`:                              {"bench", "--case", "nosuch", "--rounds", "1"},
		"--duration -1s: must be at least 10ms": {"bench", "throughput", "--duration", "-1s"},
	} {
		root := newRoot()
		root.SetArgs(args)
		if err := root.Execute(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: error %v, want %q", args, err, want)
		}
	}
}
