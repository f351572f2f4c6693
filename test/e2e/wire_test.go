// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/lab"
)

// TestTsharkUnderstandsTheWire captures real traffic at a balancer, for services with placement
// hash. It compares each packet before the balancer with the same packet after it.
// TestHandshakesOnTheWire does this for services that hunt.
func TestTsharkUnderstandsTheWire(t *testing.T) {
	t.Parallel()
	whole := lab.DefaultTopology()
	whole.Name, whole.Balancers, whole.Servers = labName, 1, 3
	whole.Services = slices.DeleteFunc(whole.Services, func(s lab.Service) bool { return s.Placement == desired.PlacementHunt })
	l := up(t, whole)
	client := newClient(l)
	for _, s := range l.Topology.Services {
		t.Run(s.Name, func(t *testing.T) {
			capture := startCapture(t, l, "lb1")
			for range 3 {
				if s.Protocol == desired.UDP {
					_, err := client.echo(t.Context(), s, lab.Content(1200))
					must(t, err)
				} else {
					must(t, client.upload(t.Context(), s, 20e3))
				}
			}
			before, after := capture.awaitBalance(t, 3)
			dissections := packettest.Dissect(t, append(before, after...), wireFields...)
			for _, d := range dissections {
				if len(d.Problems) > 0 {
					t.Errorf("%s: %v", d.Protocols, d.Problems)
				}
			}
			for i, frame := range after {
				requireForwarded(t, l, s, dissections[partner(t, frame, before)], dissections[len(before)+i])
			}
		})
	}
}

// chains are the protocols that tshark must find, up to the client's transport protocol.
var chains = map[desired.Encapsulation]string{
	desired.SRv6Insert: "eth:ethertype:ipv6:ipv6.routing:",
	desired.SRv6Encap:  "eth:ethertype:ipv6:INNER:",
	desired.GRE:        "eth:ethertype:OUTER:gre:INNER:",
	desired.IPIP:       "eth:ethertype:OUTER:INNER:",
}

// wireFields are the fields that a test reads in tshark's output.
var wireFields = []string{
	"frame.len", "ipv6.src", "ipv6.dst", "ipv6.hlim", "ip.src", "ip.dst", "ip.ttl",
	"ipv6.routing.type", "ipv6.routing.segleft", "ipv6.routing.srh.last_entry", "ipv6.routing.srh.addr",
}

// requireForwarded fails the test unless the frame after the balancer, according to tshark, is
// exactly what the balancer must make of the frame before.
func requireForwarded(t *testing.T, l *lab.Lab, s lab.Service, before, after packettest.Dissection) {
	t.Helper()
	family := strings.NewReplacer("OUTER", "ipv6", "INNER", "ipv6")
	if s.VIP.Is4() {
		family = strings.NewReplacer("OUTER", "ip", "INNER", "ip")
	}
	chain := family.Replace(chains[s.Encapsulation]) + string(s.Protocol)
	if after.Protocols != chain && !strings.HasPrefix(after.Protocols, chain+":") {
		t.Errorf("the balancer sends %s, want %s", after.Protocols, chain)
	}
	server := serverOf(t, l, s, after)
	want := maps.Clone(before.Fields)
	want["frame.len"] = []string{strconv.Itoa(number(t, before, "frame.len") + overhead(t, s))}
	hops, source, destination := "ipv6.hlim", "ipv6.src", "ipv6.dst"
	if s.VIP.Is4() {
		hops, source, destination = "ip.ttl", "ip.src", "ip.dst"
	}
	want[hops] = []string{strconv.Itoa(number(t, before, hops) - 1)}
	// tshark lists the outer header's values first.
	outer := func(field string, value any) { want[field] = append([]string{fmt.Sprint(value)}, want[field]...) }
	lb := l.Node("lb1")
	switch s.Encapsulation {
	case desired.SRv6Insert:
		want[destination] = []string{deliverAt(server).String()}
		want["ipv6.routing.type"] = []string{"4"}
		want["ipv6.routing.segleft"] = []string{"1"}
		want["ipv6.routing.srh.last_entry"] = []string{"2"}
		want["ipv6.routing.srh.addr"] = []string{s.VIP.String(), deliverAt(server).String(), lb.Locator.Addr().String()}
	case desired.SRv6Encap:
		outer("ipv6.src", lb.Locator.Addr())
		outer("ipv6.dst", deliverAt(server))
		outer("ipv6.hlim", 64)
	default:
		from, to := lb.IPv6, server.IPv6
		if s.VIP.Is4() {
			from, to = lb.IPv4, server.IPv4
		}
		outer(source, from)
		outer(destination, to)
		outer(hops, 64)
	}
	if diff := cmp.Diff(want, after.Fields); diff != "" {
		t.Errorf("a packet after the balancer (-want +got):\n%s", diff)
	}
}

// number returns a field's only value.
func number(t *testing.T, d packettest.Dissection, field string) int {
	t.Helper()
	if len(d.Fields[field]) != 1 {
		t.Fatalf("%s: field %s is %q, want one value", d.Protocols, field, d.Fields[field])
	}
	n, err := strconv.Atoi(d.Fields[field][0])
	must(t, err)
	return n
}

// serverOf returns the server that a packet is sent to.
func serverOf(t *testing.T, l *lab.Lab, s lab.Service, d packettest.Dissection) *lab.Node {
	t.Helper()
	to := append(slices.Clone(d.Fields["ipv6.dst"]), d.Fields["ip.dst"]...)
	if len(d.Fields["ipv6.dst"]) == 0 {
		to = d.Fields["ip.dst"]
	}
	for _, name := range nodes(l, lab.RoleServer) {
		n := l.Node(name)
		if slices.Contains([]string{n.IPv4.String(), n.IPv6.String(), deliverAt(n).String()}, to[0]) {
			return n
		}
	}
	t.Fatalf("%s: %s is no server's address or SID", s.Name, to[0])
	return nil
}

// deliverAt returns the SID of the function deliver at a server.
func deliverAt(n *lab.Node) netip.Addr {
	return srv6.SID{Locator: n.Locator, Function: srv6.Deliver}.Addr()
}

// partner finds the packet before the balancer that corresponds to a frame after it: the bytes from
// the transport header on are equal. It returns the packet's index.
func partner(t *testing.T, frame []byte, before [][]byte) int {
	t.Helper()
	i := slices.IndexFunc(before, func(b []byte) bool {
		const ethernet, ipv4, ipv6 = 14, 20, 40
		if b[12] == 0x08 {
			return bytes.HasSuffix(frame, b[ethernet+ipv4:])
		}
		return bytes.HasSuffix(frame, b[ethernet+ipv6:])
	})
	if i < 0 {
		t.Fatalf("a packet of %d bytes that the balancer sent is none that it received", len(frame))
	}
	return i
}
