// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

// loop is a trace as HLB's authors publish them. It has a header, and each query contains the
// number of iterations of a loop on the server.
const loop = "time\tquery\n" +
	"0.5\t/dummy.php/?n=2000000\n1.5\t/dummy.php/?n=4000000\n2.5\t/dummy.php/?n=6000000\n"

// byNumber is a job whose work depends on the number of iterations.
const byNumber = `{match: 'n=(\d+)', captured: {factor: 35ns}}`

// withTrace is a scenario of one server with a trace of the given lines beside it.
func withTrace(t *testing.T, arrivals, jobs, lines string) (text []byte, dir string) {
	t.Helper()
	dir = t.TempDir()
	testhost.Must(t, os.WriteFile(filepath.Join(dir, "trace"), []byte(lines), 0o644))
	const file = "servers: [{count: 1}]\nplacement: least-queue\nruns: 1\narrivals: {%s}\njobs: [%s]\n"
	return fmt.Appendf(nil, file, arrivals, jobs), dir
}

func run(t *testing.T, text []byte, dir string) (*Report, error) {
	t.Helper()
	s, err := Parse(text, dir)
	testhost.Must(t, err)
	return s.Run(t.Context(), 1, nil)
}

// TestCaptured checks that a job's work is the number that its match captures, times the factor.
func TestCaptured(t *testing.T) {
	for _, test := range []struct {
		jobs string
		mean float64 // seconds
	}{
		{byNumber, 4e6 * 35e-9},
		{`{match: 'n=(\d+)', captured: {factor: 0.8ns}}`, 4e6 * 0.8e-9},
		{`{match: 'n=(\d+)', captured: {factor: 0.035us}}`, 4e6 * 35e-9},
		{`{match: 'n=(\d+)', stages: [{captured: {factor: 35ns}}, {queue: io, captured: {factor: 10ns}},` +
			` {constant: 1ms}]}`, 4e6*45e-9 + 1e-3},
		{`{match: 'n=([24])0*$', captured: {factor: 35ms}}, {constant: 2ms}`, (6*35e-3 + 2e-3) / 3},
		{`{match: '(?:n)=(\d+)', captured: {factor: 35ns}}`, 4e6 * 35e-9},
	} {
		text, dir := withTrace(t, "queries: {file: trace}", test.jobs, loop)
		report, err := run(t, text, dir)
		if err != nil {
			t.Errorf("%s: %v", test.jobs, err)
			continue
		}
		if c := report.Cases[0]; c.Flows != 3 || math.Abs(float64(c.Mean.Value)-test.mean) > 1e-9 {
			t.Errorf("%s: %d flows of %v s, want 3 of %v s", test.jobs, c.Flows, c.Mean.Value, test.mean)
		}
	}
}

// TestCapturedAtALoad checks that captured numbers affect the speed of a trace that is given by a
// load.
func TestCapturedAtALoad(t *testing.T) {
	for jobs, work := range map[string]float64{
		`{match: 'n=(\d+)', captured: {factor: 50ns}}`:                      0.1 + 0.2 + 0.3,
		`{match: 'n=([24])0*$', captured: {factor: 50ms}}, {constant: 1s}`:  0.1 + 0.2 + 1,
		`{match: 'n=2', share: 0, constant: 1s}, {match: x, constant: 50s}`: 1 + 50 + 50,
	} {
		text, dir := withTrace(t, "queries: {file: trace, load: 0.5}", jobs, loop)
		s, err := Parse(text, dir)
		if err != nil {
			t.Errorf("%s: %v", jobs, err)
			continue
		}
		got, want := s.Cases[0].Config.Arrivals.(sim.Trace).Speed, 0.5*2/work
		if math.Abs(got/want-1) > 1e-9 {
			t.Errorf("%s: speed %v, want %v", jobs, got, want)
		}
	}
}

