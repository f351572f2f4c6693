// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// way is one encapsulation to server 1, and the IPv6 MSS that it leaves of an MTU of 1500 bytes.
type way struct {
	name   string
	encap  packet.Encap
	reason string
	mss6   int
}

func ways() []way {
	tunnelTo := func(kind desired.Encapsulation, source, destination string) packet.Encap {
		return packet.Encap{Kind: kind, Source: netip.MustParseAddr(source), Destination: netip.MustParseAddr(destination)}
	}
	return []way{
		{"insert", srv6Encap(desired.SRv6Insert, serverSID(1)), "deliver_srv6_insert", 1384},
		{"encap", srv6Encap(desired.SRv6Encap, serverSID(1)), "deliver_srv6_encap", 1400},
		{"gre over IPv4", tunnelTo(desired.GRE, "10.0.0.2", "10.0.1.2"), "deliver_gre", 1396},
		{"gre over IPv6", tunnelTo(desired.GRE, "fd00:c::2", "fd00:5:1::2"), "deliver_gre", 1396},
		{"ipip over IPv4", tunnelTo(desired.IPIP, "10.0.0.2", "10.0.1.2"), "deliver_ipip", 1400},
		{"ipip over IPv6", tunnelTo(desired.IPIP, "fd00:c::2", "fd00:5:1::2"), "deliver_ipip", 1400},
	}
}

// TestDelivers uses real connections in every encapsulation, with both ways to attach to tc.
func TestDelivers(t *testing.T) {
	t.Parallel()
	for name, attachTCX := range map[string]func(link.TCXOptions) (link.Link, error){
		"tcx": link.AttachTCX, "clsact": noTCX,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNetwork(t, 1)
			cfg := n.config(1, desired.SRv6Encap, vip4.Addr(), vip6.Addr())
			a := n.run(1, cfg, attachTCX)
			n.serve(1, vip4.Addr())
			n.serve(1, vip6.Addr())
			for _, w := range ways() {
				n.use(w.encap)
				next := n.config(1, w.encap.Kind, vip4.Addr(), vip6.Addr())
				testhost.Must(t, a.Reload(t.Context(), next, desired.Secrets{}))
				for _, vip := range []netip.Addr{vip4.Addr(), vip6.Addr()} {
					if vip.Is4() && w.encap.Kind == desired.SRv6Insert {
						continue
					}
					t.Run(fmt.Sprintf("%s/%s", w.name, vip), func(t *testing.T) {
						n.deliver(t, a.Agent, w, vip)
					})
				}
			}
		})
	}
}

// deliver sends and receives data in an encapsulation, and checks the MSS and the counters.
func (n *network) deliver(t *testing.T, a *Agent, w way, vip netip.Addr) {
	outer := n.t
	n.t = t
	defer func() { n.t = outer }()
	before := counters(t, a.kernel)
	c := n.dial(vip)
	n.echo(c, 300_000)
	want := w.mss6
	if vip.Is4() {
		want += 20
	}
	if got := mss(t, c) + 12; got != want { // the timestamps take 12 bytes
		t.Errorf("MSS %d, want %d", got, want)
	}
	n.echo(n.dialUDP(vip), 1000)
	after := changed(before, counters(t, a.kernel))
	if after[w.reason].Packets < 200 {
		t.Errorf("counters %v: want hundreds of %s", after, w.reason)
	}
	if after["syn_ack_clamped"].Packets == 0 {
		t.Errorf("counters %v: want a SYN-ACK clamped", after)
	}
	for reason := range after {
		if strings.HasPrefix(reason, "drop_") {
			t.Errorf("counters %v: want no drops", after)
		}
	}
}

