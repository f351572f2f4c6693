// SPDX-License-Identifier: Apache-2.0

package report

import (
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"html"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/chart/charttest"
	"github.com/segue-lb/segue/research/testbed"
)

var update = flag.Bool("update", false, "write the golden files anew")

// mustWrite makes a report and returns the text of the page, with ordinary spaces in place of
// no-break spaces.
func mustWrite(t *testing.T, directory string, s Settings) (*Report, string) {
	t.Helper()
	report, err := Write(directory, s)
	testhost.Must(t, err)
	text, err := os.ReadFile(report.Page)
	testhost.Must(t, err)
	return report, strings.ReplaceAll(string(text), "\u00a0", " ")
}

// TestUnbroken checks that browsers cannot break the lines of the page inside of ρ = 0.5.
func TestUnbroken(t *testing.T) {
	directory := t.TempDir()
	results := small(t, directory, 0.1, 0.12)
	results.About = "With ρ = 0.5 only."
	results.Claims = []testbed.Claim{{Text: "at ρ = 0.5", Condition: "mean(sr4) at 0.5 ≥ 2"}}
	writeResults(t, directory, results)
	report, _ := mustWrite(t, directory, Settings{})
	page, err := os.ReadFile(report.Page)
	testhost.Must(t, err)
	if found := regexp.MustCompile(`[^"\n]{0,30} [=≥±] [0-9]`).FindAllString(string(page), -1); len(found) > 0 {
		t.Errorf("a line may be broken inside of %q", found)
	}
}

// TestDescribed checks that the page describes the cases, unless the file of the experiment cannot
// be read.
func TestDescribed(t *testing.T) {
	directory := t.TempDir()
	results := small(t, directory, 0.1)
	if _, page := mustWrite(t, directory, Settings{}); strings.Contains(page, `class="cases"`) {
		t.Error("cases are described, though the results have no file of the experiment")
	}
	results.Text = "title: A\npoints: [0.5]\ncases:\n" +
		"  - {name: sr4, placement: hunt, candidates: 2, accept: {policy: static, threshold: 4}}\n"
	writeResults(t, directory, results)
	const want = "<dt>sr4</dt><dd>a connection is offered to its 2 candidates in turn; " +
		"a server accepts it while its load is below 4 (SR4)</dd>"
	if _, page := mustWrite(t, directory, Settings{}); !strings.Contains(page, want) {
		t.Errorf("the page does not have %s", want)
	}
}

// TestStated checks the crosses at numbers of the paper: times, and ratios of two cases. Bounds and
// other measures have none.
func TestStated(t *testing.T) {
	f := &folder{Results: small(t, t.TempDir(), 0.1)}
	f.Cases = []string{"hash", "sr4"}
	f.Claims = []testbed.Claim{
		{Quantity: "mean", Of: "sr4", Paper: "0.2"},
		{Quantity: "mean", Of: "hash", Over: "sr4", At: 0.5, Paper: "0.6 / 0.2"},
		{Quantity: "mean", Of: "hash", Over: "sr4", Paper: "at most 1"},
		{Quantity: "mean", Of: "hash", Over: "sr4", Paper: "equal"},
		{Quantity: "p90", Of: "hash", Paper: "7"},
		{Quantity: "mean", Of: "hash", Over: "sr4", At: 0.6, Paper: "8"},
	}
	for points, want := range map[int]string{1: "[{1 200 0 0}] [{0 300 0 0}]", 2: "[{0.5 200 0 0} {0.6 200 0 0}] [{0.5 300 0 0}]"} {
		f.Points = []float64{0.5, 0.6}[:points]
		var got []string
		for _, series := range f.overall(measures[0], milliseconds).Series {
			if series.Style == chart.Crosses && series.Kind != "model" {
				var places []string
				for _, p := range series.Points {
					places = append(places, fmt.Sprintf("{%.3g %.3g %v %v}", p.X, p.Y, p.Low, p.High))
				}
				got = append(got, "["+strings.Join(places, " ")+"]")
			}
		}
		if got := strings.Join(got, " "); got != want {
			t.Errorf("%d points: crosses at %s, want %s", points, got, want)
		}
	}
}

