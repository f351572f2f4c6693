// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"
	"testing"
)

const underlaidBalancer = `node:
  interface: eth0
  locator: "fd00:6c:a4d:b::/64"
  addresses: [10.77.0.12]
  underlay: {sources: [10.77.0.0/24, 10.78.0.0/24]}
services:
  - name: web
    vip: 203.0.113.80
    port: 80
    protocol: tcp
    placement: hunt
    encapsulation: srv6-encap
    servers:
      - {name: s1, locator: "fd00:6c:a4d:65::/64"}
  - name: old
    vip: 203.0.113.81
    port: 80
    protocol: tcp
    encapsulation: ipip
    servers:
      - {name: o1, address: 10.77.0.101}
`

const underlaidAgent = `node:
  interface: eth0
  locator: "fd00:6c:a4d:65::/64"
  underlay: {port: 6080, sources: [10.77.0.0/24]}
services:
  - {name: web, vip: 203.0.113.80, port: 80, protocol: tcp, encapsulation: srv6-encap}
`

func TestUnderlayOfABalancer(t *testing.T) {
	const (
		sources = "sources: [10.77.0.0/24, 10.78.0.0/24]"
		number  = "must have 1 to 16 prefixes: those of all balancers and servers"
		locator = "services[0].servers[0].locator"
	)
	checkMutations(t, underlaidBalancer, ParseBalancer, []mutation{
		{"no sources", sources, "port: 1", one("node.underlay.sources", number)},
		{"port 0", "underlay: {", "underlay: {port: 0, ", one("node.underlay.port", "must be a whole number from 1 to 65535")},
		{"IPv6 source", sources, `sources: ["fd00::/8", 10.77.0.0/24]`, one("node.underlay.sources[0]", "must be an IPv4 prefix")},
		{"host bits", sources, "sources: [10.77.0.1/24]",
			one("node.underlay.sources[0]", "has bits behind its length; write it as 10.77.0.0/24")},
		{"everybody", sources, "sources: [0.0.0.0/0]", one("node.underlay.sources[0]",
			"contains hosts outside of the fabric; write the prefixes of balancers and servers")},
		{"twice", sources, "sources: [10.77.0.0/24, 10.77.0.0/24]",
			one("node.underlay.sources[1]", "is already used by node.underlay.sources[0] (line 5)")},
		{"no address in the locator", `locator: "fd00:6c:a4d:b::/64"`, `locator: "fd00:6c::/64"`, one("node.locator",
			"has the IPv4 address 0.0.0.0 in its last 32 bits; must have that of its host, because of node.underlay, "+
				"such as fd00:6c:a00:1::/64 for 10.0.0.1")},
		{"a server with other first bits", "fd00:6c:a4d:65::", "fd00:5:a4d:65::", one(locator, "must be in fd00:6c::/32, as "+
			"node.locator is, because of node.underlay: 32 bits that all hosts share, and then the host's IPv4 address")},
		{"a server elsewhere", "fd00:6c:a4d:65::", "fd00:6c:a4f:65::", one(locator, "has the IPv4 address 10.79.0.101, which "+
			"is in no prefix of node.underlay.sources: the balancer would drop the server's packets")},
		{"an IPv6 tunnel", "address: 10.77.0.101", `address: "fd00::1"`, []problem{
			{"node.addresses", "needs an IPv6 address, because services[1].servers[0].address is one"},
			{"services[1].servers[0].address", "must be IPv4 with node.underlay: the fabric carries no IPv6"}}},
		{"srv6-insert", "vip: 203.0.113.80\n    port: 80\n    protocol: tcp\n    placement: hunt\n    encapsulation: srv6-encap",
			"vip: 2001:db8::80\n    port: 80\n    protocol: tcp\n    placement: hunt\n    encapsulation: srv6-insert",
			one("services[0].encapsulation", "must be srv6-encap with node.underlay, or gre or ipip")},
		{"a switch", "interface: eth0", "interface: eth0\n  switch: {address: \"sw:9559\", network-port: 1, host-port: 2}",
			one("node.underlay", "must not be set with node.switch: the switch sends IPv6 packets to servers")},
		{"the VIP of a service", "vip: 203.0.113.80", "vip: 10.77.0.11", one("node.locator", "is the VIP of services[0]")},
	})
}

func TestUnderlayOfAnAgent(t *testing.T) {
	checkMutations(t, underlaidAgent, ParseAgent, []mutation{
		{"no locator", "  locator: \"fd00:6c:a4d:65::/64\"\n", "", []problem{
			{"node.locator", "required by services[0], whose encapsulation is srv6-encap"},
			{"node.locator", "required by node.underlay: its last 32 bits are the IPv4 address of this host"}}},
		{"no sources", "sources: [10.77.0.0/24]", "sources: []",
			one("node.underlay.sources", "must have 1 to 16 prefixes: those of all balancers and servers")},
		{"srv6-insert", "vip: 203.0.113.80, port: 80, protocol: tcp, encapsulation: srv6-encap",
			"vip: \"2001:db8::80\", port: 80, protocol: tcp, encapsulation: srv6-insert",
			one("services[0].encapsulation", "must be srv6-encap with node.underlay, or gre or ipip")},
	})
}

// A balancer and an agent must have the same underlay.
func TestCompareUnderlays(t *testing.T) {
	const agent = "underlay: {port: 6080, sources: [10.77.0.0/24]}"
	for _, c := range []struct{ name, lb, agent, want string }{
		{"fit", underlaidBalancer, underlaidAgent, ""},
		{"none at the agent", underlaidBalancer, strings.Replace(underlaidAgent, "  "+agent+"\n", "", 1),
			"node.underlay: missing, and the balancer has one: lb.yaml:5 (node.underlay.sources)"},
		{"none at the balancer", strings.Replace(underlaidBalancer, "  underlay: {sources: [10.77.0.0/24, 10.78.0.0/24]}\n", "", 1),
			underlaidAgent, "node.underlay: missing, and the agent has one: s1.yaml:4 (node.underlay.sources)"},
		{"another port", underlaidBalancer, strings.Replace(underlaidAgent, "6080", "6081", 1),
			`s1.yaml:4: node.underlay.port "6081": is 6080 on the balancer: lb.yaml:5 (node.underlay.port)`},
		{"other sources", underlaidBalancer, strings.Replace(underlaidAgent, "10.77.0.0/24", "10.77.1.0/24", 1),
			"contains no prefix with the address of the balancer, which is in its locator: lb.yaml:3 (node.locator)"},
	} {
		got := compared(t, c.lb, c.agent)
		if !strings.Contains(got, c.want) || (c.want == "") != !strings.Contains(got, "underlay") {
			t.Errorf("%s: got %q, want %q", c.name, got, c.want)
		}
	}
}
