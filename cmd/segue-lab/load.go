// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/wording"
	"github.com/segue-lb/segue/lab/httpload"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/scenario"
)

// defaultLoadDuration is how long requests arrive if no flag says when they end.
const defaultLoadDuration = 10 * time.Second

// loadFlags has the values of the flags of segue-lab load. Some flags write directly to config. The
// others need to be parsed.
type loadFlags struct {
	config                  httpload.Config
	rate, speed             float64
	arrivals, trace, format string
	curve, start            string
	dayLength               time.Duration
	demand, body            string
	sources                 []string
	record, log             string
	asJSON, asCSV, loud     bool
	given                   func(flag string) bool // tells whether a flag is on the command line
}

func newLoad() *cobra.Command {
	var f loadFlags
	cmd := &cobra.Command{
		Use:   "load URL...",
		Short: "Send HTTP requests in an open loop, and measure their latency",
		Long: `Load sends HTTP/1.1 requests at given times. It sends a request even if a slow server
has not answered the earlier ones. Each request has an intended send time. Its latency is
the time from then to the end of the response. docs/research/load.md explains the report,
and compares load with wrk.

Requests arrive at --rate per second by a Poisson process or, with --arrivals constant, at
equal intervals. --curve changes the rate over the day. --trace takes the times and
queries of requests from a file instead. They go to the hosts of the URLs.

Each request draws one of the URLs. A URL may contain {demand}, the work that --demand
draws for each request, as in /?work=190.125ms. It may also contain {demand-us}, the same
work in whole microseconds, and {n}, the number of the request. Two runs with the same
flags and the same --seed have the same arrivals and the same work.

Each request has its own connection, unless --keep-alive is given. --source spreads
the connections over several client addresses of this host. By default, an address has
28,232 ports for connections to one destination (sysctl net.ipv4.ip_local_port_range).

Ctrl-C ends the run early, with a report. The exit code is 0 if at least one request
succeeded, or if no request had an outcome.

--json prints an object. --csv prints one line, or with --every one per interval.
Times are in seconds.`,
		Example: "  segue-lab load --rate 500 --duration 30s http://203.0.113.2/\n" +
			"  segue-lab load --rate 220 --demand 'exponential: 190ms' " +
			"'http://[2001:db8:80::1]/?work={demand}'\n" +
			"  segue-lab load --trace day.gz --format wikibench --speed 2 --every 1m http://203.0.113.2",
		Args: cli.Arguments("URL..."),
		RunE: func(cmd *cobra.Command, urls []string) error {
			f.given = cmd.Flags().Changed
			return f.run(cmd, urls)
		},
	}
	f.addArrivals(cmd.Flags())
	f.addRequests(cmd.Flags())
	f.addReport(cmd.Flags())
	cmd.MarkFlagsMutuallyExclusive("json", "csv")
	return cmd
}

// addArrivals adds the flags about the times and the work of requests.
func (f *loadFlags) addArrivals(flags *pflag.FlagSet) {
	flags.Float64Var(&f.rate, "rate", 0, "`number` of requests per second")
	flags.StringVar(&f.arrivals, "arrivals", "poisson",
		"`process` of the arrivals: poisson or constant")
	flags.StringVar(&f.curve, "curve", "",
		"factor of the rate by time of day: sine:AMPLITUDE, or a `file` with lines such as 06:30 0.55")
	flags.DurationVar(&f.dayLength, "day", 24*time.Hour, "length of a day of the curve")
	flags.StringVar(&f.start, "start", "00:00", "`time` of day at which the curve starts")
	flags.StringVar(&f.trace, "trace", "", "`file` with the times and the queries of requests")
	flags.StringVar(&f.format, "format", "queries",
		"`format` of the trace: queries (time<TAB>query) or wikibench (counter time url ...)")
	flags.Float64Var(&f.speed, "speed", 1,
		"how many times faster than it was recorded the trace is played, a `number`")
	flags.DurationVar(&f.config.Duration, "duration", 0,
		"time in which requests arrive (default 10s, without --requests and --trace)")
	flags.Uint64Var(&f.config.Requests, "requests", 0,
		"largest `count` of requests; 0 means no limit")
	flags.DurationVar(&f.config.Warmup, "warmup", 0,
		"time at the beginning that does not count in the report")
	flags.StringVar(&f.demand, "demand", "",
		"`distribution` of the work that replaces {demand}, such as 'exponential: 190ms'")
	flags.Uint64Var(&f.config.Seed, "seed", 1, "`number` that seeds arrivals, URLs and work")
}

