// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestValidateOverrides(t *testing.T) {
	drained := Fields{"drained": true}
	overrides := Overrides{[]Override{
		{Service: "web", Server: "s1", Set: drained},
		{Service: "web", Server: "s1", Set: drained},
		{Service: "web", Server: "s2"},
		{Server: "s3", Set: drained},
		{Service: "web", Set: Fields{"servers": []any{}}},
		{Service: "old", Remove: true, Set: drained},
		{Service: "new", Add: Fields{"name": "other"}},
		{Service: "new", Server: "a b", Add: Fields{"weight": 1}},
		{Service: "new", Server: "s4", Add: Fields{}, Set: drained},
	}}
	want := `overrides[1]: web/s1 is already in overrides[0]
overrides[2]: must have add, set or remove
overrides[3].service: required
overrides[4].set.servers: each server needs an override of its own
overrides[5]: must not have both remove and another change
overrides[6].add.name: a name cannot be changed
overrides[7].server: must have only printable characters, and no spaces
overrides[8].add: must have fields`
	if diff := cmp.Diff(want, overrides.Validate().Error()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestOverrideString(t *testing.T) {
	for want, o := range map[string]Override{
		"web/s1 (drained, weight 10)":        {Service: "web", Server: "s1", Set: Fields{"weight": 10, "drained": true}},
		"web/s2 (added, not drained)":        {Service: "web", Server: "s2", Add: Fields{}, Set: Fields{"drained": false}},
		"old (removed)":                      {Service: "old", Remove: true},
		"web (default selection, timeouts)":  {Service: "web", Set: Fields{"timeouts": map[string]any{"new": "5s"}, "selection": nil}},
		"web (candidates 4, placement hunt)": {Service: "web", Set: Fields{"placement": "hunt", "candidates": 4}},
	} {
		if got := o.String(); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func TestSummaryOfChanges(t *testing.T) {
	many := Changes{{"servers_added", make(Names, 250)}, {"services_removed", Names{"web"}}}
	lines := many.Summary()
	if len(lines) != 101 || lines[100] != "and 151 more" {
		t.Errorf("%d lines, the last is %q", len(lines), lines[len(lines)-1])
	}
	few := Changes{{"servers_changed", Names{"web/s1 (weight 1 to 2)"}}}.Summary()
	if diff := cmp.Diff([]string{"server web/s1 (weight 1 to 2) changed"}, few); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
