// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"flag"
	"fmt"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

var untimed = flag.Int("timestamps.connections", 40,
	"connections that TestServersWithoutTimestamps opens with timestamps, and as many without")

// TestServersWithoutTimestamps switches timestamps off on half of the servers, and then on all.
// So their packets cannot have cookies. With hints and without, no connection is lost when
// servers are changed and when another balancer gets all packets.
func TestServersWithoutTimestamps(t *testing.T) {
	t.Parallel()
	topology := hunting(statelessServices(4)...)
	topology.Servers, topology.Applications = 6, []lab.Application{lab.Nginx}
	l := up(t, refusing(topology))
	all := nodes(l, lab.RoleServer)
	for _, hints := range []uint32{0, desired.DefaultHints} {
		t.Run(fmt.Sprintf("%d hints", hints), func(t *testing.T) {
			with := func(n int) func(*desired.Balancer) {
				return func(cfg *desired.Balancer) {
					cfg.Node.Limits.Hints = hints
					keepServers(cfg, all[:n]...)
				}
			}
			setTimestamps(t, l, true, all...)
			restartAnew(t, l, with(4))
			awaitServers(t, l)
			for _, off := range [][]string{all[:3], all} {
				must(t, l.SetNextHops("lb1"))
				setTimestamps(t, l, false, off...)
				live := openMixed(t, l, *untimed, l.Topology.Services...)
				reconfigure(t, l, with(4+len(off)/3))
				recoveries(t, l, "lb1", live)
				must(t, l.SetNextHops("lb2"))
				recoveries(t, l, "lb2", live)
			}
		})
	}
	requireNoDrops(t, l)
}
