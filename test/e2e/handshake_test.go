// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/gopacket/gopacket/layers"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/lab"
)

// TestHandshakesOnTheWire has tshark dissect every packet of hunted connections on every link of
// the fabric. It compares the path of each packet, hop by hop, with the 6LB paper (figures 3 and 5,
// section IV): the segment lists and their functions, segments left, and the number of added bytes.
// After the handshake, replies go to the client directly.
func TestHandshakesOnTheWire(t *testing.T) {
	t.Parallel()
	topology := hunting(append(huntingServices(1), huntingServices(2)...)...)
	topology.Balancers, topology.Servers = 1, 2
	l := up(t, topology)
	// tshark checks checksums, so the switch must have computed them when packets leave it.
	for _, port := range []string{"edge", "s1", "s2"} {
		command(t, l, "fabric", "ethtool", "-K", port, "tx", "off")
	}
	for _, policy := range []desired.AcceptPolicy{desired.AcceptAlways, desired.AcceptNever} {
		accept(t, l, desired.Accept{Policy: policy})
		for _, s := range l.Topology.Services {
			t.Run(fmt.Sprintf("%s %s", s.Name, policy), func(t *testing.T) {
				// Each server is the first candidate of half of the buckets.
				for first := map[string]bool{}; len(first) < 2 && !t.Failed(); {
					for _, c := range observe(t, l, s, 4) {
						c.requireWays(t, policy)
						first[c.candidates()[0]] = true
					}
				}
			})
		}
	}
	requireNoDrops(t, l)
}

// observed is a recorded connection.
type observed struct {
	service  lab.Service
	server   string // the server that answered the request
	segments []*segment
}

// segment is a TCP segment and its path through the fabric.
type segment struct {
	tcp  *layers.TCP
	hops []hop
}

// hop is a packet between two nodes at the switch.
type hop struct {
	from, to  string
	tcp       *layers.TCP
	frame     []byte
	dissected packettest.Dissection
}

// observe makes requests, each on a new connection, and returns the packets on the fabric. If a
// packet was retransmitted because the machine stood still, observe repeats all requests.
func observe(t *testing.T, l *lab.Lab, s lab.Service, n int) []*observed {
	t.Helper()
	resent := func() (sum uint64) {
		for _, name := range append(nodes(l, lab.RoleServer), "client") {
			sum += tcpCounter(t, l.Node(name), "RetransSegs")
		}
		return sum
	}
	for deadline := time.Now().Add(patience); ; {
		var file sharedFile
		before := resent()
		tap, err := l.Node("fabric").Capture(lab.Every, &file)
		must(t, err)
		var servers []string
		for range n {
			server, _, err := newClient(l).get(t.Context(), s, "/")
			must(t, err)
			servers = append(servers, server)
		}
		var hops []hop
		eventually(t, func() error {
			hops = hopsOf(t, l, &file)
			return complete(hops, n)
		})
		must(t, tap.Stop())
		if resent() == before {
			return connections(t, s, servers, hops)
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: for %v segments were sent again whenever %d connections were made", s.Name, patience, n)
		}
	}
}

// hopsOf returns the TCP packets that have left the switch so far. Each was recorded twice: when it
// reached the switch, and when it left. hopsOf returns the later recording, because the checksum
// may have been computed in between.
func hopsOf(t *testing.T, l *lab.Lab, file *sharedFile) (hops []hop) {
	t.Helper()
	names := macs(t, l)
	came := map[string]bool{}
	for _, frame := range frames(t, file.reader()) {
		without := bytes.Clone(frame)
		tcp, ok := layer[*layers.TCP](without)
		if !ok {
			continue
		}
		clear(tcp.Contents[16:18])
		key := string(without)
		if came[key] {
			hops = append(hops, hop{from: names[string(frame[6:12])], to: names[string(frame[:6])], tcp: tcp, frame: frame})
		}
		came[key] = !came[key]
	}
	return hops
}

// macs returns the names of the nodes at the switch by MAC address.
func macs(t *testing.T, l *lab.Lab) map[string]string {
	t.Helper()
	names := map[string]string{}
	for _, n := range l.Nodes {
		if n.Role == lab.RoleFabric || n.Role == lab.RoleClient {
			continue
		}
		must(t, n.Do(func() error {
			eth0, err := net.InterfaceByName("eth0")
			if err == nil {
				names[string(eth0.HardwareAddr)] = n.Name
			}
			return err
		}))
	}
	return names
}

