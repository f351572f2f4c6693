// SPDX-License-Identifier: Apache-2.0

package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/testhost"
)

const huntingBalancer = `node: {interface: eth0, locator: "fd00:6c:0:1::/64"}
services:
- {name: dns, vip: 192.0.2.53, port: 53, protocol: udp,
   servers: [{name: s1, locator: "fd00:5:0:1::/64"}]}
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, placement: hunt, candidates: 1,
   servers: [{name: s1, locator: "fd00:5:0:1::/64"}]}
`

const huntingAgent = `node: {interface: eth0, locator: "fd00:5:0:1::/64"}
services:
- {name: dns, vip: 192.0.2.53, port: 53, protocol: udp}
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, accept: {policy: always}}
`

const (
	forgedSignals = "missing while node.internal is true: any host that can send packets " +
		"to fd00:6c:0:1::/64 through eth0 can pose as a server of web and take over its connections"
	forgedQuestions = "missing: any host that can send packets to fd00:5:0:1::/64 through eth0 " +
		"can pose as a balancer and have replies of web sent to itself"
)

// TestForgedSignals checks the warning about balancers that accept signals from unidentified
// senders.
func TestForgedSignals(t *testing.T) {
	const node = `{interface: eth0, locator: "fd00:6c:0:1::/64"`
	checkWarnings(t, huntingBalancer, ParseBalancer, []mutation{
		{"by default", "", "", one("node.signal-key", forgedSignals)},
		{"told", node, node + ", internal: true", one("node.signal-key", forgedSignals)},
		{"key", node, node + ", signal-key: /etc/segue/signal.key", nil},
		{"edge", node, node + ", inside: eth1", nil},
		{"hash", "placement: hunt", "placement: hash", nil},
	})
}

// TestUnknownClocks checks the warning about load reports without probes.
func TestUnknownClocks(t *testing.T) {
	const (
		candidates = "candidates: 1"
		problem    = ", the balancer ignores load reports for up to 3.3 days after their server has rebooted"
	)
	trusted := strings.Replace(huntingBalancer, "node: {", "node: {signal-key: /etc/segue/signal.key, ", 1)
	checkWarnings(t, trusted, ParseBalancer, []mutation{
		{"reports", candidates, "selection: reports, probe: false",
			one("services[1].probe", "with selection reports"+problem)},
		{"spare", candidates, "selection: spare, probe: false",
			one("services[1].probe", "with selection spare"+problem)},
		{"probes by default", candidates, "selection: reports", nil},
		{"probes", candidates, "selection: reports, probe: true", nil},
		{"consistent", candidates, "probe: false", nil},
	})
}

// TestForgedQuestions checks the warning about agents that take functions about connections from
// any sender.
func TestForgedQuestions(t *testing.T) {
	const node = `{interface: eth0, locator: "fd00:5:0:1::/64"`
	checkWarnings(t, huntingAgent, ParseAgent, []mutation{
		{"accept", "", "", one("node.balancers", forgedQuestions)},
		{"load", "accept: {policy: always}", "load: {source: accept-queue}",
			one("node.balancers", forgedQuestions)},
		{"balancers", node, node + `, balancers: ["fd00:6c::/32"]`, nil},
		{"nothing about hunting", ", accept: {policy: always}", "", nil},
	})
}

// TestWorkersAsCapacity checks the warning about servers that look free until all their workers are
// busy.
func TestWorkersAsCapacity(t *testing.T) {
	const (
		policy  = "accept: {policy: always}"
		apache  = "load: {source: apache-scoreboard, path: /run/sb, workers: 150"
		problem = "missing: the server accepts every connection of web while a worker is free; " +
			"set it to the number of processors if they bound the work"
	)
	trusted := strings.Replace(huntingAgent, "node: {", `node: {balancers: ["fd00:6c::/32"], `, 1)
	checkWarnings(t, trusted, ParseAgent, []mutation{
		{"by default", policy, apache + "}", one("services[1].load.capacity", problem)},
		{"least", policy, "accept: {policy: least}, " + apache + "}",
			one("services[1].load.capacity", problem)},
		{"dynamic", policy, "accept: {policy: dynamic}, " + apache + "}", nil},
		{"capacity", policy, apache + ", capacity: 4}", nil},
		{"connections", policy, "load: {source: connections}", nil},
		{"shared memory", policy, "load: {source: shared-memory, path: /run/load}", nil},
	})
}

