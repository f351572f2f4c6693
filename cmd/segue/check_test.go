// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/internal/testhost"
)

func TestCheck(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) string { return writeFile(t, dir, name, content) }
	const lb, agent = "../../docs/examples/lb.yaml", "../../docs/examples/agent.yaml"
	bad := write("bad.yaml", "node: {interface: eth0}\nservices:\n- {servers: [{name: s 1}]}\n")
	badAgent := write("agent.yaml", "node: {interface: eth0}\n")

	const topology = "../../docs/examples/lab/infer.yaml"
	noYAML := write("none.yaml", "node: {interface: eth0\nservices: []\n")

	tests := []struct {
		name, args string
		output     string // the complete output of the command
		err        string // empty for success
	}{
		{"balancer", "-c " + lb, lb + ": valid balancer configuration: 4 services, 10 servers\n", ""},
		{"balancer told", "--role lb --config " + lb, lb + ": valid balancer configuration: 4 services, 10 servers\n", ""},
		{"agent", "-c " + agent, agent + ": valid agent configuration: 3 services\n", ""},
		{"agent told", "--role agent -c " + agent, agent + ": valid agent configuration: 3 services\n", ""},
		{"topology", "-c " + topology, "", "this is the topology of a lab: segue-lab lab check FILE validates it, " +
			"and for a balancer's file, use --role lb"},
		{"problems", "-c " + bad, bad + ":1: node.locator: required by services[0], whose encapsulation is srv6-encap\n" +
			bad + ":3: services[0].name: required\n" +
			bad + ":3: services[0].vip: required\n" +
			bad + ":3: services[0].port: required\n" +
			bad + ":3: services[0].protocol: required\n" +
			bad + ":3: services[0].servers[0].name \"s 1\": must have only printable characters, and no spaces\n" +
			bad + ":3: services[0].servers[0].locator: required by encapsulation srv6-encap\n",
			bad + ": invalid balancer configuration: 7 errors (for an agent's file, use --role agent)"},
		{"agent by default", "-c " + badAgent, badAgent + ":1: services: at least one is required\n",
			badAgent + ": invalid agent configuration: 1 error (for a balancer's file, use --role lb)"},
		{"balancer by role", "--role lb -c " + badAgent, badAgent + ":1: services: at least one is required\n",
			badAgent + ": invalid balancer configuration: 1 error"},
		{"no YAML", "-c " + noYAML, noYAML + ":2: the { of line 1 must continue here with a comma, or end with }\n",
			noYAML + ": invalid configuration: 1 error"},
		{"no YAML by role", "--role lb -c " + noYAML,
			noYAML + ":2: the { of line 1 must continue here with a comma, or end with }\n",
			noYAML + ": invalid balancer configuration: 1 error"},
		{"no file", "-c " + filepath.Join(dir, "none"), "", "no such file or directory"},
		{"no file named", "", "", "check: missing FILE"},
		{"twice", "-c " + lb + " -c " + agent, "", `--config "` + agent + `": can be given only once`},
		{"the same twice", "-c " + lb + " " + lb, lb + ": valid balancer configuration: 4 services, 10 servers\n", lb + ": given twice"},
		{"empty", "--config=", "", "check: missing FILE"},
		{"role of several", "--role lb " + lb + " " + agent, "", "--role: only with one file"},
		{"several against", "--against lb " + lb + " " + agent, "", "--against: only with one file"},
		{"unknown role", "--role web -c " + lb, "", `--role "web": must be lb or agent`},
		{"an argument", lb, lb + ": valid balancer configuration: 4 services, 10 servers\n", ""},
		{"several invalid", badAgent + " " + noYAML, badAgent + ":1: services: at least one is required\n" +
			noYAML + ":2: the { of line 1 must continue here with a comma, or end with }\n",
			badAgent + ": invalid agent configuration: 1 error (for a balancer's file, use --role lb)\n" +
				noYAML + ": invalid configuration: 1 error"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var output, warnings bytes.Buffer
			root := newRoot()
			root.SetOut(&output)
			root.SetErr(&warnings)
			root.SetArgs(append([]string{"check"}, strings.Fields(test.args)...))
			err := root.Execute()
			if output.String() != test.output {
				t.Errorf("output:\n%s\nwant:\n%s", output.String(), test.output)
			}
			if test.err == "" && warnings.Len() > 0 {
				t.Errorf("warnings:\n%s", warnings.String())
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

// TestCheckStandardInput checks a file that comes by standard input.
func TestCheckStandardInput(t *testing.T) {
	for _, args := range [][]string{{"check", "-"}, {"check", "-c", "-"}} {
		for _, test := range []struct{ text, output, err string }{
			{"node: {interface: eth0}\n", "standard input:1: services: at least one is required\n",
				"standard input: invalid agent configuration"},
			{"node: {interface: eth0, locator: \"fd00:5:0:1::/64\"}\n" +
				"services: [{name: web, vip: \"2001:db8:80::1\", port: 80, protocol: tcp}]\n",
				"standard input: valid agent configuration: 1 service\n", ""},
		} {
			output, err := runSegueWith(t.Context(), test.text, args...)
			if !strings.Contains(output, test.output) || (err == nil) != (test.err == "") ||
				err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("%v: output %s, error %v", args, output, err)
			}
		}
	}
}

// TestCheckBothSides compares several files. The exit code tells whether a file is invalid, and
// whether the files fit together.
func TestCheckBothSides(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) string { return writeFile(t, dir, name, content) }
	lb := write("lb.yaml", `node: {interface: eth0, internal: true, locator: "fd00:6c:0:1::/64"}
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp,
   servers: [{name: s1, locator: "fd00:5:0:1::/64"}, {name: s2, locator: "fd00:5:0:2::/64"}]}
`)
	agent := func(name, locator, port string) string {
		return write(name, `node: {interface: eth0, internal: true, locator: "`+locator+`", balancers: ["fd00:6c::/32"]}
services:
- {name: web, vip: "2001:db8:80::1", port: `+port+`, protocol: tcp}
`)
	}
	s1, s2 := agent("s1.yaml", "fd00:5:0:1::/64", "80"), agent("s2.yaml", "fd00:5:0:2::/64", "80")
	wrong, invalid := agent("wrong.yaml", "fd00:5:0:2::/64", "8080"), agent("invalid.yaml", "fd00:5:0:2::/64", "0")
	for _, c := range []struct {
		args  []string
		code  int
		wants []string
	}{
		{[]string{lb, s1, s2}, 0, []string{s2 + ": valid agent configuration: 1 service\n"}},
		{[]string{lb, s1}, 0, []string{"warning: " + lb + `:4: services[0].servers[1].locator "fd00:5:0:2::/64": no agent's file`}},
		{[]string{"-c", lb, s1, "--strict"}, exitUnwise, []string{"the files fit together, but not strictly: 1 warning"}},
		{[]string{s1, wrong, lb}, 1, []string{
			lb + `:3: services[0].port "80": is 8080 on the server s2: ` + wrong + ":3 (services[0].port)\n",
			"the files do not fit together: 1 error",
		}},
		{[]string{lb, s1, invalid, "--strict"}, 1, []string{invalid + ": invalid agent configuration"}},
	} {
		out, err := runSegue(t.Context(), append([]string{"check"}, c.args...)...)
		code := 0
		if err != nil {
			code = cli.ExitCode(err)
			out += err.Error()
		}
		if code != c.code {
			t.Errorf("%v: exit code %d, want %d; %s", c.args, code, c.code, out)
		}
		for _, want := range c.wants {
			if !strings.Contains(out, want) {
				t.Errorf("%v: %s\nwant %s", c.args, out, want)
			}
		}
	}
}

// TestCheckWarns checks valid files that cause a warning on the standard error.
func TestCheckWarns(t *testing.T) {
	tests := map[string]struct{ file, output, warnings string }{
		"balancer": {
			file: `node: {interface: eth0, locator: "fd00:6c:0:1::/64"}
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, placement: hunt,
   servers: [{name: s1, locator: "fd00:5:0:1::/64"}, {name: s2, locator: "fd00:5:0:2::/64"}]}
`,
			output: "%s: valid balancer configuration: 1 service, 2 servers\n",
			warnings: "warning: %s:1: node.signal-key: missing while node.internal is true: " +
				"any host that can send packets to fd00:6c:0:1::/64 through eth0 " +
				"can pose as a server of web and take over its connections\n",
		},
		"agent": {
			file: `node: {interface: eth0, locator: "fd00:5:0:1::/64"}
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, load: {source: accept-queue}}
`,
			output: "%s: valid agent configuration: 1 service\n",
			warnings: "warning: %s:1: node.balancers: missing: " +
				"any host that can send packets to fd00:5:0:1::/64 through eth0 " +
				"can pose as a balancer and have replies of web sent to itself\n",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			file := writeFile(t, t.TempDir(), "node.yaml", test.file)
			var output, warnings bytes.Buffer
			root := newRoot()
			root.SetOut(&output)
			root.SetErr(&warnings)
			root.SetArgs([]string{"check", "-c", file})
			if err := root.Execute(); err != nil {
				t.Error(err)
			}
			if want := fmt.Sprintf(test.output, file); output.String() != want {
				t.Errorf("output:\n%s\nwant:\n%s", output.String(), want)
			}
			if want := fmt.Sprintf(test.warnings, file); warnings.String() != want {
				t.Errorf("warnings:\n%s\nwant:\n%s", warnings.String(), want)
			}
		})
	}
}