// TestColoursOfCases checks that each case has one colour in all charts, over one point and over
// several.
func TestColoursOfCases(t *testing.T) {
	f := &folder{Results: small(t, t.TempDir(), 0.1)}
	f.Cases = []string{"hash", "round-robin", "sr4"}
	f.Runs[0].Failures = map[string]uint64{"reset": 1}
	for points := range 2 {
		f.Points = []float64{0.5, 0.6}[:points+1]
		charts := f.failures().figures
		for _, of := range []section{f.responses(), f.distributions("", "", "", measured)} {
			charts = append(charts, of.figures...)
		}
		for _, figure := range charts {
			for _, series := range figure.chart.Series {
				if name := series.Name; name != "" && !strings.HasPrefix(name, "sr4") {
					continue
				}
				if series.Look != 3 {
					t.Errorf("%d points, %s: series %q has look %d, want 3", points+1, figure.name,
						series.Name, series.Look)
				}
			}
		}
	}
}

// outline returns a line for each heading, notice, chart, detail and table of a page, with the
// names of the columns and the number of rows. It also checks that the page is well-formed.
func outline(t *testing.T, page string) string {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(page))
	d.Strict, d.AutoClose, d.Entity = false, xml.HTMLAutoClose, xml.HTMLEntity
	var out strings.Builder
	var text *strings.Builder // of the element whose text is collected
	rows, depth := 0, 0
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return out.String()
		}
		if err != nil {
			t.Fatalf("the page is not well-formed: %v", err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			attributes := map[string]string{}
			for _, a := range token.Attr {
				attributes[a.Name.Local] = a.Value
			}
			switch name := token.Name.Local; {
			case name == "svg" && attributes["role"] != "":
				fmt.Fprintf(&out, "%schart %s\n", strings.Repeat("  ", depth), attributes["aria-label"])
			case name == "div" && strings.HasPrefix(attributes["class"], "alarm"):
				fmt.Fprintf(&out, "%s\n", attributes["class"])
			case name == "table":
				fmt.Fprintf(&out, "%stable %s:", strings.Repeat("  ", depth), attributes["class"])
				rows = -1 // the first has the names of the columns
			case name == "tr":
				rows++
			case name == "details":
				depth++
			case slices.Contains([]string{"h1", "h2", "h3", "h4", "th", "summary", "dt"}, name):
				text = new(strings.Builder)
			}
		case xml.CharData:
			if text != nil {
				text.Write(token)
			}
		case xml.EndElement:
			switch name := token.Name.Local; {
			case name == "table":
				fmt.Fprintf(&out, " (%d)\n", rows)
			case name == "details":
				depth--
			case text != nil && name == "th":
				fmt.Fprintf(&out, " %s |", text)
				text = nil
			case text != nil:
				fmt.Fprintf(&out, "%s%s %s\n", strings.Repeat("  ", depth), name, text)
				text = nil
			}
		}
	}
}

// TestStructure compares the structure of a page about a sweep, a day and handshakes with the
// golden file.
func TestStructure(t *testing.T) {
	directory := t.TempDir()
	writeFixtures(t, directory, 1)
	report, page := mustWrite(t, directory, Settings{})
	got := outline(t, page)
	const golden = "testdata/structure.txt"
	if *update {
		writeFile(t, golden, got)
	}
	want, err := os.ReadFile(golden)
	testhost.Must(t, err)
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s, -want +got:\n%s", golden, diff)
	}
	for _, pattern := range []string{`<script`, `(src|href)="[^#]`, `url\(`, `@import`} {
		if found := regexp.MustCompile(pattern).FindString(page); found != "" {
			t.Errorf("the page has %q, so it is not self-contained", found)
		}
	}
	svgs, err := filepath.Glob(filepath.Join(directory, "*.svg"))
	testhost.Must(t, err)
	if inPage := strings.Count(page, `role="img"`); len(svgs) != inPage || report.Charts != inPage {
		t.Errorf("%d charts in the page, %d files, reported %d", inPage, len(svgs), report.Charts)
	}
	for _, file := range svgs {
		svg, err := os.ReadFile(file)
		testhost.Must(t, err)
		charttest.TextInside(t, svg)
	}
}

// cells returns the texts of the cells of each row of a table of a page.
func cells(t *testing.T, page, class string) (rows [][]string) {
	t.Helper()
	_, after, found := strings.Cut(page, `<table class="`+class+`">`)
	table, _, _ := strings.Cut(after, "</table>")
	if !found {
		t.Fatalf("the page has no table %s", class)
	}
	tags := regexp.MustCompile(`<[^>]*>`)
	for _, row := range strings.Split(table, "<tr")[2:] {
		var texts []string
		for _, cell := range regexp.MustCompile(`(?s)<td[^>]*>(.*?)</td>`).FindAllStringSubmatch(row, -1) {
			texts = append(texts, html.UnescapeString(strings.TrimSpace(tags.ReplaceAllString(cell[1], ""))))
		}
		rows = append(rows, texts)
	}
	return rows
}

