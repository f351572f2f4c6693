// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// addresses lets cmp compare netip addresses, and makes it ignore the warnings of configurations,
// which contain line numbers.
var addresses = cmp.Options{
	cmpopts.IgnoreUnexported(desired.Balancer{}, desired.Agent{}),
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

func TestDefaultTopologyHasEveryLegalService(t *testing.T) {
	topology := DefaultTopology()
	testhost.Must(t, topology.Validate())
	got := make(map[string]int)
	for _, s := range topology.Services {
		got[fmt.Sprintf("%s %s ipv4=%t%s", s.Protocol, s.Encapsulation, s.VIP.Is4(), s.Placement)]++
	}
	want := make(map[string]int)
	for _, protocol := range []desired.Protocol{desired.TCP, desired.UDP} {
		for _, e := range []desired.Encapsulation{desired.SRv6Insert, desired.SRv6Encap, desired.GRE, desired.IPIP} {
			for _, ipv4 := range []bool{false, true} {
				if e != desired.SRv6Insert || !ipv4 {
					want[fmt.Sprintf("%s %s ipv4=%t", protocol, e, ipv4)] = 1
				}
			}
		}
	}
	for _, hunting := range []string{"srv6-insert ipv4=false", "srv6-encap ipv4=false", "srv6-encap ipv4=true"} {
		want["tcp "+hunting+"hunt"] = 1
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("services (-want +got):\n%s", diff)
	}
}

func TestParseTopologyKeepsDefaultsOfWhatIsNotNamed(t *testing.T) {
	got, err := ParseTopology([]byte("servers: 12\nmtu: {fabric: 1700}\n"))
	testhost.Must(t, err)
	want := DefaultTopology()
	want.Servers, want.MTU.Fabric = 12, 1700
	if diff := cmp.Diff(want, got, addresses); diff != "" {
		t.Errorf("topology (-want +got):\n%s", diff)
	}
	got, err = ParseTopology([]byte("services: [{name: a, vip: 192.0.2.1, port: 443, protocol: tcp, encapsulation: gre}]"))
	testhost.Must(t, err)
	if len(got.Services) != 1 || got.Services[0].Name != "a" {
		t.Errorf("a list of services does not replace the default's: %+v", got.Services)
	}
	if got, err = ParseTopology([]byte("bare: true\nservices: []")); err != nil || len(got.Services) != 0 {
		t.Errorf("an empty list of services does not replace the default's: %+v, %v", got.Services, err)
	}
}

func TestParseTopologyRefuses(t *testing.T) {
	service := func(changed string) string {
		fields := map[string]string{"name": "a", "vip": "192.0.2.1", "port": "80", "protocol": "tcp", "encapsulation": "gre"}
		key, value, _ := strings.Cut(changed, ": ")
		fields[key] = value
		text := "services:\n  -\n"
		for key, value := range fields {
			text += fmt.Sprintf("    %s: %s\n", key, value)
		}
		return text
	}
	hunting := func(field string) string {
		return "services: [{name: a, vip: 2001:db8::1, port: 80, protocol: tcp, encapsulation: srv6-insert, placement: hunt, " + field + "}]"
	}
	emulated := func(exceptions string) string {
		return "applications: [emulated, nginx]\nemulated: {exceptions: [{" + exceptions + "}]}"
	}
	const haproxy = "program: haproxy, algorithm: leastconn"
	proxied := func(proxy string) string {
		return "services: [{name: a, vip: 192.0.2.1, port: 80, protocol: tcp}]\nproxy: {" + proxy + "}\n"
	}
	for _, test := range []struct{ text, want string }{
		{"colour: red", "line 1: colour: unknown field; must be one of: name, balancers, switches, servers, mtu, two-armed, ipv4-only, bare, proxy, edge, impair, applications, emulated, apache, mediawiki, services"},
		{"name: my-lab", `line 1: name "my-lab": must be 1 to 12 lower-case letters and digits`},
		{"name: abcdefghijklm", `name "abcdefghijklm": must be 1 to 12`},
		{"servers: 3\nbalancers: 0", `line 2: balancers "0": must be 1 to 16`},
		{"switches: 3", `line 1: switches "3": must be 0 to 2, the number of balancers`},
		{"switches: -1", `line 1: switches "-1": must be 0 to 2`},
		{"switches: 1\nbare: true", `line 1: switches "1": cannot be used with bare`},
		{"switches: 1\ntwo-armed: true", `line 1: switches "1": cannot be used with two-armed`},
		{proxied("program: varnish"), `line 2: proxy.program "varnish": must be haproxy or nginx`},
		{proxied("algorithm: leastconn"), `line 2: proxy.program: must be haproxy or nginx`},
		{proxied("program: haproxy, algorithm: least_conn"),
			`line 2: proxy.algorithm "least_conn": must be one of [leastconn random(2)]`},
		{proxied("program: nginx, algorithm: leastconn"),
			`line 2: proxy.algorithm "leastconn": must be one of [least_conn]`},
		{proxied("program: haproxy, algorithm: leastconn, maxconn: -1"),
			`line 2: proxy.maxconn "-1": must be a whole number from 0 to 65536`},
		{proxied("program: nginx, algorithm: least_conn, maxconn: 2"),
			`line 2: proxy.maxconn "2": is not for nginx`},
		{proxied(haproxy) + "bare: true", `proxy.program "haproxy": cannot be used with bare`},
		{proxied(haproxy) + "switches: 1", `proxy.program "haproxy": cannot be used with switches`},
		{proxied(haproxy) + "edge: {router: frr}",
			`proxy.program "haproxy": cannot be used with edge.router`},
		{strings.Replace(proxied(haproxy), "tcp}", "udp}", 1), `services[0].protocol "udp": must be tcp`},
		{strings.Replace(proxied(haproxy), "tcp}", "tcp, placement: hunt}", 1),
			`line 1: services[0].placement "hunt": is a setting of Segue, which proxies do not have`},
		{strings.Replace(proxied(haproxy), "192.0.2.1", "10.77.0.1", 1), `services[0].vip "10.77.0.1": is in`},
		{"servers: 129", `line 1: servers "129": must be 1 to 128`},
		{"servers: many", `line 1: servers "many": must be a whole number`},
		{"edge: {bfd: true}", `line 1: edge.bfd "true": needs edge.router`},
		{"edge: {router: quagga}", `line 1: edge.router "quagga": must be one of [frr bird]`},
		{"edge: {router: frr}\nbare: true",
			`line 1: edge.router "frr": cannot be used with bare: there are no balancers that announce VIPs`},
		{"bare: perhaps", `line 1: bare "perhaps": must be true or false`},
		{"mtu: 1500", `line 1: mtu "1500": must be a mapping`},
		{"mtu: {client: 1279}", `mtu.client "1279": must be 1280 to 3498`},
		{"mtu: {client: 9000}", `mtu.client "9000": must be 1280 to 3498`},
		{"mtu: {client: 1601}",
			"line 1: mtu: the fabric's MTU, 1600, is smaller than the client's MTU, 1601"},
		{"servers: 3\nmtu:\n  fabric: 1499",
			"line 3: mtu: the fabric's MTU, 1499, is smaller than the client's MTU, 1500"},
		{"mtu: {client: 1279, fabric: 1200}",
			`line 1: mtu.client "1279": must be 1280 to 3498` + "\n" +
				`line 1: mtu.fabric "1200": must be 1336 to 3498`},
		{"mtu: {fabric: 9000}", `mtu.fabric "9000": must be 1336 to 3498`},
		{"impair: 5%", `line 1: impair "5%": must be a mapping`},
		{"impair: {drop: 5}", `line 1: impair.drop "5": must be a share from 0% to 100%`},
		{"impair: {reorder: 101%}", `impair.reorder "101%": must be a share from 0% to 100%`},
		{"impair: {duplicate: -1%}", `impair.duplicate "-1%": must be a share from 0% to 100%`},
		{"impair: {drop: NaN%}", `impair.drop "NaN%": must be a share from 0% to 100%`},
		{"impair: {drop: 60%, reorder: 60%}", "impair: the shares add up to more than 100%"},
		{"servers: 2\nimpair: {links: [s1, s3]}",
			`line 2: impair.links[1] "s3": must be one of edge, lb1, lb2, s1, s2`},
		{"services: 5", `line 1: services "5": must be a list`},
		{"services: [", "line 2: a value is missing here, or a bracket before it is not closed"},
		{service(`name: ""`), ": services[0].name: required"},
		{service("vip: ff02::1"), `: services[0].vip "ff02::1": must be a unicast address`},
		{service("vip: nowhere"), `: services[0].vip "nowhere": must be an IP address`},
		{service("vip: "), ": services[0].vip: required"},
		{service("vip: 10.77.0.200"), `: services[0].vip "10.77.0.200": is in a prefix`},
		{service("port: 0"), `: services[0].port "0": must be a port from 1 to 65535`},
		{service("port: all"), `: services[0].port "all": must be a port from 1 to 65535, because the applications`},
		{service("protocol: sctp"), `: services[0].protocol "sctp": must be tcp or udp`},
		{service("encapsulation: vxlan"), `: services[0].encapsulation "vxlan": must be one of [srv6-insert srv6-encap gre ipip]`},
		{service("port: 99999"), `: services[0].port "99999": must be a port from 1 to 65535`},
		{service("health: {}"), ": services[0].health: must have exactly one of http, https, tcp and udp"},
		{service("health: {interval: 5s}"),
			": services[0].health: must have exactly one of http, https, tcp and udp"},
		{service("health: {http: {path: healthz}}"),
			`: services[0].health.http.path "healthz": must be a URL path`},
		{service("health: {tcp: {port: 99999}}"),
			`: services[0].health.tcp.port "99999": must be a whole number from 1 to 65535`},
		{service("health: {tcp: {}, rise: 0}"),
			`: services[0].health.rise "0": must be a whole number from 1 to 1000`},
		{service("health: {tcp: {}, interval: 1ms}"),
			`: services[0].health.interval "1ms": must be at least 100ms (lb1)`},
		{service("health: {tcp: {}, icmp: {}}"),
			": services[0].health.icmp: unknown field; must be one of: via, http, https, tcp, udp, interval"},
		{"applications: [nginx, iis]", `line 1: applications[1] "iis": must be one of [nginx apache emulated mediawiki]`},
		{"apache: {workers: 0}", `line 1: apache.workers "0": must be a whole number from 1 to 4096`},
		{"apache: {backlog: 5000}",
			`line 1: apache.backlog "5000": must be a whole number from 1 to 4096`},
		{"apache: {cpus: 0.01}",
			`line 1: apache.cpus "0.01": must be a number from 0.1 to 1024, or 0 for no limit`},
		{"apache: {cpus: -1}", `line 1: apache.cpus "-1": must be a number from 0.1 to 1024`},
		{"mediawiki: {pages: 0}",
			`line 1: mediawiki.pages "0": must be a whole number from 1 to 100000`},
		{"emulated: {cores: 0}", `line 1: emulated.cores "0": must be a whole number from 1 to 1024`},
		{"emulated: {backlog: 5000}",
			`line 1: emulated.backlog "5000": must be a whole number from 1 to 4096`},
		{"emulated: {workers: 0}",
			`line 1: emulated.workers "0": must be a whole number from 1 to 65536`},
		{"emulated: {speed: 0}", `line 1: emulated.speed "0": must be a positive number`},
		{"emulated: {discipline: lifo}",
			`line 1: emulated.discipline "lifo": must be processor-sharing or fifo`},
		{"emulated: {demand: 190ms}",
			`line 1: emulated.demand "190ms": must be a mapping of field names to values, such as "exponential: 190ms"`},
		{`emulated: {demand: "exponential: 0s"}`,
			`: emulated.demand "exponential: 0s": exponential "0s": must be positive`},
		{"emulated: {demand-table: demands.tsv}",
			`: emulated.demand-table "demands.tsv": must be an absolute path`},
		{"emulated: {colocated: 50%}", `: emulated.colocated "50%": "50%": must be SHARE@TIME`},
		{emulated("server: s1, speed: 0"),
			`: emulated.exceptions[0].speed "0": must be a positive number`},
		{emulated("server: s5"), `: emulated.exceptions[0].server "s5": is not a server of the lab`},
		{emulated("server: s2"), `: emulated.exceptions[0].server "s2": runs nginx, not emulated`},
		{emulated("server: s1}, {server: s1"),
			`: emulated.exceptions[1].server "s1": has an exception already`},
		{service("encapsulation: gre") + "\nipv4-only: true\ntwo-armed: true", `line 10: two-armed "true": cannot be used with ipv4-only`},
		{
			service("encapsulation: gre") + "\nipv4-only: true\nedge: {router: bird}",
			`line 10: edge.router "bird": cannot be used with ipv4-only: it has a session over IPv6`,
		},
		{
			"services: [{name: a, vip: \"2001:db8::1\", port: 80, protocol: tcp, encapsulation: gre}]\nipv4-only: true",
			`line 1: services[0].vip "2001:db8::1": must be IPv4 with ipv4-only`,
		},
		{"applications: []", "line 1: applications: at least one is required"},
		{service("placement: hunt"), `: services[0].encapsulation "gre": must be srv6-insert or srv6-encap for placement hunt`},
		{hunting("candidates: 9"), `line 1: services[0].candidates "9": must be from 1 to 8 (lb1)`},
		{hunting("accept: {policy: static}"), "line 1: services[0].accept.threshold: required by policy static (s1)"},
		{
			hunting("exceptions: [{server: s2, not-local: answer}]"),
			"line 1: services[0].not-local: must be one of: drop, reset (s2)",
		},
		{hunting("exceptions: [{server: s5}]"), `line 1: services[0].exceptions[0].server "s5": is not a server of the lab`},
		{hunting("exceptions: [{server: s02}]"), `services[0].exceptions[0].server "s02": is not a server of the lab`},
		{hunting("candidates: 8") + "\nservers: 12\nmtu: {fabric: 1300}", `line 3: mtu.fabric "1300": must be 1424 to 3498`},
		{service("encapsulation: srv6-insert"), `: services[0].encapsulation "srv6-insert": cannot carry the IPv4 VIP 192.0.2.1`},
		{
			"services:\n" +
				"  - {name: a, vip: 192.0.2.1, port: 80, protocol: tcp, encapsulation: gre}\n" +
				"  - {name: a, vip: 192.0.2.1, port: 80, protocol: tcp, encapsulation: ipip}\n",
			`line 3: services[1].name "a": is already used by services[0]` + "\n" +
				"line 3: services[1]: services[0] also has tcp 192.0.2.1:80",
		},
	} {
		_, err := ParseTopology([]byte(test.text))
		if err == nil || !strings.Contains(err.Error(), test.want) || strings.Count(err.Error(), "\n") != strings.Count(test.want, "\n") {
			t.Errorf("%q:\n got %v\nwant %s", test.text, err, test.want)
		}
	}
}

func TestSpecs(t *testing.T) {
	topology := DefaultTopology()
	topology.Balancers, topology.Servers, topology.TwoArmed = maxBalancers, maxServers, true
	topology.Applications = []Application{Nginx, Apache}
	byName := make(map[string]Spec)
	seen := make(map[string]string)
	for _, s := range topology.Specs() {
		byName[s.Name] = s
		for _, used := range []string{
			s.Name, s.IPv4.String(), s.IPv6.String(), s.Outer4.String(), s.Outer6.String(), s.Locator.String(),
		} {
			if other, ok := seen[used]; ok && !strings.HasPrefix(used, "invalid") {
				t.Errorf("%s and %s both have %s", other, s.Name, used)
			}
			seen[used] = s.Name
		}
		if s.Role == RoleBalancer || s.Role == RoleServer || s.Role == RoleEdge {
			if !fabricNet4.Contains(s.IPv4) || !fabricNet6.Contains(s.IPv6) {
				t.Errorf("%s: %s or %s is not an address of the fabric", s.Name, s.IPv4, s.IPv6)
			}
		}
	}
	addr, prefix := netip.MustParseAddr, netip.MustParsePrefix
	for _, want := range []Spec{
		{Name: "fabric", Role: RoleFabric},
		{Name: "edge", Role: RoleEdge, IPv6: addr("fd00:fab::1"), IPv4: addr("10.77.0.1")},
		{Name: "client", Role: RoleClient, IPv6: addr("2001:db8:c::2"), IPv4: addr("198.51.100.2")},
		{Name: "lb2", Role: RoleBalancer, IPv6: addr("fd00:fab::1:2"), IPv4: addr("10.77.0.12"),
			Outer6: addr("fd00:ed:0:2::2"), Outer4: addr("10.78.2.2"), Locator: prefix("fd00:6c:0:2::/64")},
		{Name: "s127", Role: RoleServer, IPv6: addr("fd00:fab::2:7f"), IPv4: addr("10.77.0.227"),
			Locator: prefix("fd00:5:0:7f::/64"), Application: Nginx},
		{Name: "s128", Role: RoleServer, IPv6: addr("fd00:fab::2:80"), IPv4: addr("10.77.0.228"),
			Locator: prefix("fd00:5:0:80::/64"), Application: Apache},
	} {
		if diff := cmp.Diff(want, byName[want.Name], addresses); diff != "" {
			t.Errorf("%s (-want +got):\n%s", want.Name, diff)
		}
	}
}

// TestSwitches requires that the first balancers are configured with the switches in front of them.
func TestSwitches(t *testing.T) {
	topology, err := ParseTopology([]byte("balancers: 3\nswitches: 2"))
	testhost.Must(t, err)
	l := testLab(t, topology)
	for name, want := range map[string]*desired.Switch{
		"lb1": {Address: "unix:/run/segue/lab/demo/run/sw1-p4runtime.sock", NetworkPort: 1, HostPort: 2},
		"lb2": {Address: "unix:/run/segue/lab/demo/run/sw2-p4runtime.sock", NetworkPort: 1, HostPort: 2},
		"lb3": nil,
	} {
		if diff := cmp.Diff(want, l.Node(name).BalancerConfig().Node.Switch); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if p := l.Process("sw2", "bmv2"); p == nil || l.Node("sw3") != nil {
		t.Errorf("sw2 runs %v, and sw3 is %v", p, l.Node("sw3"))
	}
}

// testLab returns a lab that is not built.
func testLab(t *testing.T, topology Topology) *Lab {
	l, err := newLab(topology, Options{})
	testhost.Must(t, err)
	return l
}

func TestServersAreReachedAsTheEncapsulationWants(t *testing.T) {
	c := testLab(t, DefaultTopology()).Node("lb1").BalancerConfig()
	for _, s := range c.Services {
		got := s.Servers[2]
		want := desired.Server{Name: "s3"}
		switch s.Encapsulation {
		case desired.SRv6Insert, desired.SRv6Encap:
			want.Locator = netip.MustParsePrefix("fd00:5:0:3::/64")
		default:
			want.Address = netip.MustParseAddr("fd00:fab::2:3")
			if s.VIP.Is4() {
				want.Address = netip.MustParseAddr("10.77.0.103")
			}
		}
		if diff := cmp.Diff(want, got, addresses); diff != "" {
			t.Errorf("%s (-want +got):\n%s", s.Name, diff)
		}
	}
}

// TestHealthIsAsTheTopologySays requires that health checks connect to servers by the VIP's family,
// also if the topology was written to the lab's state and read again.
func TestHealthIsAsTheTopologySays(t *testing.T) {
	topology, err := ParseTopology([]byte(`
services:
  - name: a
    vip: 2001:db8::1
    port: 80
    protocol: tcp
    encapsulation: srv6-insert
    health: {http: {path: /healthz}, interval: 500ms, fall: 2}
  - {name: b, vip: 192.0.2.1, port: 80, protocol: tcp, encapsulation: srv6-encap, health: {tcp: {}}}
  - {name: c, vip: 192.0.2.1, port: 9000, protocol: udp, encapsulation: gre,
     health: {tcp: {port: 80}}}
  - {name: d, vip: 192.0.2.1, port: 81, protocol: tcp, encapsulation: gre}
`))
	testhost.Must(t, err)
	text, err := yaml.Dump(topology)
	testhost.Must(t, err)
	again, err := ParseTopology(text)
	if diff := cmp.Diff(topology, again, addresses); err != nil || diff != "" {
		t.Fatalf("topology that was written: %v (-want +got):\n%s\n%s", err, diff, text)
	}
	text, err = render("balancer.yaml", testLab(t, again).Node("lb1").BalancerConfig())
	testhost.Must(t, err)
	c, _, err := config.ParseBalancer(text)
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	host6, host4 := netip.MustParseAddr("fd00:fab::2:2"), netip.MustParseAddr("10.77.0.102")
	jitters := []time.Duration{time.Second / 10, time.Second / 20}
	tcp := &desired.Health{
		Via: desired.ViaPackets, TCP: &desired.TCPCheck{Port: 80},
		Interval: time.Second, Jitter: &jitters[0], Timeout: time.Second, Rise: 2, Fall: 3,
	}
	for i, want := range []struct {
		health *desired.Health
		host   netip.Addr
	}{
		{&desired.Health{
			Via:      desired.ViaPackets,
			HTTP:     &desired.HTTPCheck{Path: "/healthz", Port: 80, Status: desired.DefaultStatus},
			Interval: time.Second / 2, Jitter: &jitters[1], Timeout: time.Second / 2, Rise: 2, Fall: 2,
		}, host6},
		{tcp, host4},
		{tcp, host4},
		{nil, host4}, // the tunnel's family
	} {
		s := c.Services[i]
		if diff := cmp.Diff(want.health, s.Health); diff != "" {
			t.Errorf("%s (-want +got):\n%s", s.Name, diff)
		}
		if got := s.Servers[1].Host; got != want.host {
			t.Errorf("%s: s2 is checked at %s, want %s", s.Name, got, want.host)
		}
	}
}

// TestInferIsAsTheTopologySays requires that balancers infer as the topology says, and that they
// know each other, also if the topology was written to the lab's state and read again.
func TestInferIsAsTheTopologySays(t *testing.T) {
	topology, err := ParseTopology([]byte(`
balancers: 2
services:
  - {name: a, vip: 192.0.2.1, port: 80, protocol: tcp, encapsulation: gre, placement: infer,
     infer: {estimator: durations, interval: 200ms, slow-start: 0s, among: candidates}}
  - {name: b, vip: 192.0.2.1, port: 81, protocol: tcp, encapsulation: gre, placement: infer}
  - {name: c, vip: 192.0.2.1, port: 82, protocol: tcp, encapsulation: gre, placement: infer,
     infer: {interval: 1s}}
`))
	testhost.Must(t, err)
	text, err := yaml.Dump(topology)
	testhost.Must(t, err)
	again, err := ParseTopology(text)
	if err != nil {
		t.Fatalf("topology that was written: %v\n%s", err, text)
	}
	text, err = render("balancer.yaml", testLab(t, again).Node("lb2").BalancerConfig())
	testhost.Must(t, err)
	c, _, err := config.ParseBalancer(text)
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	if got := c.Node.Balancers(); c.Node.Name != "lb2" || !slices.Equal(got, []string{"lb1", "lb2"}) {
		t.Errorf("%s knows the balancers %v, want lb1 and lb2", c.Node.Name, got)
	}
	learned := desired.Infer{
		Estimator: desired.EstimateTerritoryLearned, Interval: desired.DefaultInferInterval,
		SlowStart: new(desired.DefaultSlowStart), Among: desired.AmongAll,
	}
	slow := learned
	slow.Interval = time.Second
	for i, want := range []desired.Infer{
		{
			Estimator: desired.EstimateDurations, Interval: 200 * time.Millisecond,
			SlowStart: new(time.Duration(0)), Among: desired.AmongCandidates,
		}, learned, slow,
	} {
		if diff := cmp.Diff(&want, c.Services[i].Infer); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.Services[i].Name, diff)
		}
	}
}

