// SPDX-License-Identifier: Apache-2.0

package desired

import "time"

// L2 describes how balancers that share a link with their clients or with a router announce VIPs
// there: one balancer answers ARP and neighbour solicitations for a VIP.
type L2 struct {
	// Lease is how long the others wait for a balancer that has died or has lost the store, before
	// they answer for its VIPs: 2 s to one minute, in whole seconds. Default 3 s. A change needs a
	// restart.
	Lease time.Duration `yaml:"lease"`
	// HoldDown is how long a VIP must be served again after it was given up, before the balancer may
	// answer for it: 0 to one hour. It doubles each time that soon after the VIP is given up again.
	// Default 10 s.
	HoldDown time.Duration `yaml:"hold-down"`
}

// The default times of L2.
const (
	defaultL2Lease    = 3 * time.Second
	defaultL2HoldDown = 10 * time.Second
)

// defaultL2 sets the defaults of the section l2, if there is one.
func (given Given) defaultL2(l *L2) {
	if l != nil {
		setDefault(given, "l2.lease", &l.Lease, defaultL2Lease)
		setDefault(given, "l2.hold-down", &l.HoldDown, defaultL2HoldDown)
	}
}

// checkL2 checks the section l2.
func (r *rules) checkL2(b *Balancer) {
	if b.L2 == nil {
		return
	}
	checkSeconds(r, "l2.lease", b.L2.Lease, 2*time.Second, time.Minute)
	checkRange(r, "l2.hold-down", b.L2.HoldDown, 0, time.Hour)
	switch {
	case b.BGP != nil:
		r.failf("l2", "not used with the section bgp: VIPs are announced in one way")
	case b.Node.Switch != nil:
		r.failf("l2", "not used with node.switch: the switch would not take the packets")
	}
}
