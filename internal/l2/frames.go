// SPDX-License-Identifier: Apache-2.0

package l2

import (
	"bytes"
	"net"
	"net/netip"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// hopLimit is that of all messages of neighbour discovery. It shows that no router has forwarded
// them (RFC 4861, section 7.1).
const hopLimit = 255

// The MAC addresses to which questions and announcements for all hosts of a link go.
var (
	broadcast    = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	allNodesMAC  = net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}
	unknownMAC   = net.HardwareAddr{0, 0, 0, 0, 0, 0}
	allNodesIPv6 = netip.MustParseAddr("ff02::1")
)

// message is what another host of the link has sent: a question for the MAC address of a target, or
// a claim to have the address. Both may be in one ARP packet.
type message struct {
	mac net.HardwareAddr // of the sender
	// asks is the target of a question, and by is who asks. by is not valid if the sender has no
	// address yet, and looks for another host that has it (RFC 5227, RFC 4862 section 5.4).
	asks, by netip.Addr
	claims   netip.Addr // the address that the sender claims to have
}

// read reads a frame. ok is false if the frame is not a valid message of ARP or neighbour
// discovery. Checksums are not checked: frames of a host in a namespace of the same machine have
// none yet.
func read(frame []byte) (m message, ok bool) {
	options := gopacket.DecodeOptions{NoCopy: true, Lazy: true}
	p := gopacket.NewPacket(frame, layers.LayerTypeEthernet, options)
	ethernet, isEthernet := p.Layer(layers.LayerTypeEthernet).(*layers.Ethernet)
	if !isEthernet {
		return m, false
	}
	m.mac = ethernet.SrcMAC
	if arp, isARP := p.Layer(layers.LayerTypeARP).(*layers.ARP); isARP {
		return m.ofARP(arp)
	}
	ip, isIPv6 := p.Layer(layers.LayerTypeIPv6).(*layers.IPv6)
	if !isIPv6 || ip.HopLimit != hopLimit {
		return m, false
	}
	solicitation := p.Layer(layers.LayerTypeICMPv6NeighborSolicitation)
	if s, ok := solicitation.(*layers.ICMPv6NeighborSolicitation); ok {
		m.asks = addressOf(s.TargetAddress)
		if by := addressOf(ip.SrcIP); !by.IsUnspecified() {
			m.by = by
		}
		return m, m.asks.IsValid()
	}
	advertisement := p.Layer(layers.LayerTypeICMPv6NeighborAdvertisement)
	if a, ok := advertisement.(*layers.ICMPv6NeighborAdvertisement); ok {
		m.claims = addressOf(a.TargetAddress)
		return m, m.claims.IsValid()
	}
	return m, false
}

// ofARP completes a message from an ARP packet.
func (m message) ofARP(arp *layers.ARP) (message, bool) {
	isForIPv4 := arp.AddrType == layers.LinkTypeEthernet && arp.Protocol == layers.EthernetTypeIPv4 &&
		len(arp.SourceHwAddress) == 6 && len(arp.SourceProtAddress) == 4 && len(arp.DstProtAddress) == 4
	if !isForIPv4 {
		return m, false
	}
	m.mac = arp.SourceHwAddress
	if sender := addressOf(arp.SourceProtAddress); !sender.IsUnspecified() {
		m.by, m.claims = sender, sender
	}
	target := addressOf(arp.DstProtAddress)
	if arp.Operation == layers.ARPRequest && target != m.claims { // or else it announces itself
		m.asks = target
	}
	return m, true
}

// addressOf returns an address, or the zero value if b has a wrong length.
func addressOf(b []byte) netip.Addr {
	address, _ := netip.AddrFromSlice(b)
	return address
}

// answer returns the frame that answers a question: mac has the target.
func (m message) answer(mac net.HardwareAddr) []byte {
	switch {
	case m.asks.Is4() && m.by.IsValid():
		return arp(layers.ARPReply, mac, m.asks, m.mac, m.by, m.mac)
	case m.asks.Is4():
		return arp(layers.ARPReply, mac, m.asks, m.mac, netip.IPv4Unspecified(), m.mac)
	case m.by.IsValid():
		return advertisement(mac, m.asks, m.mac, m.by)
	}
	return advertisement(mac, m.asks, allNodesMAC, allNodesIPv6) // RFC 4861, section 7.2.4
}

