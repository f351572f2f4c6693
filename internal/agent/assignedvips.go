// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
)

// assignedVIPs are the VIPs that agents put on the loopback interface, in the pinned map
// belongings: a later process takes away just that, and leaves what was there before.
type assignedVIPs struct {
	m *ebpf.Map
}

// assign puts the VIPs on the loopback interface that no interface has.
func (v assignedVIPs) assign(t *datapath.Takeover, vips map[netip.Addr]bool) error {
	if len(vips) == 0 {
		return nil
	}
	present, err := addresses()
	if err != nil {
		return err
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("interface lo: %w", err)
	}
	for vip := range vips {
		if present[vip] {
			continue
		}
		if err := v.add(t, lo, vip); err != nil {
			return err
		}
	}
	return nil
}

// add puts a VIP on the loopback interface. First comes the note: an address without a note would
// stay for ever. There is a note already if somebody else has removed the address.
func (v assignedVIPs) add(t *datapath.Takeover, lo netlink.Link, vip netip.Addr) error {
	err := v.m.Update(vip.As16(), uint32(lo.Attrs().Index), ebpf.UpdateNoExist)
	if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return fmt.Errorf("remember VIP %s: %w", vip, err)
	}
	if err == nil {
		t.OnUndo(func() error { return v.m.Delete(vip.As16()) })
	}
	if err := netlink.AddrAdd(lo, hostAddress(vip)); err != nil {
		return fmt.Errorf("add VIP %s to lo: %w", vip, err)
	}
	t.OnUndo(func() error { return netlink.AddrDel(lo, hostAddress(vip)) })
	return awaitLocal(vip)
}

// awaitLocal waits until the kernel takes packets to a new address: it adds the route of an IPv6
// address a moment later, and says until then that there is none.
func awaitLocal(vip netip.Addr) error {
	const patience, pause = time.Second, time.Millisecond
	for waited := time.Duration(0); waited < patience; waited += pause {
		if isLocal(vip) {
			return nil
		}
		time.Sleep(pause)
	}
	return fmt.Errorf("VIP %s on lo is not usable after %s; is lo up?", vip, patience)
}

// isLocal tells whether the kernel takes packets to the address as the host's own.
func isLocal(address netip.Addr) bool {
	routes, err := netlink.RouteGet(address.AsSlice())
	return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
}

// release takes the VIPs from the loopback interface that the agent put there, but for those to keep.
func (v assignedVIPs) release(keep map[netip.Addr]bool) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("interface lo: %w", err)
	}
	vips, err := v.vips()
	if err != nil {
		return err
	}
	for _, vip := range vips {
		if keep[vip] {
			continue
		}
		err := netlink.AddrDel(lo, hostAddress(vip))
		if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) { // someone else was faster
			return fmt.Errorf("remove VIP %s from lo: %w", vip, err)
		}
		if err := v.m.Delete(vip.As16()); err != nil {
			return fmt.Errorf("forget VIP %s: %w", vip, err)
		}
	}
	return nil
}

// vips are the addresses that the agent assigned.
func (v assignedVIPs) vips() (all []netip.Addr, err error) {
	var (
		vip address
		lo  uint32
	)
	entries := v.m.Iterate()
	for entries.Next(&vip, &lo) {
		all = append(all, netip.AddrFrom16(vip).Unmap())
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read the assigned VIPs: %w", err)
	}
	return all, nil
}

// addresses are all of the host.
func addresses() (map[netip.Addr]bool, error) {
	all, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list the addresses: %w", err)
	}
	present := map[netip.Addr]bool{}
	for _, a := range all {
		if addr, ok := netip.AddrFromSlice(a.IP); ok {
			present[addr.Unmap()] = true
		}
	}
	return present, nil
}

// hostAddress is the address alone, without a subnet; IPv6 takes it into use at once.
func hostAddress(vip netip.Addr) *netlink.Addr {
	bits := vip.BitLen()
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: vip.AsSlice(), Mask: net.CIDRMask(bits, bits)}}
	if vip.Is6() {
		addr.Flags = unix.IFA_F_NODAD
	}
	return addr
}
