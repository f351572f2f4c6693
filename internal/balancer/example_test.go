// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet/packettest"
)

// The balancer turns the packets of the example in the specification into those that the example
// shows.
func TestExample(t *testing.T) {
	t.Parallel()
	examples := packettest.Examples(t, "../../docs/understand/protocol.md")
	// With these names, the server with the first locator is the first candidate of these flows.
	servers := []desired.Server{srv6Server("s2", 1, 1), srv6Server("s1", 2, 1)}
	f := open(t, balancerOf(
		huntingOf(serviceOf("insert", netip.MustParseAddr("2001:db8:80::1"), 80, desired.TCP, desired.SRv6Insert, servers...),
			desired.SelectConsistent, 2),
		huntingOf(serviceOf("encap", netip.MustParseAddr("203.0.113.1"), 80, desired.TCP, desired.SRv6Encap, servers...),
			desired.SelectConsistent, 2),
	))
	for _, way := range []string{"insert", "encap"} {
		for _, step := range []struct {
			comes, leaves string
			verdict       uint32
		}{
			{"1", "2", verdictRedirect}, // the SYN is offered
			{"6", "7", verdictPass},     // a server has accepted, and its packet passes
			{"8", "9", verdictRedirect}, // the flow is known to be on that server
		} {
			verdict, out := f.exec(examples[way+" "+step.comes].Frame(t, ownMAC, [6]byte{2, 0, 0, 0, 0, 1}), nil)
			if verdict != step.verdict {
				t.Errorf("%s %s: verdict %d", way, step.comes, verdict)
			}
			examples[way+" "+step.leaves].Check(t, out)
		}
	}
}
