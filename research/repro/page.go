// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"bytes"
	_ "embed"
	"html/template"
	"strconv"

	"github.com/segue-lb/segue/internal/version"
	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/tolerance"
)

//go:embed page.html
var pageText string

var page = template.Must(template.New("page").Funcs(template.FuncMap{
	"style":    func() template.CSS { return template.CSS(chart.StyleSheet()) },
	"digits":   func(v float64) string { return strconv.FormatFloat(v, 'g', 4, 64) },
	"unbroken": chart.Unbroken,
}).Parse(pageText))

// drawing is a figure in the form for the page.
type drawing struct {
	Outcome
	SVGs []template.HTML
	// Outside tells that a quantity is outside its tolerance.
	Outside bool
}

// writePage writes index.html, which needs no other file.
func (s *store) writePage(outcomes []Outcome) error {
	content := struct {
		Version       string
		Quick         bool
		Seed          uint64
		Inside, Total int
		Rules         any
		Drawings      []drawing
	}{Version: version.String(), Quick: s.key.Quick, Seed: s.key.Seed, Rules: tolerance.Rules}
	for _, o := range outcomes {
		d := drawing{Outcome: o}
		for i := range o.Charts {
			// package chart has escaped all text
			d.SVGs = append(d.SVGs, template.HTML(o.Charts[i].Inline()))
		}
		for _, c := range o.Checks {
			content.Total++
			if c.OK {
				content.Inside++
			} else {
				d.Outside = true
			}
		}
		content.Drawings = append(content.Drawings, d)
	}
	var out bytes.Buffer
	if err := page.Execute(&out, content); err != nil {
		return err
	}
	return s.write("index.html", out.Bytes())
}
