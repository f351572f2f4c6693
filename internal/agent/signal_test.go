// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

const (
	createStickiness = 0x11
	removeStickiness = 0x12
)

// Each balancer gets the signal of the end once. Repetitions go to the client directly, because the
// balancer may be the reason why the first packet was lost.
func TestEndIsToldOnce(t *testing.T) {
	k := testKernel(t)
	testhost.Must(t, k.write(newTableContent(huntingConfig(desired.SRv6Encap, desired.Accept{Policy: desired.AcceptAlways}, desired.NotLocalDrop), mtu)))
	f := flow{client6, vip6}
	fin := packet.TCP(f.vip, f.client, packet.Flags(packet.FIN|packet.ACK))
	send := func(want uint32, why string) {
		t.Helper()
		if verdict, _ := transmit(t, k, fin, 0); verdict != want {
			t.Errorf("%s: the verdict is %#x, want %#x", why, verdict, want)
		}
	}
	setFlow(t, k, f, desired.SRv6Encap, "direct", 0)
	send(tcRedirect, "the end")
	send(tcUnspec, "the end once more")
	as := event{"as", ackStickiness, true, packet.ACK, 0, false}
	runAgent(t, k, as.frame(dialogue{flow: f}, desired.SRv6Encap)) // from the second balancer
	send(tcRedirect, "the end to another balancer")
	send(tcUnspec, "that once more")
}

// transmit has the data path send a frame. If gso is not 0, the interface divides the frame into
// pieces of gso bytes.
func transmit(t testing.TB, k *kernel, frame []byte, gso uint32) (uint32, []byte) {
	t.Helper()
	return transmitAs(t, k, frame, map[int]uint32{gsoSizeAt: gso})
}

// The offsets of gso_size and ingress_ifindex in struct __sk_buff.
const (
	ingressIfindexAt = 36
	gsoSizeAt        = 176
)

// transmitAs has the host send a frame. The socket buffer has the given values at some offsets, and
// 0 elsewhere.
func transmitAs(t testing.TB, k *kernel, frame []byte, buffer map[int]uint32) (uint32, []byte) {
	t.Helper()
	context := make([]byte, 192) // struct __sk_buff
	for at, value := range buffer {
		binary.NativeEndian.PutUint32(context[at:], value)
	}
	options := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: context}
	verdict, err := k.objects.TcAgent.Run(&options)
	testhost.Must(t, err)
	return verdict, options.DataOut
}

// hunt makes the network's balancer hunt. The balancer offers unknown connections to the servers in
// turn, and follows their signals. hunt returns a function that returns the signals so far.
func (n *network) hunt(kind desired.Encapsulation) func() map[uint16]int {
	n.in(n.client, func() error {
		l, err := netlink.LinkByName("vips")
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join("/proc/sys/net/ipv6/conf/all/forwarding"), []byte("1"), 0); err != nil {
			return err
		}
		_, lb, _ := net.ParseCIDR("fd00:6c::/32")
		return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: lb})
	})
	n.route(n.router, "fd00:6c::/32", "fd00:c::2")
	h := &hunting{kind: kind, servers: len(n.servers), known: map[uint16]netip.Addr{}, signals: map[uint16]int{}, tun: n.tun}
	n.mu.Lock()
	n.hunting = h
	n.mu.Unlock()
	return h.counts
}

// hunting is a balancer's table II, by the clients' ports.
type hunting struct {
	kind    desired.Encapsulation
	servers int
	tun     *os.File

	mu      sync.Mutex
	known   map[uint16]netip.Addr // the server's locator
	signals map[uint16]int
}

func (h *hunting) counts() map[uint16]int {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := map[uint16]int{}
	for function, n := range h.signals {
		out[function] = n
	}
	return out
}

// forget removes all flows, so that the balancer is like one that takes over the flows of another.
func (h *hunting) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.known)
}

