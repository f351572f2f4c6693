// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/segue-lb/segue/lab"
	"github.com/segue-lb/segue/lab/httpload"
	"github.com/segue-lb/segue/research/sim"
)

const (
	// clientAddresses is the number of addresses of the load generator. With fewer, the kernel
	// would soon use a port again, while a flow table still has the earlier connection of that
	// port.
	clientAddresses = 254
	// timeout is the time for which the generator waits for a response, by the clock. No request
	// waits that long in a queue. So each failure is a failure of a server.
	timeout        = 2 * time.Minute
	connectTimeout = 30 * time.Second
	// leastIdle is the share of the cores' time that a run must leave idle, so that neither the lab
	// nor the generator is the bottleneck.
	leastIdle = 0.1
	// serverHeader names the server in responses of emulated servers.
	serverHeader = "X-Segue-Server"
)

// run sends the requests of a run, and returns what it has measured. The run's folder gets the
// requests and the samples of the loads. For KindLoad, run also adds the results of the simulator
// and of the model.
func (b *rig) run(ctx context.Context, p planned, st *store) (run *Run, err error) {
	folder := filepath.Join(st.directory, p.folder())
	if err := errors.Join(os.RemoveAll(folder), os.MkdirAll(folder, 0o755)); err != nil {
		return nil, err
	}
	if err := b.awaitIdle(ctx); err != nil {
		return nil, err
	}
	if err := b.resetThresholds(ctx, p); err != nil {
		return nil, err
	}
	reset, err := b.setWeights(ctx, p)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, reset()) }()
	before, err := b.count(p)
	if err != nil {
		return nil, err
	}
	meter, err := b.startMeter(p)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, meter.close()) }()
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	observer, err := b.startObserver(p)
	if err != nil {
		return nil, err
	}
	sampler, feedback := b.startSampler(p), b.startFeedback(ctx, end, p)
	report, err := b.generate(ctx, p, folder)
	samples, sampling := sampler.stop()
	observed, observing := observer.stop()
	if err = errors.Join(err, sampling, observing, feedback.stop()); err != nil {
		return nil, err
	}
	if report.Interrupted { // by the user, or because the feedback failed
		return nil, context.Cause(ctx)
	}
	run = p.newRun(report)
	run.Observations = observed
	if err := meter.read(run); err != nil {
		return nil, err
	}
	after, err := b.count(p)
	if err != nil {
		return nil, err
	}
	large := p.newTally()
	if err := large.read(filepath.Join(folder, requestsFile)); err != nil {
		return nil, err
	}
	large.setLarge(&run.Measured)
	if p.Static > 0 {
		if run.Types, err = readTypes(filepath.Join(folder, requestsFile)); err != nil {
			return nil, err
		}
	}
	run.addLoads(samples)
	run.addCounts(before, after)
	run.Warnings = append(run.Warnings, feedback.warnings()...)
	if err := samples.write(filepath.Join(folder, "loads.csv")); err != nil {
		return nil, err
	}
	run.warn()
	if p.Kind == KindDay { // the work of a page is not known, so nothing can be simulated
		return run, nil
	}
	return run, p.compare(ctx, run, filepath.Join(folder, arrivalsFile))
}

// compare adds to a run the response times of the simulator, for the same arrivals, and of the
// model.
func (p planned) compare(ctx context.Context, run *Run, arrivals string) (err error) {
	if run.Simulated, err = p.simulate(ctx, arrivals); err != nil {
		return fmt.Errorf("simulate: %w", err)
	}
	if run.Bound, err = p.bound(ctx, arrivals); err != nil {
		return fmt.Errorf("simulate an omniscient balancer: %w", err)
	}
	run.Model, err = p.model()
	return err
}

// generate sends the requests of a run. The folder gets two files, with the arrivals and with the
// requests, both in emulated time.
func (b *rig) generate(ctx context.Context, p planned, folder string) (*httpload.Report, error) {
	arrivals := filepath.Join(folder, arrivalsFile)
	var err error
	switch {
	case p.Kind == KindDay:
		err = p.writeDay(arrivals)
	case p.Replay != nil:
		err = p.writeReplay(arrivals)
	}
	if err != nil {
		return nil, err
	}
	config, err := p.traffic(ctx, folder)
	if err != nil {
		return nil, err
	}
	files, err := createFiles(folder, !p.playsTrace())
	if err != nil {
		return nil, err
	}
	config.Record, config.Log, config.Scale = files.arrivals, files.requests, p.Speed
	report, err := b.sendWithColocated(ctx, config, p.settings)
	return report, errors.Join(err, files.close())
}

