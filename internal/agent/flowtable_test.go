// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/testhost"
)

// crowd returns flows that share a bucket.
func (t *flowTable) crowd(random *rand.Rand, size int) (flows []flow) {
	var bucket uint64
	for len(flows) < size {
		var client [16]byte
		binary.BigEndian.PutUint64(client[:], 0x20010db8<<32)
		binary.BigEndian.PutUint64(client[8:], random.Uint64())
		f := flow{netip.AddrPortFrom(netip.AddrFrom16(client), uint16(random.Uint32())), vip6}
		b, _ := t.place(f)
		if len(flows) == 0 {
			bucket = b
		}
		if b == bucket {
			flows = append(flows, f)
		}
	}
	return flows
}

// locatorOf returns the locator of the i-th of many balancers.
func locatorOf(i int) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfd, 0, 0, 0x6c, byte(i >> 16), 0, byte(i >> 8), byte(i)})
}

// acknowledged is a packet of a flow that a balancer knows. It enters the flow as direct.
func acknowledged(f flow, balancer netip.Addr) []byte {
	segments := []netip.Addr{sidOf(node, ackStickiness)}
	encap := packet.Encap{Kind: desired.SRv6Encap, Sender: balancer, Segments: segments}
	return to(f.client, f.vip, encap, packet.Flags(packet.ACK))
}

// looked returns the state in which the data path finds a flow, and its balancer.
func looked(t *testing.T, k *kernel, f flow) TracedFlow {
	t.Helper()
	d, err := dryRunOf(t, k).decide(acknowledged(f, balancer2))
	testhost.Must(t, err)
	found := tracedFlow(&d)
	found.Age = 0
	return found
}

// A flow takes its own entry, or else an unused one, or else the oldest that is closing, or else
// the oldest. No packet changes another entry.
func TestFlowTableReplaces(t *testing.T) {
	k := testKernel(t)
	table, random := tableOf(t, k), rand.New(rand.NewPCG(1, 15))
	flows := table.crowd(random, 2*entriesPerBucket)
	states := []string{"", "wait", "direct", "ending", "closing"}
	taken := map[string]int{}
	for range 500 {
		entries, _ := table.search(flows[0])
		// At most two states in a bucket, so that entries of all states are replaced.
		pair := []string{states[random.IntN(len(states))], states[random.IntN(len(states))]}
		for i, e := range entries {
			state := pair[random.IntN(2)]
			f := tableFlow{
				remembered: flowOf(state, netip.PrefixFrom(balancer1, 64), desired.SRv6Insert),
				age:        time.Duration(random.Int64N(int64(time.Hour))),
				told:       random.IntN(2) == 1,
			}
			if *e = (agentAgentFlowEntry{}); f.state != "" {
				_, signature := table.place(flows[entriesPerBucket+i])
				*e = table.encode(f, signature, table.now())
			}
		}
		f := flows[random.IntN(len(flows))]
		own := table.find(f) != nil
		order, _ := table.search(f)
		want := table.replaced(f, table.now())
		before := make([]agentAgentFlowEntry, len(order))
		for i, e := range order {
			before[i] = *e
		}
		replaced, _ := table.decode(before[want], table.now())
		runAgent(t, k, acknowledged(f, balancer2))
		for i, e := range order {
			if i != want && *e != before[i] {
				t.Fatalf("the flow changed entry %d of its order, want %d: %x", i, want, before)
			}
		}
		entry, ok := table.decode(*order[want], table.now())
		wanted := flowOf("direct", netip.PrefixFrom(balancer2, 64), desired.SRv6Encap)
		if own && replaced.state == "ending" {
			wanted.state = "ending"
		} else if own && replaced.state == "closing" && replaced.age <= 10*time.Second {
			wanted.state = "closing"
		}
		isNew := entry.age < time.Minute && !entry.told && table.find(f) == order[want]
		if !ok || entry.remembered != wanted || !isNew {
			t.Fatalf("the entry is %+v, %v, want %+v", entry, ok, wanted)
		}
		if own {
			replaced.state = "own"
		}
		taken[replaced.state]++
	}
	for _, state := range []string{"own", "", "closing", "direct", "wait", "ending"} {
		if taken[state] == 0 {
			t.Errorf("no entry was replaced that is %q: %v", state, taken)
		}
	}
}

