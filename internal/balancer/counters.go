// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/probe"
)

// firstForward is FIRST_FORWARD in bpf/balancer/stats.h: the first of the reasons that are counted by server.
const firstForward = uint32(balancerLbReasonLB_FORWARD_KNOWN)

// readServerCounter returns what went to a server, all CPUs together.
func readServerCounter(counters *ebpf.Map, slot uint32) (sum balancerServerCounter, err error) {
	var cpus []balancerServerCounter
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

func (c *balancerCounter) add(packets, bytes uint64) {
	c.Packets += packets
	c.Bytes += bytes
}

// total is what went to the server for any reason.
func (c *balancerServerCounter) total() (sum balancerCounter) {
	for _, forwarded := range c.Forwarded {
		sum.add(forwarded.Packets, forwarded.Bytes)
	}
	return sum
}

// packets is how many packets went to the server for a reason.
func (c *balancerServerCounter) packets(reason balancerLbReason) uint64 {
	return c.Forwarded[uint32(reason)-firstForward].Packets
}

// placed is how many flows were placed on the server.
func (c *balancerServerCounter) placed() uint64 { return c.packets(balancerLbReasonLB_FORWARD_NEW) }

// readServerSignals returns what a server said of flows, all CPUs together.
func readServerSignals(signals *ebpf.Map, slot uint32) (sum balancerSignalCounter, err error) {
	var cpus []balancerSignalCounter
	if err := signals.Lookup(slot, &cpus); err != nil {
		return sum, fmt.Errorf("read the signals of slot %d: %w", slot, err)
	}
	for _, cpu := range cpus {
		sum.Created += cpu.Created
		sum.Removed += cpu.Removed
	}
	return sum, nil
}

// retireCounter adds what went to the server of a slot to the sums that stay, and clears its counters. Who is
// interrupted in between leaves the sums too high, but never lower than they were.
func (k *kernel) retireCounter(slot uint32) error {
	counter, err := readServerCounter(k.objects.ServerCounters, slot)
	if err != nil {
		return err
	}
	for i, forwarded := range counter.Forwarded {
		if err := k.addReason(firstForward+uint32(i), forwarded); err != nil {
			return err
		}
	}
	zero := make([]balancerServerCounter, ebpf.MustPossibleCPU())
	if err := k.objects.ServerCounters.Put(slot, zero); err != nil {
		return fmt.Errorf("clear the counters of slot %d: %w", slot, err)
	}
	if err := k.objects.ServerSignals.Put(slot, make([]balancerSignalCounter, ebpf.MustPossibleCPU())); err != nil {
		return fmt.Errorf("clear the signals of slot %d: %w", slot, err)
	}
	if err := k.objects.AnsweredOffers.Put(slot, make([]uint64, ebpf.MustPossibleCPU())); err != nil {
		return fmt.Errorf("clear the answered offers of slot %d: %w", slot, err)
	}
	return nil
}

// offers are what a server had to do with new connections of a service that hunts.
func (k *kernel) offers(slot uint32) (probe.Offers, error) {
	counter, err := readServerCounter(k.objects.ServerCounters, slot)
	if err != nil {
		return probe.Offers{}, err
	}
	signals, err := readServerSignals(k.objects.ServerSignals, slot)
	if err != nil {
		return probe.Offers{}, err
	}
	offers := probe.Offers{
		Offered: counter.packets(balancerLbReasonLB_FORWARD_HUNT), Taken: signals.Created,
	}
	var cpus []uint64
	if err := k.objects.AnsweredOffers.Lookup(slot, &cpus); err != nil {
		return probe.Offers{}, fmt.Errorf("read the answered offers of slot %d: %w", slot, err)
	}
	for _, cpu := range cpus {
		offers.Answered += cpu
	}
	return offers, nil
}

// addReason adds to the counters of a reason that no program counts under.
func (k *kernel) addReason(reason uint32, more balancerCounter) error {
	var cpus []balancerCounter
	if err := k.objects.Reasons.Lookup(reason, &cpus); err != nil {
		return fmt.Errorf("read the counters of reason %d: %w", reason, err)
	}
	cpus[0].add(more.Packets, more.Bytes)
	if err := k.objects.Reasons.Put(reason, cpus); err != nil {
		return fmt.Errorf("write the counters of reason %d: %w", reason, err)
	}
	return nil
}

// countReasons counts the packets by what became of them. Those that went to servers are the sums of the
// servers' counters, and of those of servers that are no more.
func (r *reader) countReasons() ([]datapath.ReasonCount, error) {
	r.counting.Lock()
	defer r.counting.Unlock()
	counts, err := datapath.CountReasons(r.maps.Reasons, r.reasons)
	if err != nil {
		return nil, fmt.Errorf("instance %s: %w", r.instance, err)
	}
	labels, err := r.serverNames()
	if err != nil {
		return nil, fmt.Errorf("instance %s: %w", r.instance, err)
	}
	for slot := range labels {
		counter, err := readServerCounter(r.maps.ServerCounters, slot)
		if err != nil {
			return nil, fmt.Errorf("instance %s: %w", r.instance, err)
		}
		for i, forwarded := range counter.Forwarded {
			count := &counts[firstForward+uint32(i)-1] // none is not among them
			count.Packets += forwarded.Packets
			count.Bytes += forwarded.Bytes
		}
	}
	return counts, nil
}
