// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
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

// secretsOf reads the keys in the file that a configuration names.
func secretsOf(t testing.TB, cfg *desired.Agent) desired.Secrets {
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

// signalWays are the flows and encapsulations of signals.
var signalWays = []struct {
	kind desired.Encapsulation
	flow
}{{desired.SRv6Insert, flow{client6, vip6}}, {desired.SRv6Encap, flow{client6, vip6}}, {desired.SRv6Encap, flow{client4, vip4}}}

// argument returns the argument of the balancer's SID in a frame with a signal.
func argument(frame []byte) uint64 {
	return srv6.Parse(netip.AddrFrom16([16]byte(frame[14+24:]))).Argument
}

// Signals carry the tag of the first key, for both functions and in all encapsulations, also in the
// list of an inserted header. In all other bytes they equal signals without a key.
func TestTags(t *testing.T) {
	k := testKernel(t)
	for _, way := range signalWays {
		for function, flags := range map[srv6.Function]packet.TCPFlags{
			srv6.CreateStickiness: packet.SYN | packet.ACK, srv6.RemoveStickiness: packet.FIN | packet.ACK,
		} {
			frame := packet.TCP(way.vip, way.client, packet.Flags(flags))
			signalled := func(keys ...desired.SignalKey) []byte {
				t.Helper()
				testhost.Must(t, datapath.SetSignalKeys(k.objects.SignalKeys, keys))
				setFlow(t, k, way.flow, way.kind, "wait", 0)
				verdict, out := transmit(t, k, frame, 0)
				if verdict != tcRedirect {
					t.Fatalf("%s, %v, %v: verdict %#x, want %#x", way.kind, way.client, function, verdict, tcRedirect)
				}
				return out
			}
			plain, one, two := signalled(), signalled(oldKey), signalled(newKey, oldKey)
			for _, c := range []struct {
				out  []byte
				want uint64
			}{
				{plain, 0},
				{one, packettest.Tag(oldKey, function, netip.PrefixFrom(node, 64), 0, way.client, way.vip)},
				{two, packettest.Tag(newKey, function, netip.PrefixFrom(node, 64), 0, way.client, way.vip)},
				{signalled(), 0},
			} {
				if got := argument(c.out); got != c.want {
					t.Errorf("%s, %v, %v: argument %#x, want %#x", way.kind, way.client, function, got, c.want)
				}
				p, err := packet.Decode(c.out)
				testhost.Must(t, err)
				if srh := p.Headers[0].SRH; srh != nil && srh.Segments[1] != p.Headers[0].Destination {
					t.Errorf("the list has %v, the destination is %v", srh.Segments[1], p.Headers[0].Destination)
				}
			}
			for _, segment := range []int{14 + 24, 14 + 40 + 8 + 16} { // of the destination, and in the list
				if way.kind == desired.SRv6Insert || segment == 14+24 {
					copy(one[segment+10:segment+16], make([]byte, 6))
				}
			}
			if diff := cmp.Diff(plain, one); diff != "" {
				t.Errorf("%s, %v, %v: the tag is not all that differs (-without +with):\n%s", way.kind, way.client, function, diff)
			}
		}
	}
}

// If balancers are named, functions about connections from all other senders are refused. The
// function deliver is not about connections.
func TestBalancersAreNamed(t *testing.T) {
	k := testKernel(t)
	prefixes := func(all ...string) (parsed []netip.Prefix) {
		for _, prefix := range all {
			parsed = append(parsed, netip.MustParsePrefix(prefix))
		}
		return parsed
	}
	for _, way := range signalWays {
		for _, c := range []struct {
			name   string
			named  []netip.Prefix
			refuse bool // whether the functions of balancer2 are refused
		}{
			{"none", nil, false},
			{"another", prefixes(balancer1.String() + "/64"), true},
			{"several", prefixes(balancer1.String()+"/64", balancer2.String()+"/64"), false},
			{"a prefix of both", prefixes("fd00:6c::/32"), false},
			{"another prefix", prefixes("fd00:6d::/32", "2000::/3"), true},
			{"none any more", nil, false},
		} {
			cfg := huntingConfig(way.kind, desired.Accept{Policy: desired.AcceptAlways}, desired.NotLocalDrop)
			cfg.Node.Balancers = c.named
			testhost.Must(t, k.write(newTableContent(cfg, mtu)))
			for _, e := range handshakeEvents() {
				setFlow(t, k, way.flow, way.kind, "direct", 0)
				flow, before := getFlow(t, k, way.flow), counters(t, k)
				verdict, _ := runAgent(t, k, e.frame(dialogue{flow: way.flow}, way.kind))
				_, refused := changed(before, counters(t, k))["drop_sender"]
				if want := c.refuse && e.function != deliverAlways; refused != want || refused && verdict != xdpDrop {
					t.Errorf("%s, %v, %s named: %s is refused: %t, verdict %d; want %t", way.kind, way.client, c.name, e.name, refused, verdict, want)
				}
				if diff := cmp.Diff(fmt.Sprint(flow), fmt.Sprint(getFlow(t, k, way.flow))); refused && diff != "" {
					t.Errorf("%s, %v, %s named: %s is refused, and changes the flow (-before +after):\n%s", way.kind, way.client, c.name, e.name, diff)
				}
			}
		}
	}
}

// A reload changes the keys of a running agent. It reads no file: the keys come with the
// configuration.
func TestReloadOfKeys(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 1)
	file := filepath.Join(t.TempDir(), "signal.key")
	writeKeys(t, file, oldKey)
	cfg := func(file string) *desired.Agent {
		cfg := n.config(1, desired.SRv6Encap, vip6.Addr())
		cfg.Node.SignalKey = file
		return cfg
	}
	a := n.run(1, cfg(file), link.AttachTCX)
	signs := func(step string, want uint64) {
		t.Helper()
		setFlow(t, a.kernel, signalWays[1].flow, desired.SRv6Encap, "wait", 0)
		_, out := transmit(t, a.kernel, packet.TCP(vip6, client6, packet.Flags(packet.ACK)), 0)
		if got := argument(out); got != want {
			t.Errorf("%s: argument %#x, want %#x", step, got, want)
		}
	}
	tag := func(key desired.SignalKey) uint64 {
		return packettest.Tag(key, srv6.CreateStickiness, netip.PrefixFrom(node, 64), 0, client6, vip6)
	}
	signs("at first", tag(oldKey))
	testhost.Must(t, os.Remove(file))
	testhost.Must(t, a.Reload(t.Context(), cfg(file), desired.Secrets{SignalKeys: desired.SignalKeys{newKey, oldKey}}))
	signs("after a reload", tag(newKey))
	testhost.Must(t, a.Reload(t.Context(), cfg(""), desired.Secrets{}))
	signs("without a key", 0)
}

