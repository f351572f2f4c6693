// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/generation"
)

// runner is a balancer that follows what it is told, or fails.
type runner struct {
	err      error
	any      bool     // followed states may lack s1
	during   func()   // during the next reload
	followed []string // whether s1 is drained, and its weight, for each state
}

func (r *runner) Reload(_ context.Context, b *desired.Balancer) error {
	if r.err != nil {
		return r.err
	}
	if during := r.during; during != nil {
		r.during = nil
		during()
	}
	if r.any {
		return nil
	}
	s := b.Server("web", "s1")
	r.followed = append(r.followed, fmt.Sprint(s.Drained, " ", *s.Weight))
	return nil
}

func (r *runner) Follow(ctx context.Context, b *desired.Balancer, _ generation.Generations) error {
	return r.Reload(ctx, b)
}

func (r *runner) Losses(context.Context, *desired.Balancer) ([]desired.Loss, error) {
	return nil, nil
}

// site is a controller with its files.
type site struct {
	t          testing.TB
	c          *Controller
	runner     runner
	file       string
	overridden string // path of the overrides
	reported   []desired.Override
}

const text = `
node: {instance: edge, interface: eth0, addresses: ["2001:db8::1"], state: %q}
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

func newSite(t testing.TB) *site {
	t.Helper()
	dir := t.TempDir()
	s := &site{t: t, file: filepath.Join(dir, "lb.yaml")}
	s.write(s.file, fmt.Sprintf(text, filepath.Join(dir, "state")))
	s.load()
	s.overridden = config.OverridesFile(&s.c.Desired().Node)
	return s
}

// load starts another process.
func (s *site) load() {
	s.t.Helper()
	var err error
	if s.c, _, err = Load(s.file); err != nil {
		s.t.Fatal(err)
	}
	s.c.Attach(&s.runner, func(all []desired.Override) { s.reported = all })
}

func (s *site) write(path, content string) {
	s.t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		s.t.Fatal(err)
	}
}

// drain returns an edit that drains a server, or ends that.
func drain(server string, drained bool) Edit {
	return Edit{Service: "web", Server: server, Set: desired.Fields{"drained": drained}}
}

func (s *site) change(edits ...Edit) *Result {
	s.t.Helper()
	result, err := s.c.Change(s.t.Context(), edits, Terms{})
	if err != nil {
		s.t.Fatal(err)
	}
	return result
}

// refuses requires that a change fails, and that nothing has changed.
func (s *site) refuses(want string, edits ...Edit) error {
	s.t.Helper()
	return s.refusesUnder(Terms{}, want, edits...)
}

func (s *site) refusesUnder(terms Terms, want string, edits ...Edit) error {
	s.t.Helper()
	_, version := s.c.Overrides()
	before, _ := os.ReadFile(s.overridden)
	_, err := s.c.Change(s.t.Context(), edits, terms)
	if err == nil || !strings.Contains(err.Error(), want) {
		s.t.Errorf("error %v, want %s", err, want)
	}
	if _, now := s.c.Overrides(); now != version {
		s.t.Errorf("version %s after a refused change, before %s", now, version)
	}
	if now, _ := os.ReadFile(s.overridden); string(now) != string(before) {
		s.t.Errorf("overrides after a refused change:\n%s", now)
	}
	left, _ := filepath.Glob(filepath.Join(filepath.Dir(s.overridden), ".*"))
	if len(left) > 0 {
		s.t.Errorf("files are left: %v", left)
	}
	return err
}

// A change is applied, reported and stored. It survives a restart and a reload, until it is undone.
func TestChange(t *testing.T) {
	s := newSite(t)
	result := s.change(drain("s1", true))
	want := "servers_changed: web/s1 (drained false to true)"
	if len(result.Changes) != 1 || result.Changes[0].What+": "+result.Changes[0].Names.String() != want {
		t.Errorf("changes %+v, want %s", result.Changes, want)
	}
	if len(result.Warnings) != 1 || !strings.Contains(result.Warnings[0].Error(), "gets no new connections") {
		t.Errorf("warnings %v", result.Warnings)
	}
	if _, version := s.c.Overrides(); version != result.Version {
		t.Errorf("version %s, told %s", version, result.Version)
	}
	s.load()
	if _, err := s.c.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.change(drain("s1", false))
	if got := []string{"true 3", "true 3", "false 3"}; !slices.Equal(s.runner.followed, got) {
		t.Errorf("the balancer followed %q, want %q", s.runner.followed, got)
	}
	if len(s.reported) > 0 {
		t.Errorf("overrides %v are reported after the end of the last", s.reported)
	}
	s.load()
	if all, _ := s.c.Overrides(); len(all) > 0 {
		t.Errorf("overrides %v after a restart", all)
	}
}

// A change without effect reaches neither the balancer nor the disk, and neither does a dry run.
func TestChangeNothing(t *testing.T) {
	s := newSite(t)
	before, version := s.c.Overrides()
	result, err := s.c.Change(t.Context(), []Edit{drain("s1", true)}, Terms{DryRun: true})
	if err != nil || len(result.Changes) != 1 || result.Version != version {
		t.Errorf("a dry run for version %s would change %+v, error %v", version, result, err)
	}
	if result := s.change(drain("s1", false)); len(result.Changes) > 0 {
		t.Errorf("changes %v", result.Changes)
	}
	if now, _ := s.c.Overrides(); len(now) != len(before) || len(s.runner.followed) > 0 {
		t.Errorf("overrides %v; the balancer followed %v", now, s.runner.followed)
	}
	if _, err := os.Stat(s.overridden); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the overrides are stored: %v", err)
	}
}

// A change that is refused, or fails anywhere, changes nothing.
func TestRefusedChange(t *testing.T) {
	t.Run("version", func(t *testing.T) {
		s := newSite(t)
		_, version := s.c.Overrides()
		if _, err := s.c.Change(t.Context(), []Edit{drain("s1", true)}, Terms{Version: version}); err != nil {
			t.Fatal(err)
		}
		err := s.refusesUnder(Terms{Version: version}, "has changed meanwhile", drain("s2", false))
		if !errors.Is(err, ErrVersion) {
			t.Error(err)
		}
	})
	t.Run("server", func(t *testing.T) {
		if err := newSite(t).refuses("web/s7", drain("s7", true)); !errors.Is(err, ErrNotFound) {
			t.Error(err)
		}
	})
	t.Run("value", func(t *testing.T) {
		newSite(t).refuses(`web/s1.weight "1001": must be a whole number from 0 to 1000`,
			Edit{Service: "web", Server: "s1", Set: desired.Fields{"weight": 1001}})
	})
	t.Run("balancer", func(t *testing.T) {
		s := newSite(t)
		s.change(drain("s1", true))
		s.runner.err = errors.New("no room")
		s.refuses("no room", drain("s1", false))
	})
	t.Run("edited file", func(t *testing.T) {
		s := newSite(t)
		s.change(drain("s1", true))
		s.write(s.overridden, "overrides:\n- {service: web, server: s1, set: {weight: 7}}\n")
		if err := s.refuses(s.overridden, drain("s1", false)); !errors.Is(err, ErrStored) {
			t.Error(err)
		}
		if _, err := s.c.Reload(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.change(drain("s1", true))
		if got := s.runner.followed[len(s.runner.followed)-1]; got != "true 7" {
			t.Errorf("after a reload the balancer follows %q", got)
		}
	})
	t.Run("disk", func(t *testing.T) {
		s := newSite(t)
		s.change(drain("s1", true))
		// A directory in the file's place makes the last step fail, when the balancer follows.
		s.runner.during = func() {
			_ = os.Remove(s.overridden)
			if err := os.MkdirAll(filepath.Join(s.overridden, "full"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		_, version := s.c.Overrides()
		_, err := s.c.Change(t.Context(), []Edit{drain("s1", false)}, Terms{})
		if err == nil || !strings.Contains(err.Error(), s.overridden) {
			t.Errorf("error %v", err)
		}
		if want := []string{"true 3", "false 3", "true 3"}; !slices.Equal(s.runner.followed, want) {
			t.Errorf("the balancer followed %q, want %q", s.runner.followed, want)
		}
		if _, now := s.c.Overrides(); now != version {
			t.Errorf("version %s, before %s", now, version)
		}
	})
	t.Run("no directory", func(t *testing.T) {
		s := newSite(t)
		s.write(filepath.Dir(s.overridden), "a file")
		s.refuses("store the overrides", drain("s1", true))
		if len(s.runner.followed) > 0 {
			t.Errorf("the balancer followed %v", s.runner.followed)
		}
	})
}

// A reload that fails keeps the files of before for the next change.
func TestReloadFails(t *testing.T) {
	s := newSite(t)
	before := s.c.Desired()
	s.write(s.file, "services: [")
	if _, err := s.c.Reload(t.Context()); err == nil || !strings.Contains(err.Error(), s.file+":2") {
		t.Errorf("error %v", err)
	}
	s.change(drain("s1", true))
	if s.c.Desired() == before || !s.c.Desired().Server("web", "s1").Drained {
		t.Error("the change has no effect")
	}
}
