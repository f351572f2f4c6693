// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/testhost"
)

const balancerSide = `node:
  interface: eth0
  locator: "fd00:6c:0:1::/64"
  addresses: ["2001:db8::1"]
  signal-key: /lb/key
services:
- name: web
  vip: "2001:db8:80::1"
  port: 80
  protocol: tcp
  placement: hunt
  servers:
  - {name: s1, locator: "fd00:5:0:1::/64"}
  - {name: s2, locator: "fd00:5:0:2::/64"}
- name: dns
  vip: "2001:db8:80::1"
  port: 53
  protocol: udp
  encapsulation: gre
  servers: [{name: s1, address: "2001:db8:5::1"}]
- name: quic
  vip: "2001:db8:80::1"
  port: 443
  protocol: udp
  persistence: quic
  quic: {server-id-length: 4}
  servers: [{name: s1, locator: "fd00:5:0:1::/64", quic-id: 00000001}]
- name: polled
  vip: "2001:db8:80::1"
  port: 81
  protocol: tcp
  placement: gsq2
  servers: [{name: s1, locator: "fd00:5:0:1::/64", host: "2001:db8:5::1"}]
`

const agentSide = `node:
  interface: eth0
  locator: "fd00:5:0:1::/64"
  addresses: ["2001:db8:5::1"]
  balancers: ["fd00:6c::/32"]
  signal-key: /s1/key
poll: {listen: "[2001:db8:5::1]:7460"}
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp}
- {name: dns, vip: "2001:db8:80::1", port: 53, protocol: udp, encapsulation: gre}
- {name: quic, vip: "2001:db8:80::1", port: 443, protocol: udp, quic: {server-id-length: 4}, quic-id: 00000001}
- {name: others, vip: "2001:db8:80::1", port: all, protocol: tcp}
`

// compared compares files, and returns the errors and warnings.
func compared(t *testing.T, balancer string, agents ...string) string {
	t.Helper()
	if _, _, err := ParseBalancer([]byte(balancer)); err != nil {
		t.Fatal(err)
	}
	sides := []*Side{BalancerSide("lb.yaml", []byte(balancer))}
	for i, text := range agents {
		if _, _, err := ParseAgent([]byte(text)); err != nil {
			t.Fatal(err)
		}
		sides = append(sides, AgentSide(fmt.Sprintf("s%d.yaml", i+1), []byte(text)))
	}
	problems, warnings := CompareSides(sides)
	var all strings.Builder
	for _, p := range problems {
		fmt.Fprintln(&all, p)
	}
	for _, w := range warnings {
		fmt.Fprintln(&all, "warning:", w)
	}
	return all.String()
}

