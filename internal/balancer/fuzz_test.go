// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// openReference returns a balancer with all encapsulations and all kinds of services and servers,
// and its reference. It pins nothing, because a fuzzing process can be killed at any time.
func openReference(t testing.TB) *reference {
	t.Helper()
	return openReferenceWith(t, 0, cookieServices)
}

// vipGone is a VIP whose last service was removed.
var vipGone = netip.MustParseAddr("2001:db8:80::90")

// openHintReference is as openReference, with services of persistence hint and a hint table that is
// so small that sets overflow.
func openHintReference(t testing.TB) *reference {
	t.Helper()
	return openReferenceWith(t, 16, columnServices)
}

// openReferenceWith returns a balancer with a hint table of a capacity, and with services that find
// flows by columns besides all others.
func openReferenceWith(t testing.TB, hints uint32, services []columnService) *reference {
	t.Helper()
	cfg := standard()
	for i, w := range ways {
		cfg.Services = append(cfg.Services, w.serviceBy(uint8(i), desired.TCP), w.serviceBy(uint8(i), desired.UDP))
	}
	cfg.Services = append(cfg.Services, inTurn(desired.TCP), inTurn(desired.UDP))
	gone := serviceOf("gone", vipGone, 80, desired.TCP, desired.SRv6Encap, srv6Server("g", 11, 1))
	spreadAffinities(cfg.Services)
	cfg.Services = slices.Concat(ordering(8), cfg.Services, quicConfig(true), columnConfig(services, 0))
	cfg.Node.Limits.Servers, cfg.Node.Limits.Hints = 256, hints
	clock, err := dataplane.NewFlowClock()
	testhost.Must(t, err)
	clock.Shift, clock.Jiffy = standstill, slowJiffy
	all := *cfg
	all.Services = append(slices.Clone(cfg.Services), gone)
	f := openAt(t, &all, clock)
	shortenRows(f, cfg)
	takeColumnSteps(f, cfg, services)
	takeQUICStep(f, cfg)
	f.must(dataplane.Detach(cfg.Node.Instance))
	f.via["u"], f.via["n"], f.via["h"] = "", "narrow", "bridge"
	f.via["s1"] = "narrow" // long offers to s1 and others are shortened
	f.route()
	r := newReference(f)
	r.rememberFormer()
	r.removed[gone.VIP] = true
	return r
}

// captures returns valid packets to all services, and a frame for each reason to drop or pass a
// frame.
func captures() (frames [][]byte) {
	for _, v := range visits {
		frames = append(frames, v.frame)
	}
	for i, w := range ways {
		for _, protocol := range []desired.Protocol{desired.TCP, desired.UDP} {
			svc := w.serviceBy(uint8(i), protocol)
			flow := flowTo(svc.VIP, svc.Port.Number(), svc.Protocol)
			all := shapes(w.inner)
			for _, shape := range slices.Sorted(maps.Keys(all)) {
				frames = append(frames, frameOf(flow, all[shape]...))
			}
			frames = append(frames, packet.Fragments(frameOf(flow, large), 64, 9)...)
			frames = append(frames, packet.ICMPError(routerOf(svc.VIP), 3, 1, 1280, reply(flow)))
			if protocol == desired.TCP {
				for _, flags := range []packet.TCPFlags{packet.ACK, packet.FIN | packet.ACK, packet.RST} {
					frames = append(frames, frameOf(flow, packet.Flags(flags)))
				}
			}
		}
	}
	for _, flow := range []dataplane.Flow{turns, fromPort(turns, 1), dnsTurns, fromPort(dnsTurns, 1)} {
		for _, flags := range []packet.TCPFlags{packet.SYN, packet.SYN, packet.ACK, packet.FIN | packet.ACK} {
			frames = append(frames, frameOf(flow, packet.Flags(flags)))
		}
		frames = append(frames, packet.Fragments(frameOf(flow, large), 64, 9)...)
		frames = append(frames, packet.ICMPError(router6, 1, 0, 0, reply(flow)))
	}
	// There are many fragments, so that mutants of fragments of one packet meet.
	for _, flow := range []dataplane.Flow{dns, dns4} {
		for range 5 {
			frames = append(frames, packet.Fragments(frameOf(flow, large), 64, 7)...)
		}
	}
	// Several servers accept the same connections, and clients answer.
	for _, flow := range []dataplane.Flow{hunt, hunt4} {
		for number := range uint8(4) {
			for _, flags := range []packet.TCPFlags{packet.SYN | packet.ACK, packet.ACK} {
				frames = append(frames, signalTo(flow, number, srv6.CreateStickiness, packet.Flags(flags), packet.Sequence(7, 8)))
			}
			frames = append(frames, signalTo(flow, number, srv6.RemoveStickiness, packet.Flags(packet.FIN|packet.ACK)))
		}
		for _, flags := range []packet.TCPFlags{packet.ACK, packet.ACK, packet.FIN | packet.ACK, packet.RST} {
			frames = append(frames, frameOf(flow, packet.Flags(flags)))
		}
		for port := range uint16(4) { // with different first candidates
			// The longest packets that fit with a number of servers, and longer ones.
			for _, size := range []int{1352, 1353, 1368, 1369, 1380, 1381, 1396, 1397} {
				data := packet.Payload(make([]byte, size))
				frames = append(frames, frameOf(fromPort(flow, port), data),
					frameOf(fromPort(flow, port), packet.Flags(packet.ACK), data))
			}
		}
	}
	for _, class := range []uint8{0, 1, 2, 3} { // congestion marks of the outer header
		frame := signalTo(hunt4, 1, srv6.CreateStickiness, packet.TrafficClass(2))
		frames = append(frames, setByte(frame, 1, class<<4))
	}
	for _, sum := range []uint16{0, 0xfeff, 0xffff} { // checksums that carry
		frames = append(frames, set(frameOf(web4), 10, sum))
	}
	for _, token := range []uint64{0, probeToken, probeToken + 0x10000, probeToken | 0xffff} {
		frames = append(frames, packet.ProbeAnswer(netip.MustParseAddr("fd00:5:0:1::"), node().Locator.Addr(), token, 1, 1))
	}
	frames = append(frames, frameOf(flowTo(vipGone, 80, desired.TCP)), packet.ICMP(client6.Addr(), vipGone, 128, 0, 1))
	frames = append(frames, packet.SetMACs(frameOf(web), packet.MAC{3}, ownMAC)) // from a group address
	frames = append(frames, icmpCaptures()...)
	frames = append(frames, notRejected()...)
	frames = append(frames, reportCaptures()...)
	frames = append(frames, cookieCaptures()...)
	frames = append(frames, quicCaptures()...)
	for seed := range 20 {
		frame := packettest.Frame(4 + 2*(seed%2)).Example(seed)
		frames = append(frames, packet.SetMACs(frame, packet.MAC{2, 0, 0, 0, 0, 1}, ownMAC))
	}
	return slices.DeleteFunc(frames, func(frame []byte) bool { return len(frame) > packettest.MaxFrame })
}