// A balancer's data path accepts this agent's signals if they share a key, and passes the packet
// on.
func TestBalancerTakesTags(t *testing.T) {
	k := testKernel(t)
	lb := rehearsedBalancer(t, newKey, oldKey)
	for _, way := range signalWays {
		for function, flags := range map[srv6.Function]packet.TCPFlags{
			srv6.CreateStickiness: packet.SYN | packet.ACK, srv6.RemoveStickiness: packet.FIN | packet.ACK,
		} {
			for name, c := range map[string]struct {
				keys    desired.SignalKeys
				verdict uint32
			}{
				"its key": {desired.SignalKeys{newKey}, xdpPass}, "its other key": {desired.SignalKeys{oldKey, newKey}, xdpPass},
				"a stranger's key": {desired.SignalKeys{{}}, xdpDrop}, "none": {nil, xdpDrop},
			} {
				t.Run(fmt.Sprintf("%s/%v/%s/%s", way.kind, way.client.Addr(), function.Short(), name), func(t *testing.T) {
					testhost.Must(t, datapath.SetSignalKeys(k.objects.SignalKeys, c.keys))
					setFlow(t, k, way.flow, way.kind, "wait", 0)
					_, signal := transmit(t, k, packet.TCP(way.vip, way.client, packet.Flags(flags)), 0)
					signal = packet.SetMACs(signal, hostMAC, lbMAC)
					want := signal
					if c.verdict == xdpPass {
						var err error
						if want, err = packet.Return(signal, lbMAC); err != nil {
							t.Fatal(err)
						}
					}
					verdict, out := run(t, lb, signal)
					if diff := cmp.Diff(want, out); verdict != c.verdict || diff != "" {
						t.Errorf("verdict %d, want %d; (-want +got):\n%s", verdict, c.verdict, diff)
					}
				})
			}
		}
	}
}

