// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/testhost"
)

const (
	xdpDrop    = 1
	xdpPass    = 2
	tcUnspec   = 0xffffffff // TC_ACT_UNSPEC: continue with the next program
	tcShot     = 2
	tcRedirect = 7
)

var (
	hostMAC = packet.MAC{2, 0, 0, 0, 1, 2}
	client4 = netip.MustParseAddrPort("203.0.113.7:40000")
	client6 = netip.MustParseAddrPort("[2001:db8:c::7]:40000")
	vip4    = netip.MustParseAddrPort("198.51.100.80:80")
	vip6    = netip.MustParseAddrPort("[2001:db8:80::1]:80")
	other4  = netip.MustParseAddrPort("198.51.100.99:80")
	other6  = netip.MustParseAddrPort("[2001:db8:80::99]:80")
	tunnel4 = netip.MustParseAddr("192.0.2.53")
	tunnel6 = netip.MustParseAddr("fd00:9::53")
	sid     = netip.MustParseAddr("fd00:5:0:1:5::")
	nextSID = netip.MustParseAddr("fd00:5:0:2:5::")
	sender  = netip.MustParseAddr("fd00:6c:0:1::")
)

// testConfig is the configuration of a server with a TCP service on each of two VIPs, and a service
// of all ports on a third.
func testConfig() *desired.Agent {
	yes := true
	return &desired.Agent{
		Node: desired.AgentNode{
			Instance: "test-agent", Interface: "eth0", AssignVIPs: &yes,
			Locator: netip.MustParsePrefix("fd00:5:0:1::/64"), Addresses: []netip.Addr{tunnel4, tunnel6},
			Balancers: []netip.Prefix{netip.MustParsePrefix("fd00:6c::/32")},
		},
		Services: []desired.AgentService{
			{Name: "insert", VIP: vip6.Addr(), Port: 80, Protocol: desired.TCP, Encapsulation: desired.SRv6Insert,
				Accept: desired.Accept{Policy: desired.AcceptAlways}, NotLocal: desired.NotLocalReset},
			{Name: "gre", VIP: vip4.Addr(), Port: 80, Protocol: desired.TCP, Encapsulation: desired.GRE},
			{Name: "all", VIP: vip4.Addr(), Port: desired.AllPorts, Protocol: desired.TCP, Encapsulation: desired.SRv6Encap,
				Accept: desired.Accept{Policy: desired.AcceptNever}, NotLocal: desired.NotLocalDrop},
			{Name: "udp", VIP: vip6.Addr(), Port: 53, Protocol: desired.UDP, Encapsulation: desired.IPIP},
		},
	}
}

// mtu is the MTU of the path from the balancers, in bytes.
const mtu = 1500

// unattached is the number of unattached data paths that this process has made.
var unattached atomic.Uint32

// testKernel returns an unattached data path.
func testKernel(t testing.TB) *kernel {
	t.Helper()
	return testKernelOf(t, testConfig())
}

func testKernelOf(t testing.TB, cfg *desired.Agent) *kernel {
	t.Helper()
	testhost.NeedAgent(t)
	cfg.Node.Instance = fmt.Sprintf("test-%d-packets%d", os.Getpid(), unattached.Add(1))
	reused := reuseFor(t, &cfg.Node)
	k, err := openKernel(&cfg.Node, slog.New(slog.DiscardHandler))
	testhost.Must(t, err)
	reused.record(t, k)
	t.Cleanup(func() {
		if err := errors.Join(closeDryRun(k), k.close(), datapath.RemoveDir(cfg.Node.Instance)); err != nil {
			t.Error(err)
		}
	})
	testhost.Must(t, errors.Join(k.write(newTableContent(cfg, mtu)), k.setHostMAC(hostMAC)))
	return k
}

// counters returns the counters that are not zero.
func counters(t testing.TB, k *kernel) map[string]agentCounter {
	t.Helper()
	reasons, err := datapath.CountReasons(k.objects.Reasons, k.labels.reasons)
	testhost.Must(t, err)
	all := map[string]agentCounter{}
	for _, r := range reasons {
		if r.Packets != 0 || r.Bytes != 0 {
			all[r.Reason] = agentCounter{Packets: r.Packets, Bytes: r.Bytes}
		}
	}
	synAcks, err := sums(k.objects.SynAcks, k.labels.synAcks)
	testhost.Must(t, err)
	for result, n := range synAcks {
		if n != 0 {
			all["syn_ack_"+result] = agentCounter{Packets: n}
		}
	}
	return all
}