// small returns results of one case at one point, with a run for each mean response time in
// seconds, and writes the files of the runs. The simulator has 0.1 s, and an omniscient balancer
// 0.08 s.
func small(t *testing.T, directory string, means ...float64) *testbed.Results {
	t.Helper()
	results := &testbed.Results{
		Experiment: "small", Title: "Small", Axis: testbed.Axis{Key: "load", Label: "load"},
		Cases: []string{"sr4"}, Points: []float64{0.5}, Seeds: len(means), Speed: 1, Planned: len(means),
	}
	for i, mean := range means {
		run := testbed.Run{
			Case: "sr4", Point: 0.5, Seed: uint64(i), Folder: fmt.Sprintf("run%d", i),
			Requests: 1000, Failed: 1, Failures: map[string]uint64{"reset": 1, "timeout": 0},
			Measured:  testbed.Response{Mean: mean, P50: mean / 2, P90: 2 * mean, P99: 10 * mean},
			Simulated: &testbed.Response{Mean: 0.1},
			Bound:     &testbed.Response{Mean: 0.08},
			Model:     &testbed.Response{Mean: 0.0987654},
		}
		results.Runs = append(results.Runs, run)
		writeFile(t, filepath.Join(directory, run.Folder, "loads.csv"), "time,s1,s2\n0,0,0\n0.2,3,1\n")
	}
	writeResults(t, directory, results)
	return results
}

