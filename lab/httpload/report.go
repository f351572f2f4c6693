// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/wording"
)

// Report is what a run has measured. Times are in seconds. Requests of the warm-up do not count.
type Report struct {
	URLs []string `json:"urls"`
	Seed uint64   `json:"seed"`
	// From is the end of the warm-up, and Seconds the time from then on in which requests were due.
	From        float64 `json:"from"`
	Seconds     float64 `json:"seconds"`
	Interrupted bool    `json:"interrupted"`

	Requests  uint64 `json:"requests"`
	Succeeded uint64 `json:"succeeded"`
	Failed    uint64 `json:"failed"`
	// Unfinished requests had no outcome when the run was interrupted.
	Unfinished uint64 `json:"unfinished"`
	// Rate is the number of requests per second.
	Rate float64 `json:"rate"`
	// Failures counts failures by outcome, and Errors has an example of each that occurred.
	Failures map[string]uint64 `json:"failures"`
	Errors   map[string]string `json:"errors"`

	// Latency is counted from the times at which requests were due to the ends of their responses,
	// Exchange from the beginning of their handshake, or of sending on an open connection. Both are
	// of the requests that succeeded. They are nil if there is none, as are all Times.
	Latency  *Times `json:"latency"`
	Exchange *Times `json:"exchange"`
	// Connect is the time of handshakes.
	Connect *Times `json:"connect"`
	// Lateness is how much later than due the generator took up requests.
	Lateness *Times `json:"lateness"`
	// Distribution and ConnectDistribution are the cumulative distributions of Latency and Connect.
	Distribution        []Point `json:"distribution"`
	ConnectDistribution []Point `json:"connect_distribution"`

	Servers   []Server   `json:"servers"`
	Intervals []Interval `json:"intervals,omitempty"`

	// Connections counts handshakes for requests, and Bytes all bytes received.
	Connections uint64 `json:"connections"`
	Bytes       uint64 `json:"bytes"`
	Idle        Idle   `json:"idle"`

	// CPU is the CPU time of the generator as a share of the time of one core.
	CPU      float64  `json:"cpu"`
	Warnings []string `json:"warnings"`
}

// Times are quantities of a distribution of times, in seconds.
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

// Point of a cumulative distribution: a share of all requests, from 0 to 1, took at most the time.
type Point struct {
	Seconds float64 `json:"seconds"`
	Share   float64 `json:"share"`
}

// Server is a server that answered.
type Server struct {
	Name string `json:"server"`
	// Responses are all that named the server, Failed those that were not as expected.
	Responses uint64 `json:"responses"`
	Failed    uint64 `json:"failed"`
	Latency   *Times `json:"latency"`
}

// Interval is a part of the run: the requests that were due in it. The first one and the last one
// may be shorter than the others.
type Interval struct {
	From      float64 `json:"from"` // seconds since the beginning of the arrivals
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

// The generator was the bottleneck if it was later than this, and than this share of the latency.
const (
	mostLateness      = time.Millisecond
	mostLatenessShare = 0.1
	// mostCPU is the share of a core from which on the generator has no CPU time left.
	mostCPU = 0.9
)

// quantile returns a quantile in seconds, for q from 0 to 1.
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

// distribution returns the points of the cumulative distribution.
func (h histogram) distribution() []Point {
	points := []Point{}
	if h.TotalCount() == 0 {
		return points
	}
	for _, bracket := range h.CumulativeDistributionWithTicks(5) {
		points = append(points, Point{
			Seconds: time.Duration(bracket.ValueAt).Seconds(), Share: bracket.Quantile / 100,
		})
	}
	return points
}

// report summarises the results.
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
	report.Seconds = max(r.measured(g).Seconds(), 0)
	if report.Seconds > 0 {
		report.Rate = float64(report.Requests) / report.Seconds
	}
	for number := range r.intervals.open {
		r.intervals.summarise(number)
	}
	report.Intervals = r.intervals.between(g.Warmup, g.Warmup+r.measured(g))
	if g.started {
		r.addHealth(report)
	}
	if g.idle.failed > 0 {
		report.Warnings = append(report.Warnings, fmt.Sprintf("%s could not be opened: %v",
			wording.Count(g.idle.failed, "idle connection"), g.idle.err))
	}
	return report
}

// measured is the time in which the measured requests were due.
func (r *results) measured(g *generator) time.Duration {
	switch {
	case !g.started:
		return 0
	case r.interrupted && g.more:
		return g.now() - r.zero - g.Warmup
	case g.Duration > 0 && !g.over:
		return g.Duration - g.Warmup
	}
	return r.lastDue - r.zero - g.Warmup
}

// addHealth reports how well the generator did its work.
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
	if late := report.Lateness; late != nil && late.P99 > mostLateness.Seconds() &&
		(report.Latency == nil || late.P99 > mostLatenessShare*report.Latency.P99) {
		warn("the generator was late: 1%% of the requests were sent more than %.1f ms after "+
			"they were due, which is part of their latency", 1e3*late.P99)
	}
	if n := r.outcomes[Local]; n > 0 {
		warn("the generator was the bottleneck: this host could not make %s: %v",
			wording.Count(int(n), "connection"), r.errors[Local])
	}
}

// serverReports lists the servers by name.
func (r *results) serverReports() []Server {
	servers := []Server{}
	for name, s := range r.servers {
		servers = append(servers, Server{
			Name: name, Responses: s.responses, Failed: s.failed, Latency: s.latency.times(),
		})
	}
	slices.SortFunc(servers, func(a, b Server) int { return natural(a.Name, b.Name) })
	return servers
}

// natural compares names so that s2 comes before s10: shorter ones first.
func natural(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
}
