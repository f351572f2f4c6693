// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"encoding/csv"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/testhost"
	lab "github.com/segue-lb/segue/research/testbed"
)

var update = flag.Bool("update", false, "write docs/research/papers.md anew")

const (
	papersPage = "../../docs/research/papers.md"
	// resultsFolder has rows.csv of segue-lab repro, and EXPERIMENT.csv of segue-lab lab report.
	resultsFolder = "../../docs/research/results/"
)

// Where a claim of a paper can be looked at.
const (
	onPackets   = "packets"
	inSimulator = "simulator"
	inModel     = "model"
	inTestRun   = "test run"
)

var allWheres = []string{onPackets, inSimulator, inModel, inTestRun}

// The verdicts.
const (
	inside        = "inside"
	outside       = "outside"
	notComparable = "not comparable"
	notMeasured   = "not measured"
)

// paper is a paper in papers.yaml, which describes the fields.
type paper struct {
	Paper string
	Rows  []paperRow
}

type paperRow struct {
	Place, Claim             string
	Figures, Experiments     map[string][]string
	Tests                    map[string][]string
	Why                      map[string]string
	Incomparable, Unmeasured string
}

// paperLine is a line of the page: a claim where it was looked at.
type paperLine struct {
	where, source, paper, here, verdict, reason string
}

func readPapers(t *testing.T) (papers []paper) {
	t.Helper()
	text, err := os.ReadFile("papers.yaml")
	testhost.Must(t, err)
	testhost.Must(t, yaml.Load(text, &papers, yaml.WithKnownFields()))
	return papers
}

// published has the results that the page compares.
type published struct {
	checks      map[string][]Check         // by figure
	experiments map[string]*lab.Results    // nil for an experiment without a file of runs
	claims      map[string][]lab.Claim     // by experiment, judged if there is a file of runs
	kinds       map[string]lab.Kind        // by experiment
	used        map[string]map[string]bool // by figure or experiment, and quantity or text: a row has it
}

// readRows returns the published rows of segue-lab repro, by figure.
func readRows(t *testing.T) map[string][]Check {
	t.Helper()
	file, err := os.Open(resultsFolder + "rows.csv")
	testhost.Must(t, err)
	defer file.Close()
	lines, err := csv.NewReader(file).ReadAll()
	testhost.Must(t, err)
	if !slices.Equal(lines[0], rowColumns) {
		t.Fatalf("rows.csv has the columns %v, want %v", lines[0], rowColumns)
	}
	rows := map[string][]Check{}
	for _, l := range lines[1:] {
		c := Check{Figure: l[0], Quantity: l[2], Paper: mustParse(l[3]).Statement, OK: l[7] == inside}
		c.Measured, err = strconv.ParseFloat(l[4], 64)
		testhost.Must(t, err)
		c.Tolerance, err = strconv.ParseFloat(l[6], 64)
		testhost.Must(t, err)
		rows[c.Figure] = append(rows[c.Figure], c)
	}
	return rows
}

func readPublished(t *testing.T) *published {
	t.Helper()
	p := &published{
		checks: readRows(t), experiments: map[string]*lab.Results{},
		claims: map[string][]lab.Claim{}, kinds: map[string]lab.Kind{}, used: map[string]map[string]bool{},
	}
	for _, name := range lab.Names() {
		e, _, err := lab.Load(name)
		testhost.Must(t, err)
		p.claims[name], p.kinds[name] = e.Claims, e.Kind
		results, err := lab.ReadCSV(resultsFolder + name + ".csv")
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		testhost.Must(t, err)
		p.experiments[name], p.claims[name] = results, results.Claims
	}
	return p
}

// use notes that a row has a quantity or a claim.
func (p *published) use(name, text string) {
	if p.used[name] == nil {
		p.used[name] = map[string]bool{}
	}
	p.used[name][text] = true
}

// modelFigures are figures that are computed. The others are simulated.
var modelFigures = []string{
	"6lb-6", "6lb-8a", "6lb-8b", "6lb-8c", "6lb-8d", "6lb-8e", "6lb-8f", "6lb-9", "hlb-2",
}

// selected returns the elements whose text has one of the beginnings. Each beginning must be that of an
// element.
func selected[T any](all []T, text func(T) string, beginnings []string) (some []T, err error) {
	for _, beginning := range beginnings {
		n := len(some)
		for _, one := range all {
			if strings.HasPrefix(text(one), beginning) {
				some = append(some, one)
			}
		}
		if n == len(some) {
			err = errors.Join(err, fmt.Errorf("nothing begins with %q", beginning))
		}
	}
	return some, err
}

