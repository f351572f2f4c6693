// SPDX-License-Identifier: Apache-2.0

package report

import (
	"compress/gzip"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/testbed"
)

// packed is the content of requests.csv.gz with the lines of requests.
func packed(t *testing.T, lines string) string {
	t.Helper()
	var out strings.Builder
	w := gzip.NewWriter(&out)
	if _, err := w.Write([]byte("time,query,server,outcome,latency,exchange\n" + lines)); err != nil {
		t.Fatal(err)
	}
	testhost.Must(t, w.Close())
	return out.String()
}

// TestSmooth checks the response to a step: after one second it has 1 - 1/e of its height, however
// often the load was sampled.
func TestSmooth(t *testing.T) {
	for _, interval := range []float64{0.05, 0.2, 1} {
		var times, values []float64
		for at := 0.0; at < 1+interval/2; at += interval {
			times, values = append(times, at), append(values, 1)
		}
		values[0] = 0
		smoothed := smooth(times, values)
		if got, want := smoothed[len(smoothed)-1], 1-1/math.E; math.Abs(got-want) > 1e-9 {
			t.Errorf("every %v s: %v after a second, want %v", interval, got, want)
		}
	}
}

// TestLoads checks the mean and Jain's index of loads.
func TestLoads(t *testing.T) {
	path := filepath.Join(t.TempDir(), "loads.csv")
	writeFile(t, path, "time,s1,s2,s3,s4\n0,0,0,0,0\n0.2,4,4,4,4\n0.4,8,0,0,0\n")
	l, err := readLoads(path)
	testhost.Must(t, err)
	want := &loads{times: []float64{0, 0.2, 0.4}, busy: []float64{0, 4, 2}, fairness: []float64{1, 1, 0.25}}
	if diff := cmp.Diff(want, l, cmp.AllowUnexported(loads{})); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestThinned checks that thinning keeps the mean, and the time of each point.
func TestThinned(t *testing.T) {
	var times, values []float64
	for i := range 1000 {
		times, values = append(times, float64(i)), append(values, float64(2*i))
	}
	points := thinned(times, values)
	if n := len(points); n < 200 || n > 400 {
		t.Errorf("%d points", n)
	}
	for _, p := range points {
		if math.Abs(p.Y-2*p.X) > 1e-9 {
			t.Errorf("point %v is not on the line", p)
		}
	}
}

// TestDeciles checks the deciles and the rates of requests that belong to two runs and two
// intervals. Failed requests count for the rate only.
func TestDeciles(t *testing.T) {
	directory := t.TempDir()
	for name, lines := range map[string]string{
		"a": "0,/,s1,succeeded,0.1,0\n1,/,s1,succeeded,0.3,0\n9.9,/,,reset,,\n",
		"b": "5,/,s1,succeeded,0.2,0\n10,/,s1,succeeded,7,0\n",
	} {
		writeFile(t, filepath.Join(directory, name, "requests.csv.gz"), packed(t, lines))
	}
	f := &folder{path: directory, Results: &testbed.Results{Bin: 10}}
	d, err := f.readDay([]*testbed.Run{{Folder: "a"}, {Folder: "b"}})
	testhost.Must(t, err)
	if want := [][]float64{{0.1, 0.2, 0.3}, {7}}; !cmp.Equal(want, d.times) {
		t.Errorf("times %v, want %v", d.times, want)
	}
	rates := d.rates()
	if len(rates) != 2 || rates[0].X != 5 || rates[0].Y != 0.2 || rates[1].Y != 0.05 {
		t.Errorf("rates %v", rates)
	}
	deciles := d.deciles(1, 9)
	if p := deciles[0]; p.X != 5 || p.Low < 100 || p.Low >= p.Y || p.Y < 150 || p.Y > 200 || p.High <= p.Y || p.High > 300 {
		t.Errorf("deciles %v", p)
	}
	if p := deciles[1]; p.Low != 7000 || p.Y != 7000 || p.High != 7000 {
		t.Errorf("deciles of a single time: %v", p)
	}
}

// TestCumulated checks the mean of two distributions.
func TestCumulated(t *testing.T) {
	run := func(points ...testbed.DistributionPoint) *testbed.Run {
		return &testbed.Run{Measured: testbed.Response{Distribution: points}}
	}
	runs := []*testbed.Run{
		run(testbed.DistributionPoint{Seconds: 0, Share: 0}, testbed.DistributionPoint{Seconds: 1, Share: 1}),
		run(testbed.DistributionPoint{Seconds: 0.5, Share: 0.5}, testbed.DistributionPoint{Seconds: 0.5, Share: 0.8}, testbed.DistributionPoint{Seconds: 1.5, Share: 1}),
	}
	points := cumulated(runs, measured, 1.5)
	for _, want := range [][2]float64{{0, 0}, {250, 0.125}, {500, 0.65}, {1000, 0.95}, {1500, 1}} {
		i := slices.IndexFunc(points, func(p chart.Point) bool { return math.Abs(p.X-want[0]) < 1e-9 })
		if i < 0 || math.Abs(points[i].Y-want[1]) > 1e-9 {
			t.Errorf("at %v ms: point %d of %d points, want the share %v", want[0], i, len(points), want[1])
		}
	}
	if points := cumulated(nil, measured, 1); points != nil {
		t.Errorf("without runs: %v", points)
	}
}

// TestShown checks that the most loaded point and a moderate one are shown, by the response times.
func TestShown(t *testing.T) {
	f := &folder{Results: &testbed.Results{Points: []float64{40, 44, 48}}}
	for point, mean := range map[float64]float64{40: 3, 44: 2, 48: 1} { // fewer servers are slower
		f.Runs = append(f.Runs, testbed.Run{Point: point, Measured: testbed.Response{Mean: mean}})
	}
	if got := f.shown(); !slices.Equal(got, []float64{44, 40}) {
		t.Errorf("shown %v", got)
	}
	f.Runs = f.Runs[:1]
	if got := f.shown(); len(got) != 1 {
		t.Errorf("shown %v of one", got)
	}
	f.Runs = nil
	if got := f.shown(); len(got) != 0 {
		t.Errorf("shown %v of none", got)
	}
}

// TestServerShares checks the sums and means over runs.
func TestServerShares(t *testing.T) {
	runs := []*testbed.Run{
		{Shares: []testbed.Share{{Server: "a", Responses: 10, Mean: 1, Busy: 2, Accepted: 3, Refused: 1}}},
		{Shares: []testbed.Share{{Server: "b", Responses: 5}, {Server: "a", Responses: 30, Mean: 2, Busy: 4, Forced: 5}}},
	}
	want := []testbed.Share{
		{Server: "a", Responses: 40, Mean: 1.75, Busy: 3, Accepted: 3, Refused: 1, Forced: 5},
		{Server: "b", Responses: 5},
	}
	if diff := cmp.Diff(want, serverShares(runs)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	points := ranked(want)
	if len(points) != 2 || math.Abs(points[0].Y-100*40/22.5) > 1e-9 || points[1].X != 2 {
		t.Errorf("ranked %v", points)
	}
}

// TestOffers checks the shares of offers by their result, and that cases without offers are left
// out.
func TestOffers(t *testing.T) {
	f := &folder{Results: &testbed.Results{Cases: []string{"sc", "sr4"}, Points: []float64{1, 2}}}
	for _, x := range f.Points {
		f.Runs = append(f.Runs, testbed.Run{Case: "sc", Point: x, Shares: []testbed.Share{{Responses: 5}}},
			testbed.Run{Case: "sr4", Point: x, Shares: []testbed.Share{{Accepted: 60, Refused: 25, Forced: 15}}})
	}
	s := f.offers()
	if len(s.figures) != 2 {
		t.Fatalf("%d figures", len(s.figures))
	}
	for i, want := range []float64{25, 20} {
		series := s.figures[i].chart.Series
		if len(series) != 1 || series[0].Name != "sr4" || series[0].Look != 2 || math.Abs(series[0].Points[1].Y-want) > 1e-9 {
			t.Errorf("%s: %v, want %v", s.figures[i].name, series, want)
		}
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 5922.4: "5922", 340.4: "340", 99.96: "100", 34.21: "34.2", 3.421: "3.42", 0.9999: "1.00", 0.12345: "0.123",
		0.00012345: "0.000123", -2.5: "-2.50",
	} {
		if got := number(v); got != want {
			t.Errorf("%v: %s, want %s", v, got, want)
		}
	}
	for e, want := range map[sim.Estimate]value{
		{Value: 143, Half: 0.24}:        {"143", "0.2"},
		{Value: 143, Half: 0}:           {"143", "0"},
		{Value: 2.5, Half: 12.345}:      {"2.50", "12.35"},
		{Value: 143, Half: math.NaN()}:  {"143", ""},
		{Value: math.NaN(), Half: 0.25}: {"–", ""},
	} {
		if got := valueOf(e, true); got != want && !(math.IsNaN(e.Value) && got.Number == "–") {
			t.Errorf("%v: %v, want %v", e, got, want)
		}
	}
}

// TestPointNames checks that all points have names that need no axis.
func TestPointNames(t *testing.T) {
	for key, want := range map[string]string{
		"load": "ρ\u00a0=\u00a00.5", "servers": "0.5 servers", "buckets": "0.5 buckets", "flows": "0.5 flows",
		"deviation": "σ\u00a0=\u00a00.5 s", "removed": "0.5 removed", "speed": "speed 0.5",
		"rate": "0.5 requests/s", "other": "a label: 0.5",
	} {
		if got := pointName(testbed.Axis{Key: key, Label: "a label"}, 0.5); got != want {
			t.Errorf("%s: %s, want %s", key, got, want)
		}
	}
}

// TestLargeOver checks that the last interval, which is not complete, and intervals that a run does
// not have are left out.
func TestLargeOver(t *testing.T) {
	f := &folder{}
	runs := []*testbed.Run{
		{Measured: testbed.Response{LargeOver: []float64{0.5, 0.25, 0.5, 1}}},
		{Measured: testbed.Response{LargeOver: []float64{0.75, 0.25, 1}}},
	}
	want := []chart.Point{{X: 2.5, Y: 62.5}, {X: 7.5, Y: 25}}
	if diff := cmp.Diff(want, f.meanLargeShares(runs, measured, unit{"%", 100})); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if points := f.meanLargeShares(runs, simulated, unit{"%", 100}); points != nil {
		t.Errorf("points without a simulation: %v", points)
	}
}