// place returns the encapsulation of a client's frame.
func (h *hunting) place(frame []byte) packet.Encap {
	h.mu.Lock()
	defer h.mu.Unlock()
	e := packet.Encap{Kind: h.kind, Sender: sender}
	p, err := packet.Decode(frame)
	if err != nil {
		return e
	}
	if s, ok := h.known[p.SourcePort]; ok {
		e.Segments = []netip.Addr{sidOf(s, ackStickiness)}
		return e
	}
	function := uint16(recoverStickiness)
	if p.Flags&packet.SYN != 0 {
		function = connectAvail
	}
	for i := range h.servers {
		if function == connectAvail && i == h.servers-1 {
			function = connectForce
		}
		e.Segments = append(e.Segments, sidOf(netip.PrefixFrom(serverSID(i+1), 64).Masked().Addr(), function))
	}
	return e
}

// take reads a signal, and sends the packet with it to the client.
func (h *hunting) take(frame []byte) error {
	p, err := packet.Decode(frame)
	if err != nil {
		return err
	}
	outer := p.Headers[0]
	server := outer.Source
	if outer.SRH != nil {
		server = outer.SRH.Segments[len(outer.SRH.Segments)-1]
	}
	destination := outer.Destination.As16()
	function := binary.BigEndian.Uint16(destination[8:])
	inner, err := packet.Decapsulate(frame)
	if err != nil {
		return err
	}
	if err := packet.Verify(inner); err != nil {
		return fmt.Errorf("a signal's packet: %w", err)
	}
	h.mu.Lock()
	h.signals[function]++
	if function == createStickiness {
		h.known[p.DestinationPort] = netip.PrefixFrom(server, 64).Masked().Addr()
	}
	h.mu.Unlock()
	_, err = h.tun.Write(inner[14:])
	return err
}

// TestHunt offers real connections to real servers. The first server refuses all of them, and
// passes them on to the second. Halfway through, the balancer forgets all flows, as if flows of
// another balancer arrived.
func TestHunt(t *testing.T) {
	t.Parallel()
	testhost.NeedCgroup2(t)
	for _, c := range []struct {
		kind desired.Encapsulation
		vip  netip.Addr
	}{{desired.SRv6Insert, vip6.Addr()}, {desired.SRv6Encap, vip6.Addr()}, {desired.SRv6Encap, vip4.Addr()}} {
		t.Run(fmt.Sprintf("%s/%s", c.kind, c.vip), func(t *testing.T) {
			n := newNetwork(t, 2)
			var agents [2]*running
			for i, policy := range []desired.AcceptPolicy{desired.AcceptNever, desired.AcceptAlways} {
				cfg := n.config(i+1, c.kind, c.vip)
				cfg.Node.MTU = 1500 - 24 // the additional length of packets with recover-stickiness
				cfg.Services[0].Accept.Policy = policy
				cfg.Services[0].Load.Kind = desired.LoadConnections
				agents[i] = n.run(i+1, cfg, link.AttachTCX)
				n.serve(i+1, c.vip)
			}
			signals := n.hunt(c.kind)
			// The first SYN may wait until the new interfaces can resolve their neighbours, and be
			// repeated.
			n.echo(n.dial(c.vip), 1)
			service := agents[1].cfg.Services[0]
			var before [2]map[string]uint64
			for i, a := range agents {
				before[i] = offers(t, a.kernel, netip.AddrPortFrom(c.vip, 80))
			}
			var conns []*net.TCPConn
			for range 10 {
				conn := n.dial(c.vip)
				n.echo(conn, 100_000)
				conns = append(conns, conn)
			}
			if got := signals(); got[createStickiness] < 11 || got[removeStickiness] != 0 {
				t.Errorf("signals %v, want a create-stickiness of each connection", got)
			}
			want := [2]map[string]uint64{{"refused": 10}, {"forced": 10}}
			for i, a := range agents {
				got := offers(t, a.kernel, netip.AddrPortFrom(c.vip, 80))
				for result := range got {
					if got[result] -= before[i][result]; got[result] == 0 {
						delete(got, result)
					}
				}
				if diff := cmp.Diff(want[i], got); diff != "" {
					t.Errorf("server %d, offers (-want +got):\n%s", i+1, diff)
				}
			}
			if open := connections(t, agents[1].kernel, service); open != 11 {
				t.Errorf("%d connections open at the second server, want 11", open)
			}
			n.hunting.forget()
			for _, conn := range conns {
				n.echo(conn, 100_000)
			}
			for _, conn := range conns {
				_ = conn.Close()
			}
			eventually(t, "every end is signalled", func() bool { return signals()[removeStickiness] >= 10 })
			eventually(t, "only the first connection is open", func() bool { return connections(t, agents[1].kernel, service) == 1 })
			if open := connections(t, agents[0].kernel, service); open != 0 {
				t.Errorf("%d connections open at the first server, want none", open)
			}
		})
	}
}

