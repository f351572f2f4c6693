// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// The flags in the answer to a probe.
const (
	answersServed   = 1
	answersRefusing = 3
)

const protocolTCP, protocolUDP = 6, 17

// answerFlags returns the flags with which the agent answers a probe about a service.
func (s *stage) answerFlags(k *kernel, service netip.AddrPort, protocol uint8) (flags byte) {
	s.t.Helper()
	frame := wrap(packet.ServiceProbe(sender, service, protocol, 1), srv6Encap(desired.SRv6Encap, sidOf(sid, probe)))
	s.do(func() error {
		verdict, out := runAgent(s.t, k, frame)
		if verdict != xdpPass || len(out) < 5 {
			return fmt.Errorf("a probe about %v: verdict %d, %x", service, verdict, out)
		}
		flags = out[len(out)-5]
		return nil
	})
	return flags
}

func (s *stage) expectFlags(when string, k *kernel, service netip.AddrPort, want byte) {
	s.t.Helper()
	if got := s.answerFlags(k, service, protocolTCP); got != want {
		s.t.Errorf("%s: the answer about %v has the flags %d, want %d", when, service, got, want)
	}
}

// open starts an application that accepts no connection. The test closes the listener.
func (s *stage) open(address netip.AddrPort) (listener net.Listener) {
	s.t.Helper()
	s.do(func() (err error) {
		var config net.ListenConfig
		config.SetMultipathTCP(address.Addr().Is6())
		listener, err = config.Listen(s.t.Context(), "tcp", address.String())
		return err
	})
	s.t.Cleanup(func() { _ = listener.Close() })
	return listener
}

// refusalTo is the reset with which a host answers a SYN if no socket listens.
func refusalTo(client, service netip.AddrPort) []byte {
	return packet.TCP(service, client, packet.Flags(packet.RST|packet.ACK), packet.Sequence(0, 1001))
}

// The agent tells that an application refuses connections if it has listened, listens no more, and
// the host has refused a client since.
func TestApplicationStopsListening(t *testing.T) {
	s, k := newStage(t), testKernel(t)
	for _, c := range []struct{ client, vip, other netip.AddrPort }{
		{client4, vip4, netip.AddrPortFrom(vip4.Addr(), 8080)},
		{client6, vip6, netip.AddrPortFrom(vip6.Addr(), 8080)},
	} {
		refusal := refusalTo(c.client, c.vip)
		send := func(frame []byte) {
			t.Helper()
			if _, out := transmit(t, k, frame, 0); !bytes.Equal(out[:len(frame)], frame) {
				t.Errorf("the packet was changed: %x", out)
			}
		}
		s.expectFlags("the application has not started", k, c.vip, answersServed)
		send(refusal)
		s.expectFlags("it has not started, and a client was refused", k, c.vip, answersServed)

		listener := s.open(c.vip)
		send(refusal)
		s.expectFlags("it listens", k, c.vip, answersServed)
		_ = listener.Close()
		s.expectFlags("it listens no more, but no client was refused", k, c.vip, answersServed)

		for what, frame := range map[string][]byte{
			"reset of a segment with an acknowledgement": packet.TCP(c.vip, c.client,
				packet.Flags(packet.RST), packet.Sequence(0, 0)),
			"reset in a connection": packet.TCP(c.vip, c.client,
				packet.Flags(packet.RST|packet.ACK), packet.Sequence(1000, 1001)),
			"SYN-ACK with the number 0": packet.TCP(c.vip, c.client,
				packet.Flags(packet.SYN|packet.ACK), packet.Sequence(0, 1001)),
			"refusal of another port": refusalTo(c.client, c.other),
			"refusal by a client":     refusalTo(c.vip, c.client),
		} {
			transmit(t, k, frame, 0)
			s.expectFlags(what, k, c.vip, answersServed)
		}
		transmitAs(t, k, refusal, map[int]uint32{ingressIfindexAt: 1})
		s.expectFlags("another host's refusal that this host forwards", k, c.vip, answersServed)

		send(refusal)
		s.expectFlags("it refuses clients", k, c.vip, answersRefusing)
		s.expectFlags("another balancer asks", k, c.vip, answersRefusing)
		s.expectFlags("another port of the VIP", k, c.other, answersServed)
		s.expectFlags("a service of all ports", k, netip.AddrPortFrom(c.vip.Addr(), 0), answersServed)
		if got := s.answerFlags(k, c.vip, protocolUDP); got != answersServed {
			t.Errorf("a service of UDP: flags %d", got)
		}

		listener = s.open(c.vip)
		s.expectFlags("it listens again", k, c.vip, answersServed)
		_ = listener.Close()
		s.expectFlags("it stops again, and nobody was refused since", k, c.vip, answersServed)
		send(refusal)
		s.expectFlags("it refuses again", k, c.vip, answersRefusing)
	}
}

