// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
)

// A stranger who sends from chosen sources, two packets from each, does not displace another
// client's flow from its bucket, however the sources differ.
func TestChosenFlowsLeaveTheVictimsBucket(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1))
	cfg.Node.Limits = desired.Limits{Flows: 1 << 20, Servers: 64}
	f := open(t, cfg)
	for name, clients := range packettest.ClientSets() {
		victim := web
		victim.Source = clients[0]
		if victim.Source.Addr().Is4In6() {
			continue // not an address of IPv6 packets
		}
		server := serverOf(f.run(frameOf(victim, packet.Flags(packet.SYN))))
		f.run(frameOf(victim, packet.Flags(packet.ACK)))
		mates := 0
		for _, client := range clients[1:] {
			other := victim
			other.Source = client
			f.exec(frameOf(other, packet.Flags(packet.SYN)), nil)
			f.exec(frameOf(other, packet.Flags(packet.ACK)), nil)
		}
		for _, value := range f.bucket(victim) {
			if dataplane.FlowEntry(value).State() != stateFree {
				mates++
			}
		}
		// By chance, 511 flows share one of 262,144 buckets with a probability of 1/513.
		if mates--; mates < 0 || mates > 1 {
			t.Errorf("%s: %d chosen flows are in the victim's bucket", name, mates)
		}
		if got := serverOf(f.run(frameOf(victim, packet.Flags(packet.ACK)))); got != server {
			t.Errorf("%s: the victim's connection moved from %s to %s", name, server, got)
		}
		f.forgetFlows()
	}
}
