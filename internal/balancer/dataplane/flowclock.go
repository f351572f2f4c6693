// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// leastTick is what a tick must be at least, so that the longest timeout, of four hours, ends before the
// clock wraps around.
const leastTick = 4 * time.Hour / maxFlowTicks

// FlowClock is the clock of the flow tables. It counts in ticks of 2^Shift jiffies. Only a BPF
// program can read the kernel's jiffies.
type FlowClock struct {
	Shift   uint32        // a tick is 2^Shift jiffies
	Tick    time.Duration // the length of a tick
	program *ebpf.Program // read_jiffies of bpf/balancer/balancer.bpf.c
}

// NewFlowClock returns a clock with the shortest ticks that the longest timeout allows on this
// machine. Now needs a program too, which Open adds.
func NewFlowClock() (*FlowClock, error) {
	var jiffy unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &jiffy); err != nil {
		return nil, fmt.Errorf("read the length of a jiffy: %w", err)
	}
	c := &FlowClock{Tick: time.Duration(jiffy.Nano())}
	for c.Tick < leastTick {
		c.Tick *= 2
		c.Shift++
	}
	return c, nil
}

// loadFlowClock makes a clock for those who do not load the data path.
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

// Now returns the time in ticks, modulo 4096, as the data path reads it.
func (c *FlowClock) Now() (uint16, error) {
	jiffies, err := c.jiffies()
	return uint16(jiffies>>c.Shift) & FlowTimeMask, err
}

// Ticks rounds a timeout up to ticks, at most to the longest that the clock can tell.
func (c *FlowClock) Ticks(d time.Duration) uint16 {
	return uint16(min((d+c.Tick-1)/c.Tick, maxFlowTicks))
}

func (c *FlowClock) close() error { return c.program.Close() }
