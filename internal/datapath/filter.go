// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Filter is a program of an instance in the queueing discipline clsact: what tc has where the kernel is
// older than 6.6, and knows no tcx.
type Filter struct {
	Instance string
	Parent   uint32 // where it runs: netlink.HANDLE_MIN_INGRESS or HANDLE_MIN_EGRESS
	Priority uint16 // lower ones run first; no others' filters there may have it
}

// filterName tells an instance's filters from all others.
func filterName(instance string) string { return "segue/" + instance }

// AttachFilter runs prog on an interface, in the place of an earlier process's program, in one step.
// Packets that an interface sends while it gets its first clsact may be lost, so clsact stays for good.
func AttachFilter(prog *ebpf.Program, ifindex int, f Filter) error {
	err := netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}})
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact to interface %d: %w", ifindex, err)
	}
	err = netlink.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: f.Parent, Handle: 1, Priority: f.Priority, Protocol: unix.ETH_P_ALL,
		},
		Fd: prog.FD(), Name: filterName(f.Instance), DirectAction: true,
	})
	if err != nil {
		return fmt.Errorf("add filter %q to interface %d: %w", filterName(f.Instance), ifindex, err)
	}
	return nil
}

// listAttempts is how often interfaces are looked through while others come and go.
const listAttempts = 20

// RemoveFilters takes an instance's filters from all interfaces of the calling thread's network namespace
// but those to keep. They are found by their name, so that no process that ended early leaves one.
func RemoveFilters(instance string, keep ...int) (err error) {
	for range listAttempts {
		err = removeAllFilters(instance, keep)
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return err
		}
	}
	return err
}

func removeAllFilters(instance string, keep []int) error {
	devices, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list the interfaces: %w", err)
	}
	for _, device := range devices {
		if slices.Contains(keep, device.Attrs().Index) {
			continue
		}
		for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
			if err := removeFilters(device, parent, filterName(instance)); err != nil {
				return err
			}
		}
	}
	return nil
}

func removeFilters(device netlink.Link, parent uint32, name string) error {
	filters, err := netlink.FilterList(device, parent)
	if errors.Is(err, unix.ENODEV) { // it went away meanwhile
		return nil
	}
	if err != nil {
		return fmt.Errorf("list the filters of %s: %w", device.Attrs().Name, err)
	}
	for _, f := range filters {
		if bpf, ok := f.(*netlink.BpfFilter); !ok || bpf.Name != name {
			continue
		}
		if err := netlink.FilterDel(f); err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("delete filter %q of %s: %w", name, device.Attrs().Name, err)
		}
	}
	return nil
}
