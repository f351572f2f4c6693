// SPDX-License-Identifier: Apache-2.0

package balancer

//go:generate go tool bpf2go -target bpfel signature ../../bpf/test/signature.bpf.c -- -I../../bpf

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// reduced is a balancer that uses only selected bits of its signatures.
type reduced struct {
	*fixture
	mask    uint64
	objects struct {
		XdpLb             *ebpf.Program  `ebpf:"xdp_lb"`
		FlowSignatureMask *ebpf.Variable `ebpf:"flow_signature_mask"`
	}
}

// openReduced returns a balancer with hash keys from the given random numbers.
func openReduced(t *testing.T, random *rand.Rand, cfg *desired.Balancer) *reduced {
	t.Helper()
	r := &reduced{fixture: open(t, cfg)}
	var keys dataplane.FlowKeys
	for i := range keys {
		keys[i] = random.Uint64()
	}
	r.rekey(keys)
	spec, err := loadSignature()
	r.must(err)
	dataplane.NameDirectory(spec)
	kept := map[string]*ebpf.Map{}
	for name, m := range r.plane.Objects.Maps.Pinned() {
		kept[name] = *m
		spec.Maps[name].MaxEntries = (*m).MaxEntries()
	}
	for name, value := range r.plane.Constants {
		r.must(spec.Variables[name].Set(value))
	}
	r.must(spec.Variables["host_mac"].Set(wordOf(ownMAC)))
	r.must(spec.LoadAndAssign(&r.objects, &ebpf.CollectionOptions{MapReplacements: kept}))
	r.must(r.plane.Objects.XdpLb.Close())
	r.plane.Objects.XdpLb = r.objects.XdpLb
	return r
}

// reduce empties the flow table, and selects bits of the 34 bits of signatures.
func (r *reduced) reduce(bits, shift int) {
	r.t.Helper()
	r.forgetFlows()
	r.mask = (1<<bits - 1) << shift
	r.must(r.objects.FlowSignatureMask.Set(r.mask << 30))
}

// find returns the entry that the data path takes for the flow's, or zero.
func (r *reduced) find(flow dataplane.Flow) dataplane.FlowEntry {
	bucket, signature := r.lookUp(flow)
	return bucket.find(signature & r.mask)
}

// randomClient returns a random client, which is most likely unused.
func randomClient(random *rand.Rand) netip.AddrPort {
	var address [16]byte
	binary.BigEndian.PutUint64(address[:], 0x20010db8<<32|uint64(random.Uint32()))
	binary.BigEndian.PutUint64(address[8:], random.Uint64())
	return netip.AddrPortFrom(netip.AddrFrom16(address), uint16(random.Uint32()))
}

// send runs the data path with a frame from a client to a VIP, and ignores the result.
func (r *reduced) send(frame []byte, client netip.AddrPort) {
	r.t.Helper()
	at := packet.NetworkOffset(frame)
	copy(frame[at+8:], client.Addr().AsSlice())
	binary.BigEndian.PutUint16(frame[at+40:], client.Port())
	if _, err := r.objects.XdpLb.Run(&ebpf.RunOptions{Data: frame}); err != nil {
		r.t.Fatal(err)
	}
}

// fill establishes flows of random clients until the table contains the wanted numbers of flows.
func (r *reduced) fill(random *rand.Rand, want dataplane.FlowCounts) {
	r.t.Helper()
	syn, ack := frameOf(web, packet.Flags(packet.SYN)), frameOf(web, packet.Flags(packet.ACK))
	for range 50 * want.Established {
		client := randomClient(random)
		r.send(syn, client)
		r.send(ack, client)
		if totalOf(r.plane.Flows) == want {
			return
		}
	}
	r.t.Fatalf("with %#x of the signature, the table has %+v, and does not come to %+v",
		r.mask, totalOf(r.plane.Flows), want)
}

// The state of an entry tells whether it is free. A flow that has the signature of free entries is
// found behind a free entry.
func TestSignatureOfFreeEntries(t *testing.T) {
	t.Parallel()
	r := openReduced(t, rand.New(rand.NewPCG(1, 2)), webOf(srv6Server("s", 1, 1)))
	r.reduce(0, 0)
	client := client6
	r.send(frameOf(web, packet.Flags(packet.SYN)), client)
	bucket := r.bucket(web)
	i := slices.IndexFunc(bucket, func(entry uint64) bool { return entry != 0 })
	bucket[(i+1)%len(bucket)], bucket[i] = bucket[i], 0
	r.send(frameOf(web, packet.Flags(packet.ACK)), client)
	if got, want := totalOf(r.plane.Flows), (dataplane.FlowCounts{Established: 1}); got != want {
		t.Errorf("%+v in the table, want %+v", got, want)
	}
}

