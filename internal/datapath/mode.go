package datapath

import (
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
)

// attachedMode asks the kernel how the interface's XDP program is attached; the
// link itself does not tell.
func attachedMode(ifindex int) (Mode, error) {
	l, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return "", fmt.Errorf("interface %d: %w", ifindex, err)
	}
	return modeOf(l), nil
}

func modeOf(l netlink.Link) Mode {
	if xdp := l.Attrs().Xdp; xdp != nil && xdp.AttachMode == nl.XDP_ATTACHED_SKB {
		return Generic
	}
	return Native
}