// If this server passed on the packets of this test, a balancer would take them for signals of this
// server. So the server drops them, even if no balancers are named. The balancer would accept those
// with an inserted header.
func TestForgedSignals(t *testing.T) {
	cfg := testConfig()
	cfg.Node.Balancers = nil
	k := testKernelOf(t, cfg)
	lb := rehearsedBalancer(t)
	for _, way := range signalWays {
		for _, function := range []srv6.Function{srv6.CreateStickiness, srv6.RemoveStickiness} {
			signal := sidOf(balancer1, uint16(function))
			taken, forged := uint32(xdpPass), withoutSender(way.vip, way.client, sid, signal)
			if way.kind == desired.SRv6Encap { // its signals have no list
				e := packet.Encap{Kind: way.kind, Sender: node, Segments: []netip.Addr{sid, signal}}
				taken, forged = xdpDrop, to(way.vip, way.client, e)
			}
			name := fmt.Sprintf("%s/%v/%s", way.kind, way.client.Addr(), function.Short())
			t.Run(name, func(t *testing.T) {
				refuseForgery(t, k, forged)
				passedOn, err := packet.Advance(forged)
				testhost.Must(t, err)
				verdict, _ := run(t, lb, packet.SetMACs(passedOn, hostMAC, lbMAC))
				if verdict != taken {
					t.Errorf("the balancer's verdict %d, want %d", verdict, taken)
				}
			})
		}
	}
}

// refuseForgery requires that XDP drops a frame, and that tc sends it to no other server.
func refuseForgery(t *testing.T, k *kernel, forged []byte) {
	t.Helper()
	before := counters(t, k)
	verdict, _ := runAgent(t, k, forged)
	want := map[string]agentCounter{"drop_next_segment": {Packets: 1, Bytes: uint64(len(forged) - 14)}}
	if diff := cmp.Diff(want, changed(before, counters(t, k))); verdict != xdpDrop || diff != "" {
		t.Errorf("verdict %d; counters (-want +got):\n%s", verdict, diff)
	}
	verdict, out := run(t, k.objects.TcForward, forged)
	if verdict != tcUnspec || !bytes.Equal(forged, out) {
		t.Errorf("at tc: verdict %#x, want %#x and the frame as it was", verdict, uint32(tcUnspec))
	}
}

// A forwarded packet carries no signal, even if it looks like a packet of an application. Otherwise
// routers and hosts with containers would sign packets of any sender.
func TestForwardedPacketsDoNotSignal(t *testing.T) {
	k := testKernel(t)
	all := []packet.TCPFlags{packet.SYN | packet.ACK, packet.ACK, packet.FIN | packet.ACK, packet.RST}
	for _, way := range signalWays {
		for _, flags := range all {
			frame := packet.TCP(way.vip, way.client, packet.Flags(flags))
			name := fmt.Sprintf("%s, %v, flags %v", way.kind, way.client, flags)

			setFlow(t, k, way.flow, way.kind, "wait", 0)
			flow := getFlow(t, k, way.flow)
			verdict, out := transmitAs(t, k, frame, map[int]uint32{ingressIfindexAt: 1})
			if verdict != tcUnspec || !bytes.Equal(frame, out) || getFlow(t, k, way.flow) != flow {
				t.Errorf("%s: verdict %#x, flow %v; %x", name, verdict, getFlow(t, k, way.flow), out)
			}
			if verdict, _ := transmit(t, k, frame, 0); verdict != tcRedirect {
				t.Errorf("%s: verdict %#x for the host's own packet", name, verdict)
			}
		}
	}
}

var lbMAC = packet.MAC{2, 0, 0, 0, 6, 1}

// rehearsedBalancer returns the unattached data path of the first balancer.
func rehearsedBalancer(t *testing.T, keys ...desired.SignalKey) *ebpf.Program {
	t.Helper()
	cfg, _, err := config.ParseBalancer(fmt.Appendf(nil, `
node:
  instance: test-%d-balancer
  interface: eth0
  locator: "fd00:6c:0:1::/64"
  limits: {flows: 1024, servers: 4}
services:
  - {name: six, vip: %q, port: 80, protocol: tcp, placement: hunt, candidates: 1, servers: &s [{name: s, locator: "fd00:5:0:1::/64"}]}
  - {name: four, vip: %q, port: 80, protocol: tcp, placement: hunt, candidates: 1, servers: *s}
`, os.Getpid(), vip6.Addr(), vip4.Addr()))
	testhost.Must(t, err)
	lb, err := balancer.NewRehearsal(cfg, desired.Secrets{SignalKeys: keys}, slog.New(slog.DiscardHandler))
	testhost.Must(t, err)
	t.Cleanup(func() {
		if err := errors.Join(lb.Close(), dataplane.Detach(cfg.Node.Instance)); err != nil {
			t.Error(err)
		}
	})
	lo, err := net.InterfaceByName("lo")
	testhost.Must(t, err)
	program, err := lb.Fill(nexthop.Hop{
		MAC: hostMAC, Link: nexthop.Link{Index: lo.Index, Name: lo.Name, Type: "veth", MAC: lbMAC, MTU: 9000},
	})
	testhost.Must(t, err)
	return program
}

