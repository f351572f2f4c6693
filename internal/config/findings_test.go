// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/testhost"
)

// strictBalancer is a file without findings.
const strictBalancer = `node:
  interface: eth0
  internal: true
  locator: "fd00:6c:0:1::/64"
  addresses: [192.0.2.10]
  seed: 7
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, health: {tcp: {}}, # web
   servers: [{name: s1, locator: "fd00:5:0:1::/64", host: "2001:db8::1"},
             {name: s2, locator: "fd00:5:0:2::/64", host: "2001:db8::2"},
             {name: s3, locator: "fd00:5:0:3::/64", host: "2001:db8::3"},
             {name: s4, locator: "fd00:5:0:4::/64", host: "2001:db8::4"},
             {name: s5, locator: "fd00:5:0:5::/64", host: "2001:db8::5"}]}
- {name: old, vip: 192.0.2.80, port: 80, protocol: tcp, encapsulation: ipip, health: {tcp: {}}, # old
   servers: [{name: s1, address: 192.0.2.1}, {name: s2, address: 192.0.2.2}]}
`

const strictAgent = `node:
  interface: eth0
  internal: true
  locator: "fd00:5:0:1::/64"
  balancers: ["fd00:6c::/32"]
  mtu: 1500
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp}
`

// found is a finding without its text.
type found struct{ rule, path string }

// noHost has no interfaces.
var noHost = Host{
	MTU:    func(string) (int, bool) { return 0, false },
	Driver: func(string) string { return "" },
}

type findingCase struct {
	name, from, to string
	rule, path     string // no rule: there is no finding
	problem        string // part of the text
}

// checkFindings makes each change to a file without findings, and compares the findings. It returns
// their rules.
func checkFindings(
	t *testing.T, valid string, cases []findingCase,
	inspect func(string, []byte, Host) ([]Finding, error),
) (rules []string) {
	t.Helper()
	host := Host{
		MTU: func(name string) (int, bool) {
			mtu, ok := map[string]int{"eth0": 1540, "eth1": 1300}[name]
			return mtu, ok
		},
		Driver: func(name string) string { return map[string]string{"eth0": "veth", "eth2": "mlx4_en"}[name] },
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if c.from != "" && strings.Count(valid, c.from) != 1 {
				t.Fatalf("%q is not in the file once", c.from)
			}
			findings, err := inspect("/nonexistent/node.yaml", []byte(strings.Replace(valid, c.from, c.to, 1)), host)
			testhost.Must(t, err)
			got, want := []found{}, []found{}
			for _, f := range findings {
				got = append(got, found{f.Rule, f.Path})
				if !strings.Contains(f.Problem, "; ") {
					t.Errorf("no cure: %v", f)
				}
				if !strings.Contains(f.Problem, c.problem) {
					t.Errorf("%q does not contain %q", f.Problem, c.problem)
				}
				if f.Line == 0 || f.File == "" {
					t.Errorf("no place: %v", f)
				}
			}
			if c.rule != "" {
				want = append(want, found{c.rule, c.path})
				rules = append(rules, c.rule)
			}
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(found{})); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
	return rules
}

// needsFiles are the rules that only TestFindingsOfFiles checks.
var needsFiles = []string{"writable", "key-file", "overrides"}

