// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"encoding/binary"
	"fmt"
	"math"
	"net"

	"github.com/segue-lb/segue/internal/nexthop"
)

// Ports numbers the interfaces that packets leave by, from 1 to 255. A port never changes while
// a server's next hop names it: an interface that gets another address or MTU gets another
// port, and next hops follow one by one.
type Ports struct {
	directory *Directory // whose port 0 is never given out
	next      int
}

// Number returns the port of an interface as it is now. It is an error if next hops name all
// other ports.
func (p *Ports) Number(link nexthop.Link) (uint16, error) {
	port := describe(link)
	for i := 1; i < len(p.directory.Ports); i++ {
		if p.directory.Ports[i] == port {
			return uint16(i), nil
		}
	}
	i, err := p.unused()
	if err != nil {
		return 0, err
	}
	p.directory.Ports[i] = port
	return uint16(i), nil
}

// Ifindex returns the index of the interface that a port stands for.
func (p *Ports) Ifindex(number uint16) int { return int(p.directory.Ports[number].Ifindex) }

// unused finds a number that no next hop names, longest unused first.
func (p *Ports) unused() (int, error) {
	const most = len(p.directory.Ports) - 1
	var used [most + 1]bool
	for i := range p.directory.Servers {
		used[p.directory.Servers[i].NextHop>>48&0xff] = true
	}
	for range most {
		p.next = p.next%most + 1
		if !used[p.next] {
			return p.next, nil
		}
	}
	return 0, fmt.Errorf("servers are reached by more than %d interfaces", most)
}

// describe is an interface as the data path sees it.
func describe(link nexthop.Link) Port {
	return Port{
		Ifindex: uint32(link.Index),
		Mtu:     uint16(min(link.MTU, math.MaxUint16)),
		Mac:     macWord(link.MAC),
	}
}

// hairpins tells whether an interface sends by XDP_TX. A veth drops that unless its peer runs XDP, too.
func hairpins(link nexthop.Link) bool { return link.Type != "veth" }

// HardwareAddr returns the MAC address of the interface.
func (p Port) HardwareAddr() net.HardwareAddr {
	return binary.LittleEndian.AppendUint64(nil, p.Mac)[:6]
}

// CanTransmit tells whether the interface can send what XDP in a driver redirects to it.
func CanTransmit(link nexthop.Link) bool { return !cannotTransmit[link.Type] }

// cannotTransmit are the types of interfaces that have Ethernet addresses but no
// way to send what XDP in a driver redirects to them (ndo_xdp_xmit of Linux).
var cannotTransmit = map[string]bool{
	"bareudp": true, "batadv": true, "bridge": true, "dummy": true, "geneve": true, "gretap": true,
	"hsr": true, "ifb": true, "ip6gretap": true, "ipvlan": true, "ipvtap": true, "macsec": true,
	"macvlan": true, "macvtap": true, "netkit": true, "openvswitch": true, "team": true, "vlan": true,
	"vrf": true, "vxlan": true,
}
