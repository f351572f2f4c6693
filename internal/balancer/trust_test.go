// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// Keys of signals.
var (
	oldKey = desired.SignalKey{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}
	newKey = desired.SignalKey{0xff, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}
)

// keyFile writes a file of keys, which a configuration can name.
func keyFile(t *testing.T, keys ...desired.SignalKey) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "signal.key")
	writeKeys(t, file, keys...)
	return file
}

// secretsOf reads the keys in the file that a configuration names.
func secretsOf(t testing.TB, cfg *desired.Balancer) desired.Secrets {
	t.Helper()
	keys, err := config.ReadSignalKeys(cfg.Node.SignalKey)
	testhost.Must(t, err)
	return desired.Secrets{SignalKeys: keys}
}

func writeKeys(t *testing.T, file string, keys ...desired.SignalKey) {
	t.Helper()
	var content strings.Builder
	for _, key := range keys {
		fmt.Fprintln(&content, hex.EncodeToString(key[:]))
	}
	testhost.Must(t, os.WriteFile(file, []byte(content.String()), 0o600))
}

// withArgument returns the frame of a signal with another argument in its SID.
func withArgument(frame []byte, argument uint64) []byte {
	at := ethernetLength + 24 + 8 // the second half of the destination address
	half := binary.BigEndian.Uint64(frame[at:])&^srv6.MaxArgument | argument
	out := slices.Clone(frame)
	binary.BigEndian.PutUint64(out[at:], half)
	return out
}

// tagged returns a signal with the tag that a server with the key adds.
func tagged(frame []byte, key desired.SignalKey) []byte {
	h, ok := hear(frame[ethernetLength:])
	if !ok {
		panic("no signal")
	}
	return withArgument(frame, packettest.Tag(key, functionOf(frame), h.sender, h.report, h.flow.Source, h.flow.Destination))
}

// taggedReport returns a signal with a report, and with the tag that a server with the key adds.
func taggedReport(frame []byte, key desired.SignalKey, report uint64) []byte {
	h, ok := hear(frame[ethernetLength:])
	if !ok {
		panic("no signal")
	}
	return withArgument(frame, packettest.Tag(
		key, functionOf(frame), h.sender, report, h.flow.Source, h.flow.Destination))
}

// functionOf returns the function of the SID that is the frame's destination.
func functionOf(frame []byte) srv6.Function { return sidOf(frame).Function }

func sidOf(frame []byte) srv6.SID {
	return srv6.Parse(netip.AddrFrom16([16]byte(frame[ethernetLength+24:])))
}

// A signal is accepted if its tag is by one of the node's keys. The tag covers everything that the
// signal says.
func TestTags(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 2))
	keyed := hunting(desired.SelectConsistent, 2)
	keyed.Node.SignalKey = keyFile(t, newKey, oldKey)
	for service, flow := range hunted {
		row := f.row(flow, service)
		kind := f.service(service).Encapsulation
		sender, other := f.locatorOf(service, row[0]), f.locatorOf(service, row[1])
		for _, function := range []srv6.Function{srv6.CreateStickiness, srv6.RemoveStickiness} {
			frame := signal(kind, sender, flow, function, packet.Flags(packet.ACK))
			tag := func(key desired.SignalKey, function srv6.Function, sender netip.Prefix, flow dataplane.Flow) []byte {
				return withArgument(frame, packettest.Tag(key, function, sender, 0, flow.Source, flow.Destination))
			}
			otherFunction := srv6.CreateStickiness + srv6.RemoveStickiness - function
			otherVIP := flow
			otherVIP.Destination = netip.AddrPortFrom(flow.Destination.Addr().Next(), flow.Destination.Port())
			otherClient := flow
			otherClient.Source = netip.AddrPortFrom(flow.Source.Addr().Next(), flow.Source.Port())
			otherPort := flow
			otherPort.Destination = netip.AddrPortFrom(flow.Destination.Addr(), flow.Destination.Port()+1)
			good := tag(newKey, function, sender, flow)
			for _, c := range []struct {
				name  string
				frame []byte
				taken bool
			}{
				{"the key's", good, true},
				{"the other key's", tag(oldKey, function, sender, flow), true},
				{"none", frame, false},
				{"a stranger's", tag(desired.SignalKey{}, function, sender, flow), false},
				{"of another function", tag(newKey, otherFunction, sender, flow), false},
				{"of another server", tag(newKey, function, other, flow), false},
				{"of another client", tag(newKey, function, sender, otherClient), false},
				{"of another port of the client", tag(newKey, function, sender, fromPort(flow, flow.Source.Port()+1)), false},
				{"of another VIP", tag(newKey, function, sender, otherVIP), false},
				{"of another port of the VIP", tag(newKey, function, sender, otherPort), false},
				{"one with its first bit wrong", packet.FlipByte(good, ethernetLength+24+10), false},
				{"one with its last bit wrong", packet.SetByte(good, ethernetLength+39, good[ethernetLength+39]^1), false},
			} {
				t.Run(fmt.Sprintf("%s/%s/%s", service, function.Short(), c.name), func(t *testing.T) {
					f.t = t
					reason := "return_create"
					if function == srv6.RemoveStickiness {
						reason = "return_remove"
					}
					for _, cfg := range []*desired.Balancer{keyed, hunting(desired.SelectConsistent, 2)} {
						f.mustApply(cfg)
						f.forgetFlows()
						if cfg.Node.SignalKey != "" && !c.taken {
							f.check(refused(c.frame, "drop_tag", layer3(c.frame)), f.run(c.frame))
							continue
						}
						f.check(f.returned(c.frame, reason), f.run(c.frame))
					}
				})
			}
		}
	}
}

