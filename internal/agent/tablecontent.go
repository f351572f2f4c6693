// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// address is an IP address in the data path's tables. IPv4 addresses are in IPv4-mapped form.
type address = [16]byte

// The values of VIPs in the table vips.
const (
	absentVIP  = 0 // the VIP is not an address of the host
	presentVIP = 1
)

// tableContent is the intended content of the data path's tables, and the VIPs for the loopback
// interface.
type tableContent struct {
	locator      uint64 // the first 8 bytes, in memory order; 0: none
	balancers    map[agentLocatorPrefix]uint32
	vips         map[address]uint32         // absentVIP or presentVIP
	tunnels      map[address]uint32         // the host's addresses for gre and ipip
	segmentSizes map[agentServiceKey]uint32 // the largest MSS, in bytes
	acceptances  map[agentServiceKey]agentAcceptance
	ownIDs       map[agentServiceKey]agentQuicOwnIds
	labels       map[agentServiceKey]agentServiceLabel
	firstKeys    map[agentServiceKey]agentServiceKey // of services with several VIPs or ports
	signalMTU    uint32                              // the longest signal, in bytes of layer 3
	assigned     map[netip.Addr]bool                 // VIPs for the loopback interface
}

// newTableContent returns the content for a configuration. mtu is that of the path from the
// balancers, in bytes. All VIPs are taken for present.
func newTableContent(cfg *desired.Agent, mtu int) *tableContent {
	c := &tableContent{
		balancers:    balancersOf(&cfg.Node),
		vips:         map[address]uint32{},
		tunnels:      map[address]uint32{},
		segmentSizes: map[agentServiceKey]uint32{},
		acceptances:  map[agentServiceKey]agentAcceptance{},
		ownIDs:       ownIDsOf(cfg.Services),
		labels:       map[agentServiceKey]agentServiceLabel{},
		firstKeys:    map[agentServiceKey]agentServiceKey{},
		signalMTU:    uint32(mtu),
		assigned:     map[netip.Addr]bool{},
	}
	if cfg.Node.Locator.IsValid() {
		locator := cfg.Node.Locator.Addr().As16()
		c.locator = binary.NativeEndian.Uint64(locator[:])
	}
	for _, a := range cfg.Node.Addresses {
		c.tunnels[a.As16()] = 1
	}
	for _, s := range cfg.Services {
		for _, vip := range s.AllVIPs() {
			c.vips[vip.As16()] = presentVIP
			if cfg.Node.AssignsVIPs() {
				c.assigned[vip] = true
			}
		}
		c.labels[serviceKey(s)] = labelOf(s.Name)
		for _, key := range serviceKeys(s) {
			if s.Protocol == desired.TCP { // only TCP has an MSS
				isIPv4 := addressOf(key).Addr().Is4()
				c.segmentSizes[key] = uint32(segmentSize(s, isIPv4, &cfg.Node, mtu))
			}
			if key != serviceKey(s) {
				c.firstKeys[key] = serviceKey(s)
			}
		}
		if s.Accept.Policy != "" { // the service can be offered connections
			c.acceptances[serviceKey(s)] = newAcceptance(s)
		}
	}
	return c
}

// balancersOf returns the locators of the balancers that may send functions about flows. If the
// configuration names none, all balancers may.
func balancersOf(node *desired.AgentNode) map[agentLocatorPrefix]uint32 {
	all := map[agentLocatorPrefix]uint32{}
	for _, prefix := range node.Balancers {
		address := prefix.Addr().As16()
		all[agentLocatorPrefix{Length: uint32(prefix.Bits()), Locator: [8]byte(address[:8])}] = 1
	}
	return all
}

// serviceKey returns the key of a service in the data path's tables, which is that of its first VIP
// and port.
func serviceKey(s desired.AgentService) agentServiceKey { return keyOf(s.VIP, s.Port, s.Protocol) }

// serviceKeys returns the keys by which packets find a service: one for each VIP and port.
func serviceKeys(s desired.AgentService) (keys []agentServiceKey) {
	for _, vip := range s.AllVIPs() {
		for _, port := range s.AllPorts() {
			keys = append(keys, keyOf(vip, port, s.Protocol))
		}
	}
	return keys
}

