// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// way is an encapsulation, with the address families of the inner and outer header.
type way struct {
	kind         desired.Encapsulation
	inner, outer int
	overhead     int // length of the added headers in bytes, by docs/understand/protocol.md
}

var ways = []way{
	{desired.SRv6Insert, 6, 6, 56},
	{desired.SRv6Encap, 4, 6, 40},
	{desired.SRv6Encap, 6, 6, 40},
	{desired.GRE, 4, 4, 24},
	{desired.GRE, 6, 4, 24},
	{desired.GRE, 4, 6, 44},
	{desired.GRE, 6, 6, 44},
	{desired.IPIP, 4, 4, 20},
	{desired.IPIP, 6, 4, 20},
	{desired.IPIP, 4, 6, 40},
	{desired.IPIP, 6, 6, 40},
}

// serviceBy returns a service with this encapsulation, on a VIP of its own.
func (w way) serviceBy(number uint8, protocol desired.Protocol) desired.Service {
	vip := netip.AddrFrom4([4]byte{198, 51, 100, 100 + number})
	if w.inner == 6 {
		vip = netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 15: 100 + number})
	}
	server := srv6Server("s", 20+number, 1)
	if w.kind == desired.GRE || w.kind == desired.IPIP {
		server = tunnelServer("s", fmt.Sprintf("10.0.1.%d", number))
		if w.outer == 6 {
			server = tunnelServer("s", fmt.Sprintf("fd00:a::1:%d", number))
		}
	}
	name := fmt.Sprintf("%s-%d-%d-%s", w.kind, w.inner, w.outer, protocol)
	return serviceOf(name, vip, 80, protocol, w.kind, server)
}

// shapes returns options for packets. They differ in the fields that an encapsulation copies, moves
// or leaves unchanged.
func shapes(version int) map[string][]packet.Option {
	out := map[string][]packet.Option{
		"plain":         nil,
		"traffic class": {packet.TrafficClass(0xff)},
		"ECT(0)":        {packet.TrafficClass(0x02)},
		"hop limit 2":   {packet.HopLimit(2)},
		"hop limit 255": {packet.HopLimit(255)},
		"payload":       {packet.Payload(bytes.Repeat([]byte{0xa5}, 1001))},
	}
	if version == 4 {
		for _, words := range []int{1, 10} {
			out[fmt.Sprintf("%d words of options", words)] = []packet.Option{packet.IPOptions(bytes.Repeat([]byte{1}, 4*words))}
		}
		return out
	}
	out["flow label"] = []packet.Option{packet.FlowLabel(0xfffff), packet.TrafficClass(0x2e)}
	out["destination options"] = []packet.Option{packet.DestinationOptions(64)}
	for _, size := range []int{8, 16, 64, 2048} {
		out[fmt.Sprintf("hop-by-hop options of %d bytes", size)] = []packet.Option{
			packet.HopByHop(size), packet.DestinationOptions(8), packet.Payload([]byte("behind it")),
		}
	}
	return out
}

// Packets are compared with the present MTU of the interface, and a port in use is not given out
// again.
func TestMTUChanges(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	frame := frameOf(narrow, packet.Payload(make([]byte, 1500-40-60)))
	for mtu := 1300; mtu < 1300+300; mtu++ { // more often than there are ports
		for target, hop := range f.hops {
			if hop.Link.Name == "narrow" {
				hop.Link.MTU = mtu
				f.hops[target] = hop
			}
		}
		f.applyHops()
		want := "answer_too_big"
		if mtu >= 1500 {
			want = "forward_known" // the first packet made the entry and was then dropped
		}
		if got := reasonOf(f.run(frame)); got != want {
			t.Fatalf("packet of 1500 bytes to an MTU of %d: %s, want %s", mtu, got, want)
		}
	}
	f.check(f.forwarded(frameOf(web), web, "web", f.placed(web, "web"), "forward_new"), f.run(frameOf(web)))
}

// Of 200 flows to one server in tunnels over IPv4, nearly all have an outer source of their own, and
// all packets of a flow have the same. A reload changes the prefix, and keeps the flows.
func TestTunnelSources(t *testing.T) {
	t.Parallel()
	services := []desired.Service{way{desired.IPIP, 4, 4, 20}.serviceBy(1, desired.UDP), way{desired.GRE, 6, 4, 24}.serviceBy(2, desired.UDP)}
	configured := func() *desired.Balancer {
		cfg := balancerOf(services...)
		cfg.Node.Limits.Flows = 65536
		return cfg
	}
	f := open(t, configured())
	for _, prefix := range []string{"", "10.0.0.0/16", "10.0.0.0/23", "10.0.0.1/32"} {
		cfg := configured()
		if prefix != "" {
			cfg.Node.TunnelSources = netip.MustParsePrefix(prefix)
		}
		f.mustApply(cfg)
		f.route()
		for i, svc := range services {
			sources := map[netip.Addr]bool{}
			for port := range uint16(200) {
				flow := flowTo(svc.VIP, 80, desired.UDP)
				flow.Source = netip.AddrPortFrom(flow.Source.Addr(), 1000+port)
				frame := frameOf(flow)
				sources[f.sourceOf(flow, svc.Servers[0].Address)] = true
				for _, reason := range []string{"forward_new", "forward_known"} {
					if prefix != "" {
						reason = "forward_known"
					}
					got := f.run(frame)
					f.check(f.forwarded(frame, flow, svc.Name, "s", reason), got)
					testhost.Must(t, packet.Verify(got.Frame))
				}
			}
			least, most := 1, 1
			switch prefix {
			case "10.0.0.0/16":
				least, most = 190, 200
			case "10.0.0.0/23":
				least, most = 135, 195
			}
			if len(sources) < least || len(sources) > most {
				t.Errorf("%s: 200 flows of service %d have %d outer sources, want %d to %d", prefix, i, len(sources), least, most)
			}
		}
	}
}
