// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
)

const onLink = `
node: {interface: eth0, addresses: [192.0.2.10]}
l2: {lease: 4s, hold-down: 1s}
services:
  - {name: web, vip: 203.0.113.1, port: 80, protocol: tcp, encapsulation: gre,
     servers: [{name: s1, address: 192.0.2.53}]}
`

func TestL2Rules(t *testing.T) {
	checkMutations(t, onLink, ParseBalancer, []mutation{
		{"lease short", "lease: 4s", "lease: 1s", one("l2.lease", "must be from 2s to 1m0s")},
		{"lease of parts", "lease: 4s", "lease: 2500ms", one("l2.lease", "must be a whole number of seconds")},
		{"hold-down long", "hold-down: 1s", "hold-down: 2h", one("l2.hold-down", "must be from 0s to 1h0m0s")},
		{"with BGP", "l2:", "bgp: {asn: 64600, router-id: 192.0.2.11, peers: [{address: 192.0.2.1, asn: 64512}]}\nl2:",
			one("l2", "not used with the section bgp: VIPs are announced in one way")},
	})
	b := mustParse(t, onLink, "l2: {lease: 4s, hold-down: 1s}", "l2: {}", ParseBalancer)
	if diff := cmp.Diff(&desired.L2{Lease: 3 * time.Second, HoldDown: 10 * time.Second}, b.L2); diff != "" {
		t.Errorf("defaults: -want +got:\n%s", diff)
	}
}

// TestL2Reload: a reload may change the hold-down time, but not the lease.
func TestL2Reload(t *testing.T) {
	old := mustParse(t, onLink, "", "", ParseBalancer)
	now := mustParse(t, onLink, "hold-down: 1s", "hold-down: 2s", ParseBalancer)
	if err := now.ReloadableFrom(old); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]any{"l2_changed", "hold-down"}, now.ChangesFrom(old).Attributes()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	now.L2 = nil
	if err := now.ReloadableFrom(old); err == nil || !strings.Contains(err.Error(), "l2.lease") {
		t.Errorf("without the section: error %v", err)
	}
}
