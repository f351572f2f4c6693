// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// flagRXVLAN is ETH_FLAG_RXVLAN of linux/ethtool.h: the interface takes the VLAN tag out of a
// received frame, before XDP sees the frame.
const flagRXVLAN = 1 << 8

// ErrHiddenTags is the error about an interface whose VLAN tags XDP cannot see.
var ErrHiddenTags = errors.New("XDP does not see the VLAN tags of the interface")

// ShowVLANTags makes an interface leave VLAN tags in the frames that XDP gets. Without that, a frame
// in a VLAN looks like one in no VLAN. The kernel takes the tags out behind XDP instead, so the
// host's VLAN interfaces work as before. ShowVLANTags does the same for the members of a bond, on
// which XDP runs. It returns the interfaces that it has changed.
//
// It returns ErrHiddenTags if tags stay hidden and the host has VLAN interfaces on the interface, so
// that frames in VLANs are to be expected. It must be called in the interface's network namespace.
func ShowVLANTags(ifindex int) (changed []string, err error) {
	link, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return nil, fmt.Errorf("find interface %d: %w", ifindex, err)
	}
	receivers := []netlink.Link{link}
	if link.Type() == "bond" {
		all, err := netlink.LinkList()
		if err != nil {
			return nil, fmt.Errorf("list the members of %s: %w", link.Attrs().Name, err)
		}
		receivers = membersOf(all, ifindex)
	}
	for _, receiver := range receivers {
		switched, failed := showVLANTags(receiver)
		if switched {
			changed = append(changed, receiver.Attrs().Name)
		}
		if failed != nil {
			err = fmt.Errorf("%w %s: %w", ErrHiddenTags, receiver.Attrs().Name, failed)
		}
	}
	if err == nil {
		return changed, nil
	}
	all, failed := netlink.LinkList()
	if failed == nil && !hasVLANs(all, ifindex) {
		return changed, nil
	}
	return changed, err
}

// membersOf returns the members of a bond.
func membersOf(all []netlink.Link, bond int) (members []netlink.Link) {
	for _, link := range all {
		if link.Attrs().MasterIndex == bond {
			members = append(members, link)
		}
	}
	return members
}

// hasVLANs tells whether the host has VLAN interfaces on an interface.
func hasVLANs(all []netlink.Link, ifindex int) bool {
	return slices.ContainsFunc(all, func(link netlink.Link) bool {
		return link.Type() == "vlan" && link.Attrs().ParentIndex == ifindex
	})
}

// showVLANTags makes one interface leave tags in frames. It returns false if the interface did so
// before.
func showVLANTags(link netlink.Link) (switched bool, err error) {
	if link.Type() == "veth" {
		// The tag comes beside the frame from the other end, whatever this end's offload is.
		return false, errors.New("switch tx-vlan-offload off at the other end of the veth")
	}
	return switchRXVLANOff(link.Attrs().Name)
}

// switchRXVLANOff switches the offload off. It returns false if the interface has no such offload, or
// if the offload was off.
func switchRXVLANOff(name string) (switched bool, err error) {
	flags, err := ethtool(name, unix.ETHTOOL_GFLAGS, 0)
	if errors.Is(err, unix.EOPNOTSUPP) || err == nil && flags&flagRXVLAN == 0 {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the offloads: %w", err)
	}
	if _, err := ethtool(name, unix.ETHTOOL_SFLAGS, flags&^flagRXVLAN); err != nil {
		return false, fmt.Errorf("switch rx-vlan-offload off: %w", err)
	}
	return true, nil
}

// ethtool runs one of the commands of SIOCETHTOOL that take and return a number.
func ethtool(name string, command, data uint32) (uint32, error) {
	value := struct{ command, data uint32 }{command, data} // struct ethtool_value
	request := struct {                                    // struct ifreq
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(request.name[:unix.IFNAMSIZ-1], name)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
	if errno != 0 {
		return 0, errno
	}
	return value.data, nil
}
