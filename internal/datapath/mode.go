// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
)

// Mode is how an XDP program is attached.
type Mode string

const (
	// Native runs in the driver, before the kernel builds a socket buffer.
	Native Mode = "native"
	// Generic runs on socket buffers, where the driver has no XDP.
	Generic Mode = "generic"
)

// modeOf is how the interface's XDP program is attached; the link itself does not tell.
func modeOf(l netlink.Link) Mode {
	if xdp := l.Attrs().Xdp; xdp != nil && xdp.AttachMode == nl.XDP_ATTACHED_SKB {
		return Generic
	}
	return Native
}
