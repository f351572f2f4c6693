// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// Edits are made in their order. A restart leads to the same state.
func TestEdits(t *testing.T) {
	added := desired.Fields{"address": "2001:db8:1::3", "weight": 2}
	service := desired.Fields{
		"vip": "2001:db8:80::1", "port": "443", "protocol": "tcp", "encapsulation": "gre",
		"servers": []any{map[string]any{"name": "t1", "address": "2001:db8:1::1"}},
	}
	web := func(server string, e Edit) Edit {
		e.Service, e.Server = "web", server
		return e
	}
	for _, test := range []struct {
		name  string
		edits []Edit
		want  string // the overrides
	}{
		{"add a server", []Edit{web("s3", Edit{Add: added})}, "[web/s3 (added)]"},
		{"add and drain", []Edit{web("s3", Edit{Add: added}), drain("s3", true)}, "[web/s3 (added, drained)]"},
		{"add, drain, undrain", []Edit{web("s3", Edit{Add: added}), drain("s3", true), drain("s3", false)}, "[web/s3 (added)]"},
		{"add and remove", []Edit{web("s3", Edit{Add: added}), web("s3", Edit{Remove: true})}, "[]"},
		{"remove a drained server", []Edit{drain("s1", true), web("s1", Edit{Remove: true})}, "[web/s1 (removed)]"},
		{"remove and reset", []Edit{web("s1", Edit{Remove: true}), web("s1", Edit{Reset: true})}, "[]"},
		{"undrain what the file drains", []Edit{drain("s2", false)}, "[web/s2 (not drained)]"},
		{"and drain it again", []Edit{drain("s2", false), drain("s2", true)}, "[]"},
		{"set a service", []Edit{web("", Edit{Set: desired.Fields{"timeouts": map[string]any{"new": "5s", "closing": "60s"}}})},
			"[web (timeouts)]"},
		{"set what the file has", []Edit{web("", Edit{Set: desired.Fields{"timeouts": map[string]any{"new": "60s"}, "buckets": 65537}})},
			"[]"},
		{"a value that keeps another from its default", []Edit{web("", Edit{Set: desired.Fields{"placement": "infer", "candidates": 3}})},
			"[web (candidates 3, placement infer)]"},
		{"reset a service", []Edit{drain("s1", true), web("", Edit{Set: desired.Fields{"buckets": 101}}), web("", Edit{Reset: true})},
			"[]"},
		{"add a service", []Edit{{Service: "tls", Add: service}, {Service: "tls", Server: "t1", Set: desired.Fields{"weight": 5}}},
			"[tls (added) tls/t1 (weight 5)]"},
		{"add a service and a server", []Edit{{Service: "tls", Add: service}, {Service: "tls", Server: "t2", Add: added}},
			"[tls (added) tls/t2 (added)]"},
		{"add a service and remove its server", []Edit{
			{Service: "tls", Add: service}, {Service: "tls", Server: "t2", Add: added}, {Service: "tls", Server: "t1", Remove: true},
		}, "[tls (added) tls/t2 (added) tls/t1 (removed)]"},
		{"add and remove a service", []Edit{
			{Service: "tls", Add: service}, {Service: "tls", Server: "t1", Set: desired.Fields{"weight": 5}}, {Service: "tls", Remove: true},
		}, "[]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newSite(t)
			s.change(test.edits...)
			if got := s.overrides(); got != test.want {
				t.Errorf("overrides %s, want %s", got, test.want)
			}
			before := s.Desired()
			s.load()
			if diff := cmp.Diff(before, s.Desired(), cmp.Comparer(func(a, b desired.Override) bool {
				return a.String() == b.String()
			}), cmp.Exporter(func(reflect.Type) bool { return true })); diff != "" {
				t.Errorf("after a restart, -before +after:\n%s", diff)
			}
		})
	}
}

