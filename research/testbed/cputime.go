// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/lab"
	"github.com/segue-lb/segue/research/sim"
)

// Cost is a part of the CPU time of a request in microseconds, or a part of the balancers' memory in
// MiB.
type Cost struct {
	Name string // for readers
	of   func(*Run) float64
}

// Costs are the costs that tables show.
var Costs = []Cost{
	{"balancers: processes", microseconds(func(c *CPU) float64 { return c.Balancers })},
	{"balancers: BPF", microseconds(func(c *CPU) float64 { return c.BalancerPrograms })},
	{"agents: processes", microseconds(func(c *CPU) float64 { return c.Agents })},
	{"agents: BPF", microseconds(func(c *CPU) float64 { return c.AgentPrograms })},
	{"whole lab", microseconds(func(c *CPU) float64 { return c.All })},
	{"balancers: processes, MiB", memoryQuantity(func(m *Memory) uint64 { return m.Processes })},
	{"balancers: BPF, MiB", memoryQuantity(func(m *Memory) uint64 { return m.Kernel })},
}

// cpuQuantity returns a quantity that is a CPU time of a request. It is NaN if a run did not measure
// CPU times.
func cpuQuantity(of func(*CPU) float64) func(*Run) float64 {
	return func(r *Run) float64 {
		if r.CPU == nil {
			return math.NaN()
		}
		return of(r.CPU) / float64(r.Requests)
	}
}

func microseconds(of func(*CPU) float64) func(*Run) float64 {
	seconds := cpuQuantity(of)
	return func(r *Run) float64 { return 1e6 * seconds(r) }
}

// memoryQuantity returns a quantity that is a part of the balancers' memory in MiB. It is NaN if a
// run did not measure memory.
func memoryQuantity(of func(*Memory) uint64) func(*Run) float64 {
	return func(r *Run) float64 {
		if r.Memory == nil {
			return math.NaN()
		}
		return float64(of(r.Memory)) / (1 << 20)
	}
}

// Estimate returns the cost for a case at a point, over the seeds. Its value is NaN if a run did not
// measure it.
func (c Cost) Estimate(r *Results, name string, point float64) sim.Estimate {
	var all []float64
	for i := range r.Runs {
		if run := &r.Runs[i]; run.Case == name && run.Point == point {
			all = append(all, c.of(run))
		}
	}
	return sim.EstimateOf(all)
}

// HasCPU tells whether runs have measured CPU times.
func (r *Results) HasCPU() bool {
	return slices.ContainsFunc(r.Runs, func(run Run) bool { return run.CPU != nil })
}

// meter measures the CPU time of a run, and the balancers' memory, if the experiment wants it.
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

// read adds to the run the CPU times since the start, and the memory that the balancers have now.
func (m *meter) read(run *Run) error {
	if m == nil {
		return nil
	}
	now, err := m.now()
	if err != nil {
		return err
	}
	memory, err := m.lab.BalancerMemory()
	if err != nil {
		return err
	}
	run.Memory = &Memory{Processes: memory.Processes, Kernel: memory.Kernel}
	run.CPU = &CPU{
		Balancers:        (now.Balancers - m.before.Balancers).Seconds(),
		BalancerPrograms: (now.BalancerPrograms - m.before.BalancerPrograms).Seconds(),
		Agents:           (now.Agents - m.before.Agents).Seconds(),
		AgentPrograms:    (now.AgentPrograms - m.before.AgentPrograms).Seconds(),
		All:              (now.All - m.before.All).Seconds(),
	}
	return nil
}

// close ends the measurement.
func (m *meter) close() error {
	if m == nil {
		return nil
	}
	return m.stats.Close()
}
