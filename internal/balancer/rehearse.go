// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/nexthop"
)

// Constants are what programs on the data path's tables are loaded with, by the names of variables.
func (b *Balancer) Constants() map[string]any { return b.kernel.constants }

// Rehearse readies a data path for one interface, that nobody runs, for test runs of its program: frames for the MAC address
// of the hop's link are the host's, and every server is reached by the hop. The program belongs to the
// balancer.
func (b *Balancer) Rehearse(hop nexthop.Hop) (*ebpf.Program, error) {
	b.own = []nexthop.Link{hop.Link}
	if err := b.setHost(); err != nil {
		return nil, err
	}
	b.hops = b.hopsBy(hop)
	b.applyHops()
	return b.kernel.objects.XdpLb, b.rebuildAll()
}

// Steer attaches the data path to its only interface, in place of Run, and has every server be reached by the
// hop. The caller is in the network namespace of the interface.
func (b *Balancer) Steer(own nexthop.Link, hop nexthop.Hop) error {
	if err := b.follow(nexthop.Update{Own: []nexthop.Link{own}, Hops: b.hopsBy(hop)}); err != nil {
		return err
	}
	return b.rebuildAll()
}

// rebuildAll is a rebuild that nobody would try again.
func (b *Balancer) rebuildAll() error {
	if !b.rebuild() {
		return fmt.Errorf("%d services have no table of the servers that are reached: see the log", len(b.stale))
	}
	return nil
}

func (b *Balancer) hopsBy(hop nexthop.Hop) map[netip.Addr]nexthop.Hop {
	hops := map[netip.Addr]nexthop.Hop{}
	for _, target := range b.targets() {
		hops[target] = hop
	}
	return hops
}

// Apply makes a balancer that nobody runs follow another configuration, as Reload does with one that
// runs; servers that are new have no next hops.
func (b *Balancer) Apply(cfg *config.Balancer) error {
	ended, cancel := context.WithCancel(context.Background())
	cancel() // neither the resolver nor the checks would take note
	return b.reload(ended, cfg)
}
