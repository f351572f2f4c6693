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
	// longest is the largest time in histograms, in nanoseconds. Longer times count as this one.
	longest = int64(time.Hour)
	// mostServers is how many servers are counted separately. Their names come from a response
	// header. So without a limit, new names could fill the memory.
	mostServers = 1000
	otherServer = "(others)"  // the name for all further servers
	noServer    = "(unnamed)" // the name for responses without the header
)

// outcome tells how a request ended.
type outcome struct {
	kind   Outcome
	err    error  // of a failure
	server string // the name of the server that answered; empty if it is not known
	// latency is the time since the request was due. exchange is the time since its handshake began
	// or, on an open connection, since it was sent. Only the times of requests that succeeded
	// count.
	latency, exchange time.Duration
}

// results collects the outcomes of a run.
type results struct {
	config      *Config
	requests    uint64
	outcomes    [outcomes]uint64
	errors      [outcomes]error // the first of each outcome
	connections uint64          // number of handshakes for measured requests
	bytes       uint64          // received for all requests
	latency     histogram
	exchange    histogram
	connect     histogram
	lateness    histogram
	servers     map[string]*serverResults
	intervals   intervals
	interrupted bool

	zero     time.Duration // when the arrivals began
	lastDue  time.Duration // when the latest request was due
	cpu      cpuTimes      // when the arrivals began
	progress progressMeter
}

// serverResults has the results of the requests that a server answered.
type serverResults struct {
	responses, failed uint64
	latency           histogram
}

// histogram is an HDR histogram of times in nanoseconds.
type histogram struct{ *hdrhistogram.Histogram }

// newHistogram returns an empty histogram, whose values are exact to the given number of
// significant digits.
func newHistogram(digits int) histogram {
	return histogram{hdrhistogram.New(1, longest, digits)}
}

// add counts a time. A negative time counts as 0, and a time above longest as longest.
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

// arrived counts a request that the generator begins to send. late is the time since it was due.
// A request of the warm-up counts only for the progress.
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

// connected counts the handshake for a request. took is its time.
func (r *results) connected(q *request, took time.Duration) {
	if q.measured {
		r.connections++
		r.connect.add(took)
	}
}

// finished counts the outcome of a request. A request of the warm-up counts only for the progress.
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

// server returns the results of the server with this name, or those that nameless or excess servers
// share.
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

// finished counts the outcome of a request that the server answered.
func (s *serverResults) finished(o *outcome) {
	s.responses++
	if o.kind == Succeeded {
		s.latency.add(o.latency)
	} else {
		s.failed++
	}
}

// intervals has the results over time. An interval has the requests that were due in it. When it is
// over and all of them have an outcome, it is summarised, because histograms need much memory.
type intervals struct {
	every time.Duration         // the length of an interval; 0: there are no intervals
	open  map[int]*openInterval // not summarised yet, by number; number n begins at n * every
	done  []Interval            // summarised
}

// openInterval is an interval that is not summarised yet.
type openInterval struct {
	Interval
	pending int // number of requests without an outcome
	latency histogram
}

// arrived counts a request that was due at a time since the beginning of the arrivals.
func (i *intervals) arrived(at time.Duration) {
	if i.every == 0 {
		return
	}
	number := int(at / i.every)
	o := i.open[number]
	if o == nil {
		// The first request of an interval shows that the earlier intervals are over.
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

// finished counts the outcome of a request that was due at a time since the beginning of the
// arrivals.
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
	if i.open[number+1] != nil { // the interval is over, and this may have been its last outcome
		i.close(number)
	}
}

// close summarises an interval that is over, unless some of its requests have no outcome yet.
func (i *intervals) close(number int) {
	if o := i.open[number]; o.pending == 0 {
		i.summarise(number)
	}
}

// summarise moves an interval from open to done.
func (i *intervals) summarise(number int) {
	o := i.open[number]
	delete(i.open, number)
	o.Latency = o.latency.times()
	i.done = append(i.done, o.Interval)
}

// between returns all intervals from begin to end in order, including those without requests. The
// first one begins at begin, and the last one ends at end, even if the intervals of the run begin
// and end at other times. It returns nil if there are no intervals.
func (i *intervals) between(begin, end time.Duration) (all []Interval) {
	if i.every == 0 || len(i.done) == 0 {
		return nil
	}
	slices.SortFunc(i.done, func(a, b Interval) int { return cmp.Compare(a.From, b.From) })
	rest := i.done                     // the summarised intervals that are not in all yet
	first := begin / i.every * i.every // rounded down to the beginning of an interval
	for from := first; from < end || len(rest) > 0; from += i.every {
		next := Interval{From: from.Seconds(), To: (from + i.every).Seconds()}
		if len(rest) > 0 && rest[0].From == next.From {
			next, rest = rest[0], rest[1:]
		}
		next.From = max(next.From, begin.Seconds())
		if last := end.Seconds(); last > next.From { // false if its requests were due at end itself
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

// begin notes the time at which the arrivals begin.
func (p *progressMeter) begin(zero time.Duration) {
	p.zero, p.next, p.latency = zero, zero+progressEvery, newHistogram(2)
}

// report calls Config.Progress, if a second has passed since the last call.
func (p *progressMeter) report(g *generator, now time.Duration) {
	if g.Progress == nil || now < p.next {
		return
	}
	lastCall := p.next - progressEvery
	state := Progress{
		Sent: p.sent, Failed: p.failed, Open: g.open + g.idle.opening + g.idle.open,
		Waiting: len(g.waiting), P50: math.NaN(), P99: math.NaN(), Elapsed: now - p.zero,
	}
	if !g.started {
		state.Elapsed = -1 // idle connections are being opened
	}
	state.Rate = float64(p.sent-p.sentAtLastCall) / (now - lastCall).Seconds()
	if p.latency.Histogram != nil && p.latency.TotalCount() > 0 {
		state.P50, state.P99 = p.latency.quantile(0.5), p.latency.quantile(0.99)
	}
	p.next, p.sentAtLastCall = now+progressEvery, p.sent
	g.Progress(state)
}

// cpuTimes has the CPU times that the process, and the thread of the generator, have used until the
// time at.
type cpuTimes struct {
	at              time.Time
	process, thread time.Duration
}

func readCPUTimes() cpuTimes {
	used := func(who int) time.Duration {
		var usage unix.Rusage
		_ = unix.Getrusage(who, &usage) // cannot fail
		return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	}
	return cpuTimes{time.Now(), used(unix.RUSAGE_SELF), used(unix.RUSAGE_THREAD)}
}

// requestLog writes Config.Log: a line of CSV for each measured request.
type requestLog struct {
	config *Config
	buffer *bufio.Writer
	lines  *csv.Writer
}

// newRequestLog returns a log with its header line.
func newRequestLog(c *Config) *requestLog {
	l := &requestLog{config: c, buffer: bufio.NewWriter(c.Log)}
	l.lines = csv.NewWriter(l.buffer)
	_ = l.lines.Write([]string{"time", "query", "server", "outcome", "latency", "exchange"})
	return l
}

// write adds the line of a request that was due at a time since the beginning of the arrivals.
// flush returns the errors of write.
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

// flush writes all lines that are still in buffers. It returns the first error of the log.
func (l *requestLog) flush() error {
	l.lines.Flush()
	if err := l.lines.Error(); err != nil {
		return err
	}
	return l.buffer.Flush()
}