func TestBadCaptures(t *testing.T) {
	const (
		queries = "queries: {file: trace}"
		group   = `must have one group, such as n=(\d+), for captured`
		unit    = `must be a positive time with a unit, such as 35ns or 0.8ns`
	)
	type bad struct{ arrivals, jobs, problem string }
	tests := []bad{
		{queries, `{match: 'n=\d+', captured: {factor: 35ns}}`, `.match "n=\\d+": ` + group},
		{queries, `{match: '(n)=(\d+)', captured: {factor: 35ns}}`, `.match "(n)=(\\d+)": ` + group},
		{queries, `{captured: {factor: 35ns}}`, `.match: ` + group},
		{queries, `{match: '(', captured: {factor: 35ns}}`, `.match "(": error parsing regexp`},
		{queries, `{match: 'n=(\d+)', share: 1, captured: {factor: 35ns}}`,
			`.share "1": not allowed with captured, because a class that is drawn has no number`},
		{queries, `{match: 'n=(\d+)', constant: 1s, captured: {factor: 35ns}}`,
			`: captured and a distribution exclude each other`},
		{queries, `{match: 'n=(\d+)', captured: {factor: 35ns}, stages: [{constant: 1s}]}`,
			`: stages exclude a distribution and captured beside them`},
		{queries, `{match: 'n=(\d+)', captured: 35ns}`,
			`.captured "35ns": must be a mapping of field names to values`},
		{queries, `{match: 'n=(\d+)', captured: {}}`, `.captured.factor: ` + unit},
		{"poisson: {rate: 1}", byNumber + ", {constant: 1s}",
			": captured: only the queries of a trace have a number to capture"},
	}
	for _, text := range []string{"35", "0ns", "-1ns", "ns", "35 ns", "35m", "infns", "nanns", "1m35s"} {
		jobs := `{match: 'n=(\d+)', captured: {factor: ` + text + `}}`
		tests = append(tests, bad{queries, jobs, `.captured.factor "` + text + `": ` + unit})
	}
	for _, test := range tests {
		text, dir := withTrace(t, test.arrivals, test.jobs, loop)
		if strings.HasPrefix(test.arrivals, "poisson") {
			text = append(text, "measure: {connections: 10}\n"...)
		}
		want := "line 5: jobs[0]" + test.problem
		if _, err := Parse(text, dir); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s, %s\n got %v\nwant %s", test.arrivals, test.jobs, err, want)
		}
	}
}

// TestCapturedInOneCase checks that the error names the case whose flows have no queries although
// the file's jobs need queries.
func TestCapturedInOneCase(t *testing.T) {
	text, dir := withTrace(t, "queries: {file: trace}", byNumber, loop)
	text = append(text, "measure: {connections: 10}\n"+
		"cases: [{name: real}, {name: made, arrivals: {poisson: {rate: 1}}}]\n"...)
	_, err := Parse(text, dir)
	const want = "line 5: jobs[0]: captured: only the queries of a trace have a number to capture," +
		" in case made"
	if err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

// TestUnmatched checks that the class of a query that matches no job is drawn by the shares.
// Without shares, such a query is an error.
func TestUnmatched(t *testing.T) {
	const lines = loop + "3.5\t/index.html\n"
	text, dir := withTrace(t, "queries: {file: trace}", byNumber+", {constant: 1s}", lines)
	report, err := run(t, text, dir)
	if err != nil || report.Cases[0].Flows != 4 {
		t.Errorf("%+v, %v, want 4 flows", report, err)
	}
	for _, jobs := range []string{
		byNumber,
		byNumber + ", {share: 0, constant: 1s}",
		`{match: 'n=', share: 0, constant: 1s}`,
	} {
		text, dir := withTrace(t, "queries: {file: trace}", jobs, lines)
		want := filepath.Join(dir, "trace") + `:5: "3.5\t/index.html": the query matches no job`
		if _, err := run(t, text, dir); err == nil || err.Error() != want {
			t.Errorf("%s\n got %v\nwant %s", jobs, err, want)
		}
		text, dir = withTrace(t, "queries: {file: trace, load: 0.5}", jobs, lines)
		want = `line 4: arrivals.queries.file "trace": ` + filepath.Join(dir, "trace") +
			`:5: "3.5\t/index.html": the query matches no job`
		if _, err := Parse(text, dir); err == nil || err.Error() != want {
			t.Errorf("%s, at a load\n got %v\nwant %s", jobs, err, want)
		}
	}
}

// TestBadLinesOfTraces checks that an error in the first line is found without a run.
func TestBadLinesOfTraces(t *testing.T) {
	const optional = `{match: 'n=(\d+)?', captured: {factor: 35ns}}`
	for line, problem := range map[string]string{
		"1.0\t/dummy.php/?n=\n": `"1.0\t/dummy.php/?n=": captured "": must be a number, 0 or more`,
		"1.0 /dummy.php/?n=1\n": `"1.0 /dummy.php/?n=1": must be time<TAB>query`,
	} {
		text, dir := withTrace(t, "queries: {file: trace}", optional, "time\tquery\n"+line)
		want := filepath.Join(dir, "trace") + ":2: " + problem
		if _, err := Parse(text, dir); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// TestTraceExample runs the example with a trace. Its assertions must hold.
func TestTraceExample(t *testing.T) {
	s, err := Load("../../../docs/examples/sim/trace.yaml")
	testhost.Must(t, err)
	report, err := s.Run(t.Context(), 0, nil)
	testhost.Must(t, err)
	for i := range report.Assertions {
		if v := &report.Assertions[i]; !v.OK() {
			t.Errorf("%s: %s", v.Condition, v.Values)
		}
	}
	if diff := cmp.Diff([]string{}, report.Warnings); diff != "" || len(report.Assertions) == 0 {
		t.Errorf("%d assertions, warnings:\n%s", len(report.Assertions), diff)
	}
}
