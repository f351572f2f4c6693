// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

// TestProxies has proxies in the balancers' place. For clients, a service stays the same: its
// address, all of its servers, and every byte in both directions.
func TestProxies(t *testing.T) {
	t.Parallel()
	for _, proxy := range []lab.Proxy{
		{Program: lab.ProxyHAProxy, Algorithm: "leastconn"},
		{Program: lab.ProxyNginx, Algorithm: "least_conn"},
	} {
		t.Run(string(proxy.Program), func(t *testing.T) {
			t.Parallel()
			testhost.NeedCommand(t, string(proxy.Program), string(proxy.Program))
			topology := topology("http6-insert", "http4-ipip")
			for i, s := range topology.Services {
				topology.Services[i] = lab.Service{
					Name: s.Name, VIP: s.VIP, Port: s.Port, Protocol: desired.TCP,
				}
			}
			topology.Services[1].Port = 8080
			topology.Servers, topology.Proxy = 2, proxy
			l := build(t, topology, segue)
			c := newClient(l)
			must(t, c.spread(t.Context(), nodes(l, lab.RoleServer)...))
			for _, s := range l.Topology.Services {
				must(t, c.download(t.Context(), s, 1e6))
				must(t, c.upload(t.Context(), s, 1e6))
			}
		})
	}
}
