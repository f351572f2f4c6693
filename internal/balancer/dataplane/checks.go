// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
)

// These are CHECK_MARK and CALL_MARK in bpf/balancer/signal/check.h. They differ in the lowest bit.
const (
	checkMark = 0x5e6c
	callMark  = 0x5e6d
)

// The marks of packets of health checks and calls: all of them have CheckMark in the bits of
// CheckMarkMask.
const (
	CheckMark     uint32 = checkMark << 16
	CheckMarkMask uint32 = 0xfffe << 16
)

// MarkOf returns the mark of packets that check the server of a slot.
func MarkOf(slot uint32) uint32 { return CheckMark | slot }

// CallMarkOf returns the mark of packets that call the server of a slot.
func CallMarkOf(slot uint32) uint32 { return callMark<<16 | slot }

// Check says how the data path encapsulates the packets that check or call a server.
type Check struct {
	VIP           netip.Addr
	Encapsulation desired.Encapsulation
}

// CheckTable says which servers are checked or called on the path of clients' packets, and how: the
// map of bpf/balancer/signal/check.h. One goroutine owns it, except for Lead.
type CheckTable struct {
	memory []byte
	checks []balancerCheck // by slot
}

func mapChecks(m *ebpf.Map) (*CheckTable, error) {
	memory, checks, err := mapArrayFor[balancerCheck](m, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return nil, fmt.Errorf("map the checks: %w", err)
	}
	return &CheckTable{memory, checks}, nil
}

func (t *CheckTable) close() error {
	if t == nil || t.memory == nil {
		return nil
	}
	return unix.Munmap(t.memory)
}

// Replace makes the data path send the packets of these checks, by slot, and drop the packets of
// all other checks.
func (t *CheckTable) Replace(checks map[uint32]Check) {
	for slot := range t.checks {
		entry := balancerCheck{}
		if check, ok := checks[uint32(slot)]; ok {
			entry = balancerCheck{
				Vip: in6(check.VIP), Encapsulation: uint8(encapsulations[check.Encapsulation]), IsUsed: 1,
			}
		}
		entry.Last = atomic.LoadUint32(&t.checks[slot].Last) // only Lead changes it
		if t.checks[slot] != entry {
			t.checks[slot].IsUsed = 0 // a packet meanwhile is dropped, and sent again by TCP
			t.checks[slot].Vip, t.checks[slot].Encapsulation = entry.Vip, entry.Encapsulation
			t.checks[slot].IsUsed = entry.IsUsed
		}
	}
}

// Lead determines the path of calls with the mark CallMarkOf(first). Their SYN goes to the first
// slot's server. If the argument to is another slot, the first server passes the SYN on to that
// slot's server. Several goroutines may call Lead, each for other values of first.
func (t *CheckTable) Lead(first, to uint32) {
	last := uint32(0) // 1 plus a slot, or 0 for none
	if to != first {
		last = to + 1
	}
	atomic.StoreUint32(&t.checks[first].Last, last)
}
