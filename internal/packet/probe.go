// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"net/netip"

	"github.com/gopacket/gopacket/layers"

	"github.com/segue-lb/segue/internal/srv6"
)

// dummyIPv4 is the source address of IPv4 packets from hosts without an IPv4 address (RFC 7600).
var dummyIPv4 = netip.AddrFrom4([4]byte{192, 0, 0, 8})

// Probe returns the frame of a probe about a VIP, before the balancer encapsulates it for a server.
// sender is the balancer's address, which is the source if the VIP is an IPv6 address. For an IPv4
// VIP, the source is dummyIPv4. The token is in host byte order, because only the balancer reads
// it.
func Probe(sender, vip netip.Addr, token uint64, options ...Option) []byte {
	return probe(sender, vip, binary.NativeEndian.AppendUint64(nil, token), options)
}

// ServiceProbe returns the frame of a probe about a service, as Probe does about a VIP. Port 0
// stands for all ports of the VIP.
func ServiceProbe(
	sender netip.Addr, service netip.AddrPort, protocol uint8, token uint64, options ...Option,
) []byte {
	request := binary.NativeEndian.AppendUint64(nil, token)
	request = binary.BigEndian.AppendUint16(request, service.Port())
	request = append(request, protocol, 0, 0, 0, 0, 0) // five reserved bytes
	return probe(sender, service.Addr(), request, options)
}

// probe returns the frame of a probe with this payload.
func probe(sender, vip netip.Addr, request []byte, options []Option) []byte {
	if vip.Is4() {
		sender = dummyIPv4
	}
	s := newSpec(sender, vip, layers.IPProtocolNoNextHeader, append(options, Payload(request)))
	return s.frame()
}

// ProbeAnswer returns the frame by which a server answers a probe.
func ProbeAnswer(server, balancer netip.Addr, token uint64, version, flags uint16, options ...Option) []byte {
	answer := binary.NativeEndian.AppendUint64(nil, token)
	answer = binary.BigEndian.AppendUint16(answer, version)
	answer = binary.BigEndian.AppendUint16(answer, flags)
	answer = append(answer, 0, 0, 0, 0) // reserved
	s := newSpec(server, sidAt(balancer, srv6.Probe), layers.IPProtocolNoNextHeader, append(options, Payload(answer)))
	return s.frame()
}

// sidAt returns the SID of a function in the locator of a host's address.
func sidAt(host netip.Addr, function srv6.Function) netip.Addr {
	return srv6.SID{Locator: netip.PrefixFrom(host, srv6.LocatorBits), Function: function}.Addr()
}
