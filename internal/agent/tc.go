// SPDX-License-Identifier: Apache-2.0

package agent

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
	instance  string
	dir       string // of the links' pins
	attachTCX func(link.TCXOptions) (link.Link, error)
	unpinned  map[string]link.Link // made by attach, by their pins to be
}

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
		return datapath.AttachFilter(prog, ifindex, datapath.Filter{Instance: t.instance, Parent: at.parent, Priority: filterPriority})
	}
	if err != nil {
		return fmt.Errorf("attach %s to interface %d: %w", at.tcx, ifindex, err)
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