// TestNextSegment sends packets through a server that does not have the VIP and has no neighbour
// entries yet.
func TestNextSegment(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 2)
	first := n.run(1, n.config(1, desired.SRv6Encap), link.AttachTCX)
	cfg := n.config(2, desired.SRv6Encap, vip4.Addr(), vip6.Addr())
	cfg.Node.MTU = 1460 // every packet lists two servers here
	second := n.run(2, cfg, link.AttachTCX)
	n.serve(2, vip4.Addr())
	n.serve(2, vip6.Addr())
	for _, c := range []struct {
		kind desired.Encapsulation
		vip  netip.Addr
	}{{desired.SRv6Insert, vip6.Addr()}, {desired.SRv6Encap, vip6.Addr()}, {desired.SRv6Encap, vip4.Addr()}} {
		t.Run(fmt.Sprintf("%s/%s", c.kind, c.vip), func(t *testing.T) {
			outer := n.t
			n.t = t
			defer func() { n.t = outer }()
			n.use(srv6Encap(c.kind, serverSID(1), serverSID(2)))
			before1, before2 := counters(t, first.kernel), counters(t, second.kernel)
			n.echo(n.dialUDP(c.vip), 1000)
			n.echo(n.dial(c.vip), 300_000)
			on, off := changed(before1, counters(t, first.kernel)), changed(before2, counters(t, second.kernel))
			if on["next_segment"].Packets < 10 {
				t.Errorf("counters of the first server: %v", on)
			}
			if delivered := off["deliver_"+strings.ReplaceAll(string(c.kind), "-", "_")]; delivered.Packets < 10 {
				t.Errorf("counters of the second server: %v", off)
			}
		})
	}
}

// A list that names two servers in turn makes them pass a packet to and fro. Balancers name at most
// ten servers, so a packet with a longer list is dropped where it arrives, and any packet makes at
// most nine more.
func TestListsDoNotBounce(t *testing.T) {
	k := testKernel(t)
	for n, want := range map[int]int{2: 1, 9: 8, 10: 9, 11: 0, 12: 0, 90: 0} {
		for name, encap := range map[string]packet.Encap{
			"insert": srv6Encap(desired.SRv6Insert, bouncing(n)...), "encap": srv6Encap(desired.SRv6Encap, bouncing(n)...),
			"whole": whole(srv6Encap(desired.SRv6Encap, bouncing(n)...)),
		} {
			frame, passedOn, before := to(client6, other6, encap), 0, counters(t, k)
			for range 2 * n {
				here := frame[14+24:] // the destination is the server that gets the packet
				testhost.Must(t, k.objects.NodeLocator.Set(binary.NativeEndian.Uint64(here)))
				verdict, out := runAgent(t, k, frame)
				if verdict != xdpPass {
					break
				}
				passedOn, frame = passedOn+1, out
			}
			if got := int(changed(before, counters(t, k))["next_segment"].Packets); passedOn != want || got != want {
				t.Errorf("%s, list of %d servers: passed on %d times (counted %d), want %d", name, n, passedOn, got, want)
			}
		}
	}
}

// TestNextSegmentBehindVLAN checks that the tc program ignores packets that XDP did not check. The
// kernel removes the VLAN tag before tc.
func TestNextSegmentBehindVLAN(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 2)
	first := n.run(1, n.config(1, desired.SRv6Encap), link.AttachTCX)
	second := n.run(2, n.config(2, desired.SRv6Encap, vip6.Addr()), link.AttachTCX)
	router := packet.MAC{2, 0, 0, 0, 9, 9}
	server := packet.MAC(first.link.mac[:])
	way := srv6Encap(desired.SRv6Encap, serverSID(1), serverSID(2))
	const hopLimit = 4 + 7 // after the tag
	tagged := set(to(client6, vip6, way, packet.VLAN(7)), hopLimit, 1)
	for _, frame := range [][]byte{tagged, to(client6, vip6, way)} {
		n.send(n.router, "server1", packet.SetMACs(frame, router, server))
	}
	n.await("the packet without a tag", func() bool {
		return counters(t, second.kernel)["deliver_srv6_encap"].Packets > 0
	})
	got := counters(t, first.kernel)
	if got["pass_not_ip"].Packets == 0 || got["next_segment"].Packets != 1 || got["drop_rewrite"].Packets != 0 {
		t.Errorf("counters of the first server: %v", got)
	}
}

// send sends a frame from an interface.
func (n *network) send(ns *testhost.Namespace, iface string, frame []byte) {
	n.t.Helper()
	n.in(ns, func() error {
		device, err := net.InterfaceByName(iface)
		if err != nil {
			return err
		}
		socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		return errors.Join(unix.Sendto(socket, frame, 0, &unix.SockaddrLinklayer{Ifindex: device.Index}), unix.Close(socket))
	})
}
