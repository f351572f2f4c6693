// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"bytes"
	"math"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/segue-lb/segue/research/chart/charttest"
)

// linear returns the linear red, green and blue of a colour such as #0072b2.
func linear(t *testing.T, colour string) (rgb [3]float64) {
	t.Helper()
	for i := range rgb {
		v, err := strconv.ParseUint(colour[1+2*i:3+2*i], 16, 8)
		if err != nil {
			t.Fatalf("colour %s: %v", colour, err)
		}
		rgb[i] = float64(v) / 255
		if rgb[i] <= 0.04045 {
			rgb[i] /= 12.92
		} else {
			rgb[i] = math.Pow((rgb[i]+0.055)/1.055, 2.4)
		}
	}
	return rgb
}

func luminance(rgb [3]float64) float64 { return 0.2126*rgb[0] + 0.7152*rgb[1] + 0.0722*rgb[2] }

// contrast is the contrast of two colours (WCAG 2.2, "contrast ratio").
func contrast(t *testing.T, a, b string) float64 {
	x, y := luminance(linear(t, a)), luminance(linear(t, b))
	return (max(x, y) + 0.05) / (min(x, y) + 0.05)
}

// visions turn linear colours into those that readers see: without and with red, green and blue
// blindness (G. M. Machado et al., "A Physiologically-based Model for Simulation of Color Vision
// Deficiency", 2009, severity 1).
var visions = map[string][3][3]float64{
	"full":         {{1, 0, 0}, {0, 1, 0}, {0, 0, 1}},
	"protanopia":   {{0.152286, 1.052583, -0.204868}, {0.114503, 0.786281, 0.099216}, {-0.003882, -0.048116, 1.051998}},
	"deuteranopia": {{0.367322, 0.860646, -0.227968}, {0.280085, 0.672501, 0.047413}, {-0.011820, 0.042940, 0.968881}},
	"tritanopia":   {{1.255528, -0.076749, -0.178779}, {-0.078411, 0.930809, 0.147602}, {0.004733, 0.691367, 0.303900}},
}

// lab returns the coordinates of a colour in CIELAB, as a reader sees it.
func lab(rgb [3]float64, vision [3][3]float64) [3]float64 {
	var seen [3]float64
	for i, row := range vision {
		for j := range row {
			seen[i] += row[j] * rgb[j]
		}
		seen[i] = min(max(seen[i], 0), 1)
	}
	f := func(v float64) float64 {
		if v > 0.008856 {
			return math.Cbrt(v)
		}
		return 7.787*v + 16.0/116
	}
	x := f((0.4124*seen[0] + 0.3576*seen[1] + 0.1805*seen[2]) / 0.9505)
	y := f(luminance(seen))
	z := f((0.0193*seen[0] + 0.1192*seen[1] + 0.9505*seen[2]) / 1.089)
	return [3]float64{116*y - 16, 500 * (x - y), 200 * (y - z)}
}

// TestColours checks the contrast of all colours with their ground, and the distance of the
// colours of series from each other for colour-blind readers. A distance of 2.3 is just noticeable.
func TestColours(t *testing.T) {
	for scheme, p := range map[string]*palette{"light": &light, "dark": &dark} {
		for _, text := range []string{p.ink, p.faint} {
			if got := contrast(t, text, p.ground); got < 4.5 {
				t.Errorf("%s: text %s has a contrast of %.2f, want at least 4.5", scheme, text, got)
			}
		}
		for i, a := range p.series {
			if got := contrast(t, a, p.ground); got < 3 {
				t.Errorf("%s: series %s has a contrast of %.2f, want at least 3", scheme, a, got)
			}
			for _, b := range p.series[:i] {
				for name, vision := range visions {
					u, v := lab(linear(t, a), vision), lab(linear(t, b), vision)
					distance := math.Sqrt((u[0]-v[0])*(u[0]-v[0]) + (u[1]-v[1])*(u[1]-v[1]) + (u[2]-v[2])*(u[2]-v[2]))
					if distance < 15 {
						t.Errorf("%s, %s: the distance of %s and %s is %.1f, want at least 15", scheme, name, a, b, distance)
					}
				}
			}
		}
	}
	if len(light.series) != len(dark.series) {
		t.Errorf("%d light colours, %d dark ones", len(light.series), len(dark.series))
	}
}

