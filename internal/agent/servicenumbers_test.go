// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"maps"
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// Each service counts its own offers, also after reloads. A service that gets the number of a
// removed one counts from zero.
func TestOffersOfServices(t *testing.T) {
	always := desired.Accept{Policy: desired.AcceptAlways}
	all := huntingConfig(desired.SRv6Encap, always, desired.NotLocalDrop).Services
	cfg := testConfig()
	cfg.Services = all[:3]
	k := testKernelOf(t, cfg)
	force := func(service int) {
		t.Helper()
		client, s := client6, all[service]
		if s.VIP.Is4() {
			client = client4
		}
		segments := []netip.Addr{sidOf(node, connectForce)}
		encap := packet.Encap{Kind: desired.SRv6Encap, Sender: balancer1, Segments: segments}
		vip := netip.AddrPortFrom(s.VIP, s.Port.Number())
		runAgent(t, k, to(client, vip, encap, packet.Flags(packet.SYN)))
	}
	requireForced := func(want map[int]uint64) {
		t.Helper()
		got := map[int]uint64{}
		for i, s := range all {
			a, err := k.view().acceptance(serviceKey(s))
			testhost.Must(t, err)
			if a == nil {
				continue
			}
			counters, err := k.view().offerCounters(a)
			testhost.Must(t, err)
			got[i] = counters["forced"]
		}
		if !maps.Equal(got, want) {
			t.Errorf("the forced offers of each service are %v, want %v", got, want)
		}
	}
	reload := func(services ...desired.AgentService) {
		t.Helper()
		cfg.Services = services
		testhost.Must(t, k.write(newTableContent(cfg, mtu)))
	}
	for service, offers := range []int{3, 2, 1} {
		for range offers {
			force(service)
		}
	}
	requireForced(map[int]uint64{0: 3, 1: 2, 2: 1})
	changed := all[1]
	changed.Accept.Policy = desired.AcceptNever
	reload(changed, all[2]) // the number of service 0 is free
	reload(changed, all[2], all[3])
	requireForced(map[int]uint64{1: 2, 2: 1, 3: 0})
	force(3)
	force(1)
	requireForced(map[int]uint64{1: 3, 2: 1, 3: 1})
	reload(all...)
	force(0)
	requireForced(map[int]uint64{0: 1, 1: 3, 2: 1, 3: 1})
}
