// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// subject is what the tests change: a server of a balancer, or a service of an agent. It has a
// number of 3 in the file, and is not drained.
type subject[D config.State[D]] struct {
	new    func(testing.TB) *site[D]
	name   string
	server string // empty: a service
	// number returns an edit that sets the number, and stored a file of overrides that does so.
	number func(n int) Edit
	stored string
	// of returns whether the subject is drained, and its number.
	of func(D) string
	// refused is the error about a number of 5,000,000,000.
	refused string
}

var server = subject[*desired.Balancer]{
	new: newSite, name: "web/s1", server: "s1",
	number: func(n int) Edit { return set("s1", desired.Fields{"weight": n}) },
	stored: "overrides:\n- {service: web, server: s1, set: {weight: 7}}\n",
	of: func(b *desired.Balancer) string {
		s := b.Server("web", "s1")
		return fmt.Sprint(s.Drained, " ", *s.Weight)
	},
	refused: `web/s1.weight "5000000000": must be a whole number from 0 to 1000`,
}

var service = subject[*desired.Agent]{
	new: newAgentSite, name: "web",
	number: func(n int) Edit { return set("", desired.Fields{"accept": map[string]any{"threshold": n}}) },
	stored: "overrides:\n- {service: web, set: {accept: {threshold: 7}}}\n",
	of: func(a *desired.Agent) string {
		return fmt.Sprint(a.Services[0].Drained, " ", *a.Services[0].Accept.Threshold)
	},
	refused: `web.accept.threshold "5000000000": must be a whole number from 0 to 4294967295`,
}

// followed returns the states that the process was told to follow.
func (u *subject[D]) followed(s *site[D]) (all []string) {
	for _, state := range s.runner.followed {
		all = append(all, u.of(state))
	}
	return all
}

func (u *subject[D]) requireFollowed(s *site[D], want ...string) {
	s.t.Helper()
	if got := u.followed(s); !slices.Equal(got, want) {
		s.t.Errorf("the process followed %q, want %q", got, want)
	}
}

// A change is applied, reported and stored. It survives a restart and a reload, until it is undone.
func TestChange(t *testing.T) {
	t.Run("balancer", func(t *testing.T) { testChange(t, server, "servers_changed") })
	t.Run("agent", func(t *testing.T) { testChange(t, service, "services_changed") })
}

func testChange[D config.State[D]](t *testing.T, u subject[D], kind string) {
	s := u.new(t)
	result := s.change(drain(u.server, true))
	want := fmt.Sprintf("[{%s %s (drained false to true)}]", kind, u.name)
	if got := fmt.Sprint(result.Changes); got != want {
		t.Errorf("changes %s, want %s", got, want)
	}
	if _, version := s.Overrides(); version != result.Version {
		t.Errorf("version %s, told %s", version, result.Version)
	}
	s.load()
	if _, err := s.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(s.reported); got != fmt.Sprintf("[%s (drained)]", u.name) {
		t.Errorf("after a restart, overrides %s are reported", got)
	}
	s.change(drain(u.server, false))
	u.requireFollowed(s, "true 3", "true 3", "false 3")
	if len(s.reported) > 0 {
		t.Errorf("overrides %v are reported after the end of the last", s.reported)
	}
	s.load()
	if all, _ := s.Overrides(); len(all) > 0 {
		t.Errorf("overrides %v after a restart", all)
	}
}

// The result of a change has the warnings about the new state.
func TestWarningsOfChange(t *testing.T) {
	result := newSite(t).change(drain("s1", true))
	if len(result.Warnings) != 1 || !strings.Contains(result.Warnings[0].Error(), "gets no new connections") {
		t.Errorf("warnings %v", result.Warnings)
	}
}

// A change without effect reaches neither the process nor the disk, and neither does a dry run.
func TestChangeNothing(t *testing.T) {
	t.Run("balancer", func(t *testing.T) { testChangeNothing(t, server) })
	t.Run("agent", func(t *testing.T) { testChangeNothing(t, service) })
}

