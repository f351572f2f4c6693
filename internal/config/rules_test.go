// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/testhost"
)

func placementNames() string {
	var names []string
	for _, m := range desired.PlacementMethods {
		names = append(names, string(m.Name))
	}
	return strings.Join(names, ", ")
}

const validBalancer = `node:
  instance: edge-1
  interface: eth0
  locator: "fd00:6c:0:1::/64"
  addresses: [192.0.2.10, "2001:db8::10"]
  seed: 0x10
  limits: {flows: 1024, servers: 5}
metrics: {listen: "127.0.0.1:9188"}
services:
  - name: web
    vip: 2001:db8:80::1
    port: 80
    protocol: tcp
    placement: hash
    persistence: table
    encapsulation: srv6-insert
    candidates: 1
    buckets: 1021
    timeouts: {new: 5s, established: 4h, closing: 10s}
    health: {http: {path: /healthz, port: 8080}, interval: 100ms, timeout: 100ms, rise: 1, fall: 1}
    servers:
      - {name: s1, locator: "fd00:5:0:1::/64", host: "2001:db8:0:5::1", weight: 0}
      - {name: s2, locator: "fd00:5:0:2::/64", host: "2001:db8:0:5::2", weight: 1000}
  - name: dns
    vip: 198.51.100.53
    port: all
    protocol: udp
    encapsulation: gre
    health: {tcp: {port: 53}}
    servers:
      - {name: d1, address: 192.0.2.53}
      - {name: d2, address: "2001:db8::53"}
`

const validAgent = `node:
  instance: server
  interface: eth0
  locator: "fd00:5:0:1::/64"
  addresses: [192.0.2.53]
  mtu: 1500
  assign-vips: false
metrics: {listen: ":9189"}
services:
  - name: web
    vip: 2001:db8:80::1
    port: 80
    protocol: tcp
  - name: dns
    vip: 198.51.100.53
    port: all
    protocol: udp
    encapsulation: gre
`

// problem has the parts of an Error that tests compare.
type problem struct {
	Path, Problem string
}

// mutation replaces a text that occurs exactly once in the valid file. This causes the problems
// want.
type mutation struct {
	name     string
	from, to string
	want     []problem
}

func one(path, text string) []problem { return []problem{{path, text}} }

