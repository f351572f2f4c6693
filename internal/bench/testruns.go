// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// manyFlows is a number of flows whose entries exceed the caches.
const manyFlows = desired.DefaultFlows

// testRuns measures the throughput of several cores by test runs alone. All use the tables of one
// balancer.
type testRuns struct {
	rig     *rig
	hosts   []*host // one for each core, as its variables change with every packet
	options *ThroughputOptions
}

// newTestRuns returns test runs on a filled flow table. If it fails, the caller must also close the
// returned value.
func newTestRuns(ctx context.Context, cores int, options *ThroughputOptions) (t *testRuns, err error) {
	t = &testRuns{options: options}
	for range cores {
		h, err := newHost()
		if err != nil {
			return t, err
		}
		t.hosts = append(t.hosts, h)
	}
	s := setup{kind: setupBalancer, family: ipv6, capacity: manyFlows, content: knownFlows}
	if t.rig, err = s.build(); err != nil {
		return t, err
	}
	return t, t.rig.fill(ctx, t.hosts[0], &s)
}

func (t *testRuns) close() (err error) {
	if t.rig != nil {
		err = t.rig.close()
	}
	for _, h := range t.hosts {
		err = errors.Join(err, h.close())
	}
	return err
}

// measure returns the total packets per second of the CPUs.
func (t *testRuns) measure(ctx context.Context, way Way, cpus []int) (float64, error) {
	if err := t.prepare(way, len(cpus)); err != nil {
		return 0, err
	}
	before, err := t.rig.count(reasonKnown)
	if err != nil {
		return 0, err
	}
	rate, packets, err := t.runAll(ctx, cpus)
	if err != nil {
		return 0, err
	}
	after, err := t.rig.count(reasonKnown)
	if known := after - before; err == nil && way != HostAlone && float64(known) < 0.96*float64(packets) {
		err = fmt.Errorf("of %d packets %d were of known flows", packets, known)
	}
	return rate, err
}

// prepare gives every core packets of the same flows, each in a different order.
func (t *testRuns) prepare(way Way, cores int) error {
	var program *ebpf.Program
	traffic := trafficTo(ipv6, vips[ipv6], desired.TCP, packet.ACK)
	switch way {
	case HostAlone:
		traffic.verdict = xdpAborted
	case HostBalanced:
		program, traffic.flows = t.rig.program, t.options.Flows
	case HostBalancedMany:
		program, traffic.flows = t.rig.program, manyFlows
	}
	for core, h := range t.hosts[:cores] {
		traffic.first = uint64(core)
		if err := h.prepare(program, &traffic); err != nil {
			return err
		}
	}
	return nil
}

// runAll runs the hosts at the same time, each on a CPU. It returns the sum of their rates and the
// number of all packets sent.
func (t *testRuns) runAll(ctx context.Context, cpus []int) (rate float64, packets uint64, err error) {
	if err := ctx.Err(); err != nil {
		return 0, 0, err
	}
	rates, sent := make([]float64, len(cpus)), make([]uint64, len(cpus))
	var group errgroup.Group
	for core, cpu := range cpus {
		group.Go(func() (err error) {
			rates[core], sent[core], err = t.hosts[core].runOn(cpu, t.options.Duration)
			return err
		})
	}
	err = group.Wait()
	for _, r := range rates {
		rate += r
	}
	return rate, sum(sent), err
}

// trialPackets is the number of packets of a trial. The trial determines how many packets take the
// time of a measurement.
const trialPackets = 200_000

// runOn sends packets on a CPU for about the given duration. It returns the rate per second of CPU
// time, and the number of packets.
func (h *host) runOn(cpu int, duration time.Duration) (rate float64, sent uint64, err error) {
	runtime.LockOSThread() // never unlocked: the thread ends with its goroutine
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return 0, 0, fmt.Errorf("move to CPU %d: %w", cpu, err)
	}
	trial, err := h.run(trialPackets)
	if err != nil {
		return 0, 0, err
	}
	packets := uint32(trialPackets * duration.Seconds() / trial.time.Seconds())
	cost, err := h.run(packets)
	return float64(packets) / cost.time.Seconds(), trialPackets + uint64(packets), err
}
