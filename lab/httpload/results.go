// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"bufio"
	"cmp"
	"encoding/csv"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"golang.org/x/sys/unix"
)

const (
	// longest is the largest time that histograms tell apart, in nanoseconds. Longer times count as
	// this one.
	longest = int64(time.Hour)
	// mostServers bounds the servers that are counted apart, in case their names are not names.
	mostServers = 1000
	otherServer = "(others)"
	noServer    = "(unnamed)"
)

// outcome is the end of a request.
type outcome struct {
	kind   Outcome
	err    error  // of a failure
	server string // that answered, if it said so
	// latency is counted from the time at which the request was due, exchange from when the
	// generator began to serve it. Both are 0 for failures.
	latency, exchange time.Duration
}

// results collects the outcomes of a run.
type results struct {
	config      *Config
	requests    uint64
	outcomes    [outcomes]uint64
	errors      [outcomes]error // the first of each outcome
	connections uint64          // opened for measured requests
	bytes       uint64          // received, of all requests
	latency     histogram
	exchange    histogram
	connect     histogram
	lateness    histogram
	servers     map[string]*serverResults
	intervals   intervals
	interrupted bool

	zero     time.Duration
	lastDue  time.Duration
	cpu      cpuTimes // when the arrivals began
	progress progressMeter
}

// serverResults are the responses of a server.
type serverResults struct {
	responses, failed uint64
	latency           histogram
}

// histogram is an HDR histogram of times in nanoseconds.
type histogram struct{ *hdrhistogram.Histogram }

// newHistogram makes one whose values are exact to the given number of significant digits.
func newHistogram(digits int) histogram {
	return histogram{hdrhistogram.New(1, longest, digits)}
}

func (h histogram) add(d time.Duration) {
	_ = h.RecordValue(min(max(int64(d), 0), longest)) // in range, so there is no error
}

func newResults(c *Config) results {
	return results{
		config: c, latency: newHistogram(3), exchange: newHistogram(3), connect: newHistogram(3),
		lateness: newHistogram(3), servers: map[string]*serverResults{},
		intervals: intervals{every: c.Every},
	}
}

// begin notes the start of the arrivals.
func (r *results) begin(zero time.Duration) {
	r.zero, r.cpu = zero, readCPUTimes()
	r.progress.begin(zero)
}

// arrived counts a request that the generator takes up, late by the given time.
func (r *results) arrived(q *request, late time.Duration) {
	r.progress.sent++
	r.lastDue = q.due
	if !q.measured {
		return
	}
	r.requests++
	r.lateness.add(late)
	r.intervals.arrived(q.due - r.zero)
}

// connected counts a handshake, which took the given time.
func (r *results) connected(q *request, took time.Duration) {
	if q.measured {
		r.connections++
		r.connect.add(took)
	}
}

// finished counts the outcome of a request.
func (r *results) finished(q *request, o *outcome) {
	if o.kind == Succeeded {
		r.progress.latency.add(o.latency)
	} else {
		r.progress.failed++
	}
	if !q.measured {
		return
	}
	r.outcomes[o.kind]++
	if r.errors[o.kind] == nil {
		r.errors[o.kind] = o.err
	}
	if o.kind == Succeeded {
		r.latency.add(o.latency)
		r.exchange.add(o.exchange)
	}
	if o.server != "" || o.kind == Succeeded {
		r.server(o.server).finished(o)
	}
	r.intervals.finished(q.due-r.zero, o)
}

// server returns the results of the server with the name.
func (r *results) server(name string) *serverResults {
	if name == "" {
		name = noServer
	}
	if r.servers[name] == nil && len(r.servers) >= mostServers {
		name = otherServer
	}
	if r.servers[name] == nil {
		r.servers[name] = &serverResults{latency: newHistogram(2)}
	}
	return r.servers[name]
}

func (s *serverResults) finished(o *outcome) {
	s.responses++
	if o.kind == Succeeded {
		s.latency.add(o.latency)
	} else {
		s.failed++
	}
}

// intervals are the results over time. An interval has the requests that were due in it. It is
// summarised when the last one of them has its outcome, because histograms are large.
type intervals struct {
	every time.Duration
	open  map[int]*openInterval
	done  []Interval
}

type openInterval struct {
	Interval
	pending int
	latency histogram
}

func (i *intervals) arrived(at time.Duration) {
	if i.every == 0 {
		return
	}
	number := int(at / i.every)
	o := i.open[number]
	if o == nil {
		for earlier := range i.open {
			i.close(earlier)
		}
		if i.open == nil {
			i.open = map[int]*openInterval{}
		}
		from := time.Duration(number) * i.every
		o = &openInterval{latency: newHistogram(2)}
		o.From, o.To = from.Seconds(), (from + i.every).Seconds()
		i.open[number] = o
	}
	o.pending++
	o.Requests++
}

