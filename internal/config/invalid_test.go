// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/testhost"
)

const invalidBalancer = `
node: {interface: eth0, locator: "fd00:6c:0:1::/64", addresses: ["2001:db8::1"], state: %q}
services:
- name: web
  vip: "2001:db8:80::1"
  port: 80
  protocol: tcp
  encapsulation: gre
  servers:
  - {name: s1, address: "2001:db8:1::1"}
  - {name: s2, address: "2001:db8:1::2"}
- name: tls
  vip: "2001:db8:80::1"
  port: 443
  protocol: tcp
  encapsulation: gre
  servers:
  - {name: s1, address: "2001:db8:1::1"}
`

const invalidAgent = `
node: {instance: lb, interface: eth0, locator: "fd00:5:0:1::/64", state: %q}
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp}
- {name: dns, vip: "2001:db8:80::1", port: 53, protocol: udp}
`

// addedService is the override that adds a service with a name and a port.
const addedService = `- {service: %s, add: {vip: "2001:db8:80::1", port: %d, protocol: tcp, ` +
	`encapsulation: gre, servers: [{name: s1, address: "2001:db8:1::1"}]}}` + "\n"

// Files leave out the overrides that break a rule, and only these.
func TestInvalidOverrides(t *testing.T) {
	for _, c := range []struct {
		name, overrides string
		inForce         string
		invalid         []string // with FILE for the path
	}{
		{"none", "- {service: web, server: s1, set: {drained: true}}", "[web/s1 (drained)]", nil},
		{
			"a value", "- {service: web, server: s1, set: {drained: true}}\n" +
				"- {service: web, server: s2, set: {weight: 5000}}\n- {service: tls, set: {generations: 2}}",
			"[web/s1 (drained) tls (generations 2)]",
			[]string{`web/s2 (weight 5000): FILE:3: web/s2.weight "5000": must be a whole number from 0 to 1000`},
		},
		{
			"two of one", "- {service: web, server: s2, set: {weight: 5000, address: x}}", "[]",
			[]string{
				`web/s2 (address x, weight 5000): FILE:2: web/s2.address "x": must be an IP address`,
				`web/s2 (address x, weight 5000): FILE:2: web/s2.weight "5000": must be a whole number from 0 to 1000`,
			},
		},
		{ // the errors are in servers, whose own overrides are right
			"a service because of its servers",
			"- {service: web, server: s1, set: {drained: true}}\n" +
				"- {service: web, set: {encapsulation: srv6-encap}}\n" +
				"- {service: web, server: s2, set: {drained: true}}",
			"[web/s1 (drained) web/s2 (drained)]",
			[]string{
				"web (encapsulation srv6-encap): FILE:3: web/s1.locator: required",
				"web (encapsulation srv6-encap): FILE:3: web/s1.address",
				"web (encapsulation srv6-encap): FILE:3: web/s2.locator: required",
				"web (encapsulation srv6-encap): FILE:3: web/s2.address",
			},
		},
		{ // the error is in a service without an override
			"a conflict", "- {service: web, server: s1, set: {drained: true}}\n- {service: web, set: {port: 443}}",
			"[web/s1 (drained)]",
			[]string{"web (port 443): FILE:3: tls: "},
		},
		{ // the overrides of web are valid only together
			"a conflict behind overrides that need each other",
			"- {service: web, set: {encapsulation: srv6-encap}}\n" +
				"- {service: web, server: s1, set: {address: null, locator: \"fd00:5:0:1::/64\"}}\n" +
				fmt.Sprintf(addedService, "dns", 53) +
				"- {service: web, server: s2, set: {address: null, locator: \"fd00:5:0:2::/64\"}}\n" +
				"- {service: tls, set: {port: 80}}",
			"[web (encapsulation srv6-encap) web/s1 (default address, locator fd00:5:0:1::/64) " +
				"dns (added) web/s2 (default address, locator fd00:5:0:2::/64)]",
			[]string{"tls (port 80): FILE:6: tls: "},
		},
		{
			"two conflicts, and services that swap their ports",
			"- {service: web, set: {port: 443}}\n" + fmt.Sprintf(addedService, "a", 80) +
				"- {service: web, server: s1, set: {drained: true}}\n" + fmt.Sprintf(addedService, "b", 443) +
				"- {service: tls, set: {port: 80}}",
			"[web (port 443) web/s1 (drained) tls (port 80)]",
			[]string{"a (added): FILE:3: a: ", "b (added): FILE:5: b: "},
		},
		{ // web as a whole, because no override of it alone is the cause
			"a server without the locator that the others have",
			"- {service: web, set: {encapsulation: srv6-encap}}\n" +
				"- {service: tls, server: s1, set: {drained: true}}\n" +
				"- {service: web, server: s1, set: {address: null, locator: \"fd00:5:0:1::/64\"}}",
			"[tls/s1 (drained)]",
			[]string{
				"web (encapsulation srv6-encap): FILE:2: web/s2.locator: required",
				"web (encapsulation srv6-encap): FILE:2: web/s2.address ",
				"web/s1 (default address, locator fd00:5:0:1::/64): FILE:4: web/s2.locator: required",
				"web/s1 (default address, locator fd00:5:0:1::/64): FILE:4: web/s2.address ",
			},
		},
		{"no service is left", "- {service: web, remove: true}\n- {service: tls, remove: true}", "[web (removed)]",
			[]string{"tls (removed): FILE:3: services: at least one is required"}},
		{"not a list", "- {service: web, server: s1, set: {drained: true}}\n- {service: web, server: s2}", "[]",
			[]string{" (): FILE:3: overrides[1]: must have add, set or remove"}},
		{"agent", "- {service: web, set: {drained: true}}\n- {service: dns, set: {drained: true}}", "[web (drained)]",
			[]string{`dns (drained): FILE:3: dns.drained "true": only for services that hunt`}},
		{"server of an agent", "- {service: web, server: s1, set: {drained: true}}", "[]",
			[]string{"web/s1 (drained): FILE:2: web/s1: services of an agent have no servers"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "lb.overrides.yaml")
			testhost.Must(t, os.WriteFile(path, []byte("overrides:\n"+c.overrides+"\n"), 0o644))
			var inForce, invalid string
			var warnings fieldpath.Errors
			var findings []Finding
			if strings.Contains(c.name, "agent") {
				inForce, invalid, warnings = loaded(t, ParseAgentFiles, fmt.Appendf(nil, invalidAgent, dir), path)
				findings, _ = InspectAgent("f", fmt.Appendf(nil, invalidAgent, dir), ThisHost())
			} else {
				inForce, invalid, warnings = loaded(t, ParseBalancerFiles, fmt.Appendf(nil, invalidBalancer, dir), path)
				findings, _ = InspectBalancer("f", fmt.Appendf(nil, invalidBalancer, dir), ThisHost())
			}
			if inForce != c.inForce {
				t.Errorf("in force %s, want %s; warnings %v", inForce, c.inForce, warnings)
			}
			lines := strings.Split(strings.TrimSuffix(invalid, "\n"), "\n")
			found := 0
			for i, want := range c.invalid {
				if i >= len(lines) || !strings.HasPrefix(lines[i], want) {
					t.Errorf("invalid:\n%s\nwant:\n%s", invalid, strings.Join(c.invalid, "\n"))
					break
				}
			}
			if len(c.invalid) == 0 && invalid != "" {
				t.Errorf("invalid:\n%s", invalid)
			}
			for _, f := range findings {
				if f.Rule == "overrides" && f.File == path {
					found++
				}
			}
			if diff := cmp.Diff(len(c.invalid), found); diff != "" {
				t.Errorf("findings: -want +got:\n%s", diff)
			}
		})
	}
}

// loaded returns the overrides in force, and those that are left out with their problems.
func loaded[D State[D]](
	t *testing.T, parse func([]byte) (*Files[D], fieldpath.Errors, error), data []byte, path string,
) (inForce, invalid string, warnings fieldpath.Errors) {
	t.Helper()
	files, warnings, err := parse(data)
	testhost.Must(t, err)
	for _, o := range files.Invalid {
		for _, problem := range o.Problems {
			invalid += fmt.Sprintf("%v: %v\n", o.Override, strings.ReplaceAll(problem.Error(), path, "FILE"))
		}
	}
	return fmt.Sprint(files.InForce), invalid, warnings
}
