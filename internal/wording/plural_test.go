// SPDX-License-Identifier: Apache-2.0

package wording

import "testing"

func TestCount(t *testing.T) {
	for _, test := range []struct {
		n          int
		noun, want string
	}{
		{0, "server", "0 servers"},
		{1, "server", "1 server"},
		{2, "server", "2 servers"},
		{0, "process", "0 processes"},
		{1, "process", "1 process"},
		{4, "process", "4 processes"},
	} {
		if got := Count(test.n, test.noun); got != test.want {
			t.Errorf("got %q, want %q", got, test.want)
		}
	}
}
