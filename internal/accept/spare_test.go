// SPDX-License-Identifier: Apache-2.0

package accept

import "testing"

func TestSpare(t *testing.T) {
	free, full := Load{1, 2}, Load{2, 2}
	s := NewSpare(2)
	want := func(what string, server int32, leaveOut ...int32) {
		t.Helper()
		got, ok := s.Newest(leaveOut)
		if !ok {
			got = -1
		}
		if got != server {
			t.Errorf("%s: server %d, want %d", what, got, server)
		}
	}
	want("nobody spoke", -1)
	s.Report(1, full)
	want("nobody has a free worker", -1)
	s.Report(1, free)
	s.Report(2, free)
	want("the newest", 2)
	want("the newest of the others", 1, 2)
	want("no others", -1, 1, 2)
	s.Report(1, free)
	want("said so again", 1)
	s.Report(3, free)
	want("no room for the oldest", 1, 3)
	want("no room for the oldest", -1, 1, 3)
	s.Report(3, full)
	want("full now", 1)
	s.Forget(1)
	want("forgotten", -1)
	s = NewSpare(0)
	s.Report(1, free)
	want("no room at all", -1)
}
