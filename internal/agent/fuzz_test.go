// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// comparison is an unattached data path and its reference.
type comparison struct {
	*kernel
	reference
	cfg     *desired.Agent
	table   *flowTable
	seen    map[string]int    // frames by reason
	signals map[string]uint64 // wanted signals by result, of the frames that are being compared
	quicIDs map[string]uint64 // the same of compared connection IDs
}

// openComparison leaves nothing pinned, because a fuzzing process may be killed at any time.
func openComparison(t testing.TB) *comparison {
	cfg := testConfig()
	cfg.Services[0].Load = desired.Source{Kind: desired.LoadSharedMemory}
	cfg.Services[2].Load = desired.Source{Kind: desired.LoadAcceptQueue}
	cfg.Services = append(cfg.Services, desired.AgentService{
		Name: "least", VIP: comparing.vip.Addr(), Port: desired.Port(comparing.vip.Port()),
		Protocol: desired.TCP, Encapsulation: desired.SRv6Encap,
		Accept: desired.Accept{Policy: desired.AcceptLeast},
		Load:   desired.Source{Kind: desired.LoadSharedMemory}, NotLocal: desired.NotLocalDrop,
	})
	cfg.Services = append(append(cfg.Services, quicServices()...), huntedQUIC())
	return openComparisonOf(t, cfg)
}

// comparing is a flow of a service with policy least. Nothing listens.
var comparing = flow{client6, netip.AddrPortFrom(vip6.Addr(), 81)}

func openComparisonOf(t testing.TB, cfg *desired.Agent) *comparison {
	k := testKernelOf(t, cfg)
	testhost.Must(t, k.objects.CookiesUsed.Put(uint32(0), uint32(1)))
	c := &comparison{k, newReference(cfg), cfg, tableOf(t, k), map[string]int{}, map[string]uint64{}, map[string]uint64{}}
	testhost.Must(t, datapath.RemoveDir(c.loader.Instance))
	return c
}

// captures returns frames for each reason to deliver or drop a packet.
func captures() (frames [][]byte) {
	for _, kind := range encapsulations {
		own := candidateSID(1, srv6.ConnectAvail, srv6.Offer{Column: 2})
		earlier := []netip.Addr{
			candidateSID(2, srv6.ConnectAvail, told(0, 3, 2)), candidateSID(3, srv6.ConnectAvail, told(1, 4, 2)),
		}
		frames = append(frames, offered(kind, comparing, append([]netip.Addr{own}, earlier...), 0),
			offered(kind, comparing, append(earlier, own), 2))
	}
	for _, cases := range [][]packetCase{deliveries(), passes(), drops(), nexts(), probes()} {
		for _, c := range cases {
			if len(c.frame) >= 14 {
				frames = append(frames, c.frame)
			}
		}
	}
	for _, c := range deliveredIDs() {
		frames = append(frames, c.frame)
	}
	return slices.Concat(frames, ecnCaptures(), reportCaptures(), cookieCaptures(), initialCaptures())
}

// ecnCaptures returns all combinations of figure 4 of RFC 6040.
func ecnCaptures() (frames [][]byte) {
	way := srv6Encap(desired.SRv6Encap, sid)
	for inner := range uint8(4) {
		class := packet.TrafficClass(0xb8 | inner)
		for _, frame := range [][]byte{to(client4, vip4, way, class), to(client6, vip6, way, class)} {
			for outer := range uint8(4) {
				frames = append(frames, set(frame, 1, frame[15]&^0x30|outer<<4))
			}
		}
	}
	return frames
}

// synAckCaptures returns frames that the host sends.
func synAckCaptures() (frames [][]byte) {
	for _, c := range synAcks() {
		frames = append(frames, c.frame)
	}
	for _, c := range issuedIDs() {
		frames = append(frames, c.frame)
	}
	return slices.Concat(frames, sentCaptures(), sentStampCaptures())
}

// direction is the direction in which frames pass the agent. give passes a frame to the data path
// and to the reference, and compares the results. It returns the counter that changes, and by how
// much. The counter is "" if none changes.
type direction struct {
	*comparison
	stage    *stage // where the frames are given to the data path; nil: in the present namespace
	captures [][]byte
	give     func(t *testing.T, frame []byte) (counter string, n agentCounter)
}

func (c *comparison) incoming() direction { return direction{c, nil, captures(), c.giveIncoming} }

// steered is the direction to the host, in a namespace that has connections.
func (c *comparison) steered(t testing.TB) direction {
	s := newStage(t)
	for _, f := range []flow{{client4, vip4}, {client6, vip6}} {
		_, server := s.connect(f, s.listen(f.vip))
		// Nobody would answer a keep-alive.
		testhost.Must(t, server.(*net.TCPConn).SetKeepAlive(false))
	}
	c.sockets = func(f flow) sockets {
		if f == (flow{client4, vip4}) || f == (flow{client6, vip6}) {
			return sockets{connected: true}
		}
		return listensAtPort80(f)
	}
	return direction{c, s, cookieCaptures(), c.giveIncoming}
}

