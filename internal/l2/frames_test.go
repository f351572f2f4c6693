// SPDX-License-Identifier: Apache-2.0

package l2

import (
	"bytes"
	"net"
	"net/netip"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

var (
	vip4, vip6 = netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8:80::10")
	host4      = netip.MustParseAddr("203.0.113.99")
	host6      = netip.MustParseAddr("fe80::99")
	ownMAC     = net.HardwareAddr{2, 0, 0, 0, 0, 1}
	otherMAC   = net.HardwareAddr{2, 0, 0, 0, 0, 9}
)

// request4 and request6 are frames in which a host asks for an address.
func request4(by, target netip.Addr) []byte {
	return arp(layers.ARPRequest, otherMAC, by, unknownMAC, target, broadcast)
}

func request6(by, target netip.Addr) []byte {
	return neighbour(otherMAC, by, allNodesMAC, groupOf(target),
		layers.CreateICMPv6TypeCode(layers.ICMPv6TypeNeighborSolicitation, 0),
		&layers.ICMPv6NeighborSolicitation{TargetAddress: target.AsSlice()})
}

// TestAnswers: what a responder with two VIPs answers, and which claims it notices.
func TestAnswers(t *testing.T) {
	t.Parallel()
	forwarded := request6(host6, vip6)
	forwarded[14+7] = 254
	none := netip.Addr{}
	for name, c := range map[string]struct {
		frame  []byte
		answer []byte
		claims netip.Addr
	}{
		"ARP":                      {request4(host4, vip4), arp(layers.ARPReply, ownMAC, vip4, otherMAC, host4, otherMAC), none},
		"ARP, another address":     {request4(host4, host4.Next()), nil, none},
		"ARP, without an address":  {request4(netip.IPv4Unspecified(), vip4), arp(layers.ARPReply, ownMAC, vip4, otherMAC, netip.IPv4Unspecified(), otherMAC), none},
		"gratuitous ARP":           {request4(vip4, vip4), nil, vip4},
		"ARP reply":                {arp(layers.ARPReply, otherMAC, vip4, ownMAC, host4, ownMAC), nil, vip4},
		"ARP of the balancer":      {announcements(ownMAC, vip4)[0], nil, none},
		"solicitation":             {request6(host6, vip6), advertisement(ownMAC, vip6, otherMAC, host6), none},
		"another solicitation":     {request6(host6, host6), nil, none},
		"from nowhere":             {request6(netip.IPv6Unspecified(), vip6), advertisement(ownMAC, vip6, allNodesMAC, allNodesIPv6), none},
		"a forwarded solicitation": {forwarded, nil, none},
		"advertisement":            {advertisement(otherMAC, vip6, allNodesMAC, allNodesIPv6), nil, vip6},
		"advertisement of a host":  {advertisement(otherMAC, host6, allNodesMAC, allNodesIPv6), nil, none},
		"a cut solicitation":       {request6(host6, vip6)[:60], nil, none},
		"a cut ARP packet":         {request4(host4, vip4)[:30], nil, none},
	} {
		m, ok := read(c.frame)
		var answer []byte
		if ok && !bytes.Equal(m.mac, ownMAC) && (m.asks == vip4 || m.asks == vip6) {
			answer = m.answer(ownMAC)
		}
		claims := none
		if ok && !bytes.Equal(m.mac, ownMAC) && (m.claims == vip4 || m.claims == vip6) {
			claims = m.claims
		}
		if !bytes.Equal(answer, c.answer) || claims != c.claims {
			t.Errorf("%s: claims %v, want %v; answer\n% x, want\n% x", name, claims, c.claims, answer, c.answer)
		}
		if answer == nil {
			continue
		}
		p := gopacket.NewPacket(answer, layers.LayerTypeEthernet, gopacket.Default)
		if p.ErrorLayer() != nil {
			t.Errorf("%s: %v", name, p.ErrorLayer().Error())
		}
	}
}

// FuzzQuestions: no frame causes a panic, and a frame with an answer asks for an address of its
// version.
func FuzzQuestions(f *testing.F) {
	f.Add(request4(host4, vip4))
	f.Add(request6(host6, vip6))
	f.Add(advertisement(otherMAC, vip6, allNodesMAC, allNodesIPv6))
	f.Fuzz(func(t *testing.T, frame []byte) {
		m, ok := read(frame)
		if !ok || !m.asks.IsValid() {
			return
		}
		if m.by.IsValid() && m.by.Is4() != m.asks.Is4() {
			t.Errorf("%s asks for %s", m.by, m.asks)
		}
		if len(m.answer(ownMAC)) < 42 {
			t.Error("a short answer")
		}
	})
}
