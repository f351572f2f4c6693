// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/testhost"
)

// services are those of a balancer's file.
const services = `
services:
- name: web
  vip: "2001:db8:80::1"
  port: 80
  protocol: tcp
  encapsulation: gre
  servers:
  - {name: s1, address: "2001:db8:1::1", weight: 3}
  - {name: s2, address: "2001:db8:1::2", drained: true}
`

const balancerText = `
node: {instance: edge, interface: eth0, addresses: ["2001:db8::1"], state: %q}` + services

const agentText = `
node: {instance: s1, interface: eth0, locator: "fd00:5:0:1::/64", balancers: ["fd00:6c::/32"], state: %q}
services:
- {name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp, accept: {policy: static, threshold: 3}}
- {name: tls, vip: "2001:db8:80::1", port: 443, protocol: tcp, accept: {policy: static, threshold: 9}}
`

// runner is a balancer or an agent that follows what it is told, or fails.
type runner[D any] struct {
	mu          sync.Mutex
	err         error
	during      func() // during the next reload
	followed    []D
	secrets     desired.Secrets        // of the last state
	generations serversets.Generations // of a member of a fleet
	by          string                 // who has asked for the last state
}

func (r *runner[D]) Reload(ctx context.Context, state D, secrets desired.Secrets) error {
	return r.Follow(ctx, state, secrets, nil)
}

func (r *runner[D]) Follow(
	ctx context.Context, state D, secrets desired.Secrets, g serversets.Generations,
) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return r.err
	}
	if during := r.during; during != nil {
		r.during = nil
		during()
	}
	r.followed, r.secrets, r.generations = append(r.followed, state), secrets, g
	r.by = events.ActorOf(ctx)
	return nil
}

func (*runner[D]) Losses(context.Context, D) ([]desired.Loss, error) { return nil, nil }

// last returns the state that the process follows.
func (r *runner[D]) last() D {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.followed[len(r.followed)-1]
}

// site is a controller with its files.
type site[D config.State[D]] struct {
	*Controller[D]
	t        testing.TB
	file     string
	runner   runner[D]
	reported []desired.Override        // in force, by the last report
	invalid  []desired.InvalidOverride // left out, by the last report
	// load starts another process.
	load func()
}

// newSite returns the controller of a balancer.
func newSite(t testing.TB) *site[*desired.Balancer] {
	t.Helper()
	s := writeSite[*desired.Balancer](t, balancerText)
	s.load = func() {
		t.Helper()
		b, _, err := LoadBalancer(s.file)
		testhost.Must(t, err)
		b.Attach(&s.runner, s.report)
		s.Controller = &b.Controller
	}
	s.load()
	return s
}

// newAgentSite returns the controller of an agent.
func newAgentSite(t testing.TB) *site[*desired.Agent] {
	t.Helper()
	s := writeSite[*desired.Agent](t, agentText)
	s.load = func() {
		t.Helper()
		a, _, err := LoadAgent(s.file)
		testhost.Must(t, err)
		a.Attach(&s.runner, s.report)
		s.Controller = a
	}
	s.load()
	return s
}

// writeSite writes a configuration file with a directory for state.
func writeSite[D config.State[D]](t testing.TB, text string) *site[D] {
	t.Helper()
	dir := t.TempDir()
	s := &site[D]{t: t, file: filepath.Join(dir, "segue.yaml")}
	s.write(s.file, fmt.Sprintf(text, filepath.Join(dir, "state")))
	return s
}

func (s *site[D]) report(all []desired.Override, invalid []desired.InvalidOverride) {
	s.reported, s.invalid = all, invalid
}

func (s *site[D]) write(path, content string) {
	s.t.Helper()
	testhost.Must(s.t, os.WriteFile(path, []byte(content), 0o644))
}

// edit replaces a part of the configuration file.
func (s *site[D]) edit(from, to string) {
	s.t.Helper()
	text, err := os.ReadFile(s.file)
	testhost.Must(s.t, err)
	if !strings.Contains(string(text), from) {
		s.t.Fatalf("no %q in\n%s", from, text)
	}
	s.write(s.file, strings.Replace(string(text), from, to, 1))
}

// stored is the path of the overrides.
func (s *site[D]) stored() string { return s.Desired().OverridesFile() }

// overrides returns the overrides as text.
func (s *site[D]) overrides() string {
	all, _ := s.Overrides()
	return fmt.Sprint(all)
}

func (s *site[D]) change(edits ...Edit) *Result {
	s.t.Helper()
	result, err := s.Change(s.t.Context(), edits, Terms{})
	testhost.Must(s.t, err)
	return result
}

// refuses requires that a change fails, and that nothing has changed.
func (s *site[D]) refuses(want string, edits ...Edit) error {
	s.t.Helper()
	return s.refusesUnder(Terms{}, want, edits...)
}

func (s *site[D]) refusesUnder(terms Terms, want string, edits ...Edit) error {
	s.t.Helper()
	_, version := s.Overrides()
	before, _ := os.ReadFile(s.stored())
	_, err := s.Change(s.t.Context(), edits, terms)
	if err == nil || !strings.Contains(err.Error(), want) {
		s.t.Errorf("error %v, want %s", err, want)
	}
	if _, now := s.Overrides(); now != version {
		s.t.Errorf("version %s after a refused change, before %s", now, version)
	}
	if now, _ := os.ReadFile(s.stored()); string(now) != string(before) {
		s.t.Errorf("overrides after a refused change:\n%s", now)
	}
	left, _ := filepath.Glob(filepath.Join(filepath.Dir(s.stored()), ".*"))
	if len(left) > 0 {
		s.t.Errorf("files are left: %v", left)
	}
	return err
}

// set returns an edit that sets fields of a server of web.
func set(server string, fields desired.Fields) Edit {
	return Edit{Service: "web", Server: server, Set: fields}
}

// drain returns an edit that drains or undrains a server of web or, without a server, web itself.
func drain(server string, drained bool) Edit {
	return set(server, desired.Fields{"drained": drained})
}