func checkMutations[T any](t *testing.T, valid string, parse func([]byte) (*T, fieldpath.Errors, error), mutations []mutation) {
	t.Helper()
	if _, _, err := parse([]byte(valid)); err != nil {
		t.Fatalf("the file to mutate is not valid:\n%v", err)
	}
	for _, m := range mutations {
		t.Run(m.name, func(t *testing.T) {
			if n := strings.Count(valid, m.from); n != 1 {
				t.Fatalf("%q is in the valid file %d times", m.from, n)
			}
			text := strings.Replace(valid, m.from, m.to, 1)
			checkSchema(t, reflect.TypeFor[T](), text, m.want)
			_, _, err := parse([]byte(text))
			var problems fieldpath.Errors
			if err != nil && !errors.As(err, &problems) {
				t.Fatalf("error of type %T: %v", err, err)
			}
			var got []problem
			for _, p := range problems {
				got = append(got, problem{p.Path, p.Problem})
			}
			if diff := cmp.Diff(m.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

const (
	unreachable = "; must be a unicast address that other hosts can reach"
	timeRange   = "must be from 5s to 4h0m0s"
	nameRange   = "must have 1 to 63 bytes, has "
	listenForm  = "must be an address and a port from 1 to 65535, " +
		"such as 127.0.0.1:9188 or [::1]:9188"
	ifaceForm   = "must be an interface name: 1 to 15 bytes without /, : and spaces"
	plainForm   = "must be 1 to 63 letters, digits, - or _"
	wholeNumber = "must be a whole number from "
)

func TestBalancerNodeRules(t *testing.T) {
	checkMutations(t, validBalancer, ParseBalancer, []mutation{
		{"interface missing", "interface: eth0", "", one("node.interface", "required")},
		{"interface empty", "interface: eth0", `interface: ""`, one("node.interface", "required")},
		{"interface long", "interface: eth0", "interface: a23456789012345x", one("node.interface", ifaceForm)},
		{"interface longest", "interface: eth0", "interface: a23456789012345", nil},
		{"interface slash", "interface: eth0", "interface: eth/0", one("node.interface", ifaceForm)},
		{"interface dots", "interface: eth0", "interface: ..", one("node.interface", ifaceForm)},
		{"interface space", "interface: eth0", "interface: eth 0", one("node.interface", ifaceForm)},
		{"instance slash", "instance: edge-1", "instance: a/b", one("node.instance", plainForm)},
		{"instance dot", "instance: edge-1", "instance: a.b", one("node.instance", plainForm)},
		{"instance empty", "instance: edge-1", `instance: ""`, one("node.instance", plainForm)},
		{"instance long", "instance: edge-1", "instance: " + strings.Repeat("a", 64), one("node.instance", plainForm)},

		{"locator missing", `locator: "fd00:6c:0:1::/64"`, "",
			one("node.locator", "required by services[0], whose encapsulation is srv6-insert")},
		{"locator /48", `"fd00:6c:0:1::/64"`, `"fd00:6c::/48"`, one("node.locator", "must be an IPv6 /64")},
		{"locator IPv4", `"fd00:6c:0:1::/64"`, `10.0.0.0/8`, one("node.locator", "must be an IPv6 /64")},
		{"locator host bits", `"fd00:6c:0:1::/64"`, `"fd00:6c:0:1::1/64"`,
			one("node.locator", "has bits set after the first 64; write it as fd00:6c:0:1::/64")},
		{"locator multicast", `"fd00:6c:0:1::/64"`, `"ff05::/64"`,
			one("node.locator", "must be a unicast prefix that other hosts can reach")},
		{"locator of IPv4-mapped addresses", `"fd00:6c:0:1::/64"`, `"::/64"`,
			one("node.locator", "must be a unicast prefix that other hosts can reach")},
		{"locator no prefix", `"fd00:6c:0:1::/64"`, `"fd00:6c:0:1::"`,
			one("node.locator", "must be a prefix such as fd00:5:0:1::/64")},

		{"no IPv4 source", "192.0.2.10, ", "",
			one("node.addresses", "needs an IPv4 address, because services[1].servers[0].address is one")},
		{"no IPv6 source", `, "2001:db8::10"`, "",
			one("node.addresses", "needs an IPv6 address, because services[1].servers[1].address is one")},
		{"two IPv4 sources", "192.0.2.10, ", "192.0.2.10, 192.0.2.11, ",
			one("node.addresses[1]", "is a second IPv4 address; the first is node.addresses[0]")},
		{"source mapped", "192.0.2.10, ", `"::ffff:192.0.2.10", `,
			one("node.addresses[0]", "is IPv4-mapped; write it as 192.0.2.10")},
		{"source link-local", `"2001:db8::10"`, `"fe80::1%eth0"`,
			one("node.addresses[1]", "is link-local"+unreachable)},
		{"source zone", `"2001:db8::10"`, `"2001:db8::10%eth0"`,
			one("node.addresses[1]", "must not have a zone")},
		{"switch", "seed: 0x10", "switch: {address: 'localhost:9559', network-port: 1, host-port: 2}", nil},
		{"switch without all", "seed: 0x10", "switch: {election-id: 0, network-port: 512}", []problem{
			{Path: "node.switch.network-port", Problem: "must be a whole number from 1 to 511"},
			{Path: "node.switch.host-port", Problem: "must be a whole number from 1 to 511"},
			{Path: "node.switch.address", Problem: "required"},
			{Path: "node.switch.election-id", Problem: "must be at least 1"},
		}},
		{"switch with TLS", "seed: 0x10", "switch: {address: 'unix:/switch', network-port: 1, host-port: 2, ca-file: /ca, cert-file: /cert, key-file: /key}", nil},
		{"switch with half of TLS", "seed: 0x10", "switch: {address: '[::1]', network-port: 1, host-port: 2, cert-file: cert}", []problem{
			{Path: "node.switch.address", Problem: "must be host:port or unix:path"},
			{Path: "node.switch.cert-file", Problem: "must be absolute"},
			{Path: "node.switch.key-file", Problem: "required by cert-file"},
			{Path: "node.switch.ca-file", Problem: "required by cert-file"},
		}},
		{"switch with one port", "seed: 0x10", "switch: {address: 'localhost:9559', network-port: 1, host-port: 1}",
			one("node.switch.host-port", "must not be the network-port, 1")},
		{"switch of two arms", "seed: 0x10", "inside: eth9\n  switch: {address: 'localhost:9559', network-port: 1, host-port: 2}",
			one("node.inside", "must not be set with node.switch, whose packets to servers leave by the network-port")},
		{"varied sources IPv6", "seed: 0x10", `tunnel-sources: "2001:db8:9::/64"`,
			one("node.tunnel-sources", "is 2001:db8:9::/64; must be an IPv4 prefix: outer IPv6 headers have a flow label instead")},
		{"varied sources with host bits", "seed: 0x10", `tunnel-sources: "192.0.2.10/28"`,
			one("node.tunnel-sources", "has bits behind its length; write it as 192.0.2.0/28")},
		{"varied sources elsewhere", "seed: 0x10", `tunnel-sources: "10.0.0.0/8"`,
			one("node.tunnel-sources", "must contain the IPv4 address of node.addresses")},
		{"varied sources around a server", "seed: 0x10", `tunnel-sources: "192.0.2.0/24"`,
			one("node.tunnel-sources", "must not contain 192.0.2.53, which is services[1].servers[0].address")},
		{"source is VIP", "192.0.2.10, ", "198.51.100.53, ",
			one("node.addresses[0]", "is the VIP of services[1]")},
		{"source is server", "192.0.2.10, ", "192.0.2.53, ",
			one("services[1].servers[0].address", "is the balancer's own")},

		{"outside", "seed: 0x10", "internal: false", nil},
		{"inside", "seed: 0x10", "inside: eth1", nil},
		{"signal key", "seed: 0x10", "signal-key: /etc/segue/signal.key", nil},
		{"state relative", "seed: 0x10", "state: var", one("node.state", "must be absolute")},
		{"rejects nothing", "seed: 0x10", "reject: false\n  drop-removed-vips: 0s", nil},
		{"removed VIPs for too long", "seed: 0x10", "drop-removed-vips: 25h",
			one("node.drop-removed-vips", "must be from 0s to 24h0m0s")},
		{"removed VIPs for less than nothing", "seed: 0x10", "drop-removed-vips: -1s",
			one("node.drop-removed-vips", "must be from 0s to 24h0m0s")},
		{"signal key relative", "seed: 0x10", "signal-key: signal.key", one("node.signal-key", "must be absolute")},

		{"flows few", "flows: 1024", "flows: 1023",
			one("node.limits.flows", wholeNumber+"1024 to 100000000")},
		{"flows many", "flows: 1024", "flows: 100_000_001",
			one("node.limits.flows", wholeNumber+"1024 to 100000000")},
		{"flows most", "flows: 1024", "flows: 100_000_000", nil},
		{"servers none", "servers: 5}", "servers: 0}",
			one("node.limits.servers", wholeNumber+"1 to 65535")},
		{"servers many", "servers: 5}", "servers: 65536}",
			one("node.limits.servers", wholeNumber+"1 to 65535")},
		{"servers just enough", "servers: 5}", "servers: 4}", nil},
		{"servers too many", "servers: 5}", "servers: 3}",
			one("node.limits.servers", "all services together have 4 servers, and the limit is 3")},

		{"listen no port", `"127.0.0.1:9188"`, `"127.0.0.1"`, one("metrics.listen", listenForm)},
		{"listen port 0", `"127.0.0.1:9188"`, `"127.0.0.1:0"`, one("metrics.listen", listenForm)},
		{"listen port name", `"127.0.0.1:9188"`, `"127.0.0.1:http"`, one("metrics.listen", listenForm)},
		{"listen port large", `"127.0.0.1:9188"`, `"127.0.0.1:65536"`, one("metrics.listen", listenForm)},
		{"listen IPv6 bare", `"127.0.0.1:9188"`, `"::1:9188"`, one("metrics.listen", listenForm)},
		{"listen not a host", `"127.0.0.1:9188"`, `"a b:9188"`, one("metrics.listen", listenForm)},
		{"listen host name", `"127.0.0.1:9188"`, `"localhost:9188"`, nil},
		{"listen IPv6", `"127.0.0.1:9188"`, `"[::1]:9188"`, nil},
	})
}

func TestStoreRules(t *testing.T) {
	const endpoints, member = "endpoints: [http://etcd1:2379, http://etcd2:2379]",
		"must be the URL of a member of etcd, such as https://etcd1.example:2379"
	const file = "node: {interface: eth0, state: /var/lib/segue}\n" +
		"store: {etcd: {" + endpoints + ", prefix: /segue/main}}\n"
	with := func(name, etcd string, want []problem) mutation {
		return mutation{name, endpoints, etcd, want}
	}
	at := func(field string) string { return "store.etcd." + field }
	checkMutations(t, file, ParseBalancer, []mutation{
		{"no state", "/var/lib/segue", `""`,
			one("node.state", "required by store: the balancer keeps there what it has read")},
		{"no prefix", ", prefix: /segue/main", "", one(at("prefix"), "required")},
		{"prefix of all", "/segue/main", "/",
			one(at("prefix"), "must begin with a slash and name the fleet, such as /segue/main")},
		with("no endpoints", "endpoints: []", one(at("endpoints"), "at least one is required")),
		with("no port", "endpoints: [http://etcd1]", one(at("endpoints[0]"), member)),
		with("another scheme", "endpoints: [http://a:1, https://b:1]",
			one(at("endpoints[1]"), "must have the same scheme, http or https, as the other endpoints")),
		with("TLS", "endpoints: [https://a:1], ca-file: /ca, cert-file: /cert, key-file: /key", nil),
		with("relative file", "endpoints: [https://a:1], ca-file: ca", one(at("ca-file"), "must be absolute")),
		with("certificates without TLS", endpoints+", ca-file: /ca",
			one(at("ca-file"), "not used: the endpoints are http, and certificates need https")),
		with("password without TLS", endpoints+", username: a, password-file: /password", nil),
	})
}

// Neither signals of servers nor balancers' packets with a segment routing header arrive from
// outside.
func TestOutsideRules(t *testing.T) {
	outside := func(file, from, to string) string {
		return strings.Replace(strings.Replace(file, "interface: eth0", "interface: eth0\n  internal: false", 1), from, to, 1)
	}
	inside := func(file, name string) string {
		return strings.Replace(file, "interface: eth0", "interface: eth0\n  inside: "+name, 1)
	}
	for _, c := range []struct {
		name string
		err  error
		want string
	}{
		{"two interfaces", parses(ParseBalancer, inside(validBalancer, "eth1")), ""},
		{"one interface twice", parses(ParseBalancer, inside(validBalancer, "eth0")), `line 4: node.inside "eth0": must differ from node.interface`},
		{"no interface", parses(ParseBalancer, inside(validBalancer, `""`)), ""},
		{"two inside", parses(ParseBalancer, inside(strings.Replace(validBalancer, "seed: 0x10", "internal: true", 1), "eth1")),
			`line 7: node.internal "true": must be false or absent if node.inside is set: the domain is then reached by node.inside`},
		{"agent with two", parses(ParseAgent, inside(validAgent, "eth1")),
			"line 4: node.inside: unknown field; must be one of: instance, interface, internal, locator, addresses, underlay, xdp-mode, mtu, assign-vips, balancers, state, signal-key"},
		{"balancer", parses(ParseBalancer, outside(validBalancer, "", "")), ""},
		{"balancer that hunts", parses(ParseBalancer, outside(validBalancer, "placement: hash", "placement: hunt")),
			`line 4: node.internal "false": must be true for services[0], whose placement is hunt: ` +
				"its signals arrive on node.interface, unless node.inside is set"},
		{"balancer that hunts inside", parses(ParseBalancer,
			inside(outside(validBalancer, "placement: hash", "placement: hunt"), "eth1")), ""},
		{"agent in tunnels", parses(ParseAgent, outside(validAgent, "protocol: tcp", "protocol: tcp\n    encapsulation: ipip")), ""},
		{"agent", parses(ParseAgent, outside(validAgent, "", "")),
			`line 4: node.internal "false": must be true for services[0], whose encapsulation is srv6-encap: ` +
				"the balancers' packets arrive on node.interface"},
	} {
		got := ""
		if c.err != nil {
			got = c.err.Error()
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func parses[T any](parse func([]byte) (*T, fieldpath.Errors, error), file string) error {
	_, _, err := parse([]byte(file))
	return err
}

func TestServiceRules(t *testing.T) {
	vip := "vip: 2001:db8:80::1"
	checkMutations(t, validBalancer, ParseBalancer, []mutation{
		{"name missing", "name: web\n    vip", "vip", one("services[0].name", "required")},
		{"name empty", "name: web", `name: ""`, one("services[0].name", "required")},
		{"name long", "name: web", "name: " + strings.Repeat("é", 32), one("services[0].name", nameRange+"64")},
		{"name longest", "name: web", "name: " + strings.Repeat("a", 63), nil},
		{"name space", "name: web", "name: my web", one("services[0].name", "must have only printable characters, and no spaces")},
		{"name control", "name: web", `name: "a\x7f"`, one("services[0].name", "must have only printable characters, and no spaces")},
		{"name slash", "name: dns", "name: d/s", one("services[1].name",
			"must not have a slash: commands name a server as SERVICE/SERVER")},
		{"name used", "name: dns", "name: web", one("services[1].name", "is already used by services[0].name (service web, line 10)")},

		{"VIP missing", vip, "vip:", one("services[0].vip", "required")},
		{"VIP empty", vip, `vip: ""`, one("services[0].vip", "required")},
		{"VIP a name", vip, "vip: example.com", one("services[0].vip", "must be an IP address")},
		{"VIP multicast", vip, "vip: ff02::1", one("services[0].vip", "is multicast"+unreachable)},
		{"VIP unspecified", vip, "vip: '::'", one("services[0].vip", "is unspecified"+unreachable)},
		{"VIP loopback", vip, "vip: '::1'", one("services[0].vip", "is loopback"+unreachable)},
		{"VIP IPv4 loopback", "198.51.100.53", "127.0.0.5", one("services[1].vip", "is loopback"+unreachable)},
		{"VIP broadcast", "198.51.100.53", "255.255.255.255", one("services[1].vip", "is broadcast"+unreachable)},
		{"VIP mapped", "198.51.100.53", "'::ffff:198.51.100.53'",
			one("services[1].vip", "is IPv4-mapped; write it as 198.51.100.53")},
		{"VIP IPv4 in srv6-insert", vip, "vip: 192.0.2.1",
			one("services[0].vip", "must be IPv6 for encapsulation srv6-insert; IPv4 needs srv6-encap")},
		{"VIP in own locator", vip, "vip: fd00:6c:0:1::80", one("services[0].vip", "is in the locator of the balancer")},
		{"VIP in server's locator", vip, "vip: fd00:5:0:2::80",
			one("services[0].vip", "is in the locator of services[0].servers[1]")},

		{"port missing", "port: 80\n", "\n", one("services[0].port", "required")},
		{"port 0", "port: 80\n", "port: 0\n", one("services[0].port", "must be a port from 1 to 65535, or all")},
		{"port large", "port: 80\n", "port: 65536\n", one("services[0].port", "must be a port from 1 to 65535, or all")},
		{"port octal", "port: 80\n", "port: 080\n", one("services[0].port", "must be a port from 1 to 65535, or all")},
		{"port name", "port: all", "port: any", one("services[1].port", "must be a port from 1 to 65535, or all")},
		{"port quoted", "port: 80\n", "port: '80'\n", nil},
		{"protocol missing", "protocol: tcp", "", one("services[0].protocol", "required")},
		{"protocol unknown", "protocol: tcp", "protocol: sctp", one("services[0].protocol", "must be one of: tcp, udp")},
		{"placement unknown", "placement: hash", "placement: best",
			one("services[0].placement", "must be one of: "+placementNames())},
		{"placement hunt", "placement: hash", "placement: hunt", nil},
		{"random candidates", "placement: hash", "placement: hunt\n    selection: random", nil},
		{"more candidates than servers", "placement: hash\n    persistence: table\n    encapsulation: srv6-insert\n    candidates: 1",
			"placement: hunt\n    encapsulation: srv6-insert\n    candidates: 3", nil},
		{"selection unknown", "placement: hash", "placement: hunt\n    selection: best",
			one("services[0].selection", "must be one of: consistent, random, reports, spare")},
		{"probe", "placement: hash", "placement: hash\n    probe: true", nil},
		{"no probe", "placement: hash", "placement: hash\n    probe: false", nil},
		{"probe through a tunnel", "port: all\n    protocol: udp", "port: all\n    probe: true\n    protocol: udp",
			one("services[1].probe", "must be false for encapsulation gre: probes need a locator")},
		{"selection without hunt", "placement: hash", "placement: hash\n    selection: random",
			one("services[0].selection", "not used by placement hash")},
		{"round-robin", "placement: hash", "placement: round-robin", nil},
		{"selection of round-robin", "placement: hash", "placement: round-robin\n    selection: consistent",
			one("services[0].selection", "not used by placement round-robin")},
		{"hunt for UDP", "protocol: tcp\n    placement: hash", "protocol: udp\n    placement: hunt",
			one("services[0].protocol", "must be tcp for placement hunt, except with persistence quic: without a handshake or connection IDs, the balancer cannot learn which server accepts a flow")},
		{"hunt by gre", "protocol: udp\n    encapsulation: gre", "protocol: tcp\n    placement: hunt\n    encapsulation: gre",
			one("services[1].encapsulation",
				"must be srv6-insert or srv6-encap for placement hunt: gre has no segment list")},
		{"persistence unknown", "persistence: table", "persistence: sticky",
			one("services[0].persistence", "must be one of: table, stateless, hint, quic")},
		{"stateless", "persistence: table", "persistence: stateless\n    history: 4\n    generations: 64", nil},
		{"hint", "persistence: table", "persistence: hint\n    history: 4\n    generations: 64", nil},
		{"no hints", "flows: 1024", "flows: 1024, hints: 0", nil},
		{"few hints", "flows: 1024", "flows: 1024, hints: 100", one("node.limits.hints", "must be 0 or at least 1024")},
		{"hint by spare", "placement: hash\n    persistence: table",
			"placement: hunt\n    selection: spare\n    persistence: hint",
			one("services[0].selection", "must not be spare for persistence hint: "+
				"a server with free capacity can be in no column of the flow's bucket")},
		{"hint by reports", "placement: hash\n    persistence: table",
			"placement: hunt\n    selection: reports\n    persistence: hint", nil},
		{"history of a table", "persistence: table", "persistence: table\n    history: 3",
			one("services[0].history", "not used by persistence table")},
		{"CRC", "persistence: table\n    encapsulation: srv6-insert\n    candidates: 1\n    buckets: 1021",
			"persistence: stateless\n    encapsulation: srv6-insert\n    bucket-hash: crc-32\n    buckets: 1024", nil},
		{"CRC of a table", "persistence: table", "persistence: table\n    bucket-hash: crc-32",
			one("services[0].bucket-hash", "not used by persistence table")},
		{"CRC with hints", "persistence: table", "persistence: hint\n    bucket-hash: crc-32",
			one("services[0].bucket-hash", "not used by persistence hint")},
		{"CRC of a prime", "persistence: table", "persistence: stateless\n    bucket-hash: crc-32",
			one("services[0].bucket-hash",
				"crc-32 requires a power of two of buckets, because switches cannot multiply; the service has 1021")},
		{"another hash", "persistence: table", "persistence: stateless\n    bucket-hash: crc-32c",
			one("services[0].bucket-hash", "must be one of: multilinear, crc-32")},
		{"affinity", "placement: hash", "placement: hash\n    affinity: {}", nil},
		{"affinity of a VIP", "placement: hash",
			"placement: hunt\n    selection: reports\n    affinity: {by: client, prefix-ipv4: 8, prefix-ipv6: 16, scope: vip}", nil},
		{"affinity by candidates", "placement: hash",
			"placement: infer\n    infer: {among: candidates}\n    affinity: {by: client}", nil},
		{"affinity with VIPs of both families", "vip: 198.51.100.53",
			"vips: [198.51.100.53, \"2001:db8:80::53\"]\n    affinity: {}", one("services[1].affinity.by",
				"must be none for a service with VIPs of both families: write a service for each family")},
		{"no affinity", "placement: hash", "placement: round-robin\n    affinity: {by: none}", nil},
		{"affinity by an address", "placement: hash", "placement: hash\n    affinity: {by: address}",
			one("services[0].affinity.by", "must be one of: client, none")},
		{"affinity of a port", "placement: hash", "placement: hash\n    affinity: {scope: port}",
			one("services[0].affinity.scope", "must be one of: service, vip")},
		{"affinity by few bits", "placement: hash", "placement: hash\n    affinity: {prefix-ipv4: 7}",
			one("services[0].affinity.prefix-ipv4", "must be a whole number from 8 to 32")},
		{"affinity by no bits", "placement: hash", "placement: hash\n    affinity: {prefix-ipv6: 0}",
			one("services[0].affinity.prefix-ipv6", "must be a whole number from 16 to 128")},
		{"affinity by odd bits", "placement: hash", "placement: hash\n    affinity: {prefix-ipv6: 126}",
			one("services[0].affinity.prefix-ipv6", "must be a multiple of 4")},
		{"affinity by CRC", "persistence: table\n    encapsulation: srv6-insert\n    candidates: 1\n    buckets: 1021",
			"persistence: stateless\n    encapsulation: srv6-insert\n    bucket-hash: crc-32\n    buckets: 1024\n    affinity: {by: client}",
			one("services[0].affinity.by", "must be none for bucket-hash crc-32: switches select buckets by whole flows")},
		{"affinity in turn", "placement: hash", "placement: round-robin\n    affinity: {by: client}",
			one("services[0].affinity.by", "must be none for placement round-robin: new connections get servers outside their bucket's row")},
		{"affinity at random", "placement: hash", "placement: hunt\n    selection: random\n    affinity: {by: client}",
			one("services[0].affinity.by", "must be none for selection random: new connections get servers outside their bucket's row")},
		{"affinity with spare servers", "placement: hash", "placement: hunt\n    selection: spare\n    affinity: {by: client}",
			one("services[0].affinity.by", "must be none for selection spare: new connections get servers outside their bucket's row")},
		{"affinity among all", "placement: hash", "placement: least-queue\n    affinity: {by: client}",
			one("services[0].affinity.by", "must be none for infer.among all: new connections get servers outside their bucket's row")},
		{"affinity by samples", "placement: hash", "placement: least-queue\n    infer: {among: two}\n    affinity: {by: client}",
			one("services[0].affinity.by", "must be none for infer.among two: new connections get servers outside their bucket's row")},
		{"deep history", "persistence: table", "persistence: stateless\n    history: 5",
			one("services[0].history", "must be from 1 to 4")},
		{"many generations", "persistence: table", "persistence: stateless\n    generations: 65",
			one("services[0].generations", "must be from 1 to 64")},
		{"stateless by gre", "protocol: udp\n    encapsulation: gre", "protocol: tcp\n    persistence: stateless\n    encapsulation: gre",
			one("services[1].encapsulation", "must be srv6-insert or srv6-encap for persistence stateless: "+
				"gre cannot ask a server whether it has a flow")},
		{"stateless UDP", "protocol: tcp\n    placement: hash\n    persistence: table",
			"protocol: udp\n    placement: hash\n    persistence: stateless",
			one("services[0].protocol", "must be tcp for persistence stateless: a server cannot tell whether it has a flow of UDP")},
		{"stateless in turn", "placement: hash\n    persistence: table", "placement: round-robin\n    persistence: stateless",
			one("services[0].placement", "must be hash or hunt for persistence stateless: "+
				"the server of a flow in turn is in no column of its bucket")},
		{"stateless at random", "placement: hash\n    persistence: table",
			"placement: hunt\n    selection: random\n    persistence: stateless",
			one("services[0].selection", "must not be random for persistence stateless: "+
				"a random server is in no column of the flow's bucket")},
		{"stateless by reports", "placement: hash\n    persistence: table",
			"placement: hunt\n    selection: reports\n    persistence: stateless",
			one("services[0].selection", "must not be reports for persistence stateless: "+
				"servers report their loads in signals, and send none")},
		{"too many columns", "persistence: table\n    encapsulation: srv6-insert\n    candidates: 1\n    buckets: 1021",
			"persistence: stateless\n    encapsulation: srv6-insert\n    candidates: 8\n    buckets: 131071",
			one("services[0].buckets", "131071 buckets of 8 candidates: persistence stateless can have at most 524288 together")},
		{"encapsulation unknown", "encapsulation: gre", "encapsulation: vxlan",
			one("services[1].encapsulation", "must be one of: srv6-insert, srv6-encap, gre, ipip")},

		{"candidates 0", "candidates: 1", "candidates: 0", one("services[0].candidates", "must be from 1 to 8")},
		{"candidates 2", "candidates: 1", "candidates: 2", nil},
		{"generations 1", "candidates: 1", "generations: 1", nil},
		{"generations 0", "candidates: 1", "generations: 0", one("services[0].generations", "must be from 1 to 4")},
		{"generations 5", "candidates: 1", "generations: 5", one("services[0].generations", "must be from 1 to 4")},
		{"candidates 9", "candidates: 1", "candidates: 9", one("services[0].candidates", "must be from 1 to 8")},
		{"candidates -1", "candidates: 1", "candidates: -1", one("services[0].candidates", "must be from 1 to 8")},
		{"buckets neither", "buckets: 1021", "buckets: 1000",
			one("services[0].buckets", "1000 buckets: neither a prime nor a power of two; "+
				"the nearest prime is 997, and the nearest powers of two are 512 and 1024")},
		{"buckets power", "buckets: 1021", "buckets: 1024", nil},
		{"buckets 1", "buckets: 1021", "buckets: 1", one("services[0].buckets", "1 buckets: out of range 2 to 16777216")},
		{"buckets few", "buckets: 1021", "buckets: 2", one("services[0].buckets", "2 must exceed the number of servers, 2")},
		{"buckets enough", "buckets: 1021", "buckets: 3", nil},
		{"buckets most", "buckets: 1021", "buckets: 16777216", nil},
		{"buckets many", "buckets: 1021", "buckets: 16777217",
			one("services[0].buckets", "16777217 buckets: out of range 2 to 16777216")},

		{"same service", "vip: 198.51.100.53\n    port: all\n    protocol: udp",
			"vip: 2001:db8:80:0::1\n    port: 80\n    protocol: tcp",
			one("services[1]", "tcp port 80 of 2001:db8:80::1 is already used by services[0] (service web, line 10)")},
		{"other protocol", "vip: 198.51.100.53\n    port: all", "vip: 2001:db8:80::1\n    port: 80", nil},
		{"several VIPs and ports", vip + "\n    port: 80", `vips: ["2001:db8:80::1", "2001:db8:80::2"]` + "\n    ports: [80, 443]", nil},
		{"first VIP and port", vip + "\n    port: 80", vip + "\n    port: 80\n    " +
			`vips: ["2001:db8:80::1", "2001:db8:80::2"]` + "\n    ports: [80, 443]", nil},
		{"not the first VIP", vip, vip + "\n    " + `vips: ["2001:db8:80::2", "2001:db8:80::1"]`,
			one("services[0].vip", "must be absent, or the first of vips, 2001:db8:80::2")},
		{"not the first port", "port: 80\n", "port: 80\n    ports: [443, 80]\n",
			one("services[0].port", "must be absent, or the first of ports, 443")},
		{"VIP twice", vip, `vips: ["2001:db8:80::1", "2001:db8:80:0::1"]`,
			one("services[0].vips[1]", "is already used by services[0].vips[0] (service web, line 11)")},
		{"VIP in a list IPv4", vip, `vips: ["2001:db8:80::1", 198.51.100.1]`,
			one("services[0].vips[1]", "must be IPv6 for encapsulation srv6-insert; IPv4 needs srv6-encap")},
		{"port in a list all", "port: 80\n", "ports: [80, all]\n",
			one("services[0].ports[1]", "must be a port from 1 to 65535; for all ports, write port: all")},
		{"port twice", "port: 80\n", "ports: [80, 80]\n",
			one("services[0].ports[1]", "is already used by services[0].ports[0] (service web, line 12)")},
		{"port of a list used", "vip: 198.51.100.53\n    port: all\n    protocol: udp",
			"vips: [198.51.100.53, \"2001:db8:80::1\"]\n    ports: [53, 80]\n    protocol: tcp",
			one("services[1]", "tcp port 80 of 2001:db8:80::1 is already used by services[0] (service web, line 10)")},
		{"sources", vip, vip + "\n    sources: [\"2001:db8::/32\", 10.0.0.0/8]", nil},
		{"source not masked", vip, vip + "\n    sources: [10.0.0.1/8]",
			one("services[0].sources[0]", "has bits set after the first 8; write it as 10.0.0.0/8")},
		{"source twice", vip, vip + "\n    sources: [10.0.0.0/8, 10.0.0.0/8]",
			one("services[0].sources[1]", "is already used by services[0].sources[0] (service web, line 12)")},
		{"source mapped", vip, vip + "\n    sources: [\"::ffff:10.0.0.0/104\"]",
			one("services[0].sources[0]", "is IPv4-mapped; write it as an IPv4 prefix")},
		{"all ports beside one", "vip: 198.51.100.53\n    port: all\n    protocol: udp",
			"vip: 2001:db8:80::1\n    port: all\n    protocol: tcp", nil},
	})
}

func TestTimeoutAndHealthRules(t *testing.T) {
	checkMutations(t, validBalancer, ParseBalancer, []mutation{
		{"new short", "new: 5s", "new: 4999ms", one("services[0].timeouts.new", timeRange)},
		{"new zero", "new: 5s", "new: 0s", one("services[0].timeouts.new", timeRange)},
		{"established long", "established: 4h", "established: 4h0m1s", one("services[0].timeouts.established", timeRange)},
		{"closing negative", "closing: 10s", "closing: -10s", one("services[0].timeouts.closing", timeRange)},
		{"no unit", "closing: 10s", "closing: 10",
			one("services[0].timeouts.closing", "must be a duration with a unit, such as 500ms, 30s or 2h")},
		{"no check", "{http: {path: /healthz, port: 8080}, ", "{",
			one("services[0].health", "must have exactly one of http, https, tcp and udp; tcp: {} uses the defaults")},
		{"two checks", "{tcp: {port: 53}}", "{tcp: {port: 53}, http: {port: 53}}",
			one("services[1].health", "must have exactly one of http, https, tcp and udp; tcp: {} uses the defaults")},
		{"tcp without port", "{tcp: {port: 53}}", "{tcp: {}}",
			one("services[1].health.tcp.port", "required, because the service's port is all")},
		{"http without port", "{tcp: {port: 53}}", "{http: {}}",
			one("services[1].health.http.port", "required, because the service's port is all")},
		{"check port 0", "port: 8080", "port: 0",
			one("services[0].health.http.port", wholeNumber+"1 to 65535")},
		{"check port large", "port: 8080", "port: 65536",
			one("services[0].health.http.port", wholeNumber+"1 to 65535")},
		{"relative path", "/healthz", "healthz",
			one("services[0].health.http.path", "must be a URL path that begins with /")},
		{"whole URL", "/healthz", "'http://a/'",
			one("services[0].health.http.path", "must be a URL path that begins with /")},
		{"control in path", "/healthz", `"/a\r\nb"`,
			one("services[0].health.http.path", "must be a URL path that begins with /")},
		{"empty path", "/healthz", `""`,
			one("services[0].health.http.path", "must be a URL path that begins with /")},
		{"interval short", "interval: 100ms, timeout: 100ms", "interval: 99ms",
			one("services[0].health.interval", "must be at least 100ms")},
		{"timeout long", "timeout: 100ms", "timeout: 101ms", one("services[0].health.timeout", "must be from 1ms to 100ms")},
		{"timeout zero", "timeout: 100ms", "timeout: 0s", one("services[0].health.timeout", "must be from 1ms to 100ms")},
		{"rise 0", "rise: 1", "rise: 0", one("services[0].health.rise", wholeNumber+"1 to 1000")},
		{"fall 0", "fall: 1", "fall: 0", one("services[0].health.fall", wholeNumber+"1 to 1000")},
		{"rules of failures", "timeouts: {new", "slow-start: 1h\n    on-failure: reset\n    all-failed: refuse\n    timeouts: {new", nil},
		{"on-failure unknown", "timeouts: {new", "on-failure: drop\n    timeouts: {new",
			one("services[0].on-failure", "must be one of: keep, move-udp, reset")},
		{"on-drain", "timeouts: {new", "on-drain: keep\n    timeouts: {new", nil},
		{"on-drain unknown", "timeouts: {new", "on-drain: reset\n    timeouts: {new",
			one("services[0].on-drain", "must be one of: keep, move-udp")},
		{"all-failed unknown", "timeouts: {new", "all-failed: reset\n    timeouts: {new",
			one("services[0].all-failed", "must be one of: use, refuse")},
		{"slow-start long", "timeouts: {new", "slow-start: 61m\n    timeouts: {new",
			one("services[0].slow-start", "must be from 0s to 1h0m0s")},
		{"slow-start of a placement that infers", "placement: hash", "placement: infer\n    slow-start: 1s",
			one("services[0].slow-start", "not used by placement infer: it has infer.slow-start")},
		{"via unknown", "fall: 1", "fall: 1, via: agent", one("services[0].health.via", "must be one of: packets, host")},
		{"jitter", "fall: 1", "fall: 1, jitter: 50ms", nil},
		{"jitter long", "fall: 1", "fall: 1, jitter: 51ms", one("services[0].health.jitter", "must be from 0s to 50ms")},
		{"statuses", "port: 8080", `port: 8080, status: "200, 301 - 302,404"`, nil},
		{"status text", "port: 8080", `port: 8080, status: ok`,
			one("services[0].health.http.status", `"ok" is not a status from 100 to 599, or a range of them: write it as 200-299, 404`)},
		{"status range reversed", "port: 8080", `port: 8080, status: 299-200`,
			one("services[0].health.http.status", `"299-200" is not a status from 100 to 599, or a range of them: write it as 200-299, 404`)},
		{"host with a path", "port: 8080", `port: 8080, host: a/b`,
			one("services[0].health.http.host", "must be a host name or an address, and perhaps a port")},
		{"verify http", "port: 8080", "port: 8080, verify: true",
			one("services[0].health.http.verify", "not used by http, which has no certificates")},
		{"https", "{http: {path: /healthz, port: 8080}", "{https: {port: 8443, verify: true, host: a.example, body: ok}", nil},
		{"udp", "{tcp: {port: 53}}", `{udp: {port: 53, request-hex: "00 0a", answer: x}}`, nil},
		{"udp without a request", "{tcp: {port: 53}}", "{udp: {port: 53}}",
			one("services[1].health.udp.request", "required, unless there is request-hex")},
		{"udp with two requests", "{tcp: {port: 53}}", "{udp: {port: 53, request: a, request-hex: 0a}}",
			one("services[1].health.udp.request-hex", "not allowed beside request")},
		{"udp with two answers", "{tcp: {port: 53}}", "{udp: {port: 53, request: a, answer: b, answer-hex: 0a}}",
			one("services[1].health.udp.answer-hex", "not allowed beside answer")},
		{"udp with half a byte", "{tcp: {port: 53}}", "{udp: {port: 53, request-hex: 00a}}",
			one("services[1].health.udp.request-hex", "must be hexadecimal digits, two for each byte")},
		{"udp without port", "{tcp: {port: 53}}", "{udp: {request: a}}",
			one("services[1].health.udp.port", "required, because the service's port is all")},
		{"body long", "port: 8080", "port: 8080, body: " + strings.Repeat("x", 513),
			one("services[0].health.http.body", "must have at most 512 bytes, has 513")},
	})
}

func TestServerRules(t *testing.T) {
	s1 := `{name: s1, locator: "fd00:5:0:1::/64", host: "2001:db8:0:5::1", weight: 0}`
	checkMutations(t, validBalancer, ParseBalancer, []mutation{
		{"no servers", "      - " + s1 + "\n      - {name: s2, locator: \"fd00:5:0:2::/64\", host: \"2001:db8:0:5::2\", weight: 1000}\n", "", nil},
		{"drained", "name: s1, ", "name: s1, drained: true, ", nil},
		{"drained unknown", "name: s1, ", "name: s1, drained: maybe, ",
			one("services[0].servers[0].drained", "must be true or false")},
		{"name missing", "name: s1, ", "", one("services[0].servers[0].name", "required")},
		{"name space", "name: s1, ", "name: s 1, ", one("services[0].servers[0].name", "must have only printable characters, and no spaces")},
		{"name slash", "name: s2", "name: s/2", one("services[0].servers[1].name",
			"must not have a slash: commands name a server as SERVICE/SERVER")},
		{"name used", "name: s2", "name: s1",
			one("services[0].servers[1].name", "is already used by services[0].servers[0].name (server web/s1, line 22)")},
		{"name used by another service", "name: d1", "name: s1", nil},
		{"locator missing", `locator: "fd00:5:0:1::/64", `, "",
			one("services[0].servers[0].locator", "required by encapsulation srv6-insert")},
		{"locator /56", `"fd00:5:0:1::/64"`, `"fd00:5::/56"`, one("services[0].servers[0].locator", "must be an IPv6 /64")},
		{"locator used", `"fd00:5:0:2::/64"`, `"fd00:5:0:1::/64"`,
			one("services[0].servers[1].locator", "is already used by services[0].servers[0].locator (server web/s1, line 22)")},
		{"locator balancer's", `"fd00:5:0:1::/64"`, `"fd00:6c:0:1::/64"`,
			one("services[0].servers[0].locator", "is the balancer's own")},
		{"host missing with health checks", `host: "2001:db8:0:5::1", `, "", nil},
		{"host missing with health checks via host",
			"fall: 1}\n    servers:\n      - {name: s1, locator: \"fd00:5:0:1::/64\", host: \"2001:db8:0:5::1\"",
			"fall: 1, via: host}\n    servers:\n      - {name: s1, locator: \"fd00:5:0:1::/64\"",
			one("services[0].servers[0].host", "required by health checks via host of a service whose encapsulation is srv6-insert")},
		{"address for SRv6", s1, `{name: s1, locator: "fd00:5:0:1::/64", host: "2001:db8:0:5::1", address: "2001:db8::5"}`,
			one("services[0].servers[0].address", "not used by encapsulation srv6-insert")},
		{"address missing", "address: 192.0.2.53", "",
			one("services[1].servers[0].address", "required by encapsulation gre")},
		{"address multicast", "192.0.2.53", "224.0.0.1", one("services[1].servers[0].address", "is multicast"+unreachable)},
		{"address mapped", "192.0.2.53", "'::ffff:192.0.2.53'",
			one("services[1].servers[0].address", "is IPv4-mapped; write it as 192.0.2.53")},
		{"address used", "192.0.2.53", `"2001:db8::53"`,
			one("services[1].servers[1].address", "is already used by services[1].servers[0].address (server dns/d1, line 31)")},
		{"address a VIP", "192.0.2.53", "198.51.100.53", one("services[1].servers[0].address", "is the VIP of services[1]")},
		{"locator for gre", "address: 192.0.2.53", `address: 192.0.2.53, locator: "fd00:5:0:3::/64"`,
			one("services[1].servers[0].locator", "not used by encapsulation gre")},
		{"host a VIP", `host: "2001:db8:0:5::1"`, "host: 198.51.100.53",
			one("services[0].servers[0].host", "is the VIP of services[1]")},
		{"host mapped", `host: "2001:db8:0:5::1"`, "host: '::ffff:1.2.3.4'",
			one("services[0].servers[0].host", "is IPv4-mapped; write it as 1.2.3.4")},
		{"host multicast", `host: "2001:db8:0:5::1"`, "host: 'ff02::1'",
			one("services[0].servers[0].host", "is multicast; must be a unicast address")},
		{"host loopback", `host: "2001:db8:0:5::1"`, "host: 127.0.0.1", nil},
		{"weight large", "weight: 1000", "weight: 1001",
			one("services[0].servers[1].weight", wholeNumber+"0 to 1000")},
		{"weight negative", "weight: 1000", "weight: -1",
			one("services[0].servers[1].weight", wholeNumber+"0 to 1000")},
		{"weight fraction", "weight: 1000", "weight: 0.5",
			one("services[0].servers[1].weight", wholeNumber+"0 to 1000")},
		{"SRv6 servers for gre", "encapsulation: srv6-insert", "encapsulation: gre", []problem{
			{"services[0].servers[0].locator", "not used by encapsulation gre"},
			{"services[0].servers[0].address", "required by encapsulation gre"},
			{"services[0].servers[1].locator", "not used by encapsulation gre"},
			{"services[0].servers[1].address", "required by encapsulation gre"},
		}},
	})
}

// manyPrefixes returns a number of prefixes as a YAML list.
func manyPrefixes(n int) string {
	var all []string
	for i := range n {
		all = append(all, fmt.Sprintf(`"fd00:6c:0:%x::/64"`, i))
	}
	return strings.Join(all, ", ")
}

func TestAgentRules(t *testing.T) {
	checkMutations(t, validAgent, ParseAgent, []mutation{
		{"interface missing", "interface: eth0", "", one("node.interface", "required")},
		{"instance dot", "instance: server", "instance: .", one("node.instance", plainForm)},
		{"state relative", "mtu: 1500", "state: var", one("node.state", "must be absolute")},
		{"locator missing", `locator: "fd00:5:0:1::/64"`, "",
			one("node.locator", "required by services[0], whose encapsulation is srv6-encap")},
		{"locator /63", "1::/64", "0::/63", one("node.locator", "must be an IPv6 /64")},
		{"addresses missing", "addresses: [192.0.2.53]", "",
			one("node.addresses", "required by services[1], whose encapsulation is gre")},
		{"address used", "[192.0.2.53]", "[192.0.2.53, 192.0.2.53]",
			one("node.addresses[1]", "is already used by node.addresses[0] (line 5)")},
		{"two IPv4 addresses", "[192.0.2.53]", "[192.0.2.53, 192.0.2.54]", nil},
		{"address a VIP", "[192.0.2.53]", "[198.51.100.53]", one("node.addresses[0]", "is the VIP of services[1]")},
		{"balancers", "mtu: 1500", `balancers: ["fd00:6c:0:1::/64", "fd00:6c::/32", "2000::/3"]`, nil},
		{"balancers none", "mtu: 1500", "balancers: []", nil},
		{"balancers longer", "mtu: 1500", `balancers: ["fd00:6c::/32", "fd00:6c:0:1::1/128"]`,
			one("node.balancers[1]", "must be an IPv6 prefix of at most 64 bits")},
		{"balancers IPv4", "mtu: 1500", "balancers: [192.0.2.0/24]",
			one("node.balancers[0]", "must be an IPv6 prefix of at most 64 bits")},
		{"balancers host bits", "mtu: 1500", `balancers: ["fd00:6c:0:1::/32"]`,
			one("node.balancers[0]", "has bits set after the first 32; write it as fd00:6c::/32")},
		{"balancers everybody", "mtu: 1500", `balancers: ["::/0"]`,
			one("node.balancers[0]", "must be a unicast prefix that other hosts can reach")},
		{"balancers twice", "mtu: 1500", `balancers: ["fd00:6c::/32", "fd00:6c::/32"]`,
			one("node.balancers[1]", "is already used by node.balancers[0] (line 6)")},
		{"balancers too many", "mtu: 1500", "balancers: [" + manyPrefixes(desired.MostBalancers+1) + "]",
			one("node.balancers", "must have at most 1024 prefixes")},
		{"balancers of no service that hunts", "mtu: 1500\n  assign-vips: false\nmetrics: {listen: \":9189\"}\nservices:\n  - name: web\n" +
			"    vip: 2001:db8:80::1\n    port: 80\n    protocol: tcp\n",
			"balancers: [\"fd00:6c::/32\"]\nservices:\n", one("node.balancers",
				"only for services that hunt: "+thatHunt)},
		{"MTU small", "mtu: 1500", "mtu: 1279", one("node.mtu", wholeNumber+"1280 to 65535")},
		{"MTU zero", "mtu: 1500", "mtu: 0", one("node.mtu", wholeNumber+"1280 to 65535")},
		{"MTU large", "mtu: 1500", "mtu: 65536", one("node.mtu", wholeNumber+"1280 to 65535")},
		{"assign-vips number", "assign-vips: false", "assign-vips: 0", one("node.assign-vips", "must be true or false")},
		{"polls without a key", "metrics:", "poll: {listen: \"[::1]:7460\"}\nmetrics:",
			one("node.signal-key", "required by poll.listen: only balancers with the key get answers")},
		{"polls at no port", "metrics:", "poll: {listen: \"[::1]\"}\nmetrics:", []problem{
			{"node.signal-key", "required by poll.listen: only balancers with the key get answers"},
			{"poll.listen", listenForm},
		}},
		{"polls at port 0", "metrics:", "poll: {listen: \"[::1]:0\"}\nmetrics:", []problem{
			{"node.signal-key", "required by poll.listen: only balancers with the key get answers"},
			{"poll.listen", listenForm},
		}},
		{"listen", `":9189"`, `":"`, one("metrics.listen", listenForm)},
		{"no services", validAgent[strings.Index(validAgent, "services:"):], "services: []",
			one("services", "at least one is required")},
		{"VIP in locator", "2001:db8:80::1", "fd00:5:0:1::80", one("services[0].vip", "is in the locator of the agent")},
		{"same service", "vip: 198.51.100.53\n    port: all\n    protocol: udp",
			"vip: 2001:db8:80::1\n    port: 80\n    protocol: tcp",
			one("services[1]", "tcp port 80 of 2001:db8:80::1 is already used by services[0] (service web, line 10)")},
		{"field of a balancer", "protocol: tcp", "protocol: tcp\n    buckets: 7",
			one("services[0].buckets", "unknown field; must be one of: name, vip, vips, port, ports, protocol, encapsulation, accept, load, not-local, drained, "+
				"quic, quic-id, former-quic, former-quic-id")},
		{"accept of a tunnel", "protocol: udp", "protocol: udp\n    accept: {policy: always}", one("services[1].accept",
			"only for services that hunt: "+thatHunt)},
	})
}

const thatHunt = "TCP in srv6-insert or srv6-encap, and UDP there with accept.policy or load.source"

func TestAcceptRules(t *testing.T) {
	checkMutations(t, validAgent, ParseAgent, []mutation{
		hunting("every policy", "accept: {policy: always}", nil),
		hunting("static", "accept: {policy: static, threshold: 0}", nil),
		hunting("dynamic", "accept: {policy: dynamic, window: 1, window-time: 0s, epsilon: 0, initial: 0}", nil),
		hunting("unknown policy", "accept: {policy: best}",
			one("services[0].accept.policy", "must be one of: always, never, static, dynamic, least")),
		hunting("static without threshold", "accept: {policy: static}",
			one("services[0].accept.threshold", "required by policy static")),
		hunting("threshold of another policy", "accept: {threshold: 4}",
			one("services[0].accept.threshold", "only for policy static; the policy is least")),
		hunting("window of another policy", "accept: {policy: never, window: 50}",
			one("services[0].accept.window", "only for policy dynamic; the policy is never")),
		hunting("window of the default policy", "accept: {window: 50}",
			one("services[0].accept.window", "only for policy dynamic; the policy is least")),
		hunting("window", "accept: {policy: dynamic, window: 0}",
			one("services[0].accept.window", wholeNumber+"1 to 1000000")),
		hunting("epsilon large", "accept: {policy: dynamic, epsilon: 0.5}", one("services[0].accept.epsilon", "must be at least 0 and less than 0.5")),
		hunting("window time negative", "accept: {policy: dynamic, window-time: -1s}", one("services[0].accept.window-time", "must be from 0s to 1h0m0s")),
		hunting("window time long", "accept: {policy: dynamic, window-time: 61m}", one("services[0].accept.window-time", "must be from 0s to 1h0m0s")),
		hunting("epsilon negative", "accept: {policy: dynamic, epsilon: -0.1}", one("services[0].accept.epsilon", "must be at least 0 and less than 0.5")),
		hunting("epsilon no number", "accept: {policy: dynamic, epsilon: NaN}", one("services[0].accept.epsilon", "must be a number")),
	})
}

func TestLoadRules(t *testing.T) {
	checkMutations(t, validAgent, ParseAgent, []mutation{
		hunting("sources", "load: {source: connections, workers: 8}", nil),
		hunting("scoreboard", "load: {source: apache-scoreboard, path: /run/scoreboard, workers: 150}", nil),
		hunting("unknown source", "load: {source: cpu}", one("services[0].load.source",
			"must be one of: connections, accept-queue, apache-scoreboard, cgroup, shared-memory, shared-map")),
		hunting("path missing", "load: {source: cgroup}", one("services[0].load.path", "required by source cgroup")),
		hunting("map", "load: {source: shared-map, path: /a, capacity: 4}", nil),
		hunting("path of a map missing", "load: {source: shared-map}",
			one("services[0].load.path", "required by source shared-map")),
		hunting("interval of a map", "load: {source: shared-map, path: /a, interval: 10ms}",
			one("services[0].load.interval", "not used by source shared-map: it is read when a connection is offered")),
		hunting("workers of a map", "load: {source: shared-map, path: /a, workers: 4}",
			one("services[0].load.workers",
				"only for connections and apache-scoreboard; capacity is for all sources")),
		hunting("path relative", "load: {source: cgroup, path: a}", one("services[0].load.path", "must be absolute")),
		hunting("path needless", "load: {path: /a}", one("services[0].load.path", "not used by source connections")),
		hunting("workers needless", "load: {source: accept-queue, workers: 8}",
			one("services[0].load.workers",
				"only for connections and apache-scoreboard; capacity is for all sources")),
		hunting("workers zero", "load: {workers: 0}",
			one("services[0].load.workers", wholeNumber+"1 to 4294967295")),
		hunting("capacity of connections", "load: {capacity: 1}", nil),
		hunting("capacity of the accept queue", "load: {source: accept-queue, capacity: 1048575}", nil),
		hunting("capacity of a scoreboard",
			"load: {source: apache-scoreboard, path: /a, workers: 150, capacity: 4}", nil),
		hunting("capacity zero", "load: {capacity: 0}",
			one("services[0].load.capacity", wholeNumber+"1 to 1048575")),
		hunting("capacity large", "load: {source: cgroup, path: /a, capacity: 1048576}",
			one("services[0].load.capacity", wholeNumber+"1 to 1048575")),
		hunting("interval short", "load: {source: cgroup, path: /a, interval: 999us}",
			one("services[0].load.interval", "must be from 1ms to 10s")),
		hunting("interval zero", "load: {source: shared-memory, path: /a, interval: 0s}",
			one("services[0].load.interval", "must be from 1ms to 10s")),
		hunting("interval long", "load: {source: apache-scoreboard, path: /a, interval: 10001ms}",
			one("services[0].load.interval", "must be from 1ms to 10s")),
		hunting("interval no duration", "load: {source: cgroup, path: /a, interval: 5}",
			one("services[0].load.interval", "must be a duration with a unit, such as 500ms, 30s or 2h")),
		hunting("interval of connections", "load: {interval: 10ms}",
			one("services[0].load.interval", "not used by source connections: it is read when a connection is offered")),
		hunting("interval of the accept queue", "load: {source: accept-queue, interval: 10ms}",
			one("services[0].load.interval", "not used by source accept-queue: it is read when a connection is offered")),
	})
}

func TestNotLocalRules(t *testing.T) {
	checkMutations(t, validAgent, ParseAgent, []mutation{
		hunting("reset", "not-local: reset", nil),
		hunting("drained", "drained: true", nil),
		hunting("not-local", "not-local: pass", one("services[0].not-local", "must be one of: drop, reset")),
	})
}

// TestQUICAcceptRules checks the fields about offered connections of a service of UDP.
func TestQUICAcceptRules(t *testing.T) {
	quic := func(name, fields string, want []problem) mutation {
		return mutation{name, "protocol: tcp", "protocol: udp\n    " + fields, want}
	}
	const unread = "must be shared-map, shared-memory, cgroup or apache-scoreboard for UDP: the agent sees connections of TCP only"
	checkMutations(t, validAgent, ParseAgent, []mutation{
		quic("nothing", "# nothing", nil),
		quic("a load", "load: {source: shared-memory, path: /a, capacity: 2}", nil),
		quic("a map", "load: {source: shared-map, path: /a, capacity: 2}", nil),
		quic("no load for always", "accept: {policy: always}", nil),
		quic("drained", "load: {source: cgroup, path: /a}\n    drained: true", nil),
		quic("no load", "accept: {policy: least}", one("services[0].load.source",
			"required by UDP with policy least: the agent does not count connections of UDP")),
		quic("capacity alone", "accept: {policy: never}\n    load: {capacity: 2}",
			one("services[0].load", "not used without source")),
		quic("connections", "load: {source: connections}", one("services[0].load.source", unread)),
		quic("accept queue", "load: {source: accept-queue}", one("services[0].load.source", unread)),
		quic("path missing", "load: {source: cgroup}", one("services[0].load.path", "required by source cgroup")),
		quic("threshold alone", "accept: {threshold: 4}",
			one("services[0].accept", "only for services that hunt: "+thatHunt)),
		quic("drained alone", "drained: true", one("services[0].drained", "only for services that hunt: "+thatHunt+
			"; balancers do not ask the servers of other services; drain the server at the balancers")),
		quic("not-local", "not-local: drop", one("services[0].not-local", "only for TCP: UDP has no resets")),
	})
}

// hunting adds fields to the service that hunts in the agent's file.
func hunting(name, fields string, want []problem) mutation {
	return mutation{name, "protocol: tcp", "protocol: tcp\n    " + fields, want}
}

// The maximum number of services of the data path is valid, and one more is not.
func TestMostServices(t *testing.T) {
	head, _, _ := strings.Cut(validBalancer, "services:\n")
	for _, n := range []int{desired.MaxServices, desired.MaxServices + 1} {
		var text strings.Builder
		text.WriteString(head + "services:\n")
		for i := range n {
			fmt.Fprintf(&text, "  - {name: s%d, vip: 2001:db8:80::%x, port: 80, protocol: tcp, encapsulation: srv6-insert, servers: []}\n", i, i+1)
		}
		_, _, err := ParseBalancer([]byte(text.String()))
		complains := err != nil && strings.Contains(err.Error(), fmt.Sprintf("must have at most %d items, has %d", desired.MaxServices, n))
		if complains != (n > desired.MaxServices) {
			t.Errorf("%d services: %.500v", n, err)
		}
	}
}

// validQUIC is a balancer's file with a service that has persistence quic.
const validQUIC = `node: {interface: eth0, locator: "fd00:6c:0:1::/64", addresses: [192.0.2.10]}
services:
  - name: h3
    vip: 198.51.100.4
    port: 443
    protocol: udp
    placement: hash
    persistence: quic
    encapsulation: ipip
    quic: {form: quic-lb-21, rotation: 6, server-id-length: 3, nonce-length: 16, encode-length: true}
    servers:
      - {name: s1, address: 192.0.2.53, quic-id: c4605e}
      - {name: s2, address: 192.0.2.54, quic-id: 000001}
`

func TestQUICRules(t *testing.T) {
	const block = "    quic: {form: quic-lb-21, rotation: 6, server-id-length: 3, nonce-length: 16, encode-length: true}\n"
	const unused = "not used by persistence table"
	checkMutations(t, validQUIC, ParseBalancer, []mutation{
		{"defaults", block, "    quic: {server-id-length: 3}\n", nil},
		{"on-drain", block, block + "    on-drain: keep\n", nil},
		{"moves on drain", block, block + "    on-drain: move-udp\n",
			one("services[0].on-drain", "must be keep for persistence quic: connection IDs name the server")},
		{"no block", block, "", []problem{
			{"services[0].servers[0].quic-id", "must be 8 octets, as quic.server-id-length says; is 3"},
			{"services[0].servers[1].quic-id", "must be 8 octets, as quic.server-id-length says; is 3"},
		}},
		{"srv6-encap", "encapsulation: ipip", "encapsulation: srv6-encap", []problem{
			{"services[0].servers[0].locator", "required by encapsulation srv6-encap"},
			{"services[0].servers[0].address", "not used by encapsulation srv6-encap"},
			{"services[0].servers[1].locator", "required by encapsulation srv6-encap"},
			{"services[0].servers[1].address", "not used by encapsulation srv6-encap"},
		}},
		{"gre", "encapsulation: ipip", "encapsulation: gre", nil},
		{"form", "quic-lb-21", "quic-lb-20", one("services[0].quic.form", "must be one of: quic-lb-21")},
		{"rotation", "rotation: 6", "rotation: 7", one("services[0].quic.rotation", wholeNumber+"0 to 6")},
		{"server ID long", "server-id-length: 3", "server-id-length: 16",
			one("services[0].quic.server-id-length", wholeNumber+"1 to 15")},
		{"server ID 0", "server-id-length: 3", "server-id-length: 0",
			one("services[0].quic.server-id-length", wholeNumber+"1 to 15")},
		{"nonce short", "nonce-length: 16", "nonce-length: 3",
			one("services[0].quic.nonce-length", wholeNumber+"4 to 18")},
		{"nonce long", "nonce-length: 16", "nonce-length: 17", one("services[0].quic.nonce-length",
			"must be at most 16 with server IDs of 3 octets: a connection ID has at most 20 octets")},
		{"encode length", "encode-length: true", "encode-length: 3",
			one("services[0].quic.encode-length", "must be true or false")},
		{"ID missing", ", quic-id: c4605e", "",
			one("services[0].servers[0].quic-id", "required by persistence quic")},
		{"ID not hexadecimal", "c4605e", "0xc460",
			one("services[0].servers[0].quic-id", "must be an even number of hexadecimal digits")},
		{"ID odd", "c4605e", "c4605",
			one("services[0].servers[0].quic-id", "must be an even number of hexadecimal digits")},
		{"ID short", "c4605e", "c460",
			one("services[0].servers[0].quic-id", "must be 3 octets, as quic.server-id-length says; is 2")},
		{"ID used", "000001", "C4605E",
			one("services[0].servers[1].quic-id", "is already used by services[0].servers[0].quic-id (server h3/s1, line 12)")},
		{"TCP", "protocol: udp", "protocol: tcp", one("services[0].protocol", "must be udp for persistence quic: "+
			"only packets of QUIC, which are datagrams of UDP, have connection IDs")},
		{"round-robin", "placement: hash", "placement: round-robin", one("services[0].placement",
			"must be hash or hunt for persistence quic: a client sends several packets before it knows the "+
				"server's connection ID, and only these placements lead all of them to one server")},
		{"hunt by ipip", "placement: hash", "placement: hunt", one("services[0].encapsulation",
			"must be srv6-insert or srv6-encap for placement hunt: ipip has no segment list")},
		{"selection", "placement: hash", "placement: hash\n    selection: consistent",
			one("services[0].selection", "not used by placement hash")},
		{"history", "placement: hash", "placement: hash\n    history: 3",
			one("services[0].history", "not used by persistence quic")},
		{"table", "persistence: quic", "persistence: table", []problem{
			{"services[0].quic", unused},
			{"services[0].servers[0].quic-id", unused},
			{"services[0].servers[1].quic-id", unused},
		}},
	})
}

// TestQUICHuntRules checks a service of QUIC whose servers decide.
func TestQUICHuntRules(t *testing.T) {
	valid := strings.NewReplacer("placement: hash", "placement: hunt", "ipip", "srv6-insert", "198.51.100.4", "2001:db8:80::4",
		"address: 192.0.2.53", `locator: "fd00:5:0:1::/64"`, "address: 192.0.2.54", `locator: "fd00:5:0:2::/64"`).Replace(validQUIC)
	const reports = "servers report their loads in signals, and send none"
	selection := func(name, why string) mutation {
		return mutation{name, "placement: hunt", "placement: hunt\n    selection: " + name,
			one("services[0].selection", "must not be "+name+" for persistence quic: "+why)}
	}
	checkMutations(t, valid, ParseBalancer, []mutation{
		{"selection", "placement: hunt", "placement: hunt\n    selection: consistent", nil},
		{"no signals to take", "interface: eth0", "interface: eth0, internal: false", nil},
		selection("random", "a handshake has several packets, and each would be offered to other servers"),
		selection("reports", reports),
		selection("spare", reports),
	})
}

// rotatedQUIC is validQUIC during a change of the form. The server IDs of both forms have the same
// length, and s1 has the same ID in both.
const rotatedQUIC = `node: {interface: eth0, addresses: [192.0.2.10]}
services:
  - name: h3
    vip: 198.51.100.4
    port: 443
    protocol: udp
    persistence: quic
    encapsulation: ipip
    quic: {rotation: 1, server-id-length: 3}
    former-quic: {rotation: 0, server-id-length: 3}
    servers:
      - {name: s1, address: 192.0.2.53, quic-id: c4605e}
      - {name: s2, address: 192.0.2.54, quic-id: 000001, former-quic-id: 000002}
`

func TestFormerQUICRules(t *testing.T) {
	const block = "    former-quic: {rotation: 0, server-id-length: 3}\n"
	const first, second = "services[0].servers[0]", "services[0].servers[1]"
	checkMutations(t, rotatedQUIC, ParseBalancer, []mutation{
		{"valid", "s1", "s1", nil},
		{"no block", block, "", one(second+".former-quic-id", "not used without former-quic")},
		{"same rotation", "rotation: 0", "rotation: 1", one("services[0].former-quic.rotation",
			"must not be 1, the rotation of quic: it tells the IDs of both forms apart")},
		{"form", "{rotation: 0", "{form: quic-lb-20, rotation: 0",
			one("services[0].former-quic.form", "must be one of: quic-lb-21")},
		{"nonce long", block, strings.Replace(block, "}", ", nonce-length: 17}", 1),
			one("services[0].former-quic.nonce-length", "must be at most 16 with server IDs of "+
				"3 octets: a connection ID has at most 20 octets")},
		{"server ID long", block, strings.Replace(block, "3}", "16}", 1),
			one("services[0].former-quic.server-id-length", wholeNumber+"1 to 15")},
		{"other length", block, strings.Replace(block, "3}", "2}", 1), []problem{
			{first + ".former-quic-id", "required by former-quic"},
			{second + ".former-quic-id",
				"must be 2 octets, as former-quic.server-id-length says; is 3"},
		}},
		{"ID not hexadecimal", "000002", "x", one(second+".former-quic-id",
			"must be an even number of hexadecimal digits")},
		{"ID of a default", "000002", "c4605e", one(second+".former-quic-id",
			"is already used by "+first+".former-quic-id (server h3/s1, line 12)")},
		{"ID of the other form", "000001", "000002", nil},
		{"IDs exchanged", "quic-id: c4605e", "quic-id: 000002, former-quic-id: 000001", nil},
		{"wrong default", "c4605e", "c4", one(first+".quic-id",
			"must be 3 octets, as quic.server-id-length says; is 1")},
		{"table", "persistence: quic", "persistence: table", []problem{
			{"services[0].quic", "not used by persistence table"},
			{"services[0].former-quic", "not used by persistence table"},
			{first + ".quic-id", "not used by persistence table"},
			{second + ".quic-id", "not used by persistence table"},
			{second + ".former-quic-id", "not used by persistence table"},
		}},
	})
	b, _, err := ParseBalancer([]byte(rotatedQUIC))
	if err != nil || b.Services[0].Servers[0].FormerQUICID != "c4605e" {
		t.Errorf("the default of former-quic-id: %+v, %v", b, err)
	}
}

// TestQUICDefaults checks the defaults of persistence quic. Long server IDs leave less room for the
// nonce.
func TestQUICDefaults(t *testing.T) {
	for length, nonce := range map[int]int{0: 8, 11: 8, 12: 7, 15: 4} {
		text, octets := validQUIC, 8
		block := text[strings.Index(text, "    quic:"):strings.Index(text, "    servers:")]
		text = strings.Replace(text, block, "", 1)
		if length > 0 {
			octets = length
			text = strings.Replace(text, "placement: hash",
				fmt.Sprintf("placement: hash\n    quic: {server-id-length: %d}", length), 1)
		}
		text = strings.Replace(text, "c4605e", strings.Repeat("c4", octets), 1)
		text = strings.Replace(text, "000001", strings.Repeat("01", octets), 1)
		b, _, err := ParseBalancer([]byte(text))
		testhost.Must(t, err)
		want := &desired.QUIC{Form: desired.QUICLB21, ServerIDLength: octets, NonceLength: nonce}
		if diff := cmp.Diff(want, b.Services[0].QUIC); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	}
}

// agentQUIC is an agent's file with a service of QUIC during a change of the form.
const agentQUIC = `node: {interface: eth0, addresses: [192.0.2.53]}
services:
  - name: h3
    vip: 198.51.100.4
    port: 443
    protocol: udp
    encapsulation: ipip
    quic: {form: quic-lb-21, rotation: 1, server-id-length: 3, nonce-length: 16, encode-length: true}
    quic-id: c4605e
    former-quic: {rotation: 2, server-id-length: 3}
    former-quic-id: 000002
`

func TestAgentQUICRules(t *testing.T) {
	const block = "    quic: {form: quic-lb-21, rotation: 1, server-id-length: 3, nonce-length: 16, encode-length: true}\n"
	const id, formerID = "    quic-id: c4605e\n", "    former-quic-id: 000002\n"
	const former = "    former-quic: {rotation: 2, server-id-length: 3}\n"
	const service = "services[0]"
	checkMutations(t, agentQUIC, ParseAgent, []mutation{
		{"valid", "h3", "h3", nil},
		{"none", block + id + former + formerID, "", nil},
		{"default form", block, "", one(service+".quic-id",
			"must be 8 octets, as quic.server-id-length says; is 3")},
		{"former fields alone", block + id, "", []problem{
			{service + ".former-quic", "not used without quic"},
			{service + ".former-quic-id", "not used without quic"},
		}},
		{"form", "quic-lb-21", "quic-lb-20", one(service+".quic.form", "must be one of: quic-lb-21")},
		{"rotation", "rotation: 1", "rotation: 7", one(service+".quic.rotation", wholeNumber+"0 to 6")},
		{"server ID long", "length: 3, nonce", "length: 16, nonce",
			one(service+".quic.server-id-length", wholeNumber+"1 to 15")},
		{"nonce long", "nonce-length: 16", "nonce-length: 17", one(service+".quic.nonce-length",
			"must be at most 16 with server IDs of 3 octets: a connection ID has at most 20 octets")},
		{"ID missing", id, "", one(service+".quic-id", "required by quic")},
		{"ID not hexadecimal", "c4605e", "0xc460",
			one(service+".quic-id", "must be an even number of hexadecimal digits")},
		{"TCP", "protocol: udp", "protocol: tcp", one(service+".protocol", "must be udp for quic: "+
			"only packets of QUIC, which are datagrams of UDP, have connection IDs")},
		{"no former form", former, "", one(service+".former-quic-id", "not used without former-quic")},
		{"same rotation", "rotation: 2", "rotation: 1", one(service+".former-quic.rotation",
			"must not be 1, the rotation of quic: it tells the IDs of both forms apart")},
		{"default of the former ID", formerID, "", nil},
		{"wrong default of the former ID", id + former + formerID, "    quic-id: c4\n" + former,
			one(service+".quic-id", "must be 3 octets, as quic.server-id-length says; is 1")},
		{"former ID of another length", former + formerID, strings.Replace(former, "3}", "2}", 1),
			one(service+".former-quic-id", "required by former-quic")},
	})
	a, _, err := ParseAgent([]byte(strings.Replace(agentQUIC, formerID, "", 1)))
	if err != nil || a.Services[0].FormerQUICID != "c4605e" {
		t.Errorf("the default of former-quic-id: %+v, %v", a, err)
	}
	long := strings.Replace(agentQUIC, block+id+former+formerID, "    quic-id: 0102030405060708\n", 1)
	a, _, err = ParseAgent([]byte(long))
	testhost.Must(t, err)
	want := &desired.QUIC{Form: desired.QUICLB21, ServerIDLength: 8, NonceLength: 8}
	if diff := cmp.Diff(want, a.Services[0].QUIC); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