func (f *fixture) locatorOf(service, server string) netip.Prefix {
	f.t.Helper()
	return serverOfName(f.service(service), server).Locator
}

// Reloads change the keys: first a second key is accepted as well, then it is the only one. A reload
// reads no file: the keys come with the configuration.
func TestChangeOfKeys(t *testing.T) {
	t.Parallel()
	cfg := func(file string) *desired.Balancer {
		cfg := hunting(desired.SelectConsistent, 2)
		cfg.Node.SignalKey = file
		return cfg
	}
	file := keyFile(t, oldKey)
	f := open(t, cfg(file))
	frame := f.signal(web, "web", f.row(web, "web")[0], srv6.CreateStickiness, synAck)
	takes := func(step string, want ...desired.SignalKey) {
		t.Helper()
		for _, key := range []desired.SignalKey{oldKey, newKey} {
			reason := reasonOf(f.run(tagged(frame, key)))
			if taken := reason == "return_create"; taken != slices.Contains(want, key) {
				t.Errorf("%s: a signal with the tag of key %x is %s", step, key, reason)
			}
		}
	}
	takes("at first", oldKey)
	writeKeys(t, file, oldKey, newKey)
	takes("before the reload", oldKey)
	f.mustApply(cfg(file))
	takes("with both", oldKey, newKey)
	writeKeys(t, file, newKey, oldKey)
	f.mustApply(cfg(file))
	takes("with both the other way around", oldKey, newKey)
	writeKeys(t, file, newKey)
	f.mustApply(cfg(file))
	takes("with the new one", newKey)

	running := f.cfg
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	absent := cfg(file + ".none")
	absent.Node.Instance = running.Node.Instance
	f.must(f.ns.Do(func() error {
		return f.reload(ended, absent, desired.Secrets{SignalKeys: desired.SignalKeys{oldKey}}, nil)
	}))
	f.route()
	takes("after a reload without a file", oldKey)

	f.restartAs(running)
	takes("after a restart", newKey)
	f.mustApply(cfg(""))
	takes("without any", oldKey, newKey)
}

// outsideOf returns a balancer at the edge of the domain, whose interface leads out of the domain.
func outsideOf(cfg *desired.Balancer) *desired.Balancer {
	no := false
	cfg.Node.Internal = &no
	return cfg
}

