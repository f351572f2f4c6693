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
)

// Trace has flows arrive as a file says, which it reads a line at a time. The first flow arrives at 0.
// A line that is out of order, as the clocks of those who log make some, counts with the time of the
// one before.
type Trace struct {
	File   string // compressed if its name ends with .gz
	Format TraceFormat
	// Speed is how many times faster than it was recorded the trace goes by; 0 is 1.
	Speed float64
	// Classes decide on a flow's class: that of the first that its query matches. Those that no one
	// matches are drawn by the jobs' shares. A nil one matches nothing.
	Classes []*regexp.Regexp
}

// TraceFormat says what is on a line.
type TraceFormat uint8

// The formats of traces.
const (
	// Wikibench is "counter epoch.fraction url ...", with blanks between; what follows the URL is not
	// read.
	Wikibench TraceFormat = iota
	// TimedQueries is "time<TAB>query", with the time in seconds.
	TimedQueries
)

// Start implements Arrivals.
func (t Trace) Start(*Rand) (Source, error) {
	lines, err := t.open()
	if err != nil {
		return nil, err
	}
	speed := t.Speed
	if speed == 0 {
		speed = 1
	}
	return &traceSource{lines: lines, speed: speed, classes: t.Classes}, nil
}

// Extent is what a whole trace comes to.
type Extent struct {
	// Seconds are from the first line to the last, at Speed 1.
	Seconds float64
	// Matched counts lines by the class that their query makes them, Drawn those without one.
	Matched []uint64
	Drawn   uint64
}

// Extent reads the whole trace.
func (t Trace) Extent() (Extent, error) {
	lines, err := t.open()
	if err != nil {
		return Extent{}, err
	}
	extent := Extent{Matched: make([]uint64, len(t.Classes))}
	source := traceSource{lines: lines, speed: 1, classes: t.Classes}
	for at, class, ok := source.Next(); ok; at, class, ok = source.Next() {
		extent.Seconds = at
		if class < 0 {
			extent.Drawn++
		} else {
			extent.Matched[class]++
		}
	}
	return extent, source.Close()
}

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

// traceLines reads a trace.
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

// scan reads the next line; it returns false at the end or at an error, which close returns.
func (l *traceLines) scan() bool {
	if l.err != nil || !l.scanner.Scan() {
		return false
	}
	l.number++
	line := l.scanner.Text()
	var at string
	var ok bool
	if l.format == TimedQueries {
		at, l.query, ok = strings.Cut(line, "\t")
	} else if _, at, ok = strings.Cut(line, " "); ok {
		at, l.query, ok = strings.Cut(at, " ")
		l.query, _, _ = strings.Cut(l.query, " ")
	}
	if !ok {
		l.err = fmt.Errorf("%s:%d: %q: not a line of the format", l.name, l.number, line)
		return false
	}
	seconds, err := strconv.ParseFloat(at, 64)
	if err != nil || math.IsNaN(seconds) || math.IsInf(seconds, 0) {
		l.err = fmt.Errorf("%s:%d: time %q: must be a number of seconds", l.name, l.number, at)
		return false
	}
	l.at = seconds
	return true
}

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
	lines   *traceLines
	speed   float64
	classes []*regexp.Regexp
	first   float64
	last    float64
}

func (s *traceSource) Next() (at float64, class int32, ok bool) {
	if !s.lines.scan() {
		return 0, 0, false
	}
	if s.lines.number == 1 {
		s.first = s.lines.at
	}
	s.last = max(s.last, (s.lines.at-s.first)/s.speed)
	return s.last, s.classOf(s.lines.query), true
}

func (s *traceSource) classOf(query string) int32 {
	for i, class := range s.classes {
		if class != nil && class.MatchString(query) {
			return int32(i)
		}
	}
	return -1
}

func (s *traceSource) Close() error { return s.lines.close() }
