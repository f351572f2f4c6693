// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// The layers of a chart, from the lowest to the highest. Lines hide no markers, and areas hide no
// lines.
const (
	areas = iota
	lines
	marks
	layers
)

// series draws those parts of a series that belong to a layer.
func (p *plot) series(i, layer int) {
	s := &p.Series[i]
	draw := func() { p.points(i) }
	own := marks
	switch {
	case s.Style == Band:
		own, draw = areas, func() { p.band(s) }
	case p.isBars(i):
		own = areas
	case layer == lines && s.Style == Level:
		own, draw = lines, func() { p.level(i) }
	case layer == lines && s.Style.joins():
		own, draw = lines, func() { p.path(i) }
	case s.Style == Level:
		return
	}
	if layer != own {
		return
	}
	p.printf(`<g class="series %s"><title>%s</title>`+"\n", p.colour(i), escape(s.Name))
	draw()
	p.printf("</g>\n")
}

// joins tells whether the style has a line from point to point.
func (s Style) joins() bool { return s == Line || s == Dashed || s == Marked || s == Dotted }

// isBars tells whether a series is drawn as bars.
func (p *plot) isBars(i int) bool { return p.Series[i].Style == Bars && !p.Y.Log }

// mostReadings is the largest number of marks in a series whose marks have titles.
const mostReadings = 200

// isCloud tells whether a series has so many marks that they have no titles, which would make the
// file three times as large.
func (p *plot) isCloud(i int) bool {
	return p.Series[i].Style == Marks && len(p.Series[i].Points) > mostReadings
}

// step is the distance, in points, from one point of a series with a title to the next. Only some
// points of a long line have a title.
func (p *plot) step(i int) int {
	if s := &p.Series[i]; s.Style.joins() {
		return 1 + len(s.Points)/40
	}
	return 1
}

// points draws the markers, the error bars and the bars of a series. Their titles show the values
// when the pointer is over them.
func (p *plot) points(i int) {
	s := &p.Series[i]
	step := p.step(i)
	for j, point := range s.Points {
		switch {
		case !p.visible(point):
		case j%step != 0 && !p.marked[i][j] && point.Low >= point.High:
		case p.isCloud(i):
			p.marker(i, p.x.at(point.X), p.y.at(point.Y), 1)
		default:
			p.printf("<g><title>%s</title>", escape(p.reading(s, point)))
			p.point(i, point, p.marked[i][j])
			p.printf("</g>\n")
		}
	}
}

// point draws a point of a series, with its marker if marked is true. The title of the point
// appears when the pointer is over the bar or over an invisible circle that is larger than the
// marker.
func (p *plot) point(i int, point Point, marked bool) {
	x, y := p.place(i, point)
	if p.isBars(i) {
		p.bar(i, point)
	}
	if low, high := p.y.clamp(point.Low), p.y.clamp(point.High); low < high {
		p.errorBar(i, x, p.y.at(low), p.y.at(high))
	}
	if marked {
		p.marker(i, x, y, p.markerSize(i, x, y))
	}
	if !p.isBars(i) {
		p.printf(`<circle cx="%.1f" cy="%.1f" r="7" class="hit"/>`, x, y)
	}
}

// place returns the position of a point of a series.
func (p *plot) place(i int, point Point) (x, y float64) {
	return p.x.at(point.X) + p.offset(i, point.X), p.y.at(point.Y)
}

// markPoints decides which points of each series have a marker.
func (p *plot) markPoints() {
	p.marked = make([]map[int]bool, len(p.Series))
	var lines []int // the series that are lines, and have a colour of their own
	for i, s := range p.Series {
		p.marked[i] = map[int]bool{}
		if s.Style.joins() && p.like(i) < 0 {
			lines = append(lines, i)
		}
		if s.Style.joins() && s.Style != Marked || p.isBars(i) {
			continue
		}
		for j := 0; j < len(s.Points); j += p.step(i) {
			p.marked[i][j] = p.visible(s.Points[j])
		}
	}
	for rank, i := range lines {
		if p.Series[i].Style != Marked && len(lines) > 1 {
			p.stagger(i, (float64(rank)+0.5)/float64(len(lines)))
		}
	}
}

// lineMarkers is the number of markers on a line that has more points than that.
const lineMarkers = 5

// stagger chooses points with markers on a line. The markers divide the width of the chart into
// equal parts, and shift is the place of the marker in its part, from 0 to 1. So lines with
// different shifts have their markers at different places, even if they take the same course.
func (p *plot) stagger(i int, shift float64) {
	part := p.plotWidth() / lineMarkers
	for m := range lineMarkers {
		at := p.left + part*(float64(m)+shift)
		nearest, least := -1, part/2
		for j, point := range p.Series[i].Points {
			if !p.visible(point) || point.Y != p.y.clamp(point.Y) {
				continue
			}
			if distance := math.Abs(p.x.at(point.X) - at); distance < least {
				nearest, least = j, distance
			}
		}
		if nearest >= 0 {
			p.marked[i][nearest] = true
		}
	}
}

