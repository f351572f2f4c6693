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

func TestBGPRules(t *testing.T) {
	const peer, other = "bgp.peers[0]", "bgp.peers[1]"
	const community = "must be ASN:VALUE with numbers up to 65535, ASN:VALUE:VALUE with numbers up to " +
		"4294967295, or one of: blackhole, graceful-shutdown, no-advertise, no-export, " +
		"no-export-subconfed, no-peer"
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
		{"address missing", "address: 192.0.2.1,", "", one(peer+".address", "required")},
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

// TestBGPReload: a reload may change peers, but not the identity of the speaker.
func TestBGPReload(t *testing.T) {
	old := mustParse(t, announced, "", "", ParseBalancer)
	now := mustParse(t, announced, "hold-time: 3s", "hold-time: 4s", ParseBalancer)
	now.BGP.Peers = now.BGP.Peers[:1]
	now.BGP.HoldDown = time.Minute
	if err := now.ReloadableFrom(old); err != nil {
		t.Error(err)
	}
	want := []any{"bgp_changed", "hold-down", "peers_removed", "2001:db8::1", "peers_changed", "192.0.2.1 (hold-time)"}
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
}
