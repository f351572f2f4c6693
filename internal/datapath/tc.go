// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
)

// Hook is a point at which tc runs a program of an instance.
type Hook struct {
	At       ebpf.AttachType // ebpf.AttachTCXIngress or ebpf.AttachTCXEgress
	Priority uint16          // of a filter: see Filter
	Pin      string          // the name of a tcx link's pin
}

// TC attaches programs of an instance to interfaces. It uses tcx, or filters of the queueing
// discipline clsact where the kernel is older than 6.6.
type TC struct {
	Instance string
	// AttachTCX is link.AttachTCX. Tests replace it to simulate kernels before 6.6.
	AttachTCX func(link.TCXOptions) (link.Link, error)
}

// Attach runs a program at a hook. It replaces the program of an earlier process in one step. If
// that program is on another interface, it works there until the takeover ends.
func (c *TC) Attach(t *Takeover, prog *ebpf.Program, ifindex int, hook Hook) error {
	pin := filepath.Join(Dir(c.Instance), hook.Pin)
	err := t.UpdateLink(prog, ifindex, pin)
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := c.AttachNew(t, prog, ifindex, hook)
	if l == nil || err != nil {
		return err
	}
	return t.PinLink(l, prog, pin)
}

// AttachNew runs a program at a hook. It returns a tcx link without a pin, which the caller owns. The
// link is nil if the program is in a filter.
func (c *TC) AttachNew(t *Takeover, prog *ebpf.Program, ifindex int, hook Hook) (link.Link, error) {
	l, err := c.AttachTCX(link.TCXOptions{Program: prog, Interface: ifindex, Attach: hook.At})
	if errors.Is(err, ebpf.ErrNotSupported) {
		parent := uint32(netlink.HANDLE_MIN_INGRESS)
		if hook.At == ebpf.AttachTCXEgress {
			parent = netlink.HANDLE_MIN_EGRESS
		}
		return nil, t.AttachFilter(prog, ifindex, Filter{c.Instance, parent, hook.Priority})
	}
	if err != nil {
		return nil, fmt.Errorf("attach %s to interface %d: %w", hook.At, ifindex, err)
	}
	return l, nil
}
