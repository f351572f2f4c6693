// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/infer"
)

// sampling returns a configuration whose service web gives flows to the server with the fewest
// flows of a random sample.
func sampling(among desired.Among, servers ...desired.Server) *desired.Balancer {
	cfg := placingBy(desired.PlacementLeastQueue, servers...)
	cfg.Services[0].Infer.Among = among
	return cfg
}

// sampleSizes are the numbers of servers in a sample.
var sampleSizes = map[desired.Among]int{
	desired.AmongTwo: 2, desired.AmongThree: 3, desired.AmongFour: 4,
}

// mixed is mix in bpf/net/hash.h: the finalizer of MurmurHash3.
func mixed(hash uint32) uint32 {
	hash ^= hash >> 16
	hash *= 0x85ebca6b
	hash ^= hash >> 13
	hash *= 0xc2b2ae35
	return hash ^ hash>>16
}

// rankedSlots returns the slots of the service web in the order of its ranking.
func (f *fixture) rankedSlots() []uint32 {
	slots := make([]uint32, len(f.services.byName["web"].members))
	for _, m := range f.services.byName["web"].members {
		slots[f.plane.Directory.Servers[m.slot].Rank-1] = m.slot
	}
	return slots
}

// sample returns the slots of the servers that the data path compares for a flow, in order.
func (f *fixture) sample(flow dataplane.Flow, size int) (drawn []uint32) {
	slots, hash := f.rankedSlots(), flow.Hash(&f.identity.BucketKeys)
	for draw := range uint32(4096) {
		if len(drawn) == size || len(drawn) > 0 && draw >= 16 {
			break
		}
		at := uint64(mixed(hash+draw*0x9e3779b9)) * uint64(len(slots)) >> 32
		if slot := slots[at]; f.plane.Servers.TakesFlows(slot) && !slices.Contains(drawn, slot) {
			drawn = append(drawn, slot)
		}
	}
	return drawn
}

// delayOf returns the part of a server's score that samples compare.
func (f *fixture) delayOf(slot uint32) uint64 { return f.plane.Loads.Score(slot) >> 28 }

// leastOf returns the name of the first server with the least delay.
func (f *fixture) leastOf(slots []uint32) string {
	best := slices.MinFunc(slots, func(a, b uint32) int {
		return int(f.delayOf(a)) - int(f.delayOf(b))
	})
	for _, m := range f.services.byName["web"].members {
		if m.slot == best {
			return "web/" + m.Name
		}
	}
	return "none"
}

// goesToSampled sends a number of SYNs of other flows, and requires that each goes to the least
// server of its sample. It returns the servers.
func (f *fixture) goesToSampled(size int, first, count uint16) (servers []string) {
	f.t.Helper()
	for port := range count {
		flow := fromPort(web, first+port)
		want := f.leastOf(f.sample(flow, size))
		if got := serverOf(f.run(frameOf(flow))); got != want {
			f.t.Fatalf("flow %d goes to %s, want %s", port, got, want)
		}
		servers = append(servers, want)
	}
	return servers
}

// Each flow goes to the least loaded server of its sample, whatever the loads are.
func TestFlowsFollowSample(t *testing.T) {
	t.Parallel()
	for among, size := range sampleSizes {
		t.Run(string(among), func(t *testing.T) {
			t.Parallel()
			f := open(t, sampling(among, manyServers(20)...))
			f.goesToSampled(size, 1000, 200)
			random := rand.New(rand.NewPCG(uint64(size), 1))
			for _, m := range f.services.byName["web"].members {
				f.plane.Loads.SetPrice(m.slot, infer.NewPrice(random.Float64(), random.Float64(), 0, false))
			}
			f.goesToSampled(size, 2000, 200)
		})
	}
}

// All servers are equally likely to be in a sample, and each sample has different servers.
func TestSamplesAreUniform(t *testing.T) {
	t.Parallel()
	f := open(t, sampling(desired.AmongTwo, manyServers(10)...))
	const flows = 4000
	in := map[uint32]int{}
	for port := range uint16(flows) {
		drawn := f.sample(fromPort(web, 1000+port), 2)
		if len(drawn) != 2 || drawn[0] == drawn[1] {
			t.Fatalf("flow %d: sample %v", port, drawn)
		}
		in[drawn[0]]++
		in[drawn[1]]++
	}
	for slot, n := range in { // 800 expected, and the standard deviation is 25
		if n < 675 || n > 925 {
			t.Errorf("slot %d is in %d of %d samples", slot, n, flows)
		}
	}
}

// Servers that take no new flows are in no sample. A single server gets all flows.
func TestSamplesOmitServers(t *testing.T) {
	t.Parallel()
	f := open(t, sampling(desired.AmongTwo, manyServers(20)...))
	for i := range 19 {
		name := fmt.Sprint("s", i+1)
		f.via[name] = ""
		f.route()
		got := occurrences(f.goesToSampled(2, uint16(1000+100*i), 50))
		if got["web/"+name] > 0 {
			t.Errorf("%s has no next hop, and gets flows", name)
		}
	}
	if got := occurrences(f.goesToSampled(2, 5000, 50)); got["web/s20"] != 50 {
		t.Errorf("one server takes flows; flows go to %v", got)
	}
}

// A dry run foresees the server. Packets of unknown flows are not sampled.
func TestDryRunsForeseeSamples(t *testing.T) {
	t.Parallel()
	f := open(t, sampling(desired.AmongThree, manyServers(9)...))
	for port := range uint16(50) {
		frame := frameOf(fromPort(web, 1000+port))
		dry := f.foresee(f.plane.Objects.XdpLb, ebpf.RunOptions{Data: frame, DataOut: make([]byte, 4096)})
		_, out := f.exec(frame, nil)
		if d := &dry.decision.Placement; !bytes.Equal(dry.frame, out) || d.IsPicked == 0 {
			t.Errorf("flow %d: decided %+v; the frames differ: %t", port, d, !bytes.Equal(dry.frame, out))
		}
	}
}

// Connections stay on their servers while the size of the sample changes.
func TestFlowsSurviveOtherSamples(t *testing.T) {
	t.Parallel()
	servers := manyServers(6)
	first := sampling(desired.AmongTwo, servers...)
	f := open(t, first)
	all := f.establish(web)
	for _, among := range []desired.Among{desired.AmongFour, desired.AmongAll, desired.AmongTwo} {
		cfg := sampling(among, servers...)
		cfg.Node.Limits = first.Node.Limits
		f.mustApply(cfg)
		f.stay(all, "")
		f.infers(time.Second)
		f.checkPlaces()
	}
}
