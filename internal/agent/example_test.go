// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// TestExample checks that two agents process the packets of the specification's example as the
// specification says. Both are busy. The first one passes the connection on, the second one hands
// it back, and the first one must accept it.
func TestExample(t *testing.T) {
	examples := packettest.Examples(t, "../../docs/understand/protocol.md")
	k, s := testKernel(t), newStage(t)
	cfg := leastConfig(desired.SRv6Insert)
	cfg.Services = cfg.Services[:2]
	for i, vip := range []string{"2001:db8:80::1", "203.0.113.1"} {
		address := netip.MustParseAddr(vip)
		if address != vip6.Addr() {
			s.have(address)
		}
		s.listen(netip.AddrPortFrom(address, 80))
		cfg.Services[i].VIP, cfg.Services[i].Port = address, 80
	}
	cfg.Services[1].Encapsulation = desired.SRv6Encap
	be := func(server int, busy uint32) {
		cfg.Node.Locator = srv6.Parse(candidateSID(server, srv6.Host, srv6.Offer{})).Locator
		testhost.Must(t, k.write(newTableContent(cfg, mtu)))
		setLoads(t, k, cfg, &accept.Load{Busy: busy, Capacity: 2})
	}
	for _, way := range []string{"insert", "encap"} {
		frame := func(step string) []byte {
			return examples[way+" "+step].Frame(t, hostMAC, [6]byte{2, 0, 0, 0, 0, 1})
		}
		arrives := func(step string) (out []byte) {
			s.do(func() error {
				_, out = runAgent(t, k, frame(step))
				return nil
			})
			return out
		}
		delivered := func(step string) {
			want, err := packet.Decapsulate(frame(step))
			testhost.Must(t, err)
			if out := arrives(step); !bytes.Equal(want, out) {
				t.Errorf("%s %s is delivered as %x, want %x", way, step, out, want)
			}
		}
		be(1, 3)
		examples[way+" 3"].Check(t, arrives("2"))
		be(2, 4)
		examples[way+" 4"].Check(t, arrives("3"))
		be(1, 3)
		delivered("4")
		_, out := transmit(t, k, frame("5"), 0)
		examples[way+" 6"].Check(t, out)
		delivered("9")
	}
}

// TestCookieExample checks that the agent writes and takes the cookie as the specification's
// example shows.
func TestCookieExample(t *testing.T) {
	examples := packettest.Examples(t, "../../docs/understand/protocol.md")
	k, s := testKernel(t), newStage(t)
	testhost.Must(t, k.write(newTableContent(leastConfig(desired.SRv6Insert), mtu)))
	f := flow{netip.MustParseAddrPort("[2001:db8:c::2]:40000"), vip6}
	s.actAs(f.client.Addr())
	s.connect(f, s.listen(vip6))
	frame := func(step string) []byte { return examples["cookie "+step].Frame(t, hostMAC, [6]byte{2, 0, 0, 0, 0, 1}) }
	offer := srv6.Offer{Column: 5, Cookie: 3}
	if got := candidateSID(1, srv6.ConnectAvail, offer); got != netip.MustParseAddr("fd00:5:0:1:1:a600::") {
		t.Errorf("the offer's SID is %v", got)
	}
	testhost.Must(t, k.objects.CookiesUsed.Put(uint32(0), uint32(1)))
	entry := cookieFlow(cookie{3, 5}, netip.PrefixFrom(balancer1, 64), desired.SRv6Insert, true)
	tableOf(t, k).put(f, tableFlow{remembered: entry})
	_, out := transmit(t, k, frame("1"), 0)
	examples["cookie 2"].Check(t, out)
	s.do(func() error {
		_, out = runAgent(t, k, frame("4"))
		return nil
	})
	examples["cookie 5"].Check(t, out)
}
