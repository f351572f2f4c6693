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

// filterName returns the name that distinguishes an instance's filters from all others.
func filterName(instance string) string { return "segue/" + instance }

// attachFilter runs a program of an instance in the queueing discipline clsact. It replaces the
// program of an earlier process in one step. An interface may lose packets while its first clsact
// is added. So attachFilter never removes clsact, and the next process need not add it.
func (t *Takeover) attachFilter(instance string, place Place) error {
	err := netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: place.Ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}})
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact to interface %d: %w", place.Ifindex, err)
	}
	if err := t.keep(place.Program, Dir(instance)); err != nil {
		return err
	}
	before, err := t.filterProgram(instance, place)
	if err != nil {
		return fmt.Errorf("list the filters of interface %d: %w", place.Ifindex, err)
	}
	filter := place.filter(instance)
	if err := netlink.FilterReplace(filter); err != nil {
		return fmt.Errorf("add filter %q to interface %d: %w", filter.Name, place.Ifindex, err)
	}
	t.OnUndo(func() error {
		if before == nil { // there was no filter
			return netlink.FilterDel(filter)
		}
		place.Program = before
		return netlink.FilterReplace(place.filter(instance))
	})
	return nil
}

// filter returns the netlink description of the filter of an instance at a place.
func (p Place) filter(instance string) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: p.Ifindex, Parent: p.parent(), Handle: 1, Priority: p.Priority, Protocol: unix.ETH_P_ALL,
		},
		Fd: p.Program.FD(), Name: filterName(instance), DirectAction: true,
	}
}

// parent returns the point of clsact at which the program of the hook runs.
func (h Hook) parent() uint32 {
	if h.At == ebpf.AttachTCXEgress {
		return netlink.HANDLE_MIN_EGRESS
	}
	return netlink.HANDLE_MIN_INGRESS
}

// filterProgram returns the program of the filter at a place. It is nil if there is no such filter.
// The takeover closes the program.
func (t *Takeover) filterProgram(instance string, place Place) (*ebpf.Program, error) {
	iface, err := netlink.LinkByIndex(place.Ifindex)
	if err != nil {
		return nil, err
	}
	filters, err := netlink.FilterList(iface, place.parent())
	if err != nil {
		return nil, err
	}
	for _, found := range filters {
		bpf, ok := found.(*netlink.BpfFilter)
		if !ok || bpf.Name != filterName(instance) || bpf.Priority != place.Priority {
			continue
		}
		program, err := openProgram(Dir(instance), ebpf.ProgramID(bpf.Id))
		if err == nil {
			t.held = append(t.held, program)
		}
		return program, err
	}
	return nil, nil
}

// listAttempts is how often RemoveFilters tries at most. An attempt fails if the list of interfaces
// changes while it is read.
const listAttempts = 20

// RemoveFilters removes an instance's filters from all interfaces of the calling thread's network
// namespace, except for the interfaces in keep. It finds filters by name, so it also removes those
// of processes that ended early.
func RemoveFilters(instance string, keep ...int) (err error) {
	for range listAttempts {
		err = removeAllFilters(instance, keep)
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return err
		}
	}
	return err
}

// removeAllFilters is one attempt of RemoveFilters. The error is netlink.ErrDumpInterrupted if the
// list of interfaces or filters has changed while it was read.
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

// removeFilters removes the filters of a name that an interface has for packets that it receives or
// sends, as parent says. It returns nil if the interface no longer exists.
func removeFilters(device netlink.Link, parent uint32, name string) error {
	filters, err := netlink.FilterList(device, parent)
	if errors.Is(err, unix.ENODEV) { // an interface was removed meanwhile
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
