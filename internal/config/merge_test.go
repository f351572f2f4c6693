// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/testhost"
)

// randomFile writes the services of a balancer's file. Names are few, so that files share them.
func randomFile(r *rand.Rand) string {
	var s strings.Builder
	s.WriteString("node: {interface: eth0, addresses: [\"2001:db8::1\"]}\nservices:\n")
	for i := range 4 {
		if i > 0 && r.IntN(3) == 0 {
			continue
		}
		fmt.Fprintf(&s, "- name: v%d\n  vip: \"2001:db8:80::%d\"\n  port: %d\n  protocol: %s\n  encapsulation: gre\n",
			i, i+1, 80+r.IntN(2), []string{"tcp", "udp"}[r.IntN(2)])
		for _, optional := range []string{
			"timeouts: {new: 10s}", "candidates: 2", "health: {tcp: {}, interval: 2s}", "generations: 2",
		} {
			if r.IntN(3) == 0 {
				fmt.Fprintf(&s, "  %s\n", optional)
			}
		}
		s.WriteString("  servers:\n")
		for j := range 5 {
			if j > 0 && r.IntN(3) == 0 {
				continue
			}
			fmt.Fprintf(&s, "  - {name: s%d, address: \"2001:db8:1::%d\"", j, j+1)
			if r.IntN(2) == 0 {
				fmt.Fprintf(&s, ", weight: %d", r.IntN(3)+1)
			}
			s.WriteString("}\n")
		}
	}
	return s.String()
}

// The overrides that make a balancer follow another file give exactly the services of that file,
// before and after they are written and read.
func TestFollowingFile(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		from, to := randomFile(r), randomFile(r)
		files, _, err := ParseBalancerFiles([]byte(from))
		if err != nil {
			t.Fatalf("%v\n%s", err, from)
		}
		wanted, _, err := ParseBalancer([]byte(to))
		testhost.Must(t, err)
		next, _, err := files.FollowingFile([]byte(to))
		if err != nil {
			t.Fatalf("%v\nfrom\n%s\nto\n%s", err, from, to)
		}
		requireServices(t, next.Desired, wanted)
		stored, err := yaml.Dump(desired.Overrides{Overrides: next.Overrides})
		testhost.Must(t, err)
		overrides, err := ParseOverrides(stored)
		if err != nil {
			t.Fatalf("%v\n%s", err, stored)
		}
		again, _, err := files.WithOverrides(overrides)
		testhost.Must(t, err)
		requireServices(t, again.Desired, wanted)
		if back, _, err := next.FollowingFile([]byte(from)); err != nil || len(back.Overrides) > 0 {
			t.Errorf("back to the first file: %v, error %v", back.Overrides, err)
		}
	}
}

// requireServices compares services and servers by name, because added ones come last.
func requireServices(t *testing.T, got, want *desired.Balancer) {
	t.Helper()
	byName := func(b *desired.Balancer) map[string]any {
		all := map[string]any{}
		for _, s := range b.Services {
			for _, server := range s.Servers {
				all[s.Name+"/"+server.Name] = server
			}
			s.Servers = nil
			all[s.Name] = s
		}
		return all
	}
	opt := cmp.Exporter(func(reflect.Type) bool { return true })
	if diff := cmp.Diff(byName(want), byName(got), opt); diff != "" {
		t.Fatalf("-want +got:\n%s", diff)
	}
}

// An override changes an aliased section for its own service only.
func TestOverrideOfAlias(t *testing.T) {
	const file = `
node: {interface: eth0, addresses: ["2001:db8::1"]}
services:
- {name: a, vip: "2001:db8:80::1", port: 80, protocol: tcp, encapsulation: gre, timeouts: &t {new: 10s}, servers: []}
- {name: b, vip: "2001:db8:80::2", port: 80, protocol: tcp, encapsulation: gre, timeouts: *t, servers: []}
`
	files, _, err := ParseBalancerFiles([]byte(file))
	testhost.Must(t, err)
	for _, service := range []string{"a", "b"} {
		next, _, err := files.WithOverrides([]desired.Override{
			{Service: service, Set: desired.Fields{"timeouts": map[string]any{"new": "20s"}}},
		})
		testhost.Must(t, err)
		for _, s := range next.Desired.Services {
			if got, want := s.Timeouts.New.Seconds(), 10.0; (got != want) != (s.Name == service) {
				t.Errorf("override of %s: %s has %v s", service, s.Name, got)
			}
		}
	}
}

