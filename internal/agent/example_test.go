// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
)

// TestExample checks that two agents process the packets of the specification's example as the
// specification says. The first agent refuses the connection, and the second must accept it.
func TestExample(t *testing.T) {
	examples := packettest.Examples(t, "../../docs/protocol.md")
	k := testKernel(t)
	cfg := testConfig()
	cfg.Services = nil
	for _, s := range []desired.AgentService{
		{Name: "insert", VIP: netip.MustParseAddr("2001:db8:80::1"), Encapsulation: desired.SRv6Insert},
		{Name: "encap", VIP: netip.MustParseAddr("203.0.113.1"), Encapsulation: desired.SRv6Encap},
	} {
		s.Port, s.Protocol, s.Accept.Policy = 80, desired.TCP, desired.AcceptNever
		cfg.Services = append(cfg.Services, s)
	}
	at := func(server string) {
		cfg.Node.Locator = netip.MustParsePrefix(map[string]string{"s1": "fd00:5:0:1::/64", "s2": "fd00:5:0:2::/64"}[server])
		if err := k.write(newTableContent(cfg, mtu)); err != nil {
			t.Fatal(err)
		}
	}
	for _, way := range []string{"insert", "encap"} {
		frame := func(step string) []byte { return examples[way+" "+step].Frame(t, hostMAC, [6]byte{2, 0, 0, 0, 0, 1}) }
		at("s1")
		verdict, out := runAgent(t, k, frame("2"))
		if verdict != xdpPass {
			t.Errorf("%s 2: verdict %d", way, verdict)
		}
		examples[way+" 3"].Check(t, out)
		at("s2")
		runAgent(t, k, frame("3"))
		_, out = transmit(t, k, frame("5"), 0)
		examples[way+" 6"].Check(t, out)
		want, err := packet.Decapsulate(frame("9"))
		if err != nil {
			t.Fatal(err)
		}
		if _, out = runAgent(t, k, frame("9")); !bytes.Equal(want, out) {
			t.Errorf("%s 9 is delivered as %x, want %x", way, out, want)
		}
	}
}
