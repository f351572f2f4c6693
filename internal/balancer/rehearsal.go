// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"context"
	"log/slog"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
)

// Rehearsal is a balancer without a control loop, for benchmarks and packet tests. It looks up no
// routes and checks no servers. All servers have the same next hop.
type Rehearsal struct{ balancer *Balancer }

// NewRehearsal loads the data path of a balancer. It attaches no program, and the tables contain no
// services yet. Its errors are those of New.
func NewRehearsal(
	cfg *desired.Balancer, secrets desired.Secrets, log *slog.Logger,
) (*Rehearsal, error) {
	b, err := New(cfg, secrets, log)
	if err != nil {
		return nil, err
	}
	return &Rehearsal{b}, nil
}

// Close closes the data path. A data path that was never attached is removed.
func (r *Rehearsal) Close() error { return r.balancer.Close() }

// Fill applies the configuration for test runs of the program, and returns the program. The program
// takes frames to the MAC address of the hop's link as frames to the host. Every server is reached
// by the hop. The Rehearsal owns the program and closes it. Fill returns an error if a table cannot
// be changed.
func (r *Rehearsal) Fill(hop nexthop.Hop) (*ebpf.Program, error) {
	b := r.balancer
	b.own = []nexthop.Link{hop.Link}
	if err := b.setHost(); err != nil {
		return nil, err
	}
	b.hops = r.hopsBy(hop)
	return b.plane.Objects.XdpLb, datapath.TakeOver(b.log, func(t *datapath.Takeover) error {
		return b.fill(t, withoutPrograms)
	})
}

// Attach applies the configuration and attaches the programs to the link of node.interface and, if
// it is configured, to the link of node.inside. Every server is reached by the hop. The caller must
// be in the network namespace of the links. Attach returns an error if the programs cannot be
// attached.
func (r *Rehearsal) Attach(own []nexthop.Link, hop nexthop.Hop) error {
	b := r.balancer
	return b.follow(nexthop.Update{Own: own, Hops: r.hopsBy(hop)})
}

// Program returns the program of the outside. Apply may replace it, and closes it then.
func (r *Rehearsal) Program() *ebpf.Program { return r.balancer.plane.Objects.XdpLb }

// Apply applies another configuration with the same signal keys, as Reload does. New servers have
// no next hop before Reach. Its errors are those of Reload.
func (r *Rehearsal) Apply(cfg *desired.Balancer) error {
	ended, cancel := context.WithCancel(context.Background())
	cancel() // neither the resolver nor the checker runs and takes new targets
	return r.balancer.reload(ended, cfg, r.balancer.secrets, nil)
}

// Reach gives the hop to every server, also to those that Apply has added.
func (r *Rehearsal) Reach(hop nexthop.Hop) {
	r.balancer.hops = r.hopsBy(hop)
	r.balancer.applyHops()
}

// Sweep sweeps the flow tables, as the control loop does at intervals. After Sweep, readers see the
// present numbers of flows. Sweep returns an error if the sweep cannot be run.
func (r *Rehearsal) Sweep() error { return r.balancer.sweep() }

// ForgetFlows empties the flow tables, so that further flows find room. The programs must not run
// meanwhile.
func (r *Rehearsal) ForgetFlows() {
	clear(r.balancer.plane.Flows.Entries)
	clear(r.balancer.plane.HalfOpen.Entries)
	r.balancer.plane.Loads.Clear()
}

// Constants returns the values of the variables with which other programs that use the tables must
// be loaded, by the names of the variables.
func (r *Rehearsal) Constants() map[string]any { return r.balancer.plane.Constants }

// hopsBy returns next hops by which all targets are reached through the same hop.
func (r *Rehearsal) hopsBy(hop nexthop.Hop) map[netip.Addr]nexthop.Hop {
	hops := map[netip.Addr]nexthop.Hop{}
	for _, target := range targetsOf(r.balancer.cfg) {
		hops[target] = hop
	}
	return hops
}