// intrusions are frames from outside that try to choose their path in the domain. The field
// internal is the reason under which they are counted on an internal interface.
func intrusions() map[string]struct {
	frame    []byte
	internal string
} {
	to := func(sid string, options ...packet.Option) []byte {
		return packet.TCP(client6, netip.AddrPortFrom(netip.MustParseAddr(sid), 80), options...)
	}
	return map[string]struct {
		frame    []byte
		internal string
	}{
		"SID of the balancer":      {to("fd00:6c:0:1:11::"), "pass_not_vip"},
		"with an argument":         {to("fd00:6c:0:1:5::7"), "pass_not_vip"},
		"SID of a server":          {to("fd00:5:0:1:2::"), "pass_not_vip"},
		"with UDP":                 {packet.UDP(client6, netip.MustParseAddrPort("[fd00:5:0:2:5::]:53")), "pass_not_vip"},
		"a packet in it":           {inner(frameOf(web), "fd00:5:0:1:2::"), "pass_not_vip"},
		"with segments left":       {to("::", packet.Routing(packet.NewSRH(1, netip.MustParseAddr("fd00:5:0:1:1::"), vip6))), "pass_not_vip"},
		"a first fragment to it":   {packet.Fragments(to("fd00:5:0:1:2::", large), 64, 7)[0], "pass_not_vip"},
		"a later fragment to it":   {packet.Fragments(to("fd00:5:0:1:2::", large), 64, 7)[1], "pass_not_vip"},
		"segments left for a VIP":  {frameOf(web, packet.Routing(packet.NewSRH(1, vip6, otherIP6))), "drop_routing_header"},
		"the same behind options":  {frameOf(web, packet.HopByHop(8), packet.Routing(packet.NewSRH(1, vip6, otherIP6))), "drop_routing_header"},
		"a signal":                 {signalTo(hunt, 1, srv6.CreateStickiness, synAck), "return_create"},
		"a signal of nobody":       {signalTo(hunt4, 9, srv6.RemoveStickiness, synAck), "drop_sender"},
		"a signal wrapped wrongly": {setByte(signalTo(hunt, 1, srv6.CreateStickiness, synAck), 43, 2), "drop_signal"},
	}
}

// inner returns a frame to a SID that contains the packet of the given frame.
func inner(frame []byte, sid string) []byte {
	out, err := packet.Encapsulate(frame, packet.Encap{
		Kind: desired.SRv6Encap, Sender: client6.Addr(), Segments: []netip.Addr{netip.MustParseAddr(sid)},
		Own: packet.MAC(frame[6:12]), NextHop: packet.MAC(frame[:6]),
	})
	if err != nil {
		panic(err)
	}
	return out
}

// By RFC 8754 section 5.1, packets from outside may not go to a SID, nor to a VIP with segments
// left. All other packets are treated as inside the domain.
func TestOutside(t *testing.T) {
	t.Parallel()
	inside, outside := openStandard(t), open(t, outsideOf(standard()))
	outside.via = maps.Clone(inside.via)
	outside.route()
	for name, c := range intrusions() {
		t.Run(name, func(t *testing.T) {
			inside.t, outside.t = t, t
			if reason := reasonOf(inside.run(c.frame)); reason != c.internal {
				t.Errorf("inside: %s, want %s", reason, c.internal)
			}
			outside.check(refused(c.frame, "drop_outside", layer3(c.frame)), outside.run(c.frame))
		})
	}
	for name, address := range map[string]string{
		"the balancer's host": "fd00:6c:0:1::1", "a server's host": "fd00:5:0:1::1", "nobody's locator": "fd00:5:0:ffff:5::",
	} {
		frame := packet.TCP(client6, netip.AddrPortFrom(netip.MustParseAddr(address), 80))
		t.Run(name, func(t *testing.T) {
			outside.t = t
			outside.check(refused(frame, "pass_not_vip", layer3(frame)), outside.run(frame))
		})
	}
	another := packet.SetByte(intrusions()["SID of a server"].frame, 5, 9)
	outside.check(refused(another, "pass_not_for_host", 0), outside.run(another))
	t.Run("others", func(t *testing.T) {
		outside.t = t
		newReference(outside).compare(t, slices.DeleteFunc(captures(), func(frame []byte) bool { return len(frame) > 1500 }))
	})
	outside.t = t

	// The domain is that of the configuration.
	frame := intrusions()["SID of a server"].frame
	for _, c := range []struct {
		server uint8
		reason string
	}{{1, "drop_outside"}, {2, "pass_not_vip"}, {1, "drop_outside"}} {
		outside.mustApply(outsideOf(balancerOf(serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap, srv6Server("s", c.server, 1)))))
		outside.check(refused(frame, c.reason, layer3(frame)), outside.run(frame))
	}
}

