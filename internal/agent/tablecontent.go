// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
)

// address is a key of the data path's tables: IPv4 in its IPv4-mapped form.
type address = [16]byte

// tableContent is what the data path's tables and the loopback interface should hold.
type tableContent struct {
	locator      uint64 // the first half, in memory order; 0 for none
	balancers    map[agentLocatorPrefix]uint32
	vips         map[address]uint32
	tunnels      map[address]uint32
	segmentSizes map[agentServiceKey]uint32
	acceptances  map[agentServiceKey]agentAcceptance
	labels       map[agentServiceKey]agentServiceLabel
	signalMTU    uint32 // bytes of layer 3
	assigned     map[netip.Addr]bool
}

// newTableContent is the content for packets of at most mtu bytes on the way from the balancers.
func newTableContent(cfg *config.Agent, mtu int) *tableContent {
	c := &tableContent{
		balancers:    balancersOf(&cfg.Node),
		vips:         map[address]uint32{},
		tunnels:      map[address]uint32{},
		segmentSizes: map[agentServiceKey]uint32{},
		acceptances:  map[agentServiceKey]agentAcceptance{},
		labels:       map[agentServiceKey]agentServiceLabel{},
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
		c.vips[s.VIP.As16()] = 1
		c.labels[serviceKey(s)] = labelOf(s.Name)
		if cfg.Node.AssignsVIPs() {
			c.assigned[s.VIP] = true
		}
		if s.Protocol == config.TCP {
			c.segmentSizes[serviceKey(s)] = uint32(segmentSize(s, cfg.Node.Addresses, mtu))
		}
		if s.Accept.Policy != "" {
			c.acceptances[serviceKey(s)] = newAcceptance(s)
		}
	}
	return c
}

// balancersOf are the locators of those that may ask about connections.
func balancersOf(node *config.AgentNode) map[agentLocatorPrefix]uint32 {
	all := map[agentLocatorPrefix]uint32{}
	for _, prefix := range node.Balancers {
		address := prefix.Addr().As16()
		all[agentLocatorPrefix{Length: uint32(prefix.Bits()), Locator: [8]byte(address[:8])}] = 1
	}
	return all
}

func serviceKey(s config.AgentService) agentServiceKey {
	key := agentServiceKey{Protocol: unix.IPPROTO_TCP, Port: networkOrder(uint16(s.Port))}
	if s.Protocol == config.UDP {
		key.Protocol = unix.IPPROTO_UDP
	}
	key.Vip.In6U.U6Addr8 = s.VIP.As16()
	return key
}

func labelOf(name string) (label agentServiceLabel) {
	copy(label.Name[:], name) // of 63 bytes at most
	return label
}

const (
	ipv4Header = 20
	ipv6Header = 40
	tcpHeader  = 20
)

// segmentSize is the largest MSS whose segments still fit the way from the balancers: what the
// encapsulation by one segment and the headers without options leave of the MTU (RFC 9293 section
// 3.7.1, RFC 6691).
func segmentSize(s config.AgentService, tunnels []netip.Addr, mtu int) int {
	ip := ipv6Header
	if s.VIP.Is4() {
		ip = ipv4Header
	}
	return mtu - overhead(s.Encapsulation, tunnels) - ip - tcpHeader
}

// overhead is how many bytes an encapsulation adds; docs/protocol.md. The balancer may reach a tunnel
// by any of its addresses, so an IPv6 one makes the outer header an IPv6 header.
func overhead(kind config.Encapsulation, tunnels []netip.Addr) int {
	outer := ipv4Header
	for _, a := range tunnels {
		if a.Is6() {
			outer = ipv6Header
		}
	}
	switch kind {
	case config.SRv6Insert:
		return 8 + 3*16 // the balancer, the server and the VIP
	case config.SRv6Encap:
		return ipv6Header
	case config.GRE:
		return outer + 4
	default:
		return outer
	}
}

// write makes the tables hold the content.
func (k *kernel) write(c *tableContent) error {
	return datapath.TakeOver(k.log, func(t *datapath.Takeover) error { return k.fill(t, c) })
}

// fill is write as a step of a takeover, which can undo what it does to the tables that the process
// before uses, too.
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
		datapath.Replace(k.objects.TunnelAddresses, c.tunnels),
		datapath.Replace(k.objects.SegmentSizes, c.segmentSizes),
		k.writeAcceptances(t, c.acceptances),
		datapath.Replace(k.objects.ServiceNames, c.labels),
	)
}

// writeBalancers names those that may ask about connections; where there are none all may. Those that may before and
// after do so all the time.
func (k *kernel) writeBalancers(want map[agentLocatorPrefix]uint32) error {
	name := func(named uint32) error {
		if err := k.objects.BalancersAreNamed.Set(named); err != nil {
			return fmt.Errorf("set whether balancers are named: %w", err)
		}
		return nil
	}
	if len(want) == 0 {
		return errors.Join(name(0), datapath.Replace(k.objects.Balancers, want))
	}
	if err := datapath.Replace(k.objects.Balancers, want); err != nil {
		return err
	}
	return name(1)
}
