// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// The services of an agent are added, changed, removed and reset.
func TestAgentEdits(t *testing.T) {
	added := desired.Fields{"vip": "192.0.2.53", "port": 53, "protocol": "udp"}
	policy := func(fields map[string]any) Edit { return set("", desired.Fields{"accept": fields}) }
	for _, test := range []struct {
		name  string
		edits []Edit
		want  string // the overrides
	}{
		{"add", []Edit{{Service: "dns", Add: added}}, "[dns (added)]"},
		{"add and remove", []Edit{{Service: "dns", Add: added}, {Service: "dns", Remove: true}}, "[]"},
		{"remove", []Edit{{Service: "tls", Remove: true}}, "[tls (removed)]"},
		{"another policy", []Edit{policy(map[string]any{"policy": "always", "threshold": nil})}, "[web (accept)]"},
		{"the file's policy", []Edit{policy(map[string]any{"policy": "static"})}, "[]"},
		{"another load", []Edit{set("", desired.Fields{"load": map[string]any{"source": "accept-queue"}})}, "[web (load)]"},
		{"drain both, reset one", []Edit{
			drain("", true), {Service: "tls", Set: desired.Fields{"drained": true}}, {Service: "web", Reset: true},
		}, "[tls (drained)]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newAgentSite(t)
			s.change(test.edits...)
			if s.overrides() != test.want {
				t.Errorf("overrides %s, want %s", s.overrides(), test.want)
			}
			s.load()
			if s.overrides() != test.want {
				t.Errorf("overrides %s after a restart, want %s", s.overrides(), test.want)
			}
		})
	}
}

// A desired state keeps its version across a restart, also with a number that has a fraction.
func TestVersionWithFraction(t *testing.T) {
	s := newAgentSite(t)
	policy := desired.Fields{"policy": "dynamic", "threshold": nil, "window": 60., "epsilon": 0.25}
	s.change(set("", desired.Fields{"accept": map[string]any(policy)}.WithPlainNumbers()))
	_, before := s.Overrides()
	s.load()
	if _, now := s.Overrides(); now != before {
		t.Errorf("version %s after a restart, before %s", now, before)
	}
	if a := s.Desired().Services[0].Accept; a.Window != 60 || *a.Epsilon != 0.25 {
		t.Errorf("window %d, epsilon %g, want 60 and 0.25", a.Window, *a.Epsilon)
	}
}

func TestImpossibleAgentEdits(t *testing.T) {
	for _, test := range []struct {
		name, want string
		edit       Edit
		is         error
	}{
		{"a server", "web/s1: services of an agent have no servers",
			Edit{Service: "web", Server: "s1", Add: desired.Fields{"weight": 1}}, nil},
		{"the last service", "services: at least one is required", Edit{Service: "tls", Remove: true}, nil},
		{"a field of a balancer", "web.candidates: unknown field", set("", desired.Fields{"candidates": 2}), nil},
		{"another policy's field", `web.accept.threshold "3": only for policy static`,
			set("", desired.Fields{"accept": map[string]any{"policy": "always"}}), nil},
		{"what exists", "web: exists already", Edit{Service: "web", Add: desired.Fields{"port": 1}}, ErrExists},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newAgentSite(t)
			if strings.HasPrefix(test.want, "services: ") {
				s.change(Edit{Service: "web", Remove: true})
			}
			if err := s.refuses(test.want, test.edit); test.is != nil && !errors.Is(err, test.is) {
				t.Errorf("error %v", err)
			}
		})
	}
}

// A drain in a service that balancers do not ask about would have no effect, so it is refused.
func TestDrainOfServiceThatDoesNotHunt(t *testing.T) {
	s := newAgentSite(t)
	s.change(Edit{Service: "dns", Add: desired.Fields{"vip": "192.0.2.53", "port": 53, "protocol": "udp"}})
	s.refuses(`dns.drained "true": only for services that hunt`, Edit{Service: "dns", Set: desired.Fields{"drained": true}})
}

// Applying a file to an agent keeps its drains. Its other sections have no effect.
func TestApplyFileToAgent(t *testing.T) {
	s := newAgentSite(t)
	s.change(drain("", true))
	const file = `
poll: {listen: "[::]:7460"}
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, accept: {policy: static, threshold: 4}}
- {name: dns, vip: 192.0.2.53, port: 53, protocol: udp}
`
	_, err := s.ApplyFile(t.Context(), []byte(file), Terms{})
	if err == nil || !strings.Contains(err.Error(), "node.signal-key") {
		t.Errorf("error %v", err)
	}
	result, err := s.ApplyFile(t.Context(), []byte(strings.Replace(file, "poll: {listen: \"[::]:7460\"}", "metrics: {listen: \"[::1]:9189\"}", 1)), Terms{})
	testhost.Must(t, err)
	if want := "[tls (removed) web (accept, drained) dns (added)]"; s.overrides() != want {
		t.Errorf("overrides %s, want %s", s.overrides(), want)
	}
	if !strings.HasPrefix(result.Warnings.Error(), "metrics: differs from the configuration file") {
		t.Errorf("warnings %v", result.Warnings)
	}
	if got := service.of(s.runner.last()); got != "true 4" {
		t.Errorf("the agent follows %s, want true 4", got)
	}
}

// If a file changes a drained service so that it does not hunt, the drain ends, with a warning.
func TestApplyFileEndsDrain(t *testing.T) {
	s := newAgentSite(t)
	s.change(drain("", true), Edit{Service: "tls", Set: desired.Fields{"drained": true}})
	const file = `
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: udp}
- {name: tls, vip: "2001:db8:80::1", port: 443, protocol: tcp}
`
	result, err := s.ApplyFile(t.Context(), []byte(file), Terms{})
	testhost.Must(t, err)
	if want := "web: the drain ends, because balancers do not ask the servers of a service that does not hunt: " +
		"drain the server at the balancers"; result.Warnings.Error() != want {
		t.Errorf("warnings %v, want %s", result.Warnings, want)
	}
	if want := "[web (default accept, protocol udp) tls (default accept, drained)]"; s.overrides() != want {
		t.Errorf("overrides %s, want %s", s.overrides(), want)
	}
}

// For an agent, the limit of a file counts services.
func TestApplyFileLimitOfAgent(t *testing.T) {
	s := newAgentSite(t)
	list := func(names ...string) []byte {
		text := "services:\n"
		for i, name := range names {
			text += fmt.Sprintf("- {name: %s, vip: \"2001:db8:80::1\", port: %d, protocol: tcp}\n", name, 80+i)
		}
		return []byte(text)
	}
	all := list("a", "b", "c", "d")
	if _, err := s.ApplyFile(t.Context(), all, Terms{PermitsRemovals: true}); err != nil {
		t.Fatal(err)
	}
	before := s.overrides()
	for _, text := range [][]byte{list("a", "b"), []byte(strings.ReplaceAll(string(all), "tcp}", "tcp, drained: true}"))} {
		_, err := s.ApplyFile(t.Context(), text, Terms{})
		if !errors.Is(err, ErrRemovals) || !strings.Contains(err.Error(), "of 4 services") || s.overrides() != before {
			t.Errorf("%s: overrides %s, error %v", text, s.overrides(), err)
		}
		if _, err := s.ApplyFile(t.Context(), text, Terms{PermitsRemovals: true}); err != nil {
			t.Errorf("%s, permitted: %v", text, err)
		}
		if _, err := s.ApplyFile(t.Context(), all, Terms{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.ApplyFile(t.Context(), list("a", "b", "c"), Terms{}); err != nil {
		t.Errorf("one of four: %v", err)
	}
}
