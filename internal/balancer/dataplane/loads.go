// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"
	"sync/atomic"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// rankLines returns the number of lines for the rankings of so many servers. Twice as many lines as
// servers suffice, because a service with one server has one line, and a service whose servers
// change has two rankings for a moment.
func rankLines(slots uint32) uint32 { return 2*slots + 64 }

// LoadTable is what the data path knows of the loads of servers, by slot: the map loads, mapped
// into this process.
type LoadTable struct {
	memory []byte
	loads  []balancerLoad
}

func mapLoads(m *ebpf.Map) (*LoadTable, error) {
	memory, loads, err := mapArray[balancerLoad](m)
	if err != nil {
		return nil, fmt.Errorf("loads of servers: %w", err)
	}
	return &LoadTable{memory, loads}, nil
}

func (t *LoadTable) close() error { return unix.Munmap(t.memory) }

// Flows returns the numbers of flows of the slot's server in both flow tables: those of which one
// packet was seen, and those that are established and not silent.
func (t *LoadTable) Flows(slot uint32) (unconfirmed, established uint32) {
	flows := atomic.LoadUint64(&t.loads[slot].Flows)
	return uint32(flows >> 32), uint32(flows)
}

// Clear sets all loads to zero. Only tests call it, which empty the flow tables.
func (t *LoadTable) Clear() { clear(t.loads) }

// count adds the entry's part of its server's load, as count_change in bpf/balancer/flowtable.h.
func (t *LoadTable) count(entry FlowEntry) {
	switch entry.State() {
	case FlowNew:
		atomic.AddUint64(&t.loads[entry.Server()].Flows, 1<<32)
	case FlowEstablished:
		atomic.AddUint64(&t.loads[entry.Server()].Flows, 1)
	}
}
