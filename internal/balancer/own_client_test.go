// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
)

// ownAddresses are those of the balancer's first two interfaces.
var ownAddresses = []string{"fd00:9:0::1", "fd00:9:1::1", "10.9.0.1", "10.9.1.1"}

// A server's packet to a client on the balancer's own host is delivered there, whichever interface
// has the client's address.
func TestReturnToOwnHost(t *testing.T) {
	t.Parallel()
	for way := range tcWays {
		for _, interfaces := range [][]string{{"eth0"}, {"eth0", "eth1"}} {
			t.Run(fmt.Sprint(way, interfaces), func(t *testing.T) {
				t.Parallel()
				n := newFabric(t, way, interfaces...)
				var all []netip.Addr
				for _, address := range ownAddresses {
					all = append(all, netip.MustParseAddr(address))
				}
				n.must(n.balancer.follow(nexthop.Update{Own: n.own, Hops: n.balancer.hops, Addresses: all}))
				for service, kind := range map[string]desired.Encapsulation{
					"insert": desired.SRv6Insert, "web": desired.SRv6Encap, "web4": desired.SRv6Encap,
				} {
					flow := hunted[service]
					for _, client := range all {
						if client.Is4() == flow.Source.Addr().Is4() {
							flow.Source = netip.AddrPortFrom(client, flow.Source.Port())
							n.requireDelivery(kind, flow)
						}
					}
					n.requireReturn(service) // to another client
				}
			})
		}
	}
}

// requireDelivery makes a server send a signal to a client on the balancer's own host, and requires
// that the host gets the packet that the signal was on.
func (n *fabric) requireDelivery(kind desired.Encapsulation, flow dataplane.Flow) {
	n.t.Helper()
	family := unix.AF_INET6
	if flow.Source.Addr().Is4() {
		family = unix.AF_INET
	}
	var in int
	n.in(n.near, func() (err error) {
		if in, err = unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP); err != nil {
			return err
		}
		return unix.SetsockoptTimeval(in, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1})
	})
	defer unix.Close(in)
	frame, out := n.signalOf(kind, flow)
	segment := out[len(out)-20:]
	n.sendUntil(n.routers[n.own[len(n.own)-1].Name], frame, in, func(got []byte) bool {
		return bytes.HasSuffix(got, segment)
	})
}
