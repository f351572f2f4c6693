// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/lab"
	"github.com/segue-lb/segue/research/sim"
)

// CPUPart is a part of the CPU time of a run.
type CPUPart struct {
	Name string // for readers
	of   func(*CPU) float64
}

// CPUParts are the parts that tables show.
var CPUParts = []CPUPart{
	{"balancers: processes", func(c *CPU) float64 { return c.Balancers }},
	{"balancers: BPF", func(c *CPU) float64 { return c.BalancerPrograms }},
	{"agents: processes", func(c *CPU) float64 { return c.Agents }},
	{"agents: BPF", func(c *CPU) float64 { return c.AgentPrograms }},
	{"whole lab", func(c *CPU) float64 { return c.All }},
}

// Estimate returns the part's CPU time of a request in microseconds, for a case at a point, over the
// seeds. Its value is NaN if the runs did not measure CPU times.
func (p CPUPart) Estimate(r *Results, name string, point float64) sim.Estimate {
	var all []float64
	for i := range r.Runs {
		run := &r.Runs[i]
		if run.Case == name && run.Point == point && run.CPU != nil {
			all = append(all, 1e6*p.of(run.CPU)/float64(run.Requests))
		}
	}
	return sim.EstimateOf(all)
}

// HasCPU tells whether runs have measured CPU times.
func (r *Results) HasCPU() bool {
	return slices.ContainsFunc(r.Runs, func(run Run) bool { return run.CPU != nil })
}

// meter measures the CPU time of a run, if the experiment wants it.
type meter struct {
	lab    *lab.Lab
	stats  io.Closer // while it is open, the kernel measures the times of BPF programs
	before lab.CPUTimes
}

// startMeter begins to measure. The caller must close the meter, which is nil without CPUTime.
func (b *rig) startMeter(p planned) (*meter, error) {
	if !p.CPUTime {
		return nil, nil
	}
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, fmt.Errorf("measure the times of BPF programs: %w", err)
	}
	m := &meter{lab: b.lab, stats: stats}
	if m.before, err = m.now(); err != nil {
		return nil, errors.Join(err, stats.Close())
	}
	return m, nil
}

// now returns the CPU times of the lab until now. All then includes this process, which is the load
// generator.
func (m *meter) now() (lab.CPUTimes, error) {
	times, err := m.lab.CPUTimes()
	if err != nil {
		return times, err
	}
	var own unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &own); err != nil {
		return times, fmt.Errorf("own CPU time: %w", err)
	}
	times.All += time.Duration(own.Nano())
	return times, nil
}

// read returns the CPU times since the start.
func (m *meter) read() (*CPU, error) {
	if m == nil {
		return nil, nil
	}
	now, err := m.now()
	if err != nil {
		return nil, err
	}
	return &CPU{
		Balancers:        (now.Balancers - m.before.Balancers).Seconds(),
		BalancerPrograms: (now.BalancerPrograms - m.before.BalancerPrograms).Seconds(),
		Agents:           (now.Agents - m.before.Agents).Seconds(),
		AgentPrograms:    (now.AgentPrograms - m.before.AgentPrograms).Seconds(),
		All:              (now.All - m.before.All).Seconds(),
	}, nil
}

// close ends the measurement.
func (m *meter) close() error {
	if m == nil {
		return nil
	}
	return m.stats.Close()
}
