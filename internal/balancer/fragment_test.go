// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
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

// With all encapsulations, the fragments of a datagram go to the server of its flow. Only the first
// fragment counts as a packet of the flow: later ones neither create an entry nor confirm one.
func TestFragmentsStayTogether(t *testing.T) {
	t.Parallel()
	var services []desired.Service
	for i, w := range ways {
		services = append(services, w.serviceBy(uint8(i), desired.UDP))
	}
	f := open(t, balancerOf(services...))
	for i, w := range ways {
		shapes := map[string][]packet.Option{"plain": nil}
		if w.inner == 6 {
			shapes["extension headers"] = []packet.Option{packet.HopByHop(16), packet.DestinationOptions(8)}
		} else {
			shapes["options"] = []packet.Option{packet.IPOptions(make([]byte, 12))}
		}
		for shape, options := range shapes {
			t.Run(services[i].Name+"/"+shape, func(t *testing.T) {
				f.t = t
				clear(f.plane.Flows.Entries)
				f.forgetFragments()
				flow := flowTo(services[i].VIP, 80, desired.UDP)
				fragments := packet.Fragments(datagram(flow, options...), 1440, 0xfedcba98)
				for n, fragment := range fragments {
					reason := "forward_fragment"
					if n == 0 {
						reason = "forward_new"
					}
					f.check(f.forwarded(fragment, flow, services[i].Name, "s", reason), f.run(fragment))
				}
				if e := f.entry(flow); e.State() != stateNew {
					t.Errorf("state %d after one datagram, want new", e.State())
				}
				clear(f.plane.Flows.Entries)
				last := fragments[len(fragments)-1]
				f.check(f.forwarded(last, flow, services[i].Name, "s", "forward_fragment"), f.run(last))
				if e := f.entry(flow); e != 0 {
					t.Errorf("a later fragment has entered its flow: %#x", e)
				}
			})
		}
	}
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
			if got := f.run(frame); !same(refused(frame, "drop_fragment_unknown", layer3(frame)), got) {
				t.Errorf("%v: %s: %+v", flow, name, got)
			}
		}
	}
	// In IPv4, an identification belongs to addresses and a protocol; in IPv6, to addresses only.
	tcp4 := packet.Fragments(frameOf(web4, packet.Payload(make([]byte, 100))), 64, 7)[1]
	f.check(refused(tcp4, "drop_fragment_unknown", layer3(tcp4)), f.run(tcp4))
}

// If several first fragments have the same identification, later fragments follow the last one.
func TestIdentificationIsUsedAgain(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	for _, flow := range []dataplane.Flow{dns4, fromPort(dns4, 40001)} {
		fragments := packet.Fragments(datagram(flow), 1440, 7)
		f.run(fragments[0])
		f.check(f.forwarded(fragments[2], flow, "dns4", f.placed(flow, "dns4"), "forward_fragment"), f.run(fragments[2]))
	}
}

// A later fragment is dropped if it arrives before the first one, or seconds after it.
func TestFragmentsAreForgotten(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	fragments := packet.Fragments(datagram(dns), 1440, 7)
	f.check(refused(fragments[1], "drop_fragment_unknown", layer3(fragments[1])), f.run(fragments[1]))
	f.run(fragments[0])
	for age, reason := range map[uint64]string{4e9: "forward_fragment", 6e9: "drop_fragment_unknown"} {
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

// The sender of a first fragment gets the same errors as that of a whole packet. For later
// fragments, no errors are sent.
func TestErrorsAboutFragments(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	for _, flow := range []dataplane.Flow{dns, dns4} {
		fragments := packet.Fragments(datagram(flow, packet.HopLimit(1)), 1440, 7)
		f.check(answered(fragments[0], "answer_hop_limit", 0), f.run(fragments[0]))
		f.check(refused(fragments[1], "drop_hop_limit", layer3(fragments[1])), f.run(fragments[1]))
	}
	large := packet.Fragments(frameOf(narrow, packet.Payload(make([]byte, 4000))), 1440, 7)
	f.check(answered(large[0], "answer_too_big", 1460), f.run(large[0]))
	f.check(refused(large[1], "drop_too_big", layer3(large[1])), f.run(large[1]))
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
		if _, _, err := f.plane.Objects.XdpLb.Test(frame); err != nil {
			t.Fatal(err)
		}
	}
	last := packet.Fragments(datagram(dns), 1440, most+most/8-1)[1]
	if got := reasonOf(f.run(last)); got != "forward_fragment" {
		t.Errorf("after a flood: %s", got)
	}
}
