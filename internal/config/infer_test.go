// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// inferring is a valid file of one of several balancers. Its services infer.
const inferring = `node:
  interface: eth0
  locator: "fd00:6c:0:1::/64"
  name: lb1
  peers: [lb1, lb2]
services:
  - name: web
    vip: 2001:db8:80::1
    port: 80
    protocol: tcp
    placement: infer
    infer: {estimator: durations, interval: 100ms, slow-start: 0s, among: all}
    servers: [{name: s1, locator: "fd00:5:0:1::/64"}]
  - name: dns
    vip: 198.51.100.53
    port: 53
    protocol: udp
    placement: sed
    infer: {slow-start: 10m}
    encapsulation: srv6-encap
    servers: [{name: s1, locator: "fd00:5:0:1::/64"}]
`

func TestInferRules(t *testing.T) {
	const (
		block   = "infer: {estimator: durations, interval: 100ms, slow-start: 0s, among: all}"
		unused  = "not used by placement "
		outside = "another server is in no column of the flow's bucket"
	)
	column := func(persistence string) []problem {
		return one("services[0].infer.among", "must be candidates for persistence "+persistence+": "+outside)
	}
	checkMutations(t, inferring, ParseBalancer, []mutation{
		{"hash", "placement: infer", "placement: hash", one("services[0].infer", unused+"hash")},
		{"nothing", block, "", nil},
		{"null", block, "infer:", nil},
		{"selection", block, "selection: consistent", one("services[0].selection", unused+"infer")},
		{"least-queue", "placement: infer", "placement: least-queue", []problem{
			{"services[0].infer.estimator", unused + "least-queue"},
			{"services[0].infer.interval", unused + "least-queue"},
		}},
		{"estimator of sed", "{slow-start: 10m}", "{estimator: territory}",
			one("services[1].infer.estimator", unused+"sed")},
		{"interval of sed", "{slow-start: 10m}", "{interval: 1s}",
			one("services[1].infer.interval", unused+"sed")},
		{"among of sed", "{slow-start: 10m}", "{among: candidates}", nil},
		{"estimator unknown", "estimator: durations", "estimator: sed", one("services[0].infer.estimator",
			"must be one of: territory-learned, territory, hlb, hlb-fixed, durations, durations-fixed, "+
				"durations-mean, hlb-mean")},
		{"among unknown", "among: all", "among: row",
			one("services[0].infer.among", "must be one of: all, candidates, two, three, four")},
		{"sampled", "among: all", "among: three", nil},
		{"poll of infer", "interval: 100ms", "poll: 1s",
			one("services[0].infer.poll", unused+"infer")},
		{"poll port of sed", "{slow-start: 10m}", "{poll-port: 1}",
			one("services[1].infer.poll-port", unused+"sed")},
		{"polled", "placement: sed\n    infer: {slow-start: 10m}",
			"placement: gsq2\n    infer: {poll: 49ms, among: four}", []problem{
				{"node.signal-key", "required by services[1], whose placement is gsq2: agents answer " +
					"only balancers with the key"},
				{"services[1].infer.among", "must be one of: two"},
				{"services[1].infer.poll", "must be from 50ms to 10s"},
				{"services[1].servers[0].host",
					"required by placement gsq2: the agent is polled at this address"},
			}},
		{"poll port", "placement: sed\n    infer: {slow-start: 10m}",
			"placement: awcmp\n    infer: {poll-port: 0}", []problem{
				{"node.signal-key", "required by services[1], whose placement is awcmp: agents answer " +
					"only balancers with the key"},
				{"services[1].infer.poll-port", "must be from 1 to 65535"},
				{"services[1].servers[0].host",
					"required by placement awcmp: the agent is polled at this address"},
			}},
		{"poll port large", "{slow-start: 10m}", "{poll-port: 65536}",
			one("services[1].infer.poll-port", wholeNumber+"0 to 65535")},
		{"polled without a flow table", "placement: infer\n    " + block,
			"placement: awcmp\n    buckets: 1021\n    persistence: hint", []problem{
				{"node.signal-key", "required by services[0], whose placement is awcmp: agents answer " +
					"only balancers with the key"},
				{"services[0].persistence", "must be table for placement awcmp: the server that it " +
					"picks is in no column of the flow's bucket"},
				{"services[0].servers[0].host",
					"required by placement awcmp: the agent is polled at this address"},
			}},
		{"often", "interval: 100ms", "interval: 99ms",
			one("services[0].infer.interval", "must be from 100ms to 10s")},
		{"seldom", "interval: 100ms", "interval: 10.1s",
			one("services[0].infer.interval", "must be from 100ms to 10s")},
		{"slowest start", "slow-start: 0s", "slow-start: 10m", nil},
		{"slower start", "slow-start: 0s", "slow-start: 10m1s",
			one("services[0].infer.slow-start", "must be from 0s to 10m0s")},
		{"early start", "slow-start: 0s", "slow-start: -1s",
			one("services[0].infer.slow-start", "must be from 0s to 10m0s")},
		{"stateless", "placement: infer", "placement: infer\n    buckets: 1021\n    persistence: stateless", column("stateless")},
		{"hint", "placement: infer", "placement: infer\n    buckets: 1021\n    persistence: hint", column("hint")},
		{"quic", "placement: sed", "placement: sed\n    persistence: quic", []problem{
			{"services[1].placement", "must be hash or hunt for persistence quic: a client sends several packets " +
				"before it knows the server's connection ID, and only these placements lead all of them to one server"},
			{"services[1].servers[0].quic-id", "required by persistence quic"},
		}},
		{"stateless candidates", block, "persistence: stateless\n    buckets: 1021", nil},
		{"silent", "placement: infer", "placement: infer\n    timeouts: {silent: 4s}",
			one("services[0].timeouts.silent", timeRange)},
		{"name empty", "name: lb1", `name: ""`, one("node.name", "required")},
		{"name long", "name: lb1", "name: " + strings.Repeat("a", 64), one("node.name", nameRange+"64")},
		{"peer spaced", "[lb1, lb2]", "[lb1, lb 2]",
			one("node.peers[1]", "must have only printable characters, and no spaces")},
		{"peer twice", "[lb1, lb2]", "[lb2, lb2]",
			one("node.peers[1]", "is already used by node.peers[0] (line 5)")},
		{"many peers", "[lb1, lb2]", "[" + manyNames(1025) + "]",
			one("node.peers", "must have at most 1024 items, has 1025")},
	})
}

