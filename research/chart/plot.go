// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
)

// The sizes of a chart, in units of about a pixel. The height of a chart also depends on the
// title, the names on the horizontal axis, and the legend.
const (
	width      = 430
	plotHeight = 220
	margin     = 14
	textSize   = 12
	lineHeight = 16
	tickLength = 4
)

// plot is a chart that is being drawn.
type plot struct {
	*Chart
	x, y      scale
	title     []string // lines
	xTicks    []tick
	tickLines int       // of the names on the horizontal axis
	split     bool      // the names on the horizontal axis are split into lines
	turned    bool      // the names on the horizontal axis are turned
	rows      [][]entry // of the legend

	left, top, right float64        // bounds of the area between the axes
	height           float64        // of the whole chart
	marked           []map[int]bool // by series: the points with a marker
	mostBars         int            // the largest number of bars at one X
	out              strings.Builder
}

// newPlot computes the positions of everything in a chart. The vertical scale comes first, because
// the width of its labels determines where the horizontal axis begins.
func newPlot(c *Chart) *plot {
	p := &plot{Chart: c}
	xs, ys := p.values()
	p.title = wrap(p.Title, width-2*margin, 1.3*textSize)
	p.top = margin + float64(len(p.title))*(lineHeight+1) + 6
	if p.Y.Label != "" {
		p.top += lineHeight + 4
	}
	p.y = newScale(&c.Y, ys, p.top+plotHeight, -plotHeight, false)
	p.left, p.right = margin+10, width-margin
	for _, t := range p.y.ticks(7) {
		p.left = max(p.left, margin+tickLength+4+textWidth(t.label, textSize))
	}
	p.placeX(xs)
	p.countBars()
	p.markPoints()
	p.rows = p.legendRows()
	below := float64(p.tickLines)*14 + tickLength + 6 // height of what is below the axis
	if p.turned {
		below = p.turnedHeight() + tickLength + 6
	}
	if p.X.Label != "" {
		below += lineHeight + 5
	}
	p.height = math.Ceil(p.top + plotHeight + below + float64(len(p.rows))*18 + 10)
	return p
}

func (p *plot) plotWidth() float64 { return p.right - p.left }

// bottom is the position of the horizontal axis.
func (p *plot) bottom() float64 { return p.top + plotHeight }

// values returns the values that the axes must show. A band counts with its ends only, a level has
// no X, and bars on an axis that is not logarithmic also count with 0. With categories, the
// horizontal axis shows all of them.
func (p *plot) values() (xs, ys []float64) {
	for _, s := range p.Series {
		for _, point := range s.Points {
			if s.Style != Level {
				xs = append(xs, point.X)
			}
			if s.Style != Band {
				ys = append(ys, point.Y)
			}
			if point.Low < point.High {
				ys = append(ys, point.Low, point.High)
			}
		}
		if s.Style == Bars && !p.Y.Log {
			ys = append(ys, 0)
		}
	}
	if n := len(p.X.Categories); n > 0 {
		xs = []float64{-0.5, float64(n) - 0.5}
	}
	return xs, ys
}

// edge is the smallest distance of a text from the edge of the chart.
const edge = 2

// placeX computes the horizontal scale. If the name of a tick ended outside the chart, the axis is
// shorter at that end. A shorter axis may have other ticks, so a few attempts can be necessary.
func (p *plot) placeX(xs []float64) {
	for range 4 {
		p.x = newScale(&p.X, xs, p.left, p.plotWidth(), len(p.X.Categories) > 0)
		p.nameTicks()
		before, behind := 0.0, 0.0 // how far names end outside the chart
		for _, t := range p.xTicks {
			begin, end := p.ends(t)
			before, behind = max(before, edge-begin), max(behind, end-(width-edge))
		}
		if before == 0 && behind == 0 {
			return
		}
		p.left, p.right = p.left+before, p.right-behind
	}
}

// ends returns where the name of a tick of the horizontal axis begins and ends.
func (p *plot) ends(t tick) (begin, end float64) {
	x := p.x.at(t.value)
	if p.turned {
		x += turnedShift
		return x - textWidth(t.label, textSize)*math.Cos(turn), x
	}
	half := 0.0
	for _, line := range p.linesOf(t) {
		half = max(half, textWidth(line, textSize)/2)
	}
	return x - half, x + half
}

// linesOf splits the name of a tick of the horizontal axis, if the names of categories would not fit
// beside each other otherwise.
func (p *plot) linesOf(t tick) []string {
	if !p.split {
		return []string{t.label}
	}
	return wrap(t.label, p.roomOfName(), textSize)
}

// roomOfName is the width for the name of a category.
func (p *plot) roomOfName() float64 { return p.x.at(1) - p.x.at(0) - 6 }

// nameTicks chooses the ticks of the horizontal axis so that their names do not overlap. It uses
// fewer numbers, or splits the names of categories, or turns them.
func (p *plot) nameTicks() {
	p.tickLines, p.split, p.turned = 1, false, false
	p.xTicks = p.x.ticks(8)
	if len(p.X.Categories) == 0 {
		for most := 7; most > 1 && !p.fits(p.xTicks); most-- {
			p.xTicks = p.x.ticks(most)
		}
	}
	if len(p.X.Categories) < 2 || p.fits(p.xTicks) {
		return
	}
	p.split = true
	for _, t := range p.xTicks {
		lines := p.linesOf(t)
		p.tickLines = max(p.tickLines, len(lines))
		for _, line := range lines {
			p.turned = p.turned || textWidth(line, textSize) > p.roomOfName()
		}
	}
}

