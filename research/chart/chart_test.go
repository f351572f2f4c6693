// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// elements parses an SVG document and returns the elements with a name.
func elements(t *testing.T, svg []byte, name string) []map[string]string {
	t.Helper()
	var found []map[string]string
	d := xml.NewDecoder(bytes.NewReader(svg))
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, svg)
		}
		if start, ok := token.(xml.StartElement); ok && start.Name.Local == name {
			attributes := make(map[string]string)
			for _, a := range start.Attr {
				attributes[a.Name.Local] = a.Value
			}
			found = append(found, attributes)
		}
	}
}

func points(xys ...float64) []Point {
	var out []Point
	for i := 0; i < len(xys); i += 2 {
		out = append(out, Point{X: xys[i], Y: xys[i+1]})
	}
	return out
}

// TestPositions checks the positions of points on linear and logarithmic axes.
func TestPositions(t *testing.T) {
	c := Chart{
		X:      Axis{Log: true, Min: 1, Max: 100},
		Y:      Axis{Min: 0, Max: 4},
		Series: []Series{{Name: "a", Points: points(1, 0, 10, 1, 100, 4)}},
	}
	p := newPlot(&c)
	want := fmt.Sprintf("M%.1f %.1fL%.1f %.1fL%.1f %.1f", p.left, p.bottom(),
		p.left+p.plotWidth()/2, p.top+plotHeight*0.75, p.left+p.plotWidth(), p.top)
	if got := elements(t, c.SVG(), "path")[0]["d"]; got != want {
		t.Errorf("path %s, want %s", got, want)
	}
}

// TestGaps checks that points without a position on a logarithmic axis are left out.
func TestGaps(t *testing.T) {
	c := Chart{Y: Axis{Log: true}, Series: []Series{{Points: points(0, 1, 1, 0, 2, 1, 3, 10)}}}
	if d := elements(t, c.SVG(), "path")[0]["d"]; strings.Count(d, "M") != 2 || strings.Count(d, "L") != 1 {
		t.Errorf("path %s: want two pieces, of one and of two points", d)
	}
}

// TestBars checks that bars of two series stand side by side on the axis, within their category.
func TestBars(t *testing.T) {
	c := Chart{
		X: Axis{Categories: []string{"one", "two"}},
		Y: Axis{Min: 0, Max: 10},
		Series: []Series{
			{Name: "a", Style: Bars, Points: points(0, 5, 1, 10)},
			{Name: "b", Style: Bars, Points: points(0, 1, 1, 2)},
		},
	}
	number := func(s string) (v float64) {
		if _, err := fmt.Sscan(s, &v); err != nil {
			t.Fatalf("%q: %v", s, err)
		}
		return v
	}
	p := newPlot(&c)
	bars := elements(t, c.SVG(), "rect")[1:5] // the first is the ground
	for i, height := range []float64{0.5, 1, 0.1, 0.2} {
		if got := number(bars[i]["height"]); math.Abs(got-height*plotHeight) > 0.1 {
			t.Errorf("bar %d is %v high, want %v", i, got, height*plotHeight)
		}
		if bottom := number(bars[i]["y"]) + number(bars[i]["height"]); math.Abs(bottom-p.bottom()) > 0.2 {
			t.Errorf("bar %d ends at %v, not on the axis", i, bottom)
		}
	}
	middle := (number(bars[0]["x"]) + number(bars[2]["x"]) + number(bars[2]["width"])) / 2
	if want := p.left + p.plotWidth()/4; math.Abs(middle-want) > 0.2 {
		t.Errorf("the first category's bars are around %v, want %v", middle, want)
	}
	if end, begin := number(bars[0]["x"])+number(bars[0]["width"]), number(bars[2]["x"]); math.Abs(end-begin) > 0.2 {
		t.Errorf("the first bar ends at %v, the one beside it begins at %v", end, begin)
	}
}

func TestTextIsEscaped(t *testing.T) {
	c := Chart{Title: `a < b & "c"`, Series: []Series{{Name: "<x>", Points: points(0, 0)}, {Name: "y"}}}
	svg := c.SVG()
	elements(t, svg, "svg") // checks that the SVG parses
	if !bytes.Contains(svg, []byte("&lt;x&gt;")) {
		t.Error("the legend is not escaped")
	}
}

