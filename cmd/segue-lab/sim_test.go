// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/testhost"
)

// simulate runs segue-lab sim with the arguments.
func simulate(t *testing.T, args ...string) (output *bytes.Buffer, err error) {
	t.Helper()
	output = new(bytes.Buffer)
	cmd := newRoot()
	cmd.SetArgs(append([]string{"sim"}, args...))
	cmd.SetOut(output)
	cmd.SetErr(output)
	return output, cmd.ExecuteContext(t.Context())
}

func TestSim(t *testing.T) {
	for name, args := range map[string][]string{
		"sim.txt":  {"--seed", "5"},
		"sim.json": {"--json", "--runs", "1"},
		"sim.csv":  {"--csv", "--parallel", "2"},

		"sim-every.txt":  {"--every", "10s"},
		"sim-every.json": {"--every", "20s", "--json", "--runs", "1"},
		"sim-every.csv":  {"--every", "20s", "--csv"},
	} {
		t.Run(name, func(t *testing.T) {
			output, err := simulate(t, append(args, "testdata/sim.yaml")...)
			testhost.Must(t, err)
			clitest.Golden(t, name, output)
			again, err := simulate(t, append(args, "testdata/sim.yaml")...)
			if err != nil || !bytes.Equal(again.Bytes(), output.Bytes()) {
				t.Errorf("the second run prints something else, or fails: %v", err)
			}
		})
	}
}

func TestSimJSONIsValid(t *testing.T) {
	output, err := simulate(t, "--json", "testdata/sim.yaml", "testdata/sim.yaml")
	testhost.Must(t, err)
	var reports []struct {
		Cases []struct {
			Mean struct{ Value *float64 }
		}
		Assertions []struct{ Holds bool }
	}
	testhost.Must(t, json.Unmarshal(output.Bytes(), &reports))
	if len(reports) != 2 || len(reports[0].Cases) != 2 || reports[0].Cases[0].Mean.Value == nil || len(reports[0].Assertions) != 2 {
		t.Errorf("unexpected content: %+v", reports)
	}
}

// TestSimWarnings checks the warnings of a run about parts of the file that have no effect.
func TestSimWarnings(t *testing.T) {
	text := `runs: 2
servers: [{count: 1}]
arrivals: {poisson: {rate: 100}}
jobs: [{constant: 1ms}]
measure: {connections: 100}
placement: least-queue
cases:
- {name: late, events: [{at: 1ms, server-fail: [s1]}, {at: 1m, server-add: [s1]}]}
- {name: short, measure: {connections: 100, duration: 100ms, warmup: 0.9}}
`
	file := filepath.Join(t.TempDir(), "warned.yaml")
	testhost.Must(t, os.WriteFile(file, []byte(text), 0o644))
	var out, warnings bytes.Buffer
	cmd := newRoot()
	cmd.SetArgs([]string{"sim", "--json", "--every", "2s", file})
	cmd.SetOut(&out)
	cmd.SetErr(&warnings)
	testhost.Must(t, cmd.ExecuteContext(t.Context()))
	want := []string{
		"case late: no interval of 2s is over when the last flow arrives",
		"case late: cases[0].events[1].at 60s is after the last arrival in 2 of 2 runs, which was at 1.06432s at the latest",
		"case short: no flow was measured in 2 of 2 runs",
		"case short: no interval of 2s is over when the last flow arrives",
	}
	var reports []struct{ Warnings []string }
	testhost.Must(t, json.Unmarshal(out.Bytes(), &reports))
	if diff := cmp.Diff(want, reports[0].Warnings); diff != "" {
		t.Errorf("warnings (-want +got):\n%s", diff)
	}
	if got, want := warnings.String(), "warning: warned: "+strings.Join(want, "\nwarning: warned: ")+"\n"; got != want {
		t.Errorf("printed\n%swant\n%s", got, want)
	}
}

// TestSimLongSeries checks that the times of intervals are printed with all digits.
func TestSimLongSeries(t *testing.T) {
	file := filepath.Join(t.TempDir(), "long.yaml")
	text := `{runs: 1, servers: [{count: 1}], arrivals: {poisson: {rate: 0.00001}}, jobs: [{constant: 1ms}], placement: least-queue,
measure: {duration: 2470000s}}`
	testhost.Must(t, os.WriteFile(file, []byte(text), 0o644))
	for format, want := range map[string]string{
		"--csv": ",1234567.5,2469135,", "--json": `"to": 2469135,`, "--parallel=1": "  1234567.5    2469135  ",
	} {
		output, err := simulate(t, "--every", "1234567.5s", format, file)
		if err != nil || !strings.Contains(output.String(), want) {
			t.Errorf("%s: %v, no %q in\n%s", format, err, want, output)
		}
	}
}

func TestSimErrors(t *testing.T) {
	text, err := os.ReadFile("testdata/sim.yaml")
	testhost.Must(t, err)
	file := func(old, new string) string {
		path := filepath.Join(t.TempDir(), "changed.yaml")
		changed := bytes.Replace(text, []byte(old), []byte(new), 1)
		if bytes.Equal(changed, text) {
			t.Fatalf("nothing to replace: %s", old)
		}
		testhost.Must(t, os.WriteFile(path, changed, 0o644))
		return path
	}
	bad, wrong := file("fast", "slow"), file("fails: mean", "holds: mean")
	lines := filepath.Join(t.TempDir(), "lines")
	testhost.Must(t, os.WriteFile(lines, []byte("0\ta\nx\n"), 0o644))
	trace := file("poisson: {load: 0.7}", "queries: {file: "+lines+"}")
	for _, test := range []struct {
		args []string
		err  string
	}{
		{[]string{"--runs", "0", bad}, "--runs 0: must be from 1 to 10000"},
		{[]string{"--every", "0s", bad}, "--every 0s: must be at least 1ms"},
		{[]string{"--parallel", "-1", bad}, "--parallel -1: must not be negative"},
		{[]string{bad}, bad + `:4: servers[1].group "slow": used twice`},
		{[]string{"nowhere.yaml", bad}, "open nowhere.yaml: no such file or directory\n" +
			bad + `:4: servers[1].group "slow": used twice`},
		{[]string{wrong}, "1 assertion not as expected"},
		{[]string{wrong, trace}, "1 assertion not as expected\nchanged: " + lines + `:2: "x": must be time<TAB>query`},
	} {
		output, err := simulate(t, test.args...)
		if err == nil || err.Error() != test.err {
			t.Errorf("%v: error %v, want %s", test.args, err, test.err)
		}
		if test.args[0] == wrong && !strings.Contains(output.String(), "fails, NOT as expected: mean < 100ms (single-choice: ") {
			t.Errorf("output %s", output)
		}
	}
}
