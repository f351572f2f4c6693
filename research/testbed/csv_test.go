// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// writeCSV writes the runs of an experiment, and returns the path of the file.
func writeCSV(t *testing.T, name string, runs []Run) string {
	t.Helper()
	text, err := (&Results{Experiment: name, Runs: runs, Speed: 2}).CSV()
	testhost.Must(t, err)
	path := filepath.Join(t.TempDir(), name+".csv")
	testhost.Must(t, os.WriteFile(path, text, 0o644))
	return path
}

// TestCSV writes runs and reads them again: all claims that the runs decide have the same values and the
// same verdicts.
func TestCSV(t *testing.T) {
	for name, runOf := range map[string]func(name string, point float64, seed uint64) Run{
		"hlb-9": func(name string, point float64, seed uint64) Run {
			per := map[string]uint64{"sed": 220, "hlb": 135}[name]
			return Run{
				Measured: Response{Mean: 0.1 + float64(seed)/100, P50: 0.1, P90: 0.2, P99: 0.3, Large: 0.6},
				Shares: []Share{
					{Capacity: 2, Responses: 100, Mean: 0.2}, {Capacity: 4, Responses: per + seed, Mean: 0.13},
				},
			}
		},
		"hlb-8": func(name string, point float64, seed uint64) Run {
			p90 := map[string]float64{"hlb": 0.3, "least-queue": 0.39, "sed": 0.31}[name] + float64(seed)/1000
			return Run{Types: map[string]Response{TypePage: {Mean: 0.2, P90: p90}, TypeStatic: {Mean: 0.01, P90: p90 / 10}}}
		},
		"srlb-6": func(name string, point float64, seed uint64) Run {
			p75 := map[string]float64{"hash": 0.5, "sr4": 0.3}[name] + float64(seed)/1000
			return Run{Measured: Response{Mean: 0.2, P50: 0.2, Distribution: []DistributionPoint{{p75, 0.75}}}}
		},
		"6lb-11d": func(name string, point float64, seed uint64) Run { return Run{Failed: 10 + seed} },
		"hlb-24": func(name string, point float64, seed uint64) Run {
			cycles := map[string]float64{"hash-syn": 900, "hlb-syn": 1771}[name] + float64(seed*seed)
			return Run{Measured: Response{Mean: 3e-7 + 1e-8*float64(seed)}, Cycles: &cycles}
		},
		"hlb-24-load": func(name string, point float64, seed uint64) Run {
			more := map[string]float64{"hash": 1, "hlb": 1.08}[name] + float64(seed)/1000
			return Run{
				CPU:    &CPU{Balancers: 0.1 * more, BalancerPrograms: 0.2 * more},
				Memory: &Memory{Processes: uint64(2e7 * more * more), Kernel: 7e7},
			}
		},
		"hlb-16": func(name string, point float64, seed uint64) Run {
			return Run{Measured: Response{Mean: 1 / point}, Simulated: &Response{Mean: 2 / point}}
		},
	} {
		e, _, err := Load(name)
		testhost.Must(t, err)
		want := &Results{Points: e.Points, Kind: e.Kind}
		for _, c := range e.Cases {
			for _, point := range e.Points {
				for seed := range uint64(2) {
					run := runOf(c.Name, point, seed+1)
					run.Case, run.Point, run.Seed, run.Requests = c.Name, point, seed+1, 1000
					want.Runs = append(want.Runs, run)
				}
			}
		}
		want.Planned = len(want.Runs)
		got, err := ReadCSV(writeCSV(t, name, want.Runs))
		testhost.Must(t, err)
		judged := 0
		for i, c := range e.Claims {
			c.judge(want)
			read := got.Claims[i]
			if (c.Met == nil) != (read.Met == nil) || c.Met != nil && *c.Met != *read.Met {
				t.Errorf("%s: the verdict of %q is not the same", name, c.Text)
				continue
			}
			if c.Met == nil {
				continue
			}
			judged++
			if math.Abs(*c.Measured / *read.Measured - 1) > 1e-4 {
				t.Errorf("%s: %q has %v, want %v", name, c.Text, *read.Measured, *c.Measured)
			}
		}
		if judged < 2 {
			t.Errorf("%s: only %d claims are judged", name, judged)
		}
	}
}