// lines returns the lines of a row, in the order of allWheres.
func (p *published) lines(row paperRow) (lines []paperLine, err error) {
	for _, name := range slices.Sorted(maps.Keys(row.Experiments)) {
		claims, problem := selected(p.claims[name], func(c lab.Claim) string { return c.Text }, row.Experiments[name])
		if problem != nil {
			err = errors.Join(err, fmt.Errorf("experiment %s: %w", name, problem))
			continue
		}
		lines = append(lines, p.ofExperiment(name, claims))
	}
	for _, name := range slices.Sorted(maps.Keys(row.Figures)) {
		checks, problem := selected(p.checks[name], func(c Check) string { return c.Quantity }, row.Figures[name])
		if problem != nil {
			err = errors.Join(err, fmt.Errorf("figure %s: %w", name, problem))
			continue
		}
		lines = append(lines, p.ofFigure(name, checks))
	}
	for _, where := range slices.Sorted(maps.Keys(row.Tests)) {
		names := "`" + strings.Join(row.Tests[where], "`, `") + "`"
		lines = append(lines, paperLine{where: where, source: "tests", here: names, verdict: inside})
	}
	if row.Incomparable != "" {
		lines = append(lines, paperLine{verdict: notComparable, reason: row.Incomparable})
	}
	if row.Unmeasured != "" {
		lines = append(lines, paperLine{verdict: notMeasured, reason: row.Unmeasured})
	}
	if len(lines) == 0 {
		err = errors.Join(err, errors.New("no verdict"))
	}
	slices.SortStableFunc(lines, func(a, b paperLine) int {
		return slices.Index(allWheres, a.where) - slices.Index(allWheres, b.where)
	})
	return lines, errors.Join(err, explain(row, lines))
}

// explain gives each line outside its reason. A reason of lines that are not outside is an error, and so
// is a line outside without a reason.
func explain(row paperRow, lines []paperLine) (err error) {
	explained := map[string]bool{}
	for i := range lines {
		l := &lines[i]
		if !strings.HasPrefix(l.verdict, outside) {
			continue
		}
		l.reason = row.Why[l.where]
		explained[l.where] = true
		if l.reason == "" {
			err = errors.Join(err, fmt.Errorf("%s: outside (%s, paper %s), and why is missing", l.where, l.here, l.paper))
		}
	}
	for where := range row.Why {
		if !explained[where] {
			err = errors.Join(err, fmt.Errorf("%s: why is stale, because nothing is outside", where))
		}
	}
	return err
}

// compared are values with the statements of the paper.
type compared struct {
	paper    string
	measured float64
	ok       bool
}

// fill sets the verdict of a line, and shows the values: all of them, or their range.
func (l *paperLine) fill(all []compared) {
	good := 0
	var papers []string
	low, high := all[0].measured, all[0].measured
	for _, c := range all {
		if c.ok {
			good++
		}
		if !slices.Contains(papers, c.paper) {
			papers = append(papers, c.paper)
		}
		low, high = min(low, c.measured), max(high, c.measured)
	}
	digits := func(v float64) string {
		if v == math.Trunc(v) && math.Abs(v) > 1 {
			return strconv.FormatFloat(v, 'f', 0, 64)
		}
		return fmt.Sprintf("%#.3g", v)
	}
	l.paper = strings.Join(papers, "; ")
	switch l.here = digits(all[0].measured); {
	case len(all) == 2:
		l.here += ", " + digits(all[1].measured)
	case len(all) > 2:
		l.here = digits(low) + " to " + digits(high)
	}
	switch bad := len(all) - good; {
	case bad == 0:
		l.verdict = inside
	case len(all) == 1:
		l.verdict = outside
	default:
		l.verdict = fmt.Sprintf("%s, %d of %d", outside, bad, len(all))
	}
}

// withTolerance writes a statement for readers.
func withTolerance(statement string, tolerance float64) string {
	if tolerance > 0 {
		return fmt.Sprintf("%s ± %.2g", statement, tolerance)
	}
	return statement
}

