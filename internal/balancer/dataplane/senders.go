// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// SetLocator sets the locator whose SIDs belong to this host. An invalid prefix means that the host
// has no locator. SetLocator returns an error if a variable cannot be written.
func (p *Plane) SetLocator(locator netip.Prefix) error {
	for _, side := range p.Sides {
		if err := side.Objects.NodeLocator.Set(locatorWord(locator.Addr())); err != nil {
			return fmt.Errorf("set the locator: %w", err)
		}
	}
	return nil
}

// locatorWord returns the first half of an IPv6 address in memory order. For all other addresses it
// returns 0.
func locatorWord(address netip.Addr) uint64 {
	if !address.Is6() || address.Is4In6() {
		return 0
	}
	b := address.As16()
	return binary.NativeEndian.Uint64(b[:])
}

// SetDomain sets the locators that belong to the segment routing domain: those of the balancer and
// of all servers. For a balancer within the domain it sets none, because such a balancer does not
// guard the domain. SetDomain returns an error if the table cannot be written.
func (p *Plane) SetDomain(cfg *desired.Balancer) error {
	domain := map[uint64]uint32{}
	if !cfg.Node.IsInternal() {
		domain[locatorWord(cfg.Node.Locator.Addr())] = 1
		for _, service := range cfg.Services {
			for _, server := range service.Servers {
				domain[locatorWord(server.Locator.Addr())] = 1
			}
		}
		delete(domain, 0) // of servers or balancers without a locator
	}
	return datapath.Replace(p.Objects.Locators, domain)
}

// addSender permits the slot's server to send signals, if the server has a locator.
func (p *Plane) addSender(slot uint32) error {
	key := p.senderOf(slot)
	if key.Locator == 0 {
		return nil
	}
	if err := p.Objects.Senders.Put(&key, slot); err != nil {
		return fmt.Errorf("let the server of slot %d signal: %w", slot, err)
	}
	return nil
}

// removeSender forbids the slot's server to send signals. It does nothing if another slot has the
// server by now.
func (p *Plane) removeSender(slot uint32) error {
	key := p.senderOf(slot)
	var holder uint32
	err := p.Objects.Senders.Lookup(&key, &holder)
	if err == nil && holder == slot {
		err = p.Objects.Senders.Delete(&key)
	}
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("let the server of slot %d signal no more: %w", slot, err)
	}
	return nil
}

// senderOf returns the key of the slot's server in the table of senders.
func (p *Plane) senderOf(slot uint32) balancerSender {
	server := &p.Servers.servers[slot]
	return balancerSender{Locator: locatorWord(addrOf(server.Address)), Service: server.Service}
}