// If an edit cannot be made, neither it nor the edits before it change anything.
func TestImpossibleEdits(t *testing.T) {
	service := desired.Fields{
		"vip": "2001:db8:80::1", "port": "443", "protocol": "tcp", "encapsulation": "gre",
		"servers": []any{map[string]any{"name": "t1", "address": "2001:db8:1::1"}},
	}
	add := Edit{Service: "web", Server: "s3", Add: desired.Fields{"address": "2001:db8:1::3"}}
	for _, test := range []struct {
		name, want string
		edits      []Edit
		is         error
	}{
		{"add what exists", "web/s1: exists already", []Edit{{Service: "web", Server: "s1", Add: add.Add}}, ErrExists},
		{"add to no service", "tls: no such service", []Edit{{Service: "tls", Server: "s1", Add: add.Add}}, ErrNotFound},
		{"add what an override removes", "removed by an override", []Edit{
			{Service: "web", Server: "s1", Remove: true}, {Service: "web", Server: "s1", Add: add.Add},
		}, ErrExists},
		{"set after remove", "web/s3: no such", []Edit{
			add, {Service: "web", Server: "s3", Remove: true}, drain("s3", true),
		}, ErrNotFound},
		{"set a server of a service that was removed", "tls/t1: no such", []Edit{
			{Service: "tls", Add: service}, {Service: "tls", Remove: true},
			{Service: "tls", Add: desired.Fields{"vip": "2001:db8:80::2", "port": 1, "protocol": "tcp"}},
			{Service: "tls", Server: "t1", Set: desired.Fields{"weight": 1}},
		}, ErrNotFound},
		{"incomplete server", "web/s3.address: required", []Edit{
			drain("s1", true), {Service: "web", Server: "s3", Add: desired.Fields{"weight": 1}},
		}, nil},
		{"unknown field", "web/s3.port: unknown field", []Edit{
			{Service: "web", Server: "s3", Add: desired.Fields{"address": "2001:db8:1::3", "port": 1}},
		}, nil},
		{"two actions", "edits[1]: must have exactly one of", []Edit{add, {Service: "web", Remove: true, Reset: true}}, nil},
		{"no action", "edits[0]: must have exactly one of", []Edit{{Service: "web"}}, nil},
		{"servers of a service", "edits[0].set.servers: each server", []Edit{
			{Service: "web", Set: desired.Fields{"servers": []any{}}},
		}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := newSite(t).refuses(test.want, test.edits...)
			if test.is != nil && !errors.Is(err, test.is) {
				t.Errorf("error %v", err)
			}
		})
	}
}

// A section that was removed stays removed when one of its fields is set: the other fields of the
// file do not come back.
func TestSetFieldOfRemovedSection(t *testing.T) {
	written := map[string]any{"new": "20s", "established": "2h"}
	for service, begin := range map[string]func(*site[*desired.Balancer]){
		"web": func(s *site[*desired.Balancer]) { // has the section in the file
			s.edit("  servers:", "  timeouts: {new: 20s, established: 2h}\n  servers:")
			s.load()
		},
		"tls": func(s *site[*desired.Balancer]) {
			s.change(Edit{Service: "tls", Add: desired.Fields{
				"vip": "2001:db8:80::1", "port": "443", "protocol": "tcp", "encapsulation": "gre", "servers": []any{},
				"timeouts": written,
			}})
		},
	} {
		t.Run(service, func(t *testing.T) {
			s := newSite(t)
			begin(s)
			requireAfter := func(fields any, fresh, established time.Duration) {
				t.Helper()
				s.change(Edit{Service: service, Set: desired.Fields{"timeouts": fields}})
				got := s.Desired().Service(service).Timeouts
				if got.New != fresh || got.Established != established {
					t.Errorf("after %v: new %s, established %s, want %s and %s", fields, got.New, got.Established, fresh, established)
				}
			}
			requireAfter(nil, time.Minute, time.Hour) // the defaults
			requireAfter(map[string]any{"new": "30s"}, 30*time.Second, time.Hour)
			requireAfter(map[string]any{"established": "3h"}, 30*time.Second, 3*time.Hour)
			requireAfter(map[string]any{"established": nil}, 30*time.Second, time.Hour)
			requireAfter(written, 20*time.Second, 2*time.Hour)
		})
	}
}

// The file takes precedence over an override that adds the same server. A drain of the server stays
// in force.
func TestFileAdoptsServer(t *testing.T) {
	s := newSite(t)
	s.change(Edit{Service: "web", Server: "s3", Add: desired.Fields{"address": "2001:db8:1::3"}}, drain("s3", true))
	s.edit("servers:\n", "servers:\n  - {name: s3, address: \"2001:db8:1::3\", weight: 9}\n")
	warnings, err := s.Reload(t.Context())
	testhost.Must(t, err)
	if !strings.Contains(warnings.Error(), "web/s3: is in the file, which takes precedence") {
		t.Errorf("warnings %v", warnings)
	}
	server := s.Desired().Server("web", "s3")
	if len(s.Desired().Services[0].Servers) != 3 || *server.Weight != 9 || !server.Drained {
		t.Errorf("%+v", server)
	}
}

