// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"bytes"
	"encoding/csv"
	"strconv"
)

// CSV returns the points of all series, one per line, below the names of the axes. The fields low
// and high are empty for a point without an error bar. If x stands for a category, the field
// contains the name of the category.
func (c *Chart) CSV() ([]byte, error) {
	var out bytes.Buffer
	w := csv.NewWriter(&out)
	if err := w.Write([]string{"series", c.X.Label, c.Y.Label, "low", "high"}); err != nil {
		return nil, err
	}
	exact := func(v float64) string { return strconv.FormatFloat(v, 'g', 10, 64) }
	for _, s := range c.Series {
		for _, p := range s.Points {
			x := exact(p.X)
			if i := int(p.X); i >= 0 && i < len(c.X.Categories) {
				x = c.X.Categories[i]
			}
			record := []string{s.Name, x, exact(p.Y), "", ""}
			if s.Style == Level {
				record[1] = "" // it has this value at all X
			}
			if p.Low < p.High {
				record[3], record[4] = exact(p.Low), exact(p.High)
			}
			if err := w.Write(record); err != nil {
				return nil, err
			}
		}
	}
	w.Flush()
	return out.Bytes(), w.Error()
}
