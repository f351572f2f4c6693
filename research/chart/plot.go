// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
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
	turned    bool      // the names on the horizontal axis are turned
	rows      [][]entry // of the legend

	left, top float64 // upper left corner of the area between the axes
	height    float64 // of the whole chart
	out       strings.Builder
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
	p.left = margin + 10
	for _, t := range p.y.ticks(7) {
		p.left = max(p.left, margin+tickLength+4+textWidth(t.label, textSize))
	}
	p.x = newScale(&c.X, xs, p.left, p.plotWidth(), len(c.X.Categories) > 0)
	p.nameTicks()
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

func (p *plot) plotWidth() float64 { return width - margin - p.left }

// bottom is the position of the horizontal axis.
func (p *plot) bottom() float64 { return p.top + plotHeight }

// values returns the values that the axes must show. A band counts with its ends only, and bars on
// an axis that is not logarithmic also count with 0. With categories, the horizontal axis shows all
// of them.
func (p *plot) values() (xs, ys []float64) {
	for _, s := range p.Series {
		for _, point := range s.Points {
			xs = append(xs, point.X)
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

// nameTicks chooses the ticks of the horizontal axis so that their names do not overlap. It uses
// fewer numbers, or splits the names of categories, or turns them.
func (p *plot) nameTicks() {
	p.tickLines = 1
	p.xTicks = p.x.ticks(8)
	if len(p.X.Categories) == 0 {
		for most := 7; most > 1 && !p.fits(p.xTicks); most-- {
			p.xTicks = p.x.ticks(most)
		}
	}
	if len(p.X.Categories) < 2 || p.fits(p.xTicks) {
		return
	}
	room := p.x.at(1) - p.x.at(0) - 6 // width for the name of a category
	for _, name := range p.X.Categories {
		lines := wrap(name, room, textSize)
		p.tickLines = max(p.tickLines, len(lines))
		for _, line := range lines {
			p.turned = p.turned || textWidth(line, textSize) > room
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

// turnedHeight is the height of names that rise by 35 degrees.
func (p *plot) turnedHeight() float64 {
	longest := 0.0
	for _, name := range p.X.Categories {
		longest = max(longest, textWidth(name, textSize))
	}
	return longest*math.Sin(35*math.Pi/180) + 10
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
		p.line(p.left, y, width-margin, y, "grid")
		p.text(p.left-tickLength-3, y+4, `text-anchor="end"`, t.label)
	}
	for _, t := range p.xTicks {
		x := p.x.at(t.value)
		if len(p.X.Categories) == 0 {
			p.line(x, p.bottom(), x, p.bottom()+tickLength, "axis")
		}
		p.tickName(x, p.bottom()+tickLength+13, t.label)
	}
	p.line(p.left, p.bottom(), width-margin, p.bottom(), "axis")
	if p.X.Label != "" {
		y := p.height - 10 - float64(len(p.rows))*18 - 8
		p.text(p.left+p.plotWidth()/2, y, `class="label" text-anchor="middle"`, p.X.Label)
	}
}

// tickName writes the name of a tick of the horizontal axis.
func (p *plot) tickName(x, y float64, name string) {
	switch {
	case p.turned:
		end := fmt.Sprintf(`text-anchor="end" transform="rotate(-35 %.1f %.1f)"`, x+4, y-2)
		p.text(x+4, y-2, end, name)
	case len(p.X.Categories) > 0:
		for i, line := range wrap(name, p.x.at(1)-p.x.at(0)-6, textSize) {
			p.text(x, y+14*float64(i), `text-anchor="middle"`, line)
		}
	default:
		p.text(x, y, `text-anchor="middle"`, name)
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
		if len(row) > 0 && x+size > width-margin+14 {
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

// entries returns the entries of the legend: one for each series without a kind, and then one for
// each kind. A chart of one series without a name has no legend.
func (p *plot) entries() (entries []entry) {
	for i, s := range p.Series {
		if s.Kind == "" && (s.Name != "" || len(p.Series) > 1) {
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
	s := &p.Series[e.series]
	switch s.Style {
	case Bars, Band:
		p.printf(`<rect x="%.1f" y="%.1f" width="14" height="10" class="%s"/>`+"\n",
			e.x+5, y-5, p.filling(e.series))
	case Marks:
	default:
		p.line(e.x, y, e.x+24, y, s.Style.lineClass())
	}
	if !e.kind && (s.Style == Marks || s.Style == Marked) {
		p.marker(e.series, e.x+12, y)
	}
}
