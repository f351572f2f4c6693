// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/netdev"
)

// The offloads that pass VLAN tags beside frames, for tags of customers and of providers.
var (
	// The offloads in receiving take the tag out of a frame that an interface receives.
	receiving = []string{"rx-vlan-hw-parse", "rx-vlan-stag-hw-parse"}
	// Those in sending leave it to an interface to put the tag into a frame. A veth never does so.
	sending = []string{"tx-vlan-hw-insert", "tx-vlan-stag-hw-insert"}
)

// ErrHiddenTags is the error about an interface whose VLAN tags XDP may not see.
var ErrHiddenTags = errors.New("XDP may not see the VLAN tags of the interface")

// hider is an interface with active offloads that hide VLAN tags from XDP. The interface is in the
// calling thread's network namespace.
type hider struct {
	name, remark string // messages have both; remark names the end of a veth, or is empty
	offloads     []string
}

// ShowVLANTags makes an interface leave VLAN tags in the frames that XDP gets. Without that, a
// frame in a VLAN looks like one in no VLAN. The kernel takes the tags out behind XDP instead, so
// the host's VLAN interfaces work as before. If XDP runs on the members of a bond, ShowVLANTags
// changes the members. Tags of a veth come from its other end, so ShowVLANTags changes that one. It
// returns the interfaces that it has changed.
//
// It returns ErrHiddenTags if tags stay hidden, or if it cannot find that out. It must be called in
// the interface's network namespace.
func ShowVLANTags(ifindex int) (changed []string, err error) {
	err = visitHiders(ifindex, func(h hider) error {
		err := netdev.SetOffloads(h.name, false, h.offloads...)
		if err == nil {
			changed = append(changed, h.name+h.remark)
		}
		return err
	})
	return changed, err
}

// HiddenVLANTags returns ErrHiddenTags if XDP does not see the VLAN tags of an interface, or if
// this process cannot find that out. It must be called in the interface's network namespace.
func HiddenVLANTags(ifindex int) error {
	return visitHiders(ifindex, func(h hider) error {
		return fmt.Errorf("%s has %s on", h.name, strings.Join(h.offloads, ", "))
	})
}

// TagWatch is for repeated calls of ShowVLANTags, because anybody can change the interface, or the
// other end of a veth. It logs the changes. The zero value is ready.
type TagWatch struct {
	said map[int]string // by interface, the error that was logged last
}

// Show calls ShowVLANTags for an interface. It logs each change, and each error once.
func (w *TagWatch) Show(log *slog.Logger, name string, ifindex int) {
	changed, err := ShowVLANTags(ifindex)
	for _, iface := range changed {
		log.Info("VLAN offloads are switched off, so that packets in VLANs are not taken for others",
			"interface", iface)
	}
	said := ""
	if err != nil {
		said = err.Error()
	}
	if err != nil && w.said[ifindex] != said {
		log.Warn("packets in VLANs may be taken for packets in none", "interface", name, "error", err)
	}
	if w.said == nil {
		w.said = map[int]string{}
	}
	w.said[ifindex] = said
}

// visitHiders visits the interfaces that hide the tags of frames from XDP on an interface.
func visitHiders(ifindex int, visit func(hider) error) error {
	link, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return fmt.Errorf("find interface %d: %w", ifindex, err)
	}
	receivers := []netlink.Link{link}
	if link.Type() == "bond" && modeOf(link) == Native { // XDP runs on the members
		all, err := netlink.LinkList()
		if err != nil {
			return fmt.Errorf("list the members of %s: %w", link.Attrs().Name, err)
		}
		receivers = membersOf(all, ifindex)
	}
	return visitHidersOf(receivers, visit)
}

// visitHidersOf visits the interfaces that hide the tags of frames at receivers. It continues after
// an error. The error that it returns is ErrHiddenTags, and names each receiver that failed.
func visitHidersOf(receivers []netlink.Link, visit func(hider) error) (err error) {
	for _, receiver := range receivers {
		failed := visitHider(receiver, visit)
		if failed == nil {
			continue
		}
		if err == nil { // the first failure
			err = fmt.Errorf("%w %s: %w", ErrHiddenTags, receiver.Attrs().Name, failed)
		} else {
			err = fmt.Errorf("%w; of %s: %w", err, receiver.Attrs().Name, failed)
		}
	}
	return err
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

// isUpper lists the types of interfaces that get frames from interfaces below. At the interface
// below, the kernel takes the tag out of a frame, before XDP in generic mode gets the frame.
var isUpper = map[string]bool{
	"bond": true, "bridge": true, "macvlan": true, "macvtap": true, "openvswitch": true, "team": true,
}

// visitHider visits the interface that hides the tags of frames at a receiver, if there is one. For
// a veth, that is its other end. For all others it is the receiver itself. It returns an error if
// interfaces below the receiver hide the tags: no offload of the receiver can change that.
func visitHider(receiver netlink.Link, visit func(hider) error) error {
	switch {
	case receiver.Type() == "veth":
		return visitOtherEnd(receiver.Attrs(), visit)
	case isUpper[receiver.Type()] && modeOf(receiver) == Generic:
		return fmt.Errorf("the kernel takes them out below a %s; keep VLANs off the interfaces below",
			receiver.Type())
	}
	return visitActive(hider{name: receiver.Attrs().Name, offloads: receiving}, visit)
}

// visitActive visits a possible hider if at least one of its offloads is on.
func visitActive(h hider, visit func(hider) error) (err error) {
	if h.offloads, err = netdev.ActiveOffloads(h.name, h.offloads...); err != nil || len(h.offloads) == 0 {
		return err
	}
	return visit(h)
}
