// SPDX-License-Identifier: Apache-2.0

// Package chart draws lines, steps and bars as SVG, and writes the same numbers as CSV. It can do
// what the papers' figures need and nothing more. A chart is one text file that any browser shows.
// Its colours are distinct for colour-blind readers, and its markers and dashes in black and
// white.
package chart

import (
	"fmt"
	"math"
	"slices"
	"strconv"
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

// Series has one entry in the legend.
type Series struct {
	Name   string
	Points []Point
	Style  Style
	// Like names another series of the chart whose colour and marker this one shares, because both
	// show the same thing in different ways. Line styles tell the two apart; of two series of
	// bars, this one is hollow.
	Like string
}

// Point is one value. If Low is less than High, they are the ends of an error bar.
type Point struct {
	X, Y, Low, High float64
}

// Style tells how a series is drawn.
type Style int

const (
	// Line joins the points.
	Line Style = iota
	// Dashed joins the points by a dashed line.
	Dashed
	// Marked joins the points and marks each of them.
	Marked
	// Marks marks each point and does not join the points.
	Marks
	// Bars are centred on X, beside the bars of the other series.
	Bars
)

// colours are the colours of M. Okabe and K. Ito, "Color Universal Design", without yellow, the
// darkest first.
var colours = []string{"#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f"}

// darkColours is the number of colours that are so dark that text on them must be white.
const darkColours = 4

const (
	width, height            = 660, 400
	left, right, top, bottom = 68, 170, 34, 52
	plotWidth                = width - left - right
	plotHeight               = height - top - bottom
)

// SVG returns the chart as an SVG document of 660 by 400 units.
func (c *Chart) SVG() []byte {
	p := newPlot(c)
	p.printf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" `+
		`font-family="Helvetica,Arial,sans-serif" font-size="12" role="img">`+"\n", width, height, width, height)
	p.printf("<title>%s</title>\n", escape(c.Title))
	p.printf(`<rect width="%d" height="%d" fill="#fff"/>`+"\n", width, height)
	p.text(left+plotWidth/2, 20, "middle", ` font-size="13" font-weight="bold"`, c.Title)
	p.grid()
	// An inner document cuts off what is outside the axes. A clip path would need a name that is
	// unique on the page.
	p.printf(`<svg x="%d" y="%d" width="%d" height="%d" viewBox="%[1]d %[2]d %[3]d %[4]d">`+"\n", left, top, plotWidth, plotHeight)
	for i := range c.Series {
		p.series(i)
	}
	p.printf("</svg>\n")
	p.legend()
	p.printf("</svg>\n")
	return []byte(p.out.String())
}

// plot is a chart that is being drawn.
type plot struct {
	*Chart
	x, y scale
	out  strings.Builder
}

func newPlot(c *Chart) *plot {
	p := &plot{Chart: c}
	var xs, ys []float64
	for _, s := range c.Series {
		for _, point := range s.Points {
			xs, ys = append(xs, point.X), append(ys, point.Y)
			if point.Low < point.High {
				ys = append(ys, point.Low, point.High)
			}
		}
		if s.Style == Bars && !c.Y.Log {
			ys = append(ys, 0)
		}
	}
	if n := len(c.X.Categories); n > 0 {
		xs = []float64{-0.5, float64(n) - 0.5}
	}
	p.x = newScale(&c.X, xs, left, plotWidth, len(c.X.Categories) > 0)
	p.y = newScale(&c.Y, ys, top+plotHeight, -plotHeight, false)
	return p
}

var escaper = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&quot;")

func escape(text string) string { return escaper.Replace(text) }

func (p *plot) printf(format string, args ...any) { fmt.Fprintf(&p.out, format, args...) }

func (p *plot) text(x, y float64, anchor, attributes, text string) {
	p.printf(`<text x="%.1f" y="%.1f" text-anchor="%s"%s>%s</text>`+"\n", x, y, anchor, attributes, escape(text))
}