// ofFigure returns the line of a figure's rows.
func (p *published) ofFigure(name string, checks []Check) paperLine {
	l := paperLine{where: inSimulator, source: "`" + name + "`"}
	if slices.Contains(modelFigures, name) {
		l.where = inModel
	}
	var all []compared
	for _, c := range checks {
		p.use(name, c.Quantity)
		all = append(all, compared{withTolerance(c.Paper.String(), c.Tolerance), c.Measured, c.OK})
	}
	l.fill(all)
	return l
}

// ofExperiment returns the line of an experiment's claims.
func (p *published) ofExperiment(name string, claims []lab.Claim) paperLine {
	l := paperLine{where: onPackets, source: "`" + name + "`", verdict: notMeasured}
	if p.kinds[name] == lab.KindForward {
		l.where = inTestRun
	}
	var all []compared
	for _, c := range claims {
		p.use(ofExperiment+name, c.Text)
		switch {
		case c.Unjudged != "":
			l.verdict, l.reason = notComparable, c.Unjudged
		case c.Uncounted != "":
			l.verdict, l.reason = notComparable, c.Uncounted
		case c.Met != nil:
			tolerance := 0.0
			if c.Tolerance != nil {
				tolerance = *c.Tolerance
			}
			all = append(all, compared{withTolerance(c.Paper, tolerance), *c.Measured, *c.Met})
		}
	}
	switch {
	case len(all) > 0:
		l.fill(all)
	case l.reason != "":
	case p.experiments[name] == nil:
		l.reason = "no published run has its single seeds"
	default:
		l.reason = "the published run does not have this point"
	}
	return l
}

// ofExperiment distinguishes experiments from figures of the same name in published.used.
const ofExperiment = "experiment "

// inventory has the places of each paper, and the numbers of its claims.
var inventory = map[string]struct{ places, numbers []string }{
	"SRLB": {
		slices.Concat(numbered("figure", 8), numbered("algorithm", 2)),
		strings.Fields("2.3 0.88 0.61 0.25 0.20 0.48 0.28"),
	},
	"6LB": {
		slices.Concat(numbered("figure", 13), numbered("algorithm", 3),
			[]string{"table I", "table II", "table III", "theorem 1", "footnote 3"},
			numbered("equation", 11), lettered("figure 8", 6), lettered("figure 10", 3),
			lettered("figure 11", 6), lettered("figure 12", 3)),
		strings.Fields("2.3 0.87 0.89 0.71 0.9 44% 1.368 10% 0.983 71 4.5% 40 48 17% 0.58 1024 128 69 57 32 38% " +
			"2% 4% 28 400 110 0.22 0.18 0.16 0.67 0.32 0.31 8% 100,000 72 56 96 80 88 44 140 70"),
	},
	"SHELL": {
		slices.Concat(numbered("figure", 7), numbered("algorithm", 1), []string{"table I", "table II", "table III"}),
		strings.Fields("59.8 8.96 22 56 2.1 8.2 9.0 1.8 7.7 8.5 1% 5% third"),
	},
	"HLB": {
		slices.Concat(numbered("figure", 24), numbered("algorithm", 1),
			[]string{"table I", "table II", "table III", "table IV", "footnote 3"}, lettered("figure 4", 2),
			lettered("figure 11", 2), lettered("figure 12", 2), lettered("figure 16", 2), lettered("figure 18", 2),
			lettered("figure 23", 2), lettered("figure 24", 2)),
		strings.Fields("64 23.66% 26.43% 38.22% 2.3 71% 131% 35% 24.64% 25.59% 12.14 74.2% 871 8% 31 87.38% 88.5% 200"),
	},
}

// numbered returns "figure 1" to "figure n", for example.
func numbered(kind string, n int) (places []string) {
	for i := range n {
		places = append(places, fmt.Sprintf("%s %d", kind, i+1))
	}
	return places
}

// lettered returns "figure 8a" and so on.
func lettered(figure string, n int) (places []string) {
	for i := range n {
		places = append(places, fmt.Sprintf("%s%c", figure, 'a'+i))
	}
	return places
}

// has tells whether a row is about a place: its own, a part of it, or one of several, as in "equations
// (3) to (6)".
func (r paperRow) has(place string) bool {
	kind, number, _ := strings.Cut(place, " ")
	if kind == "equation" {
		from, to, n := 0, 0, 0
		fmt.Sscan(number, &n)
		text := strings.NewReplacer("(", "", ")", "", ",", "").Replace(r.Place)
		switch {
		case strings.HasPrefix(text, "equations"):
			fmt.Sscanf(strings.Replace(text, "and", "to", 1), "equations %d to %d", &from, &to)
		case strings.HasPrefix(text, "equation"):
			fmt.Sscanf(text, "equation %d", &from)
			to = from
		}
		return from <= n && n <= to
	}
	for part := range strings.SplitSeq(r.Place, ", ") {
		letter, isPart := strings.CutPrefix(part, place)
		if isPart && (letter == "" || len(letter) == 1 && letter >= "a" && letter <= "z") {
			return true
		}
	}
	return false
}