// addRequests adds the flags about connections, requests and expected responses.
func (f *loadFlags) addRequests(flags *pflag.FlagSet) {
	flags.StringSliceVar(&f.sources, "source", nil,
		"client `address`, or prefix of addresses of this host; may be given several times")
	flags.BoolVar(&f.config.KeepAlive, "keep-alive", false,
		"send further requests on open connections")
	flags.IntVar(&f.config.Connections, "connections", 0,
		"largest `count` of open connections; further requests wait for one; 0 means no limit")
	flags.IntVar(&f.config.Idle, "idle", 0,
		"`count` of further connections to hold open without requests")
	flags.DurationVar(&f.config.ConnectTimeout, "connect-timeout", 5*time.Second,
		"largest time of a handshake")
	flags.DurationVar(&f.config.Timeout, "timeout", 30*time.Second,
		"largest time from when a request is due to the end of the response")
	flags.StringArrayVarP(&f.config.Headers, "header", "H", nil,
		"`line` such as \"Host: example.com\" to send with each request; may be given several times")
	flags.IntSliceVar(&f.config.Expect.Status, "expect-status", nil,
		"expected `numbers` of the status (default: 200 to 399)")
	flags.StringVar(&f.body, "expect-body", "",
		"`regexp` that must match in the first mebibyte of each body")
	flags.StringVar(&f.config.ServerHeader, "server-header", "X-Segue-Server",
		"`name` of the response header that names the server")
}

// addReport adds the flags about the output.
func (f *loadFlags) addReport(flags *pflag.FlagSet) {
	flags.DurationVar(&f.config.Every, "every", 0, "also report each interval of this `duration`")
	flags.StringVar(&f.record, "record", "",
		"write the arrivals to this `file`, as a trace for segue-lab sim")
	flags.StringVar(&f.log, "log", "", "write a line of CSV for each request to this `file`")
	flags.BoolVar(&f.asJSON, "json", false, "print JSON")
	flags.BoolVar(&f.asCSV, "csv", false, "print CSV")
	flags.BoolVar(&f.loud, "progress", false, progressHelp)
}

// run checks the flags, generates the load, and prints the report with its warnings. It also prints
// the report if the run ends with an error, such as an error in the trace. It returns an error if
// requests have failed and none has succeeded.
func (f *loadFlags) run(cmd *cobra.Command, urls []string) error {
	for _, parse := range []func() error{
		f.checkCombinations, f.checkNumbers, f.parseArrivals, f.parseExpectation, f.parseDemand,
		f.parseSources,
	} {
		if err := parse(); err != nil {
			return err
		}
	}
	if err := f.parseTargets(cmd.Context(), urls); err != nil {
		return err
	}
	if err := f.config.Check(); err != nil {
		return err
	}
	closeFiles, err := f.openFiles()
	if err != nil {
		return err
	}
	f.config.Progress = loadProgress(cmd.ErrOrStderr(), f.loud)
	report, running := httpload.Run(cmd.Context(), f.config)
	err = errors.Join(running, closeFiles())
	if report == nil { // the run could not start
		return err
	}
	for _, warning := range report.Warnings {
		fmt.Fprintf(cmd.ErrOrStderr(), "warning: %s\n", warning)
	}
	return errors.Join(f.print(cmd.OutOrStdout(), report), noSuccess(report), err)
}

// noSuccess returns an error if at least one request has failed, and none has succeeded. Requests
// without an outcome do not matter.
func noSuccess(r *httpload.Report) error {
	if r.Failed > 0 && r.Succeeded == 0 {
		return errors.New("no request succeeded")
	}
	return nil
}

