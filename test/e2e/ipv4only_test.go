// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

// ipv4Only returns the topology of a lab whose fabric has no IPv6, with a service of each kind that
// SRv6 carries.
func ipv4Only() lab.Topology {
	t := topology()
	t.IPv4Only, t.Servers = true, 4
	check := &desired.Health{HTTP: &desired.HTTPCheck{Path: "/"}}
	service := func(name, vip string, placement desired.Placement, persistence desired.Persistence) lab.Service {
		return lab.Service{
			Name: name, VIP: netip.MustParseAddr(vip), Port: 80, Protocol: desired.TCP, Health: check,
			Encapsulation: desired.SRv6Encap, Placement: placement, Persistence: persistence,
		}
	}
	t.Services = []lab.Service{
		service("hunt", "203.0.113.41", desired.PlacementHunt, desired.PersistenceTable),
		service("hash", "203.0.113.42", desired.PlacementHash, desired.PersistenceTable),
		service("infer", "203.0.113.43", desired.PlacementInfer, desired.PersistenceTable),
		service("stateless", "203.0.113.44", desired.PlacementHunt, desired.PersistenceStateless),
		service("ipip", "203.0.113.45", desired.PlacementHash, desired.PersistenceTable),
		service("echo", "203.0.113.42", desired.PlacementHash, desired.PersistenceTable),
	}
	t.Services[4].Encapsulation = desired.IPIP
	echo := &t.Services[5]
	echo.Port, echo.Protocol, echo.Health = 9000, desired.UDP, nil
	return t
}

// TestFabricWithoutIPv6 opens connections, and sends much data both ways, on a fabric where no IPv6
// packet may appear. Health checks, probes, offers, signals, hand-backs and known flows all travel
// in the underlay, and tshark finds every packet valid.
func TestFabricWithoutIPv6(t *testing.T) {
	t.Parallel()
	testhost.NeedCgroup2(t)
	l := up(t, ipv4Only())
	// tshark checks checksums, so the hosts must have computed them.
	for _, n := range slices.Concat(nodes(l, lab.RoleServer), nodes(l, lab.RoleBalancer), []string{"client", "edge"}) {
		command(t, l, n, "ethtool", "-K", "eth0", "tx", "off")
	}
	var file sharedFile
	tap, err := l.Node("fabric").Capture(lab.Every, &file)
	must(t, err)
	c := newClient(l)
	for _, s := range l.Topology.Services {
		if s.Protocol == desired.UDP {
			_, err := c.echo(t.Context(), s, []byte("over IPv4"))
			must(t, err)
			continue
		}
		_, err := c.visit(t.Context(), s, 20)
		must(t, err)
		must(t, c.download(t.Context(), s, lab.Sizes[1]))
		must(t, c.upload(t.Context(), s, lab.Sizes[1]))
	}
	must(t, tap.Stop())
	inside := requireIPv4(t, frames(t, file.reader()))
	for _, protocol := range []string{"eth:ethertype:ipv6:ip:tcp", "eth:ethertype:ipv6:ip:udp"} {
		if !slices.ContainsFunc(inside, func(d packettest.Dissection) bool { return strings.HasPrefix(d.Protocols, protocol) }) {
			t.Errorf("no packet was %s", protocol)
		}
	}
	for _, name := range nodes(l, lab.RoleBalancer) {
		counted := packetCounts(t, l.Node(name))
		for _, reason := range []string{"forward_hunt", "forward_new", "forward_known", "return_create", "return_remove", "take_probe"} {
			if counted[reason] == 0 {
				t.Errorf("%s has counted no %s", name, reason)
			}
		}
	}
	requireNoDrops(t, l)
}

// isIntended tells whether a problem that tshark finds is meant to be: the UDP header of the underlay
// has no checksum, and health checks end by a reset.
func isIntended(problem string) bool {
	return problem == "udp.checksum.status is 3" || strings.Contains(problem, "Connection reset (RST)")
}

// requireIPv4 fails the test unless all frames are IPv4 or ARP, and tshark finds them valid: outside
// and, if they are of the underlay, also inside.
func requireIPv4(t *testing.T, all [][]byte) (inside []packettest.Dissection) {
	t.Helper()
	var outer, inner [][]byte
	for _, frame := range all {
		switch binary.BigEndian.Uint16(frame[12:]) {
		case 0x0806:
			continue
		case 0x0800:
		default:
			t.Fatalf("a packet that is not IPv4: %x", frame)
		}
		outer = append(outer, frame)
		if frame[23] == 17 && binary.BigEndian.Uint16(frame[36:]) == desired.DefaultUnderlayPort {
			ipv6 := append(slices.Clone(frame[:14]), frame[42:]...)
			inner = append(inner, packet.SetByte(packet.SetByte(ipv6, 12, 0x86), 13, 0xdd))
		}
	}
	if len(inner) == 0 {
		t.Fatal("no packet was in the underlay")
	}
	for _, frames := range [][][]byte{outer, inner} {
		inside = packettest.Dissect(t, frames, wireFields...)
		for i, d := range inside {
			problems := slices.DeleteFunc(d.Problems, isIntended)
			if len(problems) > 0 {
				t.Fatalf("%s: %v: %x", d.Protocols, problems, frames[i])
			}
		}
	}
	return inside
}

// TestFabricWithoutIPv6LosesABalancer moves connections to another balancer, which asks servers for
// them, and lets servers refuse all connections, so that the last one of a list takes them.
func TestFabricWithoutIPv6LosesABalancer(t *testing.T) {
	t.Parallel()
	l := up(t, ipv4Only())
	for _, name := range nodes(l, lab.RoleServer) {
		reagent(t, l, name, func(s *desired.AgentService) {
			if s.Hunts() {
				s.Accept = desired.Accept{Policy: desired.AcceptNever}
			}
		})
	}
	live := open(t, l, liveConnections, l.Topology.Services[:4]...)
	live.rounds(t, 1)
	must(t, l.Process("lb1", "lb").Kill())
	command(t, l, "lb1", segue, "lb", "detach", l.Node("lb1").Instance())
	must(t, l.SetNextHops("lb2"))
	live.rounds(t, 3)
	live.requireUnbroken(t)
	if counted := packetCounts(t, l.Node("lb2")); counted["forward_recover"] == 0 {
		t.Errorf("lb2 has no connection from lb1: %v", counted)
	}
	must(t, l.Process("lb1", "lb").Start(t.Context()))
	must(t, l.SetNextHops(nodes(l, lab.RoleBalancer)...))
	live.rounds(t, 3)
	live.requireUnbroken(t)
	passedOn := uint64(0)
	for _, name := range nodes(l, lab.RoleServer) {
		passedOn += packetCounts(t, l.Node(name)).with("next_").sum()
	}
	if passedOn == 0 {
		t.Error("no server passed a packet on")
	}
	requireNoDrops(t, l)
}
