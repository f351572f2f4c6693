// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/segue-lb/segue/internal/sim"
	"github.com/segue-lb/segue/internal/traffic"
	"github.com/segue-lb/segue/internal/wiki"
)

// The first request to a server compiles MediaWiki, which takes long. So all servers get requests
// before the first run.
const (
	warmUpRate = 3 // per second
	warmUpTime = 30 * time.Second
)

// warmUp sends requests to all servers directly.
func (b *rig) warmUp(ctx context.Context, s settings) error {
	b.progress("Warming up the servers.")
	folder := filepath.Join(b.directory, "warm-up")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	p := planned{settings: s, Case: Case{Direct: true}}
	path := filepath.Join(folder, arrivalsFile)
	if err := p.writeDay(path, sim.Poisson{Rate: warmUpRate}, warmUpTime); err != nil {
		return err
	}
	config, err := p.traffic(ctx, folder)
	if err != nil {
		return err
	}
	report, err := b.send(ctx, config)
	if err == nil && report.Failed > 0 {
		err = fmt.Errorf("%d of %d requests failed: %v", report.Failed, report.Requests, report.Errors)
	}
	return err
}

// writeDay writes requests for pages.
func (p planned) writeDay(path string, arrivals sim.Arrivals, duration time.Duration) (err error) {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	out := bufio.NewWriter(file)
	err = p.topology("x").Wiki().WriteQueries(out, wiki.Queries{
		Arrivals: arrivals, Duration: duration, Seed: p.seed,
	})
	return errors.Join(err, out.Flush())
}

// dayArrivals are the arrivals of the run's day.
func (p planned) dayArrivals() sim.Arrivals {
	return sim.Poisson{
		Rate:  p.perSecond,
		Curve: traffic.Day{Length: p.Day, Curve: traffic.Sine(p.Amplitude)},
	}
}
