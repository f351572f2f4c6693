// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/tables"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/chart/charttest"
	"github.com/segue-lb/segue/research/tolerance"
)

// counted is a figure that counts how often it was made.
func counted(name string, times *int) Figure {
	return Figure{
		Name:   name,
		Title:  "A <title>",
		Source: "section I",
		make: func(_ context.Context, r *run) error {
			*times++
			r.draw(
				chart.Chart{
					Title: name,
					Series: []chart.Series{
						{Name: "SC, of 5", Points: []chart.Point{{X: float64(r.Seed), Y: 2}}}, {Name: "SR4"},
					},
				},
			)
			r.about("two at ρ = 2", "2.0", 2.05, digits, "because")
			r.about("three", "3.0", 3.2, digits, "because")
			r.atMost("at most one", "1", 1.05, drawn, "")
			r.atLeast("at least one", "1", 0.8, drawn, "")
			return nil
		},
	}
}

func mustMake(t *testing.T, figures []Figure, s Settings) []Outcome {
	t.Helper()
	outcomes, err := Make(t.Context(), figures, s)
	testhost.Must(t, err)
	return outcomes
}

// TestMake makes a figure and finds it again. It makes the figure anew for other settings, and if
// its file is incomplete.
func TestMake(t *testing.T) {
	times := 0
	figures := []Figure{counted("6lb-x", &times)}
	s := Settings{Seed: 1, Workers: 1, Directory: filepath.Join(t.TempDir(), "new")}
	first := mustMake(t, figures, s)
	if times != 1 || first[0].Stored {
		t.Fatalf("made %d times", times)
	}
	if look := first[0].Charts[0].Series[1].Look; look != caseOf("SR4").look {
		t.Errorf("SR4 has the look %d", look)
	}
	var told []string
	telling := s
	telling.Progress = func(what string) { told = append(told, what) }
	again := mustMake(t, figures, telling)
	if times != 1 || !again[0].Stored {
		t.Errorf("made again though it was stored")
	}
	if want := []string{"6lb-x (1 of 1)", "6lb-x was made before"}; !slices.Equal(told, want) {
		t.Errorf("told %q, want %q", told, want)
	}
	if diff := cmp.Diff(first[0].Result, again[0].Result); diff != "" {
		t.Errorf("stored result (-made +read):\n%s", diff)
	}
	for _, other := range []Settings{
		{Seed: 2, Workers: 1, Directory: s.Directory},
		{Seed: 2, Workers: 1, Directory: s.Directory, Quick: true},
	} {
		before := times
		if mustMake(t, figures, other); times != before+1 {
			t.Errorf("%+v: not made anew", other)
		}
	}
	testhost.Must(t, os.WriteFile(filepath.Join(s.Directory, "6lb-x.json"), []byte(`{"Key":`), 0o644))
	if before := times; mustMake(t, figures, s) == nil || times != before+1 {
		t.Error("not made anew though the file is not whole")
	}
	testhost.Must(t, os.Remove(filepath.Join(s.Directory, "6lb-x.svg")))
	if before := times; mustMake(t, figures, s) == nil || times != before {
		t.Error("made anew for a chart that was removed")
	}

	var names []string
	entries, err := os.ReadDir(s.Directory)
	testhost.Must(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if want := []string{"6lb-x.csv", "6lb-x.json", "6lb-x.svg", "index.html", "rows.csv"}; !slices.Equal(names, want) {
		t.Errorf("files %v, want %v", names, want)
	}
}

// TestInterrupted checks that the figures before an error are kept.
func TestInterrupted(t *testing.T) {
	times := 0
	broken := Figure{Name: "6lb-y", make: func(ctx context.Context, r *run) error {
		return r.each(ctx, 3, func(_ context.Context, i int) error {
			if i == 1 {
				return errors.New("no such thing")
			}
			return nil
		})
	}}
	s := Settings{Workers: 2, Directory: t.TempDir()}
	_, err := Make(t.Context(), []Figure{counted("6lb-x", &times), broken}, s)
	if err == nil || err.Error() != "figure 6lb-y: no such thing" {
		t.Errorf("error %v", err)
	}
	if outcomes := mustMake(t, []Figure{counted("6lb-x", &times)}, s); !outcomes[0].Stored || times != 1 {
		t.Error("the figure before the error is lost")
	}
}

// TestCancelled interrupts the making of a figure, and checks that the error names the figure.
func TestCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	endless := Figure{Name: "6lb-z", make: func(ctx context.Context, r *run) error {
		return r.each(ctx, 1000, func(ctx context.Context, i int) error {
			if i == 2 {
				cancel()
			}
			return ctx.Err()
		})
	}}
	_, err := Make(ctx, []Figure{endless}, Settings{Workers: 1, Directory: t.TempDir()})
	if err == nil || !strings.HasPrefix(err.Error(), "interrupted at figure 6lb-z: context canceled; ") {
		t.Errorf("error %v", err)
	}
}