// checkCombinations returns an error if both --rate and --trace are missing, if a flag has no
// effect beside --trace, or if a flag has no effect without another one.
func (f *loadFlags) checkCombinations() error {
	if !f.given("rate") && !f.given("trace") {
		return errors.New("load: missing --rate or --trace")
	}
	for _, flag := range []string{"rate", "arrivals", "curve", "demand"} {
		if f.given("trace") && f.given(flag) {
			return fmt.Errorf("--%s: not allowed with --trace, which has times and queries", flag)
		}
	}
	for _, pair := range [][2]string{
		{"format", "trace"}, {"speed", "trace"}, {"day", "curve"}, {"start", "curve"},
	} {
		if flag, other := pair[0], pair[1]; f.given(flag) && !f.given(other) {
			return fmt.Errorf("--%s: needs --%s", flag, other)
		}
	}
	return nil
}

// checkNumbers returns an error if a number or a duration is out of range. It also sets the default
// of --duration.
func (f *loadFlags) checkNumbers() error {
	c := &f.config
	for name, duration := range map[string]time.Duration{
		"connect-timeout": c.ConnectTimeout, "timeout": c.Timeout, "day": f.dayLength,
	} {
		if duration <= 0 {
			return fmt.Errorf("--%s %v: must be more than 0", name, duration)
		}
	}
	for name, number := range map[string]int{"connections": c.Connections, "idle": c.Idle} {
		if number < 0 {
			return fmt.Errorf("--%s %d: must not be negative", name, number)
		}
	}
	switch {
	case f.given("duration") && c.Duration <= 0:
		return fmt.Errorf("--duration %v: must be more than 0", c.Duration)
	case c.Every != 0 && c.Every < time.Millisecond:
		return fmt.Errorf("--every %v: must be at least 1ms", c.Every)
	}
	if c.Duration == 0 && c.Requests == 0 && f.trace == "" {
		c.Duration = defaultLoadDuration
	}
	isAllWarmup := c.Duration > 0 && c.Warmup >= c.Duration
	if c.Warmup < 0 || isAllWarmup {
		return fmt.Errorf("--warmup %v: must be less than the duration of %v", c.Warmup, c.Duration)
	}
	return nil
}

// isPositive tells whether a number is finite and above 0.
func isPositive(x float64) bool { return x > 0 && !math.IsInf(x, 1) }

// parseArrivals stores the arrivals that the flags describe in the configuration.
func (f *loadFlags) parseArrivals() error {
	if f.trace != "" {
		return f.parseTrace()
	}
	if !isPositive(f.rate) {
		return fmt.Errorf("--rate %v: must be more than 0", f.rate)
	}
	curve, err := parseCurve(f.curve, f.start, f.dayLength)
	if err != nil {
		return err
	}
	switch {
	case f.arrivals == "poisson":
		f.config.Arrivals = sim.Poisson{Rate: f.rate, Curve: curve}
	case f.arrivals != "constant":
		return fmt.Errorf("--arrivals %q: must be poisson or constant", f.arrivals)
	case curve != nil:
		return errors.New("--curve: needs --arrivals poisson")
	default:
		f.config.Arrivals = httpload.Constant{Rate: f.rate}
	}
	return nil
}

// parseCurve returns the curve of the rate that the flags --curve, --start and --day describe. It
// returns nil if the rate is constant, because there is no --curve.
func parseCurve(curve, startTime string, length time.Duration) (sim.Curve, error) {
	if curve == "" {
		return nil, nil
	}
	start, err := httpload.ParseTimeOfDay(startTime)
	if err != nil {
		return nil, fmt.Errorf("--start: %w", err)
	}
	day := httpload.Day{Length: length, Start: start}
	if text, isSine := strings.CutPrefix(curve, "sine:"); isSine {
		amplitude, err := strconv.ParseFloat(text, 64)
		if err != nil || !(amplitude > 0 && amplitude <= 1) {
			return nil, fmt.Errorf("--curve %q: the amplitude must be a number above 0, and at most 1",
				curve)
		}
		day.Curve = httpload.Sine(amplitude)
		return day, nil
	}
	if day.Curve, err = httpload.ReadCurve(curve); err != nil {
		return nil, fmt.Errorf("--curve: %w", err)
	}
	return day, nil
}

