// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
)

// Memory has the memory of a flow table, and the number of flows that the table holds in practice.
// To find this number, as many flows were entered as the table has capacity. Some find no room.
type Memory struct {
	Flows    uint64 `json:"flows"`    // the value of node.limits.flows
	Capacity uint64 `json:"capacity"` // of the table, in flows: Flows rounded up
	Bytes    uint64 `json:"bytes"`    // of kernel memory
	// BytesPerFlow is Bytes divided by Capacity.
	BytesPerFlow float64 `json:"bytes_per_flow"`
	Entered      uint64  `json:"entered"` // number of flows that were entered
	Held         uint64  `json:"held"`    // of the entered flows, those in the table at the end
}

// MeasureMemory fills flow tables with flows, and measures the memory. sizes are values of
// node.limits.flows. MeasureMemory needs root.
func MeasureMemory(ctx context.Context, sizes []uint32, progress Progress) ([]Memory, error) {
	h, err := newHost()
	if err != nil {
		return nil, err
	}
	defer h.close()
	var all []Memory
	for _, flows := range sizes {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		progress.say("fill a table for %d flows", flows)
		m, err := measureMemory(ctx, h, flows)
		if err != nil {
			return nil, fmt.Errorf("flow table for %d flows: %w", flows, err)
		}
		all = append(all, m)
	}
	return all, nil
}

// measureMemory makes a balancer with a flow table for the given number of flows, fills the table,
// and measures its memory.
func measureMemory(ctx context.Context, h *host, flows uint32) (m Memory, err error) {
	s := setup{kind: setupBalancer, family: ipv6, capacity: flows, content: knownFlows}
	r, err := s.build()
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	before, err := r.view.Snapshot()
	if err != nil {
		return m, err
	}
	s.capacity = uint32(before.FlowTable.Capacity)
	if err := r.fill(ctx, h, &s); err != nil {
		return m, err
	}
	// The sweep counts the flows in the table. It removes none, because none has timed out yet.
	if err := r.balancer.Sweep(); err != nil {
		return m, err
	}
	after, err := r.view.Snapshot()
	if err != nil {
		return m, err
	}
	bytes, err := mapMemory(filepath.Join(datapath.Dir(r.config.Node.Instance), "flows"))
	return Memory{
		Flows: uint64(flows), Capacity: before.FlowTable.Capacity, Bytes: bytes,
		BytesPerFlow: float64(bytes) / float64(before.FlowTable.Capacity),
		Entered:      uint64(s.capacity), Held: after.FlowTable.Flows.Total(),
	}, err
}

// mapMemory returns the memory that the kernel reports for a pinned map, in bytes.
func mapMemory(pin string) (uint64, error) {
	m, err := ebpf.LoadPinnedMap(pin, nil)
	if err != nil {
		return 0, err
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return 0, err
	}
	bytes, ok := info.Memlock()
	if !ok {
		return 0, fmt.Errorf("%s: the kernel does not say how much memory it takes", pin)
	}
	return bytes, nil
}
