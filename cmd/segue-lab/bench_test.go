// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/version"
	"github.com/segue-lb/segue/lab/bench"
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
		"--rounds 0: must be at least 1":        {"bench", "control", "--rounds", "0"},
		"--servers 0: must be from 1 to 30000":  {"bench", "control", "--servers", "0"},
		"--services 3: must be from 1 to":       {"bench", "control", "--services", "3", "--servers", "5"},
		`"nosuch"`:                              {"bench", "--case", "nosuch", "--rounds", "1"},
		"--duration -1s: must be at least 10ms": {"bench", "throughput", "--duration", "-1s"},
		`--setup "("`:                           {"bench", "throughput", "--setup", "("},
		`no setup matches "nosuch"`:             {"bench", "throughput", "--setup", "nosuch"},
		"--against: missing the executable":     {"bench", "--against", ""},
		"--against /no/such/segue: start the old build": {
			"bench", "--against", "/no/such/segue", "--rounds", "1",
		},
	} {
		_, err := clitest.Run(t.Context(), newRoot(), "", args...)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: error %v, want %q", args, err, want)
		}
	}
}

func TestPrintComparison(t *testing.T) {
	instructions := 310.4
	known := bench.CaseComparison{
		CaseName: bench.CaseName{
			Case: "known-flow", Family: "ipv6", Encapsulation: desired.SRv6Insert, Flows: 1000,
		},
		Old:      bench.BuildCost{Median: 120.31, Instructions: &instructions},
		New:      bench.BuildCost{Median: 121.52, Instructions: &instructions},
		Ratio:    bench.Spread{Median: 1.0101, P10: 0.95, P90: 1.08},
		NetRatio: &bench.Spread{Median: 1.0296, P10: 0.9, P90: 1.2},
	}
	known.Old.Program.Instructions, known.New.Program.Instructions = 12652, 12083
	null := bench.CaseComparison{
		CaseName: bench.CaseName{Case: "null", Family: "ipv4", Flows: 1},
		Old:      bench.BuildCost{Median: 75}, New: bench.BuildCost{Median: 75},
		Ratio: bench.Spread{Median: 1, P10: 1, P90: 1}, SameProgram: true,
	}
	var out bytes.Buffer
	if err := printComparison(&out, &bench.Comparison{
		Old:     version.Build{Version: "v1.2.3", Commit: "c0ffee", Modified: true},
		New:     version.Build{Version: "(devel)"},
		Cases:   []bench.CaseComparison{null, known},
		OnlyOld: []bench.CaseName{{Case: "gone", Family: "ipv4", Encapsulation: desired.GRE, Flows: 1}},
		OnlyNew: []bench.CaseName{{Case: "signal-create", Family: "ipv6", Flows: 1000}},
	}); err != nil {
		t.Fatal(err)
	}
	clitest.Golden(t, "bench-against.txt", &out)
}