// TestFindings checks that each rule finds what it is for, and nothing else.
func TestFindings(t *testing.T) {
	// store is strictBalancer with its services in a store.
	store := func(endpoint, settings string) string {
		own, _, _ := strings.Cut(strictBalancer, "services:")
		return own + fmt.Sprintf("store: {etcd: {endpoints: [%q], prefix: /segue/a}%s}\n", endpoint, settings)
	}
	stored := checkFindings(t, store("https://etcd1:2379", ""), []findingCase{
		{name: "none"},
		{"http", "https:", "http:", "plain-store", "store.etcd.endpoints[0]", "use https"},
		{"http on the host", "https://etcd1", "http://[::1]", "", "", ""},
		{"no limit", "/segue/a}", "/segue/a}, max-removed-percent: 100", "store-limit",
			"store.max-removed-percent", "lost its servers"},
	}, InspectBalancer)
	const (
		tcp        = "health: {tcp: {}},"
		web, old   = tcp + " # web", tcp + " # old"
		s5         = `host: "2001:db8::5"`
		first, two = "services[0]", "services[1]"
	)
	rules := checkFindings(t, strictBalancer, []findingCase{
		{name: "none"},
		{"seed", "seed: 7", "seed: 0", "seed", "node.seed", "0: a client can compute"},
		{"no seed", "  seed: 7\n", "", "seed", "node.seed", ""},
		{"trust by default", "  internal: true\n", "", "internal", "node.internal", "missing"},
		{"edge", "  internal: true\n", "  inside: eth9\n", "", "", ""},
		{"metrics", "services:", "metrics: {listen: ':9188'}\nservices:", "metrics-listen", "metrics.listen", ""},
		{"metrics 0", "services:", "metrics: {listen: '0.0.0.0:9188'}\nservices:", "metrics-listen", "metrics.listen", ""},
		{"metrics ::", "services:", "metrics: {listen: '[::]:9188'}\nservices:", "metrics-listen", "metrics.listen", ""},
		{"metrics of one address", "services:", "metrics: {listen: '127.0.0.1:9188'}\nservices:", "", "", ""},
		{"state", "seed: 7", "seed: 7\n  state: /run/segue", "state", "node.state", "reboot"},
		{"state on a disk", "seed: 7", "seed: 7\n  state: /runs", "", "", ""},
		{"silence", "seed: 7", "seed: 7\n  reject: false", "reject", "node.reject", "until they give up"},
		{"loops", "seed: 7", "seed: 7\n  drop-removed-vips: 0s", "removed-vips", "node.drop-removed-vips", "sends them back"},
		{"few flows", "seed: 7", "seed: 7\n  limits: {flows: 6999}", "flows", "node.limits.flows", "6999 for 7 servers"},
		{"flows", "seed: 7", "seed: 7\n  limits: {flows: 7000}", "", "", ""},
		{"few slots", "seed: 7", "seed: 7\n  limits: {servers: 8}", "server-slots", "node.limits.servers",
			"8, of which 7 are in use"},
		{"slots", "seed: 7", "seed: 7\n  limits: {servers: 9}", "", "", ""},
		{"no hints", "seed: 7", "seed: 7\n  limits: {hints: 0}", "", "", ""},
		{"one server", ", {name: s2, address: 192.0.2.2}", "", "one-server", two + ".servers", "old fails with it"},
		{"drained", s5, s5 + ", drained: true", "drained", first + ".servers[4].drained", "segue drain web/s5"},
		{"weight 0", s5, s5 + ", weight: 0", "drained", first + ".servers[4].weight", "segue drain web/s5"},
		{"no health", web, "", "health", first + ".health", "probes find a failed host or agent"},
		{"no health, no agent", old, "", "health", two + ".health", "a server that fails still gets connections"},
		{"no health, hunts", web, "placement: hunt, probe: true,", "health", first + ".health",
			"accepts connections and does not answer"},
		{"slow", web, "health: {tcp: {}, interval: 4s, timeout: 1s, fall: 3},", "slow-detection", first + ".health",
			"up to 13s"},
		{"not slow", web, "health: {tcp: {}, interval: 3s, timeout: 1s, fall: 3},", "", "", ""},
		{"moves on drain", "protocol: tcp, encapsulation: ipip", "protocol: udp, encapsulation: ipip", "on-drain",
			two + ".on-drain", "write move-udp if servers keep nothing about clients, or else keep"},
		{"keeps on drain", "protocol: tcp, encapsulation: ipip", "protocol: udp, on-drain: keep, encapsulation: ipip",
			"", "", ""},
		{"no probes", web, tcp + " probe: false, generations: 1,", "probe", first + ".probe", ""},
		{"one generation", web, tcp + " generations: 1,", "generations", first + ".generations",
			"set at least 2"},
		{"few generations", web, tcp + " persistence: stateless, generations: 7,", "generations",
			first + ".generations", "outlive 6 changes"},
		{"generations", web, tcp + " persistence: stateless, generations: 8,", "", "", ""},
		{"few buckets", web, tcp + " buckets: 499,", "buckets", first + ".buckets", "from 500"},
		{"buckets", web, tcp + " buckets: 503,", "", "", ""},
		{"turns", web, tcp + " placement: round-robin, buckets: 499,", "", "", ""},
		{"few candidates", web, tcp + " candidates: 2,", "candidates", first + ".candidates", "if the 2"},
		{"one candidate", web, tcp + " placement: hunt, candidates: 1,", "candidates",
			first + ".candidates", "cannot refuse"},
		{"short timeout", old, tcp + " timeouts: {established: 899s},", "idle-timeout",
			two + ".timeouts.established", "after 14m59s"},
		{"timeout", old, tcp + " timeouts: {established: 15m},", "", "", ""},
		{"agents", web, tcp + " timeouts: {established: 5s},", "", "", ""},
		{"narrow", "encapsulation: ipip", "encapsulation: gre", "", "", ""},
		{"narrow inside", "internal: true", "inside: eth1", "mtu", two + ".encapsulation",
			"eth1 has an MTU of 1300, and clients behind filters for ICMP are not told; raise the MTU on the way " +
				"to the servers to 1520"},
		{"unfit driver", "internal: true", "inside: eth2", "xdp-mode", "node.xdp-mode",
			"the driver of eth2, mlx4_en, does not transmit"},
		{"generic mode", "internal: true", "inside: eth2\n  xdp-mode: generic", "", "", ""},
	}, InspectBalancer)
	rules = append(rules, stored...)
	rules = append(rules, checkFindings(t, strings.Replace(strictBalancer, "seed: 7", "seed: 7\n  name: lb1\n  peers: [lb1, lb2]", 1),
		[]findingCase{
			{name: "none of peers"},
			{"random", web, tcp + " placement: hunt, selection: random,", "several-balancers",
				first + ".selection", "only 4 in 5"},
			{"turns", web, tcp + " placement: round-robin, candidates: 2,", "several-balancers",
				first + ".placement", "only 2 in 5"},
			{"turns of all", web, tcp + " placement: round-robin,", "", "", ""},
		}, InspectBalancer)...)
	rules = append(rules, checkFindings(t, strings.Replace(strictBalancer, web, tcp+" placement: hunt,", 1),
		[]findingCase{
			{"no key", "internal: true", "inside: eth9", "signal-key", "node.signal-key", "through eth9"},
			{"key", "internal: true", "inside: eth9\n  signal-key: /nonexistent/key", "", "", ""},
		}, InspectBalancer)...)
	rules = append(rules, checkFindings(t, strings.Replace(strictBalancer, web, tcp+" persistence: stateless,", 1),
		[]findingCase{
			{"no hints", "seed: 7", "seed: 7\n  limits: {hints: 0}", "hints", "node.limits.hints", "services[0]"},
			{"not on the switch", "seed: 7", "seed: 7\n  switch: {address: 'localhost:9559', network-port: 1, host-port: 2}",
				"switch", "node.switch", "all packets of web (bucket-hash multilinear), old (persistence table) to this host"},
			{"CRC", "persistence: stateless", "persistence: stateless, bucket-hash: crc-32", "bucket-hash", first + ".bucket-hash", "only if a switch"},
		}, InspectBalancer)...)
	rules = append(rules, checkFindings(t, strings.Replace(strictBalancer, web, tcp+" persistence: stateless, affinity: {},", 1),
		[]findingCase{
			{"affinity at a switch", "seed: 7", "seed: 7\n  switch: {address: 'localhost:9559', network-port: 1, host-port: 2}",
				"switch", "node.switch", "all packets of web (affinity by client), old (persistence table) to this host"},
		}, InspectBalancer)...)
	sharing := strings.NewReplacer(
		`vip: "2001:db8:80::1", port: 80`, "vip: 192.0.2.80, port: 81, affinity: {scope: service}",
		"vip: 192.0.2.80,", "vip: 192.0.2.80, affinity: {scope: vip},",
	).Replace(strictBalancer)
	rules = append(rules, checkFindings(t, sharing, []findingCase{
		{name: "one shares"},
		{"other servers", "scope: service", "scope: vip", "affinity", two + ".affinity.scope", "differ from those of services[0]"},
		{"other servers at another VIP", "vip: 192.0.2.80, port: 81, affinity: {scope: service}",
			"vips: [192.0.2.81, 192.0.2.80], port: 81, affinity: {scope: vip}",
			"affinity", two + ".affinity.scope", "differ from those of services[0]"},
	}, InspectBalancer)...)
	speaking := strings.Replace(strictBalancer, "services:", `bgp:
  asn: 64600
  router-id: 192.0.2.11
  peers:
  - {address: 192.0.2.1, asn: 64512, password-file: /nonexistent/1} # first
  - {address: 192.0.2.2, asn: 64512, password-file: /nonexistent/2, hold-time: 30s}
  - {address: "2001:db8::1", asn: 64512, password-file: /nonexistent/1, hold-time: 6s}
  - {address: "2001:db8::2", asn: 64512, password-file: /nonexistent/2} # last
services:`, 1)
	const one, last = ", password-file: /nonexistent/1} # first", ", password-file: /nonexistent/2} # last"
	rules = append(rules, checkFindings(t, speaking, []findingCase{
		{name: "none of BGP"},
		{"no password", one, "}", "bgp-password", "bgp.peers[0].password-file", "any host that reaches this one"},
		{"no password on a link", one, ", ttl-security: true}", "bgp-password", "bgp.peers[0].password-file",
			"any host on the link"},
		{"short hold time", one, ", hold-time: 5s" + one, "bgp-hold-time", "bgp.peers[0].hold-time", "5s: when"},
		{"long hold time", one, ", hold-time: 31s" + one, "bgp-hold-time", "bgp.peers[0].hold-time", "31s: for"},
		{"short restart time", "asn: 64600", "asn: 64600\n  restart-time: 59s", "bgp-restart-time", "bgp.restart-time",
			"59s: when"},
		{"restart time", "asn: 64600", "asn: 64600\n  restart-time: 60s", "", "", ""},
		{"one peer", `  - {address: "2001:db8::2", asn: 64512` + last + "\n", "", "bgp-one-peer", "bgp.peers",
			"only one has the family ipv6"},
		{"blackhole", "asn: 64600", "asn: 64600\n  communities: [no-export, blackhole]", "bgp-communities",
			"bgp.communities[1]", "drop the packets"},
		{"shutdown", "asn: 64600", "asn: 64600\n  communities: [graceful-shutdown]", "bgp-communities",
			"bgp.communities[0]", "prefer all other routes"},
		{"usable", old, "health: {tcp: {}}, bgp: {announce: usable},", "", "", ""},
		{"useless usable", old, "health: {tcp: {}}, all-failed: refuse, bgp: {announce: usable},", "bgp-announce",
			two + ".bgp.announce", "does not keep the route"},
	}, InspectBalancer)...)
	rules = append(rules, checkFindings(t, strictAgent, []findingCase{
		{name: "no agent's"},
		{"agent's trust", "  internal: true\n", "", "internal", "node.internal", "missing"},
		{"no tags", "protocol: tcp}", "protocol: tcp, load: {source: accept-queue}}", "signal-key", "node.signal-key",
			"services[0]"},
		{"mtu elsewhere", "eth0", "eth7", "", "", ""},
		{"tunnels", "mtu: 1500", "mtu: 1500\n  addresses: [192.0.2.53]", "tunnels", "node.addresses", "any sender"},
	}, InspectAgent)...)
	tagged := strings.Replace(strictAgent, "mtu: 1500", "mtu: 1500\n  signal-key: /nonexistent/key", 1)
	rules = append(rules, checkFindings(t, tagged, []findingCase{
		{"tags", "protocol: tcp}", "protocol: tcp, load: {source: accept-queue}}", "", "", ""},
		{"never", "protocol: tcp}", "protocol: tcp, accept: {policy: never}}", "never", "services[0].accept.policy", ""},
		{"drained service", "protocol: tcp}", "protocol: tcp, drained: true}", "drained", "services[0].drained", "segue drain web"},
		{"agent's state", "mtu: 1500", "mtu: 1500\n  state: /run/segue", "state", "node.state", "reboot: the agent"},
		{"mtu", "mtu: 1500", "mtu: 1541", "mtu", "node.mtu", "eth0, which is 1540"},
		{"agent's metrics", "services:", "metrics: {listen: ':9188'}\nservices:", "metrics-listen", "metrics.listen", ""},
		{"polls", "services:", "poll: {listen: '[::]:7460'}\nservices:", "poll-listen", "poll.listen", ""},
		{"polls at one address", "services:", "poll: {listen: '[2001:db8::7]:7460'}\nservices:", "", "", ""},
	}, InspectAgent)...)
	rules = append(rules, checkPlainSwitch(t))
	for _, rule := range Rules() {
		if !slices.Contains(append(rules, needsFiles...), rule) {
			t.Errorf("rule %s has no case", rule)
		}
	}
}

