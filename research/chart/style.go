// SPDX-License-Identifier: Apache-2.0

package chart

import (
	_ "embed"
	"fmt"
	"strings"
)

// palette has the colours of one colour scheme.
type palette struct {
	ground, ink, faint, grid string
	// series are the colours of series. They differ from the ground by a contrast of at least 3 to
	// 1 (WCAG 2.2, criterion 1.4.11), and from each other for colour-blind readers too.
	series []string
}

var (
	light = palette{
		ground: "#ffffff", ink: "#1f2328", faint: "#59636e", grid: "#e4e7eb",
		series: []string{
			"#1f1f1f", "#0551aa", "#e2360e", "#128655", "#aa4f8b", "#909847", "#4a8af4", "#505050",
		},
	}
	dark = palette{
		ground: "#15191e", ink: "#e9edf2", faint: "#9aa5b1", grid: "#2a3139",
		series: []string{
			"#f2f2f2", "#4c8dee", "#ff7048", "#24dc8c", "#d673aa", "#f4d22d", "#afcfff", "#666666",
		},
	}
)

// rules are the rules of charts in the style sheet that no colour scheme changes. They use no
// custom properties, because programs other than browsers do not know them.
const rules = `.chart { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }
.chart .title { font-size: 13.5px; font-weight: 600 }
.chart .value { font-size: 10px }
.chart .line { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round }
.chart .dashed { stroke-dasharray: 6 4; stroke-width: 1.6 }
.chart .dotted { stroke-dasharray: .1 4; stroke-width: 2; stroke-linecap: round }
.chart .line.over { stroke-width: 3.4 }
.chart .dashed.over { stroke-dasharray: 8 6 }
.chart .dotted.over { stroke-dasharray: .1 7 }
.chart .mark, .chart .bar { fill: currentColor }
.chart .mark { stroke-width: .8 }
.chart .cross, .chart .halo { fill: none; stroke: currentColor; stroke-width: 2.2 }
.chart .halo { stroke-width: 4 }
.chart .band { fill: currentColor; fill-opacity: .17 }
.chart g .bar.hollow, .chart g .mark.hollow { stroke: currentColor; stroke-width: 1.5 }
.chart .error { fill: none; stroke: currentColor; stroke-width: 1.2 }
.chart .hit { fill: none; pointer-events: all }
.chart .series:hover .line { stroke-width: 4.5 }
`

// rules returns the rules of charts that depend on the colour scheme.
func (p *palette) rules() string {
	var out strings.Builder
	fmt.Fprintf(&out, ".chart .ground, .chart .bar.hollow, .chart .mark.hollow, .chart .value { fill: %s }\n", p.ground)
	fmt.Fprintf(&out, ".chart .bar, .chart .mark, .chart .halo { stroke: %s }\n", p.ground)
	fmt.Fprintf(&out, ".chart text, .chart .value.hollow { fill: %s }\n", p.ink)
	fmt.Fprintf(&out, ".chart .label { fill: %s }\n", p.faint)
	fmt.Fprintf(&out, ".chart .grid { stroke: %s }\n", p.grid)
	fmt.Fprintf(&out, ".chart .axis, .chart .error.on { stroke: %s }\n", p.faint)
	fmt.Fprintf(&out, ".chart .neutral { color: %s }\n", p.faint)
	for i, colour := range p.series {
		fmt.Fprintf(&out, ".chart .c%d { color: %s }\n", i, colour)
	}
	return out.String()
}

// chartStyle returns the rules of charts.
func chartStyle() string {
	return rules + light.rules() + "@media (prefers-color-scheme: dark) {\n" + dark.rules() + "}\n"
}

//go:embed page.css
var pageRules string

// StyleSheet returns the style sheet of pages that show charts: the rules of the pages and those of
// the charts.
func StyleSheet() string {
	variables := func(p *palette) string {
		return fmt.Sprintf(":root { --ground: %s; --ink: %s; --faint: %s; --grid: %s }\n",
			p.ground, p.ink, p.faint, p.grid)
	}
	return variables(&light) + "@media (prefers-color-scheme: dark) {\n" + variables(&dark) + "}\n" +
		pageRules + chartStyle()
}
