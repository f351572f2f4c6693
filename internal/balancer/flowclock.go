// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// leastTick is what a tick must be at least, so that the longest timeout, of four hours, ends before the
// clock wraps around.
const leastTick = 4 * time.Hour / maxFlowTicks

// flowClock is the flow table's clock: the kernel's jiffies, in ticks of a power of two of them. Only a
// BPF program can read those.
type flowClock struct {
	program *ebpf.Program // read_jiffies of bpf/balancer/balancer.bpf.c
	shift   uint32
	tick    time.Duration
}

// newFlowClock says how long ticks are on this machine; its owner adds the program.
func newFlowClock() (*flowClock, error) {
	var jiffy unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &jiffy); err != nil {
		return nil, fmt.Errorf("read the length of a jiffy: %w", err)
	}
	c := &flowClock{tick: time.Duration(jiffy.Nano())}
	for c.tick < leastTick {
		c.tick *= 2
		c.shift++
	}
	return c, nil
}

// loadFlowClock makes a clock for those who do not load the data path.
func loadFlowClock(spec *ebpf.CollectionSpec) (*flowClock, error) {
	c, err := newFlowClock()
	if err != nil {
		return nil, err
	}
	if c.program, err = ebpf.NewProgram(spec.Programs[balancerProgReadJiffies]); err != nil {
		return nil, fmt.Errorf("load the flow table's clock: %w", err)
	}
	return c, nil
}

func (c *flowClock) jiffies() (jiffies uint64, err error) {
	if _, err := c.program.Run(&ebpf.RunOptions{Context: uint64(0), ContextOut: &jiffies}); err != nil {
		return 0, fmt.Errorf("read the flow table's clock: %w", err)
	}
	return jiffies, nil
}

// now is the time in ticks, as the data path reads it.
func (c *flowClock) now() (uint16, error) {
	jiffies, err := c.jiffies()
	return uint16(jiffies>>c.shift) & flowTimeMask, err
}

// ticks rounds a timeout up to ticks.
func (c *flowClock) ticks(d time.Duration) uint16 {
	return uint16(min((d+c.tick-1)/c.tick, maxFlowTicks))
}

func (c *flowClock) close() error { return c.program.Close() }
