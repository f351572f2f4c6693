// SPDX-License-Identifier: Apache-2.0

package packettest

import (
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/srv6"
)

// The examples of docs/understand/protocol.md.
func TestTag(t *testing.T) {
	key := [16]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
	sender, lb := netip.MustParsePrefix("fd00:5:0:1::/64"), netip.MustParsePrefix("fd00:6c:0:1::/64")
	for _, c := range []struct {
		function    srv6.Function
		report      uint64
		client, vip string
		want        string
	}{
		{srv6.CreateStickiness, 0, "[2001:db8:c::7]:40000", "[2001:db8:80::1]:80", "fd00:6c:0:1:11:f1e:3289:1828"},
		{srv6.RemoveStickiness, 0, "203.0.113.7:40000", "198.51.100.80:80", "fd00:6c:0:1:12:6a5c:875c:f5dc"},
	} {
		tag := Tag(key, c.function, sender, c.report, netip.MustParseAddrPort(c.client), netip.MustParseAddrPort(c.vip))
		got := srv6.SID{Locator: lb, Function: c.function, Argument: tag}.Addr()
		if got.String() != c.want {
			t.Errorf("%v of %s: %v, want %s", c.function, c.client, got, c.want)
		}
	}
}
