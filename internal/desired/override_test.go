// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestValidateOverrides(t *testing.T) {
	yes, heavy := true, uint32(1001)
	overrides := Overrides{[]Override{
		{Service: "web", Server: "s1", Drained: &yes},
		{Service: "web", Server: "s1", Drained: &yes},
		{Service: "web", Server: "s2"},
		{Server: "s3", Weight: &heavy},
	}}
	want := `overrides[1]: server s1 of service web is already in overrides[0]
overrides[2]: must have drained or weight
overrides[3].service: required
overrides[3].weight: must be a whole number from 0 to 1000`
	if diff := cmp.Diff(want, overrides.Validate().Error()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestOverride replaces settings of single servers, and leaves the others.
func TestOverride(t *testing.T) {
	yes, no, seven := true, false, uint32(7)
	b := valid()
	b.Services[0].Servers[1].Drained = true
	overrides := []Override{
		{Service: "web", Server: "s1", Drained: &yes, Weight: &seven},
		{Service: "web", Server: "s2", Drained: &no},
		{Service: "web", Server: "s9", Drained: &yes},
		{Service: "dns", Server: "s1", Drained: &yes},
	}
	want := `overrides[2]: service web has no server s9: the override has no effect
overrides[3]: service dns has no server s1: the override has no effect`
	if diff := cmp.Diff(want, b.Override(overrides).Error()); diff != "" {
		t.Errorf("warnings, -want +got:\n%s", diff)
	}
	if diff := cmp.Diff(overrides[:2], b.Overrides); diff != "" {
		t.Errorf("overrides in force, -want +got:\n%s", diff)
	}
	s1, s2 := b.Services[0].Servers[0], b.Services[0].Servers[1]
	if !s1.Drained || *s1.Weight != 7 || s2.Drained || *s2.Weight != 1 {
		t.Errorf("got %+v and %+v", s1, s2)
	}
	changes := b.ChangesFrom(valid()).Attributes()
	if diff := cmp.Diff([]any{"servers_changed", "web/s1 (weight 1 to 7, drained false to true)"}, changes); diff != "" {
		t.Errorf("changes, -want +got:\n%s", diff)
	}
}

// TestOverrideOfAllServers warns if a service gets no new connections because of overrides.
func TestOverrideOfAllServers(t *testing.T) {
	b := valid()
	overrides := []Override{
		{Service: "web", Server: "s1", Drained: new(true)},
		{Service: "web", Server: "s2", Weight: new(uint32(0))},
	}
	if warnings := b.Override(overrides[:1]); warnings != nil {
		t.Errorf("one server is left: %v", warnings)
	}
	want := "overrides: all servers are now drained or have weight 0: service web gets no new connections"
	if diff := cmp.Diff(want, valid().Override(overrides).Error()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
