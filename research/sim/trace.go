// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Trace reads arrivals from a file, line by line. The first flow arrives at 0. Logs may have lines
// out of order. Such a line counts with the latest time before it.
type Trace struct {
	File   string // the file is compressed if its name ends with .gz
	Format TraceFormat
	// Speed is the factor by which the trace is faster than its recording. 0 means 1.
	Speed float64
	// Classes are the classes of the jobs, in the same order. A flow belongs to the first class
	// whose pattern matches its query.
	Classes []TraceClass
	// MustMatch makes a query that matches no class an error. Without it, the class of such a flow
	// is drawn by the jobs' shares.
	MustMatch bool
	// Check returns what is wrong with a query, or nil. The trace ends at a query that is wrong.
	// Close then returns an error with file and line. Without Check all queries are right.
	Check func(query string) error
}

// TraceClass tells which queries belong to a class.
type TraceClass struct {
	Match *regexp.Regexp // nil matches nothing
	// Sized means that the only group of Match captures the size of the flow: a number, 0 or more.
	Sized bool
}

// captures tells whether each flow that matches the class has a size: Match has exactly one group,
// which captures the size.
func (c *TraceClass) captures() bool {
	return c.Sized && c.Match != nil && c.Match.NumSubexp() == 1
}

// TraceFormat is the format of the lines.
type TraceFormat uint8

// The formats of traces. Times are seconds, or dates with a time of day in UTC, as in ISO 8601.
// The first line may be a header, with names in place of values.
const (
	// Wikibench is "counter time url ...", separated by spaces. The rest of the line after the URL
	// is ignored.
	Wikibench TraceFormat = iota
	// TimedQueries is "time<TAB>query".
	TimedQueries
)

// split returns the fields of a line, or false if the line does not have them.
func (f TraceFormat) split(line string) (at, query string, ok bool) {
	if f == TimedQueries {
		return strings.Cut(line, "\t")
	}
	_, rest, _ := strings.Cut(line, " ")
	at, query, ok = strings.Cut(rest, " ")
	query, _, _ = strings.Cut(query, " ")
	return at, query, ok
}

// String returns the format that a line must have.
func (f TraceFormat) String() string {
	if f == TimedQueries {
		return "time<TAB>query"
	}
	return "counter, time and URL, with blanks between"
}

// Start implements Arrivals. It needs no random numbers.
func (t Trace) Start(*Rand) (Source, error) {
	lines, err := t.open()
	if err != nil {
		return nil, err
	}
	speed := t.Speed
	if speed == 0 {
		speed = 1
	}
	return t.source(lines, speed), nil
}

// source returns the arrivals of the lines, at the given speed.
func (t Trace) source(lines *traceLines, speed float64) *traceSource {
	return &traceSource{
		lines: lines, speed: speed, classes: t.Classes, mustMatch: t.MustMatch, check: t.Check,
		first: math.NaN(),
	}
}

// Extent sums up a whole trace.
type Extent struct {
	// Seconds is the time from the first line to the last, at Speed 1.
	Seconds float64
	// Matched counts the lines by the class that their query matches. Drawn counts the lines that
	// match no class. Sizes are the sums of the flows' sizes, by class.
	Matched []uint64
	Sizes   []float64
	Drawn   uint64
}

// Extent reads the whole trace and sums it up.
func (t Trace) Extent() (Extent, error) {
	lines, err := t.open()
	if err != nil {
		return Extent{}, err
	}
	extent := Extent{Matched: make([]uint64, len(t.Classes)), Sizes: make([]float64, len(t.Classes))}
	source := t.source(lines, 1)
	for next, ok := source.Next(); ok; next, ok = source.Next() {
		extent.Seconds = next.At
		if next.Class < 0 {
			extent.Drawn++
		} else {
			extent.Matched[next.Class]++
			extent.Sizes[next.Class] += next.Size
		}
	}
	return extent, source.Close()
}

// open opens the file of the trace, and unpacks it if its name ends with .gz. The caller closes it.
func (t Trace) open() (*traceLines, error) {
	file, err := os.Open(t.File)
	if err != nil {
		return nil, err
	}
	var text io.Reader = file
	if strings.HasSuffix(t.File, ".gz") {
		if text, err = gzip.NewReader(file); err != nil {
			return nil, fmt.Errorf("%s: %w", t.File, errors.Join(err, file.Close()))
		}
	}
	scanner := bufio.NewScanner(text)
	scanner.Buffer(nil, longestLine)
	return &traceLines{name: t.File, format: t.Format, file: file, scanner: scanner}, nil
}