// TestPollsAsTheTopologySays requires that balancers poll agents where agents answer, and that both
// have the same key.
func TestPollsAsTheTopologySays(t *testing.T) {
	topology, err := ParseTopology([]byte(`
services:
  - {name: a, vip: 192.0.2.1, port: 80, protocol: tcp, encapsulation: srv6-encap,
     placement: awcmp, infer: {poll: 200ms}}
  - {name: b, vip: "2001:db8::1", port: 80, protocol: tcp, encapsulation: srv6-encap,
     placement: gsq2}
  - {name: c, vip: 192.0.2.1, port: 81, protocol: tcp, encapsulation: srv6-encap}
`))
	testhost.Must(t, err)
	l := testLab(t, topology)
	text, err := render("balancer.yaml", l.Node("lb1").BalancerConfig())
	testhost.Must(t, err)
	lb, _, err := config.ParseBalancer(text)
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	if text, err = render("agent.yaml", l.Node("s2").AgentConfig()); err != nil {
		t.Fatal(err)
	}
	agent, _, err := config.ParseAgent(text)
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	if key := l.keyPath(); lb.Node.SignalKey != key || agent.Node.SignalKey != key {
		t.Errorf("keys %q and %q, want %q", lb.Node.SignalKey, agent.Node.SignalKey, key)
	}
	if got := agent.Poll.Listen; got != "[::]:7460" {
		t.Errorf("the agent listens at %q", got)
	}
	hosts := []netip.Addr{
		netip.MustParseAddr("10.77.0.102"), netip.MustParseAddr("fd00:fab::2:2"), {},
	}
	for i, want := range []time.Duration{200 * time.Millisecond, desired.DefaultInferInterval, 0} {
		s := lb.Services[i]
		if got := s.Servers[1].Host; got != hosts[i] {
			t.Errorf("%s: s2 is polled at %s, want %s", s.Name, got, hosts[i])
		}
		if s.Infer == nil && want == 0 {
			continue
		}
		if s.Infer.Poll != want || s.Infer.PollPort != desired.DefaultPollPort {
			t.Errorf("%s: polled at port %d every %s, want every %s", s.Name, s.Infer.PollPort,
				s.Infer.Poll, want)
		}
	}
	topology.Services[0].Infer.PollPort = 7461
	want := `services[0].infer.poll-port "7461": must be 7460, where the lab's agents listen`
	if err := topology.Validate(); err == nil || err.Error() != want {
		t.Errorf("another port: %v, want %s", err, want)
	}
}