func TestTicks(t *testing.T) {
	for want, axis := range map[string]Axis{
		"0 0.2 0.4 0.6 0.8 1": {Max: 1},
		"-2 -1 0 1 2 3":       {Min: -2, Max: 3},
		"0 5 10 15 20 25":     {Max: 25},
		"10⁻⁶ 10⁻⁵ 10⁻⁴ 0.001 0.01 0.1 1": {Log: true, Min: 1e-6, Max: 1},
		"1 10 100 1000 10000 100000 10⁶":  {Log: true, Min: 1, Max: 1e6},
		"10 20 50 100 200":                {Log: true, Min: 10, Max: 200},
	} {
		s := newScale(&axis, nil, 0, 1, false)
		var labels []string
		for _, tick := range s.ticks(7) {
			labels = append(labels, tick.label)
		}
		if got := strings.Join(labels, " "); got != want {
			t.Errorf("%+v: ticks %s, want %s", axis, got, want)
		}
	}
}

// TestRange checks the range of an axis that does not set its bounds.
func TestRange(t *testing.T) {
	for _, test := range []struct {
		axis      Axis
		values    []float64
		low, high float64
	}{
		{Axis{}, []float64{2, 10}, 0, 10.3}, // from zero, because the values are near zero
		// Not from zero, because the values are far from it.
		{Axis{}, []float64{90, 100}, 90, 100.3},
		{Axis{}, []float64{-1, 1}, -1, 1.06},       // positive and negative values
		{Axis{Log: true}, []float64{1, 100}, 0, 2}, // decades
		{Axis{Log: true}, []float64{0.6, 17}, math.Log10(0.5), math.Log10(20)},
		{Axis{Log: true}, []float64{0.0003, 30000}, math.Log10(0.0002), math.Log10(50000)},
		{Axis{Log: true}, []float64{3}, math.Log10(0.5), 1},
		{Axis{}, nil, 0, 1.03},
		{Axis{}, []float64{5}, 4.5, 5.53},
	} {
		s := newScale(&test.axis, test.values, 0, 1, false)
		if math.Abs(s.low-test.low) > 1e-9 || math.Abs(s.high-test.high) > 1e-9 {
			t.Errorf("%+v, %v: from %v to %v, want %v to %v", test.axis, test.values, s.low, s.high, test.low, test.high)
		}
	}
}