// fits tells whether the names of ticks fit beside each other.
func (p *plot) fits(ticks []tick) bool {
	end := math.Inf(-1)
	for _, t := range ticks {
		half := textWidth(t.label, textSize) / 2
		if p.x.at(t.value)-half < end+6 {
			return false
		}
		end = p.x.at(t.value) + half
	}
	return true
}

// turn is the angle of turned names, and turnedShift the distance of their end from the tick.
const turn, turnedShift = 35 * math.Pi / 180, 4

// turnedHeight is the height of turned names.
func (p *plot) turnedHeight() float64 {
	longest := 0.0
	for _, name := range p.X.Categories {
		longest = max(longest, textWidth(name, textSize))
	}
	return longest*math.Sin(turn) + 10
}

var escaper = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;")

func escape(text string) string { return escaper.Replace(text) }

func (p *plot) printf(format string, args ...any) { fmt.Fprintf(&p.out, format, args...) }

func (p *plot) text(x, y float64, attributes, text string) {
	p.printf(`<text x="%.1f" y="%.1f" %s>%s</text>`+"\n", x, y, attributes, escape(text))
}

func (p *plot) line(x1, y1, x2, y2 float64, class string) {
	p.printf(`<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" class="%s"/>`+"\n", x1, y1, x2, y2, class)
}

// heading writes the title and the label of the vertical axis.
func (p *plot) heading() {
	for i, line := range p.title {
		p.text(margin, margin+12+float64(i)*(lineHeight+1), `class="title"`, line)
	}
	if p.Y.Label != "" {
		p.text(margin, p.top-12, `class="label"`, p.Y.Label)
	}
}

// grid draws the axes, with lines at their ticks.
func (p *plot) grid() {
	for _, t := range p.y.ticks(7) {
		y := p.y.at(t.value)
		p.line(p.left, y, p.right, y, "grid")
		p.text(p.left-tickLength-3, y+4, `text-anchor="end"`, t.label)
	}
	for _, t := range p.xTicks {
		x := p.x.at(t.value)
		if len(p.X.Categories) == 0 {
			p.line(x, p.bottom(), x, p.bottom()+tickLength, "axis")
		}
		p.tickName(x, p.bottom()+tickLength+13, t)
	}
	p.line(p.left, p.bottom(), p.right, p.bottom(), "axis")
	if p.X.Label != "" {
		y := p.height - 10 - float64(len(p.rows))*18 - 8
		half := textWidth(p.X.Label, textSize) / 2
		x := max(min(p.left+p.plotWidth()/2, width-edge-half), edge+half)
		p.text(x, y, `class="label" text-anchor="middle"`, p.X.Label)
	}
}

// tickName writes the name of a tick of the horizontal axis.
func (p *plot) tickName(x, y float64, t tick) {
	if p.turned {
		x, y := x+turnedShift, y-2
		end := fmt.Sprintf(`text-anchor="end" transform="rotate(-35 %.1f %.1f)"`, x, y)
		p.text(x, y, end, t.label)
		return
	}
	for i, line := range p.linesOf(t) {
		p.text(x, y+14*float64(i), `text-anchor="middle"`, line)
	}
}

// entry is an entry of the legend.
type entry struct {
	series int // index of a series that is drawn in this way
	name   string
	// kind tells that the entry stands for all series of a kind, whatever their colour.
	kind bool
	x    float64 // left end
}

// sampleWidth is the width of the sample line of an entry, with the gap behind it.
const sampleWidth = 30

// legendRows arranges the entries of the legend in rows.
func (p *plot) legendRows() (rows [][]entry) {
	var row []entry
	x := p.left
	for _, e := range p.entries() {
		size := sampleWidth + textWidth(e.name, textSize) + 14
		if len(row) > 0 && x+size > width-edge+14 {
			rows, row, x = append(rows, row), nil, p.left
		}
		e.x = x
		row = append(row, e)
		x += size
	}
	if row != nil {
		rows = append(rows, row)
	}
	return rows
}

// entries returns the entries of the legend: one for each series with a name and without a kind,
// and then one for each kind.
func (p *plot) entries() (entries []entry) {
	for i, s := range p.Series {
		if s.Kind == "" && s.Name != "" {
			entries = append(entries, entry{series: i, name: s.Name})
		}
	}
	var kinds []string
	for i, s := range p.Series {
		if s.Kind != "" && !slices.Contains(kinds, s.Kind) {
			kinds = append(kinds, s.Kind)
			entries = append(entries, entry{series: i, name: s.Kind, kind: true})
		}
	}
	return entries
}

// legend draws the legend.
func (p *plot) legend() {
	top := p.height - 10 - float64(len(p.rows))*18
	for i, row := range p.rows {
		y := top + 18*float64(i) + 11
		for _, e := range row {
			class := p.colour(e.series)
			if e.kind {
				class = "neutral"
			}
			p.printf(`<g class="%s">`+"\n", class)
			p.sample(e, y-4)
			p.printf("</g>\n")
			p.text(e.x+sampleWidth, y, "", e.name)
		}
	}
}

// sample draws a short piece of a line, a bar or a marker in the style of an entry's series.
func (p *plot) sample(e entry, y float64) {
	i := e.series
	s := &p.Series[i]
	switch {
	case p.isBars(i) || s.Style == Band:
		p.printf(`<rect x="%.1f" y="%.1f" width="14" height="10" class="%s"/>`+"\n",
			e.x+5, y-5, p.filling(i))
	case s.Style.joins() || s.Style == Level:
		p.line(e.x, y, e.x+24, y, p.lineClass(i))
	}
	if s.Style == Crosses || !e.kind && slices.Contains(slices.Collect(maps.Values(p.marked[i])), true) {
		p.marker(i, e.x+12, y, 1)
	}
}