func (p *plot) line(x1, y1, x2, y2 float64, attributes string) {
	p.printf(`<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" %s/>`+"\n", x1, y1, x2, y2, attributes)
}

// grid draws the axes, with lines at their ticks.
func (p *plot) grid() {
	const faint, strong = `stroke="#ddd"`, `stroke="#333"`
	for _, t := range p.x.ticks() {
		x := p.x.at(t.value)
		if len(p.X.Categories) == 0 {
			p.line(x, top, x, top+plotHeight, faint)
		}
		p.line(x, top+plotHeight, x, top+plotHeight+4, strong)
		p.text(x, top+plotHeight+17, "middle", "", t.label)
	}
	for _, t := range p.y.ticks() {
		y := p.y.at(t.value)
		p.line(left, y, left+plotWidth, y, faint)
		p.line(left-4, y, left, y, strong)
		p.text(left-7, y+4, "end", "", t.label)
	}
	p.printf(`<rect x="%d" y="%d" width="%d" height="%d" fill="none" stroke="#333"/>`+"\n", left, top, plotWidth, plotHeight)
	p.text(left+plotWidth/2, height-14, "middle", "", p.X.Label)
	p.text(16, top+plotHeight/2, "middle", fmt.Sprintf(` transform="rotate(-90 16 %d)"`, top+plotHeight/2), p.Y.Label)
}

func (p *plot) series(i int) {
	s := &p.Series[i]
	p.printf("<g>\n")
	switch s.Style {
	case Bars:
		p.bars(i)
	case Marks:
	default:
		p.path(i)
	}
	for j, point := range s.Points {
		if !p.visible(point) {
			continue
		}
		x, y := p.x.at(point.X)+p.offset(i), p.y.at(point.Y)
		if point.Low < point.High {
			p.errorBar(i, x, p.y.at(p.y.clamp(point.Low)), p.y.at(p.y.clamp(point.High)))
		}
		if s.Style == Marks || s.Style == Marked && p.markHere(s, j) {
			p.marker(i, x, y)
		}
	}
	p.printf("</g>\n")
}

// markHere tells whether a point of a line gets a marker. Long lines have fewer markers than
// points.
func (p *plot) markHere(s *Series, j int) bool { return j%(1+len(s.Points)/40) == 0 }

func (p *plot) visible(point Point) bool { return p.x.shows(point.X) && p.y.shows(point.Y) }

func (p *plot) path(i int) {
	s := &p.Series[i]
	var d strings.Builder
	command := "M"
	for _, point := range s.Points {
		if !p.visible(point) {
			command = "M"
			continue
		}
		fmt.Fprintf(&d, "%s%.1f %.1f", command, p.x.at(point.X), p.y.at(point.Y))
		command = "L"
	}
	dash := ""
	if s.Style == Dashed {
		dash = ` stroke-dasharray="6 4"`
	}
	p.printf(`<path d="%s" fill="none" stroke="%s" stroke-width="1.8"%s/>`+"\n", d.String(), p.colour(i), dash)
}

// offset moves bars, and points of categories, sideways to the place of their series.
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

func (p *plot) barWidth() float64 {
	return 0.8 * (p.x.at(1) - p.x.at(0)) / float64(p.barCount())
}

func (p *plot) bars(i int) {
	bar := p.barWidth()
	for _, point := range p.Series[i].Points {
		if !p.visible(point) {
			continue
		}
		x, y, base := p.x.at(point.X)+p.offset(i)-bar/2, p.y.at(point.Y), p.y.at(p.y.clamp(0))
		p.printf(`<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" %s/>`+"\n",
			x, min(y, base), bar, math.Abs(base-y), p.filling(i))
		if point.Y > p.y.clamp(point.Y) {
			p.valueOnBar(i, x+bar/2, point.Y)
		}
	}
}

// valueOnBar writes the value of a bar that is cut off on the bar, from below to its end.
func (p *plot) valueOnBar(i int, x, value float64) {
	colour := "#fff"
	if look := p.look(i); look >= darkColours || p.hollow(i) {
		colour = "#000"
	}
	p.text(x+3.5, top+4, "end", fmt.Sprintf(` transform="rotate(-90 %.1f %d)" font-size="10" fill="%s"`, x+3.5, top+4, colour),
		strconv.FormatFloat(value, 'g', 3, 64))
}