func TestEnumerate(t *testing.T) {
	for want, names := range map[string][]string{
		"":                        nil,
		"edge":                    {"edge"},
		"edge, lb1, lb2":          {"edge", "lb1", "lb2"},
		"edge, lb1, s1 to s3":     {"edge", "lb1", "s1", "s2", "s3"},
		"s8 to s11, s13":          {"s8", "s9", "s10", "s11", "s13"},
		"client, lb1 to lb3, s1":  {"client", "lb1", "lb2", "lb3", "s1"},
		"s1, s3, s5, s6, lb7, s8": {"s1", "s3", "s5", "s6", "lb7", "s8"},
	} {
		if got := enumerate(names); got != want {
			t.Errorf("%q: got %q, want %q", names, got, want)
		}
	}
}

// Connections that the policy refused are counted separately from those refused because no
// application listens.
func TestWriteOffers(t *testing.T) {
	var out strings.Builder
	writeOffers(&out, []Offers{{"web", "s1", &agent.AcceptState{
		Policy: desired.AcceptNever, Offered: 10, Accepted: 10,
		Offers: map[string]uint64{"accepted": 1, "accepted_stale": 2, "refused": 3, "refused_down": 4,
			"accepted_least": 7, "returned": 5, "taken_back": 6, "forced": 0}}}})
	want := "hunting service  server  policy  load  threshold  offered  accepted  refused  refused down  handed back  taken back  forced\n" +
		"web              s1      never   -     -          10       10        3        4             5            6           0\n\n"
	if got := regexp.MustCompile(`(?m) +$`).ReplaceAllString(out.String(), ""); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestServersAcceptAsTheTopologySays reads the servers' accept policies and load sources.
func TestServersAcceptAsTheTopologySays(t *testing.T) {
	topology, err := ParseTopology([]byte(`
applications: [nginx, apache]
apache: {workers: 24}
services:
  - name: a
    vip: 2001:db8::1
    port: 80
    protocol: tcp
    encapsulation: srv6-insert
    placement: hunt
    selection: random
    candidates: 3
    accept: {policy: static, threshold: 4}
    exceptions:
      - {server: s1, accept: {policy: never}}
      - {server: s2, load: {source: apache-scoreboard}, not-local: reset}
`))
	testhost.Must(t, err)
	l := testLab(t, topology)
	four := uint32(4)
	static := desired.Accept{Policy: desired.AcceptStatic, Threshold: &four}
	scoreboard := desired.Source{Kind: desired.LoadApache, Path: "/run/segue/lab/demo/s2/scoreboard", Workers: 24}
	for name, want := range map[string]desired.AgentService{
		"s1": {Accept: desired.Accept{Policy: desired.AcceptNever}},
		"s2": {Accept: static, Load: scoreboard, NotLocal: desired.NotLocalReset},
		"s3": {Accept: static},
	} {
		c := l.Node(name).AgentConfig()
		got := desired.AgentService{Accept: c.Services[0].Accept, Load: c.Services[0].Load, NotLocal: c.Services[0].NotLocal}
		if diff := cmp.Diff(want, got, addresses); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		// A packet that visits all four servers has three more segments of 16 bytes.
		if c.Node.MTU != 1600-3*16 {
			t.Errorf("%s: node.mtu is %d", name, c.Node.MTU)
		}
	}
	s := l.Node("lb1").BalancerConfig().Services[0]
	if s.Placement != desired.PlacementHunt || s.Selection != desired.SelectRandom || s.Candidates != 3 {
		t.Errorf("the balancer's service: %s %s %d", s.Placement, s.Selection, s.Candidates)
	}
}

// TestRoomForServers checks that agents leave room for all servers that a packet of an unknown flow
// may visit: the candidates of all generations, but at most all servers, and at most ten.
func TestRoomForServers(t *testing.T) {
	for _, v := range []struct {
		selection                        desired.Selection
		candidates, generations, servers int
		visited                          int
	}{
		{"", 0, 0, 4, 4},
		{"", 0, 0, 12, 10},
		{"", 0, 1, 12, 4},
		{"", 2, 0, 12, 6},
		{desired.SelectRandom, 0, 1, 12, 4},
		{desired.SelectReports, 0, 1, 12, 8},
		{desired.SelectSpare, 0, 0, 9, 9},
		{desired.SelectReports, 0, 0, 12, 10},
	} {
		topology := DefaultTopology()
		topology.Servers = v.servers
		topology.Services = topology.Services[:1] // in srv6-insert
		s := &topology.Services[0]
		s.Placement, s.Selection = desired.PlacementHunt, v.selection
		s.Candidates, s.Generations = v.candidates, v.generations
		want := topology.MTU.Fabric - (v.visited-1)*16
		if got := testLab(t, topology).Node("s1").AgentConfig().Node.MTU; got != want {
			t.Errorf("%+v: node.mtu is %d, want %d", v, got, want)
		}
	}
}

// TestRoomWithoutFlowTable checks that services that find flows by columns have room for all
// servers of a row's history, also without placement hunt.
func TestRoomWithoutFlowTable(t *testing.T) {
	for _, persistence := range []desired.Persistence{desired.PersistenceStateless, desired.PersistenceHint} {
		topology := DefaultTopology()
		topology.Servers = 12
		topology.Services = topology.Services[:1] // in srv6-insert
		s := &topology.Services[0]
		s.Persistence, s.Candidates, s.History = persistence, 3, 2
		want := topology.MTU.Fabric - (3*2-1)*16
		if got := testLab(t, topology).Node("s1").AgentConfig().Node.MTU; got != want {
			t.Errorf("%s: node.mtu is %d, want %d", persistence, got, want)
		}
	}
}

// TestEmulatedServers reads a topology with unequal emulated servers from a file.
func TestEmulatedServers(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "topology.yaml")
	if err := os.WriteFile(path, []byte(`
applications: [emulated, nginx]
emulated:
  workers: 8
  speed: 2
  demand: "exponential: 190ms"
  seed: 7
  exceptions:
    - {server: s3, cores: 4, backlog: 16, speed: 0.5, discipline: fifo, demand-table: demands.tsv,
       colocated: "50%@60s"}
services:
  - {name: web, vip: "2001:db8::1", port: 8080, protocol: tcp, encapsulation: srv6-insert,
     placement: hunt, load: {source: shared-memory, interval: 5ms}}
`), 0o644); err != nil {
		t.Fatal(err)
	}
	topology, err := LoadTopology(path)
	testhost.Must(t, err)
	l := testLab(t, topology)
	common := func(name string) []string {
		dir := "/run/segue/lab/demo/"
		return []string{
			"app", "--name", name, "--control", "127.0.0.1:9190", "--load", dir + name + "/load",
			"--files", dir + "content", "--uploads", dir + name + "/upload", "--idle-timeout", "1h",
			"--listen", ":80", "--listen", ":8080", "--workers", "8",
		}
	}
	for name, want := range map[string][]string{
		"s1": append(common("s1"), "--backlog", "128", "--cores", "2", "--speed", "2",
			"--demand", "exponential: 190ms", "--seed", "7"),
		"s3": append(common("s3"), "--backlog", "16", "--cores", "4", "--speed", "0.5",
			"--discipline", "fifo", "--demand", "exponential: 190ms",
			"--demand-table", filepath.Join(dir, "demands.tsv"), "--seed", "7", "--colocated", "50%@60s"),
	} {
		cores := map[string]uint32{"s1": 2, "s3": 4}
		p := l.Process(name, "emulated")
		if p == nil {
			t.Fatalf("%s has no process emulated", name)
		}
		if diff := cmp.Diff(want, p.args[1:]); diff != "" || !p.daemon {
			t.Errorf("%s: daemon %v, arguments (-want +got):\n%s", name, p.daemon, diff)
		}
		load := desired.Source{
			Kind: desired.LoadSharedMemory, Path: "/run/segue/lab/demo/" + name + "/load",
			Interval: 5 * time.Millisecond, Capacity: cores[name],
		}
		if got := l.Node(name).AgentConfig().Services[0].Load; got != load {
			t.Errorf("%s: the load source is %+v, want %+v", name, got, load)
		}
	}
	if l.Process("s2", "nginx") == nil || l.Process("s2", "emulated") != nil {
		t.Error("s2 does not run nginx alone")
	}
}