// complete returns an error unless the FINs of both sides of n connections are acknowledged, so
// that no packets follow.
func complete(hops []hop, n int) error {
	type end struct {
		from, to layers.TCPPort
		seq      uint32
	}
	open, done := map[end]bool{}, 0
	for _, h := range hops {
		if h.tcp.FIN {
			open[end{h.tcp.SrcPort, h.tcp.DstPort, h.tcp.Seq + uint32(len(h.tcp.Payload)) + 1}] = true
		}
		// Received by the other side: the edge router, or a server.
		if e := (end{h.tcp.DstPort, h.tcp.SrcPort, h.tcp.Ack}); h.to != "lb1" && open[e] {
			open[e] = false
			done++
		}
	}
	if done < 2*n {
		return fmt.Errorf("%d of %d FINs are acknowledged", done, 2*n)
	}
	return nil
}

// connections sorts packets by connection and segment.
func connections(t *testing.T, s lab.Service, servers []string, hops []hop) (all []*observed) {
	t.Helper()
	frames := make([][]byte, len(hops))
	for i := range hops {
		frames[i] = hops[i].frame
	}
	dissections := packettest.Dissect(t, frames, wireFields...)
	byPort := map[layers.TCPPort]*observed{}
	for i, h := range hops {
		if h.dissected = dissections[i]; len(h.dissected.Problems) > 0 {
			t.Errorf("%s > %s: %s: %v", h.from, h.to, h.dissected.Protocols, h.dissected.Problems)
		}
		port := h.tcp.SrcPort
		if port == layers.TCPPort(s.Port) {
			port = h.tcp.DstPort
		}
		c := byPort[port]
		if c == nil {
			c = &observed{service: s, server: servers[len(all)]}
			byPort[port], all = c, append(all, c)
		}
		c.add(h)
	}
	return all
}

func (c *observed) add(h hop) {
	same := func(s *segment) bool {
		a, b := s.tcp, h.tcp
		return a.SrcPort == b.SrcPort && a.Seq == b.Seq && a.Ack == b.Ack && a.SYN == b.SYN && a.FIN == b.FIN &&
			len(a.Payload) == len(b.Payload)
	}
	i := slices.IndexFunc(c.segments, same)
	if i < 0 {
		i = len(c.segments)
		c.segments = append(c.segments, &segment{tcp: h.tcp})
	}
	c.segments[i].hops = append(c.segments[i].hops, h)
}

// candidates returns the servers to which the SYN was offered, in the order in which the balancer
// listed them.
func (c *observed) candidates() []string {
	first := c.segments[0].hops[1].to
	if c.service.Candidates == 1 {
		return []string{first}
	}
	both := []string{"s1", "s2"}
	if first == "s2" {
		slices.Reverse(both)
	}
	return both
}

// requireWays fails the test unless each segment of the connection took the expected path. All
// servers have the accept policy.
func (c *observed) requireWays(t *testing.T, policy desired.AcceptPolicy) {
	t.Helper()
	candidates := c.candidates()
	taker := candidates[0]
	if policy == desired.AcceptNever {
		taker = candidates[len(candidates)-1]
	}
	if c.server != taker {
		t.Errorf("%s answered, not %s of %v", c.server, taker, candidates)
	}
	for i, s := range c.segments {
		var want []string
		switch tcp := s.tcp; {
		case tcp.SrcPort == layers.TCPPort(c.service.Port) && (tcp.SYN || tcp.FIN || tcp.RST):
			want = c.signalling(taker, map[bool]srv6.Function{true: srv6.CreateStickiness, false: srv6.RemoveStickiness}[tcp.SYN])
		case tcp.SrcPort == layers.TCPPort(c.service.Port):
			want = []string{taker + " > edge: VIP -> client +0"}
		case tcp.SYN:
			want = c.offering(candidates, taker)
		default:
			want = c.steering([]string{taker}, []string{"as"}, 1)
		}
		if diff := cmp.Diff(want, c.way(s)); diff != "" {
			t.Errorf("segment %d of a connection to %s, SYN %t, ACK %t, FIN %t, %d bytes (-want +got):\n%s",
				i, taker, s.tcp.SYN, s.tcp.ACK, s.tcp.FIN, len(s.tcp.Payload), diff)
		}
	}
	if len(c.segments) < 7 { // SYN, SYN-ACK, ACK, request, response, two FINs
		t.Errorf("a connection of %d segments", len(c.segments))
	}
}