// insideOf returns a balancer at the edge with another interface, which leads into the domain.
func insideOf(cfg *desired.Balancer) *desired.Balancer {
	cfg.Node.Inside = "eth1"
	return outsideOf(cfg)
}

// A balancer with two interfaces guards the domain on one of them only, for all kinds of frames.
func TestInside(t *testing.T) {
	t.Parallel()
	one, two := openStandard(t), open(t, insideOf(standard()))
	two.via = maps.Clone(one.via)
	two.route()
	for name, c := range intrusions() {
		t.Run(name, func(t *testing.T) {
			one.t, two.t, two.inside = t, t, false
			two.check(refused(c.frame, "drop_outside", layer3(c.frame)), two.run(c.frame))
			one.forgetFlows()
			two.forgetFlows()
			two.inside = true
			got := two.run(c.frame)
			two.check(one.run(c.frame), got)
			if reason := reasonOf(got); reason != c.internal {
				t.Errorf("inside: %s, want %s", reason, c.internal)
			}
		})
	}
	r := newReference(two) // one, because it knows which servers it has made fail
	for _, inside := range []bool{false, true} {
		t.Run(fmt.Sprintf("others, inside %v", inside), func(t *testing.T) {
			two.t, two.inside = t, inside
			r.compare(t, slices.DeleteFunc(captures(), func(frame []byte) bool { return len(frame) > 1500 }))
		})
	}
}

// Both interfaces share what they learn. A connection that is offered through one and created
// through the other is known to both, until the server ends it, and after a restart.
func TestInsideLearns(t *testing.T) {
	t.Parallel()
	f := open(t, insideOf(hunting(desired.SelectConsistent, 2)))
	cfg := f.cfg
	for service, flow := range hunted {
		row := f.row(flow, service)
		syn, ack := frameOf(flow), frameOf(flow, packet.Flags(packet.ACK))
		f.inside = false
		f.check(f.offered(syn, flow, service, "forward_hunt", srv6.ConnectAvail, row...), f.run(syn))
		f.inside = true
		created := f.signal(flow, service, row[1], srv6.CreateStickiness, synAck)
		f.check(f.returned(created, "return_create"), f.run(created))
		f.inside = false
		f.check(f.forwarded(ack, flow, service, row[1], "forward_new"), f.run(ack))
		f.restartAs(cfg)
		f.check(f.forwarded(ack, flow, service, row[1], "forward_known"), f.run(ack))
		f.inside = true
		f.check(f.forwarded(ack, flow, service, row[1], "forward_known"), f.run(ack))
		removed := f.signal(flow, service, row[1], srv6.RemoveStickiness, packet.Flags(packet.FIN|packet.ACK))
		f.check(f.returned(removed, "return_remove"), f.run(removed))
		if got := totalOf(f.plane.Flows).Closing; got != 1 {
			t.Errorf("%s: %d flows are closing", service, got)
		}
		f.forgetFlows()
	}
}

// Mutants of signals and intrusions are dropped as in the reference, with signal keys and from
// outside.
func TestMutantsOfStrangers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		cfg    *desired.Balancer
		wanted []string
	}{
		{"with a key", standard(), []string{"drop_tag", "return_create", "return_remove"}},
		{"from outside", outsideOf(standard()), []string{"drop_outside", "forward_new"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			frames := captures()
			for _, intrusion := range intrusions() {
				frames = append(frames, intrusion.frame)
			}
			if c.cfg.Node.IsInternal() {
				c.cfg.Node.SignalKey = keyFile(t, newKey, oldKey)
			}
			r := newReference(open(t, c.cfg))
			for _, frame := range frames {
				if len(frame) > ethernetLength+40 && r.isSignal(frame) {
					if _, ok := hear(frame[ethernetLength:]); ok {
						frames = append(frames, tagged(frame, newKey))
					}
				}
			}
			seen := map[string]int{}
			r.seen = func(o outcome) { seen[reasonOf(o)]++ }
			packettest.TryMutants(t, "FuzzDataPath", frames, r.compare, func() []string {
				return slices.DeleteFunc(slices.Clone(c.wanted), func(reason string) bool { return seen[reason] > 0 })
			})
			t.Log(seen)
		})
	}
}