// TestForwardTable checks the columns of packets, with cycles where these were counted.
func TestForwardTable(t *testing.T) {
	directory := t.TempDir()
	results := forwarding()
	results.Points, results.Planned = results.Points[:1], 2
	results.Runs = []testbed.Run{results.Runs[0], results.Runs[4]}
	results.Runs[1].Cycles = pointer(320.0)
	writeResults(t, directory, results)
	_, page := mustWrite(t, directory, Settings{})
	want := [][]string{
		{"hash", "1000 flows", "1", "110", "110", "132", "–", "9.09", "0"},
		{"hunt", "1000 flows", "1", "119", "119", "143", "320", "8.40", "0"},
	}
	if diff := cmp.Diff(want, cells(t, page, "results")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestCosts checks the table of CPU times and memory, which only some experiments have.
func TestCosts(t *testing.T) {
	directory := t.TempDir()
	results := small(t, directory, 0.1, 0.11)
	if _, page := mustWrite(t, directory, Settings{}); strings.Contains(page, "CPU time of a request") {
		t.Error("the page has CPU times, which were not measured")
	}
	for i := range results.Runs {
		results.Runs[i].CPU = &testbed.CPU{Balancers: 0.3, BalancerPrograms: 0.01 * float64(i+1), All: 1}
		results.Runs[i].Memory = &testbed.Memory{Processes: uint64(17+i) << 20, Kernel: 71 << 20}
	}
	writeResults(t, directory, results)
	_, page := mustWrite(t, directory, Settings{})
	want := [][]string{{"sr4", "ρ = 0.5", "300 ± 0", "15.0 ± 63.5", "0 ± 0", "0 ± 0", "1000 ± 0",
		"17.5 ± 6.4", "71.0 ± 0.0"}}
	if diff := cmp.Diff(want, cells(t, page, "cpu")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestTable checks the numbers of the table of all results. For three seeds, Student's factor is
// 4.303.
func TestTable(t *testing.T) {
	directory := t.TempDir()
	small(t, directory, 0.1, 0.11, 0.12)
	_, page := mustWrite(t, directory, Settings{})
	want := [][]string{{
		"sr4", "ρ = 0.5", "3", "110 ± 25", "55.0 ± 12.4", "220 ± 50", "1100 ± 248", "100 ± 0",
		"+10.0 ± 24.8", "80.0 ± 0.0", "1.38 ± 0.31", "98.8", "3 0.10%",
	}}
	if diff := cmp.Diff(want, cells(t, page, "results")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if !strings.Contains(page, `title="reset 3"`) {
		t.Error("the kinds of the failures are missing")
	}
	if strings.Contains(page, `<td class="number warn">`) {
		t.Error("a deviation of 10% is marked")
	}
}

// TestUse checks how the servers of each capacity are used. At a load of 0.6, the servers can do 4 s
// of work in a second, and get 2.4 s of it.
func TestUse(t *testing.T) {
	directory := t.TempDir()
	results := small(t, directory, 0.1, 0.1)
	for i := range results.Runs {
		run := &results.Runs[i]
		run.Load, run.Fairness, run.Overprovision = 0.6, 0.9, 1.5
		run.Shares = []testbed.Share{
			{Server: "s1", Capacity: 1, Responses: 200, Mean: 0.1, Busy: 1, Estimate: 1},
			{Server: "s2", Capacity: 1, Responses: 100, Mean: 0.4, Busy: 2, Estimate: 1},
			{Server: "s3", Capacity: 2, Responses: 500, Mean: 0.2, Busy: 4, Estimate: 1.5 + float64(i)},
		}
	}
	writeResults(t, directory, results)
	_, page := mustWrite(t, directory, Settings{})
	want := [][]string{
		{"sr4", "ρ = 0.5", "1 × 2", "62%", "75%", "200", "4.00", "0.900 ± 0.000", "1.50 ± 0.00", "2.00 ± 6.35"},
		{"", "", "2 × 1", "38%", "45%", "200", "1.50", "", "", ""},
	}
	if diff := cmp.Diff(want, cells(t, page, "use")); diff != "" {
		t.Errorf("the use of the servers, -want +got:\n%s", diff)
	}
}

// TestTypes checks the table and the charts of the types of requests.
func TestTypes(t *testing.T) {
	directory := t.TempDir()
	results := small(t, directory, 0.1)
	results.Runs[0].Types = map[string]testbed.Response{
		testbed.TypePage: {Mean: 0.2, P50: 0.1, P90: 0.4, P99: 1, Distribution: []testbed.DistributionPoint{
			{Seconds: 0.1, Share: 0.5}, {Seconds: 0.4, Share: 1},
		}},
	}
	writeResults(t, directory, results)
	_, page := mustWrite(t, directory, Settings{})
	want := [][]string{{"sr4", "ρ = 0.5", "page", "200", "100", "400", "1000"}}
	if diff := cmp.Diff(want, cells(t, page, "types")); diff != "" {
		t.Errorf("the types of requests, -want +got:\n%s", diff)
	}
	if !strings.Contains(page, "Distribution of response times: page") || strings.Contains(page, "times: static file") {
		t.Error("not just pages have a chart")
	}
}

// TestOrder checks the sentences about the order of the cases.
func TestOrder(t *testing.T) {
	directory := t.TempDir()
	results := small(t, directory, 0.2, 0.2)
	results.Cases = append(results.Cases, "least")
	for i, mean := range []float64{0.1, 0.12} {
		results.Runs = append(results.Runs, testbed.Run{
			Case: "least", Point: 0.5, Seed: uint64(i), Requests: 1,
			Measured: testbed.Response{Mean: mean}, Simulated: &testbed.Response{Mean: 0.05},
		})
	}
	results.Planned = len(results.Runs)
	writeResults(t, directory, results)
	_, page := mustWrite(t, directory, Settings{})
	if want := "<li>least takes 45.0% ± 63.5 less than sr4 (simulated: 50.0%), with a confidence of 96.5%</li>"; !strings.Contains(page, want) {
		t.Errorf("the page does not have %q", want)
	}
}

// TestHeldTables checks the tables of open connections, which have no times. For two seeds,
// Student's factor is 12.7.
func TestHeldTables(t *testing.T) {
	directory := t.TempDir()
	writeResults(t, directory, holding())
	_, page := mustWrite(t, directory, Settings{})
	want := [][]string{
		{"sc", "30 connections", "2", "2.50 ± 6.35", "0"},
		{"srdyn", "30 connections", "2", "1.50 ± 6.35", "0"},
	}
	if diff := cmp.Diff(want, cells(t, page, "results")); diff != "" {
		t.Errorf("results, -want +got:\n%s", diff)
	}
	want = [][]string{{"s1", "25", "42%"}, {"s2", "15", "25%"}, {"s3", "20", "33%"}}
	if diff := cmp.Diff(want, cells(t, page, "servers")); diff != "" {
		t.Errorf("servers, -want +got:\n%s", diff)
	}
}

// TestModelWithoutPercentiles checks that charts leave out percentiles that the model does not
// have.
func TestModelWithoutPercentiles(t *testing.T) {
	f := &folder{Results: small(t, t.TempDir(), 0.1, 0.11)}
	for points, want := range map[int][]string{
		1: {"sr4 sr4, simulated sr4, model", "sr4", "sr4"},
		2: {"sr4 sr4, simulated sr4, model", "sr4", "sr4"},
	} {
		f.Points = []float64{0.5, 0.6}[:points]
		var got []string
		for _, figure := range f.responses().figures {
			var names []string
			for _, series := range figure.chart.Series {
				names = append(names, series.Name)
			}
			got = append(got, strings.Join(names, " "))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%d points, series of mean, p90 and p99, -want +got:\n%s", points, diff)
		}
	}
}

// TestSingleRun checks that the interval of a single run's mean is that of the run, that other
// numbers have none, and that a large deviation is marked.
func TestSingleRun(t *testing.T) {
	directory := t.TempDir()
	results := small(t, directory, 0.12)
	results.Runs[0].Measured.Half = 0.004
	results.Runs[0].Model = nil
	writeResults(t, directory, results)
	_, page := mustWrite(t, directory, Settings{})
	want := [][]string{{
		"sr4", "ρ = 0.5", "1", "120 ± 4", "60.0", "240", "1200", "100", "+20.0", "80.0", "1.50",
		"1 0.10%",
	}}
	if diff := cmp.Diff(want, cells(t, page, "results")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if !strings.Contains(page, `<td class="number warn">&#43;20.0</td>`) {
		t.Error("a deviation of 20% is not marked")
	}
}

// TestClaims checks the table of claims, whose first column has the verdicts, which are visible on
// any screen there. Claims of missing runs are not judged.
func TestClaims(t *testing.T) {
	directory := t.TempDir()
	results := small(t, directory, 0.1)
	results.Claims = []testbed.Claim{
		{Text: "a", Condition: "b >= 2.3", Measured: pointer(2.34567), Simulated: pointer(0.012345), Met: pointer(true)},
		{Text: "c", Condition: "d < 1", Measured: pointer(1234.5), Model: pointer(0.0), Met: pointer(false)},
		{Text: "e", Condition: "f < 1"},
		{Text: "g", Condition: "cycles(h): 871", Uncounted: "no counter"},
	}
	writeResults(t, directory, results)
	_, page := mustWrite(t, directory, Settings{})
	want := [][]string{
		{"met", "a", "b >= 2.3", "2.35", "0.0123", "–"},
		{"not met", "c", "d < 1", "1234", "–", "0"},
		{"not judged", "e", "f < 1", "–", "–", "–"},
		{"not judged", "g", "cycles(h): 871; no counter", "–", "–", "–"},
	}
	if diff := cmp.Diff(want, cells(t, page, "claims")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if !strings.Contains(page, "Claims that are met: 1 of 2.") {
		t.Error("the number of met claims is missing")
	}
}

// TestIncomplete checks that a page says how many runs are missing, even if all are.
func TestIncomplete(t *testing.T) {
	directory := t.TempDir()
	results := small(t, directory, 0.1)
	notice := regexp.MustCompile(`Incomplete:</span> \d+ of \d+ runs`)
	if _, page := mustWrite(t, directory, Settings{}); notice.MatchString(page) {
		t.Error("complete results are called incomplete")
	}
	for _, runs := range []int{1, 0} {
		results.Planned, results.Runs = 7, results.Runs[:runs]
		writeResults(t, directory, results)
		_, page := mustWrite(t, directory, Settings{})
		want := fmt.Sprintf("Incomplete:</span> %d of 7 runs", runs)
		if got := notice.FindString(page); got != want {
			t.Errorf("notice %q, want %q", got, want)
		}
	}
}

// TestDisturbed checks that a page shows the warnings of runs, and what was left of the machine.
func TestDisturbed(t *testing.T) {
	directory := t.TempDir()
	results := small(t, directory, 0.1, 0.1, 0.1)
	results.Runs[0].Machine = testbed.Machine{Idle: 0.5, Generator: 0.123, LateP99: 0.0021}
	results.Runs[1].Machine = testbed.Machine{Idle: 0.02, Generator: 0.1, LateP99: 0.001}
	results.Runs[1].Warnings = []string{"only 2% was left", "it was late"}
	results.Runs[2].Warnings = []string{"the clock was set"}
	writeResults(t, directory, results)
	_, page := mustWrite(t, directory, Settings{})
	for _, want := range []string{
		"in 2 of 3 runs", "sr4, ρ = 0.5, seed 1: only 2% was left; it was late",
		"sr4, ρ = 0.5, seed 2: the clock was set",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not have %q", want)
		}
	}
	if want := [][]string{{"sr4", "ρ = 0.5", "2.0%", "12%", "2.10", "warning"}}; !cmp.Equal(want, cells(t, page, "machine")) {
		t.Errorf("machine %q, want %q", cells(t, page, "machine"), want)
	}
}

// TestEscaping checks that no text of the results becomes markup or leaves the directory.
func TestEscaping(t *testing.T) {
	const evil = `<script>"&'`
	directory := t.TempDir()
	results := small(t, directory, 0.1)
	results.Experiment, results.Title, results.Paper, results.Text = "../"+evil, evil, evil, evil
	results.Axis.Key, results.Axis.Label = "", evil
	results.Cases[0] = evil
	results.Claims = []testbed.Claim{{Text: evil, Condition: evil}}
	results.Environment = testbed.Environment{Version: evil, Kernel: evil, CPU: evil}
	run := &results.Runs[0]
	run.Case, run.Warnings, run.Failures = evil, []string{evil}, map[string]uint64{evil: 1}
	run.Shares = []testbed.Share{{Server: evil, Responses: 1, Accepted: 1}}
	writeResults(t, directory, results)
	_, page := mustWrite(t, directory, Settings{})
	if strings.Contains(page, "<script") {
		t.Error("the page has a script")
	}
	if n := strings.Count(page, "&lt;script&gt;"); n < 15 {
		t.Errorf("only %d escaped texts", n)
	}
	outline(t, page) // checks that the page is well-formed
	outside, err := filepath.Glob(filepath.Join(filepath.Dir(directory), "*.svg"))
	if err != nil || len(outside) > 0 {
		t.Errorf("files outside the directory: %q, error %v", outside, err)
	}
}

// TestSeveral checks the page of several directories of results, of which two have the same
// experiment, and names that differ only in characters that files do not have.
func TestSeveral(t *testing.T) {
	directory := t.TempDir()
	for _, name := range []string{"a b", "a-b", "[c]"} {
		small(t, filepath.Join(directory, "in [x]", name), 0.1)
	}
	output := filepath.Join(t.TempDir(), "new", "folder")
	report, page := mustWrite(t, filepath.Join(directory, "in [x]"), Settings{Directory: output})
	if report.Experiments != 3 || report.Page != filepath.Join(output, "report.html") {
		t.Errorf("report %+v", report)
	}
	var ids []string
	for _, id := range regexp.MustCompile(`<a href="#([^"]*)">`).FindAllStringSubmatch(page, -1) {
		ids = append(ids, id[1])
		if !strings.Contains(page, `<article id="`+id[1]+`">`) {
			t.Errorf("no article %s", id[1])
		}
		if _, err := os.Stat(filepath.Join(output, id[1]+"-mean.svg")); err != nil {
			t.Error(err)
		}
	}
	if want := []string{"-c-", "a-b", "a-b-2"}; !slices.Equal(ids, want) {
		t.Errorf("contents %q, want %q", ids, want)
	}
}

// TestErrors checks that errors name the file and the value, and that nothing is written then.
func TestErrors(t *testing.T) {
	const gone = "\x00" // instead of the content of a file that is removed
	for _, test := range []struct {
		name       string
		change     func(r *testbed.Results)
		file, text string // a file that is replaced
		want       string
	}{
		{name: "no results", file: "results.json", text: gone,
			want: ": neither this directory nor a directory in it has a file results.json"},
		{name: "cut off", file: "results.json", text: "{\n\"title\":", want: "results.json: unexpected end of JSON input"},
		{name: "wrong type", file: "results.json", text: `{"seeds": "three"}`,
			want: "results.json: json: cannot unmarshal string into Go struct field Results.seeds of type int"},
		{name: "speed", change: func(r *testbed.Results) { r.Speed = 0 }, want: "results.json: speed 0: must be positive"},
		{name: "bin", change: func(r *testbed.Results) { r.Bin = -1 }, want: "results.json: bin -1: must not be negative"},
		{name: "points", change: func(r *testbed.Results) { r.Points = []float64{2, 1} },
			want: "results.json: points [2 1]: must be in ascending order"},
		{name: "planned", change: func(r *testbed.Results) { r.Planned = 0 }, want: "results.json: planned 0: there are 1 runs"},
		{name: "case", change: func(r *testbed.Results) { r.Runs[0].Case = "x" },
			want: `results.json: runs[0].case "x": must be one of the cases sr4`},
		{name: "point", change: func(r *testbed.Results) { r.Runs[0].Point = 3 },
			want: "results.json: runs[0].point 3: must be one of the points [0.5]"},
		{name: "folder", change: func(r *testbed.Results) { r.Runs[0].Folder = "../x" },
			want: `results.json: runs[0].folder "../x": must be a path inside`},
		{name: "failed", change: func(r *testbed.Results) { r.Runs[0].Failed = 1001 },
			want: "results.json: runs[0].failed 1001: there are 1000 requests"},
		{name: "negative", change: func(r *testbed.Results) { r.Runs[0].Simulated.P90 = -1 },
			want: "results.json: runs[0].simulated.p90 -1: must not be negative"},
		{name: "negative bound", change: func(r *testbed.Results) { r.Runs[0].Bound.Mean = -1 },
			want: "results.json: runs[0].bound.mean -1: must not be negative"},
		{name: "distribution", change: func(r *testbed.Results) {
			r.Runs[0].Measured.Distribution = []testbed.DistributionPoint{{Seconds: 1, Share: 0.5}, {Seconds: 0.5, Share: 1}}
		}, want: "results.json: runs[0].measured.distribution[1] {0.5 1}: times and shares must ascend"},
		{name: "no loads", file: "run0/loads.csv", text: gone, want: "run0/loads.csv: no such file"},
		{name: "load", file: "run0/loads.csv", text: "time,s1,s2\n0,0,0\n0.2,1,many\n",
			want: `run0/loads.csv:3: s2 "many": must be a number from 0`},
		{name: "columns", file: "run0/loads.csv", text: "s1,s2\n0,0\n",
			want: `run0/loads.csv:1: ["s1" "s2"]: the columns must be time and the servers`},
		{name: "fields", file: "run0/loads.csv", text: "time,s1,s2\n0,0\n",
			want: "run0/loads.csv: record on line 2: wrong number of fields"},
		{name: "empty", file: "run0/loads.csv", want: "run0/loads.csv: is empty"},
		{name: "order", file: "run0/loads.csv", text: "time,s1\n3,0\n2,0\n",
			want: "run0/loads.csv:3: time 2: is before the time 3"},
		{name: "no requests", change: withBin, want: "run0/requests.csv.gz: no such file"},
		{name: "not packed", change: withBin, file: "run0/requests.csv.gz", text: "time,query\n",
			want: "run0/requests.csv.gz: gzip: invalid header"},
		{name: "cut off requests", change: withBin, file: "run0/requests.csv.gz",
			text: packed(t, "0,/,s1,succeeded,1,1\n")[:30], want: "run0/requests.csv.gz: unexpected EOF"},
		{name: "latency", change: withBin, file: "run0/requests.csv.gz", text: packed(t, "0,/,s1,succeeded,-1,1\n"),
			want: `run0/requests.csv.gz:2: latency "-1": must be a number from 0`},
		{name: "bins", change: withBin, file: "run0/requests.csv.gz", text: packed(t, "90000,/,s1,succeeded,1,1\n"),
			want: "run0/requests.csv.gz: a request at 90000 s: bins of 1 s would be more than 2000"},
	} {
		t.Run(test.name, func(t *testing.T) {
			directory := t.TempDir()
			results := small(t, directory, 0.1)
			if test.change != nil {
				test.change(results)
				writeResults(t, directory, results)
			}
			path := filepath.Join(directory, test.file)
			switch {
			case test.file == "":
			case test.text != gone:
				writeFile(t, path, test.text)
			default:
				testhost.Must(t, os.Remove(path))
			}
			_, err := Write(directory, Settings{})
			if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), directory) {
				t.Errorf("error %v, want %q", err, test.want)
			}
			if _, err := os.Stat(filepath.Join(directory, "report.html")); err == nil {
				t.Error("a page was written")
			}
		})
	}
}

func withBin(r *testbed.Results) { r.Bin = 1 }
