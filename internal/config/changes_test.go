// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
)

// TestChangesFrom compares the changes of several successive reloads with the text of the log.
func TestChangesFrom(t *testing.T) {
	const (
		node = `node: {interface: eth0, locator: "fd00:6c:0:1::/64"}
`
		web = `- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, servers: [
   {name: s1, locator: "fd00:5:0:1::/64"}, {name: s2, locator: "fd00:5:0:2::/64", weight: 3}]}
`
		dns = `- {name: dns, vip: 192.0.2.53, port: 53, protocol: udp, servers: [
   {name: s1, locator: "fd00:5:0:1::/64"}]}
`
	)
	const both = node + "services:\n" + web + dns
	replace := func(pairs ...string) string { return strings.NewReplacer(pairs...).Replace(both) }
	many := ""
	for i := range 68 {
		many += fmt.Sprintf(`{name: t%02d, locator: "fd00:5:1:%d::/64"}, `, i, i)
	}
	for name, test := range map[string]struct {
		to   string
		want []any
	}{
		"nothing":         {both, []any{"changes", "none"}},
		"order":           {node + "services:\n" + dns + web, []any{"changes", "none"}},
		"service removed": {node + "services:\n" + web, []any{"services_removed", "dns"}},
		"service added": {both + strings.NewReplacer("web", "api", "port: 80", "port: 81").Replace(web),
			[]any{"services_added", "api"}},
		"service replaced": {replace("dns", "ns"),
			[]any{"services_added", "ns", "services_removed", "dns"}},
		"server replaced": {replace("name: s2", "name: s3"),
			[]any{"servers_added", "web/s3", "servers_removed", "web/s2"}},
		"weight": {replace("weight: 3", "weight: 0"),
			[]any{"servers_changed", "web/s2 (weight 3 to 0)"}},
		"readdressed": {replace("fd00:5:0:2::", "fd00:5:0:9::"),
			[]any{"servers_changed", "web/s2 (locator)"}},
		"fields of all": {
			replace("eth0", "eth0, signal-key: /key", "weight: 3", "weight: 5",
				"protocol: udp", "protocol: udp, timeouts: {new: 5s}, buckets: 31"),
			[]any{"node_changed", "signal-key", "services_changed", "dns (buckets, timeouts)",
				"servers_changed", "web/s2 (weight 3 to 5)"},
		},
		"many": {replace("tcp, servers: [", "tcp, servers: ["+many),
			[]any{"servers_added", "web/t00, web/t01, web/t02, web/t03, web/t04 and 63 more"}},
	} {
		old := mustParse(t, both, "", "", ParseBalancer)
		now := mustParse(t, test.to, "", "", ParseBalancer)
		if diff := cmp.Diff(test.want, now.ChangesFrom(old).Attributes()); diff != "" {
			t.Errorf("%s, -want +got:\n%s", name, diff)
		}
	}
}

// TestAgentChangesFrom tests the fields that only an agent has.
func TestAgentChangesFrom(t *testing.T) {
	const agent = `node: {interface: eth0, locator: "fd00:5:0:1::/64"}
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp}
- {name: dns, vip: "2001:db8:80::1", port: 53, protocol: udp}
`
	old := mustParse(t, agent, "", "", ParseAgent)
	now := mustParse(t, strings.NewReplacer("eth0", "eth0, mtu: 1500", "dns", "ns",
		"protocol: tcp", "protocol: tcp, accept: {policy: never}").Replace(agent), "", "", ParseAgent)
	want := []any{"node_changed", "mtu", "services_added", "ns", "services_removed", "dns",
		"services_changed", "web (accept)"}
	if diff := cmp.Diff(want, now.ChangesFrom(old).Attributes()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	want = []any{"keys_changed", "node.signal-key"}
	if diff := cmp.Diff(want, old.ChangesFrom(old).WithKeys(true).Attributes()); diff != "" {
		t.Errorf("other keys, -want +got:\n%s", diff)
	}
	const one, two, three = "192.0.2.1", "192.0.2.2", "eth0"
	before, after := desired.Passwords{one: "a", two: "b"}, desired.Passwords{one: "a", two: "c", three: "d"}
	want = []any{"passwords_changed", "192.0.2.2"}
	if diff := cmp.Diff(want, old.ChangesFrom(old).WithPasswords(after.ChangedFrom(before)).Attributes()); diff != "" {
		t.Errorf("other passwords, -want +got:\n%s", diff)
	}
}
