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

// FlowClock is the flow table's clock: the kernel's jiffies, in ticks of a power of two of them. Only a
// BPF program can read those.
type FlowClock struct {
	program *ebpf.Program // read_jiffies of bpf/balancer/balancer.bpf.c
	Shift   uint32
	Tick    time.Duration
}

// NewFlowClock says how long ticks are on this machine; its owner adds the program.
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

// Now is the time in ticks, as the data path reads it.
func (c *FlowClock) Now() (uint16, error) {
	jiffies, err := c.jiffies()
	return uint16(jiffies>>c.Shift) & FlowTimeMask, err
}

// Ticks rounds a timeout up to ticks.
func (c *FlowClock) Ticks(d time.Duration) uint16 {
	return uint16(min((d+c.Tick-1)/c.Tick, maxFlowTicks))
}

func (c *FlowClock) close() error { return c.program.Close() }