// changed returns the counters that differ, and by how much.
func changed(before, after map[string]agentCounter) map[string]agentCounter {
	out := map[string]agentCounter{}
	for reason, c := range after {
		c.Packets -= before[reason].Packets
		c.Bytes -= before[reason].Bytes
		if c != (agentCounter{}) {
			out[reason] = c
		}
	}
	return out
}

// refill resets the rate limit of resets on every core.
func refill(t testing.TB, k *kernel) { setReset(t, k, 0) }

// setReset sets the time up to which each core has used its allowance of resets, in ns.
func setReset(t testing.TB, k *kernel, ns uint64) {
	t.Helper()
	used := slices.Repeat([]uint64{ns}, ebpf.MustPossibleCPU())
	testhost.Must(t, k.objects.Resets.Put(uint32(0), used))
}

func run(t testing.TB, prog *ebpf.Program, frame []byte) (verdict uint32, out []byte) {
	t.Helper()
	verdict, out, err := prog.Test(frame)
	if err != nil {
		t.Fatalf("run %v: %v", prog, err)
	}
	return verdict, out
}

// to returns a client's encapsulated SYN.
func to(src, dst netip.AddrPort, e packet.Encap, options ...packet.Option) []byte {
	return wrap(packet.TCP(src, dst, options...), e)
}

func wrap(frame []byte, e packet.Encap) []byte {
	e.NextHop = hostMAC
	out, err := packet.Encapsulate(frame, e)
	if err != nil {
		panic(fmt.Sprintf("encapsulate: %v", err))
	}
	return out
}

func srv6Encap(kind desired.Encapsulation, segments ...netip.Addr) packet.Encap {
	return packet.Encap{Kind: kind, Sender: sender, Segments: segments, FlowLabel: 0x12345}
}

func tunnel(kind desired.Encapsulation, destination netip.Addr) packet.Encap {
	source := netip.MustParseAddr("192.0.2.1")
	if destination.Is6() {
		source = netip.MustParseAddr("fd00:9::1")
	}
	return packet.Encap{Kind: kind, Source: source, Destination: destination, FlowLabel: 0x12345}
}

// set returns a copy of the frame with other bytes at an offset in layer 3.
func set(frame []byte, offset int, values ...byte) []byte {
	for i, v := range values {
		frame = packet.SetByte(frame, 14+offset+i, v)
	}
	return frame
}

// shorten removes bytes from the end of the frame, without changing the length in the IPv6 header.
func shorten(frame []byte, n int) []byte { return packet.Truncate(frame, len(frame)-n) }

// cut removes bytes from the end of an IPv6 packet, and adapts the length in its header.
func cut(frame []byte, length int) []byte {
	return set(packet.Truncate(frame, 14+length), 4, byte((length-40)>>8), byte(length-40))
}

// Offsets of the fields that the cases change, in an inserted header after the IPv6 header.
const (
	srhAt           = 40
	srhLength       = srhAt + 1
	srhType         = srhAt + 2
	srhSegmentsLeft = srhAt + 3
	srhLastEntry    = srhAt + 4
	functionAt      = 24 + 8
)