func manyNames(n int) string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprint("lb", i)
	}
	return strings.Join(names, ", ")
}

// TestInferDefaults checks the section infer of services that only set the placement.
func TestInferDefaults(t *testing.T) {
	host, err := os.Hostname()
	testhost.Must(t, err)
	host = host[:min(len(host), 63)]
	for placement, want := range map[string]*desired.Infer{
		"hash": nil,
		"infer": {
			Estimator: desired.EstimateTerritoryLearned, Interval: 500 * time.Millisecond,
			SlowStart: new(10 * time.Second), Among: desired.AmongAll,
		},
		"least-queue": {SlowStart: new(10 * time.Second), Among: desired.AmongAll},
		"sed":         {SlowStart: new(10 * time.Second), Among: desired.AmongAll},
	} {
		b, _, err := ParseBalancer([]byte(`
node: {interface: eth0, locator: "fd00:6c:0:1::/64", peers: [lb2]}
services: [{name: web, vip: "2001:db8:80::1", port: 80, protocol: udp, placement: ` + placement + `}]
`))
		testhost.Must(t, err)
		if diff := cmp.Diff(want, b.Services[0].Infer); diff != "" {
			t.Errorf("%s: -want +got:\n%s", placement, diff)
		}
		if silent := b.Services[0].Timeouts.Silent; silent != 10*time.Second {
			t.Errorf("%s: silent after %s", placement, silent)
		}
		if diff := cmp.Diff([]string{host, "lb2"}, b.Node.Balancers()); diff != "" && host < "lb2" {
			t.Errorf("balancers: -want +got:\n%s", diff)
		}
	}
}

// TestWarningsOfSeveralBalancers checks the warnings about services that several balancers have.
func TestWarningsOfSeveralBalancers(t *testing.T) {
	const (
		peers   = "[lb1, lb2]"
		block   = "infer: {estimator: durations, interval: 100ms, slow-start: 0s, among: all}"
		server  = "slow-start: 10m}\n    encapsulation: srv6-encap"
		without = "all, and servers without agents: packets of a connection that come to another balancer " +
			"do not find their server"
		lost = "the favourites of several balancers are the same candidates: in simulations with 4 and 16 " +
			"balancers, flows took 891 and 2741 ms instead of 544 and 692 (territory), and 827 and 1260 ms " +
			"instead of 699 and 743 (durations)"
		few = "all: packets of a connection that come to another balancer visit 8 of 9 servers, and may " +
			"not find theirs"
		strangers = `does not include node.name, "lb1": unless the other balancers have it in their lists, ` +
			"they have other ideas of whose server is whose"
		unnamed = "missing: if several balancers have services[0], as its infer.among suggests, they prefer " +
			"the same servers"
	)
	checkWarnings(t, inferring, ParseBalancer, []mutation{
		{"few servers with agents", "", "", nil},
		{"no agents", server, server + "\n    probe: false", one("services[1].infer.among", without)},
		{"many servers", `servers: [{name: s1, locator: "fd00:5:0:1::/64"}]
  - name: dns`, "servers: [" + servers(9) + "]\n  - name: dns", one("services[0].infer.among", few)},
		{"candidates", `all}
    servers: [{name: s1, locator: "fd00:5:0:1::/64"}]`, "candidates}\n    servers: [" + servers(9) + "]",
			one("services[0].infer.among", lost)},
		{"candidates without a flow table", `all}
    servers: [{name: s1, locator: "fd00:5:0:1::/64"}]`, "candidates}\n    persistence: hint\n    servers: [" +
			servers(9) + "]", one("services[0].persistence", lost)},
		{"all servers are candidates", "among: all", "among: candidates", nil},
		{"candidates of hash", block, "", nil},
		{"alone", peers, "[lb1]", nil},
		{"strangers without territories", peers, "[lb2, lb3]", nil},
	})
	territory := strings.Replace(inferring, "estimator: durations", "estimator: territory", 1)
	checkWarnings(t, territory, ParseBalancer, []mutation{
		{"territory", "", "", nil},
		{"strangers of a territory", peers, "[lb2, lb3]", one("node.peers", strangers)},
		{"no peers", "  peers: [lb1, lb2]\n", "", nil},
	})
	alone := strings.Replace(inferring, peers, "[lb1]", 1)
	checkWarnings(t, alone, ParseBalancer, []mutation{
		{"no agents and alone", server, server + "\n    probe: false", nil},
		{"candidates and alone", "among: all", "among: candidates", nil},
	})
	suggesting := strings.Replace(territory, "  peers: [lb1, lb2]\n", "", 1)
	checkWarnings(t, suggesting, ParseBalancer, []mutation{
		{"no peers of candidates", "among: all", "among: candidates", one("node.peers", unnamed)},
	})
}

