// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// series draws a series.
func (p *plot) series(i int) {
	s := &p.Series[i]
	p.printf(`<g class="series %s"><title>%s</title>`+"\n", p.colour(i), escape(s.Name))
	switch s.Style {
	case Band:
		p.band(s)
	case Bars, Marks:
		p.points(i)
	default:
		p.path(s)
		p.points(i)
	}
	p.printf("</g>\n")
}

// mostReadings is the largest number of marks in a series whose marks have titles.
const mostReadings = 200

// points draws the markers, the error bars and the bars of a series. Their titles show the values
// when the pointer is over them. Only some points of a long line have a marker and a title. Clouds
// of many marks have no titles, which would make the file three times as large.
func (p *plot) points(i int) {
	s := &p.Series[i]
	step := 1 // from one marker to the next
	if s.Style != Bars && s.Style != Marks {
		step += len(s.Points) / 40
	}
	for j, point := range s.Points {
		switch {
		case !p.visible(point):
		case j%step != 0 && point.Low >= point.High: // neither a marker nor an error bar
		case s.Style == Marks && len(s.Points) > mostReadings:
			p.marker(i, p.x.at(point.X), p.y.at(point.Y))
		default:
			p.printf("<g><title>%s</title>", escape(p.reading(s, point)))
			p.point(i, point, j%step == 0)
			p.printf("</g>\n")
		}
	}
}

// point draws a point of a series. If marked is true, the point has its marker, and an invisible
// larger circle: the title of the point appears when the pointer is over this circle.
func (p *plot) point(i int, point Point, marked bool) {
	s := &p.Series[i]
	x, y := p.x.at(point.X)+p.offset(i), p.y.at(point.Y)
	if s.Style == Bars {
		p.bar(i, point)
	}
	if point.Low < point.High {
		p.errorBar(s, x, p.y.at(p.y.clamp(point.Low)), p.y.at(p.y.clamp(point.High)))
	}
	if marked && (s.Style == Marked || s.Style == Marks) {
		p.marker(i, x, y)
	}
	if marked && s.Style != Bars {
		p.printf(`<circle cx="%.1f" cy="%.1f" r="7" class="hit"/>`, x, y)
	}
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

// lineClass is the class of the lines of a style in the style sheet.
func (s Style) lineClass() string {
	switch s {
	case Dashed:
		return "line dashed"
	case Dotted:
		return "line dotted"
	}
	return "line"
}

// path draws the line of a series. It leaves gaps at points without a position.
func (p *plot) path(s *Series) {
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
	p.printf(`<path d="%s" class="%s"/>`+"\n", d.String(), s.Style.lineClass())
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

// offset is the distance of the bars of a series from the centre of their category.
func (p *plot) offset(i int) float64 {
	if p.Series[i].Style != Bars {
		return 0
	}
	return (float64(p.barIndex(i)) - float64(p.barCount()-1)/2) * p.barWidth()
}

// barIndex returns the number of series with bars before a series.
func (p *plot) barIndex(i int) (n int) {
	for _, s := range p.Series[:i] {
		if s.Style == Bars {
			n++
		}
	}
	return n
}

func (p *plot) barCount() int { return p.barIndex(len(p.Series)) }

// barWidth returns the width of one bar. All bars of a category take at most 80% of its room.
func (p *plot) barWidth() float64 {
	return min(60, 0.8*(p.x.at(1)-p.x.at(0))/float64(p.barCount()))
}

// bar draws the bar of a point, from 0 to its value.
func (p *plot) bar(i int, point Point) {
	wide := p.barWidth()
	x, y, base := p.x.at(point.X)+p.offset(i)-wide/2, p.y.at(point.Y), p.y.at(p.y.clamp(0))
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
func (p *plot) errorBar(s *Series, x, low, high float64) {
	class := "error"
	if s.Style == Bars {
		class = "error on"
	}
	p.printf(`<path d="M%.1f %.1fV%.1fM%.1f %.1fh6M%.1f %.1fh6" class="%s"/>`,
		x, low, high, x-3, low, x-3, high, class)
}

// marker draws the marker of a series, which has one of five shapes.
func (p *plot) marker(i int, x, y float64) {
	switch p.look(i) % 5 {
	case 0:
		p.printf(`<circle cx="%.1f" cy="%.1f" r="3.4" class="mark"/>`, x, y)
	case 1:
		p.printf(`<rect x="%.1f" y="%.1f" width="6.4" height="6.4" class="mark"/>`, x-3.2, y-3.2)
	case 2:
		p.printf(`<path d="M%.1f %.1fl4.2 7.4h-8.4z" class="mark"/>`, x, y-4.6)
	case 3:
		p.printf(`<path d="M%.1f %.1fl4.4 4.4l-4.4 4.4l-4.4 -4.4z" class="mark"/>`, x, y-4.4)
	case 4:
		p.printf(`<path d="M%.1f %.1fl4.2 -7.4h-8.4z" class="mark"/>`, x, y+4.6)
	}
}

// like returns the index of the series that a series is like, or -1.
func (p *plot) like(i int) int {
	name := p.Series[i].Like
	return slices.IndexFunc(p.Series, func(s Series) bool { return name != "" && s.Name == name })
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
