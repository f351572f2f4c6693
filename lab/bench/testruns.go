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

// manyFlows is a number of flows whose entries need more memory than the caches have.
const manyFlows = desired.DefaultFlows

// mixServers is the number of servers on the ways HostHashMix and HostInferMix.
const mixServers = 1000

// testRuns measures the throughput of several cores by test runs. On each way, all cores use the
// tables of one balancer.
type testRuns struct {
	known   *rig    // for the ways with known flows; its flow table is full
	mixed   *rig    // for the ways with new flows; its service has mixServers servers
	hosts   []*host // one for each core, because a host changes its variables with each packet
	options *ThroughputOptions
}

// newTestRuns builds the hosts and both setups, and fills the flow table of t.known. Even if it
// fails, the caller must close the returned value.
func newTestRuns(
	ctx context.Context, cores int, options *ThroughputOptions,
) (t *testRuns, err error) {
	t = &testRuns{options: options}
	for range cores {
		h, err := newHost()
		if err != nil {
			return t, err
		}
		t.hosts = append(t.hosts, h)
	}
	s := setup{kind: setupBalancer, family: ipv6, capacity: manyFlows, content: knownFlows}
	if t.known, err = s.build(); err != nil {
		return t, err
	}
	if err := t.known.fill(ctx, t.hosts[0], &s); err != nil {
		return t, err
	}
	mixed := setup{kind: setupBalancer, family: ipv6, capacity: manyFlows, servers: mixServers}
	t.mixed, err = mixed.build()
	return t, err
}

func (t *testRuns) close() (err error) {
	for _, r := range []*rig{t.known, t.mixed} {
		if r != nil {
			err = errors.Join(err, r.close())
		}
	}
	for _, h := range t.hosts {
		err = errors.Join(err, h.close())
	}
	return err
}

// measure makes a measurement of a way with one core on each of the CPUs. It returns the sum of
// their packets per second. It returns an error unless enough packets were of known flows.
func (t *testRuns) measure(ctx context.Context, way Way, cpus []int) (float64, error) {
	source, err := t.sourceOf(way)
	if err != nil {
		return 0, err
	}
	if err := t.prepare(source, len(cpus)); err != nil {
		return 0, err
	}
	before, err := source.rig.count(reasonKnown)
	if err != nil {
		return 0, err
	}
	rate, packets, err := t.runAll(ctx, cpus)
	if err != nil {
		return 0, err
	}
	source.rig.next += packets / source.traffic.order.packetsPerFlow()
	after, err := source.rig.count(reasonKnown)
	if known := after - before; err == nil && float64(known) < source.leastKnown*float64(packets) {
		err = fmt.Errorf("of %d packets %d were of known flows", packets, known)
	}
	return rate, err
}

// source describes the packets of a way, and the program that processes them.
type source struct {
	rig        *rig
	program    *ebpf.Program // nil: the host program alone
	traffic    traffic       // of the first core
	leastKnown float64       // the least share of packets that must be of known flows
	// distance is from the number of a core's first flow to that of the next core. In random order,
	// it only gives each core another start of its random numbers.
	distance uint64
}

// sourceOf returns the source of a way. For the ways with new flows, it also changes the balancer's
// service.
func (t *testRuns) sourceOf(way Way) (*source, error) {
	s := &source{
		rig: t.known, program: t.known.program, leastKnown: 0.96, distance: 1,
		traffic: trafficTo(ipv6, vips[ipv6], desired.TCP, packet.ACK),
	}
	switch way {
	case HostAlone:
		s.program, s.traffic.verdict, s.leastKnown = nil, xdpAborted, 0
	case HostBalanced:
		s.traffic.flows = t.options.Flows
	case HostBalancedMany:
		s.traffic.flows = manyFlows
	case HostHashMix:
		return t.mix(s, desired.PlacementHash)
	case HostInferMix:
		return t.mix(s, desired.PlacementInfer)
	}
	return s, nil
}

// mix changes a source to packets of new connections, and its program to that of a balancer with
// this placement. Of the three packets of a connection, the last two are of a known flow.
func (t *testRuns) mix(s *source, placement desired.Placement) (*source, error) {
	svc := usual(ipv6, desired.TCP)
	svc.placement, svc.servers = placement, mixServers
	if err := t.mixed.serve(t.hosts[0], svc); err != nil {
		return nil, err
	}
	// Remove the flows of earlier measurements: without agents, they stay in the table for long.
	t.mixed.balancer.ForgetFlows()
	s.rig, s.program, s.leastKnown = t.mixed, t.mixed.program, 0.6
	s.distance = 1 << 31 // so that no core reaches the flows of the next one
	s.traffic.order, s.traffic.first = connections, t.mixed.next
	return s, nil
}

// prepare gives each core its packets. If the order of flows is random, all cores have the same
// flows, each core in an order of its own.
func (t *testRuns) prepare(s *source, cores int) error {
	for core, h := range t.hosts[:cores] {
		own := s.traffic
		own.first += uint64(core) * s.distance
		if err := h.prepare(s.program, &own); err != nil {
			return err
		}
	}
	return nil
}

// runAll runs a host on each of the CPUs at the same time. It returns the sum of their rates, and
// the number of all packets.
func (t *testRuns) runAll(
	ctx context.Context, cpus []int,
) (rate float64, packets uint64, err error) {
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

// trialPackets is the number of packets in a trial, which shows how many packets a measurement
// needs.
const trialPackets = 200_000

// runOn runs the prepared program on a CPU for about the given duration. A short trial first shows
// how many packets that takes. runOn returns the packets per second of CPU time, without the trial,
// and the number of packets, including those of the trial.
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
