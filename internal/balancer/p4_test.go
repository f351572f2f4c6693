// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/p4switch/switchtest"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// crcServices returns those of cookieServices that were always stateless, with the bucket hash of
// switches.
func crcServices() (services []columnService) {
	for _, c := range cookieServices {
		if c.former == "" {
			c.crc, c.affinity = true, nil // with affinity, the hash is another one
			services = append(services, c)
		}
	}
	return services
}

// withAndWithoutHints runs a test for a host without hints, and for one with a hint table of a
// capacity.
func withAndWithoutHints(t *testing.T, test func(t *testing.T, capacity uint32)) {
	for _, capacity := range []uint32{0, hints} {
		t.Run(fmt.Sprintf("%d hints", capacity), func(t *testing.T) {
			t.Parallel()
			test(t, capacity)
		})
	}
}

// openOffloaded returns a balancer with all kinds of services that switches balance, and its
// reference. The services' servers have changed several times. The switch reaches most of them, by a
// path of 1,500 bytes. The capacity is that of the balancer's hint table.
func openOffloaded(t testing.TB, capacity uint32) *reference {
	t.Helper()
	services := crcServices()
	var quic []desired.Service
	for _, q := range quicServices {
		if !q.kind.IsTunnel() && !q.former {
			quic = append(quic, q.service(false))
		}
	}
	cfg := balancerOf(append(quic, columnConfig(services, 0)...)...)
	cfg.Node.Limits.Hints = capacity
	f := open(t, cfg)
	takeColumnSteps(f, cfg, services)
	for _, m := range f.services.members() {
		switch m.Name {
		case "m4": // the switch does not reach it
			f.via[m.Name] = "out"
		case "m5": // it has no next hop
		default:
			f.via[m.Name] = "narrow"
		}
	}
	f.own = []nexthop.Link{{Index: f.ifindex["narrow"], MAC: ownMAC}}
	f.route()
	return newReference(f)
}

// A switch sends each packet as the data path and the reference do, byte for byte, or passes it to
// the host. The mutants reach all reasons of the switch.
func TestSwitchAgreesWithDataPath(t *testing.T) {
	t.Parallel()
	testhost.NeedSwitch(t)
	withAndWithoutHints(t, testSwitchAgrees)
}

func testSwitchAgrees(t *testing.T, capacity uint32) {
	r := openOffloaded(t, capacity)
	var frames [][]byte
	for _, c := range cookieServices {
		if c.former == "" {
			for port := range uint16(8) {
				frames = append(frames, cookiePackets(fromPort(c.flow, port), c.candidates)...)
			}
			frames = append(frames, frameOf(c.flow, packet.HopLimit(1)),
				frameOf(c.flow, packet.Flags(packet.SYN|packet.FIN)))
			frames = append(frames, c.unusual()...)
		}
	}
	frames = append(frames, quicCaptures()...)
	packettest.TryMutants(t, "FuzzDataPath", append(frames, icmpCaptures()...), r.compare, func() (missing []string) {
		for reason := range r.mirror.counted {
			isPossible := reason != "pass_from_host" && reason != "drop_port" && (reason != "pass_no_cookie" || capacity > 0)
			if isPossible && r.mirror.seen[reason] == 0 {
				missing = append(missing, reason)
			}
		}
		return missing
	})
}

// The switch sends all packets of its host to the network, also those that it would balance.
func TestSwitchPassesPacketsOfHost(t *testing.T) {
	t.Parallel()
	testhost.NeedSwitch(t)
	f := open(t, stateless(desired.PlacementHunt, 2))
	f.run(frameOf(web)) // opens the mirror
	for _, frame := range [][]byte{frameOf(web), frameOf(dns), packet.SetByte(frameOf(web4), 13, 0x06)} {
		port, out := f.mirror.sw.Exchange(t, switchtest.Host, frame)
		counted := f.mirror.newCounts()
		if port != switchtest.Network || !slices.Equal(out, frame) || len(counted) != 1 || counted[0].Reason != "pass_from_host" {
			t.Errorf("the switch sends %x by port %d, counted as %v, of %x", out, port, counted, frame)
		}
	}
}

