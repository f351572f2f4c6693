// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/procfs"
)

// samples are the servers' busy workers over time.
type samples struct {
	servers []string
	times   []float64  // emulated seconds
	busy    [][]uint32 // by time and server
	idle    float64    // share of the machine's CPU time that was left
}

// sampler reads the loads of all servers at an interval.
type sampler struct {
	cancel context.CancelFunc
	done   chan struct{}
	samples
	err error
}

// startSampler starts to read the loads of the servers of a run.
func (b *rig) startSampler(p planned) *sampler {
	ctx, cancel := context.WithCancel(context.Background())
	s := &sampler{cancel: cancel, done: make(chan struct{})}
	s.servers = p.serverNames()
	go func() {
		defer close(s.done)
		s.err = s.collect(ctx, b, p)
	}()
	return s
}

// stop ends the sampling, and returns the samples.
func (s *sampler) stop() (*samples, error) {
	s.cancel()
	<-s.done
	return &s.samples, s.err
}

// collect reads loads while requests arrive, as in the papers. It does not wait until the last
// requests end.
func (s *sampler) collect(ctx context.Context, b *rig, p planned) (err error) {
	before, err := readCPUTimes()
	if err != nil {
		return err
	}
	defer func() {
		after, reading := readCPUTimes()
		s.idle = after.idleSince(before)
		err = errors.Join(err, reading)
	}()
	return p.whileArriving(ctx, p.byTheClock(sampleInterval), func(since time.Duration) error {
		busy, err := b.busy()
		if err != nil {
			return err
		}
		s.times = append(s.times, since.Seconds()*p.Speed)
		s.samples.busy = append(s.samples.busy, busy)
		return nil
	})
}

// whileArriving calls f at an interval while requests arrive, with the time since their beginning.
// Both are by the clock.
func (p planned) whileArriving(
	ctx context.Context, interval time.Duration, f func(since time.Duration) error,
) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	began := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-ticker.C:
			since := now.Sub(began)
			if since > p.duration() {
				return nil
			}
			if err := f(since); err != nil {
				return err
			}
		}
	}
}

// busy returns the number of busy workers of each server. Several goroutines may call it.
func (b *rig) busy() ([]uint32, error) {
	b.reading.Lock()
	defer b.reading.Unlock()
	all := make([]uint32, len(b.sources))
	for i, source := range b.sources {
		l, err := source.Read()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", serverName(i+1), err)
		}
		all[i] = l.Busy
	}
	return all, nil
}

// patience is the longest time that servers may take to finish the requests of the last run.
const patience = 2 * time.Minute

// awaitIdle waits until no server has a busy worker. It is an error if that takes longer than
// patience.
func (b *rig) awaitIdle(ctx context.Context) error {
	deadline := time.Now().Add(patience)
	for {
		busy, err := b.busy()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(busy, func(n uint32) bool { return n > 0 })
		if i < 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s still has %d busy workers after %s",
				serverName(i+1), busy[i], patience)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// write writes the samples as CSV.
func (s *samples) write(path string) error {
	var out bytes.Buffer
	fmt.Fprintf(&out, "time,%s\n", strings.Join(s.servers, ","))
	for i, at := range s.times {
		fmt.Fprintf(&out, "%.3f", at)
		for _, n := range s.busy[i] {
			fmt.Fprintf(&out, ",%d", n)
		}
		out.WriteByte('\n')
	}
	return os.WriteFile(path, out.Bytes(), 0o644)
}

// addLoads adds the idle CPU time and the means of the samples to the run. A sample without a busy
// worker counts with the fairness 1. It does not count in Overprovision.
func (r *Run) addLoads(s *samples) {
	r.Machine.Idle = s.idle
	if len(s.times) == 0 {
		return
	}
	n, loaded := float64(len(s.times)), 0.0 // all samples, and those with a busy worker
	for _, busy := range s.busy {
		values := make([]float64, len(busy))
		for i, value := range busy {
			values[i] = float64(value)
			r.Shares[i].Busy += values[i] / n
			r.Busy += values[i] / float64(len(busy)) / n
		}
		r.Fairness += Fairness(values) / n
		if mean := sum(values) / float64(len(values)); mean > 0 {
			r.Overprovision += slices.Max(values) / mean
			loaded++
		}
	}
	r.Overprovision /= max(loaded, 1)
}

// Fairness returns Jain's index of n loads (6LB, section V-D). It is 1 if all are equal, and 1/n if
// only one is not 0. If all are 0, they are equal.
func Fairness(loads []float64) float64 {
	sum, squares := 0.0, 0.0
	for _, x := range loads {
		sum, squares = sum+x, squares+x*x
	}
	if squares == 0 {
		return 1
	}
	return sum * sum / (float64(len(loads)) * squares)
}

// cpuTimes are the times of all cores, in seconds.
type cpuTimes struct{ idle, all float64 }

// idleSince returns the idle share of the time from before to t.
func (t cpuTimes) idleSince(before cpuTimes) float64 {
	if all := t.all - before.all; all > 0 {
		return (t.idle - before.idle) / all
	}
	return 0
}

// readCPUTimes returns the times of all cores since the machine started. Waiting for IO counts as
// idle, and so do programs with a positive nice value, which give way to the lab.
func readCPUTimes() (t cpuTimes, err error) {
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return t, err
	}
	stat, err := proc.Stat()
	if err != nil {
		return t, err
	}
	c := stat.CPUTotal
	t.idle = c.Idle + c.Iowait + c.Nice
	t.all = t.idle + c.User + c.System + c.IRQ + c.SoftIRQ + c.Steal
	return t, nil
}
