// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

// TestDetachRefuses what is no instance of the role, before it locks or removes anything.
func TestDetachRefuses(t *testing.T) {
	for _, role := range []string{"lb", "agent"} {
		for name, want := range map[string]string{
			"":                 "letters, digits",
			"..":               "letters, digits",
			"../../../../tmp":  "letters, digits",
			"no-such-instance": "",
		} {
			root := newRoot()
			root.SetArgs([]string{role, "detach", name})
			if err := root.Execute(); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("segue %s detach %q: error %v, want %q", role, name, err, want)
			}
		}
	}
}