// checkPlainSwitch checks the rule plain-switch, and returns its name. No file with a switch is without
// another finding.
func checkPlainSwitch(t *testing.T) string {
	t.Helper()
	const rule = "plain-switch"
	for to, isFound := range map[string]bool{
		"address: 'switch1:9559'":                    true,
		"address: '192.0.2.9:9559'":                  true,
		"address: '192.0.2.9:9559', ca-file: /ca":    false,
		"address: '[::1]:9559'":                      false,
		"address: 'localhost:9559'":                  false,
		"address: 'unix:/run/switch/p4runtime:9559'": false,
		"address: 'unix:/run/switch/p4runtime.sock'": false,
	} {
		file := strings.Replace(strictBalancer, "seed: 7", "seed: 7\n  switch: {"+to+", network-port: 1, host-port: 2}", 1)
		findings, err := InspectBalancer("/nonexistent/node.yaml", []byte(file), noHost)
		testhost.Must(t, err)
		at := slices.IndexFunc(findings, func(f Finding) bool { return f.Rule == rule })
		if at < 0 == isFound {
			t.Errorf("%s: found %t, want %t", to, !isFound, isFound)
		} else if isFound && (findings[at].Path != "node.switch.address" || !strings.Contains(findings[at].Problem, ":9559 without TLS")) {
			t.Errorf("%s: %v", to, findings[at])
		}
	}
	return rule
}

