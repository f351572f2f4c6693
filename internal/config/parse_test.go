// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/testhost"
)

// exact compares addresses as values.
var exact = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

func TestBalancerDefaults(t *testing.T) {
	got, _, err := ParseBalancer([]byte(`
node: {interface: eth0, locator: "fd00:6c:0:1::/64", addresses: [192.0.2.1]}
services:
  - name: web
    vip: 2001:db8:80::1
    port: 443
    protocol: tcp
    health: {http: {}}
    servers: [{name: s1, locator: "fd00:5:0:1::/64", host: "2001:db8:0:5::1"}]
  - name: dns
    vip: 192.0.2.53
    port: 53
    protocol: udp
    encapsulation: ipip
    health: {tcp: {}, interval: 5s}
    timeouts: {closing: 5s}
    servers: [{name: d1, address: 192.0.2.7}]
`))
	testhost.Must(t, err)
	one, yes, no := uint32(1), true, false
	host, err := os.Hostname()
	testhost.Must(t, err)
	jitters := []time.Duration{100 * time.Millisecond, 500 * time.Millisecond}
	slow := []time.Duration{10 * time.Second, 0}
	want := &desired.Balancer{
		Node: desired.BalancerNode{
			Instance:  "lb",
			Name:      host[:min(len(host), 63)],
			Interface: "eth0",
			Internal:  &yes,
			XDPMode:   desired.XDPAuto,
			Locator:   netip.MustParsePrefix("fd00:6c:0:1::/64"),
			Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")},
			State:     "/var/lib/segue",
			Limits:    desired.Limits{Flows: 1048576, Hints: 1048576, Servers: 4096},
			Reject:    true, DropRemovedVIPs: 10 * time.Minute,
		},
		Services: []desired.Service{{
			Name: "web", VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 443, Protocol: desired.TCP,
			Placement: "hash", Persistence: "table", Encapsulation: "srv6-encap", Candidates: 3, Generations: 3, Buckets: 65537,
			Timeouts: desired.Timeouts{
				New: time.Minute, Established: time.Hour, Closing: time.Minute, Silent: 10 * time.Second,
			},
			Health: &desired.Health{
				Via:      desired.ViaPackets,
				HTTP:     &desired.HTTPCheck{Path: "/", Port: 443, Status: "200-399"},
				Interval: time.Second, Jitter: &jitters[0], Timeout: time.Second, Rise: 2, Fall: 3,
			},
			OnFailure: desired.OnFailureMoveUDP, OnDrain: desired.OnDrainMoveUDP, AllFailed: desired.AllFailedUse, SlowStart: &slow[0],
			Probe: &yes,
			Servers: []desired.Server{{
				Name: "s1", Locator: netip.MustParsePrefix("fd00:5:0:1::/64"),
				Host: netip.MustParseAddr("2001:db8:0:5::1"), Weight: &one,
			}},
		}, {
			Name: "dns", VIP: netip.MustParseAddr("192.0.2.53"), Port: 53, Protocol: desired.UDP,
			Placement: "hash", Persistence: "table", Encapsulation: "ipip", Candidates: 3, Generations: 3, Buckets: 65537,
			Timeouts: desired.Timeouts{
				New: 30 * time.Second, Established: 2 * time.Minute, Closing: 5 * time.Second,
				Silent: 10 * time.Second,
			},
			Health: &desired.Health{
				Via:      desired.ViaPackets,
				TCP:      &desired.TCPCheck{Port: 53},
				Interval: 5 * time.Second, Jitter: &jitters[1], Timeout: 5 * time.Second, Rise: 2, Fall: 3,
			},
			OnFailure: desired.OnFailureMoveUDP, OnDrain: desired.OnDrainMoveUDP, AllFailed: desired.AllFailedUse, SlowStart: &slow[1],
			Probe: &no,
			Servers: []desired.Server{{
				Name: "d1", Address: netip.MustParseAddr("192.0.2.7"),
				Host: netip.MustParseAddr("192.0.2.7"), Weight: &one,
			}},
		}},
	}
	for i := range got.Services {
		got.Services[i].Revision = nil // each file has its own
	}
	if diff := cmp.Diff(want, got, exact); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestCandidatesByPlacement checks the default number of candidates. Under round-robin a flow's
// bucket does not tell its server, so a row names as many servers as possible.
func TestCandidatesByPlacement(t *testing.T) {
	for placement, want := range map[string]int{
		"hash": 3, "hunt": 4, "round-robin": 8, "infer": 8, "least-queue": 8, "sed": 8,
	} {
		got, _, err := ParseBalancer([]byte(`
node: {interface: eth0, locator: "fd00:6c:0:1::/64"}
services: [{name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, placement: ` + placement + `}]
`))
		testhost.Must(t, err)
		if candidates := got.Services[0].Candidates; candidates != want {
			t.Errorf("%s: %d candidates, want %d", placement, candidates, want)
		}
	}
}

// TestBucketsByPersistence checks that the default number of buckets fits with each default number
// of candidates.
func TestBucketsByPersistence(t *testing.T) {
	for service, want := range map[string]int{
		"placement: hash, persistence: stateless":                65537,
		"placement: infer":                                       65537,
		"placement: infer, persistence: hint":                    65536,
		"placement: infer, persistence: stateless":               65536,
		"placement: hunt, selection: reports, persistence: hint": 65536,
	} {
		got, _, err := ParseBalancer([]byte(`
node: {interface: eth0, locator: "fd00:6c:0:1::/64"}
services: [{name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, ` + service + `}]
`))
		if err != nil {
			t.Errorf("%s: %v", service, err)
		} else if buckets := got.Services[0].Buckets; buckets != want {
			t.Errorf("%s: %d buckets, want %d", service, buckets, want)
		}
	}
}

func TestAgentDefaults(t *testing.T) {
	got, _, err := ParseAgent([]byte(`
node: {interface: eth0, locator: "fd00:5:0:1::/64"}
services: [{name: web, vip: 192.0.2.80, port: all, protocol: tcp}]
`))
	testhost.Must(t, err)
	yes := true
	want := &desired.Agent{
		Node: desired.AgentNode{
			Instance: "agent", Interface: "eth0", Internal: &yes,
			XDPMode: desired.XDPAuto, Locator: netip.MustParsePrefix("fd00:5:0:1::/64"),
			AssignVIPs: &yes, State: "/var/lib/segue",
		},
		Services: []desired.AgentService{{
			Name: "web", VIP: netip.MustParseAddr("192.0.2.80"), Port: desired.AllPorts, Protocol: desired.TCP, Encapsulation: desired.SRv6Encap,
			Accept:   desired.Accept{Policy: desired.AcceptLeast},
			Load:     desired.Source{Kind: desired.LoadConnections},
			NotLocal: desired.NotLocalReset,
		}},
	}
	if diff := cmp.Diff(want, got, exact); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestDefaultsOfDynamic checks the parameters of the policy dynamic.
func TestDefaultsOfDynamic(t *testing.T) {
	got, _, err := ParseAgent([]byte(`
node: {interface: eth0, locator: "fd00:5:0:1::/64"}
services: [{name: web, vip: 192.0.2.80, port: 80, protocol: tcp, accept: {policy: dynamic}}]
`))
	testhost.Must(t, err)
	epsilon, initial, windowTime := 0.1, uint32(1), 2*time.Second
	want := desired.Accept{
		Policy:     desired.AcceptDynamic,
		Window:     50,
		WindowTime: &windowTime,
		Epsilon:    &epsilon,
		Initial:    &initial,
	}
	if diff := cmp.Diff(want, got.Services[0].Accept); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// The default of load.interval depends on the source. Sources that the data path reads have none.
func TestDefaultLoadIntervals(t *testing.T) {
	for source, want := range map[string]time.Duration{
		"source: apache-scoreboard, path: /a":           20 * time.Millisecond,
		"source: cgroup, path: /a":                      500 * time.Millisecond,
		"source: shared-memory, path: /a":               10 * time.Millisecond,
		"source: shared-memory, path: /a, interval: 1s": time.Second,
		"source: shared-map, path: /a":                  0,
		"source: accept-queue":                          0,
		"workers: 5":                                    0,
	} {
		got, _, err := ParseAgent([]byte(`
node: {interface: eth0, locator: "fd00:5:0:1::/64"}
services: [{name: web, vip: 192.0.2.80, port: all, protocol: tcp, load: {` + source + `}}]
`))
		if err != nil {
			t.Errorf("%s: %v", source, err)
		} else if interval := got.Services[0].Load.Interval; interval != want {
			t.Errorf("%s: the interval is %v, want %v", source, interval, want)
		}
	}
}

// TestErrors checks the lines, the values and the order of errors. A field that cannot be decoded
// causes only one error.
func TestErrors(t *testing.T) {
	tests := []struct {
		name, file, want string
	}{
		{"empty", "", "the file is empty; it must hold one YAML document"},
		{"two documents", "node: {}\n---\nnode: {}\n", "line 2: a second YAML document begins here; the file must hold one"},
		{"syntax", "node:\n  interface: [eth0\nservices: []\n",
			"line 3: the [ of line 2 must continue here with a comma, or end with ]"},
		{"no mapping", "- node\n", "line 1: must be a mapping of field names to values"},
		{"all at once", `node:
  interfaces: eth0
  interface: eth0
  interface: eth1
  seed: -1
  limits: 5
  addresses: 192.0.2.1
services:
  - name: [web]
    vip: 192.0.2.300
    port: 0x1_0000
    protocol: tcp
    [a]: b
    "a.b\n": c
    servers:
      -
      - {name: s1, locator: 10}
      - name: s2
  - 1
`, `line 2: node.interfaces: unknown field; must be one of: instance, name, peers, interface, inside, internal, xdp-mode, locator, addresses, tunnel-sources, underlay, reject, drop-removed-vips, seed, limits, state, signal-key, switch
line 2: node.locator: required by services[0], whose encapsulation is srv6-encap
line 4: node.interface: given twice; first in line 3
line 5: node.seed: must be a whole number from 0 to 18446744073709551615
line 6: node.limits "5": must be a mapping of field names to values
line 7: node.addresses "192.0.2.1": must be a list
line 9: services[0].name: must be a single value, not a list or a mapping
line 10: services[0].vip "192.0.2.300": must be an IP address
line 11: services[0].port "0x1_0000": must be a port from 1 to 65535, or all
line 13: services[0].?: a field name must be a plain word
line 14: services[0]."a.b\n": unknown field; must be one of: name, vip, vips, port, ports, sources, protocol, placement, persistence, ` +
			`encapsulation, selection, infer, candidates, generations, history, quic, former-quic, buckets, bucket-hash, affinity, timeouts, health, on-failure, on-drain, all-failed, slow-start, probe, bgp, servers
line 16: services[0].servers[0]: empty list element
line 17: services[0].servers[1].locator "10": must be a prefix such as fd00:5:0:1::/64
line 18: services[0].servers[2].locator: required by encapsulation srv6-encap
line 19: services[1] "1": must be a mapping of field names to values`},
		{"an alias is no loop", "node: {interface: eth0}\nservices: &s\n  - name: web\n    servers: *s\n",
			"line 4: the alias *s stands for a value that contains the alias"},
		{"null is absent", `node: {interface: eth0, locator: "fd00:6c:0:1::/64"}
services:
  - name: web
    vip: 2001:db8:80::1
    port: 443
    protocol: tcp
    health:
      tcp:
    servers: [{name: s1, locator: "fd00:5:0:1::/64", host: "2001:db8:0:5::1"}]
`, "line 8: services[0].health: must have exactly one of http, https, tcp and udp; tcp: {} uses the defaults"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			_, _, err := ParseBalancer([]byte(test.file))
			if err == nil {
				t.Fatal("valid")
			}
			if diff := cmp.Diff(test.want, err.Error()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestLongValueIsCut(t *testing.T) {
	err := &fieldpath.Error{Line: 1, Path: "a", Value: string(make([]byte, 10000)), Problem: "long"}
	if n := len(err.Error()); n > 400 {
		t.Errorf("the error has %d bytes", n)
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	if _, _, err := LoadBalancer(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	file := filepath.Join(dir, "agent.yaml")
	testhost.Must(t, os.WriteFile(file, []byte("\nnode: 1\nservices: 2\n"), 0o644))
	_, _, err := LoadAgent(file)
	want := file + ":2: node \"1\": must be a mapping of field names to values\n" +
		file + ":3: services \"2\": must be a list"
	if err == nil || err.Error() != want {
		t.Errorf("got:\n%v\nwant:\n%s", err, want)
	}
	var first *fieldpath.Error
	if !errors.As(err, &first) || first.Path != "node" || first.Line != 2 || first.File != file {
		t.Errorf("first error: %+v", first)
	}
}

// The examples must be valid, because docs/reference/configuration.md shows them and deployments
// start from them.
const examples = "../../docs/examples/"

func TestExamples(t *testing.T) {
	files, _, err := LoadBalancer(examples + "lb.yaml")
	testhost.Must(t, err)
	b := files.Desired
	checkRoundTrip(t, b, ParseBalancer)
	agentFiles, _, err := LoadAgent(examples + "agent.yaml")
	testhost.Must(t, err)
	a := agentFiles.File
	checkRoundTrip(t, a, ParseAgent)

	// The agent's file is that of the balancer's server s1. Its services must have the same
	// values.
	for _, as := range a.Services {
		found := false
		for _, bs := range b.Services {
			found = found || as.Name == bs.Name && as.VIP == bs.VIP && as.Port == bs.Port &&
				as.Protocol == bs.Protocol && as.Encapsulation == bs.Encapsulation
		}
		if !found {
			t.Errorf("the balancer's example has no service %+v", as)
		}
	}
}

func TestKindOf(t *testing.T) {
	lb, err := os.ReadFile(examples + "lb.yaml")
	testhost.Must(t, err)
	agent, err := os.ReadFile(examples + "agent.yaml")
	testhost.Must(t, err)
	topology, err := os.ReadFile(examples + "lab/infer.yaml")
	testhost.Must(t, err)
	tests := map[string]struct {
		file string
		want Kind
	}{
		"balancer":         {string(lb), BalancerFile},
		"agent":            {string(agent), AgentFile},
		"topology":         {string(topology), TopologyFile},
		"invalid balancer": {"services: [1, {port: x, port: [], servers: [1]}]", BalancerFile},
		"misplaced field":  {"servers: []\nnode: {}\nservices: [{servers: []}]", BalancerFile},
		"no servers":       {"services: [{servers: []}]", BalancerFile},
		"no servers yet":   {"services: [{name: web, servers: }]", BalancerFile},
		"no field":         {"services: [{name: web}]", AgentFile},
		"no mapping":       {"services", AgentFile},
		// A mistyped field counts as the one that it means, and not as one of another role.
		"mistyped services": {strings.Replace(string(lb), "services:", "service:", 1), BalancerFile},
		"mistyped servers":  {strings.ReplaceAll(string(lb), "servers:", "severs:"), BalancerFile},
		"mistyped node":     {strings.Replace(string(lb), "node:", "nodes:", 1), BalancerFile},
		"agent's services":  {strings.Replace(string(agent), "services:", "service:", 1), AgentFile},
		"agent's node":      {strings.Replace(string(agent), "node:", "noed:", 1), AgentFile},
		"lab's servers":     {"severs: 6\nservices: [{name: web, placement: hunt}]", TopologyFile},
		"lab's services":    {"balancers: 2\nservice: [{name: web, placement: hunt}]", TopologyFile},
		"only severs":       {"services: [{name: web, severs: [{name: s1}]}]", BalancerFile},
		"only service":      {"service: [{name: web, servers: [{name: s1}]}]", BalancerFile},
		"unknown field":     {"services: [{name: web, servers: [{name: s1, colour: red, weight: 1}]}]", BalancerFile},
		"merge key":         {"services: [{name: web, servers: [{<<: {weight: 1}, name: s1}]}]", BalancerFile},
	}
	for name, test := range tests {
		if got, err := KindOf([]byte(test.file)); got != test.want || err != nil {
			t.Errorf("%s: got %v, %v", name, got, err)
		}
	}
	if _, err := KindOf([]byte("services: [{servers: [{}]}]\nnode: ]")); err == nil || !strings.Contains(err.Error(), "line 2: ") {
		t.Errorf("no YAML: %v", err)
	}
}

// checkRoundTrip writes a configuration and reads it again.
func checkRoundTrip[T any](t *testing.T, want *T, parse func([]byte) (*T, fieldpath.Errors, error)) {
	t.Helper()
	data, err := yaml.Dump(want)
	testhost.Must(t, err)
	got, _, err := parse(data)
	if err != nil {
		t.Fatalf("not valid when written:\n%v\n%s", err, data)
	}
	if diff := cmp.Diff(want, got, exact); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestDocsNameEveryField checks that the reference in the documentation has every field.
func TestDocsNameEveryField(t *testing.T) {
	docs, err := os.ReadFile("../../docs/reference/configuration.md")
	testhost.Must(t, err)
	balancer, agent, found := strings.Cut(string(docs), "## The agent's file")
	if !found {
		t.Fatal("no chapter about the agent's file")
	}
	for _, name := range fieldNames(reflect.TypeFor[desired.Balancer]()) {
		if !strings.Contains(balancer, name+"`") {
			t.Errorf("the balancer's chapter has no `%s`", name)
		}
	}
	for _, name := range fieldNames(reflect.TypeFor[desired.Agent]()) {
		if !strings.Contains(agent, name+"`") && name != "listen" {
			t.Errorf("the agent's chapter has no `%s`", name)
		}
	}
}

// fieldNames returns the names of all fields in files of a type, without fields that only group
// others.
func fieldNames(t reflect.Type) []string {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return nil
	}
	var names []string
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if name == "" || name == "-" {
			continue
		}
		inner := fieldNames(f.Type)
		if inner == nil {
			inner = []string{name}
		}
		names = append(names, inner...)
	}
	return names
}

// TestLoadOverrides reads the overrides of an instance together with its configuration.
func TestLoadOverrides(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		testhost.Must(t, os.WriteFile(path, []byte(text), 0o644))
		return path
	}
	file := write("lb.yaml", strings.Replace(validBalancer, "node:", "node:\n  state: "+dir, 1))
	drained := func() bool {
		t.Helper()
		files, _, err := LoadBalancer(file)
		testhost.Must(t, err)
		return files.Desired.Services[0].Servers[1].Drained
	}
	if drained() {
		t.Error("drained without overrides")
	}
	overrides := write("edge-1.overrides.yaml", "overrides:\n- {service: web, server: s2, set: {drained: true}}\n"+
		"- {service: web, server: s7, set: {weight: 3}}\n")
	if !drained() {
		t.Error("not drained")
	}
	_, warnings, err := LoadBalancer(file)
	testhost.Must(t, err)
	want := file + ":20: " + unconfirmedEnds + "\n" + overrides + ":3: web/s7: does not exist: the override has no effect\n" +
		overrides + ": web.servers: all are drained or have weight 0: service web gets no new connections"
	if warnings.Error() != want {
		t.Errorf("warnings %q, want %q", warnings, want)
	}
	write("edge-1.overrides.yaml", "overrides:\n- {service: web, server: s2, set: {drained: maybe}}\n")
	files, _, err := LoadBalancer(file)
	testhost.Must(t, err)
	want = overrides + `:2: web/s2.drained "maybe": must be true or false`
	if len(files.Invalid) != 1 || files.Invalid[0].Problems.Error() != want || drained() {
		t.Errorf("invalid %v, want %s", files.Invalid, want)
	}
}
