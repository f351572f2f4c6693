// SPDX-License-Identifier: Apache-2.0

package report

import (
	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/testbed"
)

// large has charts of the share of the requests that the servers with the largest capacity served:
// in the whole run, and over time. It has none if all servers have the same capacity.
func (f *folder) large() section {
	s := section{title: "Shares of the large servers"}
	m := measure{"large", "Share", func(r *testbed.Response) float64 { return r.Large }}
	if !f.any(m) {
		return s
	}
	s.note = "The share of the responses that the servers with the largest capacity gave. " +
		f.intervals() + " Over time: means over the seeds, in intervals of " +
		plain(testbed.LargeInterval) + " s of the time at which requests were sent."
	percent := unit{"%", 100}
	c := f.overall(m, percent)
	c.Title, c.Y.Label = "Shares of the large servers", "% of the responses"
	s.figures, s.rest, _ = f.inDetail(func(x float64) ([]figure, error) {
		c := chart.Chart{
			Title: "Shares of the large servers over time", X: chart.Axis{Label: "s"},
			Y: chart.Axis{Label: "% of the responses"},
		}
		for _, way := range ways[:2] { // measured and simulated
			for i, name := range f.Cases {
				points := f.meanLargeShares(f.runs(name, x), way.from, percent)
				if len(points) == 0 {
					continue
				}
				series := chart.Series{Name: name, Style: way.style, Look: i + 1, Points: points}
				if way.kind != "" {
					series.Name, series.Kind, series.Like = name+", "+way.kind, way.kind, name
				}
				c.Series = append(c.Series, series)
			}
		}
		if len(c.Series) == 0 {
			return nil, nil
		}
		return []figure{{"large-over-time", c}}, nil
	})
	s.figures = append([]figure{{"large", c}}, s.figures...)
	return s
}

// meanLargeShares returns the share of the large servers, as the mean of the runs, for each
// interval that all runs have. It leaves out the last interval of each run, which is not complete.
func (f *folder) meanLargeShares(runs []*testbed.Run, from source, u unit) (points []chart.Point) {
	if len(runs) == 0 {
		return nil
	}
	for i := 0; ; i++ {
		sum := 0.0
		for _, run := range runs {
			r := from(run)
			if r == nil || i >= len(r.LargeOver)-1 {
				return points
			}
			sum += r.LargeOver[i]
		}
		points = append(points, chart.Point{
			X: (float64(i) + 0.5) * testbed.LargeInterval,
			Y: sum / float64(len(runs)) * u.factor,
		})
	}
}