func (b *rig) send(ctx context.Context, config httpload.Config) (report *httpload.Report, err error) {
	err = b.lab.Node("client").Do(func() (err error) {
		report, err = httpload.Run(ctx, config)
		return err
	})
	return report, err
}

// playsTrace tells whether the testbed writes the arrivals to a file before the run. Otherwise the
// generator draws them and records them.
func (s settings) playsTrace() bool { return s.Kind == KindDay || s.Replay != nil }

// traffic returns the configuration of the load generator, with times by the clock. The folder has
// the arrivals if the run plays a trace.
func (p planned) traffic(ctx context.Context, folder string) (httpload.Config, error) {
	config := httpload.Config{
		Seed: p.seed, ConnectTimeout: connectTimeout, Timeout: timeout, ServerHeader: serverHeader,
		RoundTrip: p.roundTrip(),
	}
	if p.playsTrace() {
		config.Arrivals = httpload.Trace(filepath.Join(folder, arrivalsFile), sim.TimedQueries, p.Speed)
	} else {
		config.Arrivals = sim.Poisson{Rate: p.rate() * p.Speed}
		config.Requests, config.Demand = uint64(p.Connections), p.work()
	}
	var address netip.Addr // of a target; it determines the IP version of the clients
	for _, url := range p.urls(p.Case) {
		target, err := httpload.ParseTarget(ctx, url)
		if err != nil {
			return config, err
		}
		config.Targets = append(config.Targets, target)
		address = target.Address.Addr()
	}
	config.Clients = lab.ClientAddresses(address, clientAddresses)
	return config, nil
}

// newRun returns a run with what the generator has measured, in emulated time. Only the handshake
// and the lateness are by the clock.
func (p planned) newRun(report *httpload.Report) *Run {
	run := &Run{
		Case: p.Case.Name, Point: p.point, Seed: p.seed, Folder: p.folder(),
		Servers: p.present, Balancers: p.Balancers,
		Seconds: report.Seconds * p.Speed, Requests: report.Requests, Failed: report.Failed,
		Failures: report.Failures, Counters: map[string]uint64{},
		Machine: Machine{Generator: report.CPU},
	}
	if p.Kind == KindLoad {
		run.Load = p.actualLoad()
	}
	run.Measured = response(report.Latency, p.Speed)
	run.Measured.Distribution = distribution(report.Distribution, p.Speed)
	if report.Connect != nil {
		handshake := response(report.Connect, 1)
		handshake.Distribution = distribution(report.ConnectDistribution, 1)
		run.Handshake = &handshake
	}
	if report.Lateness != nil {
		run.Machine.LateP99 = report.Lateness.P99
	}
	for i := 1; i <= p.present; i++ {
		share := Share{Server: serverName(i)}
		share.Capacity = p.capacityOf(share.Server)
		for _, s := range report.Servers {
			if s.Name == share.Server {
				share.Responses = s.Responses
				if s.Latency != nil {
					share.Mean = s.Latency.Mean * p.Speed
				}
			}
		}
		run.Shares = append(run.Shares, share)
	}
	run.Warnings = report.Warnings
	return run
}

// response returns the times of a report, multiplied by the speed. If there are none, all are 0.
func response(t *httpload.Times, speed float64) Response {
	if t == nil {
		return Response{}
	}
	return Response{Mean: t.Mean * speed, P50: t.P50 * speed, P90: t.P90 * speed, P99: t.P99 * speed}
}

// distribution returns the points of a distribution, with their times multiplied by the speed.
func distribution(points []httpload.Point, speed float64) (all []DistributionPoint) {
	for _, p := range points {
		all = append(all, DistributionPoint{p.Seconds * speed, p.Share})
	}
	return all
}

// warn adds a warning if the machine had too little CPU time left.
func (r *Run) warn() {
	if r.Machine.Idle < leastIdle {
		r.Warnings = append(r.Warnings, fmt.Sprintf("only %.0f%% of the machine's CPU time was left: "+
			"the machine may have been the bottleneck; a lower --speed leaves more", 100*r.Machine.Idle))
	}
}
