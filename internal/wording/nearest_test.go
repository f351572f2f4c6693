// SPDX-License-Identifier: Apache-2.0

package wording

import "testing"

func TestName(t *testing.T) {
	names := []string{"add", "list", "remove", "reset", "set", "status", "services", "name", "node"}
	for _, test := range []struct{ word, want string }{
		{"lst", "list"}, {"lsit", "list"}, {"statsu", "status"}, {"stat", "status"}, {"remvoe", "remove"},
		{"service", "services"}, {"services", "services"}, {"rest", "reset"}, {"sett", "set"},
		{"noed", "node"}, {"", ""}, {"x", ""}, {"xyz", ""}, {"delete", ""}, {"st", "set"},
		{"st\xff", ""}, {"servant", ""},
	} {
		if got := Nearest(test.word, names...); got != test.want {
			t.Errorf("%q: nearest is %q, want %q", test.word, got, test.want)
		}
	}
	if got := Nearest("list"); got != "" {
		t.Errorf("nearest of no names: %q", got)
	}
}