// TestEveryPlaceHasARow checks that papers.yaml has each figure, table, algorithm, equation and numbered
// claim of the papers.
func TestEveryPlaceHasARow(t *testing.T) {
	papers := readPapers(t)
	if len(papers) != len(inventory) {
		t.Errorf("%d papers, want %d", len(papers), len(inventory))
	}
	for _, p := range papers {
		want := inventory[p.Paper]
		for _, place := range want.places {
			if !slices.ContainsFunc(p.Rows, func(r paperRow) bool { return r.has(place) }) {
				t.Errorf("%s: papers.yaml has no row for %s", p.Paper, place)
			}
		}
		for _, number := range want.numbers {
			if !slices.ContainsFunc(p.Rows, func(r paperRow) bool { return hasWord(r.Claim, number) }) {
				t.Errorf("%s: papers.yaml has no claim with %s", p.Paper, number)
			}
		}
	}
}

// hasWord tells whether a text has a word, apart from punctuation around it.
func hasWord(text, word string) bool {
	return slices.ContainsFunc(strings.Fields(text), func(w string) bool { return strings.Trim(w, ",.;:()") == word })
}

// TestPapersPage checks that papers.yaml has each row of segue-lab repro and each claim of a paper in an
// experiment, that it refers only to those, and that docs/research/papers.md follows from it and from
// the published results.
func TestPapersPage(t *testing.T) {
	p := readPublished(t)
	counts := map[string]int{}
	var tables strings.Builder
	for _, one := range readPapers(t) {
		fmt.Fprintf(&tables, "\n## %s\n\n| place | claim | where | paper | here | verdict | why |\n|%s\n",
			one.Paper, strings.Repeat("---|", 7))
		for _, row := range one.Rows {
			lines, err := p.lines(row)
			if err != nil {
				t.Errorf("papers.yaml, %s, %s, %q: %v", one.Paper, row.Place, row.Claim, err)
			}
			place, claim := row.Place, row.Claim
			for _, l := range lines {
				verdict, _, _ := strings.Cut(l.verdict, ",")
				counts[verdict]++
				fmt.Fprintf(&tables, "| %s | %s | %s | %s | %s | %s | %s |\n", place, claim,
					strings.Trim(l.where+": "+l.source, ": "), l.paper, l.here, l.verdict, l.reason)
				place, claim = "", ""
			}
		}
	}
	p.reportUnused(t)
	text, err := os.ReadFile(papersPage)
	testhost.Must(t, err)
	head, _, found := strings.Cut(string(text), generatedBelow)
	if !found {
		t.Fatalf("%s lacks the line %s", papersPage, generatedBelow)
	}
	want := fmt.Sprintf("%s%s\n**%d lines are inside, %d are outside, %d are not comparable, and %d are not measured.**\n%s",
		head, generatedBelow, counts[inside], counts[outside], counts[notComparable], counts[notMeasured], &tables)
	if *update {
		testhost.Must(t, os.WriteFile(papersPage, []byte(want), 0o644))
	} else if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Errorf("%s is not up to date; -update writes it (-want +got):\n%s", papersPage, diff)
	}
}

// generatedBelow is the line above the generated part of the page.
const generatedBelow = "<!-- The rest of this page is generated: go test ./research/repro -run PapersPage -update -->\n"

// reportUnused reports the rows of segue-lab repro, and the claims of papers in experiments, to which no
// row of papers.yaml refers.
func (p *published) reportUnused(t *testing.T) {
	for figure, checks := range p.checks {
		for _, c := range checks {
			if !p.used[figure][c.Quantity] {
				t.Errorf("papers.yaml does not refer to %q of the figure %s", c.Quantity, figure)
			}
		}
	}
	for name, claims := range p.claims {
		for _, c := range claims {
			if c.Ours == "" && !p.used[ofExperiment+name][c.Text] {
				t.Errorf("papers.yaml does not refer to the claim %q of the experiment %s", c.Text, name)
			}
		}
	}
}
