// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/lab/httpload"
	"github.com/segue-lb/segue/lab/wiki"
	"github.com/segue-lb/segue/research/sim"
)

// A server answers some 16 pages a second for each CPU that it may use. The first request to a
// server compiles MediaWiki, and the first one for a page takes longer than later ones. So before
// the first run, each server gets a request for each page. It gets warmUpRate requests per second
// for each CPU of the smallest server. If servers have no limit of CPUs, warmUpCPUs takes the place
// of the CPUs.
const (
	warmUpRate = 14
	warmUpCPUs = 0.25
)

// warmUpPace returns the rate of the warm-up's requests to each server, per second.
func (s settings) warmUpPace() float64 {
	least := s.capacityOf(serverName(1))
	for _, name := range s.serverNames() {
		least = min(least, s.capacityOf(name))
	}
	return warmUpRate * cmp.Or(least, warmUpCPUs)
}

func (s settings) warmUpTime() time.Duration {
	return time.Duration(float64(s.MediaWiki.Pages) / s.warmUpPace() * float64(time.Second))
}

// warmUp sends a request for each page to each server, directly. A request that fails is an error.
func (b *rig) warmUp(ctx context.Context, s settings) error {
	b.progress(fmt.Sprintf("Warming up the servers: %s.", s.warmUpTime().Round(time.Second)))
	folder := filepath.Join(b.directory, "warm-up")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	p := planned{settings: s, Case: Case{Direct: true}}
	err := writeTrace(filepath.Join(folder, arrivalsFile), func(out io.Writer) error {
		return s.topology(notBuilt, Case{}).Wiki().WritePages(out, s.warmUpPace())
	})
	if err != nil {
		return err
	}
	config, err := p.traffic(ctx, folder)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, target := range config.Targets {
		group.Go(func() error {
			own := config // sends each request to this target only
			own.Targets = []*httpload.Target{target}
			report, err := b.send(ctx, own)
			if err == nil && report.Failed > 0 {
				err = fmt.Errorf("%s: %d of %d requests failed: %v",
					target.URL, report.Failed, report.Requests, report.Errors)
			}
			return err
		})
	}
	return group.Wait()
}

func (p planned) writeDay(path string) error {
	return writeTrace(path, func(out io.Writer) error {
		return p.topology(notBuilt, p.Case).Wiki().WriteQueries(out, wiki.Queries{
			Arrivals: sim.Poisson{
				Rate:  p.perSecond,
				Curve: httpload.Day{Length: p.Day, Curve: httpload.Sine(p.Amplitude)},
			},
			Duration: p.Day, Seed: p.seed, Static: p.Static,
		})
	})
}

func writeTrace(path string, write func(io.Writer) error) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(write(file), file.Close())
}