// An entry of which only one word was written counts as none. So does one whose balancer has lost
// its place in the table of balancers.
func TestFlowTableChecksEntries(t *testing.T) {
	k := testKernel(t)
	table := tableOf(t, k)
	f := flow{client6, vip6}
	setFlow(t, k, f, desired.SRv6Insert, "wait", 3)
	found := TracedFlow{State: "wait", Balancer: netip.PrefixFrom(balancer1, 64)}
	none := TracedFlow{State: "listen"}
	requireLooked := func(what string, want TracedFlow) {
		t.Helper()
		if got := looked(t, k, f); got != want {
			t.Errorf("%s: the flow is %+v, want %+v", what, got, want)
		}
	}
	requireLooked("whole", found)
	e := table.find(f)
	whole := *e
	for bit := range 64 {
		e.Content = whole.Content ^ 1<<bit
		requireLooked(fmt.Sprintf("bit %d of the content", bit), none)
		e.Content, e.Identity = whole.Content, whole.Identity^1<<bit
		requireLooked(fmt.Sprintf("bit %d of the identity", bit), none)
		*e = whole
	}
	at := slices.IndexFunc(table.balancers, func(locator uint64) bool { return locator != 0 })
	locator := table.balancers[at]
	table.balancers[at]++
	requireLooked("the place has another locator", none)
	table.balancers[at] = locator
	requireLooked("whole again", found)

	// A packet of the flow repairs its entry.
	e.Content ^= 1 << 40
	runAgent(t, k, acknowledged(f, balancer2))
	found = TracedFlow{State: "direct", Balancer: netip.PrefixFrom(balancer2, 64)}
	requireLooked("repaired", found)
	if table.find(f) != e {
		t.Error("the flow has taken another entry, beside its broken one")
	}
}

// Balancers whose places collide get the next places, if these are free. A balancer that finds none
// takes the first place, and the flows of the balancer that had it are lost. No flow gets another
// balancer.
func TestFlowTableBalancers(t *testing.T) {
	k := testKernel(t)
	table := tableOf(t, k)
	var colliding []netip.Addr
	for i := 1; len(colliding) < 5; i++ {
		address := locatorOf(i).As16()
		// Behind place 1,023 comes place 0.
		if spread(binary.NativeEndian.Uint64(address[:]))>>54 == 1022 {
			colliding = append(colliding, locatorOf(i))
		}
	}
	flowOf := func(i int) flow {
		return flow{netip.AddrPortFrom(client6.Addr(), uint16(1000+i)), vip6}
	}
	for round := range 2 { // the balancers keep their places
		for i, balancer := range colliding[:4] {
			runAgent(t, k, acknowledged(flowOf(i), balancer))
		}
		for i, balancer := range colliding[:4] {
			want := TracedFlow{State: "direct", Balancer: netip.PrefixFrom(balancer, 64)}
			if got := looked(t, k, flowOf(i)); got != want {
				t.Errorf("round %d: the flow is %+v, want %+v", round, got, want)
			}
		}
	}
	runAgent(t, k, acknowledged(flowOf(4), colliding[4]))
	for i, balancer := range colliding {
		want := TracedFlow{State: "direct", Balancer: netip.PrefixFrom(balancer, 64)}
		if i == 0 {
			want = TracedFlow{State: "listen"}
		}
		if got := looked(t, k, flowOf(i)); got != want {
			t.Errorf("after one too many, the flow is %+v, want %+v", got, want)
		}
	}
	places := 0
	for _, locator := range table.balancers {
		if locator != 0 {
			places++
		}
	}
	if places != 4 {
		t.Errorf("%d places are taken, want 4", places)
	}
}