// TestCheckStrictly compares the findings about a file with the golden file, and checks exit codes.
func TestCheckStrictly(t *testing.T) {
	dir := t.TempDir()
	write := func(name, content string) string { return writeFile(t, dir, name, content) }
	const clean = `node: {interface: none0, internal: true, locator: "fd00:6c:0:1::/64", seed: 7}
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, health: {tcp: {}}, servers: [
  {name: s1, locator: "fd00:5:0:1::/64", host: "2001:db8::1"},
  {name: s2, locator: "fd00:5:0:2::/64", host: "2001:db8::2"}]}
`
	unwise := strings.NewReplacer(", seed: 7", "", ", health: {tcp: {}}", "").Replace(clean)
	good, bad := write("good.yaml", clean), write("bad.yaml", unwise)
	warned := write("warned.yaml", strings.Replace(clean, "protocol: tcp", "protocol: tcp, placement: hunt", 1))
	for _, c := range []struct {
		name string
		args []string
		code int
		err  string
	}{
		{"good", []string{"-c", good, "--strict"}, 0, "<nil>"},
		{"bad", []string{"-c", bad, "--strict"}, 2, bad + ": valid, but not strictly: 0 warnings, 2 findings"},
		{"not strict", []string{"-c", bad}, 0, "<nil>"},
		{"one allowed", []string{"-c", bad, "--strict", "--allow", "seed"}, 2, "0 warnings, 1 finding"},
		{"both allowed", []string{"-c", bad, "--strict", "--allow", "seed,health"}, 0, "<nil>"},
		{"warning", []string{"-c", warned, "--strict"}, 2, "1 warning, 0 findings"},
		{"no rule", []string{"-c", bad, "--strict", "--allow", "sed"}, 1, `--allow "sed": no such rule; the rules are affinity, bgp-announce`},
		{"not allowed", []string{"-c", bad, "--allow", "seed"}, 1, "--allow: only with --strict"},
		{"topology", []string{"-c", "../../docs/examples/lab/infer.yaml", "--strict"}, 1, "this is the topology of a lab"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var output, errors bytes.Buffer
			root := newRoot()
			root.SetOut(&output)
			root.SetErr(&errors)
			root.SetArgs(append([]string{"check"}, c.args...))
			err := root.Execute()
			code := 0
			if err != nil {
				code = cli.ExitCode(err)
			}
			if code != c.code || !strings.Contains(fmt.Sprint(err), c.err) {
				t.Errorf("code %d, want %d; error %v, want %s", code, c.code, err, c.err)
			}
			if c.name == "bad" {
				clitest.Golden(t, "check-strict.txt", bytes.NewBuffer(bytes.ReplaceAll(errors.Bytes(), []byte(dir), []byte("DIR"))))
			}
		})
	}
}

