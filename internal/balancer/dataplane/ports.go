// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"encoding/binary"
	"fmt"
	"math"
	"net"

	"github.com/segue-lb/segue/internal/nexthop"
)

// Ports numbers the interfaces through which packets leave, from 1 to 255. A port does not change
// while a server's next hop names it. If an interface gets another MAC address or MTU, it gets
// another port, and the next hops change to this port one by one.
type Ports struct {
	directory *Directory // its port 0 is not used
	last      int        // the port that unused has returned last
}

// Number returns the port of an interface with its present index, MTU and MAC address. It returns
// an error if the interface has no port and next hops use all 255.
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

// Ifindex returns the index of a port's interface.
func (p *Ports) Ifindex(number uint16) int { return int(p.directory.Ports[number].Ifindex) }

// unused returns a port that no next hop names. Among several, it returns the one that was given
// out longest ago.
func (p *Ports) unused() (int, error) {
	const most = len(p.directory.Ports) - 1
	var used [most + 1]bool
	for i := range p.directory.Servers {
		used[p.directory.Servers[i].NextHop>>48&0xff] = true
	}
	for range most {
		p.last = p.last%most + 1
		if !used[p.last] {
			return p.last, nil
		}
	}
	return 0, fmt.Errorf("servers are reached by more than %d interfaces", most)
}

// describe returns the description of an interface for the data path.
func describe(link nexthop.Link) Port {
	return Port{
		Ifindex: uint32(link.Index),
		Mtu:     uint16(min(link.MTU, math.MaxUint16)),
		Mac:     macWord(link.MAC),
	}
}

// hairpins tells whether an interface can send by XDP_TX. A veth interface drops such packets
// unless its peer runs XDP as well.
func hairpins(link nexthop.Link) bool { return link.Type != "veth" }

// HardwareAddr returns the MAC address of the interface.
func (p Port) HardwareAddr() net.HardwareAddr {
	return binary.LittleEndian.AppendUint64(nil, p.Mac)[:6]
}

// CanTransmit tells whether the interface can send packets that XDP in a driver redirects to it.
func CanTransmit(link nexthop.Link) bool { return !cannotTransmit[link.Type] }

// cannotTransmit lists the types of interfaces that have Ethernet addresses but no function to send
// packets that XDP in a driver redirects to them (ndo_xdp_xmit of Linux).
var cannotTransmit = map[string]bool{
	"bareudp": true, "batadv": true, "bridge": true, "dummy": true, "geneve": true, "gretap": true,
	"hsr": true, "ifb": true, "ip6gretap": true, "ipvlan": true, "ipvtap": true, "macsec": true,
	"macvlan": true, "macvtap": true, "netkit": true, "openvswitch": true, "team": true, "vlan": true,
	"vrf": true, "vxlan": true,
}