// The switch is told what has changed for its services, and nothing else. It gets only services that
// it can balance.
func TestSwitchIsTold(t *testing.T) {
	t.Parallel()
	crc := stateless(desired.PlacementHunt, 2)
	crc.Services[0].BucketHash, crc.Services[0].Buckets = desired.BucketHashMultilinear, 251
	crc.Node.Switch = &desired.Switch{NetworkPort: 1, HostPort: 2}
	f := open(t, crc)
	f.own = []nexthop.Link{{Index: f.ifindex["out"], MAC: ownMAC}}
	told := func(what string, isNews bool) *p4switch.Content {
		t.Helper()
		f.tellSwitch()
		select {
		case c := <-f.Contents():
			if !isNews {
				t.Errorf("%s: the switch was told", what)
			}
			return c
		default:
			if isNews {
				t.Fatalf("%s: the switch was not told", what)
			}
			return nil
		}
	}
	first := told("a start", true)
	if names := servicesOf(first); !slices.Equal(names, []string{"web", "web4"}) {
		t.Errorf("the switch gets %v", names)
	}
	told("no change", false)
	name := f.service("web").Servers[0].Name
	f.via[name] = "narrow"
	f.route()
	for _, s := range told("another interface", true).Servers {
		if isThere := s.Slot != uint16(f.slot("web", name)) && s.Slot != uint16(f.slot("web4", name)); isThere != (s.Hop.Port == 1) {
			t.Errorf("slot %d: port %d of the switch, and %s is behind another interface", s.Slot, s.Hop.Port, name)
		}
	}
	drained := stateless(desired.PlacementHunt, 2)
	drained.Services[0].BucketHash, drained.Services[0].Buckets = desired.BucketHashMultilinear, 251
	drained.Node.Switch = crc.Node.Switch
	drained.Services[1].Servers[0].Drained = true
	f.mustApply(drained)
	c := told("a drain", true)
	if c.Services[0].Digest != first.Services[0].Digest || c.Services[0].Rows != first.Services[0].Rows {
		t.Error("a drain has changed the rows")
	}
	slot := uint16(f.slot("web", name))
	if before, now := first.Services[0].Servers[slot], c.Services[0].Servers[slot]; !before.Takes || now.Takes {
		t.Errorf("server %s took new flows: %t, and takes them: %t", name, before.Takes, now.Takes)
	}
}

// Each service is on the switch or passes to the host, with a reason. A service of all ports passes if
// the host balances another port of its VIP.
func TestSwitchIsToldWhyServicesPass(t *testing.T) {
	t.Parallel()
	f := openStateless(t)
	f.withSwitch(newOffload(&desired.Switch{}), func() {
		c, err := f.content()
		f.must(err)
		why := map[string]string{}
		for _, passed := range c.Passed {
			why[passed.Name] = passed.Reason
		}
		if want := "this host balances service one of the same VIP"; why["all"] != want || why["rest"] != "" {
			t.Errorf("all passes because %q, and rest because %q", why["all"], why["rest"])
		}
		if got := len(c.Services) + len(c.Passed); got != len(f.cfg.Services) {
			t.Errorf("%d services on the switch and %d at the host, of %d", len(c.Services), len(c.Passed), len(f.cfg.Services))
		}
	})
}

// A service that has just become stateless has flows that only the flow table knows. The switch gets
// the service when they have ended.
func TestSwitchWaitsForFormerFlows(t *testing.T) {
	t.Parallel()
	before := hunting(desired.SelectConsistent, 2)
	before.Node.Switch = &desired.Switch{NetworkPort: 1, HostPort: 2}
	f := open(t, before)
	f.own = []nexthop.Link{{Index: f.ifindex["out"], MAC: ownMAC}}
	answer := f.signal(web, "web", f.row(web, "web")[1], srv6.CreateStickiness, packet.Flags(packet.ACK), packet.Sequence(1, acknowledged))
	f.run(answer)
	after := stateless(desired.PlacementHunt, 2)
	after.Node.Switch = before.Node.Switch
	f.mustApply(after)
	f.tellSwitch()
	if names := servicesOf(<-f.Contents()); slices.Contains(names, "web") {
		t.Errorf("the switch gets %v", names)
	}
	f.services.endFormerFlows(nil, time.Now().Add(time.Hour))
	f.tellSwitch()
	if names := servicesOf(<-f.Contents()); !slices.Contains(names, "web") {
		t.Errorf("the switch gets %v, without web", names)
	}
}

// servicesOf lists the names of a content's services.
func servicesOf(c *p4switch.Content) (names []string) {
	for _, s := range c.Services {
		names = append(names, s.Name)
	}
	return names
}
