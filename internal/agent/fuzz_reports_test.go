// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// reportCaptures returns packets of balancers that take load reports, for each thing that a report
// can tell about the first candidate.
func reportCaptures() (frames [][]byte) {
	own := candidateSID(1, srv6.ConnectAvail, wanting(srv6.Offer{Column: 2}))
	lists := [][]netip.Addr{
		{own},
		{candidateSID(1, srv6.ConnectForce, wanting(srv6.Offer{}))},
		{candidateSID(2, srv6.ConnectAvail, wanting(told(5, 4, 2))), own},
		{candidateSID(2, srv6.ConnectAvail, wanting(srv6.Offer{Column: 6})), own},
		{candidateSID(2, srv6.ConnectAvail, wanting(told(srv6.NoColumn, 4, 2))), own},
		{
			candidateSID(3, srv6.Steer, srv6.Offer{}),
			candidateSID(2, srv6.ConnectAvail, wanting(told(1, 300, 7))), own,
		},
		{
			own, candidateSID(2, srv6.ConnectAvail, wanting(told(5, 4, 2))),
			candidateSID(1, srv6.ConnectForce, wanting(told(2, 3, 2))),
		},
	}
	for _, way := range leastWays {
		other := flow{way.flow.client, netip.AddrPortFrom(way.flow.vip.Addr(), 81)}
		for _, f := range []flow{way.flow, other} {
			for _, list := range lists {
				frames = append(frames, offered(way.kind, f, list, len(list)-1))
			}
			for _, offer := range []srv6.Offer{{}, wanting(srv6.Offer{})} {
				acknowledge := candidateSID(1, srv6.AckStickiness, offer)
				encap := srv6Encap(way.kind, acknowledge)
				frames = append(frames, to(f.client, f.vip, encap, packet.Flags(packet.ACK)))
			}
		}
	}
	return frames
}

// forgetFlows empties the flow tables of the data path and of the reference.
func (c *comparison) forgetFlows() {
	clear(c.table.entries)
	clear(c.table.balancers)
	clear(c.flows)
	if len(c.initials) > 0 {
		clear(c.table.initials)
		clear(c.initials)
	}
}

// checkFlows compares the entries of the reference with those of the data path.
func (c *comparison) checkFlows(t *testing.T, frame []byte) {
	t.Helper()
	for f, want := range c.flows {
		if got := c.entryOf(f).remembered; got != want {
			t.Errorf("%s\nthe entry of %v to %v is %v, want %v", explain(frame), f.client, f.vip, got, want)
		}
	}
}

// checkCount compares the number of entries.
func (c *comparison) checkCount(t *testing.T) {
	t.Helper()
	count := 0
	for _, e := range c.table.entries {
		if e.Content != 0 {
			count++
		}
	}
	if count != len(c.flows) {
		t.Errorf("the flow table has %d entries, want %d", count, len(c.flows))
	}
}

// entryOf returns the entry of a flow in the data path. It is empty if there is none.
func (c *comparison) entryOf(f flow) tableFlow {
	e := c.table.find(f)
	if e == nil {
		return tableFlow{}
	}
	entry, ok := c.table.decode(*e, c.table.now())
	if !ok {
		return tableFlow{}
	}
	return entry
}

// sentCaptures returns packets of the host's applications, some of which have no room for a signal.
func sentCaptures() (frames [][]byte) {
	all := []packet.TCPFlags{
		packet.SYN | packet.ACK, packet.ACK, packet.FIN | packet.ACK, packet.RST,
	}
	for _, f := range []flow{{client6, vip6}, {client4, vip4}, comparing} {
		for _, flags := range all {
			for _, size := range []int{
				0, 100, mtu - 116, mtu - 115, mtu - 100, mtu - 99, mtu - 80, mtu - 79, mtu - 60,
			} {
				data := packet.Payload(make([]byte, size))
				frames = append(frames, packet.TCP(f.vip, f.client, packet.Flags(flags), data))
			}
		}
	}
	for _, flags := range all { // first fragments, which carry no signal
		frames = append(frames, set(packet.TCP(vip4, client4, packet.Flags(flags),
			packet.Payload(make([]byte, 76))), 6, 0x20))
	}
	return frames
}

// listensAtPort80 tells which sockets the stage has.
func listensAtPort80(f flow) sockets { return sockets{listening: f.vip == vip4 || f.vip == vip6} }

