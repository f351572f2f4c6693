// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/wording"
)

// Report has the results of a run. Times are in seconds. Requests of the warm-up do not count.
type Report struct {
	URLs []string `json:"urls"`
	Seed uint64   `json:"seed"`
	// From is the time from the beginning of the arrivals to the end of the warm-up.
	From float64 `json:"from"`
	// Seconds is the time after the warm-up in which requests were due.
	Seconds     float64 `json:"seconds"`
	Interrupted bool    `json:"interrupted"`

	Requests  uint64 `json:"requests"`
	Succeeded uint64 `json:"succeeded"`
	Failed    uint64 `json:"failed"`
	// Unfinished counts the requests without an outcome when the run was interrupted.
	Unfinished uint64 `json:"unfinished"`
	// Rate is the number of requests per second.
	Rate float64 `json:"rate"`
	// Failures counts failures by outcome.
	Failures map[string]uint64 `json:"failures"`
	// Errors has the first error of each outcome that occurred.
	Errors map[string]string `json:"errors"`

	// The following Times are nil if nothing was measured.

	// Latency has the times from when a request was due to the end of its response, for the
	// requests that succeeded.
	Latency *Times `json:"latency"`
	// Exchange has the times from the beginning of a request's handshake to the end of its
	// response, for the requests that succeeded. On an open connection, they begin when the request
	// is sent.
	Exchange *Times `json:"exchange"`
	// Connect has the times of handshakes.
	Connect *Times `json:"connect"`
	// Lateness has the times from when a request was due until the generator began to send it.
	Lateness *Times `json:"lateness"`
	// Distribution and ConnectDistribution are the cumulative distributions of Latency and Connect.
	Distribution        []Point `json:"distribution"`
	ConnectDistribution []Point `json:"connect_distribution"`

	Servers   []Server   `json:"servers"`
	Intervals []Interval `json:"intervals,omitempty"`

	// Connections counts the handshakes for requests.
	Connections uint64 `json:"connections"`
	// Bytes counts all bytes received, also during the warm-up.
	Bytes uint64 `json:"bytes"`
	Idle  Idle   `json:"idle"`

	// CPU is the CPU time of the generator as a share of the time of one core.
	CPU      float64  `json:"cpu"`
	Warnings []string `json:"warnings"`
}

// Times summarises a distribution of times, in seconds.
type Times struct {
	Mean      float64 `json:"mean"`
	Deviation float64 `json:"deviation"`
	Min       float64 `json:"min"`
	P50       float64 `json:"p50"`
	P90       float64 `json:"p90"`
	P95       float64 `json:"p95"`
	P99       float64 `json:"p99"`
	P999      float64 `json:"p99.9"`
	Max       float64 `json:"max"`
}

// Point is a point of a cumulative distribution of times.
type Point struct {
	Seconds float64 `json:"seconds"`
	Share   float64 `json:"share"` // of all times, those that are at most Seconds; from 0 to 1
}

// Server is a server that answered.
type Server struct {
	Name string `json:"server"`
	// Responses counts all responses that named the server, also incomplete ones.
	Responses uint64 `json:"responses"`
	// Failed counts the responses whose request failed, for example because the status was wrong.
	Failed  uint64 `json:"failed"`
	Latency *Times `json:"latency"`
}

// Interval has the results of the requests that were due in an interval of the run. Intervals have
// the length Config.Every, but the first and the last interval may be shorter.
type Interval struct {
	From      float64 `json:"from"` // in seconds since the beginning of the arrivals, like To
	To        float64 `json:"to"`
	Requests  uint64  `json:"requests"`
	Succeeded uint64  `json:"succeeded"`
	Failed    uint64  `json:"failed"`
	Latency   *Times  `json:"latency"`
}

// Idle counts the connections that were held open without requests.
type Idle struct {
	Open   int `json:"open"` // at the end
	Failed int `json:"failed"`
	Lost   int `json:"lost"` // closed by the server, or reset
}

const (
	// The report warns that the generator was late if the 99th percentile of the lateness exceeds
	// mostLateness, and is more than mostLatenessShare of the 99th percentile of the latency.
	mostLateness      = time.Millisecond
	mostLatenessShare = 0.1
	// mostCPU is the share of a core's time from which on the report warns that the generator was
	// the bottleneck.
	mostCPU = 0.9
)

// quantile returns the time, in seconds, that a share q of all times does not exceed.
func (h histogram) quantile(q float64) float64 {
	return time.Duration(h.ValueAtPercentile(100 * q)).Seconds()
}

// times summarises the histogram, or returns nil if it is empty.
func (h histogram) times() *Times {
	if h.TotalCount() == 0 {
		return nil
	}
	return &Times{
		Mean: h.Mean() / 1e9, Deviation: h.StdDev() / 1e9,
		Min: time.Duration(h.Min()).Seconds(), P50: h.quantile(0.5), P90: h.quantile(0.9),
		P95: h.quantile(0.95), P99: h.quantile(0.99), P999: h.quantile(0.999),
		Max: time.Duration(h.Max()).Seconds(),
	}
}