func TestCSV(t *testing.T) {
	c := Chart{
		X: Axis{Label: "load", Categories: []string{"low, or", "high"}},
		Y: Axis{Label: "time, s"},
		Series: []Series{
			{Name: "a", Points: []Point{{X: 0, Y: 0.125}, {X: 1, Y: 2, Low: 1, High: 3}}},
		},
	}
	got, err := c.CSV()
	testhost.Must(t, err)
	want := "series,load,\"time, s\",low,high\na,\"low, or\",0.125,,\na,high,2,1,3\n"
	if string(got) != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// TestManyBars checks that no two series look alike if there are more series than colours.
func TestManyBars(t *testing.T) {
	c := Chart{X: Axis{Categories: []string{"only"}}}
	for i := range 2 * len(light.series) {
		c.Series = append(c.Series, Series{Name: fmt.Sprint(i), Style: Bars, Points: []Point{{X: 0, Y: 1}}})
	}
	looks := make(map[string]int)
	samples := regexp.MustCompile(`<g class="([^"]*)">\n<rect [^>]*height="10" class="([^"]*)"/>`)
	for _, look := range samples.FindAllStringSubmatch(string(c.SVG()), -1) {
		looks[look[1]+" "+look[2]]++
	}
	if len(looks) != len(c.Series) {
		t.Errorf("%d series look like %v", len(c.Series), looks)
	}
}

// TestLike checks that bars that are like others are hollow, and that all series that are like
// others have the colour of those.
func TestLike(t *testing.T) {
	c := Chart{Series: []Series{
		{Name: "a", Style: Marked, Points: points(0, 1)}, {Name: "b", Style: Marked, Points: points(0, 2)},
		{Name: "model b", Style: Dashed, Points: points(0, 2), Like: "b"}, {Name: "c", Points: points(0, 2), Like: "nobody"},
	}}
	if got, want := colours(&c), []string{"c0", "c1", "c1", "c2"}; !slices.Equal(got, want) {
		t.Errorf("lines are %v, want %v", got, want)
	}
	for i := range c.Series {
		c.Series[i].Style = Bars
	}
	c.X.Categories = []string{"only"}
	var bars []string
	for _, bar := range elements(t, c.SVG(), "rect")[1:5] { // the first is the ground
		bars = append(bars, bar["class"])
	}
	if want := []string{"bar", "bar", "bar hollow", "bar"}; !slices.Equal(bars, want) {
		t.Errorf("bars are %v, want %v", bars, want)
	}
}

// colours returns the class of the colour of each series.
func colours(c *Chart) (classes []string) {
	p := newPlot(c)
	for i := range c.Series {
		classes = append(classes, p.colour(i))
	}
	return classes
}

// TestAgree checks that series of the same name look alike in all charts, series of different names
// do not, and known names have their look.
func TestAgree(t *testing.T) {
	charts := []Chart{
		{Series: []Series{{Name: "a"}, {Name: "hlb"}, {Name: "b"}}},
		{Series: []Series{{Name: "b"}, {Name: "c"}, {Name: "b, simulated", Like: "b"}, {Name: "a"}, {Name: "d", Look: 8}}},
	}
	Agree(charts, func(name string) int { return map[string]int{"hlb": 2}[name] })
	var got []string
	for i := range charts {
		got = append(got, colours(&charts[i])...)
	}
	if want := []string{"c0", "c1", "c2", "c2", "c3", "c2", "c0", "c7"}; !slices.Equal(got, want) {
		t.Errorf("colours %v, want %v", got, want)
	}
}

// TestBarsOfOneSeriesEach checks that bars stand in the middle of their category if no other bar is
// there.
func TestBarsOfOneSeriesEach(t *testing.T) {
	c := Chart{
		X: Axis{Categories: []string{"one", "two"}},
		Series: []Series{
			{Name: "a", Style: Bars, Points: points(0, 5)}, {Name: "b", Style: Bars, Points: points(1, 5)},
		},
	}
	p := newPlot(&c)
	for i, s := range c.Series {
		if x, _ := p.place(i, s.Points[0]); x != p.x.at(float64(i)) {
			t.Errorf("bar %s is at %v, want %v", s.Name, x, p.x.at(float64(i)))
		}
	}
}

// TestNoBarsOnLogAxis checks that the values of bars are marks on a logarithmic axis, at the places
// of the bars. Marks of series that are like others are hollow.
func TestNoBarsOnLogAxis(t *testing.T) {
	c := Chart{X: Axis{Categories: []string{"one"}}, Series: []Series{
		{Name: "a", Style: Bars, Points: points(0, 0.1)}, {Name: "b", Style: Bars, Points: points(0, 10), Like: "a"},
	}}
	if n := len(elements(t, c.SVG(), "rect")); n != 1+2+2 { // ground, bars, legend
		t.Fatalf("%d rectangles on a linear axis, want 5", n)
	}
	apart := func() float64 {
		p := newPlot(&c)
		a, _ := p.place(0, c.Series[0].Points[0])
		b, _ := p.place(1, c.Series[1].Points[0])
		return b - a
	}
	want := apart()
	c.Y.Log = true
	svg := c.SVG()
	if n := len(elements(t, svg, "rect")); n != 1 {
		t.Errorf("%d rectangles, want only the ground", n)
	}
	if got := apart(); got != want || got < 10 {
		t.Errorf("the marks are %v apart, the bars %v", got, want)
	}
	for class, want := range map[string]int{`class="mark"`: 2, `class="mark hollow"`: 2} { // one in the legend
		if n := strings.Count(string(svg), class); n != want {
			t.Errorf("%d times %s, want %d", n, class, want)
		}
	}
}

// TestNothingHidden draws series of the same points, and checks that each has a marker that no
// marker of a later series covers, and that markers are above all lines.
func TestNothingHidden(t *testing.T) {
	for _, style := range []Style{Line, Dashed, Marked, Marks, Bars} {
		for _, n := range []int{3, 9, 41} {
			if style == Bars && n > 9 { // the bars would overlap
				continue
			}
			c := Chart{Y: Axis{Log: true}}
			for i := range 5 {
				s := Series{Name: fmt.Sprint(i), Style: style}
				for x := range n {
					s.Points = append(s.Points, Point{X: float64(x), Y: float64(1 + x)})
				}
				c.Series = append(c.Series, s)
			}
			p := newPlot(&c)
			for i, s := range c.Series {
				seen := slices.ContainsFunc(slices.Collect(maps.Keys(p.marked[i])), func(j int) bool {
					x, y := p.place(i, s.Points[j])
					for k := i + 1; k < len(c.Series); k++ {
						for l := range p.marked[k] {
							x2, y2 := p.place(k, c.Series[k].Points[l])
							if math.Hypot(x2-x, y2-y) < 2.5 && p.markerSize(k, x2, y2) >= p.markerSize(i, x, y) {
								return false
							}
						}
					}
					return true
				})
				if !seen {
					t.Errorf("style %d, %d points: later series hide series %d", style, n, i)
				}
			}
			svg := string(c.SVG())
			line, marker := strings.LastIndex(svg, `<path d="M`), strings.Index(svg, `class="mark"`)
			if style == Line && (line < 0 || marker < 0) {
				t.Errorf("%d points: no lines or no markers", n)
			}
		}
	}
}

// TestCoveredLine checks that a line that is like another one is wider, so that both can be seen if
// they take the same course, and that a single line needs no markers.
func TestCoveredLine(t *testing.T) {
	c := Chart{Series: []Series{
		{Name: "a", Points: points(0, 1, 1, 2)}, {Name: "model a", Points: points(0, 1, 1, 2), Style: Dashed, Like: "a"},
	}}
	paths := elements(t, c.SVG(), "path")
	if len(paths) != 2 || paths[0]["class"] != "line" || paths[1]["class"] != "line dashed over" {
		t.Errorf("paths %v", paths)
	}
}

// TestElsewhere checks crosses, and lines at the height of bounds.
func TestElsewhere(t *testing.T) {
	c := Chart{Series: []Series{
		{Name: "a", Style: Bars, Points: points(4, 1)},
		{Name: "a, stated", Style: Crosses, Points: points(4, 3), Like: "a", Kind: "stated"},
		{Name: "at most 9", Style: Level, Points: points(0, 9)},
		{Name: "b", Style: Bars, Points: points(4, 1, 5, 1)},
	}}
	p, svg := newPlot(&c), c.SVG()
	bar, _ := p.place(0, c.Series[0].Points[0])
	if cross, _ := p.place(1, c.Series[1].Points[0]); cross != bar || bar == p.x.at(4) {
		t.Errorf("the cross is at %v, its bar at %v, the middle at %v", cross, bar, p.x.at(4))
	}
	if p.x.low < 3 || p.y.high < 9 {
		t.Errorf("axes from %v, up to %v", p.x.low, p.y.high)
	}
	for class, want := range map[string]int{`class="cross"`: 2, `class="line dotted"`: 2} { // one in the legend
		if n := strings.Count(string(svg), class); n != want {
			t.Errorf("%d times %s, want %d", n, class, want)
		}
	}
	table, err := c.CSV()
	testhost.Must(t, err)
	if want := "series,,,low,high\na,4,1,,\n\"a, stated\",4,3,,\nat most 9,,9,,\nb,4,1,,\nb,5,1,,\n"; string(table) != want {
		t.Errorf("%s, want %s", table, want)
	}
}

// TestCutOffBars checks that bars that are cut off have their value on them, and no other bars.
func TestCutOffBars(t *testing.T) {
	c := Chart{
		X: Axis{Categories: []string{"one", "two"}}, Y: Axis{Max: 2},
		Series: []Series{{Style: Bars, Points: points(0, 17.25, 1, 2)}},
	}
	written := regexp.MustCompile(`class="value"[^>]*>([^<]*)<`).FindAllStringSubmatch(string(c.SVG()), -1)
	if len(written) != 1 || written[0][1] != "17.2" {
		t.Errorf("written on bars: %v, want 17.2", written)
	}
}
