// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"context"
	"log/slog"
	"math"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// datagram returns a UDP packet with 4000 bytes of data. Neighbouring bytes always differ.
func datagram(flow dataplane.Flow, options ...packet.Option) []byte {
	payload := make([]byte, 4000)
	for i := range payload {
		payload[i] = byte(i * 7)
	}
	return frameOf(flow, append(options, packet.Payload(payload))...)
}

// A later fragment follows only the first fragment of its own packet.
func TestFragmentsOfOtherPackets(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	for _, flow := range []dataplane.Flow{dns, dns4} {
		fragments := packet.Fragments(datagram(flow), 1440, 7)
		f.run(fragments[0])
		otherID := packet.Fragments(datagram(flow), 1440, 8)[1]
		otherClient := flow
		otherClient.Source = netip.AddrPortFrom(flow.Source.Addr().Next(), flow.Source.Port())
		for name, frame := range map[string][]byte{
			"another identification": otherID,
			"another client":         packet.Fragments(datagram(otherClient), 1440, 7)[1],
		} {
			if got := f.run(frame); !same(refused(frame, "take_fragment", layer3(frame)), got) {
				t.Errorf("%v: %s: %+v", flow, name, got)
			}
		}
	}
	// In IPv4, an identification belongs to addresses and a protocol; in IPv6, to addresses only.
	tcp4 := packet.Fragments(frameOf(web4, packet.Payload(make([]byte, 100))), 64, 7)[1]
	f.check(refused(tcp4, "take_fragment", layer3(tcp4)), f.run(tcp4))
}

// A later fragment is held if it arrives before the first one, or seconds after it.
func TestFragmentsAreForgotten(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	fragments := packet.Fragments(datagram(dns), 1440, 7)
	f.check(refused(fragments[1], "take_fragment", layer3(fragments[1])), f.run(fragments[1]))
	f.run(fragments[0])
	for age, reason := range map[uint64]string{4e9: "forward_fragment", 6e9: "take_fragment"} {
		var key dataplane.FragmentKey
		var value dataplane.FragmentFlow
		entries := f.plane.Objects.Fragments.Iterate()
		if !entries.Next(&key, &value) {
			t.Fatal("the first fragment is not in the table")
		}
		saved := value
		value.Seen -= age
		f.must(f.plane.Objects.Fragments.Put(&key, &value))
		if got := reasonOf(f.run(fragments[1])); got != reason {
			t.Errorf("after %d ns: %s, want %s", age, got, reason)
		}
		f.must(f.plane.Objects.Fragments.Put(&key, &saved))
	}
}

// A flood of first fragments uses no more memory than the table has. The table keeps the latest
// fragments.
func TestFragmentTableIsBounded(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	fragment := packet.Fragments(datagram(dns), 1440, 0)[0]
	const identification = ethernetLength + 40 + 4
	most := f.plane.Objects.Fragments.MaxEntries()
	for id := range most + most/8 {
		frame := slices.Clone(fragment)
		frame[identification+1], frame[identification+2], frame[identification+3] = byte(id>>16), byte(id>>8), byte(id)
		if _, err := f.plane.Objects.XdpLb.Run(&ebpf.RunOptions{Data: frame}); err != nil {
			t.Fatal(err)
		}
	}
	last := packet.Fragments(datagram(dns), 1440, most+most/8-1)[1]
	if got := reasonOf(f.run(last)); got != "forward_fragment" {
		t.Errorf("after a flood: %s", got)
	}
}

// The process gets a later fragment that comes before the first one, and then the news that the
// first one has passed. If the process sends the fragment, it goes to the server of the first one.
// Fragments that come in order are not held, and make no news.
func TestFragmentsBeforeTheFirst(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	for _, flow := range []dataplane.Flow{dns, dns4, web, web4} {
		service := f.classify(flow).Name
		whole := datagram(flow)
		if flow.Protocol == desired.TCP {
			whole = frameOf(flow, packet.Payload(make([]byte, 4000)))
		}
		fragments := packet.Fragments(whole, 1440, 7)
		f.forgetFragments()
		f.takeHeld()
		for _, later := range []int{2, 1} {
			f.check(refused(fragments[later], "take_fragment", layer3(fragments[later])), f.run(fragments[later]))
		}
		held := f.takeHeld()
		if len(held) != 2 || !slices.Equal(held[0].Frame, fragments[2]) || !slices.Equal(held[1].Frame, fragments[1]) ||
			held[0].Key != held[1].Key {
			t.Fatalf("%v: the process holds %+v", flow, held)
		}
		if f.plane.Held.FirstHasPassed(held[0].Key) {
			t.Errorf("%v: the first fragment seems to have passed", flow)
		}
		f.run(fragments[0])
		news := f.takeHeld()
		if len(news) != 1 || news[0].Frame != nil || news[0].Key != held[0].Key || !f.plane.Held.FirstHasPassed(held[0].Key) {
			t.Errorf("%v: the news of the first fragment are %+v", flow, news)
		}
		for _, later := range held {
			frame := packet.SetMACs(later.Frame, heldMAC, ownMAC)
			f.check(f.forwarded(frame, flow, service, f.placed(flow, service), "forward_fragment"), f.run(frame))
		}
		f.run(fragments[0])
		f.run(fragments[1])
		if held := f.takeHeld(); len(held) > 0 {
			t.Errorf("%v: fragments in order are held: %+v", flow, held)
		}
	}
}