func TestCompareSides(t *testing.T) {
	const noAgent = "warning: lb.yaml:14: services[0].servers[1].locator \"fd00:5:0:2::/64\": no agent's file is for this server\n"
	for _, c := range []struct {
		name     string
		lb       []string // replacements
		agent    []string
		want     string
		noServer bool // the agent's host is none of the balancer's servers
	}{
		{name: "fit"},
		{name: "another name", agent: []string{"name: web", "name: www"}},
		{name: "vip", agent: []string{`web, vip: "2001:db8:80::1"`, `web, vip: "2001:db8:80::2"`, "port: all", "port: 82"},
			lb:   []string{"port: 81", "port: 82"},
			want: "lb.yaml:8: services[0].vip \"2001:db8:80::1\": is 2001:db8:80::2 on the server s1: s1.yaml:9 (services[0].vip)\n"},
		{name: "vip of a service for all ports", agent: []string{`web, vip: "2001:db8:80::1", port: 80`,
			`web, vip: "2001:db8:80::2", port: all`, "port: all", "port: 82"},
			lb:   []string{"port: 81", "port: 82"},
			want: "lb.yaml:8: services[0].vip \"2001:db8:80::1\": is 2001:db8:80::2 on the server s1: s1.yaml:9 (services[0].vip)\n"},
		{name: "port", agent: []string{"port: 53", "port: 5353"},
			want: "lb.yaml:17: services[1].port \"53\": is 5353 on the server s1: s1.yaml:10 (services[1].port)\n"},
		{name: "protocol", agent: []string{"53, protocol: udp, encapsulation: gre", "53, protocol: tcp, encapsulation: gre"},
			want: "lb.yaml:18: services[1].protocol \"udp\": is tcp on the server s1: s1.yaml:10 (services[1].protocol)\n"},
		{name: "missing", agent: []string{"- {name: dns, vip: \"2001:db8:80::1\", port: 53, protocol: udp, encapsulation: gre}\n", ""},
			want: "lb.yaml:20: services[1].servers[0].address \"2001:db8:5::1\": the agent of the server s1 has no service with the " +
				"VIP 2001:db8:80::1, port 53 and protocol udp: s1.yaml:9 (services)\n"},
		{name: "encapsulation", agent: []string{"encapsulation: gre", "encapsulation: ipip"},
			want: "lb.yaml:19: services[1].encapsulation \"gre\": is gre, but ipip on the server s1: s1.yaml:10 (services[1].encapsulation)\n"},
		{name: "default encapsulation", agent: []string{"{name: web,", "{name: web, encapsulation: srv6-insert,"},
			want: "lb.yaml:7: services[0].encapsulation: is srv6-encap, but srv6-insert on the server s1: s1.yaml:9 (services[0].encapsulation)\n"},
		{name: "encapsulation at one of two ports", lb: []string{"  port: 80\n", "  ports: [80, 82]\n"},
			agent: []string{"{name: web,", "{name: web, encapsulation: srv6-insert,"},
			want:  "lb.yaml:7: services[0].encapsulation: is srv6-encap, but srv6-insert on the server s1: s1.yaml:9 (services[0].encapsulation)\n"},
		{name: "quic form", agent: []string{"server-id-length: 4}", "server-id-length: 4, rotation: 1}"},
			want: "lb.yaml:26: services[2].quic: is quic-lb-21, rotation 0, server-id-length 4, nonce-length 8, but quic-lb-21, rotation 1, " +
				"server-id-length 4, nonce-length 8 on the server s1: s1.yaml:11 (services[2].quic)\n"},
		{name: "quic that hunts", lb: []string{"  persistence: quic\n", "  persistence: quic\n  placement: hunt\n"},
			want: "s1.yaml:11: services[2].load: missing, and the balancer offers connections of the service, which the server then passes on: " +
				"lb.yaml:26 (services[2].placement)\n"},
		{name: "quic id", agent: []string{"quic-id: 00000001", "quic-id: 00000002"},
			want: "lb.yaml:27: services[2].servers[0].quic-id \"00000001\": differs from that of the agent: s1.yaml:11 (services[2].quic-id)\n"},
		{name: "no quic", agent: []string{", quic: {server-id-length: 4}, quic-id: 00000001", ""},
			want: "lb.yaml:26: services[2].quic: is quic-lb-21, rotation 0, server-id-length 4, nonce-length 8, but missing on the server s1: " +
				"s1.yaml:11 (services[2].quic)\nlb.yaml:27: services[2].servers[0].quic-id \"00000001\": differs from that of the agent: " +
				"s1.yaml:11 (services[2].quic-id)\n"},
		{name: "balancers", agent: []string{`["fd00:6c::/32"]`, `["fd00:6d::/32", "fd00:6c:0:2::/64"]`},
			want: "s1.yaml:5: node.balancers: contains no prefix with the locator fd00:6c:0:1::/64 of the balancer: lb.yaml:3 (node.locator)\n"},
		{name: "any balancer", agent: []string{"  balancers: [\"fd00:6c::/32\"]\n", ""}},
		{name: "poll", agent: []string{"poll: {listen: \"[2001:db8:5::1]:7460\"}\n", ""},
			want: "s1.yaml:1: poll.listen: missing, and a service polls its servers: lb.yaml:7 (services)\n"},
		{name: "no key of the agent", agent: []string{"  signal-key: /s1/key\n", "", "poll: {listen: \"[2001:db8:5::1]:7460\"}\n", ""},
			want: "s1.yaml:2: node.signal-key: missing, and the balancer has one: lb.yaml:5 (node.signal-key)\n" +
				"s1.yaml:1: poll.listen: missing, and a service polls its servers: lb.yaml:7 (services)\n"},
		{name: "no key of the balancer", lb: []string{"  signal-key: /lb/key\n", "", "gsq2", "hash"},
			want: "lb.yaml:2: node.signal-key: missing, and the agent has one: s1.yaml:6 (node.signal-key)\n"},
		{name: "no server", agent: []string{"fd00:5:0:1::", "fd00:5:0:9::", `addresses: ["2001:db8:5::1"]`, `addresses: ["2001:db8:5::9"]`},
			noServer: true, want: "s1.yaml:3: node.locator \"fd00:5:0:9::/64\": no balancer's file has a server there\n"},
	} {
		lb := strings.NewReplacer(c.lb...).Replace(balancerSide)
		agent := strings.NewReplacer(c.agent...).Replace(agentSide)
		got := compared(t, lb, agent)
		if c.noServer {
			got = strings.SplitAfter(got, "\n")[0]
		} else {
			got, _, _ = strings.Cut(got, "warning: lb.yaml:1") // about s2
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: -want +got:\n%s", c.name, diff)
		}
	}
	second := strings.NewReplacer("fd00:5:0:1::", "fd00:5:0:2::", `addresses: ["2001:db8:5::1"]`, `addresses: ["2001:db8:5::2"]`).Replace(agentSide)
	if got := compared(t, balancerSide, agentSide, second); got != "" {
		t.Errorf("two agents: %s", got)
	}
	if got, want := compared(t, balancerSide, agentSide, agentSide), "s2.yaml:3: node.locator \"fd00:5:0:1::/64\": is also that of s1.yaml:3 (node.locator)\n"; got != want+noAgent {
		t.Errorf("the same agent twice: %s", got)
	}
	twice := strings.Replace(balancerSide, `host: "2001:db8:5::1"}`,
		`host: "2001:db8:5::1"}, {name: s2, locator: "fd00:5:0:2::/64", host: "2001:db8:5::2"}`, 1)
	if got := compared(t, twice, agentSide); got != noAgent {
		t.Errorf("a host without a file, in two services: %s", got)
	}
}