// An unknown flow whose bucket is full is taken for a known one with probability 8 / 2^n, if
// signatures have n bits (docs/understand/flow-table.md). So each bit less doubles the probability,
// whichever of the 34 bits are used. With all 34 bits, none of the flows of this test is taken for
// another. This holds for random flows and for consecutive ports of one client.
func TestReducedSignature(t *testing.T) {
	t.Parallel()
	const buckets, strangers = 64, 25_000
	random := rand.New(rand.NewPCG(1, 2))
	r := openReduced(t, random, crowded(buckets))
	syn := frameOf(web, packet.Flags(packet.SYN))
	full := dataplane.FlowCounts{Established: buckets * dataplane.FlowsPerBucket}
	clients := []struct {
		name string
		next func(i int) netip.AddrPort
	}{
		{"random clients", func(int) netip.AddrPort { return randomClient(random) }},
		{"ports in turn", func(i int) netip.AddrPort { return netip.AddrPortFrom(client6.Addr(), uint16(i)) }},
	}
	for _, v := range []struct{ bits, shift int }{
		{7, 0}, {7, 9}, {7, 18}, {7, 27}, {6, 5}, {9, 5}, {34, 0},
	} {
		for _, client := range clients {
			r.reduce(v.bits, v.shift)
			r.fill(random, full)
			before := r.counters()
			for i := range strangers {
				r.send(syn, client.next(i))
			}
			reasons := difference(before.reasons, r.counters().reasons)
			mistaken, noRoom := reasons["forward_known"].Packets, reasons["forward_no_room"].Packets
			if now := totalOf(r.plane.Flows); mistaken+noRoom != strangers || now != full {
				t.Errorf("strangers left as %v, the table has %+v; want it full, with %+v", reasons, now, full)
			}
			name := fmt.Sprintf("%d bits from bit %d, %s", v.bits, v.shift, client.name)
			probability := dataplane.FlowsPerBucket / math.Exp2(float64(v.bits))
			within(t, name, "strangers taken for others; bits", v.bits, int(mistaken), strangers, probability)
			t.Logf("%s: %d of %d strangers were taken for others", name, mistaken, strangers)
		}
	}
}

// However often flows of two services share a signature, no packet and no ICMP error goes to the
// server of the other service.
func TestReducedSignatureOfTwoServices(t *testing.T) {
	t.Parallel()
	const packets = 20_000
	random := rand.New(rand.NewPCG(3, 4))
	cfg := balancerOf(
		serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Insert, srv6Server("w1", 1, 1), srv6Server("w2", 2, 1)),
		serviceOf("dns", vip6, 53, desired.UDP, desired.SRv6Encap, srv6Server("d1", 3, 1), srv6Server("d2", 4, 1)),
	)
	cfg.Node.Limits.Flows = 16 * dataplane.FlowLoad
	r := openReduced(t, random, cfg)
	r.reduce(5, 11)
	servers := macs(cfg)
	crossings := map[string]int{}
	for range packets {
		flow, service := web, "web"
		if random.IntN(2) == 0 {
			flow, service = dns, "dns"
		}
		flow.Source = randomClient(random)
		kind, frame := "SYN", frameOf(flow, packet.Flags(packet.SYN))
		switch random.IntN(3) {
		case 0:
			kind, frame = "ACK", frameOf(flow, packet.Flags(packet.ACK))
		case 1:
			kind, frame = "ICMP error", packet.ICMPError(router6, 2, 0, 1280, reply(flow))
		}
		if e := r.find(flow); e != 0 && r.slots.Server(e.Server()).Service != service {
			crossings[kind]++
		}
		verdict, out := r.exec(frame, nil)
		if server := servers[packet.MAC(out)]; verdict != verdictRedirect || !strings.HasPrefix(server, service+"/") {
			t.Fatalf("%s of %v: verdict %d, to %q, want a server of %s", kind, flow, verdict, server, service)
		}
	}
	for _, kind := range []string{"SYN", "ACK", "ICMP error"} {
		if crossings[kind] < packets/30 {
			t.Errorf("of %d packets so few met an entry of the other service: %v", packets, crossings)
		}
	}
	t.Log(crossings)
}

// within allows six standard deviations of a binomial distribution. The random numbers are the same
// in each run.
func within(t *testing.T, name, what string, bit, got, draws int, p float64) {
	t.Helper()
	mean, deviation := float64(draws)*p, math.Sqrt(float64(draws)*p*(1-p))
	if math.Abs(float64(got)-mean) > 6*deviation {
		t.Errorf("%s: %s (%d): %d, want %.0f ± %.0f", name, what, bit, got, mean, deviation)
	}
}