func TestVerdicts(t *testing.T) {
	times := 0
	s := Settings{Workers: 1, Quick: true, Directory: t.TempDir()}
	outcomes := mustMake(t, []Figure{counted("6lb-x", &times)}, s)
	var got []bool
	for _, c := range outcomes[0].Checks {
		got = append(got, c.OK)
	}
	if want := []bool{true, false, true, false}; !slices.Equal(got, want) {
		t.Errorf("inside: %v, want %v", got, want)
	}
	rows, err := os.ReadFile(filepath.Join(s.Directory, "rows.csv"))
	testhost.Must(t, err)
	const want = "figure,runs,quantity,paper,measured,rule,tolerance,verdict,note\n" +
		"6lb-x,quick,two at ρ = 2,2,2.05,printed digits,0.05,inside,because\n" +
		"6lb-x,quick,three,3,3.2,printed digits,0.05,outside,because; reason: unexplained\n" +
		"6lb-x,quick,at most one,at most 1,1.05,\"drawing, 5%\",0.05,inside,\n" +
		"6lb-x,quick,at least one,at least 1,0.8,\"drawing, 5%\",0.05,outside,reason: unexplained\n"
	if diff := cmp.Diff(want, string(rows)); diff != "" {
		t.Errorf("rows.csv, -want +got:\n%s", diff)
	}
}

// TestCheckJSON checks the keys that other programs rely on, and that statements are the same after
// writing and reading.
func TestCheckJSON(t *testing.T) {
	for want, paper := range map[string]tolerance.Statement{
		`2.3`:              {Relation: tolerance.About, Value: 2.3},
		`"at most 0.045"`:  {Relation: tolerance.AtMost, Value: 0.045},
		`"at least 1e-06"`: {Relation: tolerance.AtLeast, Value: 1e-6},
		`"more than 1"`:    {Relation: tolerance.MoreThan, Value: 1},
	} {
		check := Check{
			Figure:    "f",
			Quantity:  "q",
			Paper:     paper,
			Measured:  1,
			Rule:      tolerance.Drawing,
			Tolerance: 2,
			OK:        true,
			Note:      "n",
		}
		got, err := json.Marshal(check)
		testhost.Must(t, err)
		text := `{"figure":"f","quantity":"q","paper":` + want +
			`,"measured":1,"rule":"drawing, 5%","tolerance":2,"ok":true,"note":"n"}`
		if string(got) != text {
			t.Errorf("%s, want %s", got, text)
		}
		var back Check
		if err := json.Unmarshal(got, &back); err != nil || back != check {
			t.Errorf("%s is read as %+v, error %v", got, back, err)
		}
	}
	if err := json.Unmarshal([]byte(`"around 3"`), new(tolerance.Statement)); err == nil {
		t.Error("no error for a statement without a relation")
	}
}

// TestNotFinite checks that values that neither JSON nor a chart can contain are refused.
func TestNotFinite(t *testing.T) {
	figure := Figure{Name: "6lb-x", make: func(_ context.Context, r *run) error {
		zero := 0.0
		r.about("nothing", "1", zero/zero, digits, "")
		return nil
	}}
	_, err := Make(t.Context(), []Figure{figure}, Settings{Workers: 1, Directory: t.TempDir()})
	if err == nil || !strings.Contains(err.Error(), "nothing: NaN ± 0.5 is not finite") {
		t.Errorf("error %v", err)
	}
}