// Errors in a file of overrides have its line, and the path from the service or server.
func TestOverrideErrors(t *testing.T) {
	files, _, err := ParseBalancerFiles([]byte(validBalancer))
	testhost.Must(t, err)
	for text, want := range map[string]string{
		"- {service: web, server: s2, set: {weight: heavy}}":              `line 2: web/s2.weight "heavy": must be a whole number from 0 to 1000`,
		"- service: web\n  set: {timeouts: {new: 1s}}":                    `line 2: web.timeouts.new "1s": must be from 5s to 4h0m0s`,
		"- {service: web, server: s9, add: {weight: 1}}":                  `line 2: web/s9.locator: required`,
		"- {service: web, server: s9, add: {locator: 2001:db8::}}":        `line 2: "2001:db8::" must be in quotes`,
		"- {service: web, server: s2, set: &a {weight: *a}}":              `line 2: the alias *a stands for a value that contains the alias`,
		"- {service: web, server: &a s2, set: {weight: *a}}":              `line 2: overrides[0].set.weight "a": must not be an alias`,
		"- {service: web, server: s2, set: {weight: 1, weight: 2}}":       `line 2: overrides[0].set.weight: given twice; first in line 2`,
		"- {service: web, server: s2, set: {drained: True}}":              `line 2: web/s2.drained "True": must be true or false`,
		"- {service: web, server: s2, set: {drained: FALSE}}":             `line 2: web/s2.drained "FALSE": must be true or false`,
		"- {service: web, server: s2, set: [1]}":                          `line 2: overrides[0].set: must be a mapping`,
		"- {service: web, server: s2, drained: true}":                     `line 2: overrides[0].drained: unknown field`,
		"- {service: web, server: s2, set: {drained: true}, remove: yes}": `line 2: overrides[0].remove "yes": must be true or false`,
	} {
		overrides, err := ParseOverrides([]byte("overrides:\n" + text + "\n"))
		if err == nil {
			_, _, err = files.WithOverrides(overrides)
		}
		got := fmt.Sprint(err)
		if problems, ok := err.(fieldpath.Errors); ok {
			got = problems.In("").Error()
		}
		if got = strings.ReplaceAll(got, files.File.OverridesFile()+":2:", "line 2:"); !strings.HasPrefix(got, want) {
			t.Errorf("%s: %s, want %s", text, got, want)
		}
	}
}

// A balancer with a store warns about overrides from before, and ignores them.
func TestOverridesBesideAStore(t *testing.T) {
	dir := t.TempDir()
	text := fmt.Sprintf("node: {interface: eth0, state: %q}\n"+
		"store: {etcd: {endpoints: [\"https://192.0.2.1:2379\"], prefix: /segue/main}}\n", dir)
	load := func() fieldpath.Errors {
		t.Helper()
		_, warnings, err := ParseBalancerFiles([]byte(text))
		testhost.Must(t, err)
		return warnings
	}
	if warnings := load(); len(warnings) > 0 {
		t.Errorf("warnings %v", warnings)
	}
	file := filepath.Join(dir, "lb.overrides.yaml")
	testhost.Must(t, os.WriteFile(file, []byte("overrides:\n- {service: web, remove: true}\n"), 0o644))
	if want := file + ": overrides: have no effect"; !strings.HasPrefix(load().Error(), want) {
		t.Errorf("warnings %v, want %s", load(), want)
	}
}

