// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

const announced = `
node: {interface: eth0, addresses: [192.0.2.10]}
bgp:
  asn: 64600
  router-id: 192.0.2.11
  listen: 179
  restart-time: 60s
  hold-down: 1s
  drain-delay: 2s
  next-hops: ["2001:db8::2"]
  communities: ["64600:1", "64600:1:4294967295", no-export]
  peers:
    - {address: 192.0.2.1, asn: 64512, port: 1179, hold-time: 3s, multihop: 2, families: [ipv4, ipv6],
       password-file: /secret}
    - {address: "2001:db8::1", asn: 64600, ttl-security: true}
services:
  - {name: web, vip: 203.0.113.1, port: 80, protocol: tcp, encapsulation: gre,
     bgp: {announce: usable, communities: ["64600:2"]}, servers: [{name: s1, address: 192.0.2.53}]}
`

// community is the problem of a text that is no community.
const community = "must be ASN:VALUE with numbers up to 65535, ASN:VALUE:VALUE with numbers up to " +
	"4294967295, or one of: blackhole, graceful-shutdown, no-advertise, no-export, " +
	"no-export-subconfed, no-peer"

func TestBGPRules(t *testing.T) {
	const peer, other = "bgp.peers[0]", "bgp.peers[1]"
	checkMutations(t, announced, ParseBalancer, []mutation{
		{"asn missing", "  asn: 64600\n", "", []problem{
			{"bgp.asn", wholeNumber + "1 to 4294967295"},
		}},
		{"asn 0", "asn: 64600\n", "asn: 0\n", one("bgp.asn", wholeNumber+"1 to 4294967295")},
		{"router ID missing", "  router-id: 192.0.2.11\n", "", one("bgp.router-id", "required")},
		{"router ID IPv6", "router-id: 192.0.2.11", "router-id: 2001:db8::9",
			one("bgp.router-id", "must be an IPv4 address other than 0.0.0.0")},
		{"restart time long", "60s", "4096s", one("bgp.restart-time", "must be from 1s to 1h8m15s")},
		{"restart time of parts", "60s", "1500ms", one("bgp.restart-time", "must be a whole number of seconds")},
		{"hold-down long", "hold-down: 1s", "hold-down: 2h", one("bgp.hold-down", "must be from 0s to 1h0m0s")},
		{"drain delay", "drain-delay: 2s", "drain-delay: 11m", one("bgp.drain-delay", "must be from 0s to 10m0s")},
		{"community of one part", `"64600:1",`, `"64600",`, one("bgp.communities[0]", community)},
		{"community large", `"64600:1",`, `"65536:1",`, one("bgp.communities[0]", community)},
		{"community padded", `"64600:1",`, `"064600:1",`, one("bgp.communities[0]", community)},
		{"community unknown", "no-export", "export", one("bgp.communities[2]", community)},
		{"community repeated", "no-export", `"64600:1"`,
			one("bgp.communities[2]", "is already used by bgp.communities[0] (line 11)")},
		{"next hop is a VIP", `["2001:db8::2"]`, `["2001:db8::2", 203.0.113.1]`,
			one("bgp.next-hops[1]", "is the VIP of services[0]")},
		{"two next hops", `["2001:db8::2"]`, `["2001:db8::2", "2001:db8::3"]`,
			one("bgp.next-hops[1]", "is a second IPv6 address; the first is bgp.next-hops[0]")},
		{"next hop missing", `  next-hops: ["2001:db8::2"]` + "\n", "", one(peer+".families[1]",
			"needs an address of this family in bgp.next-hops, because the session has none")},
		{"address missing", "address: 192.0.2.1,", "", one(peer+".address",
			"required, unless interface is the link to an unnumbered peer")},
		{"address is a VIP", "address: 192.0.2.1,", "address: 203.0.113.1,",
			one(peer+".address", "is the VIP of services[0]")},
		{"address repeated", `address: "2001:db8::1", asn: 64600`, `address: 192.0.2.1, asn: 64600`,
			one(other+".address", "is already used by bgp.peers[0].address (line 13)")},
		{"address multicast", "address: 192.0.2.1,", "address: 224.0.0.1,",
			one(peer+".address", "is multicast"+unreachable)},
		{"hold time short", "hold-time: 3s", "hold-time: 2s",
			one(peer+".hold-time", "must be from 3s to 18h12m15s")},
		{"multihop 1", "multihop: 2", "multihop: 1", one(peer+".multihop", wholeNumber+"2 to 255")},
		{"multihop inside", "asn: 64512", "asn: 64600", one(peer+".multihop",
			"not used by an internal session: its packets may take any number of hops")},
		{"multihop with ttl-security", "multihop: 2", "multihop: 2, ttl-security: true", one(peer+".multihop",
			"cannot be used with ttl-security, which excludes routers between the peers")},
		{"password relative", "/secret", "secret", one(peer+".password-file", "must be absolute")},
		{"family unknown", "[ipv4, ipv6]", "[ipv4, ipx]", one(peer+".families[1]", "must be one of: ipv4, ipv6")},
		{"family repeated", "[ipv4, ipv6]", "[ipv4, ipv4]",
			one(peer+".families[1]", "is already used by bgp.peers[0].families[0] (line 13)")},
		{"no family", "[ipv4, ipv6]", "[]", one(peer+".families", "at least one is required")},
		{"announcement unknown", "announce: usable", "announce: always",
			one("services[0].bgp.announce", "must be one of: ready, usable, never")},
	})
	section := announced[strings.Index(announced, "bgp:\n"):strings.Index(announced, "services:")]
	checkMutations(t, announced, ParseBalancer, []mutation{
		{"no section", section, "", one("services[0].bgp", "not used without the section bgp of the file")},
		{"no peers", section[strings.Index(section, "  peers:"):], "", one("bgp.peers", "at least one is required")},
	})
}

