// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"
	"net/netip"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/nexthop"
)

// SetHost describes the interface to the programs on it: which frames are for this host, and how
// frames are sent back. SetHost returns an error if a variable cannot be written.
func (s *Side) SetHost(link nexthop.Link) error {
	hairpin := uint32(0)
	if hairpins(link) {
		hairpin = uint32(link.Index)
	}
	if err := s.Objects.HostHairpin.Set(hairpin); err != nil {
		return fmt.Errorf("set how frames go back: %w", err)
	}
	if err := s.Objects.HostMac.Set(macWord(link.MAC)); err != nil {
		return fmt.Errorf("set the interface's address: %w", err)
	}
	return nil
}

// SetHost describes the interfaces to the programs on them. The links are those of the sides, in
// the order of Sides. Packets from servers to clients leave through the first link. SetHost returns
// an error if a variable cannot be written.
func (p *Plane) SetHost(links []nexthop.Link) error {
	for i, side := range p.Sides {
		if err := side.Objects.HostClientInterface.Set(uint32(links[0].Index)); err != nil {
			return fmt.Errorf("set which interface leads to clients: %w", err)
		}
		if err := side.SetHost(links[i]); err != nil {
			return err
		}
	}
	return nil
}

// SetOwnAddresses sets the addresses of the host: packets of servers to them are delivered here.
// SetOwnAddresses returns an error if the table has no room for all of them, or cannot be written.
func (p *Plane) SetOwnAddresses(addresses []netip.Addr) error {
	own := make(map[balancerIn6Addr]uint8, len(addresses))
	for _, address := range addresses {
		own[in6(address)] = 1
	}
	return datapath.Replace(p.Objects.OwnAddresses, own)
}