const longestLine = 1 << 20

// traceLines reads the lines of a trace.
type traceLines struct {
	name    string
	format  TraceFormat
	file    io.Closer
	scanner *bufio.Scanner
	number  int
	at      float64
	query   string
	err     error
}

// scan reads the next line. It returns false at the end or after an error, which close returns.
func (l *traceLines) scan() bool {
	for l.err == nil && l.scanner.Scan() {
		l.number++
		at, query, ok := l.format.split(l.scanner.Text())
		if !ok {
			return l.failf("must be %v", l.format)
		}
		if l.at, ok = parseTime(at); ok {
			l.query = query
			return true
		}
		if l.number > 1 || !isName(at) { // only the first line may be a header
			return l.failf("time %q: must be seconds, or such as 2010-05-27T09:31:55.63", at)
		}
	}
	return false
}

// failf stores an error about the line that was read last. It returns false.
func (l *traceLines) failf(format string, args ...any) bool {
	problem := fmt.Sprintf(format, args...)
	l.err = fmt.Errorf("%s:%d: %.200q: %s", l.name, l.number, l.scanner.Text(), problem)
	return false
}

// parseTime reads a number of seconds, or a date with a time of day. It returns seconds since
// 1970.
func parseTime(text string) (seconds float64, ok bool) {
	seconds, err := strconv.ParseFloat(text, 64)
	if err != nil {
		date, err := time.Parse("2006-01-02T15:04:05", text)
		return float64(date.Unix()) + float64(date.Nanosecond())/1e9, err == nil
	}
	return seconds, !math.IsNaN(seconds) && !math.IsInf(seconds, 0)
}

// isName tells whether a field is the name of the time in a header, and not a wrong time. A name
// begins with a letter and contains no digit.
func isName(text string) bool {
	if _, err := strconv.ParseFloat(text, 64); err == nil { // numbers such as nan
		return false
	}
	first, _ := utf8.DecodeRuneInString(text)
	return unicode.IsLetter(first) && !strings.ContainsAny(text, "0123456789")
}

// close closes the file. It returns the first error: about a line, of reading, or of closing.
func (l *traceLines) close() error {
	closing := l.file.Close()
	if l.err != nil {
		return l.err
	}
	if err := l.scanner.Err(); err != nil {
		return fmt.Errorf("%s:%d: %w", l.name, l.number+1, err)
	}
	return closing
}

type traceSource struct {
	lines     *traceLines
	speed     float64
	classes   []TraceClass
	mustMatch bool
	check     func(query string) error
	first     float64 // NaN before the first flow
	last      float64
}

// Next reads the next line. A line that is out of order counts with the latest time before it.
func (s *traceSource) Next() (next Arrival, ok bool) {
	if !s.lines.scan() {
		return Arrival{}, false
	}
	if math.IsNaN(s.first) {
		s.first = s.lines.at
	}
	s.last = max(s.last, (s.lines.at-s.first)/s.speed)
	if s.check != nil {
		if err := s.check(s.lines.query); err != nil {
			return Arrival{}, s.lines.failf("%v", err)
		}
	}
	class, size, ok := s.classify(s.lines.query)
	return Arrival{At: s.last, Class: class, Size: size, Query: s.lines.query}, ok
}

// classify returns the class of a query, or -1 if the class is to be drawn, and the size of the
// flow. ok is false if a required class or size is missing.
func (s *traceSource) classify(query string) (class int32, size float64, ok bool) {
	for i := range s.classes {
		match := s.classes[i].Match
		switch {
		case match == nil: // no query belongs to the class
		case !s.classes[i].Sized:
			if match.MatchString(query) {
				return int32(i), 0, true
			}
		default:
			if groups := match.FindStringSubmatch(query); groups != nil {
				size, ok = s.size(groups[1])
				return int32(i), size, ok
			}
		}
	}
	if s.mustMatch {
		return 0, 0, s.lines.failf("the query matches no job")
	}
	return -1, 0, true
}

// size parses the size that a group captured.
func (s *traceSource) size(captured string) (size float64, ok bool) {
	size, err := strconv.ParseFloat(captured, 64)
	if err != nil || !(size >= 0) || math.IsInf(size, 1) {
		return 0, s.lines.failf("captured %q: must be a number, 0 or more", captured)
	}
	return size, true
}

func (s *traceSource) Close() error { return s.lines.close() }
