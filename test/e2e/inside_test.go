// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/lab"
)

// twoArmed returns the topology of a lab whose balancers are the edge of the segment routing
// domain, between clients and hunted servers.
func twoArmed() lab.Topology {
	t := hunting(huntingServices(2)...)
	t.TwoArmed = true
	return t
}

// TestTwoArmedBalancersHunt opens connections through balancers with an interface on each side.
// Signals from the inside decide which server has a connection. Packets from the client's side that
// look like signals are dropped.
func TestTwoArmedBalancersHunt(t *testing.T) {
	t.Parallel()
	l := up(t, twoArmed())
	accept(t, l, desired.Accept{Policy: desired.AcceptNever})
	c := newClient(l)
	const visits = 20
	for _, s := range l.Topology.Services {
		_, err := c.visit(t.Context(), s, visits)
		must(t, err)
	}
	for _, s := range l.Topology.Services {
		var all offered
		for _, name := range nodes(l, lab.RoleServer) {
			o := offers(t, l, name, s.Name)
			all.accepted, all.refused, all.forced = all.accepted+o.accepted, all.refused+o.refused, all.forced+o.forced
		}
		if all.refused < visits || all.forced != all.refused || all.accepted > 0 {
			t.Errorf("%s: %+v, want %d refused by the first server, and taken by the last", s.Name, all, visits)
		}
	}
	for _, name := range nodes(l, lab.RoleBalancer) {
		requireArms(t, l.Node(name))
	}
	requireNoDrops(t, l)

	n := l.Node("lb1")
	before := packetCounts(t, n)
	frames := forgeries(t, l)
	send(t, l, "edge", "lb1", "lb1", "eth1", frames) // the link of clients' packets
	eventually(t, func() error {
		want := counts{"drop_outside": uint64(len(frames))}
		if diff := cmp.Diff(want, packetCounts(t, n).since(t, before).with("drop_")); diff != "" {
			return errors.New("-want +got:\n" + diff)
		}
		return nil
	})
	if grown := packetCounts(t, n).since(t, before).with("return_"); len(grown) > 0 {
		t.Errorf("forged signals were taken: %v", grown)
	}
}

// requireArms requires that the balancer's programs run on both interfaces, and that both have
// processed packets of connections.
func requireArms(t *testing.T, n *lab.Node) {
	t.Helper()
	s := balancerStatus(t, n)
	if s.Attachment == nil || s.Inside == nil || s.Attachment.Interface != "eth1" || s.Inside.Interface != "eth0" ||
		s.Attachment.Mode != datapath.Native || s.Inside.Mode != datapath.Native {
		t.Errorf("%s: attached to %+v, inside to %+v", n.Name, s.Attachment, s.Inside)
	}
	counted := packetCounts(t, n)
	for _, reason := range []string{"forward_hunt", "return_create", "forward_new", "forward_known", "return_remove"} {
		if counted[reason] == 0 {
			t.Errorf("%s has counted no %s", n.Name, reason)
		}
	}
}

// forgeries returns packets from the client's side that only nodes of the domain may send: signals
// of a server for the client's connection, packets to servers' SIDs, and a packet for a VIP with
// segments left.
func forgeries(t *testing.T, l *lab.Lab) (frames [][]byte) {
	t.Helper()
	lb, server, client := l.Node("lb1"), l.Node("s1"), l.Node("client")
	for _, s := range l.Topology.Services {
		address := client.IPv6
		if s.VIP.Is4() {
			address = client.IPv4
		}
		answer := packet.TCP(s.Address(), netip.AddrPortFrom(address, 40000), packet.Flags(packet.SYN|packet.ACK))
		for _, function := range []srv6.Function{srv6.CreateStickiness, srv6.RemoveStickiness} {
			frame, err := packet.Signal(answer, packet.Encap{
				Kind: s.Encapsulation, Sender: server.Locator.Addr(),
				Segments: []netip.Addr{srv6.SID{Locator: lb.Locator, Function: function}.Addr()},
			})
			must(t, err)
			frames = append(frames, frame)
		}
	}
	vip := l.Topology.Services[0].VIP
	sid := netip.AddrPortFrom(srv6.SID{Locator: server.Locator, Function: srv6.ConnectForce}.Addr(), 80)
	from := netip.AddrPortFrom(client.IPv6, 40001)
	return append(frames, packet.TCP(from, sid),
		packet.TCP(from, netip.AddrPortFrom(vip, 80), packet.Routing(packet.NewSRH(1, vip, sid.Addr()))))
}

// send sends frames from an interface of one node to an interface of another.
func send(t *testing.T, l *lab.Lab, from, fromDevice, to, toDevice string, frames [][]byte) {
	t.Helper()
	device := func(node, name string) (device *net.Interface) {
		must(t, l.Node(node).Do(func() (err error) {
			device, err = net.InterfaceByName(name)
			return err
		}))
		return device
	}
	source, destination := device(from, fromDevice), device(to, toDevice)
	must(t, l.Node(from).Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		address := &unix.SockaddrLinklayer{Ifindex: source.Index}
		fromMAC, toMAC := packet.MAC(source.HardwareAddr), packet.MAC(destination.HardwareAddr)
		for _, frame := range frames {
			if err := unix.Sendto(fd, packet.SetMACs(frame, fromMAC, toMAC), 0, address); err != nil {
				return err
			}
		}
		return nil
	}))
}

// TestTwoArmedBalancersAreKilled kills the processes of balancers with two interfaces under load.
// It affects the packets of neither side.
func TestTwoArmedBalancersAreKilled(t *testing.T) {
	t.Parallel()
	l := up(t, twoArmed())
	live := open(t, l, 100, l.Topology.Services...)
	visitors := startVisitors(t, l, 4, l.Topology.Services...)
	killBalancers(t, l, live, visitors, "return_create")
	live.requireUnbroken(t)
	visitors.requireContent(t)
	requireNoDrops(t, l)
}
