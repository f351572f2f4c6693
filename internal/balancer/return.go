package balancer

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

// returnPin is where the link of tc_return is pinned.
const returnPin = "link_return"

// returnPriority keeps the filter of tc_return apart from others in clsact, where lower ones run first.
const returnPriority = 0x5e6c

func returnPinOf(instance string) string { return filepath.Join(datapath.Dir(instance), returnPin) }

// attachReturn runs the program behind XDP, in the place of an earlier process's: by tcx, or where the
// kernel is older than 6.6, by a filter.
func (k *kernel) attachReturn(ifindex int) error {
	pin := returnPinOf(k.instance)
	err := datapath.UpdateLink(k.objects.TcReturn, ifindex, pin)
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := k.attachTCX(link.TCXOptions{Program: k.objects.TcReturn, Interface: ifindex, Attach: ebpf.AttachTCXIngress})
	if errors.Is(err, ebpf.ErrNotSupported) {
		return datapath.AttachFilter(k.objects.TcReturn, ifindex, datapath.Filter{
			Instance: k.instance, Parent: netlink.HANDLE_MIN_INGRESS, Priority: returnPriority,
		})
	}
	if err != nil {
		return fmt.Errorf("attach %s to interface %d: %w", ebpf.AttachTCXIngress, ifindex, err)
	}
	defer l.Close()
	return datapath.PinLink(l, pin)
}

// detachReturn takes the program of an instance off its interface. Filters are found in the network namespace
// of the calling thread alone, which must be that of the XDP link.
func detachReturn(instance string) error {
	if _, err := os.Stat(returnPinOf(instance)); err == nil {
		return datapath.DetachLink(returnPinOf(instance))
	}
	if _, err := datapath.AttachedTo(filepath.Join(datapath.Dir(instance), datapath.LinkPin)); err != nil {
		return err
	}
	return datapath.RemoveFilters(instance, 0)
}