// TestCheckAgainst compares files with the configuration of a running process. The test itself
// takes the place of this process.
func TestCheckAgainst(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can write below /run/segue")
	}
	const files = `node: {instance: %s, interface: eth0, locator: "fd00:6c:0:1::/64"}
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp%s}
`
	const servers = `, servers: [{name: s1, locator: "fd00:5:0:1::/64"}]`
	dir := t.TempDir()
	for _, test := range []struct {
		role, more string
		parse      func([]byte) (settings, fieldpath.Errors, error)
		other      string // node.interface and further settings of a file that needs a restart
		problems   []string
	}{
		{"balancer", servers, func(data []byte) (settings, fieldpath.Errors, error) { return config.ParseBalancer(data) },
			"eth1, seed: 7", []string{
				`node.interface "eth1": a change from "eth0" needs a restart`,
				`node.seed: a change needs a restart`,
			}},
		{"agent", "", func(data []byte) (settings, fieldpath.Errors, error) { return config.ParseAgent(data) },
			"eth1", []string{`node.interface "eth1": a change from "eth0" needs a restart`}},
	} {
		instance := fmt.Sprintf("check-%s-%d", test.role, os.Getpid())
		running := fmt.Sprintf(files, instance, test.more)
		running = strings.Replace(running, "node: {", fmt.Sprintf("node: {state: %q, ", dir), 1)
		cfg, _, err := test.parse([]byte(running))
		testhost.Must(t, err)
		file := filepath.Join(dir, "node.yaml")
		check := func(content, output, problem string) {
			t.Helper()
			writeFile(t, dir, "node.yaml", content)
			var got bytes.Buffer
			root := newRoot()
			root.SetOut(&got)
			root.SetArgs([]string{"check", "-c", file, "--against", instance})
			err := root.Execute()
			if got.String() != output {
				t.Errorf("%s: output:\n%s\nwant:\n%s", test.role, got.String(), output)
			}
			if message := fmt.Sprint(err); !strings.Contains(message, problem) {
				t.Errorf("%s: error %v, want %s", test.role, err, problem)
			}
		}
		check(running, "", "no process runs the instance")
		lock, err := rundir.Lock(instance)
		testhost.Must(t, err)
		check(running, "", "runs a build that does not record its configuration")
		recorder := rundir.NewRecorder(lock, test.role, file, cfg.Fixed(), slog.New(slog.DiscardHandler))
		same := strings.Replace(running, "port: 80", "port: 81", 1)
		valid := file + ": valid " + test.role + " configuration: 1 service"
		if test.role == "balancer" {
			valid += ", 1 server"
		}
		check(same, fmt.Sprintf("%s\ninstance %q would reload it\n", valid, instance), "<nil>")
		problems := ""
		for _, problem := range test.problems {
			problems += file + ": " + problem + "\n"
		}
		check(strings.Replace(same, "eth0", test.other, 1), problems,
			fmt.Sprintf("%s: valid, but instance %q would refuse to reload it", file, instance))
		overrides := writeFile(t, dir, instance+".overrides.yaml", "overrides:\n- {service: web, server: s1}\n")
		check(same, overrides+":2: overrides[0]: must have add, set or remove\n", "would refuse to reload it: 1 error")
		invalid := []byte("overrides:\n- {service: web, set: {port: 99999}}\n")
		writeFile(t, dir, instance+".overrides.yaml", string(invalid))
		check(same, overrides+`:2: web.port "99999": must be a port from 1 to 65535, or all`+"\n", "would refuse to reload it: 1 error")
		list, err := config.ParseOverrides(invalid)
		testhost.Must(t, err)
		recorder.SetOverrides(nil, []desired.InvalidOverride{{Override: list[0]}})
		check(same, fmt.Sprintf("%s\ninstance %q would reload it\n", valid, instance), "<nil>")
		otherRole := fmt.Sprintf(files, instance, "")
		if test.role == "agent" {
			otherRole = fmt.Sprintf(files, instance, servers)
		}
		check(otherRole, "", "the instance has the role "+test.role)
		if err := errors.Join(recorder.Close(), rundir.Unlock(lock)); err != nil {
			t.Error(err)
		}
	}
}

// settings is a configuration of either role.
type settings interface{ Fixed() []desired.Setting }
