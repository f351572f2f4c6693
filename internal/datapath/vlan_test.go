// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testnet"
)

// The offload of an interface is found on, switched off once, and found off then. Other offloads stay
// as they are.
func TestSwitchRXVLANOff(t *testing.T) {
	t.Parallel()
	a, b := testnet.New(t), testnet.New(t)
	testnet.Connect(t, a, "eth0", nil, b, "eth0", nil)
	testnet.Must(t, a.Do(func() error {
		before, err := ethtool("eth0", unix.ETHTOOL_GFLAGS, 0)
		if err != nil {
			return err
		}
		if before&flagRXVLAN == 0 {
			t.Fatalf("flags %x: the offload is off from the beginning", before)
		}
		for i, want := range []bool{true, false} {
			if switched, err := switchRXVLANOff("eth0"); err != nil || switched != want {
				t.Errorf("call %d: switched %v, error %v", i, switched, err)
			}
		}
		after, err := ethtool("eth0", unix.ETHTOOL_GFLAGS, 0)
		if after != before&^flagRXVLAN {
			t.Errorf("flags %x, before %x", after, before)
		}
		// The loopback interface has no such offload.
		if switched, err := switchRXVLANOff("lo"); err != nil || switched {
			t.Errorf("lo: switched %v, error %v", switched, err)
		}
		return err
	}))
}

// An interface that cannot be changed is an error that names it.
func TestSwitchRXVLANOffFails(t *testing.T) {
	t.Parallel()
	a := testnet.New(t)
	testnet.Must(t, a.Do(func() error {
		if _, err := switchRXVLANOff("absent"); !errors.Is(err, unix.ENODEV) {
			t.Errorf("error %v", err)
		}
		return nil
	}))
}

// Tags on a veth stay hidden. That is an error only if there are VLAN interfaces on it.
func TestHiddenTags(t *testing.T) {
	t.Parallel()
	a, b := testnet.New(t), testnet.New(t)
	testnet.Connect(t, a, "eth0", nil, b, "eth0", nil)
	testnet.Must(t, a.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if changed, err := ShowVLANTags(link.Attrs().Index); err != nil || len(changed) > 0 {
			t.Errorf("changed %v, error %v", changed, err)
		}
		if _, err := showVLANTags(link); err == nil || !strings.Contains(err.Error(), "other end of the veth") {
			t.Errorf("error %v", err)
		}
		return nil
	}))
	device := func(index, master int) netlink.Link {
		return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index, MasterIndex: master}}
	}
	vlan := func(parent int) netlink.Link {
		return &netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Index: 9, ParentIndex: parent}, VlanId: 100}
	}
	all := []netlink.Link{device(1, 0), device(2, 5), device(3, 5), device(5, 0), vlan(5)}
	for index, want := range map[int]bool{1: false, 5: true} {
		if got := hasVLANs(all, index); got != want {
			t.Errorf("interface %d has VLANs: %v", index, got)
		}
	}
	if members := membersOf(all, 5); len(members) != 2 || members[0].Attrs().Index != 2 {
		t.Errorf("members %v", members)
	}
}