// Services and servers without a change are not decoded again. The result is the same as if they
// were.
func TestOverridesReuseTheRest(t *testing.T) {
	const text = `
node: {interface: eth0, locator: "fd00:6c:0:1::/64", addresses: [192.0.2.9, "2001:db8::9"]}
services:
- name: web
  vip: 2001:db8:80::1
  port: 80
  protocol: tcp
  placement: hunt
  servers: &all
  - {name: s1, locator: "fd00:5:0:1::/64", weight: 3}
  - {name: s2, locator: "fd00:5:0:2::/64"}
  - {name: s3, locator: "fd00:5:0:3::/64"}
- {name: alias, vip: "2001:db8:80::2", port: 80, protocol: tcp, timeouts: {closing: 20s}, servers: *all}
- name: quic
  vip: 2001:db8:80::3
  port: 443
  protocol: udp
  encapsulation: gre
  persistence: quic
  quic: {server-id-length: 1}
  servers: [{name: s1, address: "2001:db8::1", quic-id: "01"}, {name: s2, address: "2001:db8::2", quic-id: "02"}]
- name: changes
  vip: 2001:db8:80::4
  port: 443
  protocol: udp
  encapsulation: gre
  persistence: quic
  quic: {server-id-length: 1, rotation: 1}
  former-quic: {server-id-length: 1}
  servers: [{name: s1, address: "2001:db8::1", quic-id: "01"}, {name: s2, address: "2001:db8::2", quic-id: "02"}]
`
	files, err := parseBalancerFile([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	set := func(service, server string, fields desired.Fields) desired.Override {
		return desired.Override{Service: service, Server: server, Set: fields}
	}
	reused := 0
	for _, overrides := range [][]desired.Override{
		{set("web", "s2", desired.Fields{"drained": true})},
		{set("alias", "s1", desired.Fields{"weight": 7}), set("web", "", desired.Fields{"slow-start": "3s"})},
		{{Service: "web", Server: "s1", Remove: true}, {Service: "quic", Remove: true}},
		{{Service: "web", Server: "s9", Add: desired.Fields{"locator": "fd00:5:0:9::/64"}}},
		{set("quic", "", desired.Fields{"quic": map[string]any{"rotation": 2},
			"former-quic": map[string]any{"server-id-length": 1, "rotation": 1}})},
		{set("quic", "s2", desired.Fields{"quic-id": "03"})},
		// As many fields as before, and former-quic-id has no default any more.
		{set("changes", "", desired.Fields{"former-quic": nil, "timeouts": map[string]any{"new": "7s"}})},
		{set("web", "s2", desired.Fields{"locator": "2001:db8:80:0::/64"})}, // has a VIP
		{set("alias", "", desired.Fields{"vip": "2001:db8:80::1"})},         // is another's
	} {
		merged, _ := merge(files.root, overrides)
		want, _, problems := balancerOf(merged, nil)
		got, _, others := balancerOf(merged, files.decoded())
		if len(problems) != len(others) {
			t.Errorf("%v: errors %v, want %v", overrides, others, problems)
			continue
		}
		if len(problems) == 0 && !reflect.DeepEqual(want, got) {
			t.Errorf("%v: %+v, want %+v", overrides, got, want)
		}
		for i := range got.Services {
			s := files.File.Service(got.Services[i].Name)
			same := s != nil && len(s.Servers) > 0 && len(got.Services[i].Servers) > 0 &&
				&s.Servers[0] == &got.Services[i].Servers[0]
			if same {
				reused++
			}
			if s != nil && (same != (s.Revision == got.Services[i].Revision) || same && !reflect.DeepEqual(*s, got.Services[i])) {
				t.Errorf("%v: %s is reused: %v, but revision %p, before %p", overrides, s.Name, same, got.Services[i].Revision, s.Revision)
			}
		}
	}
	if reused < 8 {
		t.Errorf("only %d services were reused", reused)
	}
}