// outgoing is the direction from the host, in a namespace where applications listen on port 80.
func (c *comparison) outgoing(t testing.TB) direction {
	s := newStage(t)
	s.listen(vip4)
	s.listen(vip6)
	c.sockets = listensAtPort80
	return direction{c, s, synAckCaptures(), c.giveOutgoing}
}

// FuzzReceive passes frames to the data path and to the reference.
func FuzzReceive(f *testing.F) {
	d := openComparison(f).incoming()
	packettest.Fuzz(f, d.captures, d.compare)
}

// FuzzSteer does the same as FuzzReceive in a namespace that has connections, whose packets carry
// cookies.
func FuzzSteer(f *testing.F) {
	d := openComparison(f).steered(f)
	packettest.Fuzz(f, d.captures, d.compare)
}

// FuzzTransmit does the same as FuzzReceive with frames that the host sends.
func FuzzTransmit(f *testing.F) {
	d := openComparison(f).outgoing(f)
	packettest.Fuzz(f, d.captures, d.compare)
}

// TestMutants does the same as FuzzReceive for a limited time, with different frames each time.
// Each reason occurs for some mutant.
func TestMutants(t *testing.T) {
	d := openComparison(t).incoming()
	packettest.TryMutants(t, "FuzzReceive", d.captures, d.compare, func() []string {
		return slices.DeleteFunc(slices.Clone(d.labels.reasons), func(reason string) bool {
			switch reason {
			case "none", "drop_rewrite": // the kernel decides
				return true
			case "drop_rate_limit", "drop_outside": // TestResetRate, TestMutantsFromOutside
				return true
			case "drop_stranger", "drop_underlay": // TestUnderlay
				return true
			}
			return d.seen[reason] > 0
		})
	})
	if d.seen["quic_id_delivered_other"] == 0 {
		t.Error("no packet with the connection ID of another server")
	}
	t.Log(d.seen)
}

// TestSteeredMutants does the same as FuzzSteer for a limited time. Each result of a packet of a
// connection occurs.
func TestSteeredMutants(t *testing.T) {
	d := openComparison(t).steered(t)
	packettest.TryMutants(t, "FuzzSteer", d.captures, d.compare, func() []string {
		wanted := []string{
			"deliver_srv6_insert", "deliver_srv6_encap", "next_refused", "next_not_local", "drop_not_local",
			"cookie taken", "cookie entered",
		}
		return slices.DeleteFunc(wanted, func(result string) bool { return d.seen[result] > 0 })
	})
	t.Log(d.seen)
}

// TestSentMutants does the same as FuzzTransmit for a limited time. Each result occurs for some
// mutant.
func TestSentMutants(t *testing.T) {
	d := openComparison(t).outgoing(t)
	packettest.TryMutants(t, "FuzzTransmit", d.captures, d.compare, func() []string {
		wanted := append(slices.Clone(d.labels.synAcks), "")
		wanted = append(wanted, "signal create", "signal remove", "signal too_long", "stamp")
		wanted = append(wanted, "quic_id_issued_own", "quic_id_issued_other")
		return slices.DeleteFunc(wanted, func(result string) bool { return d.seen[result] > 0 })
	})
	t.Log(d.seen)
}

// compare forgets all flows, and then passes frames to the data path and to the reference. The
// verdicts, all bytes, all counters and all flows must agree.
func (d direction) compare(t *testing.T, frames [][]byte) {
	t.Helper()
	if d.stage == nil {
		d.compareHere(t, frames)
		return
	}
	d.stage.t = t
	d.stage.do(func() error {
		d.compareHere(t, frames)
		return nil
	})
}

func (d direction) compareHere(t *testing.T, frames [][]byte) {
	t.Helper()
	d.table.t = t
	d.forgetFlows()
	clear(d.signals)
	clear(d.quicIDs)
	before, want := d.allCounters(t), map[string]agentCounter{}
	for _, frame := range frames {
		if counter, n := d.give(t, frame); counter != "" {
			sum := want[counter]
			want[counter] = agentCounter{Packets: sum.Packets + n.Packets, Bytes: sum.Bytes + n.Bytes}
		}
	}
	for result, n := range d.signals {
		want["signal_"+result] = agentCounter{Packets: n}
	}
	for result, n := range d.quicIDs {
		want[result] = agentCounter{Packets: n}
	}
	d.checkCount(t)
	got := changed(before, d.allCounters(t))
	if maps.Equal(want, got) {
		return
	}
	if len(frames) > 1 && !t.Failed() { // finds the frame that failed
		for _, frame := range frames {
			d.compareHere(t, [][]byte{frame})
		}
	}
	if !t.Failed() || len(frames) == 1 {
		t.Errorf("%d frames, the last of them %s\ncounters (-want +got):\n%s",
			len(frames), explain(frames[len(frames)-1]), cmp.Diff(want, got))
	}
}