func TestPage(t *testing.T) {
	times := 0
	s := Settings{Workers: 1, Directory: t.TempDir()}
	mustMake(t, []Figure{counted("6lb-x", &times)}, s)
	content, err := os.ReadFile(filepath.Join(s.Directory, "index.html"))
	testhost.Must(t, err)
	for _, want := range []string{
		"A &lt;title&gt;", "<svg ", "2 of 4 rows", "Monte Carlo, 95%", ">printed digits</td>",
		// The verdict is in the first column, which is visible on any screen.
		`<tr><td class="verdict bad">outside`, `class="bad">6lb-x</a>`, "at most 1",
		"<dt>SC</dt><dd>single choice: ", "c\u00a0=\u00a04", "two at ρ\u00a0=\u00a02",
	} {
		if !strings.Contains(string(content), want) {
			t.Errorf("the page does not have %s", want)
		}
	}
	for _, foreign := range []string{"<script", "<link", "src=", "url("} {
		if strings.Contains(string(content), foreign) {
			t.Errorf("the page has %s: it must need no other file", foreign)
		}
	}
}

// TestColours checks that a case has the same colour in all charts, wherever it is in them, and
// that cases of one paper have different ones.
func TestColours(t *testing.T) {
	series := func(names ...string) (list []chart.Series) {
		for _, name := range names {
			list = append(list, chart.Series{Name: name})
		}
		return list
	}
	r := Result{Charts: []chart.Chart{
		{Series: series(everyRival...)}, {Series: series("LSQ", "SED", "HLB")}, {Series: series("1 s", "HLB")},
	}}
	r.agree()
	looks := map[string]int{}
	names := map[int]string{}
	for _, c := range r.Charts {
		for _, s := range c.Series {
			if before := looks[s.Name]; before != 0 && before != s.Look {
				t.Errorf("%s has the looks %d and %d", s.Name, before, s.Look)
			}
			if before := names[s.Look]; before != "" && before != s.Name {
				t.Errorf("%s and %s have the look %d", before, s.Name, s.Look)
			}
			looks[s.Name], names[s.Look] = s.Look, s.Name
		}
	}
	ofContenders := map[int]string{}
	for _, c := range append(slices.Clone(hunters), roundRobin, feedback) {
		look := caseOf(c.name).look
		if before := ofContenders[look]; before != "" {
			t.Errorf("%s and %s have the look %d", before, c.name, look)
		}
		ofContenders[look] = c.name
	}
}

// TestSpelledOut checks that the page spells out all placements of HLB's figures.
func TestSpelledOut(t *testing.T) {
	for _, name := range append(slices.Clone(everyRival), "HLB-FIX", "GSQ", "LSQ2", "SED2", "HLB2", "Oracle2") {
		if caseOf(name) == nil {
			t.Errorf("%s is not spelled out", name)
		}
	}
}

// TestPageHasAll makes one figure after the other. The page must show both in their order, unless
// they have different settings.
func TestPageHasAll(t *testing.T) {
	s := Settings{Seed: 1, Workers: 1, Directory: t.TempDir()}
	page := func(s Settings, name string) string {
		figures, err := Select(name)
		testhost.Must(t, err)
		if outcomes := mustMake(t, figures, s); len(outcomes) != 1 || outcomes[0].Name != name {
			t.Errorf("%d outcomes", len(outcomes))
		}
		content, err := os.ReadFile(filepath.Join(s.Directory, "index.html"))
		testhost.Must(t, err)
		return string(content)
	}
	page(s, "6lb-9")
	both := page(s, "6lb-6")
	if first, second := strings.Index(both, `id="6lb-6"`), strings.Index(both, `id="6lb-9"`); first < 0 || second < first {
		t.Errorf("6lb-6 is at %d of the page, 6lb-9 at %d", first, second)
	}
	s.Seed = 2
	if strings.Contains(page(s, "6lb-6"), `id="6lb-9"`) {
		t.Error("the page has a figure of another seed")
	}
}

func TestSelect(t *testing.T) {
	names := func(figures []Figure) (names []string) {
		for _, f := range figures {
			names = append(names, f.Name)
		}
		return names
	}
	all, err := Select()
	testhost.Must(t, err)
	if sorted := names(all); len(slices.Compact(slices.Sorted(slices.Values(sorted)))) != len(all) {
		t.Errorf("names are not unique: %v", sorted)
	}
	some, err := Select("6lb-8[ab]", "6lb-8a", "shell-6")
	testhost.Must(t, err)
	if want := []string{"6lb-8a", "6lb-8b", "shell-6"}; !slices.Equal(names(some), want) {
		t.Errorf("%v, want %v", names(some), want)
	}
	for _, pattern := range []string{"6lb-1", "", "[", "6lb"} {
		if _, err := Select(pattern); err == nil || !strings.Contains(err.Error(), `figure "`+pattern+`"`) {
			t.Errorf("%q: error %v", pattern, err)
		}
	}
}

