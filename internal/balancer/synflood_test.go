// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// A flood of SYNs is spread over all servers by their speeds, although only some of them have other
// flows. It changes neither prices nor the established flows, and leaves no load behind. The flood
// takes less time than a step of the inference.
func TestSYNFlood(t *testing.T) {
	t.Parallel()
	const flood, established = 100_000, 50
	var servers []desired.Server
	weights := map[uint32]float64{} // by slot
	for i, server := range manyServers(8) {
		server.Weight = new(uint32(1 + i%3))
		servers = append(servers, server)
	}
	cfg := placingBy(desired.PlacementSED, servers...)
	cfg.Node.Limits.Flows = 1 << 14
	f := open(t, cfg)
	f.infers(time.Second)
	sum := 0.0
	for i, server := range servers {
		weights[f.slot("web", server.Name)] = float64(*server.Weight)
		sum += float64(*server.Weight)
		if i >= 4 {
			f.setHealth("web", server.Name, false)
		}
	}
	for port := range uint16(4 * established) {
		f.exec(frameOf(fromPort(web, 1000+port)), nil)
		f.exec(frameOf(fromPort(web, 1000+port), packet.Flags(packet.ACK)), nil)
	}
	for _, server := range servers[4:] {
		f.setHealth("web", server.Name, true)
	}
	before, prices := map[uint32]uint32{}, map[uint32]uint32{}
	for slot := range weights {
		_, before[slot] = f.plane.Loads.Flows(slot)
		prices[slot] = f.plane.Loads.Price(slot).Unit
	}

	frame := frameOf(web)
	for i := range uint32(flood) {
		source := frame[14+8 : 14+24]
		binary.BigEndian.PutUint32(source[8:], i*2654435761) // a different host each time
		if _, err := f.plane.Objects.XdpLb.Run(&ebpf.RunOptions{Data: frame}); err != nil {
			t.Fatal(err)
		}
	}
	for slot, weight := range weights {
		placed, _ := f.plane.Loads.Placed(slot)
		_, got := f.plane.Loads.Flows(slot)
		share := flood * weight / sum
		if n := float64(placed - before[slot]); n > 2*share || n < share/8 {
			t.Errorf("slot %d gets %v SYNs, its share is %v", slot, n, share)
		}
		if got != before[slot] || f.plane.Loads.Price(slot).Unit != prices[slot] {
			t.Errorf("slot %d had %d flows and the price %d, and has %d and %d", slot, before[slot],
				prices[slot], got, f.plane.Loads.Price(slot).Unit)
		}
	}
	_, err := f.plane.Sweeper.Sweep(func(yield func(uint32, dataplane.FlowLifetimes) bool) {
		for slot := range weights {
			lifetimes := dataplane.Forever
			lifetimes.New = 0
			if !yield(slot, lifetimes) {
				return
			}
		}
	})
	f.must(err)
	for slot := range weights {
		f.hasLoad(slot, load{0, before[slot]})
	}
}
