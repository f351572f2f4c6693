// SPDX-License-Identifier: Apache-2.0

package report

import (
	"maps"
	"slices"
	"strings"

	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/testbed"
)

// serverShares sums up what each server did in several runs. Numbers of requests and offers are
// sums, the mean response time is that of all requests, and the busy workers are the mean of the
// runs.
func serverShares(runs []*testbed.Run) (servers []testbed.Share) {
	for _, run := range runs {
		for _, share := range run.Shares {
			i := slices.IndexFunc(servers, func(s testbed.Share) bool { return s.Server == share.Server })
			if i < 0 {
				i = len(servers)
				servers = append(servers, testbed.Share{Server: share.Server, Capacity: share.Capacity})
			}
			s := &servers[i]
			if n := s.Responses + share.Responses; n > 0 { // weighted by the numbers of responses
				s.Mean += (share.Mean - s.Mean) * float64(share.Responses) / float64(n)
			}
			s.Responses += share.Responses
			s.Busy += share.Busy / float64(len(runs))
			s.Accepted += share.Accepted
			s.Refused += share.Refused
			s.Returned += share.Returned
			s.TakenBack += share.TakenBack
			s.Forced += share.Forced
			s.LastThreshold = share.LastThreshold // of the last seed
		}
	}
	return servers
}

// shares has a chart for each point: the responses or open connections of the servers, the server
// with the most first.
func (f *folder) shares() section {
	s := section{
		title: "Shares of the servers",
		note: f.counted() + " of each server, of all seeds, against an even share. The server " +
			"with the most is first.",
	}
	s.figures, s.rest, _ = f.inDetail(func(x float64) ([]figure, error) {
		c := chart.Chart{
			Title: "Shares", X: chart.Axis{Label: "server, by its share"},
			Y: chart.Axis{Label: strings.ToLower(f.counted()) + ", % of an even share"},
		}
		for i, name := range f.Cases {
			if points := ranked(serverShares(f.runs(name, x))); len(points) > 0 {
				c.Series = append(c.Series, chart.Series{
					Name: name, Style: chart.Marked, Look: i + 1, Points: points,
				})
			}
		}
		if len(c.Series) == 0 {
			return nil, nil
		}
		return []figure{{"shares", c}}, nil
	})
	return s
}

// ranked returns the responses of servers in percent of an even share, in descending order.
func ranked(servers []testbed.Share) (points []chart.Point) {
	var counts []uint64
	sum := uint64(0)
	for _, s := range servers {
		counts = append(counts, s.Responses)
		sum += s.Responses
	}
	if sum == 0 {
		return nil
	}
	slices.Sort(counts)
	slices.Reverse(counts)
	for i, n := range counts {
		even := float64(sum) / float64(len(counts))
		points = append(points, chart.Point{X: float64(i + 1), Y: 100 * float64(n) / even})
	}
	return points
}

// offers has charts of what servers did with the connections that they were offered. It has none
// if no case hunts.
func (f *folder) offers() section {
	s := section{
		title: "Offers",
		note: "A server accepts an offered connection, or refuses it and passes it on. The last " +
			"server of a list is forced to accept, or hands the connection back to a server with a " +
			"lower load.",
	}
	refused := f.shareChart(func(run *testbed.Run) (part, all uint64) {
		o := offersOf(run)
		return o.Refused, o.Accepted + o.Refused + o.Returned + o.TakenBack + o.Forced
	})
	forced := f.shareChart(func(run *testbed.Run) (part, all uint64) {
		o := offersOf(run)
		return o.Forced, o.Accepted + o.TakenBack + o.Forced
	})
	refused.Title, refused.Y.Label = "Refused offers", "% of all offers"
	forced.Title, forced.Y.Label = "Forced connections", "% of all connections"
	if len(refused.Series) > 0 {
		s.figures = []figure{{"refused", refused}, {"forced", forced}}
	}
	return s
}

// offersOf adds up what all servers did with offers.
func offersOf(run *testbed.Run) (sum testbed.Share) {
	for _, s := range run.Shares {
		sum.Accepted += s.Accepted
		sum.Refused += s.Refused
		sum.Returned += s.Returned
		sum.TakenBack += s.TakenBack
		sum.Forced += s.Forced
	}
	return sum
}

// failures has a chart for each kind of failures that occurred.
func (f *folder) failures() section {
	s := section{title: "Failures"}
	of := "% of all requests"
	if f.Kind == testbed.KindChange || f.holds() {
		of = "% of all connections"
	}
	kinds := map[string]bool{}
	for i := range f.Runs {
		for kind, n := range f.Runs[i].Failures {
			kinds[kind] = kinds[kind] || n > 0
		}
	}
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		if kinds[kind] {
			c := f.shareChart(func(run *testbed.Run) (part, all uint64) {
				return run.Failures[kind], run.Requests
			})
			c.Title, c.Y.Label = "Failures: "+kind, of
			s.figures = append(s.figures, figure{"failures-" + kind, c})
		}
	}
	return s
}

// shareChart draws a share in percent: lines over the points, or a bar for each case if there is
// only one point.
func (f *folder) shareChart(share func(*testbed.Run) (part, all uint64)) chart.Chart {
	c := chart.Chart{X: f.axis()}
	byCase := len(f.Points) == 1
	if byCase {
		c.X = chart.Axis{Label: pointName(f.Axis, f.Points[0])}
	}
	inPercent := func(x float64, e sim.Estimate) chart.Point {
		p := point(x, e)
		p.High = min(p.High, 100)
		return p
	}
	for i, name := range f.Cases {
		line := chart.Series{Name: name, Style: chart.Marked, Look: i + 1}
		for _, x := range f.Points {
			e, ok := shareOfRuns(f.runs(name, x), share)
			switch {
			case ok && byCase:
				// The horizontal axis has the name of the case, so the series needs none.
				c.Series = append(c.Series, chart.Series{
					Style: chart.Bars, Look: i + 1,
					Points: []chart.Point{inPercent(float64(len(c.X.Categories)), e)},
				})
				c.X.Categories = append(c.X.Categories, name)
			case ok:
				line.Points = append(line.Points, inPercent(x, e))
			}
		}
		if len(line.Points) > 0 {
			c.Series = append(c.Series, line)
		}
	}
	return c
}

// shareOfRuns returns a share in percent, with its confidence interval over runs. It returns false
// if no run has anything of which there can be a share.
func shareOfRuns(
	runs []*testbed.Run, share func(*testbed.Run) (part, all uint64),
) (sim.Estimate, bool) {
	var values []float64
	for _, run := range runs {
		if part, all := share(run); all > 0 {
			values = append(values, 100*float64(part)/float64(all))
		}
	}
	return sim.EstimateOf(values), len(values) > 0
}