// vary enters the flow of a packet of the host, and writes the loads of all services. Both follow
// from the packet. It returns the entry, whose state is empty if there is none.
func (c *comparison) vary(t *testing.T, s *sent, frame []byte) (known tableFlow) {
	t.Helper()
	random := rand.New(rand.NewPCG(uint64(crc32.ChecksumIEEE(frame)), 0))
	states := []string{"", "wait", "wait", "wait", "direct", "ending", "closing", "cookie", "cookie"}
	state := states[random.IntN(len(states))]
	known.remembered = flowOf(state, netip.PrefixFrom(balancer1, 64), desired.SRv6Encap)
	known.age = []time.Duration{0, 300 * time.Millisecond, 11 * time.Second}[random.IntN(3)]
	known.told, known.wantsReport = random.IntN(6) == 0, random.IntN(4) > 0
	s.gso = random.IntN(8) == 0
	if s.vip.Addr().Is6() && random.IntN(2) == 0 {
		known.kind = desired.SRv6Insert
	}
	switch random.IntN(3) {
	case 0:
		known.first = srv6.Report{IsFirst: true}
	case 1:
		column, load := random.IntN(8), uint8(random.IntN(256))
		known.first.First = srv6.FirstCandidate{Column: column, Load: load}
	}
	if state == "cookie" {
		width := uint32(1 + random.IntN(3))
		known.remembered = cookieFlow(cookie{width, random.Uint32N(1 << width)}, known.balancer, known.kind, known.told)
		known.told = false
	}
	if state != "" {
		c.table.put(s.flow, known)
	}
	c.varyLoads(t, random)
	return known
}

func (c *comparison) varyLoads(t *testing.T, random *rand.Rand) {
	t.Helper()
	var load *accept.Load
	if random.IntN(4) > 0 {
		load = &accept.Load{Busy: uint32(random.IntN(70)), Capacity: uint32(1 + random.IntN(8))}
		if random.IntN(4) == 0 {
			load.Capacity = accept.NoCapacity
		}
	}
	setLoads(t, c.kernel, c.cfg, load)
	for _, p := range slices.Concat(slices.Collect(maps.Values(c.services)), slices.Collect(maps.Values(c.udpServices))) {
		p.load = load
	}
}

// sendVaried has the host send a packet of a flow, and compares what becomes of the packet and of
// the flow's entry. The argument clamped is the packet without a signal.
func (c *comparison) sendVaried(t *testing.T, s sent, frame, clamped []byte) {
	t.Helper()
	start := time.Now()
	known := c.vary(t, &s, frame)
	result, want, after := c.signal(s, clamped, known)
	gso := uint32(0)
	if s.gso {
		gso = 500
	}
	verdict, out := transmit(t, c.kernel, frame, gso)
	wantVerdict := uint32(tcUnspec)
	if result == "create" || result == "remove" {
		wantVerdict = tcRedirect
		want = withMoment(t, known, want, out)
	}
	if known.state == "cookie" && !bytes.Equal(clamped, want) {
		c.seen["stamp"]++
	}
	if result != "" {
		c.signals[result]++
		c.seen["signal "+result]++
	}
	got := c.entryOf(s.flow)
	if e := c.table.find(s.flow); e != nil {
		*e = agentAgentFlowEntry{} // the next packet may be of the same flow
	}
	if time.Since(start) > firstLifetime/2 {
		return // the machine stood still: a load may be stale by now
	}
	if verdict != wantVerdict || !bytes.Equal(want, out) {
		t.Errorf("%s\nof the flow %s, signal %q: verdict %#x, want %#x; (-want +got):\n%s",
			explain(frame), known.describe(), result, verdict, wantVerdict, cmp.Diff(want, out))
	}
	if after.state == "" {
		after = tableFlow{}
	}
	if got.age = 0; got != (tableFlow{after.remembered, 0, after.told}) {
		t.Errorf("%s\nthe flow %s became %s, want %s",
			explain(frame), known.describe(), got.describe(), after.describe())
	}
}

// describe returns the entry in words.
func (f tableFlow) describe() string {
	return fmt.Sprintf("%v, age: %v, told: %t", f.remembered, f.age, f.told)
}

// withMoment returns the wanted frame of a signal with the flow label and the serial of the frame
// that was sent. The serial must be of the present time.
func withMoment(t *testing.T, known tableFlow, want, sent []byte) []byte {
	t.Helper()
	if len(want) != len(sent) {
		return want
	}
	at := 14 + 40 + 8 + 2*16 + 8 // the low half of the list's last entry
	if known.kind == desired.SRv6Encap {
		at = 14 + 8 + 8 // of the source
		want[15] |= sent[15] & 0xf
		copy(want[16:18], sent[16:18])
	}
	if known.wantsReport {
		const serialMask, serialShift = 1<<27 - 1, 21
		serial := binary.BigEndian.Uint64(sent[at:]) >> serialShift & serialMask
		requireNow(t, uint32(serial))
		own := binary.BigEndian.Uint64(want[at:])
		binary.BigEndian.PutUint64(want[at:], own|serial<<serialShift)
	}
	return want
}
