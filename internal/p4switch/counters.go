// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"context"
	"fmt"

	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"

	"github.com/segue-lb/segue/internal/datapath"
)

// reasons are the names of the reasons under which a switch counts packets: reason_t of
// p4/core/headers.p4. Number 0 counts nothing.
var reasons = [...]string{
	"none", "forward_known", "forward_new", "forward_hunt", "forward_recover", "pass_from_host",
	"pass_not_for_host", "pass_not_ip", "pass_no_service", "pass_protocol", "pass_fragment",
	"pass_malformed", "pass_flags", "pass_no_server", "pass_hop_limit", "pass_too_big", "drop_port",
	"pass_no_server_id", "pass_no_cookie",
}

// The counters of the program: p4/v1model.p4.
const (
	countedReasons = "reasons" // by number of the reason
	countedServers = "servers" // by slot
)

// Reasons returns how many packets the switch has counted under each reason since it began to run
// its program. Bytes are of whole frames.
func (r *Reader) Reasons(ctx context.Context) ([]datapath.ReasonCount, error) {
	counts := make([]datapath.ReasonCount, len(reasons)-1)
	wanted := make([]uint16, len(counts))
	for i := range counts {
		counts[i].Reason, wanted[i] = reasons[i+1], uint16(i+1)
	}
	err := r.count(ctx, countedReasons, wanted, func(index uint16, data *p4v1.CounterData) {
		counts[index-1].Packets, counts[index-1].Bytes = uint64(data.GetPacketCount()), uint64(data.GetByteCount())
	})
	return counts, err
}

// Servers calls found for each server, with the packets that the switch has sent to it first, and the
// bytes of their frames without the encapsulation.
func (r *Reader) Servers(
	ctx context.Context, servers []*Server, found func(server *Server, packets, bytes uint64),
) error {
	bySlot, slots := map[uint16]*Server{}, []uint16{}
	for _, server := range servers {
		bySlot[server.Slot] = server
		slots = append(slots, server.Slot)
	}
	return r.count(ctx, countedServers, slots, func(slot uint16, data *p4v1.CounterData) {
		found(bySlot[slot], uint64(data.GetPacketCount()), uint64(data.GetByteCount()))
	})
}

// count reads counters with these indexes. It calls found for each.
func (r *Reader) count(
	ctx context.Context, counter string, indexes []uint16, found func(uint16, *p4v1.CounterData),
) error {
	c := r.program.counters[counter]
	if c == nil {
		return fmt.Errorf("the program has no counter %s", counter)
	}
	if len(indexes) == 0 {
		return nil
	}
	wanted := make([]*p4v1.Entity, len(indexes))
	isWanted := map[int64]bool{}
	for i, index := range indexes {
		isWanted[int64(index)] = true
		wanted[i] = &p4v1.Entity{Entity: &p4v1.Entity_CounterEntry{CounterEntry: &p4v1.CounterEntry{
			CounterId: c.Preamble.Id, Index: &p4v1.Index{Index: int64(index)},
		}}}
	}
	return r.read(ctx, wanted, func(entity *p4v1.Entity) error {
		e := entity.GetCounterEntry()
		index := e.GetIndex().GetIndex()
		if e.GetCounterId() != c.Preamble.Id || !isWanted[index] {
			return fmt.Errorf("the switch answers with index %d of counter %d", index, e.GetCounterId())
		}
		found(uint16(index), e.GetData())
		return nil
	})
}