func (h histogram) distribution() []Point {
	points := []Point{}
	if h.TotalCount() == 0 {
		return points
	}
	const ticks = 5 // points per halving of the distance to 100%
	for _, bracket := range h.CumulativeDistributionWithTicks(ticks) {
		points = append(points, Point{
			Seconds: time.Duration(bracket.ValueAt).Seconds(), Share: bracket.Quantile / 100,
		})
	}
	return points
}

// report summarises the results. It also summarises the intervals that are still open, so it is
// called only once, at the end of the run.
func (r *results) report(g *generator) *Report {
	report := &Report{
		Seed: g.Seed, From: g.Warmup.Seconds(), Interrupted: r.interrupted,
		Requests: r.requests, Succeeded: r.outcomes[Succeeded], Failures: map[string]uint64{},
		Errors:  map[string]string{},
		Latency: r.latency.times(), Exchange: r.exchange.times(), Connect: r.connect.times(),
		Lateness: r.lateness.times(), Distribution: r.latency.distribution(),
		ConnectDistribution: r.connect.distribution(),
		Servers:             r.serverReports(), Connections: r.connections, Bytes: r.bytes,
		Idle:     Idle{Open: g.idle.open, Failed: g.idle.failed, Lost: g.idle.lost},
		Warnings: []string{},
	}
	for _, t := range g.Targets {
		report.URLs = append(report.URLs, t.URL)
	}
	for kind := Succeeded + 1; kind < outcomes; kind++ {
		report.Failed += r.outcomes[kind]
		report.Failures[kind.String()] = r.outcomes[kind]
		if err := r.errors[kind]; err != nil {
			report.Errors[kind.String()] = err.Error()
		}
	}
	report.Unfinished = report.Requests - report.Succeeded - report.Failed
	report.Seconds = max(r.measuredTime(g).Seconds(), 0)
	if report.Seconds > 0 {
		report.Rate = float64(report.Requests) / report.Seconds
	}
	for number := range r.intervals.open {
		r.intervals.summarise(number)
	}
	report.Intervals = r.intervals.between(g.Warmup, g.Warmup+r.measuredTime(g))
	if g.started {
		r.addHealth(report)
	}
	if g.idle.failed > 0 {
		report.Warnings = append(report.Warnings, fmt.Sprintf("%s could not be opened: %v",
			wording.Count(g.idle.failed, "idle connection"), g.idle.err))
	}
	return report
}

// measuredTime returns the length of the time after the warm-up in which requests were due. It is
// negative if the run ended during the warm-up.
func (r *results) measuredTime(g *generator) time.Duration {
	switch {
	case !g.started:
		return 0
	case r.interrupted && g.more: // the arrivals ended with the interrupt
		return g.now() - r.zero - g.Warmup
	case g.Duration > 0 && !g.over: // they ended at Duration
		return g.Duration - g.Warmup
	}
	return r.lastDue - r.zero - g.Warmup // they ended with the last one
}

// addHealth adds the CPU time of the generator to the report, and warnings if the generator may
// have falsified the results.
func (r *results) addHealth(report *Report) {
	now := readCPUTimes()
	elapsed := now.at.Sub(r.cpu.at)
	report.CPU = (now.process - r.cpu.process).Seconds() / elapsed.Seconds()
	warn := func(format string, args ...any) {
		report.Warnings = append(report.Warnings, fmt.Sprintf(format, args...))
	}
	if thread := (now.thread - r.cpu.thread).Seconds() / elapsed.Seconds(); thread >= mostCPU {
		warn("the generator was the bottleneck: it used %.0f%% of a core, and has only one thread",
			100*thread)
	}
	if wasLate(report.Lateness, report.Latency) {
		warn("the generator was late: 1%% of the requests were sent more than %.1f ms after "+
			"they were due, which is part of their latency", 1e3*report.Lateness.P99)
	}
	if n := r.outcomes[Local]; n > 0 {
		warn("the generator was the bottleneck: this host could not make %s: %v",
			wording.Count(int(n), "connection"), r.errors[Local])
	}
}

// wasLate tells whether the report must warn that the generator was late (mostLateness).
func wasLate(lateness, latency *Times) bool {
	if lateness == nil || lateness.P99 <= mostLateness.Seconds() {
		return false
	}
	return latency == nil || lateness.P99 > mostLatenessShare*latency.P99
}

// serverReports returns the results of each server, in the order of their names.
func (r *results) serverReports() []Server {
	servers := []Server{}
	for name, s := range r.servers {
		servers = append(servers, Server{
			Name: name, Responses: s.responses, Failed: s.failed, Latency: s.latency.times(),
		})
	}
	slices.SortFunc(servers, func(a, b Server) int { return byNumber(a.Name, b.Name) })
	return servers
}

// byNumber compares two names. Shorter names come first, so s2 comes before s10.
func byNumber(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
}
