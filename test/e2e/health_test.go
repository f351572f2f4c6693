// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/lab"
)

// TestUnhealthyServersAreAvoided stops a server's nginx, and starts it again.
func TestUnhealthyServersAreAvoided(t *testing.T) {
	checked := topology(mixed...)
	for i := range checked.Services {
		checked.Services[i].Health = &config.Health{
			HTTP:     &config.HTTPCheck{Path: "/healthz"},
			Interval: 500 * time.Millisecond, Rise: 2, Fall: 2,
		}
	}
	l := up(t, checked)
	live := open(t, l, 200, l.Topology.Services...)
	c := newClient(l)
	must(t, l.Process("s1", "nginx").Stop())
	eventually(t, func() error { return c.spread(t.Context(), "s2", "s3") })
	must(t, c.spread(t.Context(), "s2", "s3"))
	live.rounds(t, 1)
	live.requireUnbroken(t, "s1")

	must(t, l.Process("s1", "nginx").Start(t.Context()))
	eventually(t, func() error { return c.spread(t.Context(), nodes(l, lab.RoleServer)...) })
	live.rounds(t, 1)
	live.requireUnbroken(t, "s1")
	requireNoDrops(t, l)
}