// unconfirmedEnds is the warning about timeouts.closing of validBalancer's first service.
const unconfirmedEnds = `services[0].timeouts.closing "10s": not used by placement hash: only servers ` +
	`that hunt confirm the end of a flow, and a client's FIN or RST may be forged, so the flow's entry ` +
	`stays for timeouts.established`

// TestUnconfirmedEnds checks the warning about a timeout that a placement does not use.
func TestUnconfirmedEnds(t *testing.T) {
	_, problem, _ := strings.Cut(unconfirmedEnds, ": ")
	hashing := strings.Replace(huntingBalancer, "hunt, candidates: 1", "hash, timeouts: {closing: 10s}", 1)
	checkWarnings(t, hashing, ParseBalancer, []mutation{
		{"hash", "", "", one("services[1].timeouts.closing", problem)},
		{"another timeout", "closing: 10s", "new: 10s", nil},
	})
	checkWarnings(t, huntingBalancer, ParseBalancer, []mutation{
		{"hunt", "hunt, candidates: 1", "hunt, candidates: 1, timeouts: {closing: 10s}",
			one("node.signal-key", strings.TrimPrefix(forgedSignals, "node.signal-key: "))},
	})
}

// TestUnreachableVIPs checks the warning about VIPs of a family without source prefixes.
func TestUnreachableVIPs(t *testing.T) {
	hashing := strings.Replace(huntingBalancer, "hunt, candidates: 1", "hash", 1)
	none := one("services[0].vip", "no client may reach it: no prefix in sources is ipv4")
	checkWarnings(t, hashing, ParseBalancer, []mutation{
		{"family", "port: 53", "port: 53, sources: [10.0.0.0/8]", nil},
		{"no family", "port: 53", `port: 53, sources: ["2001:db8::/32"]`, none},
		{"both families", "port: 53", `port: 53, sources: ["2001:db8::/32", 10.0.0.0/8]`, nil},
	})
}

// TestNoTaker checks the warning about services without a server for new connections.
func TestNoTaker(t *testing.T) {
	const (
		first = `{name: s1, locator: "fd00:5:0:1::/64"}]}
- {name: web`
		second  = "[" + first
		drained = `{name: s1, locator: "fd00:5:0:1::/64", weight: 0}`
		rest    = "]}\n- {name: web"
	)
	hashing := strings.Replace(huntingBalancer, "hunt, candidates: 1", "hash", 1)
	checkWarnings(t, hashing, ParseBalancer, []mutation{
		{"weights", "", "", nil},
		{"all drained", second, "[" + drained + rest,
			one("services[0].servers", "all are drained or have weight 0: service dns gets no new connections")},
		{"all drained by name", second, `[{name: s1, locator: "fd00:5:0:1::/64", drained: true}` + rest,
			one("services[0].servers", "all are drained or have weight 0: service dns gets no new connections")},
		{"no server", second, "[" + rest,
			one("services[0].servers", "none: service dns refuses all clients")},
		{"one drained", second, "[" + drained + `, {name: s2, locator: "fd00:5:0:2::/64"}` + rest, nil},
	})
}

// checkWarnings makes each mutation to a file, which stays valid, and compares the warnings.
func checkWarnings[T any](
	t *testing.T, valid string, parse func([]byte) (T, fieldpath.Errors, error), mutations []mutation,
) {
	t.Helper()
	for _, m := range mutations {
		t.Run(m.name, func(t *testing.T) {
			if m.from != "" && strings.Count(valid, m.from) != 1 {
				t.Fatalf("%q is not in the file once", m.from)
			}
			_, warnings, err := parse([]byte(strings.Replace(valid, m.from, m.to, 1)))
			testhost.Must(t, err)
			var got []problem
			for _, w := range warnings {
				got = append(got, problem{w.Path, w.Problem})
			}
			if diff := cmp.Diff(m.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestWarningsSayWhere checks file, line and order of the warnings.
func TestWarningsSayWhere(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lb.yaml")
	testhost.Must(t, os.WriteFile(file, []byte("\n"+huntingBalancer), 0o644))
	_, warnings, err := LoadBalancer(file)
	testhost.Must(t, err)
	want := file + ":2: node.signal-key: " + forgedSignals
	if got := warnings.Error(); got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}

	d := decode([]byte("node:\n  interface: eth0\n  seed: 7\n"), new(desired.Balancer))
	d.warnf("node.seed", "%d is odd", 7)
	d.warnf("node.interface", "is wired")
	d.warnf("services", "missing")
	want = "line 1: services: missing\n" +
		"line 2: node.interface \"eth0\": is wired\n" +
		"line 3: node.seed: 7 is odd"
	if got := d.warnings.Sorted().Error(); got != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}
