// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// presenceTest is a server whose state is read in its network namespace.
type presenceTest struct {
	*stage
	k *kernel
}

func newPresenceTest(t *testing.T) *presenceTest {
	t.Helper()
	p := &presenceTest{newStage(t), testKernel(t)}
	testhost.Must(t, pinAll(p.k))
	return p
}

// states returns the services as a view shows them.
func (p *presenceTest) states(v *View) map[string]Presence {
	p.t.Helper()
	states := map[string]Presence{}
	p.do(func() error {
		services, err := v.services()
		for _, s := range services {
			states[s.Name] = s.Presence
		}
		return err
	})
	return states
}

func (p *presenceTest) expect(when, service string, want Presence) {
	p.t.Helper()
	if got := p.states(p.k.view())[service]; got != want {
		p.t.Errorf("%s: service %s is %+v, want %+v", when, service, got, want)
	}
}

// tell tells the data path whether a VIP is an address of the host, as followVIPs does.
func (p *presenceTest) tell(vip netip.Addr, present bool) {
	p.t.Helper()
	testhost.Must(p.t, p.k.setPresent(vip, present))
}

// remove removes a VIP from the host.
func (p *presenceTest) remove(vip netip.Addr) {
	p.t.Helper()
	p.do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.AddrDel(lo, hostAddress(vip))
	})
}

// The agent shows whether its application listens, and that it tells balancers when the application
// stops.
func TestPresenceOfAnApplication(t *testing.T) {
	p := newPresenceTest(t)
	for _, c := range []struct {
		service     string
		client, vip netip.AddrPort
	}{{"insert", client6, vip6}, {"gre", client4, vip4}} {
		refusal := refusalTo(c.client, c.vip)
		p.expect("before the start", c.service, Presence{true, ListeningNo, ConditionUp})
		listener := p.open(c.vip)
		p.expect("listening", c.service, Presence{true, ListeningYes, ConditionUp})
		p.answerFlags(p.k, c.vip, protocolTCP)
		_ = listener.Close()
		p.expect("stopped", c.service, Presence{true, ListeningNo, ConditionUp})
		transmit(t, p.k, refusal, 0)
		p.expect("a client was refused", c.service, Presence{true, ListeningNo, ConditionRefusing})
		listener = p.open(c.vip)
		p.expect("listening again", c.service, Presence{true, ListeningYes, ConditionUp})
		_ = listener.Close()
	}
	p.expect("a service of all ports", "all", Presence{true, "", ConditionUp})
}

// An application in a container has no socket here. The host forwards its SYN-ACKs, until the
// container ends and the host refuses connections.
func TestPresenceOfAContainer(t *testing.T) {
	p := newPresenceTest(t)
	for _, c := range []struct {
		service     string
		client, vip netip.AddrPort
	}{{"insert", client6, vip6}, {"gre", client4, vip4}} {
		synAck := packet.TCP(c.vip, c.client, packet.Flags(packet.SYN|packet.ACK))
		forward := func() { transmitAs(t, p.k, synAck, map[int]uint32{ingressIfindexAt: 1}) }
		listener := p.open(c.vip)
		p.answerFlags(p.k, c.vip, protocolTCP)
		_ = listener.Close()
		forward()
		p.expect("in a container", c.service, Presence{true, ListeningElsewhere, ConditionUp})
		forward()
		p.expect("still there", c.service, Presence{true, ListeningElsewhere, ConditionUp})
		transmit(t, p.k, refusalTo(c.client, c.vip), 0)
		p.expect("the container has ended", c.service, Presence{true, ListeningNo, ConditionUp})
		forward()
		p.expect("it has started again", c.service, Presence{true, ListeningElsewhere, ConditionUp})
		p.expectFlags("it has started again", p.k, c.vip, answersServed)
	}
	other := packet.TCP(netip.AddrPortFrom(vip6.Addr(), 99), client6, packet.Flags(packet.SYN|packet.ACK))
	transmitAs(t, p.k, other, map[int]uint32{ingressIfindexAt: 1})
	var state uint32
	service := desired.AgentService{VIP: vip6.Addr(), Port: 99, Protocol: desired.TCP}
	if known, err := find(p.k.objects.Listeners, serviceKey(service), &state); known || err != nil {
		t.Errorf("a port without a service has the state %d, %v", state, err)
	}
}

// A VIP that is gone is shown at once, and what balancers are told follows. A trace says that no
// packet reaches the listening socket.
func TestPresenceOfAVIP(t *testing.T) {
	p := newPresenceTest(t)
	p.open(vip6)
	p.expect("all is well", "insert", Presence{true, ListeningYes, ConditionUp})
	p.remove(vip6.Addr())
	p.expect("the VIP is gone", "insert", Presence{false, ListeningYes, ConditionUp})
	p.tell(vip6.Addr(), false)
	p.expect("balancers are told", "insert", Presence{false, ListeningYes, ConditionNotServed})
	p.expect("another VIP", "all", Presence{true, "", ConditionUp})
	p.do(func() error {
		trace, err := tracingView(t, p.k).Trace(client6, vip6)
		if err == nil && !trace.LacksVIP() {
			t.Errorf("the trace says %+v", trace.Presence)
		}
		return err
	})
	elsewhere := p.k.view()
	elsewhere.here = false
	if got, want := p.states(elsewhere)["insert"], (Presence{false, "", ConditionNotServed}); got != want {
		t.Errorf("from another network namespace: %+v, want %+v", got, want)
	}
	p.have(vip6.Addr())
	p.tell(vip6.Addr(), true)
	p.expect("the VIP is back", "insert", Presence{true, ListeningYes, ConditionUp})
	p.do(func() error {
		trace, err := tracingView(t, p.k).Trace(client6, vip6)
		if err == nil && trace.LacksVIP() {
			t.Errorf("the VIP is back, and the trace says %+v", trace.Presence)
		}
		return err
	})
}

func TestPresenceOfUDP(t *testing.T) {
	p := newPresenceTest(t)
	p.expect("no socket", "udp", Presence{true, ListeningNo, ConditionUp})
	for _, address := range []netip.Addr{vip6.Addr(), netip.IPv6Unspecified()} {
		var socket net.PacketConn
		p.do(func() (err error) {
			socket, err = net.ListenPacket("udp", netip.AddrPortFrom(address, 53).String())
			return err
		})
		p.expect("a socket", "udp", Presence{true, ListeningYes, ConditionUp})
		_ = socket.Close()
		p.expect("the socket is closed", "udp", Presence{true, ListeningNo, ConditionUp})
	}
}
