// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// The flow's number is added to the client's address inside the server's encapsulation.
func TestFlowsOfSignals(t *testing.T) {
	for f, want := range map[family]string{ipv4: "10.0.0.7", ipv6: "2001:db8:c::7"} {
		c := signalCase(usual(f, desired.TCP), 1, 1)
		frame := append([]byte(nil), c.traffic.frame...)
		frame[c.traffic.flowOffset+3] += 7
		returned, err := packet.Return(frame, hostMAC)
		testhost.Must(t, err)
		decoded, err := packet.Decode(returned)
		testhost.Must(t, err)
		if got := decoded.Headers[len(decoded.Headers)-1].Destination; got != netip.MustParseAddr(want) {
			t.Errorf("%s: flow 7 is of client %v, want %s", f, got, want)
		}
	}
}