func TestReceive(t *testing.T) {
	k := testKernel(t)
	for _, group := range []struct {
		verdict uint32
		cases   []packetCase
	}{
		{xdpPass, deliveries()}, {xdpPass, passes()}, {xdpPass, nexts()}, {xdpDrop, drops()},
		{xdpPass, answered(true)}, {xdpDrop, answered(false)},
	} {
		for _, c := range group.cases {
			t.Run(c.reason+"/"+c.name, func(t *testing.T) {
				before := counters(t, k)
				verdict, out := runAgent(t, k, c.frame)
				if verdict != group.verdict {
					t.Errorf("verdict %d, want %d", verdict, group.verdict)
				}
				want := map[string]agentCounter{c.reason: {Packets: 1, Bytes: uint64(len(c.frame) - 14)}}
				if diff := cmp.Diff(want, changed(before, counters(t, k))); diff != "" {
					t.Errorf("counters (-want +got):\n%s", diff)
				}
				wantOut := c.out
				if wantOut == nil {
					wantOut = c.frame
				}
				if c.reason == "answer_probe" {
					wantOut = withClockOf(t, wantOut, out)
				}
				if diff := cmp.Diff(wantOut, out); diff != "" {
					t.Errorf("frame (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// A core can reset 100 flows at once, and after that 1000 per second. It drops the packets of
// further flows.
func TestResetRate(t *testing.T) {
	always := desired.Accept{Policy: desired.AcceptAlways}
	k := testKernelOf(t, huntingConfig(desired.SRv6Encap, always, desired.NotLocalReset))
	for _, f := range []flow{{client4, vip4}, {client6, vip6}} {
		data := packet.TCP(f.client, f.vip, packet.Flags(packet.ACK))
		lost := asks(desired.SRv6Encap, recoverStickiness, data)
		refill(t, k)
		before, start := counters(t, k), time.Now()
		onOneCore(t, func() {
			for range 300 {
				runAgent(t, k, lost)
			}
		})
		most := 100 + uint64(time.Since(start).Milliseconds()) + 10 // for a jiffy
		got := changed(before, counters(t, k))
		reset, beyond := got["deliver_not_local"].Packets, got["drop_rate_limit"].Packets
		if reset < 100 || reset > most || reset+beyond != 300 {
			t.Errorf("%v: %d of 300 were reset, and %d not; want 100 to %d", f.vip, reset, beyond, most)
		}

		setReset(t, k, math.MaxInt64)
		verdict, out := runAgent(t, k, lost)
		if verdict != xdpDrop || !bytes.Equal(lost, out) {
			t.Errorf("%v: verdict %d, want a drop and the frame as it was", f.vip, verdict)
		}
		// A packet of a flow that the server has does not count for the limit.
		known := asks(desired.SRv6Encap, ackStickiness, data)
		if verdict, _ := runAgent(t, k, known); verdict != xdpPass {
			t.Errorf("%v: verdict %d for a packet of a known flow", f.vip, verdict)
		}
	}
}

// onOneCore runs a function on one of the cores that the test may use.
func onOneCore(t *testing.T, f func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var allowed, one unix.CPUSet
	testhost.Must(t, unix.SchedGetaffinity(0, &allowed))
	for cpu := 0; one.Count() == 0; cpu++ {
		if allowed.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	testhost.Must(t, unix.SchedSetaffinity(0, &one))
	defer func() {
		if err := unix.SchedSetaffinity(0, &allowed); err != nil {
			t.Error(err)
		}
	}()
	f()
}

// TestReferenceAgrees delivers random packets in random encapsulations, some with one changed byte
// in their headers. The data path delivers exactly what the reference delivers.
func TestReferenceAgrees(t *testing.T) {
	k := testKernel(t)
	rapid.Check(t, func(r *rapid.T) {
		version := rapid.SampledFrom([]int{4, 6}).Draw(r, "version")
		frame := packettest.Frame(version).Draw(r, "frame")
		e := packettest.Encap(version).Draw(r, "encapsulation")
		e.NextHop = hostMAC
		inner, err := packet.Decode(frame)
		if err != nil {
			r.Fatal(err)
		}
		vip := inner.Headers[0].FinalDestination()
		cfg := testConfig()
		cfg.Node.Locator, cfg.Node.Addresses = netip.Prefix{}, []netip.Addr{e.Destination}
		if len(e.Segments) > 0 {
			cfg.Node.Locator, cfg.Node.Addresses = netip.PrefixFrom(e.Segments[0], 64).Masked(), nil
		}
		cfg.Services = []desired.AgentService{{VIP: vip, Protocol: desired.UDP}}
		if err := k.write(newTableContent(cfg, mtu)); err != nil {
			r.Fatal(err)
		}
		wrapped, err := packet.Encapsulate(frame, e)
		if err != nil {
			r.Skip(err)
		}
		if len(inner.VLANs) > 0 {
			r.Skip("VLAN tags are for the host")
		}
		if rapid.Bool().Draw(r, "damage") {
			at := rapid.IntRange(14, min(len(wrapped)-1, 14+200)).Draw(r, "at")
			wrapped = packet.SetByte(wrapped, at, rapid.Byte().Draw(r, "value"))
		}
		if function := binary.BigEndian.Uint16(wrapped[14+functionAt:]); len(e.Segments) > 0 &&
			function >= connectAvail && function <= probe && function != deliverAlways {
			r.Skip("a function that depends on the sockets of the host")
		}
		reason, want := newReference(cfg).receive(wrapped)
		wantVerdict := uint32(xdpPass)
		if strings.HasPrefix(reason, "drop_") {
			wantVerdict = xdpDrop
		}
		got, out := runAgent(t, k, wrapped)
		if got != wantVerdict {
			r.Fatalf("XDP verdict %d, want %d: the reference says %s", got, wantVerdict, reason)
		}
		if diff := cmp.Diff(want, out); diff != "" {
			r.Fatalf("%s, frame (-want +got):\n%s", reason, diff)
		}
	})
}
