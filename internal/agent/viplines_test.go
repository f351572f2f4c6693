// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// vipsOfOneLine returns VIPs that belong into one line of vip_lines.
func vipsOfOneLine(count int) (vips []netip.Addr) {
	for i := uint64(1); len(vips) < count; i++ {
		vip := address{0: 0x20, 1: 1, 2: 0x0d, 3: 0xb8}
		binary.BigEndian.PutUint64(vip[8:], i)
		if vipLine(vip) == 7 {
			vips = append(vips, netip.AddrFrom16(vip))
		}
	}
	return vips
}

// A server serves its VIPs whether or not they have room in vip_lines, and serves them no longer
// when they are removed. The address ::, which marks free places, is no VIP.
func TestVIPLines(t *testing.T) {
	all := vipsOfOneLine(vipsPerLine + 3)
	cfg := testConfig()
	configure := func(vips ...netip.Addr) {
		cfg.Services = nil
		for _, vip := range vips {
			cfg.Services = append(cfg.Services, desired.AgentService{
				Name: vip.String(), VIP: vip, Port: 80, Protocol: desired.TCP,
				Encapsulation: desired.SRv6Encap,
			})
		}
	}
	configure(all...)
	k := testKernelOf(t, cfg)
	var before, after vipLines
	testhost.Must(t, k.objects.VipLines.Get(&before))
	requireServed := func(vip netip.Addr, want bool) {
		t.Helper()
		segments := []netip.Addr{sidOf(node, deliverAlways)}
		encap := packet.Encap{Kind: desired.SRv6Encap, Sender: balancer1, Segments: segments}
		frame := to(client6, netip.AddrPortFrom(vip, 80), encap, packet.Flags(packet.ACK))
		if verdict, _ := runAgent(t, k, frame); (verdict == xdpPass) != want {
			t.Errorf("%v: the verdict is %d, want the VIP served: %v", vip, verdict, want)
		}
	}
	for _, vip := range all {
		requireServed(vip, true)
	}
	requireServed(netip.IPv6Unspecified(), false)
	configure(all[2], all[5], all[6])
	testhost.Must(t, k.write(newTableContent(cfg, mtu)))
	for i, vip := range all {
		requireServed(vip, i == 2 || i >= 5)
	}
	testhost.Must(t, k.objects.VipLines.Get(&after))
	for i, vip := range before[7] {
		if vip == all[2].As16() && after[7][i] != vip {
			t.Errorf("a VIP that stayed moved from place %d: %v", i, after[7])
		}
	}
	held := map[address]int{}
	for i := range after {
		for _, vip := range after[i] {
			held[vip]++
		}
	}
	for _, vip := range []netip.Addr{all[2], all[5], all[6]} {
		if held[vip.As16()] != 1 {
			t.Errorf("%v is in the lines %d times, want once", vip, held[vip.As16()])
		}
	}
}