func (i *intervals) finished(at time.Duration, outcome *outcome) {
	if i.every == 0 {
		return
	}
	number := int(at / i.every)
	o := i.open[number]
	o.pending--
	if outcome.kind == Succeeded {
		o.Succeeded++
		o.latency.add(outcome.latency)
	} else {
		o.Failed++
	}
	if i.open[number+1] != nil {
		i.close(number)
	}
}

// close summarises an interval that is over, unless requests of it are pending.
func (i *intervals) close(number int) {
	if o := i.open[number]; o.pending == 0 {
		i.summarise(number)
	}
}

func (i *intervals) summarise(number int) {
	o := i.open[number]
	delete(i.open, number)
	o.Latency = o.latency.times()
	i.done = append(i.done, o.Interval)
}

// between returns all intervals of the time in which requests were measured, in their order. Those
// without requests are among them. The first one and the last one end with this time.
func (i *intervals) between(begin, end time.Duration) (all []Interval) {
	if i.every == 0 || len(i.done) == 0 {
		return nil
	}
	slices.SortFunc(i.done, func(a, b Interval) int { return cmp.Compare(a.From, b.From) })
	rest := i.done
	for from := begin / i.every * i.every; from < end || len(rest) > 0; from += i.every {
		next := Interval{From: from.Seconds(), To: (from + i.every).Seconds()}
		if len(rest) > 0 && rest[0].From == next.From {
			next, rest = rest[0], rest[1:]
		}
		next.From = max(next.From, begin.Seconds())
		if last := end.Seconds(); last > next.From {
			next.To = min(next.To, last)
		}
		all = append(all, next)
	}
	return all
}

// progressMeter reports the progress of a run every second.
type progressMeter struct {
	sent, failed   uint64
	latency        histogram
	zero, next     time.Duration
	sentAtLastCall uint64
}

const progressEvery = time.Second

func (p *progressMeter) begin(zero time.Duration) {
	p.zero, p.next, p.latency = zero, zero+progressEvery, newHistogram(2)
}

// report calls the configuration's function if it is time for that.
func (p *progressMeter) report(g *generator, now time.Duration) {
	if g.Progress == nil || now < p.next {
		return
	}
	state := Progress{
		Sent: p.sent, Failed: p.failed, Open: g.open + g.idle.opening + g.idle.open,
		Waiting: len(g.waiting), P50: math.NaN(), P99: math.NaN(), Elapsed: now - p.zero,
	}
	if !g.started {
		state.Elapsed = -1
	}
	state.Rate = float64(p.sent-p.sentAtLastCall) / (now - p.next + progressEvery).Seconds()
	if p.latency.Histogram != nil && p.latency.TotalCount() > 0 {
		state.P50, state.P99 = p.latency.quantile(0.5), p.latency.quantile(0.99)
	}
	p.next, p.sentAtLastCall = now+progressEvery, p.sent
	g.Progress(state)
}

// cpuTimes are CPU times of the process, and of the thread that runs the generator.
type cpuTimes struct {
	at              time.Time
	process, thread time.Duration
}

func readCPUTimes() cpuTimes {
	times := cpuTimes{at: time.Now()}
	for who, total := range map[int]*time.Duration{
		unix.RUSAGE_SELF: &times.process, unix.RUSAGE_THREAD: &times.thread,
	} {
		var usage unix.Rusage
		if unix.Getrusage(who, &usage) == nil {
			*total = time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
		}
	}
	return times
}

// requestLog writes a line for each request.
type requestLog struct {
	config *Config
	buffer *bufio.Writer
	lines  *csv.Writer
}

func newRequestLog(c *Config) *requestLog {
	l := &requestLog{config: c, buffer: bufio.NewWriter(c.Log)}
	l.lines = csv.NewWriter(l.buffer)
	_ = l.lines.Write([]string{"time", "query", "server", "outcome", "latency", "exchange"})
	return l
}

// write adds a line. Errors stay in the writer until flush.
func (l *requestLog) write(at time.Duration, r *request, o *outcome) {
	seconds := func(d time.Duration) string {
		return strconv.FormatFloat(l.config.scaled(d), 'f', 9, 64)
	}
	line := []string{seconds(at), r.query, o.server, o.kind.String(), "", ""}
	if o.kind == Succeeded {
		line[4], line[5] = seconds(o.latency), seconds(o.exchange)
	}
	_ = l.lines.Write(line)
}

func (l *requestLog) flush() error {
	l.lines.Flush()
	if err := l.lines.Error(); err != nil {
		return err
	}
	return l.buffer.Flush()
}