// TestWarningsOfUnusedWeights checks the warnings about weights that have no effect, and about
// estimators that learn nothing.
func TestWarningsOfUnusedWeights(t *testing.T) {
	const (
		server = `servers: [{name: s1, locator: "fd00:5:0:1::/64"}]
  - name: dns`
		weights = `servers: [{name: s1, locator: "fd00:5:0:1::/64", weight: 2}, ` +
			`{name: s2, locator: "fd00:5:0:2::/64", weight: 0}, {name: s3, locator: "fd00:5:0:3::/64", weight: 3}]
  - name: dns`
		unused = ", other than 0: placement sed uses weights, and placement infer with estimator territory"
	)
	at := func(estimator string) []problem {
		return one("services[0].servers[0].weight", "not used by "+estimator+unused)
	}
	weighted := strings.Replace(inferring, server, weights, 1)
	checkWarnings(t, weighted, ParseBalancer, []mutation{
		{"durations", "", "", at("durations")},
		{"the default, whose bounds they widen", "estimator: durations, ", "", nil},
		{"territory", "estimator: durations", "estimator: territory", nil},
		{"equal weights", "weight: 2", "weight: 3", nil},
		{"hash", "placement: infer\n    infer: {estimator: durations, interval: 100ms, slow-start: 0s, among: all}", "placement: hash", nil},
	})
	checkWarnings(t, strings.Replace(inferring, "placement: sed", "placement: infer", 1), ParseBalancer, []mutation{
		{"udp", "", "", one("services[1].infer.estimator", "territory-learned learns nothing from udp, "+
			"because no packet ends a flow: it takes all servers for equal")},
	})
}

// TestWarningsOfHLB checks the warnings about HLB as printed, and about a former name.
func TestWarningsOfHLB(t *testing.T) {
	printed := func(estimator, former string) []problem {
		return one("services[0].infer.estimator", estimator+" is HLB as the paper prints it, for "+
			"comparisons: a server that refuses connections attracts all new flows, and clients can make a "+
			"server seem slow; in earlier builds "+estimator+" had the method of "+former)
	}
	udp := strings.Replace(inferring, "placement: sed", "placement: infer\n    infer: {estimator: hlb}", 1)
	udp = strings.Replace(udp, "    infer: {slow-start: 10m}\n", "", 1)
	checkWarnings(t, inferring, ParseBalancer, []mutation{
		{"hlb", "estimator: durations", "estimator: hlb", printed("hlb", "durations")},
		{"hlb-fixed", "estimator: durations", "estimator: hlb-fixed", printed("hlb-fixed", "durations-fixed")},
		{"hlb-mean", "estimator: durations", "estimator: hlb-mean",
			one("services[0].infer.estimator", "hlb-mean is the former name of durations-mean")},
		{"slow start", "estimator: durations, interval: 100ms, slow-start: 0s", "estimator: hlb, slow-start: 1s",
			append(printed("hlb", "durations"), problem{"services[0].infer.slow-start", "not used by estimator hlb"})},
		{"a part of the packets", "estimator: durations, interval: 100ms, slow-start: 0s, among: all}",
			"estimator: hlb, among: candidates}\n    persistence: hint", append(printed("hlb", "durations"),
				problem{"services[0].infer.estimator", "with persistence hint, hlb sees only a part of the packets"})},
	})
	checkWarnings(t, udp, ParseBalancer, []mutation{
		{"udp", "estimator: hlb", "estimator: durations", one("services[1].infer.estimator",
			"durations learns nothing from udp, because no packet ends a flow: it takes all servers for equal")},
	})
}

// servers returns a list of servers.
func servers(n int) string {
	list := make([]string, n)
	for i := range list {
		digit := string(rune('1' + i))
		list[i] = `{name: s` + digit + `, locator: "fd00:5:0:` + digit + `::/64"}`
	}
	return strings.Join(list, ", ")
}
