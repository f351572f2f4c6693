package balancer

import (
	"fmt"
	"math"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/nexthop"
)

// ports numbers the interfaces that packets leave by. An entry never changes
// while a server's next hop names it: when an interface gets another address or
// MTU, it gets another number, and next hops follow one by one.
type ports struct {
	kernel *kernel
	known  [256]balancerPort // 0 is never given out
	next   int
}

// loadPorts reads the numbers that servers may still use.
func loadPorts(k *kernel) (*ports, error) {
	p := &ports{kernel: k}
	for i := range p.known {
		if err := k.objects.Ports.Lookup(uint32(i), &p.known[i]); err != nil {
			return nil, fmt.Errorf("read port %d: %w", i, err)
		}
	}
	return p, nil
}

// number returns the port of an interface as it is now.
func (p *ports) number(hop nexthop.Hop) (uint16, error) {
	port, err := describe(hop.Ifindex)
	if err != nil {
		return 0, err
	}
	for i := 1; i < len(p.known); i++ {
		if p.known[i] == port {
			return uint16(i), nil
		}
	}
	i, err := p.unused()
	if err != nil {
		return 0, err
	}
	if err := p.kernel.objects.Ports.Put(uint32(i), &port); err != nil {
		return 0, fmt.Errorf("write port %d: %w", i, err)
	}
	p.known[i] = port
	return uint16(i), nil
}

// unused finds a number that no next hop names, longest unused first.
func (p *ports) unused() (int, error) {
	var used [len(p.known)]bool
	for _, server := range p.kernel.servers.servers {
		used[server.NextHop>>48&0xff] = true
	}
	for range p.known {
		p.next = p.next%(len(p.known)-1) + 1
		if !used[p.next] {
			return p.next, nil
		}
	}
	return 0, fmt.Errorf("servers are reached by more than %d interfaces", len(p.known)-1)
}

// describe reads an interface's properties.
func describe(ifindex int) (balancerPort, error) {
	link, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return balancerPort{}, fmt.Errorf("interface %d: %w", ifindex, err)
	}
	attrs := link.Attrs()
	if len(attrs.HardwareAddr) != 6 {
		return balancerPort{}, fmt.Errorf("interface %s has no Ethernet address", attrs.Name)
	}
	port := balancerPort{
		Ifindex: uint32(ifindex),
		Mtu:     uint16(min(attrs.MTU, math.MaxUint16)),
		Mac:     [6]uint8(attrs.HardwareAddr),
		Hairpin: 1,
	}
	// A veth drops what XDP_TX sends unless its peer runs XDP, too.
	if link.Type() == "veth" {
		port.Hairpin = 0
	}
	return port, nil
}
