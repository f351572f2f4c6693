package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
)

// hook is where tc runs a program.
type hook struct {
	tcx    ebpf.AttachType
	parent uint32 // of a filter, in clsact
	pin    string // of a tcx link
}

var (
	ingress = hook{ebpf.AttachTCXIngress, netlink.HANDLE_MIN_INGRESS, "link_ingress"}
	egress  = hook{ebpf.AttachTCXEgress, netlink.HANDLE_MIN_EGRESS, "link_egress"}
)

// filterPriority keeps our filters apart from others in clsact, where lower ones run first.
const filterPriority = 0x5e6e

// tc attaches programs to an interface: by tcx, or where the kernel is older than 6.6, by filters of
// the queueing discipline clsact.
type tc struct {
	name       string // of the filters
	dir        string // of the links' pins
	belongings belongings
	attachTCX  func(link.TCXOptions) (link.Link, error)
	unpinned   map[string]link.Link // made by attach, by their pins to be
}

// filterName is the name of an instance's filters.
func filterName(instance string) string { return "segue/" + instance }

// attach runs prog at the hook, in the place of an earlier process's program, in one step. One that is
// on another interface works there until pin.
func (t *tc) attach(prog *ebpf.Program, ifindex int, at hook) error {
	pin := filepath.Join(t.dir, at.pin)
	err := datapath.UpdateLink(prog, ifindex, pin)
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := t.attachTCX(link.TCXOptions{Program: prog, Interface: ifindex, Attach: at.tcx})
	if errors.Is(err, ebpf.ErrNotSupported) {
		return t.attachClsact(prog, ifindex, at)
	}
	if err != nil {
		return fmt.Errorf("attach %s to interface %s: %w", at.tcx, nameOf(ifindex), err)
	}
	t.unpinned[pin] = l
	return nil
}

// pin pins the links that attach has made.
func (t *tc) pin() error {
	for pin, l := range t.unpinned {
		if err := datapath.PinLink(l, pin); err != nil {
			return err
		}
		delete(t.unpinned, pin)
		if err := l.Close(); err != nil {
			return err
		}
	}
	return nil
}

// drop takes away the links that attach has made, and that are not pinned.
func (t *tc) drop() error {
	var errs []error
	for _, l := range t.unpinned {
		errs = append(errs, l.Detach(), l.Close())
	}
	clear(t.unpinned)
	return errors.Join(errs...)
}

func (t *tc) attachClsact(prog *ebpf.Program, ifindex int, at hook) error {
	if err := t.prepareClsact(ifindex); err != nil {
		return err
	}
	err := netlink.FilterReplace(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: at.parent, Handle: 1,
			Priority: filterPriority, Protocol: unix.ETH_P_ALL,
		},
		Fd: prog.FD(), Name: t.name, DirectAction: true,
	})
	if err != nil {
		return fmt.Errorf("add filter %q to interface %s: %w", t.name, nameOf(ifindex), err)
	}
	return nil
}

// prepareClsact makes the interface ready for filters, and takes a note before there can be any.
func (t *tc) prepareClsact(ifindex int) error {
	noted, err := t.belongings.filters()
	if err != nil {
		return err
	}
	if _, ok := noted[ifindex]; !ok {
		if err := t.belongings.addFilters(ifindex, filtersOnly); err != nil {
			return err
		}
	}
	err = netlink.QdiscAdd(clsact(ifindex))
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("add clsact to interface %s: %w", nameOf(ifindex), err)
	}
	return t.belongings.addFilters(ifindex, filtersAndClsact)
}

// nameOf is an interface's name for messages; its index if it is gone.
func nameOf(ifindex int) string {
	device, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return strconv.Itoa(ifindex)
	}
	return device.Attrs().Name
}

func clsact(ifindex int) netlink.Qdisc {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: ifindex,
		Handle:    netlink.MakeHandle(0xffff, 0),
		Parent:    netlink.HANDLE_CLSACT,
	}}
}

// removeFilters takes an instance's filters from all interfaces but the one to keep; 0 is none. What
// is left of a clsact is taken away too, if it is ours and others have no filters in it.
func removeFilters(instance string, all belongings, keep int) error {
	noted, err := all.filters()
	if err != nil {
		return err
	}
	for ifindex, ours := range noted {
		if ifindex == keep {
			continue
		}
		device, err := netlink.LinkByIndex(ifindex)
		if err == nil {
			err = detachClsact(filterName(instance), device, ours)
		} else if errors.As(err, &netlink.LinkNotFoundError{}) {
			err = nil // the filters are gone with it
		}
		if err != nil {
			return fmt.Errorf("interface %d: %w", ifindex, err)
		}
		if err := all.forgetFilters(ifindex); err != nil {
			return err
		}
	}
	return nil
}

// detachClsact removes the filters with the name, and clsact itself if it is ours and others have no
// filters in it.
func detachClsact(name string, device netlink.Link, ours bool) error {
	others := 0
	for _, at := range []hook{ingress, egress} {
		filters, err := netlink.FilterList(device, at.parent)
		if err != nil {
			return fmt.Errorf("list the filters of %s: %w", device.Attrs().Name, err)
		}
		for _, f := range filters {
			if bpf, ok := f.(*netlink.BpfFilter); !ok || bpf.Name != name {
				others++
				continue
			}
			if err := netlink.FilterDel(f); err != nil {
				return fmt.Errorf("delete filter %q of %s: %w", name, device.Attrs().Name, err)
			}
		}
	}
	if !ours || others > 0 {
		return nil
	}
	if err := netlink.QdiscDel(clsact(device.Attrs().Index)); err != nil {
		return fmt.Errorf("delete clsact of %s: %w", device.Attrs().Name, err)
	}
	return nil
}