func keyOf(vip netip.Addr, port desired.Port, protocol desired.Protocol) agentServiceKey {
	key := agentServiceKey{Protocol: protocol.Number(), Port: networkOrder(port.Number())}
	key.Vip.In6U.U6Addr8 = vip.As16()
	return key
}

// firstKey returns the key under which the tables have the service that packets find by a key. It
// differs from that key only if the service has several VIPs or ports.
func firstKey(firstKeys *ebpf.Map, key agentServiceKey) (first agentServiceKey, err error) {
	known, err := find(firstKeys, key, &first)
	if !known || err != nil {
		return key, err
	}
	return first, nil
}

// addressOf returns the VIP and the port of a service. Port 0 stands for all ports.
func addressOf(key agentServiceKey) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(key.Vip.In6U.U6Addr8).Unmap(), networkOrder(key.Port))
}

// labelOf returns a service's name in the form of the data path.
func labelOf(name string) (label agentServiceLabel) {
	copy(label.Name[:], name) // at most 63 bytes
	return label
}

const (
	ipv4Header = 20
	ipv6Header = 40
	tcpHeader  = 20
)

// segmentSize returns the largest MSS of a service at an IPv4 or IPv6 VIP, in bytes, whose segments
// still fit the path from the balancers. It is the MTU, less the encapsulation with one SRv6 segment
// and the underlay, less the IP and TCP headers without options (RFC 9293 section 3.7.1, RFC 6691).
func segmentSize(s desired.AgentService, isIPv4 bool, node *desired.AgentNode, mtu int) int {
	ip := ipv6Header
	if isIPv4 {
		ip = ipv4Header
	}
	return mtu - node.Overhead(s.Encapsulation) - ip - tcpHeader
}

// write writes the content to the tables.
func (k *kernel) write(c *tableContent) error {
	return datapath.TakeOver(k.log, func(t *datapath.Takeover) error { return k.fill(t, c) })
}

// fill writes the content to the tables, as a step of a takeover. If the takeover fails, it undoes
// the changes of the tables that the previous process also uses.
func (k *kernel) fill(t *datapath.Takeover, c *tableContent) error {
	if err := k.objects.NodeLocator.Set(c.locator); err != nil {
		return fmt.Errorf("set the locator: %w", err)
	}
	if err := k.objects.SignalMtu.Set(c.signalMTU); err != nil {
		return fmt.Errorf("set the longest packet: %w", err)
	}
	return errors.Join(
		k.writeBalancers(c.balancers),
		datapath.Replace(k.objects.Vips, c.vips),
		k.writeVIPLines(c.vips),
		datapath.Replace(k.objects.TunnelAddresses, c.tunnels),
		datapath.Replace(k.objects.SegmentSizes, c.segmentSizes),
		datapath.Keep(k.objects.Listeners, c.segmentSizes), // both are for all TCP services
		k.writeAcceptances(t, c.acceptances),
		k.writeOwnIDs(t, c.ownIDs),
		k.writeFirstKeys(c.firstKeys),
		datapath.Replace(k.objects.ServiceNames, c.labels),
	)
}

// writeFirstKeys writes the keys of services with several VIPs or ports.
func (k *kernel) writeFirstKeys(want map[agentServiceKey]agentServiceKey) error {
	if err := datapath.Replace(k.objects.FirstKeys, want); err != nil {
		return err
	}
	has := uint32(0)
	if len(want) > 0 {
		has = 1
	}
	if err := k.objects.HasFirstKeys.Set(has); err != nil {
		return fmt.Errorf("set whether services have several VIPs or ports: %w", err)
	}
	return nil
}

// writeBalancers writes the locators of the balancers that may send functions about flows. A
// balancer that may do so before and after the change may also do so during the change.
func (k *kernel) writeBalancers(want map[agentLocatorPrefix]uint32) error {
	setNamed := func(named uint32) error {
		if err := k.objects.BalancersAreNamed.Set(named); err != nil {
			return fmt.Errorf("set whether balancers are named: %w", err)
		}
		return nil
	}
	// If all balancers may send functions, permit this before their locators are removed. Otherwise
	// write the locators of the permitted balancers before the others are refused.
	if len(want) == 0 {
		return errors.Join(setNamed(0), datapath.Replace(k.objects.Balancers, want))
	}
	if err := datapath.Replace(k.objects.Balancers, want); err != nil {
		return err
	}
	return setNamed(1)
}
