// SPDX-License-Identifier: Apache-2.0

package report

import (
	"github.com/segue-lb/segue/research/chart"
)

// overDay has charts of a replayed day, as figure 12 of 6LB: the rate, the medians of the cases,
// and the deciles of each case.
func (f *folder) overDay() (section, error) {
	s := section{
		title: "Response times over the day",
		note: "Deciles 1 to 9 of the response times in intervals of " + plain(f.Bin) + " s. Bands: " +
			"deciles 4 to 6, 3 to 7, 2 to 8 and 1 to 9. Line: median.",
	}
	var err error
	s.figures, s.rest, err = f.inDetail(f.dayAt)
	return s, err
}

// dayAt draws the charts of a point.
func (f *folder) dayAt(x float64) ([]figure, error) {
	rate := chart.Chart{Title: "Rate", Y: chart.Axis{Label: "requests per second"}}
	median := chart.Chart{Title: "Medians", Y: chart.Axis{Label: "median response time, ms"}}
	var deciles []figure
	highest := 0.0
	for i, name := range f.Cases {
		runs := withFiles(f.runs(name, x))
		if len(runs) == 0 {
			continue
		}
		d, err := f.readDay(runs)
		if err != nil {
			return nil, err
		}
		if len(rate.Series) == 0 { // all cases have the same requests
			rate.Series = []chart.Series{{Points: d.rates()}}
		}
		line := chart.Series{Name: name, Look: i + 1, Points: d.deciles(5, 5)}
		median.Series = append(median.Series, line)
		fan := d.fan(line)
		deciles = append(deciles, figure{"deciles-" + name, fan})
		for _, p := range fan.Series[0].Points { // of the widest band
			highest = max(highest, p.High)
		}
	}
	if len(deciles) == 0 {
		return nil, nil
	}
	figures := append([]figure{{"rate", rate}, {"medians", median}}, deciles...)
	for i := range figures {
		labelTime(&figures[i].chart)
	}
	for i := range deciles {
		figures[2+i].chart.Y.Max = 1.03 * highest // so that readers can compare the cases
	}
	return figures, nil
}

// rates returns the mean number of requests per second of each interval.
func (d *day) rates() (points []chart.Point) {
	for i, n := range d.requests {
		points = append(points, chart.Point{X: d.middle(i), Y: float64(n) / d.bin / float64(d.runs)})
	}
	return points
}

// deciles returns a point for each interval with response times: the median, and two deciles as its
// low and high end, in milliseconds. With low and high 5, the points have no error bars.
func (d *day) deciles(low, high int) (points []chart.Point) {
	for i := range d.times {
		if len(d.times[i]) > 0 {
			points = append(points, chart.Point{
				X: d.middle(i), Y: 1000 * d.decile(i, 5),
				Low: 1000 * d.decile(i, low), High: 1000 * d.decile(i, high),
			})
		}
	}
	return points
}

// fan draws the deciles of a case around the line of its medians.
func (d *day) fan(median chart.Series) chart.Chart {
	var bands []chart.Series
	for low, name := range []string{"deciles 1 to 9", "2 to 8", "3 to 7", "4 to 6"} {
		bands = append(bands, chart.Series{
			Name: name, Kind: "deciles 1 to 9", Like: "median",
			Style: chart.Band, Points: d.deciles(low+1, 9-low),
		})
	}
	return chart.Chart{
		Title: median.Name + ", deciles", Y: chart.Axis{Label: "response time, ms"},
		Series: append(bands, chart.Series{Name: "median", Look: median.Look, Points: d.deciles(5, 5)}),
	}
}
