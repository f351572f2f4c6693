// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/datapath"
)

// returnPriority keeps the filter of tc_return apart from others in clsact, where lower ones run first.
const returnPriority = 0x5e6c

// attachReturn runs the program behind XDP, in the place of an earlier process's: by tcx, or where the
// kernel is older than 6.6, by a filter.
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
	return t.PinLink(l, pin)
}

// detachReturn takes the programs behind XDP of an instance off their interfaces. Filters are found in the network
// namespace of the calling thread alone, which must be that of the XDP links.
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