// Applying a file that adds, changes and removes makes the services those of the file, and keeps
// drains. Applying the balancer's own file ends all other overrides.
func TestApplyFile(t *testing.T) {
	s := newSite(t)
	s.change(set("s1", desired.Fields{"drained": "true"}), Edit{Service: "web", Server: "s3", Add: desired.Fields{"address": "2001:db8:1::3"}})
	const file = `
services:
- name: web
  vip: "2001:db8:80::1"
  port: 80
  protocol: tcp
  encapsulation: gre
  timeouts: {new: 5s}
  servers:
  - {name: s1, address: "2001:db8:1::1", weight: 3}
  - {name: s4, address: "2001:db8:1::4"}
`
	result, err := s.ApplyFile(t.Context(), []byte(file), Terms{PermitsRemovals: true})
	testhost.Must(t, err)
	got := fmt.Sprint(result.Changes)
	if want := "[{services_changed web (timeouts)} {servers_added web/s4} {servers_removed web/s2, web/s3}]"; got != want {
		t.Errorf("changes %s, want %s", got, want)
	}
	if want := "[web/s2 (removed) web (timeouts) web/s4 (added) web/s1 (drained)]"; s.overrides() != want {
		t.Errorf("overrides %s, want %s", s.overrides(), want)
	}
	own, err := os.ReadFile(s.file)
	testhost.Must(t, err)
	if _, err := s.ApplyFile(t.Context(), own, Terms{PermitsRemovals: true}); err != nil || s.overrides() != "[web/s1 (drained)]" {
		t.Errorf("overrides %s, error %v", s.overrides(), err)
	}
	result, err = s.ApplyFile(t.Context(), []byte("node: {interface: eth7, addresses: [\"2001:db8::1\"]}\n"+file),
		Terms{DryRun: true, PermitsRemovals: true})
	if err != nil || !strings.Contains(result.Warnings.Error(), "node: differs") {
		t.Errorf("result %+v, error %v", result, err)
	}
	_, err = s.ApplyFile(t.Context(), []byte(strings.Replace(file, "gre", "grey", 1)), Terms{})
	if err == nil || !strings.Contains(err.Error(), `line 7: services[0].encapsulation "grey"`) {
		t.Errorf("error %v", err)
	}
}

// sixServers are services of a file: web has six servers, and dns, which is last, two.
const sixServers = `services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, encapsulation: gre, servers: [
    {name: s1, address: "2001:db8:1::1"}, {name: s2, address: "2001:db8:1::2"}, {name: s3, address: "2001:db8:1::3"},
    {name: s4, address: "2001:db8:1::4"}, {name: s5, address: "2001:db8:1::5"}, {name: s6, address: "2001:db8:1::6"}]}
- {name: dns, vip: "2001:db8:80::1", port: 53, protocol: udp, encapsulation: gre, servers: [
    {name: d1, address: "2001:db8:1::1"}, {name: d2, address: "2001:db8:1::2"}]}
`

// A file that takes more servers out of service than the limit changes nothing, unless that is
// permitted. A dry run is refused, too. The process's own file has no limit, and neither have
// edits.
func TestApplyFileLimit(t *testing.T) {
	site := func() *site[*desired.Balancer] {
		s := newSite(t)
		s.change(drain("s2", false))
		if _, err := s.ApplyFile(t.Context(), []byte(sixServers), Terms{PermitsRemovals: true}); err != nil {
			t.Fatal(err)
		}
		return s
	}
	without := func(names ...string) string {
		text := sixServers
		for _, name := range names {
			text = regexp.MustCompile(`\{name: `+name+`, address: "[0-9a-f:]*"\},? ?`).ReplaceAllString(text, "")
		}
		return text
	}
	with := func(field string, names ...string) string {
		text := sixServers
		for _, name := range names {
			text = regexp.MustCompile(`\{name: `+name+`, `).ReplaceAllString(text, "${0}"+field+", ")
		}
		return text
	}
	for text, want := range map[string]string{
		without("s1"):                                          "",
		without("d1"):                                          "",
		with("drained: true", "s1", "d1"):                      "",
		with("weight: 0", "s1"):                                "",
		without("s1", "s2"):                                    "would remove 2 of 6 servers of web",
		with("weight: 0", "s1", "s2"):                          "would take out of service 2 of 6 servers of web",
		with("drained: true", "s1", "s2"):                      "would take out of service 2 of 6 servers of web",
		with("drained: true", "d1", "d2"):                      "would take out of service 2 of 2 servers of dns",
		sixServers[:strings.Index(sixServers, "- {name: dns")]: "would remove 2 of 2 servers of dns",
	} {
		s := site()
		before := s.overrides()
		for _, terms := range []Terms{{DryRun: true}, {}, {PermitsRemovals: true}} {
			_, err := s.ApplyFile(t.Context(), []byte(text), terms)
			isRefused := errors.Is(err, ErrRemovals) && strings.Contains(err.Error(), want) &&
				strings.Contains(err.Error(), "--allow-removals")
			switch {
			case want != "" && !terms.PermitsRemovals && (!isRefused || s.overrides() != before):
				t.Errorf("%s\n%+v: overrides %s, error %v, want %s", text, terms, s.overrides(), err, want)
			case (want == "" || terms.PermitsRemovals) && err != nil:
				t.Errorf("%s\n%+v: error %v", text, terms, err)
			}
		}
	}
	s := site()
	s.change(remove("s1"), remove("s2"), drain("s3", true), drain("s4", true))
	s.change(Edit{Service: "web", Reset: true}, Edit{Service: "dns", Reset: true})
	own := fmt.Sprintf(balancerText, s.Desired().Node.State)
	own = own[:strings.Index(own, "services:")] + strings.ReplaceAll(sixServers[:strings.Index(sixServers, "- {name: dns")], "web", "other")
	testhost.Must(t, os.WriteFile(s.file, []byte(own), 0o644))
	if _, err := s.Reload(t.Context()); err != nil {
		t.Errorf("a reload of another service: %v", err)
	}
}