// TestFindingsOnSwitch checks the rules switch and bucket-hash for services of which the switch
// balances some. It does not balance web as soon as web is of all ports: the host balances old.
func TestFindingsOnSwitch(t *testing.T) {
	for port, want := range map[string][]string{
		"81": {"node.switch: passes all packets of old (persistence table) to this host"},
		"all": {
			"node.switch: passes all packets of web (this host balances service old of the same VIP), old (persistence table) to this host",
			"services[0].bucket-hash: crc-32 has no key",
		},
	} {
		file := `node:
  {interface: eth0, locator: "fd00:6c:0:1::/64", switch: {address: "localhost:9559", network-port: 1, host-port: 2}}
services:
- {name: web, vip: 192.0.2.80, port: ` + port + `, protocol: tcp, encapsulation: srv6-encap, persistence: stateless, bucket-hash: crc-32}
- {name: old, vip: 192.0.2.80, port: 80, protocol: tcp, encapsulation: ipip}
`
		findings, err := InspectBalancer("", []byte(file), noHost)
		testhost.Must(t, err)
		var got []string
		for _, f := range findings {
			if f.Rule == "switch" || f.Rule == "bucket-hash" {
				problem, _, _ := strings.Cut(f.Problem, "; ")
				got = append(got, f.Path+": "+strings.Split(problem, ": clients")[0])
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("port %s: -want +got:\n%s", port, diff)
		}
	}
}

// TestRulesAreDocumented checks that the documentation has a row for each rule, and no other rows.
func TestRulesAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/reference/configuration.md")
	testhost.Must(t, err)
	_, chapter, _ := strings.Cut(string(text), "\n### Strict checks\n")
	chapter, _, _ = strings.Cut(chapter, "\n## ")
	var rows []string
	for line := range strings.Lines(chapter) {
		if name, ok := strings.CutPrefix(line, "| `"); ok {
			name, _, _ = strings.Cut(name, "`")
			rows = append(rows, name)
		}
	}
	slices.Sort(rows)
	if diff := cmp.Diff(Rules(), rows); diff != "" {
		t.Errorf("-rules +rows:\n%s", diff)
	}
}

