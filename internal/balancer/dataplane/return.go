// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/segue-lb/segue/internal/datapath"
)

// SetOwnAddresses sets the addresses of the host: packets of servers to them are delivered here.
// SetOwnAddresses returns an error if the table has no room for all of them, or cannot be written.
func (p *Plane) SetOwnAddresses(addresses []netip.Addr) error {
	own := make(map[balancerIn6Addr]uint8, len(addresses))
	for _, address := range addresses {
		own[in6(address)] = 1
	}
	return datapath.Replace(p.Objects.OwnAddresses, own)
}

// detachReturn removes the tc_return programs of an instance from their interfaces. It finds
// filters only in the network namespace of the calling thread, which must be that of the XDP links.
func detachReturn(instance string) error {
	isPinned := func(pin string) bool {
		_, err := os.Stat(filepath.Join(datapath.Dir(instance), pin))
		return err == nil
	}
	if slices.ContainsFunc(returnPins(), isPinned) {
		return datapath.DetachLinks(instance, returnPins()...)
	}
	if err := datapath.CheckNamespace(instance, xdpPins()...); err != nil {
		return err
	}
	return datapath.RemoveFilters(instance)
}
