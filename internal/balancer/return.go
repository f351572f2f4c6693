package balancer

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
)

// returnPin is where the link of tc_return is pinned.
const returnPin = "link_return"

// returnPriority keeps the filter of tc_return apart from others in clsact, where lower ones run first.
const returnPriority = 0x5e6c

func returnPinOf(instance string) string { return filepath.Join(datapath.Dir(instance), returnPin) }

func returnFilter(instance string) string { return "segue/" + instance }

// attachReturn runs the program behind XDP, in the place of an earlier process's: by tcx, or where the
// kernel is older than 6.6, by a filter of the queueing discipline clsact.
func attachReturn(prog *ebpf.Program, ifindex int, instance string) error {
	pin := returnPinOf(instance)
	err := datapath.UpdateLink(prog, ifindex, pin)
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := link.AttachTCX(link.TCXOptions{Program: prog, Interface: ifindex, Attach: ebpf.AttachTCXIngress})
	if errors.Is(err, ebpf.ErrNotSupported) {
		return attachReturnFilter(prog, ifindex, instance)
	}
	if err != nil {
		return fmt.Errorf("attach %s to interface %d: %w", ebpf.AttachTCXIngress, ifindex, err)
	}
	defer l.Close()
	return datapath.PinLink(l, pin)
}

func attachReturnFilter(prog *ebpf.Program, ifindex int, instance string) error {
	if err := netlink.QdiscAdd(clsact(ifindex)); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact to interface %d: %w", ifindex, err)
	}
	err := netlink.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1,
			Priority: returnPriority, Protocol: unix.ETH_P_ALL,
		},
		Fd: prog.FD(), Name: returnFilter(instance), DirectAction: true,
	})
	if err != nil {
		return fmt.Errorf("add filter %q to interface %d: %w", returnFilter(instance), ifindex, err)
	}
	return nil
}

func clsact(ifindex int) netlink.Qdisc {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
}

// detachReturn takes the program of an instance off its interface. Where there is no link of its own, that is
// the one of the XDP link, which is still attached, and the filter's name tells whose it is; clsact stays, for
// others may count on it.
func detachReturn(instance string) error {
	if _, err := os.Stat(returnPinOf(instance)); err == nil {
		return datapath.DetachLink(returnPinOf(instance))
	}
	ifindex, err := datapath.AttachedTo(filepath.Join(datapath.Dir(instance), datapath.LinkPin))
	if err != nil || ifindex == 0 {
		return err
	}
	return removeReturnFilter(instance, ifindex)
}

func removeReturnFilter(instance string, ifindex int) error {
	device, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return fmt.Errorf("interface %d: %w", ifindex, err)
	}
	filters, err := netlink.FilterList(device, netlink.HANDLE_MIN_INGRESS)
	if err != nil {
		return fmt.Errorf("list the filters of %s: %w", device.Attrs().Name, err)
	}
	for _, f := range filters {
		if bpf, ok := f.(*netlink.BpfFilter); !ok || bpf.Name != returnFilter(instance) {
			continue
		}
		if err := netlink.FilterDel(f); err != nil {
			return fmt.Errorf("delete filter %q of %s: %w", returnFilter(instance), device.Attrs().Name, err)
		}
	}
	return nil
}
