// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// several returns a configuration of one service with the VIPs and the ports 80 and 443.
func several(vips ...netip.Addr) *desired.Balancer {
	three := []desired.Server{srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 1)}
	return balancerOf(at(serviceOf("web", vips[0], 80, desired.TCP, desired.SRv6Encap, three...), vips...))
}

// A client may use one port for connections to several VIPs of a service. Each has an entry of its
// own. While the service has a VIP, the flows of the VIP keep their entries, although other VIPs come
// and go.
func TestFlowsOfSeveralVIPs(t *testing.T) {
	t.Parallel()
	f := open(t, several(vip6, vip6All))
	first, second := web, fromPort(flowTo(vip6All, 80, desired.TCP), web.Source.Port())
	ack := packet.Flags(packet.ACK)
	for _, flow := range []dataplane.Flow{first, second} {
		f.check(f.forwarded(frameOf(flow), flow, "web", f.placed(flow, "web"), "forward_new"), f.run(frameOf(flow)))
	}
	known := func(flows ...dataplane.Flow) {
		t.Helper()
		for _, flow := range flows {
			frame := frameOf(flow, ack)
			f.check(f.forwarded(frame, flow, "web", f.placed(flow, "web"), "forward_known"), f.run(frame))
		}
	}
	known(first, second)
	f.mustApply(several(vip6Both, vip6All)) // without the first VIP
	known(second)
	f.check(refused(frameOf(first, ack), "drop_removed_vip", 60), f.run(frameOf(first, ack)))
	f.mustApply(several(vip6All, vip6, vip6Both))
	known(second)
	f.restart()
	known(second)
}

// A change of the servers reaches each VIP and port of a service.
func TestRuleOfSeveralVIPs(t *testing.T) {
	t.Parallel()
	f := open(t, several(vip6, vip4))
	cfg := several(vip6, vip4)
	cfg.Services[0].Servers = cfg.Services[0].Servers[:1]
	f.mustApply(cfg)
	for _, flow := range []dataplane.Flow{web, web4, flowTo(vip6, 443, desired.TCP), flowTo(vip4, 443, desired.TCP)} {
		frame := frameOf(flow)
		f.check(f.forwarded(frame, flow, "web", "s1", "forward_new"), f.run(frame))
	}
	s := mustSnapshot(t, f.view()).Services
	if len(s) != 1 || s[0].VIP != vip4 || s[0].Port != 80 ||
		!slices.Equal(s[0].VIPs, []netip.Addr{vip4, vip6}) || !slices.Equal(s[0].Ports, []uint16{80, 443}) {
		t.Errorf("services %+v", s)
	}
}

// A VIP keeps its number, and new VIPs get the lowest free ones.
func TestNumbersOfVIPs(t *testing.T) {
	t.Parallel()
	known := vipNumbers{vip6: 0, vip4: 2}
	got := known.numbersOf([]netip.Addr{vip6All, vip4, vip6Both})
	if got[vip6All] != 0 || got[vip4] != 2 || got[vip6Both] != 1 {
		t.Errorf("numbers %v", got)
	}
	if got := vipNumbers(nil).numbersOf([]netip.Addr{vip6}); got[vip6] != 0 {
		t.Errorf("the only VIP has the number %d", got[vip6])
	}
}