// TestSchemes checks that a document has the colours of both schemes and that an element for a page
// has none.
func TestSchemes(t *testing.T) {
	c := Chart{Title: "a", Series: []Series{{Name: "b", Points: points(0, 1, 1, 2)}}}
	for _, want := range []string{light.series[0], dark.series[0], "prefers-color-scheme: dark"} {
		if !bytes.Contains(c.SVG(), []byte(want)) {
			t.Errorf("the document has no %q", want)
		}
	}
	if found := regexp.MustCompile(`#[0-9a-f]{6}|<style`).Find(c.Inline()); found != nil {
		t.Errorf("the element has %q", found)
	}
	elements(t, c.Inline(), "svg") // checks that the element parses
}

// TestLegendOfKinds checks that series of a kind share one entry, which has no series' colour.
func TestLegendOfKinds(t *testing.T) {
	c := Chart{Series: []Series{
		{Name: "a", Style: Marked, Points: points(0, 1)}, {Name: "b", Style: Marked, Points: points(0, 2)},
		{Name: "a, simulated", Style: Dashed, Points: points(0, 1), Like: "a", Kind: "simulated"},
		{Name: "b, simulated", Style: Dashed, Points: points(0, 2), Like: "b", Kind: "simulated"},
		{Name: "b, model", Style: Dotted, Points: points(0, 2), Like: "b", Kind: "model"},
	}}
	var names []string
	for _, e := range newPlot(&c).entries() {
		names = append(names, e.name)
	}
	if want := []string{"a", "b", "simulated", "model"}; !slices.Equal(names, want) {
		t.Errorf("the legend has %v, want %v", names, want)
	}
	if n := strings.Count(string(c.SVG()), `<g class="neutral">`); n != 2 {
		t.Errorf("%d neutral entries, want 2", n)
	}
}

// TestLook checks that a chosen look is that of another chart, also for series that are like it.
func TestLook(t *testing.T) {
	c := Chart{Series: []Series{{Name: "b", Look: 2}, {Name: "b, simulated", Like: "b", Style: Dashed}, {Name: "d", Look: 4}}}
	if got, want := colours(&c), []string{"c1", "c1", "c3"}; !slices.Equal(got, want) {
		t.Errorf("colours %v, want %v", got, want)
	}
}

// TestReadings checks the texts that appear over points.
func TestReadings(t *testing.T) {
	c := Chart{
		X: Axis{Label: "load"}, Y: Axis{Label: "time, s"},
		Series: []Series{{Name: "<a>", Style: Marked, Points: []Point{{X: 0.5, Y: 0.123456, Low: 0.1, High: 0.2}}}},
	}
	want := "<title>&lt;a&gt;\nload: 0.5\ntime, s: 0.1235 (0.1 to 0.2)</title>"
	if svg := string(c.SVG()); !strings.Contains(svg, want) {
		t.Errorf("no %q in\n%s", want, svg)
	}
}

// TestBand checks the outline of a band, and that the axis has room for it.
func TestBand(t *testing.T) {
	c := Chart{Series: []Series{{Name: "a", Style: Band, Points: []Point{
		{X: 0, Low: 1, High: 3}, {X: 1, Low: 2, High: 4},
	}}}}
	p := newPlot(&c)
	want := ""
	for _, corner := range [][2]float64{{0, 3}, {1, 4}, {1, 2}, {0, 1}} {
		x, y := p.x.at(corner[0]), p.y.at(corner[1])
		want += " " + strconv.FormatFloat(x, 'f', 1, 64) + "," + strconv.FormatFloat(y, 'f', 1, 64)
	}
	if got := elements(t, c.SVG(), "polygon")[0]["points"]; got != want[1:] {
		t.Errorf("band %s, want %s", got, want[1:])
	}
	if p.y.at(4) < p.top {
		t.Errorf("the high end is above the axis")
	}
	far := Chart{Series: []Series{{Style: Band, Points: []Point{{Low: 91, High: 99}}}}}
	if p := newPlot(&far); p.y.low < 90 {
		t.Errorf("the axis begins at %v, because of values that bands do not show", p.y.low)
	}
}