func TestBGPDefaults(t *testing.T) {
	text := `
node: {interface: eth0, addresses: [192.0.2.10]}
bgp: {asn: 64600, router-id: 192.0.2.11, peers: [{address: 192.0.2.1, asn: 1}, {address: "2001:db8::1", asn: 1}]}
services: [{name: web, vip: 203.0.113.1, port: 80, protocol: tcp, encapsulation: gre, servers: [{name: s1, address: 192.0.2.53}]}]
`
	b, _, err := ParseBalancer([]byte(text))
	testhost.Must(t, err)
	peer := func(address string, family desired.Family) desired.BGPPeer {
		return desired.BGPPeer{Address: netip.MustParseAddr(address), ASN: 1, Port: 179,
			HoldTime: 9 * time.Second, Families: []desired.Family{family}}
	}
	want := &desired.BGP{
		ASN: 64600, RouterID: netip.MustParseAddr("192.0.2.11"), RestartTime: 2 * time.Minute,
		HoldDown: 10 * time.Second, DrainDelay: 5 * time.Second,
		Peers: []desired.BGPPeer{peer("192.0.2.1", desired.IPv4), peer("2001:db8::1", desired.IPv6)},
	}
	compare := cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
	if diff := cmp.Diff(want, b.BGP, compare); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if got := b.Services[0].Announcement(); got != desired.AnnounceReady {
		t.Errorf("announcement %s", got)
	}
}

const unnumbered = `
node: {interface: eth9, addresses: [192.0.2.10]}
bgp:
  asn: 64600
  router-id: 192.0.2.11
  med: 5
  aggregates:
    - {prefix: 203.0.113.0/24, prepend: 1, med: 7, communities: ["64600:1"]}
    - {prefix: "2001:db8:80::/48", summary-only: true}
  drain: {prepend: 3, med: 100, communities: [graceful-shutdown]}
  peers:
    - {interface: eth0, asn: 64512}
    - {interface: eth1, address: "fe80::1", asn: 64512, ttl-security: true}
    - {address: "2001:db8::1", asn: 64512, families: [ipv4, ipv6]}
services:
  - {name: web, vip: 203.0.113.1, port: 80, protocol: tcp, encapsulation: gre,
     bgp: {prepend: 2, med: 10}, servers: [{name: s1, address: 192.0.2.53}]}
  - {name: tls, vip: 203.0.113.1, port: 443, protocol: tcp, encapsulation: gre,
     bgp: {med: 10}, servers: [{name: s1, address: 192.0.2.53}]}
`

