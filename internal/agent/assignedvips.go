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

// assignedVIPs manages the VIPs that agents have put on the loopback interface. The pinned map
// belongings lists these VIPs. So a later process can remove them, and leaves addresses that the
// host had before.
type assignedVIPs struct {
	m *ebpf.Map
}

// assign puts each VIP that is not an address of any interface on the loopback interface.
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

// add puts a VIP on the loopback interface. It writes the map first, because an address that is not
// in the map would never be removed. The map has the VIP already if somebody else has removed the
// address.
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

// awaitLocal waits until the kernel delivers packets to a new address. For an IPv6 address, the
// kernel adds the local route shortly after the address, and reports no route until then.
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

// isLocal tells whether the kernel delivers packets for the address to this host.
func isLocal(address netip.Addr) bool {
	routes, err := netlink.RouteGet(address.AsSlice())
	return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
}

// release removes the VIPs that agents have put on the loopback interface, except those in keep.
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
		isGone := errors.Is(err, unix.EADDRNOTAVAIL) // somebody else has removed it
		if err != nil && !isGone {
			return fmt.Errorf("remove VIP %s from lo: %w", vip, err)
		}
		if err := v.m.Delete(vip.As16()); err != nil {
			return fmt.Errorf("forget VIP %s: %w", vip, err)
		}
	}
	return nil
}

// vips returns the addresses that agents have assigned.
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

// addresses returns all addresses of the host.
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

// hostAddress returns a VIP in the form of netlink: a /32 or /128. For IPv6, the kernel is not to
// look for duplicates of the address, so that it is usable at once.
func hostAddress(vip netip.Addr) *netlink.Addr {
	bits := vip.BitLen()
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: vip.AsSlice(), Mask: net.CIDRMask(bits, bits)}}
	if vip.Is6() {
		addr.Flags = unix.IFA_F_NODAD
	}
	return addr
}
