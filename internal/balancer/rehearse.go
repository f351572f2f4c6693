package balancer

import (
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/nexthop"
)

// Constants are what programs on the data path's tables are loaded with, by the names of variables.
func (b *Balancer) Constants() map[string]any { return b.kernel.constants }

// Rehearse readies a data path that Run has not attached for test runs of its program: frames for the
// MAC address of the hop's link are the host's, and every server is reached by the hop. The program
// belongs to the balancer.
func (b *Balancer) Rehearse(hop nexthop.Hop) (*ebpf.Program, error) {
	b.own = hop.Link
	if err := b.setHost(); err != nil {
		return nil, err
	}
	b.hops = map[netip.Addr]nexthop.Hop{}
	for _, target := range b.targets() {
		b.hops[target] = hop
	}
	b.applyHops()
	b.rebuild()
	return b.kernel.objects.XdpLb, nil
}
