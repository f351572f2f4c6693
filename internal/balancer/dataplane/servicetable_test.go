// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
)

// With any hash keys, there is room for all services that can be configured, and for all removed VIPs
// that are kept. This holds for consecutive VIPs and ports, too, for which the hash is linear.
func TestServiceTableHasRoom(t *testing.T) {
	t.Parallel()
	vip := func(i int) netip.Addr {
		return netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 14: byte(i >> 8), 15: byte(i)})
	}
	keyOf := func(vip netip.Addr, port int) ServiceEntry {
		return ServiceKey(&desired.Service{VIP: vip, Port: desired.Port(port), Protocol: desired.TCP})
	}
	random := rand.New(rand.NewPCG(1, 2))
	for name, entries := range map[string]func(i int) []ServiceEntry{
		"VIPs": func(i int) []ServiceEntry { return []ServiceEntry{keyOf(vip(i), 80), VIPKey(vip(i))} },
		"removed VIPs": func(i int) []ServiceEntry {
			all := []ServiceEntry{keyOf(vip(i), 80), VIPKey(vip(i))}
			if i < MaxRemovedVIPs {
				all = append(all, VIPKey(vip(desired.MaxServices+i)))
			}
			return all
		},
		"ports":          func(i int) []ServiceEntry { return []ServiceEntry{keyOf(vip(1), i+1)} },
		"VIPs and ports": func(i int) []ServiceEntry { return []ServiceEntry{keyOf(vip(i/128), 8000+i%128)} },
	} {
		t.Run(name, func(t *testing.T) {
			table, lines := ServiceTable{keys: new(ServiceKeys)}, new(serviceLines)
			for range 200 {
				for i := range table.keys {
					table.keys[i] = random.Uint64() | 1
				}
				clear(lines[:])
				for i := range desired.MaxServices {
					for _, entry := range entries(i) {
						if err := table.add(lines, entry); err != nil {
							t.Fatalf("service %d, keys %#x: %v", i, *table.keys, err)
						}
					}
				}
			}
		})
	}
}
