// SPDX-License-Identifier: Apache-2.0

// Package chart draws lines, steps, bands and bars as SVG, and writes the same numbers as CSV. It
// also has the style sheet of the pages that show charts. A chart is one text file that any browser
// shows, on a light or a dark ground, as the reader prefers. The colours are distinct for
// colour-blind readers. Markers and dashes tell series apart in black and white.
package chart

import (
	"fmt"
	"strings"
)

// Chart is the content of one pair of axes.
type Chart struct {
	Title  string
	X, Y   Axis
	Series []Series
}

// Axis is a horizontal or vertical axis.
type Axis struct {
	// Label names the quantity on the axis, with its unit.
	Label string
	// Log makes the axis logarithmic. Values that are not positive are left out.
	Log bool
	// Min and Max bound the axis, unless both are zero. Then the values bound it. Bars that go
	// beyond Max are cut off, and have their value written on them.
	Min, Max float64
	// Categories are the names of the whole numbers from 0. The axis shows them in place of
	// numbers. Only a horizontal axis may have them.
	Categories []string
}

// Series is a set of points that are drawn in one colour.
type Series struct {
	Name   string
	Points []Point
	Style  Style
	// Like names another series of the chart whose colour and marker this one shares, because both
	// show the same thing in different ways. Line styles tell the two apart; of two series of
	// bars, this one is hollow.
	Like string
	// Look is the number of the colour and the marker, from 1, so that charts beside each other
	// can agree (see Agree). With 0, it is the number of the series among the series without Like.
	Look int
	// Kind tells how this series differs from the series that it is like, such as "simulated". The
	// legend has one entry for all series of a kind. A series without a kind has its own entry.
	Kind string
}

// Point is one value. If Low is less than High, they are the ends of an error bar, or of the part
// of a band at X.
type Point struct {
	X, Y, Low, High float64
}

// Style tells how a series is drawn.
type Style int

const (
	// Line joins the points. Some points have a marker if the chart has several lines, so that
	// readers can see each of several lines that take the same course.
	Line Style = iota
	// Dashed joins the points by a dashed line.
	Dashed
	// Marked joins the points and marks each of them.
	Marked
	// Marks marks each point and does not join the points.
	Marks
	// Bars are centred on X, beside the bars of the other series at X. On a logarithmic axis, which
	// has no zero where bars could begin, they are marks.
	Bars
	// Dotted joins the points by a dotted line.
	Dotted
	// Band fills the area between the low and the high ends of the points.
	Band
	// Crosses marks each point by a cross, above all else. It is for values that come from
	// elsewhere, such as those that a paper states.
	Crosses
	// Level draws a dotted line across the chart at Y of its only point. It is for bounds.
	Level
)

// Agree gives series of one name the same colour and marker in all charts, and series of different
// names different ones. known returns the number of the look of names that have one everywhere, and
// otherwise 0. Agree leaves out series that have a look, and those that are like another one.
func Agree(charts []Chart, known func(name string) int) {
	looks, used := map[string]int{}, map[int]bool{}
	each := func(do func(s *Series)) {
		for i := range charts {
			for j := range charts[i].Series {
				if s := &charts[i].Series[j]; s.Look == 0 && charts[i].like(j) < 0 {
					do(s)
				}
			}
		}
	}
	each(func(s *Series) {
		if n := known(s.Name); n > 0 {
			looks[s.Name], used[n] = n, true
		}
	})
	each(func(s *Series) {
		if looks[s.Name] == 0 {
			n := 1
			for used[n] {
				n++
			}
			looks[s.Name], used[n] = n, true
		}
		s.Look = looks[s.Name]
	})
}

// SVG returns the chart as an SVG document that needs no other file.
func (c *Chart) SVG() []byte {
	p := newPlot(c)
	return p.document(fmt.Sprintf(` xmlns="http://www.w3.org/2000/svg" width="%d" height="%.0f"`,
		width, p.height), "<style>\n"+chartStyle()+"</style>\n")
}

// Inline returns the chart as an SVG element for a page that has the style sheet of StyleSheet.
func (c *Chart) Inline() []byte {
	return newPlot(c).document("", "")
}

// document draws the chart. The attributes are those of the outermost element. The head comes
// before all shapes.
func (p *plot) document(attributes, head string) []byte {
	p.printf(`<svg%s class="chart" viewBox="0 0 %d %.0f" role="img" aria-label="%s">`+"\n",
		attributes, width, p.height, escape(p.Title))
	p.printf("<title>%s</title>\n<desc>%s</desc>\n", escape(p.Title), escape(p.description()))
	p.printf("%s", head)
	p.printf(`<rect class="ground" width="%d" height="%.0f"/>`+"\n", width, p.height)
	p.heading()
	p.grid()
	// An inner document cuts off what is outside the axes, except markers at their ends. A clip
	// path would need a name that is unique on the page.
	p.printf(`<svg x="%.1f" y="%.1f" width="%.1f" height="%.1f" `+
		`viewBox="%[1]g %[2]g %[3]g %[4]g">`+"\n",
		p.left-4.5, p.top-4.5, p.plotWidth()+9, plotHeight+9.)
	for layer := range layers {
		for i := range p.Series {
			p.series(i, layer)
		}
	}
	p.printf("</svg>\n")
	p.legend()
	p.printf("</svg>\n")
	return []byte(p.out.String())
}

// description says what the chart shows, for readers who do not see it.
func (p *plot) description() string {
	var names []string
	for _, s := range p.Series {
		if s.Name != "" {
			names = append(names, s.Name)
		}
	}
	return fmt.Sprintf("%s. Horizontal axis: %s. Vertical axis: %s.",
		strings.Join(names, "; "), p.x.describe(), p.y.describe())
}