// TestWritable checks which users can change a file, by its permissions and those of the
// directories above it.
func TestWritable(t *testing.T) {
	for _, c := range []struct {
		name        string
		top, dir    os.FileMode
		file        os.FileMode
		group, user int
		trusted     trust
		dirGroup    int
		link        bool
		want        string // with DIR for the directory of the test
	}{
		{name: "root's", top: 0o755, dir: 0o700, file: 0o644},
		{name: "all", top: 0o755, dir: 0o700, file: 0o646, want: "any user of this host can write to DIR/a/f"},
		{name: "all above", top: 0o755, dir: 0o707, file: 0o600, want: "any user of this host can write to DIR/a"},
		{name: "all on top", top: 0o777, dir: 0o700, file: 0o600, want: "any user of this host can write to DIR"},
		{name: "sticky", top: 0o777 | os.ModeSticky, dir: 0o700, file: 0o600},
		{name: "sticky itself", top: 0o755, dir: 0o700, file: 0o602 | os.ModeSticky,
			want: "any user of this host can write to DIR/a/f"},
		{name: "group", top: 0o755, dir: 0o700, file: 0o664, group: 77, want: "the group 77 can write to DIR/a/f"},
		{name: "group root", top: 0o755, dir: 0o700, file: 0o664},
		{name: "user", top: 0o755, dir: 0o700, file: 0o600, user: 77, want: "the user 77 can write to DIR/a/f"},
		{name: "the process's", top: 0o755, dir: 0o700, file: 0o600, user: 77, trusted: trustOwner},
		{name: "the process's above", top: 0o755, dir: 0o770, file: 0o600, user: 77, dirGroup: 77, trusted: trustOwner,
			want: "the group 77 can write to DIR/a"},
		{name: "the process's with its group", top: 0o755, dir: 0o700, file: 0o660, user: 77, group: 77, trusted: trustOwner,
			want: "the group 77 can write to DIR/a/f"},
		{name: "application", top: 0o755, dir: 0o700, file: 0o660, user: 77, group: 77, trusted: trustSome},
		{name: "all but application", top: 0o755, dir: 0o700, file: 0o666, user: 77, trusted: trustSome,
			want: "any user of this host can write to DIR/a/f"},
		{name: "link", top: 0o755, dir: 0o703, file: 0o600, link: true, want: "any user of this host can write to DIR/a"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if os.Geteuid() != 0 {
				t.Skip("only root can give files away")
			}
			top, elsewhere := t.TempDir(), t.TempDir()
			file := filepath.Join(top, "a", "f")
			target := file
			if c.link {
				target = filepath.Join(elsewhere, "f")
			}
			must := func(errs ...error) {
				t.Helper()
				for _, err := range errs {
					testhost.Must(t, err)
				}
			}
			must(os.Mkdir(filepath.Dir(file), 0o700), os.WriteFile(target, nil, 0o600), os.Chown(target, c.user, c.group),
				os.Chown(filepath.Dir(file), 0, c.dirGroup),
				os.Chmod(target, c.file), os.Chmod(filepath.Dir(file), c.dir), os.Chmod(top, c.top))
			if c.link {
				must(os.Symlink(target, file))
			}
			want := strings.Replace(c.want, "DIR", top, 1)
			if got := writers(file, c.trusted); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
	if got := writers("/nonexistent/file", trustRoot); got != "" {
		t.Errorf("absent: %q", got)
	}
}

// TestFilesOfProcess checks that there is no finding about files that the user of the process owns,
// as with the units of the package.
func TestFilesOfProcess(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give files away")
	}
	dir := t.TempDir()
	key, state := filepath.Join(dir, "key"), filepath.Join(dir, "state")
	err := errors.Join(os.WriteFile(key, []byte(strings.Repeat("5", 32)+"\n"), 0o400), os.Mkdir(state, 0o750),
		os.Chown(key, 77, 77), os.Chown(state, 77, 77))
	testhost.Must(t, err)
	const node = "node: {interface: eth0, locator: \"fd00:5:0:1::/64\", state: %s, signal-key: %s}\nservices:\n"
	const service = `- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp`
	file := fmt.Sprintf(node, state, key) + service
	host := noHost
	ofAgent, err := InspectAgent("", []byte(file+"}\n"), host)
	testhost.Must(t, err)
	ofBalancer, err := InspectBalancer("", []byte(file+`, servers: [{name: s1, locator: "fd00:5:0:2::/64"}]}`), host)
	testhost.Must(t, err)
	for _, f := range append(ofAgent, ofBalancer...) {
		if f.Rule == "writable" {
			t.Error(f)
		}
	}
}

// TestFindingsOfTLSFiles checks the files of connections with a switch and with a store.
func TestFindingsOfTLSFiles(t *testing.T) {
	authority := testhost.NewAuthority(t)
	cert, key := authority.Issue("lb1")
	own, _, _ := strings.Cut(strictBalancer, "services:")
	for _, c := range []struct{ path, file string }{
		{"node.switch", strings.Replace(strictBalancer, "seed: 7",
			"seed: 7\n  switch: {address: 'switch1:9559', network-port: 1, host-port: 2, FILES}", 1)},
		{"store.etcd", own + "store: {etcd: {endpoints: ['https://etcd1:2379'], prefix: /segue/a, FILES}}\n"},
	} {
		for _, files := range []struct {
			name, ca, cert string
			mode           os.FileMode // of the key
			want           []found
		}{
			{"right", authority.File, cert, 0o640, nil},
			{"absent", "/nonexistent/ca", "/nonexistent/cert", 0o640, nil},
			{"key for all", authority.File, cert, 0o644, []found{{"key-file", c.path}}},
			{"key to change", authority.File, cert, 0o602, []found{{"key-file", c.path}, {"writable", c.path + ".key-file"}}},
			{"not the authority's", key, cert, 0o600, []found{{"key-file", c.path}}},
			{"not the key's", authority.File, authority.File, 0o600, []found{{"key-file", c.path}}},
		} {
			testhost.Must(t, os.Chmod(key, files.mode))
			text := strings.Replace(c.file, "FILES", fmt.Sprintf("ca-file: %s, cert-file: %s, key-file: %s", files.ca, files.cert, key), 1)
			findings, err := InspectBalancer("", []byte(text), noHost)
			testhost.Must(t, err)
			var got []found
			for _, f := range findings {
				if f.Rule != "switch" { // no file with a switch is without this finding
					got = append(got, found{f.Rule, f.Path})
				}
			}
			if diff := cmp.Diff(files.want, got, cmp.AllowUnexported(found{})); diff != "" {
				t.Errorf("%s, %s: -want +got:\n%s", c.path, files.name, diff)
			}
		}
	}
}

// TestFindingsOfFiles checks the fields that name files.
func TestFindingsOfFiles(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string, mode os.FileMode) string {
		t.Helper()
		path := filepath.Join(dir, name)
		testhost.Must(t, os.WriteFile(path, []byte(content), 0o600))
		if err := os.Chmod(path, mode); err != nil { // the umask does not count
			t.Fatal(err)
		}
		return path
	}
	open := filepath.Join(dir, "open")
	testhost.Must(t, os.Mkdir(open, 0o700))
	testhost.Must(t, os.Chmod(open, 0o777))
	const key = "000102030405060708090a0b0c0d0e0f\n"
	lb := strings.Replace(strictBalancer, "seed: 7", "seed: 7\n  state: "+open+"\n  signal-key: "+write("k", key, 0o640), 1)
	lb = strings.Replace(lb, "services:", fmt.Sprintf(`bgp:
  asn: 64600
  router-id: 192.0.2.11
  peers:
  - {address: 192.0.2.1, asn: 64512, password-file: %s}
  - {address: 192.0.2.2, asn: 64512, password-file: %s}
services:`, write("right", "secret\n", 0o600), write("wrong", "secret\n", 0o602)), 1)
	agent := strings.Replace(strictAgent, "mtu: 1500", "mtu: 1500\n  signal-key: "+write("short", "0001\n", 0o600), 1)
	agent = strings.Replace(agent, "protocol: tcp}", "protocol: tcp, load: {source: shared-memory, path: "+
		write("load", "", 0o666)+"}}", 1)
	host := noHost
	file := write("node.yaml", "", 0o646)
	for _, c := range []struct {
		inspect func(string, []byte, Host) ([]Finding, error)
		text    string
		want    []found
	}{
		{InspectBalancer, lb, []found{
			{"writable", ""}, {"writable", "node.state"}, {"key-file", "node.signal-key"},
			{"key-file", "bgp.peers[1].password-file"}, {"writable", "bgp.peers[1].password-file"},
		}},
		{InspectAgent, agent, []found{
			{"writable", ""}, {"key-file", "node.signal-key"}, {"writable", "services[0].load.path"},
		}},
	} {
		findings, err := c.inspect(file, []byte(c.text), host)
		testhost.Must(t, err)
		var got []found
		for _, f := range findings {
			if f.Rule != "state" { // the test's directory does not outlast a reboot
				got = append(got, found{f.Rule, f.Path})
			}
		}
		if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(found{})); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	}
}