// errorBar draws an error bar in the colour of the series. On a bar it uses another colour,
// because that one could not be seen.
func (p *plot) errorBar(i int, x, low, high float64) {
	colour := p.colour(i)
	if p.Series[i].Style == Bars {
		colour = "#777"
	}
	attributes := fmt.Sprintf(`stroke="%s" stroke-width="1"`, colour)
	p.line(x, low, x, high, attributes)
	p.line(x-3, low, x+3, low, attributes)
	p.line(x-3, high, x+3, high, attributes)
}

// marker draws one of five shapes.
func (p *plot) marker(i int, x, y float64) {
	fill := fmt.Sprintf(`fill="%s"`, p.colour(i))
	switch p.look(i) % 5 {
	case 0:
		p.printf(`<circle cx="%.1f" cy="%.1f" r="3.2" %s/>`+"\n", x, y, fill)
	case 1:
		p.printf(`<rect x="%.1f" y="%.1f" width="6" height="6" %s/>`+"\n", x-3, y-3, fill)
	case 2:
		p.printf(`<path d="M%.1f %.1fl4 7h-8z" %s/>`+"\n", x, y-4, fill)
	case 3:
		p.printf(`<path d="M%.1f %.1fl4 4l-4 4l-4 -4z" %s/>`+"\n", x, y-4, fill)
	case 4:
		p.printf(`<path d="M%.1f %.1fl4 -7h-8z" %s/>`+"\n", x, y+4, fill)
	}
}

func (p *plot) legend() {
	if len(p.Series) < 2 && (len(p.Series) == 0 || p.Series[0].Name == "") {
		return
	}
	const x = left + plotWidth + 14
	for i, s := range p.Series {
		y := float64(top + 10 + 19*i)
		switch s.Style {
		case Bars:
			p.printf(`<rect x="%d" y="%.1f" width="14" height="10" %s/>`+"\n", x+4, y-5, p.filling(i))
		case Marks:
		default:
			dash := ""
			if s.Style == Dashed {
				dash = ` stroke-dasharray="6 4"`
			}
			p.line(x, y, x+22, y, fmt.Sprintf(`stroke="%s" stroke-width="1.8"%s`, p.colour(i), dash))
		}
		if s.Style == Marks || s.Style == Marked {
			p.marker(i, x+11, y)
		}
		p.text(x+28, y+4, "start", "", s.Name)
	}
}

// like returns the index of the series that a series is like, or -1.
func (p *plot) like(i int) int {
	return slices.IndexFunc(p.Series, func(s Series) bool { return s.Name != "" && s.Name == p.Series[i].Like })
}

// look returns the number of a series' colour and marker. A series that is like another has the
// number of that series. For other series, it is the number of such series before.
func (p *plot) look(i int) (n int) {
	if like := p.like(i); like >= 0 {
		i = like
	}
	for j := range i {
		if p.like(j) < 0 {
			n++
		}
	}
	return n
}

func (p *plot) colour(i int) string { return colours[p.look(i)%len(colours)] }

// hollow tells whether the bars of a series are hollow, because other bars have the same colour:
// the series is like another one, or all colours are in use. Other series need no hollow form,
// because markers and dashes tell them apart.
func (p *plot) hollow(i int) bool { return p.like(i) >= 0 || p.look(i) >= len(colours) }

// filling returns how a bar is filled.
func (p *plot) filling(i int) string {
	if p.hollow(i) {
		return fmt.Sprintf(`fill="#fff" stroke="%s" stroke-width="1.5"`, p.colour(i))
	}
	return fmt.Sprintf(`fill="%s"`, p.colour(i))
}

// number formats a value with as many digits as it needs, at most six.
func number(v float64) string {
	return strconv.FormatFloat(v, 'g', 6, 64)
}
