// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"math"
	"path/filepath"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

// gaps returns the times between n arrivals, and the time of the last one.
func gaps(t *testing.T, arrivals sim.Arrivals, n int) (gaps []float64, last float64) {
	t.Helper()
	source, err := arrivals.Start(sim.NewRand(1, streamArrivals))
	testhost.Must(t, err)
	for range n {
		next, ok := source.Next()
		if !ok {
			t.Fatal("the arrivals end")
		}
		gaps = append(gaps, next.At-last)
		last = next.At
	}
	return gaps, last
}

// moments returns mean and standard deviation.
func moments(values []float64) (mean, deviation float64) {
	for _, x := range values {
		mean += x / float64(len(values))
	}
	for _, x := range values {
		deviation += (x - mean) * (x - mean) / float64(len(values))
	}
	return mean, math.Sqrt(deviation)
}

// requireNear fails the test unless a value is within a share of what it should be.
func requireNear(t *testing.T, what string, got, want, share float64) {
	t.Helper()
	if !(math.Abs(got-want) <= share*math.Abs(want)) {
		t.Errorf("%s is %v, want %v within %v%%", what, got, want, 100*share)
	}
}

func TestRates(t *testing.T) {
	const n = 100_000
	times, _ := gaps(t, sim.Poisson{Rate: 250}, n)
	mean, deviation := moments(times)
	requireNear(t, "the mean gap of Poisson arrivals", mean, 0.004, 0.01)
	requireNear(t, "the deviation of their gaps", deviation, 0.004, 0.02)

	times, last := gaps(t, Constant{Rate: 250}, n)
	mean, deviation = moments(times[1:])
	requireNear(t, "the gap of constant arrivals", mean, 0.004, 1e-9)
	requireNear(t, "the last of constant arrivals", last, (n-1)*0.004, 1e-9)
	if times[0] != 0 || deviation > 1e-9 {
		t.Errorf("constant arrivals begin at %v, and deviate by %v", times[0], deviation)
	}
}

// TestCurves counts arrivals by time of day, over many days of ten seconds.
func TestCurves(t *testing.T) {
	file := write(t, "curve", "# quiet mornings\n06:00 0.5\n\n12:00:00 1.5\n18:00\t1.5\n")
	points, err := ReadCurve(file)
	testhost.Must(t, err)
	const rate, length, days = 100, 10 * time.Second, 300
	const low, high = 1 - 1/math.Pi, 1 + 1/math.Pi // means of quarters of a sine of amplitude 1/2
	for name, test := range map[string]struct {
		day  Day
		want [4]float64 // mean factor of each quarter of a day in the test
	}{
		"sine":          {Day{Curve: Sine(0.5)}, [4]float64{low, low, high, high}},
		"file":          {Day{Curve: points}, [4]float64{0.75, 1, 1.5, 1.25}},
		"file from six": {Day{Curve: points, Start: 6 * time.Hour}, [4]float64{1, 1.5, 1.25, 0.75}},
	} {
		test.day.Length = length
		source, err := sim.Poisson{Rate: rate, Curve: test.day}.Start(sim.NewRand(2, streamArrivals))
		testhost.Must(t, err)
		var counts [4]float64
		for next, _ := source.Next(); next.At < days*length.Seconds(); next, _ = source.Next() {
			counts[int(4*math.Mod(next.At/length.Seconds(), 1))]++
		}
		for quarter, n := range counts {
			requireNear(t, name, n/(rate*days*length.Seconds()/4), test.want[quarter], 0.02)
		}
	}
}

func TestBadCurves(t *testing.T) {
	for text, want := range map[string]string{
		"":                   `: must have at least one line with a factor above 0`,
		"00:00 0\n12:00 0":   `: must have at least one line with a factor above 0`,
		"# x\n06:00":         `:2: "06:00": must be a time of day and a factor, such as 06:30 0.55`,
		"25:00 1":            `:1: "25:00 1": time "25:00": must be a time of day, such as 06:30`,
		"06:00 -1":           `:1: "06:00 -1": factor "-1": must be a number, 0 or more`,
		"06:00 1\n\n06:00 2": `:3: "06:00 2": the time must be later than the one before`,
	} {
		file := write(t, "curve", text)
		if _, err := ReadCurve(file); err == nil || err.Error() != file+want {
			t.Errorf("%q: %v\nwant %s", text, err, file+want)
		}
	}
	if _, err := ReadCurve(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a curve without a file")
	}
}

func TestTemplates(t *testing.T) {
	const demand = 190125 * time.Microsecond
	for url, want := range map[string]string{
		"http://127.0.0.1":                           "127.0.0.1 127.0.0.1:80 /",
		"http://127.0.0.1:8080?x#y":                  "127.0.0.1:8080 127.0.0.1:8080 /?x",
		"http://[2001:db8::1]/?work={demand}&id={n}": "[2001:db8::1] [2001:db8::1]:80 /?work=190.125ms&id=7",
		"http://[::1]:81/{demand-us}/%7B":            "[::1]:81 [::1]:81 /190125/%7B",
	} {
		parsed := target(t, url)
		got := parsed.Host + " " + parsed.Address.String() + " " + parsed.query(7, demand)
		if got != want {
			t.Errorf("%s: %s, want %s", url, got, want)
		}
	}
	if got := target(t, "http://127.0.0.1/{demand}").query(1, 0); got != "/0ms" {
		t.Errorf("no demand is written as %s", got)
	}
}

func TestBadTargets(t *testing.T) {
	const host = "the host must be a name or an address, and a port, such as [2001:db8::1]:8080"
	for url, want := range map[string]string{
		"127.0.0.1":                  `URL "127.0.0.1": must begin with http://`,
		"https://127.0.0.1/":         `URL "https://127.0.0.1/": must begin with http://`,
		"http:///x":                  `URL "http:///x": ` + host,
		"http://2001:db8::1/":        `URL "http://2001:db8::1/": ` + host,
		"http://a@127.0.0.1/":        `URL "http://a@127.0.0.1/": ` + host,
		"http://127.0.0.1:0/":        `URL "http://127.0.0.1:0/": port "0": must be from 1 to 65535`,
		"http://127.0.0.1/{work}":    `URL "http://127.0.0.1/{work}": {work}: must be {demand}, {demand-us} or {n}`,
		"http://127.0.0.1/a b":       `URL "http://127.0.0.1/a b": " ": must be written as %20 in a URL`,
		"http://127.0.0.1/\r\nHost:": `URL "http://127.0.0.1/\r\nHost:": "\r": must be written as %0D in a URL`,
	} {
		if _, err := ParseTarget(t.Context(), url); err == nil || err.Error() != want {
			t.Errorf("%s: %v\nwant %s", url, err, want)
		}
	}
}
