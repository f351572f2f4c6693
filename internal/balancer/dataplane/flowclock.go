// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// leastTick is the shortest tick that the clock may have. With shorter ticks, the longest timeout,
// which is four hours, would not end before the clock wraps around.
const leastTick = 4 * time.Hour / maxFlowTicks

// FlowClock is the clock of the flow tables. It counts ticks of 2^Shift jiffies. Only a BPF program
// can read the kernel's jiffies.
type FlowClock struct {
	Shift   uint32        // a tick is 2^Shift jiffies
	Tick    time.Duration // the length of a tick
	Jiffy   time.Duration // the length of a jiffy
	program *ebpf.Program // read_jiffies of bpf/balancer/balancer.bpf.c
}

// NewFlowClock returns a clock with the shortest tick that is at least leastTick. It returns an
// error if the length of a jiffy cannot be read. The method Now works only after Open has added a
// program.
func NewFlowClock() (*FlowClock, error) {
	var jiffy unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &jiffy); err != nil {
		return nil, fmt.Errorf("read the length of a jiffy: %w", err)
	}
	c := &FlowClock{Tick: time.Duration(jiffy.Nano()), Jiffy: time.Duration(jiffy.Nano())}
	for c.Tick < leastTick {
		c.Tick *= 2
		c.Shift++
	}
	return c, nil
}

// loadFlowClock returns a clock with a program of its own, for callers that do not load the data
// path.
func loadFlowClock(spec *ebpf.CollectionSpec) (*FlowClock, error) {
	c, err := NewFlowClock()
	if err != nil {
		return nil, err
	}
	if c.program, err = ebpf.NewProgram(spec.Programs[balancerProgReadJiffies]); err != nil {
		return nil, fmt.Errorf("load the flow table's clock: %w", err)
	}
	return c, nil
}

func (c *FlowClock) jiffies() (jiffies uint64, err error) {
	if _, err := c.program.Run(&ebpf.RunOptions{Context: uint64(0), ContextOut: &jiffies}); err != nil {
		return 0, fmt.Errorf("read the flow table's clock: %w", err)
	}
	return jiffies, nil
}

// Now returns the time in ticks, modulo 4096, as the data path reads it. It returns an error if the
// program cannot be run.
func (c *FlowClock) Now() (uint16, error) {
	jiffies, err := c.jiffies()
	return uint16(jiffies>>c.Shift) & FlowTimeMask, err
}

// Ticks converts a timeout to ticks and rounds it up. The result is at most maxFlowTicks.
func (c *FlowClock) Ticks(d time.Duration) uint16 {
	return uint16(min((d+c.Tick-1)/c.Tick, maxFlowTicks))
}

// EndedTicks converts the timeout of flows that have ended, as Ticks does. The result is at most
// maxEndedTicks, two hours or more.
func (c *FlowClock) EndedTicks(d time.Duration) uint16 { return min(c.Ticks(d), maxEndedTicks) }

func (c *FlowClock) close() error { return c.program.Close() }