// allCounters returns the counters of frames, of signals and of connection IDs.
func (c *comparison) allCounters(t *testing.T) map[string]agentCounter {
	t.Helper()
	all := counters(t, c.kernel)
	signals, err := sums(c.objects.Signals, c.labels.signals)
	testhost.Must(t, err)
	for result, n := range signals {
		if n != 0 {
			all["signal_"+result] = agentCounter{Packets: n}
		}
	}
	for name, ids := range countedIDs(t, c.kernel, c.cfg) {
		all[name] = agentCounter{Packets: all[name].Packets + ids.Packets}
	}
	return all
}

// compareID notes the wanted result of a connection ID. The result is "" if it is not compared.
func (c *comparison) compareID(result string) {
	if result != "" {
		c.quicIDs["quic_id_"+result]++
		c.seen["quic_id_"+result]++
	}
}

func (c *comparison) giveIncoming(t *testing.T, frame []byte) (string, agentCounter) {
	t.Helper()
	reason, out := c.receive(frame)
	c.seen[reason]++
	result, _ := c.deliveredID(reason, out)
	c.compareID(result)
	if plain, err := packet.Decapsulate(frame); err == nil && strings.HasPrefix(reason, "deliver_") && !bytes.Equal(plain, out) {
		c.seen["cookie taken"]++
	}
	for _, known := range c.flows {
		if known.state == "cookie" {
			c.seen["cookie entered"]++
		}
	}
	c.check(t, frame, reason, out)
	c.checkFlows(t, frame)
	return reason, agentCounter{Packets: 1, Bytes: uint64(len(frame) - 14)}
}

func (c *comparison) giveOutgoing(t *testing.T, frame []byte) (string, agentCounter) {
	t.Helper()
	if !hasIPHeader(frame) {
		return "", agentCounter{}
	}
	issued, _ := c.issuedID(frame)
	c.compareID(issued)
	result, want := c.transmit(frame)
	c.seen[result]++
	if s, ok := readSent(frame); ok {
		c.sendVaried(t, s, frame, want)
	} else if verdict, out := run(t, c.objects.TcAgent, frame); verdict != tcUnspec || !bytes.Equal(want, out) {
		t.Errorf("%s\n%q: verdict %#x, want %#x; (-want +got):\n%s",
			explain(frame), result, verdict, uint32(tcUnspec), cmp.Diff(want, out))
	}
	if result == "" {
		return "", agentCounter{}
	}
	return "syn_ack_" + result, agentCounter{Packets: 1}
}

// hasIPHeader returns false if the kernel makes no socket buffer of the frame, because the frame is
// shorter than a header of its EtherType.
func hasIPHeader(frame []byte) bool {
	switch binary.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		return len(frame) >= 14+20
	case 0x86dd:
		return len(frame) >= 14+40
	}
	return true
}

// check compares the verdict and the resulting frame. If the frame is passed on, it also compares
// the result of the tc program.
func (c *comparison) check(t *testing.T, frame []byte, reason string, want []byte) {
	t.Helper()
	refill(t, c.kernel)
	verdict, out := runAgent(t, c.kernel, frame)
	if drop := strings.HasPrefix(reason, "drop_"); drop != (verdict == xdpDrop) || !drop && verdict != xdpPass {
		t.Errorf("%s\nthe verdict is %d for a frame to be counted as %s", explain(frame), verdict, reason)
	}
	if reason == "answer_probe" {
		want = withClockOf(t, want, out)
	}
	if !bytes.Equal(want, out) {
		t.Errorf("%s\n%s: the frame that comes out is other (-want +got):\n%s", explain(frame), reason, cmp.Diff(want, out))
	}
	if reason == "answer_probe" {
		c.checkSentBack(t, out)
	}
	if !isSentOn(reason) {
		return
	}
	if verdict, sent := run(t, c.objects.TcForward, out); verdict != tcRedirect || !bytes.Equal(out, sent) {
		t.Errorf("%s\non to the next segment: verdict %d, want %d; (-want +got):\n%s",
			explain(frame), verdict, tcRedirect, cmp.Diff(out, sent))
	}
}

// withClockOf returns the wanted answer to a probe with the clock of the answer that was sent,
// which must be the present time.
func withClockOf(t *testing.T, want, sent []byte) []byte {
	t.Helper()
	const clock = 4 // the bytes at the end of an answer
	if len(sent) != len(want) {
		return want
	}
	requireNow(t, binary.BigEndian.Uint32(sent[len(sent)-clock:])&(1<<27-1))
	return slices.Concat(want[:len(want)-clock], sent[len(sent)-clock:])
}

// checkSentBack compares the tc program's result for an answer. The answer goes to the neighbour
// that sent the probe.
func (c *comparison) checkSentBack(t *testing.T, answer []byte) {
	t.Helper()
	want := packet.SetMACs(answer, packet.MAC(answer), packet.MAC(answer[6:]))
	if verdict, out := run(t, c.objects.TcForward, answer); verdict != tcRedirect || !bytes.Equal(want, out) {
		t.Errorf("%s\nback to where it came from: verdict %d, want %d; (-want +got):\n%s",
			explain(answer), verdict, tcRedirect, cmp.Diff(want, out))
	}
}

func explain(frame []byte) string {
	decoded, err := packet.Decode(frame)
	return fmt.Sprintf("%v (%v), %d bytes: %x", decoded, err, len(frame), frame)
}