// An offer that the agent passes on because the application does not listen counts like a refusal.
func TestOffersToStoppedApplication(t *testing.T) {
	s, k := newStage(t), testKernel(t)
	offer := wrap(packet.TCP(client6, vip6, packet.Flags(packet.SYN)),
		srv6Encap(desired.SRv6Encap, sidOf(sid, connectAvail), nextSID))
	pass := func(want string) {
		t.Helper()
		s.do(func() error {
			before := counters(t, k)
			run(t, k.objects.XdpAgent, offer)
			if got := changed(before, counters(t, k)); got[want].Packets != 1 {
				return fmt.Errorf("the offer is counted as %v, want %s", got, want)
			}
			return nil
		})
	}
	listener := s.open(vip6)
	s.expectFlags("it listens", k, vip6, answersServed)
	pass("deliver_srv6_encap")
	_ = listener.Close()
	s.expectFlags("no offer since", k, vip6, answersServed)
	s.do(func() error {
		_, err := dryRunOf(t, k).decide(offer)
		return err
	})
	s.expectFlags("a dry run", k, vip6, answersServed)
	pass("next_refused")
	s.expectFlags("an offer was passed on", k, vip6, answersRefusing)

	listener = s.open(vip6)
	s.expectFlags("it listens again", k, vip6, answersServed)
	_ = listener.Close()
	offer = offered(desired.SRv6Encap, flow{client6, vip6},
		[]netip.Addr{candidateSID(9, srv6.ConnectAvail, told(0, 9, 2)), sidOf(sid, connectAvail)}, 1)
	cfg := huntingConfig(desired.SRv6Encap, desired.Accept{Policy: desired.AcceptAlways}, desired.NotLocalDrop)
	testhost.Must(t, k.write(newTableContent(cfg, mtu)))
	s.expectFlags("no offer to the last candidate since", k, vip6, answersServed)
	pass("next_returned")
	s.expectFlags("the last candidate has handed an offer back", k, vip6, answersRefusing)
}

// A dry run of a probe does not note that the application listens.
func TestDryRunNotesNoListener(t *testing.T) {
	s, k := newStage(t), testKernel(t)
	s.open(vip6)
	frame := wrap(packet.ServiceProbe(sender, vip6, protocolTCP, 1), srv6Encap(desired.SRv6Encap, sidOf(sid, probe)))
	s.do(func() error {
		_, err := dryRunOf(t, k).decide(frame)
		return err
	})
	key := serviceKey(testConfig().Services[0])
	var state uint32
	if err := k.objects.Listeners.Lookup(key, &state); err == nil {
		t.Errorf("the state after a dry run is %d", state)
	}
	s.expectFlags("a probe", k, vip6, answersServed)
	if err := k.objects.Listeners.Lookup(key, &state); err != nil || state != 1 {
		t.Errorf("the state after a probe is %d, %v", state, err)
	}
}

// An application that moves into a container is forgotten as soon as the host forwards an answer of
// the container. The container then listens in a namespace of its own.
func TestApplicationInContainer(t *testing.T) {
	s, k := newStage(t), testKernel(t)
	for _, c := range []struct{ client, vip netip.AddrPort }{{client4, vip4}, {client6, vip6}} {
		forward := func(frame []byte) {
			t.Helper()
			if _, out := transmitAs(t, k, frame, map[int]uint32{ingressIfindexAt: 1}); !bytes.Equal(out[:len(frame)], frame) {
				t.Errorf("the packet was changed: %x", out)
			}
		}
		synAck := packet.TCP(c.vip, c.client, packet.Flags(packet.SYN|packet.ACK), packet.MSS(536))
		listener := s.open(c.vip)
		s.expectFlags("it listens", k, c.vip, answersServed)
		_ = listener.Close()
		transmit(t, k, refusalTo(c.client, c.vip), 0)
		s.expectFlags("it refuses clients", k, c.vip, answersRefusing)
		transmit(t, k, synAck, 0)
		forward(packet.TCP(c.vip, c.client, packet.Flags(packet.ACK)))
		forward(packet.TCP(c.client, c.vip, packet.Flags(packet.SYN|packet.ACK), packet.MSS(536)))
		s.expectFlags("no SYN-ACK of the service was forwarded", k, c.vip, answersRefusing)
		forward(synAck)
		s.expectFlags("a SYN-ACK was forwarded", k, c.vip, answersServed)
		transmit(t, k, refusalTo(c.client, c.vip), 0)
		s.expectFlags("the container is restarted: the host refuses for a while", k, c.vip, answersServed)
		// An application that listens here is watched, whoever sends SYN-ACKs in its name.
		listener = s.open(c.vip)
		forward(synAck)
		s.expectFlags("it listens here, and a SYN-ACK was forwarded", k, c.vip, answersServed)
		_ = listener.Close()
		transmit(t, k, refusalTo(c.client, c.vip), 0)
		s.expectFlags("it refuses clients again", k, c.vip, answersRefusing)
	}
}

// A service that is removed from the configuration is forgotten: if it comes back, its connections
// may be passed on to a container, so no socket may ever listen again.
func TestRemovedServiceIsForgotten(t *testing.T) {
	s, k := newStage(t), testKernel(t)
	listener := s.open(vip4)
	s.expectFlags("it listens", k, vip4, answersServed)
	_ = listener.Close()
	transmit(t, k, refusalTo(client4, vip4), 0)
	s.expectFlags("it refuses clients", k, vip4, answersRefusing)

	full := testConfig()
	testhost.Must(t, k.write(newTableContent(full, mtu)))
	s.expectFlags("the same configuration", k, vip4, answersRefusing)
	less := *full
	less.Services = slices.DeleteFunc(slices.Clone(full.Services), func(a desired.AgentService) bool {
		return a.VIP == vip4.Addr()
	})
	for _, cfg := range []*desired.Agent{&less, full} {
		testhost.Must(t, k.write(newTableContent(cfg, mtu)))
	}
	s.expectFlags("the service was removed and has come back", k, vip4, answersServed)
}
