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

// Filter is a program of an instance in the queueing discipline clsact. It is used where the kernel
// is older than 6.6 and has no tcx.
type Filter struct {
	Instance string
	Parent   uint32 // netlink.HANDLE_MIN_INGRESS or HANDLE_MIN_EGRESS
	Priority uint16 // lower ones run first; must differ from other filters'
}

// filterName returns the name that distinguishes an instance's filters from all others.
func filterName(instance string) string { return "segue/" + instance }

// AttachFilter runs prog on an interface. It replaces the program of an earlier process in one
// step. An interface may lose packets that it sends while it gets its first clsact, so AttachFilter
// never removes clsact.
func (t *Takeover) AttachFilter(prog *ebpf.Program, ifindex int, f Filter) error {
	err := netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}})
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact to interface %d: %w", ifindex, err)
	}
	if err := t.keep(prog, Dir(f.Instance)); err != nil {
		return err
	}
	before, err := t.filterProgram(ifindex, f)
	if err != nil {
		return fmt.Errorf("list the filters of interface %d: %w", ifindex, err)
	}
	filter := f.on(ifindex, prog)
	if err := netlink.FilterReplace(filter); err != nil {
		return fmt.Errorf("add filter %q to interface %d: %w", filter.Name, ifindex, err)
	}
	t.OnUndo(func() error {
		if before == nil {
			return netlink.FilterDel(filter)
		}
		return netlink.FilterReplace(f.on(ifindex, before))
	})
	return nil
}

// on returns the netlink description of the filter on an interface, with a program.
func (f Filter) on(ifindex int, prog *ebpf.Program) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: f.Parent, Handle: 1, Priority: f.Priority, Protocol: unix.ETH_P_ALL,
		},
		Fd: prog.FD(), Name: filterName(f.Instance), DirectAction: true,
	}
}

// filterProgram returns the program of the filter on an interface. It is nil if there is no such
// filter. The takeover closes the program.
func (t *Takeover) filterProgram(ifindex int, f Filter) (*ebpf.Program, error) {
	iface, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return nil, err
	}
	filters, err := netlink.FilterList(iface, f.Parent)
	if err != nil {
		return nil, err
	}
	for _, found := range filters {
		bpf, ok := found.(*netlink.BpfFilter)
		if !ok || bpf.Name != filterName(f.Instance) || bpf.Priority != f.Priority {
			continue
		}
		program, err := openProgram(Dir(f.Instance), ebpf.ProgramID(bpf.Id))
		if err == nil {
			t.held = append(t.held, program)
		}
		return program, err
	}
	return nil, nil
}

// listAttempts is how often the list of interfaces is read again when an interface is removed
// meanwhile.
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
