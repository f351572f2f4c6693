// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/datapath"
)

// returnPriority is the priority of the filter of tc_return in clsact. It distinguishes the filter
// from others. Filters with lower priorities run first.
const returnPriority = 0x5e6c

// SetOwnAddresses sets the addresses of the host: packets of servers to them are delivered here.
// SetOwnAddresses returns an error if the table has no room for all of them, or cannot be written.
func (p *Plane) SetOwnAddresses(addresses []netip.Addr) error {
	own := make(map[balancerIn6Addr]uint8, len(addresses))
	for _, address := range addresses {
		own[in6(address)] = 1
	}
	return datapath.Replace(p.Objects.OwnAddresses, own)
}

// attachReturn attaches tc_return, which runs after XDP, and replaces the program of an earlier
// process. It uses tcx, or a filter if the kernel is older than 6.6.
func (p *Plane) attachReturn(t *datapath.Takeover, side *Side, ifindex int) error {
	pin, program := p.pin(side.returnPin), side.Objects.TcReturn
	err := t.UpdateLink(program, ifindex, pin)
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := p.AttachTCX(link.TCXOptions{Program: program, Interface: ifindex, Attach: ebpf.AttachTCXIngress})
	if errors.Is(err, ebpf.ErrNotSupported) {
		return t.AttachFilter(program, ifindex, datapath.Filter{
			Instance: p.instance, Parent: netlink.HANDLE_MIN_INGRESS, Priority: returnPriority,
		})
	}
	if err != nil {
		return fmt.Errorf("attach %s to interface %d: %w", ebpf.AttachTCXIngress, ifindex, err)
	}
	return t.PinLink(l, program, pin)
}

// detachReturn removes the tc_return programs of an instance from their interfaces. It finds
// filters only in the network namespace of the calling thread, which must be that of the XDP links.
func detachReturn(instance string) error {
	byFilters := true
	dir := datapath.Dir(instance)
	for _, kind := range sideKinds {
		pin := filepath.Join(dir, kind.returnPin)
		if _, err := os.Stat(pin); err != nil {
			continue
		}
		byFilters = false
		if err := datapath.DetachLink(pin); err != nil {
			return err
		}
	}
	if !byFilters {
		return nil
	}
	for _, kind := range sideKinds {
		if _, err := datapath.AttachedTo(filepath.Join(dir, kind.xdpPin)); err != nil {
			return err
		}
	}
	return datapath.RemoveFilters(instance)
}