// markerSize is the size of a marker of a series at a place: 1, and more for each marker of a later
// series that covers it. So all of several markers at the same place can be seen.
func (p *plot) markerSize(i int, x, y float64) float64 {
	const near = 2.5
	size := 1.0
	for j := i + 1; j < len(p.Series); j++ {
		if p.isCloud(j) {
			continue
		}
		more := 0.3
		if p.Series[j].Style == Crosses {
			more = 0.7
		}
		for k := range p.marked[j] {
			if x2, y2 := p.place(j, p.Series[j].Points[k]); math.Hypot(x2-x, y2-y) < near {
				size += more
				break
			}
		}
	}
	return size
}

// reading is the text about a point: the series, and the values on both axes with their labels.
func (p *plot) reading(s *Series, point Point) string {
	short := func(v float64) string { return strconv.FormatFloat(v, 'g', 4, 64) }
	x := short(point.X)
	if i := int(point.X); i >= 0 && i < len(p.X.Categories) {
		x = p.X.Categories[i]
	}
	text := fmt.Sprintf("%s: %s\n%s: %s", p.X.Label, x, p.Y.Label, short(point.Y))
	if point.Low < point.High {
		text += fmt.Sprintf(" (%s to %s)", short(point.Low), short(point.High))
	}
	if s.Name != "" {
		text = s.Name + "\n" + text
	}
	return text
}

func (p *plot) visible(point Point) bool { return p.x.shows(point.X) && p.y.shows(point.Y) }

// lineClass is the class of the line of a series in the style sheet. The dashes and dots of a
// series that is like another one are wider than the line of that one, which has the same colour
// and often the same course.
func (p *plot) lineClass(i int) string {
	class := "line"
	switch p.Series[i].Style {
	case Dashed:
		class = "line dashed"
	case Dotted, Level:
		class = "line dotted"
	}
	if p.like(i) >= 0 {
		class += " over"
	}
	return class
}

// level draws a line across the chart.
func (p *plot) level(i int) {
	for _, point := range p.Series[i].Points {
		y := p.y.at(point.Y)
		p.line(p.left, y, p.right, y, p.lineClass(i))
	}
}

// path draws the line of a series. It leaves gaps at points without a position.
func (p *plot) path(i int) {
	s := &p.Series[i]
	var d strings.Builder
	command := "M" // move to the point; "L" draws a line to it
	for _, point := range s.Points {
		if !p.visible(point) {
			command = "M"
			continue
		}
		fmt.Fprintf(&d, "%s%.1f %.1f", command, p.x.at(point.X), p.y.at(point.Y))
		command = "L"
	}
	p.printf(`<path d="%s" class="%s"/>`+"\n", d.String(), p.lineClass(i))
}

// band fills the area between the low and the high ends of the points.
func (p *plot) band(s *Series) {
	var d strings.Builder
	edge := func(point Point, y float64) {
		fmt.Fprintf(&d, " %.1f,%.1f", p.x.at(point.X), p.y.at(p.y.clamp(y)))
	}
	for _, point := range s.Points {
		edge(point, point.High)
	}
	for _, point := range slices.Backward(s.Points) {
		edge(point, point.Low)
	}
	p.printf(`<polygon points="%s" class="band"/>`+"\n", strings.TrimSpace(d.String()))
}

// offset is the distance of a bar of a series from the place of its X, so that it is beside the
// bars of other series. Marks of a series that is like bars are on those bars.
func (p *plot) offset(i int, x float64) float64 {
	if like := p.like(i); p.Series[i].Style != Bars && like >= 0 {
		i = like
	}
	if p.Series[i].Style != Bars {
		return 0
	}
	before, all := p.barsAt(x, i), p.barsAt(x, len(p.Series))
	return (float64(before) - float64(all-1)/2) * p.barWidth()
}

// barsAt returns the number of bars at X of the first n series.
func (p *plot) barsAt(x float64, n int) (bars int) {
	for _, s := range p.Series[:n] {
		if s.Style == Bars && slices.ContainsFunc(s.Points, func(q Point) bool { return q.X == x }) {
			bars++
		}
	}
	return bars
}

// countBars finds the largest number of bars at one X.
func (p *plot) countBars() {
	for _, s := range p.Series {
		if s.Style == Bars {
			for _, point := range s.Points {
				p.mostBars = max(p.mostBars, p.barsAt(point.X, len(p.Series)))
			}
		}
	}
}

