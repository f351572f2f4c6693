// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/internal/testhost"
)

// The offloads that hide tags, by the side on which they are.
var (
	received = []string{"rx-vlan-hw-parse", "rx-vlan-stag-hw-parse"}
	sent     = []string{"tx-vlan-hw-insert", "tx-vlan-stag-hw-insert"}
)

// newNamed makes a network namespace with a name of iproute2.
func newNamed(t *testing.T) (n *netdev.Namespace, path string) {
	t.Helper()
	testhost.NeedNamespaces(t)
	name := fmt.Sprintf("segue-test-%d-%s", os.Getpid(), strings.ToLower(t.Name()))
	path = filepath.Join("/run/netns", name)
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends in the new namespace
		handle, err := netns.NewNamed(name)
		if err == nil {
			err = handle.Close()
		}
		made <- err
	}()
	testhost.Must(t, <-made)
	t.Cleanup(func() { testhost.Must(t, netns.DeleteNamed(name)) })
	n, err := netdev.OpenNamespace(path)
	testhost.Must(t, err)
	t.Cleanup(func() { _ = n.Close() })
	return n, path
}

// indexOf returns the number of an interface in a namespace.
func indexOf(t *testing.T, n *netdev.Namespace, name string) (index int) {
	t.Helper()
	testhost.Must(t, n.Do(func() error {
		link, err := netlink.LinkByName(name)
		if err == nil {
			index = link.Attrs().Index
		}
		return err
	}))
	return index
}

// requireShown requires that ShowVLANTags changes exactly the given interfaces, and that no tags
// are hidden then.
func requireShown(t *testing.T, n *netdev.Namespace, index int, want ...string) {
	t.Helper()
	testhost.Must(t, n.Do(func() error {
		if err := HiddenVLANTags(index); (err != nil) != (len(want) > 0) {
			t.Errorf("before: error %v", err)
		}
		changed, err := ShowVLANTags(index)
		if diff := cmp.Diff(want, changed); diff != "" || err != nil {
			t.Errorf("error %v; -want +got:\n%s", err, diff)
		}
		if err := HiddenVLANTags(index); err != nil {
			t.Errorf("after: error %v", err)
		}
		return nil
	}))
}

// The other end of a veth is found in a namespace with a name, and in the same namespace. Its
// offloads are switched off, once, and again when somebody has switched them on. Other offloads,
// and this end, stay as they are.
func TestOtherEndOfVeth(t *testing.T) {
	t.Parallel()
	here := testhost.NewNamespace(t)
	there, path := newNamed(t)
	for _, c := range []struct {
		name, end, far string
		of             *netdev.Namespace
		described      string
	}{
		{"another namespace", "eth0", "port", there, "port (the other end of eth0, in " + path + ")"},
		{"the same namespace", "eth1", "end", here, "end (the other end of eth1)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			testhost.Connect(t, here, c.end, nil, c.of, c.far, nil)
			index := indexOf(t, here, c.end)
			requireShown(t, here, index, c.described)
			requireShown(t, here, index)
			for _, o := range sent {
				testhost.Must(t, c.of.Do(func() error { return netdev.SetOffloads(c.far, true, o) }))
				requireShown(t, here, index, c.described)
			}
			testhost.Must(t, c.of.Do(func() error {
				on, err := netdev.ActiveOffloads(c.far, slices.Concat(received, []string{netdev.GSO})...)
				if err != nil || len(on) != 3 {
					t.Errorf("%s: other offloads that are on: %v, error %v", c.far, on, err)
				}
				return nil
			}))
			testhost.Must(t, here.Do(func() error {
				if on, err := netdev.ActiveOffloads(c.end, slices.Concat(received, sent)...); err != nil || len(on) != 4 {
					t.Errorf("%s: offloads that are on: %v, error %v", c.end, on, err)
				}
				return nil
			}))
		})
	}
}

