// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/desired"
)

// TestPlainLinux has a kernel without an agent deliver srv6-insert, with the settings of
// docs/understand/agent.md.
func TestPlainLinux(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 1)
	n.in(n.servers[0], func() error {
		for _, name := range []string{"all", "eth0"} {
			if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/seg6_enabled", []byte("1"), 0); err != nil {
				return err
			}
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		for _, address := range []netip.Addr{serverSID(1), vip6.Addr()} {
			if err := errors.Join(netlink.AddrAdd(lo, hostAddress(address)), awaitLocal(address)); err != nil {
				return err
			}
		}
		_, everywhere, _ := net.ParseCIDR("::/0")
		return netlink.RouteReplace(&netlink.Route{Dst: everywhere, Gw: net.ParseIP("fd00:5:1::1"), AdvMSS: 1384})
	})
	n.serve(1, vip6.Addr())
	n.use(srv6Encap(desired.SRv6Insert, serverSID(1)))
	c := n.dial(vip6.Addr())
	n.echo(c, 100_000)
	if got := mss(t, c); got != 1384-12 {
		t.Errorf("MSS %d, want 1372", got)
	}
	n.echo(n.dialUDP(vip6.Addr()), 1000)
}