// announcements returns the frames that tell all hosts of the link that mac has the VIP now. Some
// hosts only follow one of both kinds of gratuitous ARP packets.
func announcements(mac net.HardwareAddr, vip netip.Addr) [][]byte {
	if vip.Is4() {
		return [][]byte{
			arp(layers.ARPRequest, mac, vip, unknownMAC, vip, broadcast),
			arp(layers.ARPReply, mac, vip, broadcast, vip, broadcast),
		}
	}
	return [][]byte{advertisement(mac, vip, allNodesMAC, allNodesIPv6)}
}

// question returns the frame that asks whether another host has the VIP. It names no address of the
// sender, so that nobody learns anything from it (RFC 5227, RFC 4862 section 5.4.2).
func question(mac net.HardwareAddr, vip netip.Addr) []byte {
	if vip.Is4() {
		return arp(layers.ARPRequest, mac, netip.IPv4Unspecified(), unknownMAC, vip, broadcast)
	}
	group := groupOf(vip)
	low := group.As16()
	to := net.HardwareAddr{0x33, 0x33, low[12], low[13], low[14], low[15]} // RFC 2464, section 7
	return neighbour(mac, netip.IPv6Unspecified(), to, group,
		layers.CreateICMPv6TypeCode(layers.ICMPv6TypeNeighborSolicitation, 0),
		&layers.ICMPv6NeighborSolicitation{TargetAddress: vip.AsSlice()})
}

// groupOf returns the solicited-node group of an IPv6 address (RFC 4291, section 2.7.1).
func groupOf(vip netip.Addr) netip.Addr {
	group := netip.MustParseAddr("ff02::1:ff00:0").As16()
	low := vip.As16()
	copy(group[13:], low[13:])
	return netip.AddrFrom16(group)
}

// arp returns a frame with an ARP packet to a MAC address.
func arp(
	operation uint16, mac net.HardwareAddr, sender netip.Addr,
	target net.HardwareAddr, targetIP netip.Addr, to net.HardwareAddr,
) []byte {
	return serialize(
		&layers.Ethernet{SrcMAC: mac, DstMAC: to, EthernetType: layers.EthernetTypeARP},
		&layers.ARP{
			AddrType: layers.LinkTypeEthernet, Protocol: layers.EthernetTypeIPv4,
			HwAddressSize: 6, ProtAddressSize: 4, Operation: operation,
			SourceHwAddress: mac, SourceProtAddress: sender.AsSlice(),
			DstHwAddress: target, DstProtAddress: targetIP.AsSlice(),
		})
}

// The flags of a neighbour advertisement (RFC 4861, section 4.4).
const (
	solicited = 0x40
	override  = 0x20
)

// advertisement returns a frame with a neighbour advertisement: mac has the VIP.
func advertisement(
	mac net.HardwareAddr, vip netip.Addr, toMAC net.HardwareAddr, to netip.Addr,
) []byte {
	flags := uint8(override)
	if !to.IsMulticast() {
		flags |= solicited
	}
	return neighbour(mac, vip, toMAC, to,
		layers.CreateICMPv6TypeCode(layers.ICMPv6TypeNeighborAdvertisement, 0),
		&layers.ICMPv6NeighborAdvertisement{
			Flags: flags, TargetAddress: vip.AsSlice(),
			Options: layers.ICMPv6Options{{Type: layers.ICMPv6OptTargetAddress, Data: bytes.Clone(mac)}},
		})
}

// neighbour returns a frame with a message of neighbour discovery.
func neighbour(
	mac net.HardwareAddr, from netip.Addr, toMAC net.HardwareAddr, to netip.Addr,
	code layers.ICMPv6TypeCode, body gopacket.SerializableLayer,
) []byte {
	ip := &layers.IPv6{
		Version: 6, HopLimit: hopLimit, NextHeader: layers.IPProtocolICMPv6,
		SrcIP: from.AsSlice(), DstIP: to.AsSlice(),
	}
	icmp := &layers.ICMPv6{TypeCode: code}
	if err := icmp.SetNetworkLayerForChecksum(ip); err != nil {
		panic(err) // for other layers than IP only
	}
	ethernet := &layers.Ethernet{SrcMAC: mac, DstMAC: toMAC, EthernetType: layers.EthernetTypeIPv6}
	return serialize(ethernet, ip, icmp, body)
}

// serialize returns the bytes of the layers of a frame.
func serialize(all ...gopacket.SerializableLayer) []byte {
	buffer := gopacket.NewSerializeBuffer()
	options := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	if err := gopacket.SerializeLayers(buffer, options, all...); err != nil {
		panic(err) // only addresses of wrong lengths cause one
	}
	return buffer.Bytes()
}