func connections(t testing.TB, k *kernel, s desired.AgentService) (open int64) {
	t.Helper()
	var count agentConnectionCount
	testhost.Must(t, k.objects.Connections.Lookup(serviceKey(s), &count))
	return count.Open[0] + count.Open[1]
}

func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

// TestAcceptQueue checks that the listener's own backlog decides, also if the client's last
// connection from the same port is in TIME_WAIT.
func TestAcceptQueue(t *testing.T) {
	k := testKernel(t)
	s := newStage(t)
	var listener net.Listener
	s.do(func() (err error) { // only the first connection is accepted
		listener, err = net.Listen("tcp", vip6.String())
		return err
	})
	t.Cleanup(func() { _ = listener.Close() })
	over := s.request(flow{netip.AddrPortFrom(client6.Addr(), 50100), vip6})
	s.send(over, packet.ACK)
	c, err := listener.Accept()
	testhost.Must(t, err)
	s.close(over, c)
	two := uint32(2)
	cfg := huntingConfig(desired.SRv6Insert, desired.Accept{Policy: desired.AcceptStatic, Threshold: &two}, desired.NotLocalDrop)
	for i := range cfg.Services {
		cfg.Services[i].Load.Kind = desired.LoadAcceptQueue
	}
	testhost.Must(t, k.write(newTableContent(cfg, mtu)))
	offer := func(f flow, waiting int, want string) {
		t.Helper()
		before := offers(t, k, vip6)
		s.do(func() error {
			trace, err := tracingView(t, k).Trace(f.client, f.vip)
			if err != nil {
				return err
			}
			load := trace.Accept.Load
			if load == nil || int(load.Busy) != waiting || load.Capacity != nil {
				t.Errorf("%d waiting: traced as %+v", waiting, load)
			}
			runAgent(t, k, handshakeEvents()[0].frame(dialogue{flow: f}, desired.SRv6Insert))
			return nil
		})
		if after := offers(t, k, vip6); after[want] != before[want]+1 {
			t.Errorf("%d waiting: before %v, after %v, want one more %s", waiting, before, after, want)
		}
	}
	for waiting, want := range []string{"accepted", "accepted", "refused", "refused"} {
		f := flow{netip.AddrPortFrom(client6.Addr(), uint16(50000+waiting)), vip6}
		offer(f, waiting, want)
		d := s.request(f)
		s.send(d, packet.ACK|packet.PSH)
		s.probe(d)
	}
	offer(over.flow, 4, "refused")
}

// probe returns when the server has received the packets sent before.
func (s *stage) probe(d dialogue) {
	s.t.Helper()
	// A segment from before the window is answered by an ACK (RFC 9293 section 3.10.7.4).
	d.seq--
	frame := packet.TCP(d.client, d.vip, packet.Flags(packet.ACK), packet.Sequence(d.seq, d.ack), packet.Payload(bytes.Repeat([]byte{0}, 1)))
	if _, err := s.tun.Write(frame[14:]); err != nil {
		s.t.Fatal(err)
	}
	s.await(d, packet.ACK)
}
