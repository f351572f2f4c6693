// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/testhost"
)

// addExample makes a seed of an example file in docs.
func addExample(f *testing.F, name string, next []byte) {
	f.Helper()
	data, err := os.ReadFile(examples + name)
	testhost.Must(f, err)
	f.Add(data, next)
}

// everything is a file with each field once.
const everything = `
node:
  instance: lb
  interface: eth0
  locator: "fd00:6c:0:1::/64"
  addresses: [10.0.0.1, "fd00:a::1"]
  seed: 0x10
  limits: {flows: 1_048_576, servers: 4096}
metrics: {listen: "[::1]:9188"}
services:
  - {name: web, vip: 2001:db8:80::1, port: all, protocol: tcp, placement: hash, persistence: table,
     encapsulation: srv6-insert, candidates: 1, buckets: 65537,
     timeouts: {new: 5s, established: 4h, closing: 1m},
     health: {http: {path: /, port: 80}, interval: 100ms, timeout: 1ms, rise: 1, fall: 1000},
     servers: [{name: s1, locator: "fd00:5:0:1::/64", host: "2001:db8::1", weight: 0}, &s {name: s2, locator: "fd00:5:0:2::/64", host: "::1", weight: 1000}]}
  - {name: dns, vip: 192.0.2.53, port: 53, protocol: udp, encapsulation: gre, health: {tcp: {}}, servers: [{name: d, address: 192.0.2.7}]}
`

// FuzzParseBalancer reads any bytes as a balancer's file, and other bytes as the file of a reload.
func FuzzParseBalancer(f *testing.F) {
	addExample(f, "lb.yaml", []byte(everything))
	f.Add([]byte(everything), []byte(validBalancer))
	f.Fuzz(func(t *testing.T, data, next []byte) {
		KindOf(data)
		a := checkRead(t, ParseBalancer, data)
		b := checkRead(t, ParseBalancer, next)
		if a != nil && b != nil {
			checkReload(t, a.ReloadableFrom(b), b.ReloadableFrom(a), a.ReloadableFrom(a))
		}
	})
}

// FuzzParseAgent does the same for an agent's file.
func FuzzParseAgent(f *testing.F) {
	addExample(f, "agent.yaml", []byte(validAgent))
	f.Add([]byte(agentQUIC), []byte(validAgent))
	f.Fuzz(func(t *testing.T, data, next []byte) {
		a := checkRead(t, ParseAgent, data)
		b := checkRead(t, ParseAgent, next)
		if a != nil && b != nil {
			checkReload(t, a.ReloadableFrom(b), b.ReloadableFrom(a), a.ReloadableFrom(a))
		}
	})
}

// checkRead reads a file. An accepted file must be the same after writing and reading again, so
// defaults are set only once. For a refused file, each problem must name its place.
func checkRead[T any](t *testing.T, parse func([]byte) (*T, fieldpath.Errors, error), data []byte) *T {
	t.Helper()
	config, _, err := parse(data)
	if err != nil {
		checkProblems(t, err)
		return nil
	}
	checkRoundTrip(t, config, parse)
	return config
}

// checkProblems checks that each problem is one line that names the field and the problem. A
// problem of the whole file has no field, and must be the only one.
func checkProblems(t *testing.T, err error) {
	t.Helper()
	var problems fieldpath.Errors
	if !errors.As(err, &problems) || len(problems) == 0 {
		t.Fatalf("error of type %T: %v", err, err)
	}
	for _, p := range problems {
		if p.Problem == "" || p.Path == "" && len(problems) > 1 || strings.Contains(p.Error(), "\n") {
			t.Fatalf("%q does not say what is wrong, or where, on one line, in:\n%v", p.Error(), err)
		}
	}
}

// checkReload checks the comparison of two files, and of the first file with itself.
func checkReload(t *testing.T, there, back, itself error) {
	t.Helper()
	if itself != nil {
		t.Fatalf("a file cannot take its own place: %v", itself)
	}
	if (there == nil) != (back == nil) {
		t.Fatalf("one way %v, the other %v", there, back)
	}
	if there != nil {
		checkProblems(t, there)
	}
}

// FuzzParseOverrides reads any bytes as a file of overrides. An accepted file stays the same when it
// is written and read again. A balancer follows it, or names the problem.
func FuzzParseOverrides(f *testing.F) {
	f.Add([]byte("overrides:\n- {service: web, server: s1, set: {drained: true, weight: 10}}\n- {service: dns, remove: true}\n"))
	f.Add([]byte("overrides:\n- {service: web, server: s4, add: {locator: \"fd00:5:0:4::/64\"}, set: {weight: null}}\n"))
	f.Add([]byte("overrides:\n- {service: web, set: {timeouts: {new: 7s}, servers: [&a {b: *a}]}}\n"))
	f.Add([]byte("overrides: []\n"))
	files, _, err := ParseBalancerFiles([]byte(everything))
	testhost.Must(f, err)
	f.Fuzz(func(t *testing.T, data []byte) {
		overrides, err := ParseOverrides(data)
		if err != nil {
			checkProblems(t, err)
			return
		}
		text, err := yaml.Dump(desired.Overrides{Overrides: overrides})
		testhost.Must(t, err)
		again, err := ParseOverrides(text)
		if err != nil {
			t.Fatalf("not valid when written: %v\n%s", err, text)
		}
		if twice, err := yaml.Dump(desired.Overrides{Overrides: again}); err != nil || !bytes.Equal(text, twice) {
			t.Fatalf("%v\n%s\nbecomes\n%s", err, text, twice)
		}
		if _, _, err := files.WithOverrides(overrides); err != nil {
			checkProblems(t, err)
		}
	})
}

// FuzzSignalKeys reads any text as a key file. An error does not quote the file.
func FuzzSignalKeys(f *testing.F) {
	f.Add("000102030405060708090a0b0c0d0e0f\r\nFFfeFDfcfbfaf9f8f7f6f5f4f3f2f1f0\n")
	f.Add("a secret\n")
	f.Fuzz(func(t *testing.T, content string) {
		keys, problem := parseSignalKeys(content)
		if (problem == "") != (len(keys) == 1 || len(keys) == 2) {
			t.Errorf("%d keys, problem %q", len(keys), problem)
		}
		for line := range strings.Lines(content) {
			if line = strings.TrimSpace(line); len(line) > 8 && strings.Contains(problem, line) {
				t.Errorf("quotes the file: %s", problem)
			}
		}
	})
}

// FuzzInspect looks for findings in any bytes.
func FuzzInspect(f *testing.F) {
	addExample(f, "lb.yaml", nil)
	addExample(f, "agent.yaml", nil)
	f.Add([]byte(everything), []byte(nil))
	host := Host{
		MTU:    func(string) (int, bool) { return 1280, true },
		Driver: func(string) string { return "nfp" },
	}
	f.Fuzz(func(t *testing.T, data, _ []byte) {
		for _, inspect := range []func(string, []byte, Host) ([]Finding, error){InspectBalancer, InspectAgent} {
			findings, err := inspect("", data, host)
			if err != nil {
				checkProblems(t, err)
			}
			for _, f := range findings {
				if f.Rule == "" || strings.Contains(f.Error.Error(), "\n") {
					t.Errorf("%v", f)
				}
			}
		}
	})
}
