// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/packet/packettest"
)

// The example of the specification is what the balancer makes of these packets.
func TestExample(t *testing.T) {
	t.Parallel()
	examples := packettest.Examples(t, "../../docs/protocol.md")
	// Named so that the one with the first locator is the first candidate of these flows.
	servers := []config.Server{srv6Server("s2", 1, 1), srv6Server("s1", 2, 1)}
	f := open(t, balancerOf(
		huntingOf(serviceOf("insert", netip.MustParseAddr("2001:db8:80::1"), 80, config.TCP, config.SRv6Insert, servers...),
			config.SelectConsistent, 2),
		huntingOf(serviceOf("encap", netip.MustParseAddr("203.0.113.1"), 80, config.TCP, config.SRv6Encap, servers...),
			config.SelectConsistent, 2),
	))
	for _, way := range []string{"insert", "encap"} {
		for _, step := range []struct {
			comes, leaves string
			verdict       uint32
		}{
			{"1", "2", verdictRedirect}, // the SYN is offered
			{"6", "7", verdictPass},     // a server has taken it: its packet goes on
			{"8", "9", verdictRedirect}, // and is known to have it
		} {
			verdict, out := f.exec(examples[way+" "+step.comes].Frame(t, ownMAC, [6]byte{2, 0, 0, 0, 0, 1}), nil)
			if verdict != step.verdict {
				t.Errorf("%s %s: verdict %d", way, step.comes, verdict)
			}
			examples[way+" "+step.leaves].Check(t, out)
		}
	}
}