// offering returns the path of a SYN.
func (c *observed) offering(candidates []string, taker string) []string {
	asked := []string{"ca", "ca(column 1)"} // and column 0, which has no digits
	if len(candidates) == 1 {
		asked = []string{"cf"}
	}
	return c.steering(candidates, asked, 1+slices.Index(candidates, taker))
}

// steering returns the path of a client's packet that visits the first servers of a list and asks a
// function of each. visited is the number of visited servers. Only offers have several servers.
func (c *observed) steering(servers, asked []string, visited int) []string {
	way := []string{"edge > lb1: client -> VIP +0"}
	from := "lb1"
	for i := range visited {
		var list []string
		for j, server := range servers {
			list = append(list, server+"::"+asked[j])
		}
		here, left := list[i], len(list)-1-i
		switch {
		case c.service.Encapsulation == desired.SRv6Insert:
			way = append(way, fmt.Sprintf("%s > %s: client -> %s (lb1, %s, VIP) left %d +%d", from, servers[i], here,
				strings.Join(list, ", "), left+1, []int{56, 72}[len(list)-1]))
		case len(list) == 1:
			way = append(way, fmt.Sprintf("%s > %s: lb1 -> %s [client -> VIP] +40", from, servers[i], here))
		default:
			way = append(way, fmt.Sprintf("%s > %s: lb1 -> %s (%s) left %d [client -> VIP] +80", from, servers[i], here,
				strings.Join(list, ", "), left))
		}
		from = servers[i]
	}
	return way
}

// signalling returns the path of a signal from a server.
func (c *observed) signalling(server string, function srv6.Function) []string {
	sid := "lb1::" + function.Short()
	first := fmt.Sprintf("%s > lb1: VIP -> %s (%s, %s, client) left 1 +56", server, sid, server, sid)
	if c.service.Encapsulation == desired.SRv6Encap {
		first = fmt.Sprintf("%s > lb1: %s -> %s [VIP -> client] +40", server, server, sid)
	}
	return []string{first, "lb1 > edge: VIP -> client +0"}
}

// way describes a segment's hops according to tshark.
func (c *observed) way(s *segment) (way []string) {
	plain := len(s.hops[0].frame)
	for _, h := range s.hops {
		plain = min(plain, len(h.frame))
	}
	for _, h := range s.hops {
		f := h.dissected.Fields
		// tshark lists the outer header's values first. Here IPv4 is never outside IPv6.
		sources, destinations := append(slices.Clone(f["ipv6.src"]), f["ip.src"]...), append(slices.Clone(f["ipv6.dst"]), f["ip.dst"]...)
		text := fmt.Sprintf("%s > %s: %s -> %s", h.from, h.to, c.name(sources[0]), c.name(destinations[0]))
		if list := slices.Clone(f["ipv6.routing.srh.addr"]); len(list) > 0 {
			slices.Reverse(list) // RFC 8754 section 2: from the last segment to the first
			for i := range list {
				list[i] = c.name(list[i])
			}
			text += fmt.Sprintf(" (%s) left %s", strings.Join(list, ", "), strings.Join(f["ipv6.routing.segleft"], ", "))
		}
		for i := range sources[1:] {
			text += fmt.Sprintf(" [%s -> %s]", c.name(sources[i+1]), c.name(destinations[i+1]))
		}
		way = append(way, fmt.Sprintf("%s +%d", text, len(h.frame)-plain))
	}
	return way
}

// name returns the owner of an address, and the function of a SID.
func (c *observed) name(address string) string {
	addr := netip.MustParseAddr(address)
	switch {
	case addr == c.service.VIP:
		return "VIP"
	case addr == netip.MustParseAddr("2001:db8:c::2") || addr == netip.MustParseAddr("198.51.100.2"):
		return "client"
	case !addr.Is6():
		return address
	}
	text := srv6.Parse(addr).String()
	for prefix, node := range map[string]string{"fd00:6c:0:1": "lb1", "fd00:5:0:1": "s1", "fd00:5:0:2": "s2"} {
		if rest, ok := strings.CutPrefix(text, prefix+"::"); ok {
			return strings.TrimSuffix(node+"::"+rest, "::")
		}
	}
	return text
}