// A fragment that was held is not held again, and neither is a longer frame than the process takes.
func TestFragmentsThatAreNotHeld(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	for _, flow := range []dataplane.Flow{dns, dns4} {
		later := packet.Fragments(datagram(flow), 1440, 7)[1]
		long := packet.Fragments(datagram(flow), 1536, 7)[1]
		for _, frame := range [][]byte{packet.SetMACs(later, heldMAC, ownMAC), long} {
			f.check(refused(frame, "drop_fragment_unknown", layer3(frame)), f.run(frame))
		}
	}
	if held := f.takeHeld(); len(held) > 0 {
		t.Errorf("the process gets %+v", held)
	}
}

// sourceIn returns a later fragment whose source has the given bytes from a place on.
func sourceIn(later []byte, at int, prefix ...byte) []byte {
	frame := slices.Clone(later)
	copy(frame[ethernetLength+at:], prefix)
	return frame
}

// A flood of forged later fragments from one network uses up the room of that network only. The
// fragments of another network are held, and so are those of the first one when time has passed.
func TestHoldBudgets(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	f.foresees = false // a dry run does not see that the ring buffer is full
	reasonIn := func(frame []byte) string {
		before := f.counters()
		if _, err := f.plane.Objects.XdpLb.Run(&ebpf.RunOptions{Data: frame}); err != nil {
			t.Fatal(err)
		}
		for reason := range difference(before.reasons, f.counters().reasons) {
			return reason
		}
		return ""
	}
	for _, c := range []struct {
		flow   dataplane.Flow
		source int // where the IP header has it
		host   int // a byte of the source that varies within a network
		others [][]byte
	}{
		{dns, 8, 8 + 7, [][]byte{{0x20, 0x01, 0x0d, 0xb8, 0x77, 0x01}, {0x20, 0x01, 0x0d, 0xb8, 0x77, 0x02}}},
		{dns4, 12, 12 + 3, [][]byte{{203, 0, 113}, {203, 0, 112}}},
	} {
		f.must(datapathtest.Zero(f.plane.Objects.HoldBudgets))
		later := packet.Fragments(datagram(c.flow), 1440, 7)[1]
		const flood = 5000 // several times what the ring buffer takes
		for i := range flood {
			frame := sourceIn(later, c.host, byte(i))
			if _, err := f.plane.Objects.XdpLb.Run(&ebpf.RunOptions{Data: frame}); err != nil {
				t.Fatal(err)
			}
		}
		held := len(f.takeHeld())
		if held < 128 || held > 1000 {
			t.Errorf("%v: %d of %d fragments of one network are held", c.flow, held, flood)
		}
		budgets := make([]uint64, f.plane.Objects.HoldBudgets.MaxEntries())
		keys := make([]uint32, len(budgets))
		_, _ = f.plane.Objects.HoldBudgets.BatchLookup(new(ebpf.MapBatchCursor), keys, budgets, nil)
		full := 0
		for i, used := range budgets {
			if used > 0 { // nothing is left, for as long as the test takes
				full++
				f.must(f.plane.Objects.HoldBudgets.Put(uint32(i), uint64(math.MaxInt64)))
			}
		}
		if full != 1 {
			t.Errorf("%v: one network has %d budgets", c.flow, full)
		}
		if got := reasonIn(later); got != "drop_fragment_room" {
			t.Errorf("%v: behind the flood: %s", c.flow, got)
		}
		taken := 0 // two networks share the budget with a probability of 1 in 4096
		for _, other := range c.others {
			if reasonIn(sourceIn(later, c.source, other...)) == "take_fragment" {
				taken++
			}
		}
		if taken == 0 {
			t.Errorf("%v: the flood uses up the room of other networks", c.flow)
		}
		f.takeHeld()
	}
	// A flood from many networks uses up what the cores may give to the process.
	f.must(datapathtest.Zero(f.plane.Objects.HoldBudgets))
	f.must(f.plane.Objects.HoldByCore.Put(uint32(0), slices.Repeat([]uint64{math.MaxInt64}, ebpf.MustPossibleCPU())))
	for _, flow := range []dataplane.Flow{dns, dns4} {
		if got := reasonIn(packet.Fragments(datagram(flow), 1440, 7)[1]); got != "drop_fragment_room" {
			t.Errorf("%v: beyond the rate of the core: %s", flow, got)
		}
	}
}

// The end of the context ends the holding also while fragments come faster than it reads them. Then
// some are always unread.
func TestHoldingEndsInAFlood(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	f.run(packet.Fragments(datagram(dns), 1440, 7)[1])
	ended, end := context.WithCancel(context.Background())
	end()
	h := newHolding(f.plane.Held, slog.New(slog.DiscardHandler))
	f.must(h.run(ended, f.plane.Held))
	if !f.plane.Held.Pending() {
		t.Error("the holding reads all fragments before it ends")
	}
}