// TestTextInside checks that no text of a chart ends outside it, whatever the values on the axes
// and the names of categories are.
func TestTextInside(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		c := Chart{
			Title: "A title that is so long that it does not fit in a single line, ρ = 0.88",
			X:     Axis{Label: "a label of some length, s", Log: random.IntN(2) == 0},
			Y:     Axis{Label: "another label, s", Log: random.IntN(2) == 0},
		}
		scale := math.Pow10(random.IntN(9) - 3)
		for i := range 1 + random.IntN(6) {
			s := Series{Name: strings.Repeat("name ", 1+random.IntN(4)), Style: Style(i)}
			for range 2 + random.IntN(5) {
				s.Points = append(s.Points, Point{X: scale * random.ExpFloat64(), Y: scale * random.ExpFloat64()})
			}
			c.Series = append(c.Series, s)
		}
		if random.IntN(2) == 0 {
			c.X.Log = false
			for range 1 + random.IntN(8) {
				name := strings.Repeat("abcde", 1+random.IntN(5)) + strings.Repeat(" word", random.IntN(3))
				c.X.Categories = append(c.X.Categories, name)
			}
		}
		if charttest.TextInside(t, c.SVG()); t.Failed() {
			t.Fatalf("%+v", c)
		}
	}
	// The ticks of figure III-B3 of 6LB end at 100000.
	clipped := Chart{X: Axis{Log: true}, Series: []Series{{Points: points(1021, 1, 65537, 2)}}}
	charttest.TextInside(t, clipped.SVG())
}

// TestUnbroken checks that a title is not split inside of a value.
func TestUnbroken(t *testing.T) {
	const want = "ρ\u00a0=\u00a00.88, 5\u00a0±\u00a01, a\u00a0≥\u00a0b"
	if got := Unbroken("ρ = 0.88, 5 ± 1, a ≥ b"); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	for width := range 100 {
		for _, line := range wrap("time at ρ = 0.88", float64(width), textSize) {
			if strings.Contains(line, "0.88") && !strings.Contains(line, "ρ") {
				t.Errorf("a line %q", line)
			}
		}
	}
}

// TestNamesFit checks that names on the horizontal axis and in the legend do not overlap and stay
// inside the chart: numbers are left out, and names of categories are split or turned.
func TestNamesFit(t *testing.T) {
	wide := Chart{X: Axis{Min: 100_000.1, Max: 100_000.8}}
	p := newPlot(&wide)
	if !p.fits(p.xTicks) || len(p.xTicks) < 2 {
		t.Errorf("ticks %v overlap or are too few", p.xTicks)
	}
	split := Chart{X: Axis{Categories: []string{"four words side by", "side and more of them", "a", "b"}}}
	if p := newPlot(&split); p.turned || p.tickLines < 2 {
		t.Errorf("names are on %d lines, turned: %t", p.tickLines, p.turned)
	}
	// The third name is wider than its category, but the others leave it room.
	uneven := Chart{X: Axis{Categories: []string{"a name", "a name", "Segue's encap of it", "GRE"}}}
	if p := newPlot(&uneven); p.tickLines != 1 || len(p.linesOf(p.xTicks[2])) != 1 {
		t.Errorf("names are on %d lines, drawn as %q", p.tickLines, p.linesOf(p.xTicks[2]))
	}
	long := Chart{X: Axis{Categories: []string{"consistent-hashing", "least-reports-or-so", "a", "b", "c", "d"}}}
	if p := newPlot(&long); !p.turned {
		t.Error("long words are not turned")
	}
	var many Chart
	for i := range 14 {
		many.Series = append(many.Series, Series{Name: "a name " + strconv.Itoa(i)})
	}
	p = newPlot(&many)
	for _, row := range p.rows {
		if last := row[len(row)-1]; last.x+sampleWidth+textWidth(last.name, textSize) > width {
			t.Errorf("entry %q ends outside the chart", last.name)
		}
	}
	if len(p.rows) < 3 {
		t.Errorf("the legend has %d rows", len(p.rows))
	}
}