// Two cores enter flows into one bucket at the same time. An entry that passes its check is always
// of the flow with its signature: it names that flow's balancer.
func TestFlowTableRaces(t *testing.T) {
	k := testKernel(t)
	table, random := tableOf(t, k), rand.New(rand.NewPCG(2, 15))
	flows := table.crowd(random, 12) // more than fit, so that they always replace each other
	balancers := map[uint64]netip.Addr{}
	for i, f := range flows {
		_, signature := table.place(f)
		balancers[signature>>30] = locatorOf(i + 1)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var group errgroup.Group
	for core := range 2 {
		group.Go(func() error {
			for i := core; ctx.Err() == nil; i += 2 {
				frame := acknowledged(flows[i%len(flows)], locatorOf(i%len(flows)+1))
				if _, err := k.objects.XdpAgent.Run(&ebpf.RunOptions{Data: frame}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	entries, _ := table.search(flows[0])
	whole := 0
	for ctx.Err() == nil {
		for _, e := range entries {
			read := agentAgentFlowEntry{
				Identity: atomic.LoadUint64(&e.Identity), Content: atomic.LoadUint64(&e.Content),
			}
			got, ok := table.decode(read, table.now())
			if !ok || got.state == "" {
				continue
			}
			whole++
			balancer := netip.PrefixFrom(balancers[read.Identity>>30], 64)
			if want := flowOf("direct", balancer, desired.SRv6Encap); got.remembered != want {
				t.Fatalf("the entry %x is %+v, want %+v", read, got.remembered, want)
			}
		}
	}
	testhost.Must(t, group.Wait())
	if whole == 0 {
		t.Error("no entry was whole")
	}
}

// The next process finds the flows of the one before.
func TestFlowTableOutlivesProcess(t *testing.T) {
	k := testKernel(t)
	before := k.flowKeys
	if slices.Contains(before.Key[:], 0) {
		t.Fatalf("the keys are not random: %+v", before)
	}
	kept, err := k.objects.AgentFlowKeys.Clone()
	testhost.Must(t, err)
	defer kept.Close()
	if keys, err := flowKeysOf(kept); err != nil || keys != before {
		t.Errorf("the next process has the keys %+v, %v, want %+v", keys, err, before)
	}
	if keys, err := flowKeysOf(nil); err != nil || keys == before {
		t.Errorf("a new table has the keys of another one: %v", err)
	}
}

// Flows of chosen clients share a bucket only by chance, as in the balancer's flow table: see
// dataplane.TestChosenFlowsShareBucketsByChance.
func TestChosenFlowsShareBucketsByChance(t *testing.T) {
	t.Parallel()
	const bits, draws = 10, 1000
	for name, clients := range packettest.ClientSets() {
		random := rand.New(rand.NewChaCha8(sha256.Sum256([]byte(name))))
		shared, filled := 0, 0
		for range draws {
			table := flowTable{t: t}
			for i := range table.keys.Key {
				table.keys.Key[i] = random.Uint64()
			}
			mates, bucketOf := 0, func(client netip.AddrPort) uint64 {
				bucket, _ := table.place(flow{client, vip6})
				return bucket >> (bucketBits - bits)
			}
			victim := bucketOf(clients[0])
			for _, client := range clients[1:] {
				if bucketOf(client) == victim {
					mates++
				}
			}
			shared += mates
			if mates >= entriesPerBucket {
				filled++
			}
		}
		const chance, most = draws * packettest.ClientSetSize >> bits, draws * packettest.ClientSetSize / entriesPerBucket >> bits
		if shared < chance*3/4 || shared > chance*5/4 || filled > most {
			t.Errorf("%s: %d flows share a victim's bucket, want about %d by chance; "+
				"they fill it for %d of %d keys, want at most %d", name, shared, chance, filled, draws, most)
		}
	}
}
