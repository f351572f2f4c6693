// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
)

// MaxRemovedVIPs is how many removed VIPs the tables have room for, beside all services:
// MAX_REMOVED_VIPS in bpf/balancer/path/reject.h.
const MaxRemovedVIPs = 1024

// The flags of the rule of a VIP's entry (enum vip_flags in bpf/balancer/types.h).
const (
	vipRejects = uint8(balancerVipFlagsVIP_REJECTS)
	vipRemoved = uint8(balancerVipFlagsVIP_REMOVED)
)

// VIPEntry returns the entry that marks an address as a VIP, and says whether clients are told that
// no server gets their packets.
func VIPEntry(vip netip.Addr, rejects bool) ServiceEntry {
	entry := VIPKey(vip)
	if rejects {
		entry.Rule.Flags = vipRejects
	}
	return entry
}

// Remove returns the entry that a VIP has after the removal of its last service. The argument now
// is the time on the clock of BootTime. If the VIP is already removed, its entry does not change.
func (e ServiceEntry) Remove(now time.Duration) ServiceEntry {
	if _, removed := e.Removed(); removed {
		return e
	}
	e.Rule.Flags = vipRemoved
	e.Id = uint32(now / time.Second)
	return e
}

// Removed tells whether the entry is that of a removed VIP, and returns the time of its removal
// since the system was booted, in whole seconds.
func (e *ServiceEntry) Removed() (at time.Duration, removed bool) {
	if e.IsService() || e.Rule.Flags&vipRemoved == 0 {
		return 0, false
	}
	return time.Duration(e.Id) * time.Second, true
}

// VIP returns the address of the entry.
func (e *ServiceEntry) VIP() netip.Addr { return addrOf(e.Vip) }

// CountRemoved makes the data path count packets to removed VIPs by VIP. The counters of VIPs that
// already have one go on. CountRemoved returns an error if the kernel has no memory for a counter.
func (p *Plane) CountRemoved(entries []ServiceEntry) error {
	zero := make([]Counter, ebpf.MustPossibleCPU())
	for i := range entries {
		if _, removed := entries[i].Removed(); !removed {
			continue
		}
		err := p.Objects.RemovedVips.Update(entries[i].Vip, zero, ebpf.UpdateNoExist)
		if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
			return fmt.Errorf("count packets to %s: %w", addrOf(entries[i].Vip), err)
		}
	}
	return nil
}

// UncountRemoved removes the counters of all VIPs that are not among the removed ones.
// UncountRemoved returns an error if the table cannot be changed.
func (p *Plane) UncountRemoved(entries []ServiceEntry) error {
	removed := map[balancerIn6Addr]bool{}
	for i := range entries {
		if _, ok := entries[i].Removed(); ok {
			removed[entries[i].Vip] = true
		}
	}
	return datapath.Keep(p.Objects.RemovedVips, removed)
}

// RemovedVIP is a VIP whose last service was removed. Packets to it are dropped.
type RemovedVIP struct {
	VIP netip.Addr
	Age time.Duration // since the removal
	Counter
}

// RemovedVIPs lists the removed VIPs by address, with the packets that were dropped. RemovedVIPs
// returns an error if the clock or a counter cannot be read.
func (r *Reader) RemovedVIPs() (all []RemovedVIP, err error) {
	now, err := BootTime()
	if err != nil {
		return nil, err
	}
	for _, entry := range r.Services.All() {
		at, removed := entry.Removed()
		if !removed {
			continue
		}
		vip := RemovedVIP{VIP: addrOf(entry.Vip), Age: max(0, now-at)}
		var cpus []Counter
		err := r.maps.RemovedVips.Lookup(entry.Vip, &cpus)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) { // it may be forgotten just now
			return nil, fmt.Errorf("read the packets to %s: %w", vip.VIP, err)
		}
		for _, cpu := range cpus {
			vip.add(cpu.Packets, cpu.Bytes)
		}
		all = append(all, vip)
	}
	slices.SortFunc(all, func(a, b RemovedVIP) int { return cmp.Compare(a.VIP.String(), b.VIP.String()) })
	return all, nil
}
