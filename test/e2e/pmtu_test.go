// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/lab"
)

// echoServices are the UDP services of the built-in topology.
var echoServices = []string{
	"echo6-insert", "echo6-encap", "echo6-gre", "echo6-ipip", "echo4-encap", "echo4-gre", "echo4-ipip",
}

// narrow is the MTU, in bytes, of a link to the client. Only the edge router knows it.
const narrow = 1300

// TestDownloadsOverANarrowLink requires that servers learn the MTU of the client's link. They learn
// it from ICMP errors to the VIP, which ECMP may send to another balancer than the connection's.
func TestDownloadsOverANarrowLink(t *testing.T) {
	t.Parallel()
	l := up(t, topology(httpServices...))
	command(t, l, "edge", "ip", "link", "set", "eth1", "mtu", strconv.Itoa(narrow))
	c := newClient(l)
	for _, s := range l.Topology.Services {
		t.Run(s.Name, func(t *testing.T) {
			before := balancerCounts(t, l)
			for range 4 {
				for _, server := range nodes(l, lab.RoleServer) {
					forgetPaths(t, l, server)
				}
				must(t, c.download(t.Context(), s, transferSize))
			}
			if grown := balancerCounts(t, l).since(t, before); grown["forward_icmp"] < 4 {
				t.Errorf("the balancers forwarded %d ICMP errors for 4 downloads: %v", grown["forward_icmp"], grown)
			}
		})
	}
	requireNoDrops(t, l)
}

// TestUploadsIntoANarrowFabric uses agents that do not change the MSS, and a fabric without room
// for any other header. The balancers must tell the client what fits.
func TestUploadsIntoANarrowFabric(t *testing.T) {
	t.Parallel()
	topology := topology(append(slices.Clone(httpServices), echoServices...)...)
	topology.MTU = lab.MTU{Client: 1500, Fabric: 1500}
	l := up(t, topology)
	for _, name := range nodes(l, lab.RoleServer) {
		cfg := l.Node(name).AgentConfig()
		cfg.Node.MTU = 9000
		must(t, l.Node(name).WriteAgentConfig(cfg))
		must(t, l.Process(name, "agent").Reload(t.Context()))
	}
	c := newClient(l)
	for _, s := range l.Topology.Services {
		t.Run(s.Name, func(t *testing.T) {
			forgetPaths(t, l, "client")
			before := balancerCounts(t, l)
			longest := watchLongest(t, l)
			if s.Protocol == desired.UDP {
				discover(t, l, s, 1500-overhead(t, s))
			} else {
				must(t, c.upload(t.Context(), s, transferSize))
			}
			if _, after := longest(); after != 1500 {
				t.Errorf("the longest packet after the balancers has %d bytes: not what the fabric can carry", after)
			}
			if grown := balancerCounts(t, l).since(t, before); grown["answer_too_big"] == 0 {
				t.Errorf("nobody was told what fits: %v", grown)
			}
		})
	}
	requireNoDrops(t, l)
}

// discover sends datagrams that must not be fragmented until the kernel refuses them. It requires
// that the kernel has learned the exact MTU.
func discover(t *testing.T, l *lab.Lab, s lab.Service, mtu int) {
	t.Helper()
	headers := 40 + 8
	if s.VIP.Is4() {
		headers = 20 + 8
	}
	probe := dialWhole(t, l, s)
	eventually(t, func() error {
		if _, err := probe.Write(make([]byte, 1500-headers)); !errors.Is(err, unix.EMSGSIZE) {
			return fmt.Errorf("sending a packet of 1500 bytes: %v, want %v", err, unix.EMSGSIZE)
		}
		return nil
	})
	conn := dialWhole(t, l, s) // a new socket, without pending errors
	if _, err := conn.Write(make([]byte, mtu+1-headers)); !errors.Is(err, unix.EMSGSIZE) {
		t.Errorf("sending a packet of %d bytes: %v, want %v", mtu+1, err, unix.EMSGSIZE)
	}
	_, err := exchange(conn, make([]byte, mtu-headers))
	must(t, err)
}

// dialWhole opens a socket whose datagrams must not be fragmented.
func dialWhole(t *testing.T, l *lab.Lab, s lab.Service) net.Conn {
	t.Helper()
	conn, err := l.Node("client").Dial(t.Context(), "udp", s.Address().String())
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	must(t, setSocketOption(conn, s, unix.IP_MTU_DISCOVER, unix.IPV6_MTU_DISCOVER, unix.IP_PMTUDISC_DO))
	return conn
}

func setSocketOption(conn net.Conn, s lab.Service, option4, option6, value int) error {
	raw, err := conn.(*net.UDPConn).SyscallConn()
	if err != nil {
		return err
	}
	level, option := unix.IPPROTO_IPV6, option6
	if s.VIP.Is4() {
		level, option = unix.IPPROTO_IP, option4
	}
	var errSet error
	err = raw.Control(func(fd uintptr) { errSet = unix.SetsockoptInt(int(fd), level, option, value) })
	return errors.Join(err, errSet)
}