// TestAnalyticFigures makes the figures that take no time, and checks that the model has the
// numbers of 6LB. Figures 5 and 8d have no rows, because theirs hold by construction. Those of SHELL
// have none, because the paper measures something else. The published rows must be the same.
func TestAnalyticFigures(t *testing.T) {
	published := readRows(t)
	figures, err := Select("6lb-5", "6lb-6", "6lb-8[b-f]", "6lb-9", "hlb-2", "shell-III", "shell-5")
	testhost.Must(t, err)
	for _, o := range mustMake(t, figures, Settings{Seed: 1, Workers: 1, Directory: t.TempDir()}) {
		noRows := slices.Contains([]string{"6lb-5", "6lb-8d", "shell-III", "shell-5"}, o.Name)
		if len(o.Charts) == 0 || (len(o.Checks) == 0) != noRows {
			t.Errorf("%s: %d charts, %d comparisons", o.Name, len(o.Charts), len(o.Checks))
		}
		for i, c := range o.Checks {
			if rows := published[o.Name]; i >= len(rows) || rows[i].Quantity != c.Quantity ||
				math.Abs(rows[i].Measured-c.Measured) > 1e-4*math.Abs(c.Measured) {
				t.Errorf("%s: rows.csv does not have %q with %v", o.Name, c.Quantity, c.Measured)
			}
		}
		marked := false // a chart has a mark of the paper's number
		for i := range o.Charts {
			charttest.TextInside(t, o.Charts[i].SVG())
			marked = marked || slices.ContainsFunc(o.Charts[i].Series, func(s chart.Series) bool {
				return s.Style == chart.Crosses
			})
		}
		for _, c := range o.Checks {
			if expected := c.Quantity != "WCMP / LSQ, all observed"; c.OK != expected {
				t.Errorf("%s: %s: %v, paper %v", c.Figure, c.Quantity, c.Measured, c.Paper)
			}
			if c.Paper.Value != 1 && !marked { // not a ratio of two curves that the text compares
				t.Errorf("%s: no chart shows the paper's %v", c.Figure, c.Paper)
			}
		}
	}
}

// TestOverhead checks the sums of header sizes of 6LB's figure 5.
func TestOverhead(t *testing.T) {
	r := &run{}
	testhost.Must(t, figure5(t.Context(), r))
	for i, want := range [][]float64{{72, 96, 88}, {56, 80, 44}} { // insert, encap, GRE
		points := r.result.Charts[0].Series[i].Points
		if got := []float64{points[0].Y, points[1].Y, points[3].Y}; !slices.Equal(got, want) {
			t.Errorf("%s: %v bytes, want %v", r.result.Charts[0].Series[i].Name, got, want)
		}
	}
}

// TestAlgorithm3 compares the tables with those of package tables. The number of steps is at least
// the number of entries, and with one server that has all buckets it is exactly that.
func TestAlgorithm3(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, servers := range []int{2, 5, 48} {
		permutations := randomPermutations(servers, 251, rng)
		for candidates := 1; candidates <= 2; candidates++ {
			want, err := tables.BuildPermuted(permutations, 251, candidates)
			testhost.Must(t, err)
			rows, steps := algorithm3(permutations, 251, candidates)
			if !slices.Equal(rows, want.Rows) {
				t.Errorf("%d servers, %d candidates: another table", servers, candidates)
			}
			if steps < 251*candidates {
				t.Errorf("%d servers, %d candidates: %d steps", servers, candidates, steps)
			}
		}
	}
	if _, steps := algorithm3(randomPermutations(1, 251, rng), 251, 1); steps != 251 {
		t.Errorf("one server: %d steps, want 251", steps)
	}
	// Each permutation is 0, 1, 2. The servers look at 0, at 0 and 1, and at 1 and 2.
	same := []tables.Permutation{{Skip: 1}, {Skip: 1}}
	if _, steps := algorithm3(same, 3, 1); steps != 5 {
		t.Errorf("equal permutations: %d steps, want 5", steps)
	}
}

// TestCrossing checks the load that 6LB prints, 0.983.
func TestCrossing(t *testing.T) {
	got, err := crossing(4, 8)
	testhost.Must(t, err)
	if math.Abs(got-0.983) > 0.0005 {
		t.Errorf("SR8 is better than SR4 from %v on, want 0.983", got)
	}
}
