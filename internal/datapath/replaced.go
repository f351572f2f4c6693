// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// AttachXDP runs prog on an interface and pins the link at pin. A link that is
// pinned there already and belongs to the interface is given the new program in
// one step; no packet passes by. One of another interface works until the new one
// takes its place. The native mode is tried first.
func AttachXDP(prog *ebpf.Program, ifindex int, pin string) (Attached, error) {
	iface, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return Attached{}, fmt.Errorf("interface %d: %w", ifindex, err)
	}
	err = UpdateLink(prog, ifindex, pin)
	if err == nil && modeOf(iface) == Generic {
		return Attached{Generic, errKept}, nil
	}
	if err == nil {
		return Attached{Mode: Native}, nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return Attached{}, err
	}
	l, attached, err := attachXDP(prog, ifindex)
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) {
		return Attached{}, fmt.Errorf("attach XDP to %s: %w: it runs %s", iface.Attrs().Name, err, describeXDP(ifindex))
	}
	if err != nil {
		return Attached{}, fmt.Errorf("attach XDP to %s: %w", iface.Attrs().Name, err)
	}
	defer l.Close()
	return attached, PinLink(l, pin)
}

// UpdateLink gives a pinned XDP or tcx link a new program, in one step. The error is os.ErrNotExist
// when there is no such link, or it is another interface's: see PinLink. A link of another network
// namespace is another error. A link that an earlier process has made, and whose pin it did not live to
// name, is taken off its interface first.
func UpdateLink(prog *ebpf.Program, ifindex int, pin string) error {
	if err := DetachLink(next(pin)); err != nil {
		return err
	}
	attached, err := AttachedTo(pin)
	if err != nil {
		return err
	}
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return err
	}
	defer l.Close()
	if attached != ifindex {
		return os.ErrNotExist
	}
	if err := l.Update(prog); err != nil {
		return fmt.Errorf("replace the program of %s: %w", pin, err)
	}
	return nil
}

// ClaimLink gives the pin of a name to the link of an interface where that has another one, which gets what the name
// was of: interfaces can have changed their parts since an earlier process. It names links only, and none is
// taken off, but for such as UpdateLink would.
func ClaimLink(pin, other string, ifindex int) error {
	for _, unfinished := range []string{next(pin), next(other)} {
		if err := DetachLink(unfinished); err != nil {
			return err
		}
	}
	attached, err := AttachedTo(other)
	if err != nil || attached != ifindex {
		return err
	}
	err = unix.Renameat2(unix.AT_FDCWD, other, unix.AT_FDCWD, pin, unix.RENAME_EXCHANGE)
	if errors.Is(err, unix.ENOENT) {
		err = os.Rename(other, pin)
	}
	if err != nil {
		return fmt.Errorf("rename %s to %s: %w", other, pin, err)
	}
	return nil
}

// PinLink pins a new link. It takes the place of the one that is pinned there, if any, whose program is
// then taken off its interface.
func PinLink(l link.Link, pin string) error {
	before, err := link.LoadPinnedLink(pin, nil)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("open %s: %w", pin, err)
	}
	if before != nil {
		defer before.Close()
	}
	if err := Pin(l, pin); err != nil {
		return err
	}
	if before == nil {
		return nil
	}
	if err := before.Detach(); err != nil {
		return fmt.Errorf("detach what %s was before: %w", pin, err)
	}
	return nil
}

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