// TestBGPRoutes: aggregates, attributes of routes, and unnumbered peers.
func TestBGPRoutes(t *testing.T) {
	const prefix, drain, interval = "bgp.aggregates[1].prefix", "bgp.drain", "must be a whole number from 0 to "
	const notLeft = "must be less than bgp.drain.med, 100: routers prefer the lowest, and would not leave a drained balancer"
	const six = `prefix: "2001:db8:80::/48"`
	checkMutations(t, unnumbered, ParseBalancer, []mutation{
		{"no prefix", six + ", ", "", one(prefix, "required")},
		{"prefix of an address", six, "prefix: 203.0.112.1/32", one(prefix, "is one address; a VIP needs no aggregate")},
		{"prefix of everything", six, `prefix: "::/0"`, one(prefix,
			"has all addresses, and would attract all packets of routers")},
		{"host bits", six, "prefix: 198.51.100.1/24", one(prefix,
			"has bits set after the first 24; write it as 198.51.100.0/24")},
		{"multicast", six, "prefix: 224.0.0.0/24", one(prefix,
			"must be a prefix of unicast addresses that other hosts can reach")},
		{"overlap", six, "prefix: 203.0.112.0/22", one(prefix,
			"overlaps 203.0.113.0/24 of bgp.aggregates[0].prefix (line 8)")},
		{"the same aggregate", six, "prefix: 203.0.113.0/24", one(prefix,
			"overlaps 203.0.113.0/24 of bgp.aggregates[0].prefix (line 8)")},
		{"community of an aggregate", `["64600:1"]`, `["64600"]`, one("bgp.aggregates[0].communities[0]", community)},
		{"prepend", "prepend: 1", "prepend: 17", one("bgp.aggregates[0].prepend", interval+"16")},
		{"prepend of a service", "prepend: 2", "prepend: -1", one("services[0].bgp.prepend", interval+"16")},
		{"med", "med: 5", "med: 4294967296", one("bgp.med", interval+"4294967295")},
		{"med of a drain", "med: 100", "med: 0", one(drain+".med", "must be at least 1: routers prefer the lowest")},
		{"med of all routes", "med: 5", "med: 100", one("bgp.med", notLeft)},
		{"med of an aggregate", "med: 7", "med: 101", one("bgp.aggregates[0].med", notLeft)},
		{"empty drain", "drain: {prepend: 3, med: 100, communities: [graceful-shutdown]}", "drain: {prepend: 0}", one(drain,
			"changes no route; set prepend, med, local-pref or communities, or leave it out to withdraw the routes")},
		{"local-pref outside", "prepend: 3", "local-pref: 3", one(drain+".local-pref",
			"needs an internal session, and all peers have other autonomous systems; use prepend or med")},
		{"one VIP, two values", "bgp: {med: 10}", "bgp: {med: 11}", one("services[1].bgp.med",
			"11: VIP 203.0.113.1 has one route, and its value is already 10 by services[0].bgp.med (service web, line 17)")},
		{"never", "bgp: {med: 10}", "bgp: {med: 11, announce: never}", nil},
		{"interface and address", "interface: eth0", "interface: eth0, address: 192.0.2.1", one("bgp.peers[0].address",
			"must be an IPv6 link-local address, because the peer has an interface")},
		{"zone", `"fe80::1"`, `"fe80::1%eth1"`, one("bgp.peers[1].address", "must not have a zone: interface names the link")},
		{"no interface", `interface: eth1, `, "", one("bgp.peers[1].address", "is link-local: interface must name its link")},
		{"bad interface", "interface: eth0", "interface: et/h0", one("bgp.peers[0].interface",
			"must be an interface name: 1 to 15 bytes without /, : and spaces")},
		{"two peers of a link", "interface: eth1", "interface: eth0", one("bgp.peers[1].interface",
			"needs an address to have several peers; the interface is already used by bgp.peers[0].interface (line 12)")},
		{"multihop on a link", "ttl-security: true", "multihop: 2", one("bgp.peers[1].multihop",
			"cannot be used with interface: link-local addresses reach no further than the link")},
		{"two addresses of a link", "{interface: eth0", `{interface: eth1, address: "fe80::2"`, nil},
		{"an address of a link twice", "{interface: eth0", `{interface: eth1, address: "fe80::1"`, one("bgp.peers[1].address",
			"is already used by bgp.peers[0].address (line 12)")},
	})
	inside := strings.NewReplacer("prepend: 1, ", "", "prepend: 2, ", "", "prepend: 3", "local-pref: 50",
		"asn: 64512", "asn: 64600").Replace(unnumbered)
	checkMutations(t, inside, ParseBalancer, []mutation{
		{"prepend inside", "med: 7", "prepend: 1", one("bgp.aggregates[0].prepend", "cannot be used with an internal "+
			"session, such as that of bgp.peers[0]: the router would refuse the route; use local-pref")},
		{"local-pref of a drain", "local-pref: 50", "local-pref: 100", one(drain+".local-pref",
			"must be less than 100, which is that of routes without local-pref: routers prefer the highest")},
		{"local-pref of all routes", "med: 5", "local-pref: 50", one("bgp.local-pref", "must be more than "+
			"bgp.drain.local-pref, 50: routers prefer the highest, and would not leave a drained balancer")},
	})
	mustParse(t, inside, "", "", ParseBalancer)
	b := mustParse(t, unnumbered, "", "", ParseBalancer)
	want := []desired.Family{desired.IPv4, desired.IPv6}
	if diff := cmp.Diff(want, b.BGP.Peers[0].Families); diff != "" {
		t.Errorf("families of an unnumbered peer: %s", diff)
	}
	for i, want := range []string{"eth0", "fe80::1%eth1", "2001:db8::1"} {
		if got := b.BGP.Peers[i].Name(); got != want {
			t.Errorf("name %s, want %s", got, want)
		}
	}
}

