// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
)

// Mode is how an XDP program is attached.
type Mode string

const (
	// Native: the program runs in the driver, before the kernel builds a socket buffer.
	Native Mode = "native"
	// Generic: the program runs on socket buffers, because the driver does not support XDP, or
	// because an operator has chosen that.
	Generic Mode = "generic"
)

// modeOf returns how the interface's XDP program is attached. The BPF link does not tell.
func modeOf(l netlink.Link) Mode {
	if xdp := l.Attrs().Xdp; xdp != nil && xdp.AttachMode == nl.XDP_ATTACHED_SKB {
		return Generic
	}
	return Native
}
