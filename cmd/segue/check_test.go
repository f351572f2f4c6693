// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCheck(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		return file
	}
	const lb, agent = "../../docs/examples/lb.yaml", "../../docs/examples/agent.yaml"
	bad := write("bad.yaml", "node: {interface: eth0}\nservices:\n- {servers: [{name: s 1}]}\n")
	badAgent := write("agent.yaml", "node: {interface: eth0}\n")

	noYAML := write("none.yaml", "node: {interface: eth0\nservices: []\n")

	tests := []struct {
		name, args string
		output     string // of the command, complete
		err        string // empty for success
	}{
		{"balancer", "-c " + lb, lb + ": valid balancer configuration: 4 services, 10 servers\n", ""},
		{"balancer told", "--role lb --config " + lb, lb + ": valid balancer configuration: 4 services, 10 servers\n", ""},
		{"agent", "-c " + agent, agent + ": valid agent configuration: 3 services\n", ""},
		{"agent told", "--role agent -c " + agent, agent + ": valid agent configuration: 3 services\n", ""},
		{"problems", "-c " + bad, bad + ":1: node.locator: required by services[0], whose encapsulation is srv6-encap\n" +
			bad + ":3: services[0].name: required\n" +
			bad + ":3: services[0].vip: required\n" +
			bad + ":3: services[0].port: required\n" +
			bad + ":3: services[0].protocol: required\n" +
			bad + ":3: services[0].servers[0].name \"s 1\": must be printable and have no spaces\n" +
			bad + ":3: services[0].servers[0].locator: required by encapsulation srv6-encap\n",
			bad + ": no valid balancer configuration: 7 problems (a balancer's, for a service lists servers"},
		{"agent by default", "-c " + badAgent, badAgent + ":1: services: at least one is required\n",
			badAgent + ": no valid agent configuration: 1 problem (an agent's, for no service lists servers; --role lb"},
		{"balancer by role", "--role lb -c " + badAgent, badAgent + ":1: services: at least one is required\n",
			badAgent + ": no valid balancer configuration: 1 problem"},
		{"no YAML", "-c " + noYAML, noYAML + ":2: while parsing a flow mapping: did not find expected ',' or '}'\n",
			noYAML + ": no valid configuration: 1 problem"},
		{"no YAML by role", "--role lb -c " + noYAML,
			noYAML + ":2: while parsing a flow mapping: did not find expected ',' or '}'\n",
			noYAML + ": no valid balancer configuration: 1 problem"},
		{"no file", "-c " + filepath.Join(dir, "none"), "", "no such file or directory"},
		{"no flag", "", "", "check: missing -c FILE"},
		{"unknown role", "--role web -c " + lb, "", `--role "web": must be lb or agent`},
		{"an argument", lb, "", "a flag names the file: segue check -c " + lb},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var output bytes.Buffer
			root := newRoot()
			root.SetOut(&output)
			root.SetArgs(append([]string{"check"}, strings.Fields(test.args)...))
			err := root.Execute()
			if output.String() != test.output {
				t.Errorf("output:\n%s\nwant:\n%s", output.String(), test.output)
			}
			if test.err == "" && err != nil {
				t.Error(err)
			}
			if test.err != "" && (err == nil || !strings.Contains(err.Error(), test.err)) {
				t.Errorf("error: %v, want: %s", err, test.err)
			}
		})
	}
}