// TestFragmentedDatagrams sends datagrams in three fragments from the client, also in reverse
// order.
func TestFragmentedDatagrams(t *testing.T) {
	t.Parallel()
	l := up(t, topology(echoServices...))
	for _, server := range nodes(l, lab.RoleServer) {
		sendWhatFits(t, l, server)
	}
	c := newClient(l)
	content := bytes.Repeat([]byte("0123456789abcdef"), 4000/16)
	for _, s := range l.Topology.Services {
		t.Run(s.Name, func(t *testing.T) {
			before := balancerCounts(t, l)
			for range 20 {
				_, err := c.echo(t.Context(), s, content)
				must(t, err)
			}
			grown := balancerCounts(t, l).since(t, before)
			// Two datagrams may use the same port.
			first := grown["forward_new"] + grown["forward_known"]
			if first != 20 || grown["forward_fragment"] != 40 {
				t.Errorf("20 datagrams of three fragments are counted as %v", grown)
			}
			sendReordered(t, l, s, content)
			if grown = balancerCounts(t, l).since(t, before); grown["take_fragment"] != 4 || grown["forward_fragment"] != 44 {
				t.Errorf("two more, in reverse order, are counted as %v", grown)
			}
		})
	}
	requireNoDrops(t, l)
	requireAllDelivered(t, l)
}

// sendReordered sends two datagrams of three fragments to a service. The fragments of each come in
// reverse order, and those of the two alternate. Both datagrams must be answered.
func sendReordered(t *testing.T, l *lab.Lab, s lab.Service, content []byte) {
	t.Helper()
	const datagrams = 2
	conns, frames := make([]net.Conn, datagrams), make([][]byte, 3*datagrams)
	for i := range conns {
		var err error
		conns[i], err = l.Node("client").Dial(t.Context(), "udp", s.Address().String())
		must(t, err)
		defer conns[i].Close()
		from := conns[i].LocalAddr().(*net.UDPAddr).AddrPort()
		whole := packet.UDP(netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), s.Address(), packet.Payload(content))
		fragments := packet.Fragments(whole, 1440, uint32(from.Port()))
		if len(fragments)*datagrams != len(frames) {
			t.Fatalf("a datagram has %d fragments", len(fragments))
		}
		slices.Reverse(fragments)
		for at, fragment := range fragments {
			frames[at*datagrams+i] = fragment
		}
	}
	send(t, l, "client", "eth0", "edge", "eth1", frames)
	for _, conn := range conns {
		_, err := receiveEcho(conn, content)
		must(t, err)
	}
}

// sendWhatFits limits the length of a server's packets to the MTU of the client's link, so that
// replies need no path MTU discovery.
func sendWhatFits(t *testing.T, l *lab.Lab, server string) {
	t.Helper()
	for _, family := range []string{"-4", "-6"} {
		route := strings.Fields(command(t, l, server, "ip", family, "route", "show", "default"))
		if i := slices.Index(route, "pref"); i >= 0 {
			route = route[:i]
		}
		command(t, l, server, "ip", slices.Concat([]string{family, "route", "replace"}, route, []string{"mtu", "1500"})...)
	}
}

// TestAnswersOfBalancers pings all VIPs. It also needs closed ports of them: the client's own stack
// must accept that nobody serves there.
func TestAnswersOfBalancers(t *testing.T) {
	t.Parallel()
	l := shared(t, topology(mixed...))
	services := uint64(len(l.Topology.Services))
	for _, s := range l.Topology.Services {
		network, header, echo := "ip6:ipv6-icmp", 40, uint8(128)
		if s.VIP.Is4() {
			network, header, echo = "ip4:icmp", 20, 8
		}
		conn, err := l.Node("client").Dial(t.Context(), network, s.VIP.String())
		must(t, err)
		defer conn.Close()
		ping := packet.ICMP(s.VIP, s.VIP, echo, 0, 0x00010002, packet.Payload([]byte("are you there?")))[14+header:]
		must(t, conn.SetDeadline(time.Now().Add(patience)))
		_, err = conn.Write(ping)
		must(t, err)
		buf := make([]byte, 1500)
		for answered := false; !answered; {
			n, _, err := conn.(net.PacketConn).ReadFrom(buf) // without the IP header
			must(t, err)
			answered = n >= 8 && bytes.Equal(buf[4:n], ping[4:])
		}
	}
	if counted := balancerCounts(t, l); counted["answer_echo"] != services {
		t.Errorf("%d pings are counted as %v", services, counted)
	}
	for _, s := range l.Topology.Services {
		closed := netip.AddrPortFrom(s.VIP, 81).String()
		if _, err := l.Node("client").Dial(t.Context(), "tcp", closed); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("TCP to %s: %v, want a refused connection", closed, err)
		}
		conn, err := l.Node("client").Dial(t.Context(), "udp", closed)
		must(t, err)
		defer conn.Close()
		must(t, conn.SetDeadline(time.Now().Add(patience)))
		_, err = conn.Write([]byte("is anybody there?"))
		must(t, err)
		if _, err := conn.Read(make([]byte, 100)); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("UDP to %s: %v, want a refused connection", closed, err)
		}
	}
	if counted := balancerCounts(t, l); counted["answer_no_service"] != 2*services {
		t.Errorf("%d SYNs and as many datagrams to closed ports are counted as %v", services, counted)
	}
}

// forgetPaths clears the path MTUs that a node has learned.
func forgetPaths(t *testing.T, l *lab.Lab, node string) {
	t.Helper()
	command(t, l, node, "ip", "-4", "route", "flush", "cache")
	command(t, l, node, "ip", "-6", "route", "flush", "cache")
}

// balancerCounts returns the counters of all balancers, summed.
func balancerCounts(t *testing.T, l *lab.Lab) counts {
	t.Helper()
	sum := counts{}
	for _, name := range nodes(l, lab.RoleBalancer) {
		for reason, n := range packetCounts(t, l.Node(name)) {
			sum[reason] += n
		}
	}
	return sum
}
