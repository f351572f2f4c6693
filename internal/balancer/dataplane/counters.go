// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/health/probe"
)

// FirstForward is the first reason that is counted by server: FIRST_FORWARD in
// bpf/balancer/stats.h.
const FirstForward = uint32(ForwardKnown)

// readServerCounter returns the counters of packets to a server, summed over all CPUs.
func readServerCounter(counters *ebpf.Map, slot uint32) (sum ServerCounter, err error) {
	var cpus []ServerCounter
	if err := counters.Lookup(slot, &cpus); err != nil {
		return sum, fmt.Errorf("read the counters of slot %d: %w", slot, err)
	}
	for _, cpu := range cpus {
		for i, forwarded := range cpu.Forwarded {
			sum.Forwarded[i].add(forwarded.Packets, forwarded.Bytes)
		}
	}
	return sum, nil
}

func (c *Counter) add(packets, bytes uint64) {
	c.Packets += packets
	c.Bytes += bytes
}

// Total sums the packets to the server over all reasons.
func (c *ServerCounter) Total() (sum Counter) {
	for _, forwarded := range c.Forwarded {
		sum.add(forwarded.Packets, forwarded.Bytes)
	}
	return sum
}

// Packets returns how many packets were sent to the server for a reason. The reason must be at
// least FirstForward.
func (c *ServerCounter) Packets(reason Reason) uint64 {
	return c.Forwarded[uint32(reason)-FirstForward].Packets
}

// Placed returns how many new flows were placed on the server.
func (c *ServerCounter) Placed() uint64 { return c.Packets(ForwardNew) }

// readServerSignals returns the counters of signals from a server, summed over all CPUs.
func readServerSignals(signals *ebpf.Map, slot uint32) (sum SignalCounter, err error) {
	var cpus []SignalCounter
	if err := signals.Lookup(slot, &cpus); err != nil {
		return sum, fmt.Errorf("read the signals of slot %d: %w", slot, err)
	}
	for _, cpu := range cpus {
		sum.Created += cpu.Created
		sum.Removed += cpu.Removed
	}
	return sum, nil
}

// RetireCounters adds the counters of a slot to the sums by reason, and clears them. If the process
// is killed in between, the sums are too high afterwards, but never too low. RetireCounters also
// clears the last load report, and the number of flows, which is then unknown until the next sweep.
// RetireCounters returns an error if a counter cannot be read or written.
func (p *Plane) RetireCounters(slot uint32) error {
	counter, err := readServerCounter(p.Objects.ServerCounters, slot)
	if err != nil {
		return err
	}
	for i, forwarded := range counter.Forwarded {
		if err := p.addReason(FirstForward+uint32(i), forwarded); err != nil {
			return err
		}
	}
	zero := make([]ServerCounter, ebpf.MustPossibleCPU())
	if err := p.Objects.ServerCounters.Put(slot, zero); err != nil {
		return fmt.Errorf("clear the counters of slot %d: %w", slot, err)
	}
	if err := p.Objects.ServerSignals.Put(slot, make([]SignalCounter, ebpf.MustPossibleCPU())); err != nil {
		return fmt.Errorf("clear the signals of slot %d: %w", slot, err)
	}
	if err := p.Objects.AnsweredOffers.Put(slot, make([]uint64, ebpf.MustPossibleCPU())); err != nil {
		return fmt.Errorf("clear the answered offers of slot %d: %w", slot, err)
	}
	p.FlowCounts.put(slot, balancerFlowCount{})
	return p.clearReports(slot)
}

// Offers returns the number of connections that were offered to the slot's server first, the number
// of these that any server answered, and the number of connections that the server accepted. The
// last number includes connections that were offered to another server first. Offers returns an
// error if a counter cannot be read.
func (p *Plane) Offers(slot uint32) (probe.Offers, error) {
	counter, err := readServerCounter(p.Objects.ServerCounters, slot)
	if err != nil {
		return probe.Offers{}, err
	}
	signals, err := readServerSignals(p.Objects.ServerSignals, slot)
	if err != nil {
		return probe.Offers{}, err
	}
	offers := probe.Offers{
		Offered: counter.Packets(ForwardHunt), Taken: signals.Created,
	}
	var cpus []uint64
	if err := p.Objects.AnsweredOffers.Lookup(slot, &cpus); err != nil {
		return probe.Offers{}, fmt.Errorf("read the answered offers of slot %d: %w", slot, err)
	}
	for _, cpu := range cpus {
		offers.Answered += cpu
	}
	return offers, nil
}

// addReason adds to the counters of a reason that the programs count by server only.
func (p *Plane) addReason(reason uint32, more Counter) error {
	var cpus []Counter
	if err := p.Objects.Reasons.Lookup(reason, &cpus); err != nil {
		return fmt.Errorf("read the counters of reason %d: %w", reason, err)
	}
	cpus[0].add(more.Packets, more.Bytes)
	if err := p.Objects.Reasons.Put(reason, cpus); err != nil {
		return fmt.Errorf("write the counters of reason %d: %w", reason, err)
	}
	return nil
}

// CountReasons returns the packets and bytes by reason. For a forwarding reason, it sums the
// counters of all servers, and those of servers that were removed. CountReasons returns an error if
// a counter cannot be read.
func (r *Reader) CountReasons() ([]datapath.ReasonCount, error) {
	r.counting.Lock()
	defer r.counting.Unlock()
	counts, err := datapath.CountReasons(r.maps.Reasons, r.Reasons)
	if err != nil {
		return nil, fmt.Errorf("instance %s: %w", r.Instance, err)
	}
	labels, err := r.ServerNames()
	if err != nil {
		return nil, fmt.Errorf("instance %s: %w", r.Instance, err)
	}
	for slot := range labels {
		counter, err := readServerCounter(r.maps.ServerCounters, slot)
		if err != nil {
			return nil, fmt.Errorf("instance %s: %w", r.Instance, err)
		}
		for i, forwarded := range counter.Forwarded {
			count := &counts[FirstForward+uint32(i)-1] // without LB_NONE, which is 0
			count.Packets += forwarded.Packets
			count.Bytes += forwarded.Bytes
		}
	}
	return counts, nil
}