func testChangeNothing[D config.State[D]](t *testing.T, u subject[D]) {
	s := u.new(t)
	_, version := s.Overrides()
	result, err := s.Change(t.Context(), []Edit{drain(u.server, true)}, Terms{DryRun: true})
	if err != nil || len(result.Changes) != 1 || result.Version != version {
		t.Errorf("a dry run for version %s would change %+v, error %v", version, result, err)
	}
	if result := s.change(drain(u.server, false)); len(result.Changes) > 0 {
		t.Errorf("changes %v", result.Changes)
	}
	if s.overrides() != "[]" || len(s.runner.followed) > 0 {
		t.Errorf("overrides %s; the process followed %q", s.overrides(), u.followed(s))
	}
	if _, err := os.Stat(s.stored()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the overrides are stored: %v", err)
	}
}

// A change that is refused, or fails anywhere, changes nothing.
func TestRefusedChange(t *testing.T) {
	t.Run("balancer", func(t *testing.T) { testRefusedChange(t, server) })
	t.Run("agent", func(t *testing.T) { testRefusedChange(t, service) })
}

func testRefusedChange[D config.State[D]](t *testing.T, u subject[D]) {
	t.Run("version", func(t *testing.T) {
		s := u.new(t)
		_, version := s.Overrides()
		if _, err := s.Change(t.Context(), []Edit{drain(u.server, true)}, Terms{Version: version}); err != nil {
			t.Fatal(err)
		}
		err := s.refusesUnder(Terms{Version: version}, "has another version", u.number(5))
		if !errors.Is(err, ErrVersion) {
			t.Error(err)
		}
	})
	t.Run("unknown", func(t *testing.T) {
		if err := u.new(t).refuses("web/s7", drain("s7", true)); !errors.Is(err, ErrNotFound) {
			t.Error(err)
		}
	})
	t.Run("value", func(t *testing.T) {
		u.new(t).refuses(u.refused, u.number(5_000_000_000))
	})
	t.Run("process", func(t *testing.T) {
		s := u.new(t)
		s.change(drain(u.server, true))
		s.runner.err = errors.New("no room")
		s.refuses("no room", drain(u.server, false))
	})
	t.Run("edited file", func(t *testing.T) {
		s := u.new(t)
		s.change(drain(u.server, true))
		s.write(s.stored(), u.stored)
		if err := s.refuses(s.stored(), drain(u.server, false)); !errors.Is(err, ErrStored) {
			t.Error(err)
		}
		if _, err := s.Reload(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.change(drain(u.server, true))
		u.requireFollowed(s, "true 3", "false 7", "true 7")
	})
	t.Run("disk", func(t *testing.T) {
		s := u.new(t)
		s.change(drain(u.server, true))
		stored := s.stored()
		// A directory in the file's place makes the last step fail, when the process follows.
		s.runner.during = func() {
			_ = os.Remove(stored)
			testhost.Must(t, os.MkdirAll(filepath.Join(stored, "full"), 0o755))
		}
		_, version := s.Overrides()
		_, err := s.Change(t.Context(), []Edit{drain(u.server, false)}, Terms{})
		if err == nil || !strings.Contains(err.Error(), stored) {
			t.Errorf("error %v", err)
		}
		u.requireFollowed(s, "true 3", "false 3", "true 3")
		if _, now := s.Overrides(); now != version {
			t.Errorf("version %s, before %s", now, version)
		}
	})
	t.Run("no directory", func(t *testing.T) {
		s := u.new(t)
		s.write(filepath.Dir(s.stored()), "a file")
		s.refuses("store the overrides", drain(u.server, true))
		u.requireFollowed(s)
	})
}

// After a reload that fails, the next change begins with the earlier files. A start with an invalid
// configuration file fails. A start with an invalid file of overrides leaves the overrides out.
func TestReloadFails(t *testing.T) {
	t.Run("balancer", func(t *testing.T) {
		testReloadFails(t, server, func(file string) error { _, _, err := LoadBalancer(file); return err })
	})
	t.Run("agent", func(t *testing.T) {
		testReloadFails(t, service, func(file string) error { _, _, err := LoadAgent(file); return err })
	})
}

func testReloadFails[D config.State[D]](t *testing.T, u subject[D], start func(file string) error) {
	s := u.new(t)
	s.write(s.file, "services: [")
	s.refusesReload(s.file + ":2")
	if err := start(s.file); err == nil || !strings.Contains(err.Error(), s.file+":2") {
		t.Errorf("start: error %v", err)
	}
	s.change(drain(u.server, true))
	u.requireFollowed(s, "true 3")

	s = u.new(t)
	s.change(drain(u.server, true))
	stored, err := os.ReadFile(s.stored())
	testhost.Must(t, err)
	const broken = "overrides:\n- {service: web}\n"
	problem := s.stored() + ":2: overrides[0]: must have add, set or remove"
	s.write(s.stored(), broken)
	s.refusesReload(problem)
	s.write(s.stored(), string(stored))
	s.change(drain(u.server, false))
	u.requireFollowed(s, "true 3", "false 3")

	s.write(s.stored(), broken)
	s.load()
	if s.overrides() != "[]" || len(s.invalid) != 1 || s.invalid[0].Problems.Error() != problem {
		t.Errorf("after a start: overrides %s, invalid %v", s.overrides(), s.invalid)
	}
	s.refusesReload(problem)
	unread := s.stored() + " could not be read: correct or remove it, and reload first"
	requireUnread := func() {
		t.Helper()
		if err := s.refuses(unread, drain(u.server, true)); !errors.Is(err, ErrStored) {
			t.Error(err)
		}
	}
	requireUnread()
	s.write(s.stored(), "")
	requireUnread()
	s.load()
	requireUnread()
	testhost.Must(t, os.Remove(s.stored()))
	requireUnread()
	if _, err := s.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.change(drain(u.server, true))
	s.load()
	s.requireOverrides(fmt.Sprintf("[%s (drained)]", u.name), 0)
}

// A change of the configuration file makes an override invalid. A reload refuses that. A start
// leaves the override out, and keeps it in its file until it is edited or reset.
func TestInvalidOverrides(t *testing.T) {
	s := newSite(t)
	s.change(set("s1", desired.Fields{"address": "2001:db8:1::9"}), drain("s2", false))
	s.edit("encapsulation: gre", "encapsulation: srv6-encap")
	s.edit(`"2001:db8::1"]`, `"2001:db8::1"], locator: "fd00:6c:0:1::/64"`)
	s.edit(`address: "2001:db8:1::1"`, `locator: "fd00:5:0:1::/64"`)
	s.edit(`address: "2001:db8:1::2"`, `locator: "fd00:5:0:2::/64"`)
	problem := `web/s1.address "2001:db8:1::9": not used by encapsulation srv6-encap`
	s.refusesReload(problem)
	s.requireOverrides("[web/s1 (address 2001:db8:1::9) web/s2 (not drained)]", 0)

	s.load()
	s.requireOverrides("[web/s2 (not drained)]", 1)
	if _, err := s.Reload(t.Context()); err != nil {
		t.Errorf("a reload of what the start has left out: %v", err)
	}
	s.requireOverrides("[web/s2 (not drained)]", 1)
	s.change(set("s2", desired.Fields{"weight": 7})) // writes the file, with other lines
	if got, want := s.invalid[0].Problems.Error(), s.stored()+": "+problem; got != want {
		t.Errorf("problem %s, want %s", got, want)
	}
	s.load()
	s.requireOverrides("[web/s2 (not drained, weight 7)]", 1)
	if got := s.invalid[0].Problems.Error(); !strings.HasPrefix(got, s.stored()) || !strings.HasSuffix(got, problem) {
		t.Errorf("problem %s", got)
	}
	result := s.change(drain("s1", true))
	if got := result.Warnings.Error(); !strings.Contains(got, "web/s1: the invalid override is gone: address") {
		t.Errorf("warnings %s", got)
	}
	s.requireOverrides("[web/s2 (not drained, weight 7) web/s1 (drained)]", 0)
	s.load()
	s.requireOverrides("[web/s2 (not drained, weight 7) web/s1 (drained)]", 0)

	s.write(s.stored(), "overrides:\n- {service: web, server: s1, set: {address: x}}\n")
	s.load()
	s.requireOverrides("[]", 1)
	s.change(Edit{Service: "web", Server: "s1", Reset: true})
	s.load()
	s.requireOverrides("[]", 0)
}

// An edit is refused if the next start or reload would not follow it, because of an override that
// is left out.
func TestEditBesidesInvalidOverride(t *testing.T) {
	const because = ": the next start or reload would not follow this change, because of the override that " +
		"is left out (%s): reset it first"
	t.Run("valid again", func(t *testing.T) {
		s := newAgentSite(t)
		s.startWith("overrides:\n- {service: web, set: {port: 443}}\n")
		tls := Edit{Service: "tls", Set: desired.Fields{"port": 8443}}
		s.refuses("web"+fmt.Sprintf(because, "port 443"), tls)
		s.refuses("web"+fmt.Sprintf(because, "port 443"), Edit{Service: "tls", Remove: true})
		s.requireOverrides("[]", 1)
		s.change(Edit{Service: "tls", Set: desired.Fields{"drained": true}})
		s.change(Edit{Service: "web", Reset: true}, tls)
		s.load()
		s.requireOverrides("[tls (drained, port 8443)]", 0)
	})
	t.Run("makes the edit invalid", func(t *testing.T) {
		s := newSite(t)
		s.edit(`addresses: ["2001:db8::1"]`, `addresses: ["2001:db8::1"], locator: "fd00:6c:0:1::/64"`)
		s.startWith("overrides:\n- {service: web, set: {encapsulation: srv6-encap}}\n")
		s.refuses("web"+fmt.Sprintf(because, "encapsulation srv6-encap"),
			set("s1", desired.Fields{"address": "2001:db8:1::9"}))
		s.change(drain("s1", true))
		s.load()
		s.requireOverrides("[web/s1 (drained)]", 1)
	})
}

// Applying a file removes invalid overrides, and says so.
func TestApplyFileRemovesInvalidOverrides(t *testing.T) {
	s := newSite(t)
	s.startWith("overrides:\n- {service: web, server: s1, set: {weight: 5000}}\n")
	s.requireOverrides("[]", 1)
	result, err := s.ApplyFile(t.Context(), []byte(services), Terms{})
	testhost.Must(t, err)
	if got := result.Warnings.Error(); got != "web/s1: the invalid override is gone: weight 5000" {
		t.Errorf("warnings %s", got)
	}
	s.requireOverrides("[]", 0)
	s.load()
	s.requireOverrides("[]", 0)
}

// startWith starts another process with a file of overrides.
func (s *site[D]) startWith(overrides string) {
	s.t.Helper()
	testhost.Must(s.t, os.MkdirAll(filepath.Dir(s.stored()), 0o755))
	s.write(s.stored(), overrides)
	s.load()
}

// requireOverrides requires overrides in force, and a number of others that are left out.
func (s *site[D]) requireOverrides(want string, invalid int) {
	s.t.Helper()
	if got := fmt.Sprint(s.reported); s.overrides() != want || got != want || len(s.invalid) != invalid {
		s.t.Errorf("overrides %s, reported %s, want %s; %d invalid ones %v, want %d",
			s.overrides(), got, want, len(s.invalid), s.invalid, invalid)
	}
}

func (s *site[D]) refusesReload(want string) {
	s.t.Helper()
	if _, err := s.Reload(s.t.Context()); err == nil || !strings.Contains(err.Error(), want) {
		s.t.Errorf("reload: error %v, want %s", err, want)
	}
}