// references are balancers with and without a hint table. Each sequence of frames goes to one of
// them.
type references [2]*reference

func openReferences(t testing.TB) references {
	t.Helper()
	return references{openReference(t), openHintReference(t)}
}

func (r references) compare(t *testing.T, frames [][]byte) {
	t.Helper()
	r[crc32.ChecksumIEEE(slices.Concat(frames...))%2].compare(t, frames)
}

// FuzzDataPath compares the data path with the reference for any frames.
func FuzzDataPath(f *testing.F) {
	packettest.Fuzz(f, captures(), openReferences(f).compare)
}

// As FuzzDataPath, for a limited time and with other frames each time. The mutants reach all
// reasons, and persistence stateless and hint give each of their reasons to forward a packet.
func TestMutants(t *testing.T) {
	t.Parallel()
	both := openReferences(t)
	seen := map[string]int{}
	results := map[string]int{}
	for _, r := range both {
		r.results = results
		r.seen = func(o outcome) {
			seen[reasonOf(o)]++
			if kind := columnKind(o); kind != "" {
				seen[kind+" "+reasonOf(o)]++
			}
			if isQUIC(o) {
				seen["quic "+reasonOf(o)]++
			}
		}
	}
	missing := func() (missing []string) {
		for _, result := range append(slices.Clone(resultNames), "answered", "spare server") {
			if results[result] == 0 {
				missing = append(missing, "report "+result)
			}
		}
		for _, reason := range slices.Concat(cookieReasons, hintReasons, quicReasons) {
			if seen[reason] == 0 {
				missing = append(missing, reason)
			}
		}
		for reason := range reasonNumbers() {
			switch reason {
			case "none", "forward_no_room", "drop_no_headroom", "drop_rate_limit", "drop_fragment_room":
				// in TestTableFollowsReference, TestNoHeadroom, TestAnswerRate and TestHoldBudgets
				continue
			case "drop_outside", "drop_tag", "drop_stranger", "drop_underlay":
				// in TestMutantsOfStrangers and TestUnderlay
				continue
			}
			if seen[reason] == 0 {
				missing = append(missing, reason)
			}
		}
		return missing
	}
	packettest.TryMutants(t, "FuzzDataPath", captures(), both.compare, missing)
	t.Log(seen, results)
}

// compare runs the data path and the reference with frames, one after the other. Both start with
// flows, hints and loads of servers that follow from the frames. Verdicts, all bytes, all counters,
// all hints and all loads must agree.
func (r *reference) compare(t *testing.T, frames [][]byte) {
	t.Helper()
	r.t = t
	for {
		start := time.Now()
		r.slowest = 0
		text := r.disagreement(frames)
		if text == "" {
			return
		}
		// On a machine that stood still, the data path forgets first fragments and the reference
		// does not. Clocks of servers go on between the reference and the data path.
		if time.Since(start) < fragmentLifetime && r.slowest < clockSlack {
			t.Fatalf("%s\nwith the hash keys %+v", text, r.identity)
		}
	}
}

