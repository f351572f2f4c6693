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
)

// belongings are what the agent put on the host, in a pinned map: a later process takes away just
// that, and leaves what was there before.
type belongings struct {
	m *ebpf.Map
}

// assign puts the VIPs on the loopback interface that no interface has.
func (b belongings) assign(vips map[netip.Addr]bool) error {
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
		// First the note: an address without one would stay for ever.
		if err := b.m.Put(vip.As16(), uint32(lo.Attrs().Index)); err != nil {
			return fmt.Errorf("remember VIP %s: %w", vip, err)
		}
		if err := netlink.AddrAdd(lo, hostAddress(vip)); err != nil {
			return fmt.Errorf("add VIP %s to lo: %w", vip, err)
		}
		if err := awaitLocal(vip); err != nil {
			return err
		}
	}
	return nil
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
func (b belongings) release(keep map[netip.Addr]bool) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("interface lo: %w", err)
	}
	vips, err := b.vips()
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
		if err := b.m.Delete(vip.As16()); err != nil {
			return fmt.Errorf("forget VIP %s: %w", vip, err)
		}
	}
	return nil
}

// vips are the addresses that the agent assigned.
func (b belongings) vips() (all []netip.Addr, err error) {
	var (
		vip address
		lo  uint32
	)
	entries := b.m.Iterate()
	for entries.Next(&vip, &lo) {
		all = append(all, netip.AddrFrom16(vip).Unmap())
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read the belongings: %w", err)
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
