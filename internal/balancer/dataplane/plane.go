// SPDX-License-Identifier: Apache-2.0

// Package dataplane owns the objects that a balancer has in the kernel: programs, pins and tables.
// It knows the layout of each table, and how to change the table while packets use it. It does not
// decide what the tables contain. Package balancer writes the tables. Package inspect reads them,
// even if no process runs the balancer.
package dataplane

import (
	"errors"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
)

// Plane is the data path of an instance: the programs in the kernel, and the tables that they use.
// One goroutine owns it. Other goroutines own the fields Probes and Held. A Reader may read the
// tables at any time.
type Plane struct {
	// Objects are the loaded maps, and the loaded programs of the outside.
	Objects Objects
	// Sides are the outside and, if node.inside is configured, the inside, in this order.
	Sides     []*Side
	Directory *Directory
	Services  *ServiceTable
	Servers   *ServerTable
	Ports     *Ports
	Flows     *FlowTable
	Observed  *FlowTable // flows of services without a flow table, for placement infer
	HalfOpen  *FlowTable // flows whose SYN a server has answered, and whose client has not answered
	Hints     *HintTable
	Clock     *FlowClock // the clock of both flow tables
	Sweeper   *Sweeper
	// FlowCounts are what the last sweep has counted. Slots writes them.
	FlowCounts *FlowCountTable
	Loads      *LoadTable
	Rankings   *Rankings
	Estimates  *EstimateTable
	Probes     *ProbeTable
	Checks     *CheckTable
	// Held are later fragments that came before the first one. Another goroutine owns them.
	Held *HeldFragments
	// Constants are the values of the variables with which programs that use these tables and have
	// all features must be loaded, by the names of the variables.
	Constants map[string]any
	Loader    datapath.Loader

	node     *desired.BalancerNode
	features Features       // of the loaded programs
	links    []nexthop.Link // to which the programs are attached, as Attach got them
	counting sync.Mutex     // held while counters are moved from one table to another
	inner    *ebpf.MapSpec  // the layout of candidate tables
	columns  *ebpf.MapSpec  // the layout of column tables
	identity *Identity
	backup   *backup // set while this process takes over
	copier   tableCopier
}

// SetSignalKeys replaces the keys that verify the signals of servers. SetSignalKeys returns an
// error if the table cannot be written.
func (p *Plane) SetSignalKeys(keys desired.SignalKeys) error {
	return datapath.SetSignalKeys(p.Objects.SignalKeys, keys)
}

// Close unloads the objects that are not pinned. A data path that is attached keeps working.
func (p *Plane) Close() error {
	return errors.Join(
		p.Loader.Close(), p.Checks.close(), p.Held.close(), p.Probes.close(), p.Sweeper.close(), p.Flows.close(),
		p.HalfOpen.close(), p.Observed.close(), p.Hints.close(), p.FlowCounts.close(), p.Loads.close(),
		p.Rankings.close(), p.copier.close(), p.Directory.Close(), p.closeObjects(),
	)
}