// fragmentLifetime is FRAGMENT_LIFETIME in bpf/balancer/path/fragment.h.
const fragmentLifetime = 5 * time.Second

// disagreement describes the first frame for which the data path and the reference differ, or
// returns an empty text. To save time, it reads the counters once for all frames, and after each
// frame only if the sums differ.
func (r *reference) disagreement(frames [][]byte) string {
	r.t.Helper()
	text := r.disagreementOfAll(frames)
	if text == "" {
		return ""
	}
	if first := r.disagreementOfOne(frames); first != "" {
		return first
	}
	return text + "which was not so again when the counters were read after each frame"
}

func (r *reference) disagreementOfAll(frames [][]byte) string {
	r.t.Helper()
	r.begin(frames)
	before, want := r.counters(), counters{map[string]tally{}, map[string]tally{}}
	counted := r.loadCounts()
	for i, frame := range frames {
		if r.dependsOnMoment(frame) {
			continue
		}
		start := time.Now()
		o := r.receive(frame)
		if r.seen != nil {
			r.seen(o)
		}
		add(want.reasons, o.Reasons)
		add(want.servers, o.Servers)
		if verdict, out := r.exec(frame, nil); verdict != o.Verdict || !bytes.Equal(out, o.Frame) {
			return numbered(i, frames) + explain(frame, o, outcome{verdict, out, o.Reasons, o.Servers})
		}
		r.runSwitch(frame, o)
		if text := r.explainHints(); text != "" {
			return numbered(i, frames) + explain(frame, o, o) + text
		}
		r.pass(frame, time.Since(start))
	}
	after := r.counters()
	return explainCounters("reason", want.reasons, difference(before.reasons, after.reasons)) +
		explainCounters("server", want.servers, difference(before.servers, after.servers)) +
		r.explainLoads() + r.explainLoadCounts(counted) + r.explainEntries()
}

// begin empties the tables, and gives the servers loads that follow from the frames.
func (r *reference) begin(frames [][]byte) {
	r.t.Helper()
	r.forget()
	r.vary(frames)
}

func (r *reference) disagreementOfOne(frames [][]byte) string {
	r.t.Helper()
	r.begin(frames)
	counted := r.loadCounts()
	for i, frame := range frames {
		if r.dependsOnMoment(frame) {
			continue
		}
		start := time.Now()
		if want, got := r.receive(frame), r.run(frame); !same(want, got) {
			return numbered(i, frames) + explain(frame, want, got)
		}
		text := r.explainLoads() + r.explainLoadCounts(counted) + r.explainHints()
		if text != "" {
			return numbered(i, frames) + explain(frame, outcome{}, outcome{}) + text
		}
		r.pass(frame, time.Since(start))
	}
	return ""
}

func numbered(i int, frames [][]byte) string {
	return fmt.Sprintf("frame %d of %d: ", i+1, len(frames))
}

func add(sum, more map[string]tally) {
	for name, m := range more {
		s := sum[name]
		sum[name] = tally{s.Packets + m.Packets, s.Bytes + m.Bytes, s.Flows + m.Flows}
	}
}

var verdicts = map[uint32]string{
	verdictDrop: "drop", verdictPass: "pass", verdictTX: "transmit", verdictRedirect: "redirect",
}

// explain describes the difference between the outcome wanted and the outcome got.
func explain(frame []byte, want, got outcome) string {
	var s strings.Builder
	decoded, err := packet.Decode(frame)
	fmt.Fprintf(&s, "%v (%v), %d bytes: %x\n", decoded, err, len(frame), frame)
	if want.Verdict != got.Verdict {
		fmt.Fprintf(&s, "the verdict is %s, want %s\n", verdicts[got.Verdict], verdicts[want.Verdict])
	}
	if !bytes.Equal(want.Frame, got.Frame) {
		at := 0
		for at < min(len(want.Frame), len(got.Frame)) && want.Frame[at] == got.Frame[at] {
			at++
		}
		fmt.Fprintf(&s, "the frame that comes out is other from byte %d on: %d bytes, want %d\ngot  %x\nwant %x\n",
			at, len(got.Frame), len(want.Frame), got.Frame, want.Frame)
	}
	s.WriteString(explainCounters("reason", want.Reasons, got.Reasons))
	s.WriteString(explainCounters("server", want.Servers, got.Servers))
	return s.String()
}

func explainCounters(kind string, want, got map[string]tally) string {
	if maps.Equal(want, got) {
		return ""
	}
	return fmt.Sprintf("counted by %s is %+v, want %+v\n", kind, got, want)
}