// barWidth returns the width of one bar. All bars at one X take at most 80% of the room of a
// category.
func (p *plot) barWidth() float64 {
	return min(60, 0.8*(p.x.at(1)-p.x.at(0))/float64(p.mostBars))
}

// bar draws the bar of a point, from 0 to its value.
func (p *plot) bar(i int, point Point) {
	wide := p.barWidth()
	x, y := p.place(i, point)
	x, base := x-wide/2, p.y.at(p.y.clamp(0))
	p.printf(`<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" class="%s"/>`,
		x, min(y, base), wide, math.Abs(base-y), p.filling(i))
	if point.Y > p.y.clamp(point.Y) { // cut off
		p.valueOnBar(i, x+wide/2, point.Y)
	}
}

// valueOnBar writes the value of a cut-off bar on the bar. The text runs upwards, and ends at the
// end of the bar.
func (p *plot) valueOnBar(i int, x, value float64) {
	class := "value"
	if p.hollow(i) {
		class = "value hollow"
	}
	attributes := fmt.Sprintf(`class="%s" text-anchor="end" transform="rotate(-90 %.1f %.1f)"`,
		class, x+3.5, p.top+4)
	p.text(x+3.5, p.top+4, attributes, strconv.FormatFloat(value, 'g', 3, 64))
}

// errorBar draws an error bar: a vertical line with a short line at each end. It has the colour of
// the series. On a bar of that colour it would be invisible, so it has another colour there.
func (p *plot) errorBar(i int, x, low, high float64) {
	class := "error"
	if p.isBars(i) {
		class = "error on"
	}
	p.printf(`<path d="M%.1f %.1fV%.1fM%.1f %.1fh6M%.1f %.1fh6" class="%s"/>`,
		x, low, high, x-3, low, x-3, high, class)
}

// marker draws the marker of a series, which has one of five shapes, or is a cross.
func (p *plot) marker(i int, x, y, size float64) {
	if p.Series[i].Style == Crosses {
		// The wider cross below has the colour of the ground, which sets the cross off from a bar.
		for _, class := range []string{"halo", "cross"} {
			p.printf(`<path d="M%.1f %.1fl11 11m0 -11l-11 11" class="%s"/>`, x-5.5, y-5.5, class)
		}
		return
	}
	class := "mark"
	if p.Series[i].Style == Bars && p.hollow(i) {
		class = "mark hollow"
	}
	shape := func(format string, sizes ...any) {
		for k := 2; k < len(sizes); k++ { // behind the two coordinates
			sizes[k] = sizes[k].(float64) * size
		}
		p.printf(format, sizes...)
		p.printf(` class="%s"/>`, class)
	}
	switch p.look(i) % 5 {
	case 0:
		shape(`<circle cx="%.1f" cy="%.1f" r="%.1f"`, x, y, 3.4)
	case 1:
		shape(`<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f"`, x-3.2*size, y-3.2*size, 6.4, 6.4)
	case 2:
		shape(`<path d="M%.1f %.1fl%.1f %.1fh%.1fz"`, x, y-4.6*size, 4.2, 7.4, -8.4)
	case 3:
		shape(`<path d="M%.1f %.1fl%.1f %.1fl%.1f %.1fl%.1f %.1fz"`, x, y-4.4*size,
			4.4, 4.4, -4.4, 4.4, -4.4, -4.4)
	case 4:
		shape(`<path d="M%.1f %.1fl%.1f %.1fh%.1fz"`, x, y+4.6*size, 4.2, -7.4, -8.4)
	}
}

// like returns the index of the series that a series is like, or -1.
func (c *Chart) like(i int) int {
	name := c.Series[i].Like
	return slices.IndexFunc(c.Series, func(s Series) bool { return name != "" && s.Name == name })
}

// look returns the number of a series' colour and marker, from 0. A series that is like another has
// the number of that one. The other series are numbered in their order, unless Look sets a number.
func (p *plot) look(i int) (n int) {
	if like := p.like(i); like >= 0 {
		i = like
	}
	if chosen := p.Series[i].Look; chosen > 0 {
		return chosen - 1
	}
	for j := range i {
		if p.like(j) < 0 {
			n++
		}
	}
	return n
}

// colour is the class of a series' colour in the style sheet.
func (p *plot) colour(i int) string { return fmt.Sprintf("c%d", p.look(i)%len(light.series)) }

// hollow tells whether the bars of a series are hollow, because other bars have the same colour:
// the series is like another one, or all colours are in use. Lines of the same colour need no such
// form, because markers and dashes tell them apart.
func (p *plot) hollow(i int) bool { return p.like(i) >= 0 || p.look(i) >= len(light.series) }

// filling is the class of an area in the style sheet.
func (p *plot) filling(i int) string {
	switch {
	case p.Series[i].Style == Band:
		return "band"
	case p.hollow(i):
		return "bar hollow"
	}
	return "bar"
}
