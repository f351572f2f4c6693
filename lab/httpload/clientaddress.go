// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// mostInPrefix is the largest number of addresses that a prefix of client addresses can have.
const mostInPrefix = 1024

// ParseClients reads client addresses. Each text is an address of this host, or a prefix, which
// stands for all addresses of this host in the prefix. An address is one of this host if it has a
// local route. So one route makes many addresses: "ip route add local 2001:db8:c::100/120 dev lo".
// All addresses must be of one family.
func ParseClients(texts []string) (addresses []netip.Addr, err error) {
	for _, text := range texts {
		found, err := parseClient(text)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", text, err)
		}
		addresses = append(addresses, found...)
	}
	for _, a := range addresses {
		if a.Is4() != addresses[0].Is4() {
			return nil, fmt.Errorf("%s and %s: must all be IPv4, or all IPv6", addresses[0], a)
		}
	}
	return addresses, nil
}

func parseClient(text string) ([]netip.Addr, error) {
	if address, err := netip.ParseAddr(text); err == nil && address.Zone() == "" {
		address = address.Unmap()
		if !isLocal(address) {
			return nil, errors.New("is not an address of this host")
		}
		return []netip.Addr{address}, nil
	}
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		return nil, errors.New("must be an address or a prefix, such as 2001:db8:c::100/120")
	}
	const mostBits = 30 // more would overflow; 30 are too many already
	if 1<<min(prefix.Addr().BitLen()-prefix.Bits(), mostBits) > mostInPrefix {
		return nil, fmt.Errorf("must have at most %d addresses", mostInPrefix)
	}
	var local []netip.Addr
	for a := prefix.Masked().Addr(); prefix.Contains(a); a = a.Next() {
		if isLocal(a) {
			local = append(local, a)
		}
	}
	if len(local) == 0 {
		return nil, fmt.Errorf("this host has no address in the prefix; "+
			"\"ip route add local %s dev lo\" adds all of them", prefix.Masked())
	}
	return local, nil
}

// isLocal tells whether the route to an address is a local one, so that the address belongs to this
// host.
func isLocal(address netip.Addr) bool {
	routes, err := netlink.RouteGet(net.IP(address.AsSlice()))
	return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
}
