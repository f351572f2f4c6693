// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"bufio"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/segue-lb/segue/research/sim"
)

// Constant arrivals come at equal intervals, Rate per second. The first one comes at time 0.
type Constant struct{ Rate float64 }

// Start implements sim.Arrivals.
func (c Constant) Start(*sim.Rand) (sim.Source, error) { return &constantSource{rate: c.Rate}, nil }

// constantSource is a sequence of Constant arrivals.
type constantSource struct {
	rate   float64
	number float64 // of arrivals so far
}

// Next implements sim.Source. The arrivals never end by themselves.
func (s *constantSource) Next() (next sim.Arrival, ok bool) {
	next = sim.Arrival{At: s.number / s.rate, Class: -1}
	s.number++
	return next, true
}

func (s *constantSource) Close() error { return nil }

// Trace returns the arrivals in a trace file. Each query in the file must be a URL or a request
// target (RFC 9112, section 3.2.1). Of a URL, only the request target is used. The arrivals come
// speed times as fast as in the file.
func Trace(file string, format sim.TraceFormat, speed float64) sim.Trace {
	return sim.Trace{
		File: file, Format: format, Speed: speed,
		Check: func(query string) error { _, err := requestTarget(query); return err },
	}
}

const day = 24 * time.Hour

// Day is a curve of the rate that follows the time of day, and repeats every day.
type Day struct {
	// Length is how long a day of the curve lasts in the run: with 1m, a minute stands for 24
	// hours.
	Length time.Duration
	// Start is the time of day at which the run starts, from 0 to 24 h.
	Start time.Duration
	// Curve is the factor of the rate, by the time of day in seconds.
	Curve sim.Curve
}

// Factor implements sim.Curve. The argument is the time in seconds since the start of the run.
func (d Day) Factor(at float64) float64 {
	at = d.Start.Seconds() + at*float64(day)/float64(d.Length)
	return d.Curve.Factor(math.Mod(at, day.Seconds()))
}

// Max implements sim.Curve.
func (d Day) Max() float64 { return d.Curve.Max() }

// Sine returns a curve of a day. Its factor is lowest at 06:00, where it is 1 - amplitude, and
// highest at 18:00, where it is 1 + amplitude. The amplitude is from 0 to 1.
func Sine(amplitude float64) sim.Curve {
	return sim.Diurnal{
		Period: day.Seconds(), Amplitude: amplitude, Phase: day.Seconds() / 2,
	}
}

// ReadCurve reads the curve of a day from a file. Each line has a time of day and a factor of 0 or
// more, with blanks between them: "06:30 0.55". Times ascend. Between two lines the factor follows
// a straight line, also between the last line and the first one on the next day. Empty lines and
// lines that begin with # are ignored.
func ReadCurve(name string) (sim.Curve, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var points sim.Points
	lines := bufio.NewScanner(file)
	for number := 1; lines.Scan(); number++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		point, problem := parsePoint(line)
		if problem == "" && len(points) > 0 && point.At <= points[len(points)-1].At {
			problem = "the time must be later than the one before"
		}
		if problem != "" {
			return nil, fmt.Errorf("%s:%d: %.200q: %s", name, number, line, problem)
		}
		points = append(points, point)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if len(points) == 0 || points.Max() == 0 {
		return nil, fmt.Errorf("%s: must have at least one line with a factor above 0", name)
	}
	return aroundMidnight(points), nil
}

// parsePoint reads a line of a curve.
func parsePoint(line string) (point sim.Point, problem string) {
	fields := strings.Fields(line)
	if len(fields) != 2 {
		return point, "must be a time of day and a factor, such as 06:30 0.55"
	}
	at, err := ParseTimeOfDay(fields[0])
	if err != nil {
		return point, err.Error()
	}
	factor, err := strconv.ParseFloat(fields[1], 64)
	if err != nil || !(factor >= 0) || math.IsInf(factor, 1) {
		return point, fmt.Sprintf("factor %q: must be a number, 0 or more", fields[1])
	}
	return sim.Point{At: at.Seconds(), Factor: factor}, ""
}

// aroundMidnight returns the points with two more: the last point on the day before, and the first
// point on the day after. So the curve is defined from midnight to midnight.
func aroundMidnight(points sim.Points) sim.Points {
	before, after := points[len(points)-1], points[0]
	before.At -= day.Seconds()
	after.At += day.Seconds()
	return slices.Concat(sim.Points{before}, points, sim.Points{after})
}

// ParseTimeOfDay reads a time such as 06:30 or 06:30:15.
func ParseTimeOfDay(text string) (time.Duration, error) {
	for _, layout := range []string{"15:04", "15:04:05"} {
		if at, err := time.Parse(layout, text); err == nil {
			return time.Duration(at.Hour())*time.Hour + time.Duration(at.Minute())*time.Minute +
				time.Duration(at.Second())*time.Second, nil
		}
	}
	return 0, fmt.Errorf("time %q: must be a time of day, such as 06:30", text)
}