// TestBGPReload: a reload may change peers, but not the identity of the speaker.
func TestBGPReload(t *testing.T) {
	old := mustParse(t, announced, "", "", ParseBalancer)
	now := mustParse(t, announced, "hold-time: 3s", "hold-time: 4s", ParseBalancer)
	now.BGP.Peers = now.BGP.Peers[:1]
	now.BGP.HoldDown = time.Minute
	if err := now.ReloadableFrom(old); err != nil {
		t.Error(err)
	}
	now.BGP.MED = new(uint32(5))
	want := []any{"bgp_changed", "hold-down, med", "peers_removed", "2001:db8::1", "peers_changed", "192.0.2.1 (hold-time)"}
	if diff := cmp.Diff(want, now.ChangesFrom(old).Attributes()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	now.BGP = nil
	err := now.ReloadableFrom(old)
	for _, name := range []string{"bgp.asn", "bgp.router-id", "bgp.listen", "bgp.restart-time"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("without the section: error %v, which does not name %s", err, name)
		}
	}
}

func TestCommunities(t *testing.T) {
	for text, want := range map[desired.Community]uint32{
		"0:0": 0, "64600:1": 64600<<16 | 1, "no-export": 0xffffff01, "graceful-shutdown": 0xffff0000,
	} {
		if value, ok := text.Standard(); !ok || value != want {
			t.Errorf("%s: %#x, %t", text, value, ok)
		}
	}
	if parts, ok := desired.Community("4200000000:0:7").Large(); !ok || parts != [3]uint32{4200000000, 0, 7} {
		t.Errorf("%v, %t", parts, ok)
	}
}

// TestVIPsWithoutPeer checks the warning about VIPs that are announced to no peer.
func TestVIPsWithoutPeer(t *testing.T) {
	const families, web, usable = "families: [ipv4, ipv6]", "services[0].vip", "announce: usable"
	const problem = "is not announced: no peer in bgp.peers has the family ipv4; for a service that is not to " +
		"be announced, write bgp: {announce: never}"
	checkWarnings(t, announced, ParseBalancer, []mutation{
		{"announced", "", "", nil},
		{"no IPv4", families, "families: [ipv6]", one(web, problem)},
	})
	without := strings.Replace(announced, families, "families: [ipv6]", 1)
	checkWarnings(t, without, ParseBalancer, []mutation{{"never", usable, "announce: never", nil}})
	const empty = "is not announced: no service that is announced has a VIP inside"
	inside := strings.Replace(unnumbered, `"2001:db8:80::/48"`, "198.51.100.0/24", 1)
	checkWarnings(t, inside, ParseBalancer, []mutation{
		{"nothing inside", "med: 5", "med: 6", one("bgp.aggregates[1].prefix", empty)},
		{"all inside", "198.51.100.0/24", "203.0.112.0/24", one("bgp.aggregates[1].prefix", empty)},
	})
}