// TestCSVKeepsZeros checks that a quantity that is 0 in one run, and not in another, is 0 when it is
// read again.
func TestCSVKeepsZeros(t *testing.T) {
	even := []Share{{Responses: 5}, {Responses: 5}}
	runs := []Run{
		{Case: "hash", Point: 9, Seed: 1, Requests: 10, Shares: even},
		{Case: "hash", Point: 9, Seed: 2, Requests: 10, Shares: []Share{{Responses: 8}, {Responses: 2}}},
	}
	r, err := ReadCSV(writeCSV(t, "6lb-11a", runs))
	testhost.Must(t, err)
	for i, want := range []float64{0, 3} {
		if got := r.Runs[i].quantity("from-even"); got != want {
			t.Errorf("run %d has %v, want %v", i, got, want)
		}
	}
}

// TestCSVErrors checks the errors of files of runs.
func TestCSVErrors(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"no-such-experiment", "case,point,seed\n", "no-such-experiment"},
		{"6lb-11a", "case,point,seed\nother,9,1\n", `case "other": the experiment has no such case`},
		{"6lb-11a", "case,point,seed\nhash,nine,1\n", `point "nine": must be a number`},
		{"6lb-11a", "case,point,seed\nhash,9\n", "wrong number of fields"},
		{"6lb-11a", "", "EOF"},
	} {
		path := filepath.Join(t.TempDir(), test.name+".csv")
		testhost.Must(t, os.WriteFile(path, []byte(test.text), 0o644))
		if _, err := ReadCSV(path); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s, %q: error %v, want %s", test.name, test.text, err, test.want)
		}
	}
}

// TestTable checks the values of each unit. Of three seeds with 0.3, 0.4 and 0.5 s, half of the interval
// is 4.303·0.1/√3 = 0.248 s.
func TestTable(t *testing.T) {
	var runs []Run
	for seed := range uint64(3) {
		mean := 0.3 + float64(seed)/10
		runs = append(runs, Run{Case: "hash", Point: 9, Seed: seed + 1, Requests: 10, Failed: 1, Measured: Response{Mean: mean, P90: 1},
			Simulated: &Response{Mean: 0.35}, Fairness: 0.5, CPU: &CPU{Balancers: 4e-4, BalancerPrograms: 1e-4},
			Memory: &Memory{Processes: 17 << 20, Kernel: 71 << 20}, Cycles: new(871.3)})
	}
	runs = append(runs, Run{Case: "sr4", Point: 12, Seed: 1, Requests: 10, Measured: Response{Mean: 0.2}})
	r, err := ReadCSV(writeCSV(t, "6lb-11a", runs))
	testhost.Must(t, err)
	for quantity, want := range map[string]string{
		"mean":   "| servers | hash | sr4 |\n|---|---|---|\n| 9 | 400 ± 248 (350) | – |\n| 12 | – | 200 |\n",
		"p90":    "| servers, p90 | hash | sr4 |\n|---|---|---|\n| 9 | 1000 ± 0 | – |\n| 12 | – | 0 |\n",
		"failed": "| servers, failed | hash | sr4 |\n|---|---|---|\n| 9 | 10.0% ± 0.0 | – |\n| 12 | – | 0.0% |\n",

		"balancer-cpu": "| servers, balancer-cpu | hash | sr4 |\n|---|---|---|\n| 9 | 50.0 ± 0.0 | – |\n| 12 | – | – |\n",
		"memory":       "| servers, memory | hash | sr4 |\n|---|---|---|\n| 9 | 88.00 ± 0.00 | – |\n| 12 | – | – |\n",
		"cycles":       "| servers, cycles | hash | sr4 |\n|---|---|---|\n| 9 | 871 ± 0 | – |\n| 12 | – | – |\n",

		"fairness": "| servers, fairness | hash | sr4 |\n|---|---|---|\n| 9 | 0.50 ± 0.00 | – |\n| 12 | – | – |\n",
	} {
		if got, err := r.Table(quantity); err != nil || got != want {
			t.Errorf("%s: %v\n%s\nwant\n%s", quantity, err, got, want)
		}
	}
	if _, err := r.Table("median"); err == nil || !strings.Contains(err.Error(), `quantity "median": must be one of large, mean`) {
		t.Errorf("error %v", err)
	}
}