// TestConfigTemplates renders configurations with all fields set, and with few.
func TestConfigTemplates(t *testing.T) {
	weight, no := uint32(0), false
	l := testLab(t, DefaultTopology())
	full := l.Node("lb2").BalancerConfig()
	full.Node.Seed = 7
	full.Node.Switch = &desired.Switch{Address: "a:1", NetworkPort: 3, HostPort: 4}
	full.Node.Limits = desired.Limits{Flows: 2048, Hints: 4096, Servers: 10}
	s := &full.Services[0]
	s.Placement, s.Persistence, s.Candidates, s.Buckets = desired.PlacementHunt, desired.PersistenceTable, 3, 251
	s.Selection = desired.SelectRandom
	s.Timeouts = desired.Timeouts{New: time.Second, Established: time.Hour, Closing: 1500 * time.Millisecond}
	s.Health = &desired.Health{
		HTTP: &desired.HTTPCheck{Path: "/healthz", Port: 80}, Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 4,
	}
	s.Servers[0].Weight = &weight
	s.Servers[1].Drained, s.Generations, s.Probe = true, 2, &no
	s.Servers[1].Host = netip.MustParseAddr("fd00:5:0:2::1")
	full.Services[1].Persistence, full.Services[1].History = desired.PersistenceStateless, 2
	full.Services[3].QUIC = &desired.QUIC{
		Form: desired.QUICLB21, Rotation: 2, ServerIDLength: 3, NonceLength: 4, EncodeLength: true,
	}
	full.Services[3].Servers[1].QUICID = "c4605e"
	full.Services[2].Infer = &desired.Infer{
		Estimator: desired.EstimateDurations, Interval: time.Second, SlowStart: new(time.Duration),
		Among: desired.AmongCandidates,
	}
	full.Services[1].OnFailure, full.Services[1].AllFailed = desired.OnFailureReset, desired.AllFailedRefuse
	full.Services[1].SlowStart = new(time.Duration)
	full.Services[1].Health = &desired.Health{TCP: &desired.TCPCheck{Port: 80}}
	full.Services[2].Health = &desired.Health{HTTP: &desired.HTTPCheck{}}
	full.Services[3].Health = &desired.Health{
		Via: desired.ViaHost, Jitter: new(time.Duration), UDP: &desired.UDPCheck{
			Port: 53, Request: "a\"b", RequestHex: "00", Answer: "c\n", AnswerHex: "01",
		},
		HTTPS: &desired.HTTPCheck{
			Path: "/", Port: 443, Host: "a", Status: "200, 204", Body: "\"", Verify: true,
		},
	}
	attributes := desired.RouteAttributes{
		Prepend: new(uint32(2)), MED: new(uint32(0)), LocalPref: new(uint32(100)),
		Communities: []desired.Community{"1:2", "no-export", "1:2:3"},
	}
	full.BGP = &desired.BGP{
		ASN: 64600, RouterID: netip.MustParseAddr("192.0.2.1"), Listen: 179, RestartTime: time.Minute,
		HoldDown: time.Second, DrainDelay: 2 * time.Second, RouteAttributes: attributes,
		Aggregates: []desired.Aggregate{
			{Prefix: netip.MustParsePrefix("203.0.113.0/24"), SummaryOnly: true, RouteAttributes: attributes},
			{Prefix: netip.MustParsePrefix("2001:db8:80::/48")},
		},
		Drain:    &attributes,
		NextHops: []netip.Addr{netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::2")},
		Peers: []desired.BGPPeer{
			{Address: netip.MustParseAddr("192.0.2.3"), ASN: 64512},
			{Address: netip.MustParseAddr("2001:db8::3"), ASN: 64512, Port: 1179, PasswordFile: "/key",
				HoldTime: 3 * time.Second, Multihop: 2, TTLSecurity: true,
				Families: []desired.Family{desired.IPv4, desired.IPv6}},
			{Address: netip.MustParseAddr("fe80::1"), Interface: "eth1", ASN: 64512},
			{Interface: "eth2", ASN: 64512},
		},
	}
	s.BGP = &desired.ServiceBGP{Announce: desired.AnnounceUsable, RouteAttributes: attributes}
	agent := l.Node("s1").AgentConfig()
	agent.Node.MTU, agent.Node.AssignVIPs = 1500, &no
	epsilon := 0.25
	agent.Services[0].Accept = desired.Accept{
		Policy:     desired.AcceptDynamic,
		Window:     10,
		WindowTime: new(time.Duration),
		Epsilon:    &epsilon,
		Initial:    &weight,
	}
	agent.Services[0].Load = desired.Source{
		Kind:     desired.LoadApache,
		Path:     "/run/sb",
		Workers:  3,
		Capacity: 5,
		Interval: time.Second,
	}
	agent.Services[0].NotLocal = desired.NotLocalReset
	agent.Services[1].Accept = desired.Accept{Policy: desired.AcceptStatic, Threshold: &weight}
	agent.Services[3].QUIC, agent.Services[3].QUICID = full.Services[3].QUIC, "c4605e"
	agent.Services[3].FormerQUIC = &desired.QUIC{
		Form: desired.QUICLB21, Rotation: 1, ServerIDLength: 2, NonceLength: 8,
	}
	agent.Services[3].FormerQUICID = "c460"
	roundTrip(t, "balancer.yaml", l.Node("lb1").BalancerConfig(), func(text []byte) error {
		_, _, err := config.ParseBalancer(text)
		return err
	})
	roundTrip(t, "balancer.yaml", full, nil)
	topology := DefaultTopology()
	topology.Edge.Router = BIRD
	roundTrip(t, "balancer.yaml", testLab(t, topology).Node("lb1").BalancerConfig(), func(text []byte) error {
		_, _, err := config.ParseBalancer(text)
		return err
	})
	roundTrip(t, "agent.yaml", l.Node("s2").AgentConfig(), func(text []byte) error {
		_, _, err := config.ParseAgent(text)
		return err
	})
	roundTrip(t, "agent.yaml", agent, nil)
}

// TestCapacityForLeast checks that the policy least judges emulated servers by their cores.
func TestCapacityForLeast(t *testing.T) {
	const least, memory = desired.AcceptLeast, desired.LoadSharedMemory
	for name, test := range map[string]struct {
		policy desired.AcceptPolicy
		load   desired.Source
		want   []uint32 // of s1 and s2
	}{
		"least":             {least, desired.Source{Kind: memory}, []uint32{3, 4}},
		"by default":        {"", desired.Source{Kind: memory}, []uint32{3, 4}},
		"another policy":    {desired.AcceptDynamic, desired.Source{Kind: memory}, []uint32{0, 0}},
		"another source":    {least, desired.Source{Kind: desired.LoadConnections}, []uint32{0, 0}},
		"a capacity is set": {least, desired.Source{Kind: memory, Capacity: 7}, []uint32{7, 7}},
	} {
		topology := DefaultTopology()
		topology.Applications = []Application{Emulated}
		topology.Emulated.Cores = 3
		topology.Emulated.Exceptions = []EmulatedException{
			{Server: "s2", EmulatedServer: EmulatedServer{Cores: 4}},
		}
		topology.Services = topology.Services[:1]
		s := &topology.Services[0]
		s.Placement, s.Load = desired.PlacementHunt, test.load
		s.Accept = desired.Accept{Policy: test.policy}
		l := testLab(t, topology)
		for i, want := range test.want {
			node := l.Node(fmt.Sprintf("s%d", i+1))
			if got := node.AgentConfig().Services[0].Load.Capacity; got != want {
				t.Errorf("%s: %s has the capacity %d, want %d", name, node.Name, got, want)
			}
		}
	}
}

// roundTrip renders a configuration by a template and parses the text. This must give the same
// configuration. If check is not nil, it must accept the text, too. roundTrip does not parse with
// check, because check would fill in defaults.
func roundTrip[Config any](t *testing.T, template string, want Config, check func([]byte) error) {
	t.Helper()
	var text bytes.Buffer
	testhost.Must(t, templates.ExecuteTemplate(&text, template, want))
	if check != nil {
		if err := check(text.Bytes()); err != nil {
			t.Errorf("%v in\n%s", err, text.String())
		}
	}
	var got Config
	if err := yaml.Load(text.Bytes(), &got, yaml.WithKnownFields()); err != nil {
		t.Fatalf("%v in\n%s", err, text.String())
	}
	if diff := cmp.Diff(want, got, addresses); diff != "" {
		t.Errorf("%s (-want +got):\n%s\n%s", template, diff, text.String())
	}
}

// A file is recognized as a topology by each field that balancers and agents do not have.
func TestTopologiesAreRecognized(t *testing.T) {
	t.Parallel()
	var own []string
	for f := range reflect.TypeFor[Topology]().Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if name != "services" {
			own = append(own, name)
		}
	}
	slices.Sort(own)
	if diff := cmp.Diff(config.TopologyFields, own); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestProxyConfig: each proxy listens on all ports, and has an equal share of a server's workers.
func TestProxyConfig(t *testing.T) {
	t.Parallel()
	for proxy, want := range map[string][]string{
		"program: haproxy, algorithm: random(2)": {
			"bind :::80 v4v6\n    balance random(2)\n    server s1 [fd00:fab::2:1]:80 maxconn 10\n" +
				"    server s2 [fd00:fab::2:2]:80\n    server s3 [fd00:fab::2:3]:80 maxconn 2\n",
			"bind :::8080 v4v6\n", "server s3 [fd00:fab::2:3]:8080 maxconn 2",
		},
		"program: haproxy, algorithm: leastconn, maxconn: 1": {
			"server s1 [fd00:fab::2:1]:80 maxconn 1\n    server s2 [fd00:fab::2:2]:80 maxconn 1\n",
		},
		"program: nginx, algorithm: least_conn": {
			"least_conn;\n        server [fd00:fab::2:1]:80;\n        server [fd00:fab::2:2]:80;\n",
			"listen [::]:8080 ipv6only=on", "proxy_pass http://port8080;",
		},
	} {
		topology, err := ParseTopology([]byte("balancers: 3\nservers: 3\napplications: [emulated, nginx, apache]\n" +
			"apache: {workers: 8}\nproxy: {" + proxy + "}\nservices:\n" +
			"  - {name: a, vip: 2001:db8::1, port: 80, protocol: tcp}\n" +
			"  - {name: b, vip: 192.0.2.1, port: 8080, protocol: tcp}\n"))
		testhost.Must(t, err)
		l, err := newLab(topology, Options{})
		testhost.Must(t, err)
		text, err := render(topology.Proxy.config(), l.Node("lb2").proxyFiles())
		testhost.Must(t, err)
		for _, part := range want {
			if !strings.Contains(string(text), part) {
				t.Errorf("%s: no %q in\n%s", proxy, part, text)
			}
		}
		if l.Process("lb1", string(topology.Proxy.Program)) == nil || l.Process("lb1", "lb") != nil ||
			l.Process("s1", "agent") != nil {
			t.Errorf("%s: the processes are %v", proxy, l.Processes)
		}
	}
}
