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

// hook is a point at which tc runs a program.
type hook struct {
	tcx    ebpf.AttachType
	parent uint32 // of a filter, in clsact
	pin    string // of a tcx link
}

var (
	ingress = hook{ebpf.AttachTCXIngress, netlink.HANDLE_MIN_INGRESS, "link_ingress"}
	egress  = hook{ebpf.AttachTCXEgress, netlink.HANDLE_MIN_EGRESS, "link_egress"}
)

// filterPriority distinguishes Segue's filters from others in clsact. Filters with lower priorities
// run first.
const filterPriority = 0x5e6e

// tc attaches programs to an interface. It uses tcx, or filters of the queueing discipline clsact
// where the kernel is older than 6.6.
type tc struct {
	instance  string
	dir       string // of the links' pins
	attachTCX func(link.TCXOptions) (link.Link, error)
}

// attach runs prog at the hook. It replaces the program of an earlier process in one step. If that
// program is on another interface, it works there until the takeover ends.
func (c *tc) attach(t *datapath.Takeover, prog *ebpf.Program, ifindex int, at hook) error {
	pin := filepath.Join(c.dir, at.pin)
	err := t.UpdateLink(prog, ifindex, pin)
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := c.attachTCX(link.TCXOptions{Program: prog, Interface: ifindex, Attach: at.tcx})
	if errors.Is(err, ebpf.ErrNotSupported) {
		return t.AttachFilter(prog, ifindex, datapath.Filter{
			Instance: c.instance, Parent: at.parent, Priority: filterPriority,
		})
	}
	if err != nil {
		return fmt.Errorf("attach %s to interface %d: %w", at.tcx, ifindex, err)
	}
	return t.PinLink(l, prog, pin)
}
