package config

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v4"
)

// addExamples makes seeds of the files that docs show.
func addExamples(f *testing.F, add func(data []byte)) {
	f.Helper()
	paths, err := filepath.Glob("../../docs/examples/*.yaml")
	if err != nil || len(paths) == 0 {
		f.Fatalf("no examples: %v", err)
	}
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		add(data)
	}
	add([]byte(everything))
}

// everything has each field once.
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

// FuzzBalancer reads any bytes as a balancer's file, and any others as the one to reload.
func FuzzBalancer(f *testing.F) {
	addExamples(f, func(data []byte) { f.Add(data, []byte(everything)) })
	f.Fuzz(func(t *testing.T, data, next []byte) {
		HasServers(data)
		a := checkRead(t, ParseBalancer, data)
		b := checkRead(t, ParseBalancer, next)
		if a != nil && b != nil {
			checkReload(t, a.ReloadableFrom(b), b.ReloadableFrom(a), a.ReloadableFrom(a))
		}
	})
}

// FuzzAgent does the same for an agent's file.
func FuzzAgent(f *testing.F) {
	agent := []byte(`
node: {instance: a, interface: eth0, locator: "fd00:5:0:1::/64", addresses: [192.0.2.7], mtu: 1500, assign-vips: no}
services: [{name: web, vip: 2001:db8:80::1, port: 80, protocol: tcp, encapsulation: ipip}]`)
	addExamples(f, func(data []byte) { f.Add(data, agent) })
	f.Fuzz(func(t *testing.T, data, next []byte) {
		a := checkRead(t, ParseAgent, data)
		b := checkRead(t, ParseAgent, next)
		if a != nil && b != nil {
			checkReload(t, a.ReloadableFrom(b), b.ReloadableFrom(a), a.ReloadableFrom(a))
		}
	})
}

// checkRead reads a file. What is accepted and written reads as the same, so that no default depends
// on another reading; what is not has problems that say where they are.
func checkRead[T any](t *testing.T, parse func([]byte) (*T, error), data []byte) *T {
	t.Helper()
	config, err := parse(data)
	if err != nil {
		checkProblems(t, err, true)
		return nil
	}
	written, err := yaml.Marshal(config)
	if err != nil {
		t.Fatalf("%+v cannot be written: %v", config, err)
	}
	again, err := parse(written)
	if err != nil {
		t.Fatalf("what is written is refused: %v\n%s", err, written)
	}
	if diff := cmp.Diff(config, again, exact); diff != "" {
		t.Fatalf("what is written reads otherwise (-first +second):\n%s\n%s", diff, written)
	}
	return config
}

// checkProblems checks that each problem says what is wrong and where. Only one of a whole file, which
// then is the only one, is of no field.
func checkProblems(t *testing.T, err error, inFile bool) {
	t.Helper()
	var problems Errors
	if !errors.As(err, &problems) || len(problems) == 0 {
		t.Fatalf("%T without a problem: %v", err, err)
	}
	for _, p := range problems {
		if p.Problem == "" || p.Path == "" && len(problems) > 1 {
			t.Fatalf("a problem without a name or a place, %+v, in:\n%v", p, err)
		}
		if inFile && p.Line < 0 {
			t.Fatalf("a problem in line %d: %v", p.Line, err)
		}
	}
}

// checkReload has what two files say of taking each other's place, and the first one of its own.
func checkReload(t *testing.T, there, back, itself error) {
	t.Helper()
	if itself != nil {
		t.Fatalf("a file cannot take its own place: %v", itself)
	}
	if (there == nil) != (back == nil) {
		t.Fatalf("one way %v, the other %v", there, back)
	}
	if there != nil {
		checkProblems(t, there, false)
		for _, p := range there.(Errors) {
			if p.Path == "" {
				t.Fatalf("no path: %v", p)
			}
		}
	}
}
