// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"testing"

	"github.com/segue-lb/segue/lab"
)

// TestPlainLinuxServers uses servers without an agent. The kernel's own segment routing processes
// the packets.
func TestPlainLinuxServers(t *testing.T) {
	t.Parallel()
	l := up(t, topology("http6-insert", "echo6-insert"))
	for _, name := range nodes(l, lab.RoleServer) {
		must(t, l.Process(name, "agent").Stop())
		command(t, l, name, segue, "agent", "detach", l.Node(name).Instance())
		command(t, l, name, "sysctl", "-w", "net.ipv6.conf.all.seg6_enabled=1", "net.ipv6.conf.eth0.seg6_enabled=1")
		for _, address := range []string{deliverAt(l.Node(name)).String(), l.Topology.Services[0].VIP.String()} {
			command(t, l, name, "ip", "addr", "add", address+"/128", "dev", "lo", "nodad")
		}
	}
	must(t, newClient(l).spread(t.Context(), nodes(l, lab.RoleServer)...))
	transfer(t, l, service(t, l, "http6-insert"))
	_, err := newClient(l).echo(t.Context(), service(t, l, "echo6-insert"), lab.Content(1200))
	must(t, err)
}