// An other end in a namespace that cannot be found is an error. It names the interface, the reason
// and the command. If the other end has no path, the offload there stays on.
func TestOtherEndIsOutOfReach(t *testing.T) {
	t.Parallel()
	a, b := testhost.NewNamespace(t), testhost.NewNamespace(t)
	testhost.Connect(t, a, "eth0", nil, b, "port", nil)
	index := indexOf(t, a, "eth0")
	testhost.Must(t, a.Do(func() error {
		changed, err := ShowVLANTags(index)
		for _, err := range []error{err, HiddenVLANTags(index)} {
			if !errors.Is(err, ErrHiddenTags) {
				t.Errorf("error %v", err)
				continue
			}
			for _, part := range []string{
				" eth0: ", "not found in /run/netns or at process 1", "ethtool -K NAME txvlan off tx-vlan-stag-hw-insert off",
				fmt.Sprintf("interface %d there", indexOf(t, b, "port")),
			} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("the error does not have %q: %v", part, err)
				}
			}
		}
		if len(changed) > 0 {
			t.Errorf("changed %v", changed)
		}
		return nil
	}))
}

// A process without capabilities may not open the namespace of the first process. The error
// says so.
func TestOtherEndMayBeForbidden(t *testing.T) {
	t.Parallel()
	a, b := testhost.NewNamespace(t), testhost.NewNamespace(t)
	testhost.Connect(t, a, "eth0", nil, b, "port", nil)
	index := indexOf(t, a, "eth0")
	testhost.Must(t, a.Do(func() error { // on a thread that ends afterwards
		var none [2]unix.CapUserData
		if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &none[0]); err != nil {
			return err
		}
		err := HiddenVLANTags(index)
		if !errors.Is(err, ErrHiddenTags) || !errors.Is(err, os.ErrPermission) {
			t.Errorf("error %v", err)
		}
		return nil
	}))
}

// The offloads of a network card hide the tags that the card itself receives. Such offloads are
// switched off.
func TestReceiver(t *testing.T) {
	t.Parallel()
	a, b := testhost.NewNamespace(t), testhost.NewNamespace(t)
	testhost.Connect(t, a, "eth0", nil, b, "eth0", nil)
	card := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}} // as if the veth were a card
	testhost.Must(t, a.Do(func() error {
		visits := 0
		for range 2 {
			err := visitHider(card, func(h hider) error {
				visits++
				if diff := cmp.Diff(hider{name: "eth0", offloads: received}, h, cmp.AllowUnexported(hider{})); diff != "" {
					t.Errorf("-want +got:\n%s", diff)
				}
				return netdev.SetOffloads(h.name, false, h.offloads...)
			})
			if err != nil {
				return err
			}
		}
		if visits != 1 {
			t.Errorf("%d visits, want 1: the first visit switches the offloads off", visits)
		}
		return nil
	}))
}

// The error about a bond names each member that hides tags, and no other.
func TestHiddenTagsOfMembers(t *testing.T) {
	t.Parallel()
	a, b := testhost.NewNamespace(t), testhost.NewNamespace(t)
	var members []netlink.Link
	for _, name := range []string{"eth0", "eth1", "eth2"} {
		testhost.Connect(t, a, name, nil, b, name, nil)
		members = append(members, &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: name}}) // as if it were a card
	}
	testhost.Must(t, a.Do(func() error {
		if err := netdev.SetOffloads("eth1", false, received...); err != nil {
			return err
		}
		err := visitHidersOf(members, func(h hider) error { return errors.New(h.name + " stays") })
		const want = "XDP may not see the VLAN tags of the interface eth0: eth0 stays; of eth2: eth2 stays"
		if !errors.Is(err, ErrHiddenTags) || err.Error() != want {
			t.Errorf("error %v, want %s", err, want)
		}
		return nil
	}))
}

// XDP in generic mode cannot see the tags of an interface above others. For a bond with native XDP,
// its members are visited instead.
func TestUpperInterfaces(t *testing.T) {
	t.Parallel()
	generic := netlink.LinkAttrs{Name: "up", Xdp: &netlink.LinkXdp{AttachMode: nl.XDP_ATTACHED_SKB}}
	never := func(hider) error { return errors.New("visited") }
	for _, upper := range []netlink.Link{
		&netlink.Bond{LinkAttrs: generic}, &netlink.Bridge{LinkAttrs: generic}, &netlink.Macvlan{LinkAttrs: generic},
	} {
		if err := visitHider(upper, never); err == nil || !strings.Contains(err.Error(), "below a "+upper.Type()) {
			t.Errorf("%s: error %v", upper.Type(), err)
		}
	}
	device := func(index, master int) netlink.Link {
		return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index, MasterIndex: master}}
	}
	all := []netlink.Link{device(1, 0), device(2, 5), device(3, 5), device(5, 0)}
	if members := membersOf(all, 5); len(members) != 2 || members[0].Attrs().Index != 2 {
		t.Errorf("members %v", members)
	}
}