// Keys are compared if their files are on this host. No key is shown.
func TestCompareKeys(t *testing.T) {
	dir := t.TempDir()
	key := func(digit string) string { return strings.Repeat(digit, 32) }
	write := func(name string, mode os.FileMode, keys ...string) string {
		file := filepath.Join(dir, name)
		testhost.Must(t, os.WriteFile(file, []byte(strings.Join(keys, "\n")+"\n"), mode))
		return file
	}
	lb, same := write("lb", 0o600, key("a"), key("b")), write("same", 0o600, key("b"), key("a"))
	other, one := write("other", 0o600, key("c")), write("one", 0o600, key("b"))
	open, bad := write("open", 0o644, key("a")), write("bad", 0o600, "secret")
	for file, want := range map[string]string{
		same:                     "",
		lb:                       "",
		filepath.Join(dir, "no"): "",
		other:                    "s1.yaml:6: node.signal-key " + fmt.Sprintf("%q", other) + ": the first key in the file is not among those of the balancer: lb.yaml:5 (node.signal-key)\n",
		one:                      "lb.yaml:5: node.signal-key " + fmt.Sprintf("%q", lb) + ": the first key in the file is not among those of the agent: s1.yaml:6 (node.signal-key)\n",
		open:                     "warning: s1.yaml:6: node.signal-key " + fmt.Sprintf("%q", open) + ": the keys of both sides were not compared: has mode 0644",
		bad:                      "warning: s1.yaml:6: node.signal-key " + fmt.Sprintf("%q", bad) + ": the keys of both sides were not compared: line 1 has 6 bytes",
	} {
		got := compared(t, strings.Replace(balancerSide, "/lb/key", lb, 1), strings.Replace(agentSide, "/s1/key", file, 1))
		first := strings.SplitAfter(got, "\n")[0]
		if want == "" && !strings.HasPrefix(first, "warning: lb.yaml:14: services[0].servers[1].locator") || !strings.HasPrefix(first, want) {
			t.Errorf("%s: %s\nwant %s", file, got, want)
		}
		for _, secret := range []string{key("a"), key("b"), key("c"), "secret"} {
			if strings.Contains(got, secret) {
				t.Errorf("%s: shows a key: %s", file, got)
			}
		}
	}
}
