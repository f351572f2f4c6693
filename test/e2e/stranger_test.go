// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/lab"
)

// TestStrangersForgeNoSignals makes a neighbour on the fabric, s3, try to make s1 send forged
// signals. It tries a segment list in which a balancer follows s1, and a packet from a VIP to a
// client that the host of s1 should forward. The balancers must not receive any signal.
func TestStrangersForgeNoSignals(t *testing.T) {
	t.Parallel()
	services := huntingServices(2)
	services[0].Accept = desired.Accept{Policy: desired.AcceptAlways}
	l := up(t, hunting(services...))
	requireWarned(t, l)

	before := signalCounts(t, l)
	lists := listsThroughServer(t, l, "s1", "lb1")
	send(t, l, "s3", "eth0", "s1", "eth0", lists)
	eventually(t, func() error {
		want := counts{"drop_next_segment": uint64(len(lists))}
		if diff := cmp.Diff(want, packetCounts(t, l.Node("s1")).with("drop_")); diff != "" {
			return errors.New("s1: -want +got:\n" + diff)
		}
		return nil
	})
	if grown := signalCounts(t, l).since(t, before); len(grown) > 0 {
		t.Errorf("the balancers got packets that a stranger sent through s1: %v", grown)
	}

	c := dialServer(t, l, l.Topology.Services[0], "s1")
	must(t, l.Node("s1").Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0)
	}))
	before = signalCounts(t, l)
	client := netip.MustParseAddrPort(c.conn.LocalAddr().String())
	reset := packet.TCP(c.service.Address(), client, packet.Flags(packet.RST))
	send(t, l, "s3", "eth0", "s1", "eth0", [][]byte{reset})
	eventually(t, func() error {
		out := command(t, l, "s1", "nstat", "-asz", "Ip6OutForwDatagrams")
		if !slices.Contains(strings.Fields(out), "1") {
			return fmt.Errorf("s1 has not forwarded the packet: %s", out)
		}
		return nil
	})
	if server, err := c.request(); server != "s1" || err != nil {
		t.Errorf("the connection goes to %q: %v", server, err)
	}
	if grown := signalCounts(t, l).since(t, before); len(grown) > 0 {
		t.Errorf("the balancers got signals for a packet that s1 forwarded: %v", grown)
	}
	t.Run("VLAN", func(t *testing.T) { strangersAreNotBalanced(t, l) })
}

// signalCounts returns all balancers' counters of signals and of dropped packets.
func signalCounts(t *testing.T, l *lab.Lab) counts {
	t.Helper()
	all := counts{}
	for _, name := range nodes(l, lab.RoleBalancer) {
		counted := packetCounts(t, l.Node(name))
		for _, prefix := range []string{"return_", "drop_"} {
			for reason, n := range counted.with(prefix) {
				all[name+" "+reason] = n
			}
		}
	}
	return all
}

// listsThroughServer returns packets to a server whose segment lists continue with a balancer's
// SIDs. They resemble the server's own signals, for every service and function.
func listsThroughServer(t *testing.T, l *lab.Lab, server, balancer string) (frames [][]byte) {
	t.Helper()
	node := l.Node(server).Locator
	deliver := srv6.SID{Locator: node, Function: srv6.Deliver}.Addr()
	for _, s := range l.Topology.Services {
		client := netip.AddrPortFrom(l.Node("client").IPv6, 40000)
		if s.VIP.Is4() {
			client = netip.AddrPortFrom(l.Node("client").IPv4, 40000)
		}
		answer := func(options ...packet.Option) []byte {
			return packet.TCP(s.Address(), client, append(options, packet.Flags(packet.SYN|packet.ACK))...)
		}
		for _, f := range []srv6.Function{srv6.CreateStickiness, srv6.RemoveStickiness} {
			signal := srv6.SID{Locator: l.Node(balancer).Locator, Function: f}.Addr()
			if s.Encapsulation == desired.SRv6Insert {
				list := packet.NewSRH(2, deliver, signal, client.Addr())
				frames = append(frames, answer(packet.Routing(list)))
				continue
			}
			frame, err := packet.Encapsulate(answer(), packet.Encap{
				Kind: s.Encapsulation, Sender: node.Addr(), Segments: []netip.Addr{deliver, signal},
			})
			must(t, err)
			frames = append(frames, frame)
		}
	}
	return frames
}

// dialServer opens connections to a service until the server accepts one.
func dialServer(t *testing.T, l *lab.Lab, s lab.Service, server string) (c *connection) {
	t.Helper()
	eventually(t, func() (err error) {
		if c, err = dial(t.Context(), l, s); err != nil {
			return err
		}
		if c.server != server {
			c.conn.Close()
			return fmt.Errorf("%s got the connection", c.server)
		}
		return nil
	})
	t.Cleanup(func() { c.conn.Close() })
	return c
}

// requireWarned requires warnings of a balancer that accepts signals from any sender, and of an
// agent that accepts any sender as a balancer. Both must warn at their start and at a reload.
func requireWarned(t *testing.T, l *lab.Lab) {
	t.Helper()
	warnings := func(node, process string) int {
		log := readLog(t, l.Process(node, process))
		return strings.Count(log, "level=WARN msg=configuration warning=")
	}
	for node, process := range map[string]string{"lb1": "lb", "s1": "agent"} {
		if n := warnings(node, process); n != 1 {
			t.Errorf("%s has warned %d times at its start", node, n)
		}
		reload(t, l, node)
		if n := warnings(node, process); n != 2 {
			t.Errorf("%s has warned %d times, after a reload", node, n)
		}
	}
}