// parseTrace stores the arrivals of --trace in the configuration. It reads the whole trace once, so
// that an error in it is found before the first request.
func (f *loadFlags) parseTrace() error {
	formats := map[string]sim.TraceFormat{"queries": sim.TimedQueries, "wikibench": sim.Wikibench}
	format, known := formats[f.format]
	if !known {
		return fmt.Errorf("--format %q: must be queries or wikibench", f.format)
	}
	if !isPositive(f.speed) {
		return fmt.Errorf("--speed %v: must be more than 0", f.speed)
	}
	trace := httpload.Trace(f.trace, format, f.speed)
	if _, err := trace.Extent(); err != nil {
		return fmt.Errorf("--trace: %w", err)
	}
	f.config.Arrivals = trace
	return nil
}

// parseExpectation checks --expect-status, and parses --expect-body.
func (f *loadFlags) parseExpectation() (err error) {
	for _, status := range f.config.Expect.Status {
		if status < 200 || status > 599 {
			return fmt.Errorf("--expect-status %d: must be from 200 to 599", status)
		}
	}
	if f.body != "" {
		f.config.Expect.Body, err = cli.ParseRegexp("--expect-body", f.body)
	}
	return err
}

// parseDemand parses --demand.
func (f *loadFlags) parseDemand() error {
	if f.demand == "" {
		return nil
	}
	demand, err := scenario.ParseDistribution(f.demand, ".")
	if err != nil {
		return fmt.Errorf("--demand %q: %w", f.demand, err)
	}
	f.config.Demand = &demand
	return nil
}

// parseSources parses --source.
func (f *loadFlags) parseSources() (err error) {
	if f.config.Clients, err = httpload.ParseClients(f.sources); err != nil {
		return fmt.Errorf("--source %w", err)
	}
	return nil
}

// parseTargets parses the URLs, and resolves their hosts.
func (f *loadFlags) parseTargets(ctx context.Context, urls []string) error {
	for _, text := range urls {
		target, err := httpload.ParseTarget(ctx, text)
		if err != nil {
			return err
		}
		f.config.Targets = append(f.config.Targets, target)
	}
	return nil
}

// openFiles creates the files of --record and --log, if these flags are given. It returns a
// function that closes the files.
func (f *loadFlags) openFiles() (closeFiles func() error, err error) {
	var files []*os.File
	closeFiles = func() error {
		var errs []error
		for _, file := range files {
			errs = append(errs, file.Close())
		}
		return errors.Join(errs...)
	}
	for _, one := range []struct {
		name   string
		writer *io.Writer
	}{{f.record, &f.config.Record}, {f.log, &f.config.Log}} {
		if one.name == "" {
			continue
		}
		file, err := os.Create(one.name)
		if err != nil {
			return nil, errors.Join(err, closeFiles())
		}
		files = append(files, file)
		*one.writer = file
	}
	return closeFiles, nil
}

// loadProgress returns a function that prints the state of a run. It returns nil if out is not a
// terminal, unless loud is true.
func loadProgress(out io.Writer, loud bool) func(httpload.Progress) {
	write := progressTo(out, loud)
	if write == nil {
		return nil
	}
	return func(p httpload.Progress) {
		if p.Elapsed < 0 {
			write(fmt.Sprintf("opening idle connections: %d", p.Open))
			return
		}
		text := fmt.Sprintf("%d requests, %.0f/s, %d failed, %s", p.Sent, p.Rate, p.Failed,
			wording.Count(p.Open, "connection"))
		if p.Waiting > 0 {
			text += fmt.Sprintf(", %d waiting", p.Waiting)
		}
		if !math.IsNaN(p.P50) {
			text += fmt.Sprintf(", p50 %s ms, p99 %s ms", inMilliseconds(p.P50), inMilliseconds(p.P99))
		}
		write(text)
	}
}