// outsideConfig is testConfig with an interface that leads out of the domain.
func outsideConfig() *desired.Agent {
	cfg, no := testConfig(), false
	cfg.Node.Internal = &no
	return cfg
}

// RFC 8754 section 5.1: packets from outside the domain to a SID, or to a VIP with segments left,
// are dropped. All other packets are processed as inside.
func TestOutside(t *testing.T) {
	c := openComparisonOf(t, outsideConfig())
	direct := func(options ...packet.Option) []byte {
		return packet.TCP(client6, vip6, append(options, packet.Ethernet(packet.MAC{2}, hostMAC))...)
	}
	left := packet.Routing(packet.NewSRH(1, vip6.Addr(), other6.Addr()))
	over := packet.Routing(packet.NewSRH(0, vip6.Addr()))
	insert := to(client6, vip6, srv6Encap(desired.SRv6Insert, sid))
	for _, v := range []packetCase{
		{"inserted", insert, "drop_outside", nil},
		{"wrapped", to(client4, vip4, srv6Encap(desired.SRv6Encap, sid)), "drop_outside", nil},
		{"wrapped for the next one too", to(client6, vip6, srv6Encap(desired.SRv6Encap, sid, nextSID)), "drop_outside", nil},
		{"an unknown function", set(insert, functionAt, 0, 0x11), "drop_outside", nil},
		{"a short packet to a SID", cut(insert, 50), "drop_outside", nil},
		{"version 4 to a SID", set(insert, 0, 0x40), "drop_outside", nil},
		{"segments left for a VIP", direct(left), "drop_outside", nil},
		{"the same behind options", direct(packet.HopByHop(8), packet.DestinationOptions(16), left), "drop_outside", nil},
		{"the host", set(insert, functionAt, 0, 0), "pass_host", nil},
		{"another host's", packet.SetByte(insert, 5, 9), "pass_not_for_host", nil},
		{"a VIP", direct(), "pass_not_for_agent", nil},
		{"no segments left", direct(over), "pass_not_for_agent", nil},
		{"segments left for a stranger", packet.TCP(client6, other6, packet.Ethernet(packet.MAC{2}, hostMAC),
			packet.Routing(packet.NewSRH(1, other6.Addr(), vip6.Addr()))), "pass_not_for_agent", nil},
		{"a tunnel", to(client6, vip6, tunnel(desired.IPIP, tunnel6)), "deliver_ipip",
			delivered(to(client6, vip6, tunnel(desired.IPIP, tunnel6)))},
	} {
		t.Run(v.name, func(t *testing.T) {
			if reason, _ := c.receive(v.frame); reason != v.reason {
				t.Errorf("the reference says %s, want %s", reason, v.reason)
			}
			if v.out == nil {
				v.out = v.frame
			}
			before := counters(t, c.kernel)
			c.check(t, v.frame, v.reason, v.out)
			want := map[string]agentCounter{v.reason: {Packets: 1, Bytes: uint64(len(v.frame) - 14)}}
			if diff := cmp.Diff(want, changed(before, counters(t, c.kernel))); diff != "" {
				t.Errorf("counters (-want +got):\n%s", diff)
			}
		})
	}
}

// The reasons for mutants of all frames agree with the reference, also if the interface leads
// outside.
func TestMutantsFromOutside(t *testing.T) {
	d := openComparisonOf(t, outsideConfig()).incoming()
	d.captures = append(d.captures, packet.TCP(client6, vip6, packet.Ethernet(packet.MAC{2}, hostMAC), packet.HopByHop(8),
		packet.Routing(packet.NewSRH(1, vip6.Addr(), other6.Addr()))))
	packettest.TryMutants(t, "FuzzReceive", d.captures, d.compare, func() (missing []string) {
		for _, reason := range []string{"drop_outside", "pass_host", "deliver_gre", "deliver_ipip"} {
			if d.seen[reason] == 0 {
				missing = append(missing, reason)
			}
		}
		return missing
	})
	t.Log(d.seen)
}
