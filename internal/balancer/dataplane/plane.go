// SPDX-License-Identifier: Apache-2.0

// Package dataplane owns the objects that a balancer has in the kernel: programs, pins and tables.
// It knows the layout of each table, and how to change the table while packets use it. It does not
// decide what the tables contain. Package balancer writes the tables. Package inspect reads them,
// even if no process runs the balancer.
package dataplane

import (
	"errors"
	"fmt"
	"net/netip"
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
	Clock     *FlowClock // the clock of the flow tables
	Sweeper   *Sweeper
	// FlowCounts are what the last sweep has counted. Slots writes them.
	FlowCounts *FlowCountTable
	Loads      *LoadTable
	Rankings   *Rankings
	Estimates  *EstimateTable
	Probes     *ProbeTable
	Checks     *CheckTable
	// Held are later fragments that came before the first fragment of their packet. Another
	// goroutine owns them.
	Held *HeldFragments
	// Constants are the values of variables, by name. A program that uses these tables and has all
	// features must be loaded with them.
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

// Side is the data path on one of the balancer's interfaces: the outside, which is node.interface,
// or the inside, which is node.inside. Both sides share all tables. Each side has its own programs,
// because the variables of the programs describe the interface.
type Side struct {
	sideKind
	Objects SideObjects
	// running is held by goroutines that run XdpLb, so that Plane.Widen does not close it
	// meanwhile.
	running sync.RWMutex
}

// sideKind contains the names that belong to a side.
type sideKind struct {
	Setting  string        // the setting that names the interface
	xdp      datapath.Hook // of xdp_lb
	onReturn datapath.Hook // of tc_return, which runs after XDP
}

// SideObjects are the objects that each side has for itself.
type SideObjects struct {
	XdpLb               *ebpf.Program  `ebpf:"xdp_lb"`
	TcReturn            *ebpf.Program  `ebpf:"tc_return"`
	XdpProbe            *ebpf.Program  `ebpf:"xdp_probe"`
	HostMac             *ebpf.Variable `ebpf:"host_mac"`
	HostHairpin         *ebpf.Variable `ebpf:"host_hairpin"`
	HostClientInterface *ebpf.Variable `ebpf:"host_client_interface"`
	NodeLocator         *ebpf.Variable `ebpf:"node_locator"`
	ProbeTurn           *ebpf.Variable `ebpf:"probe_turn"`
	Variables           *ebpf.Map      `ebpf:".bss"` // the memory of the variables
}

// SetHost describes the interface to the programs on it: which frames are for this host, and how
// frames are sent back. SetHost returns an error if a variable cannot be written.
func (s *Side) SetHost(link nexthop.Link) error {
	hairpin := uint32(0) // the interface cannot send by XDP_TX
	if hairpins(link) {
		hairpin = uint32(link.Index)
	}
	if err := s.Objects.HostHairpin.Set(hairpin); err != nil {
		return fmt.Errorf("set how frames go back: %w", err)
	}
	if err := s.Objects.HostMac.Set(macWord(link.MAC)); err != nil {
		return fmt.Errorf("set the interface's address: %w", err)
	}
	return nil
}

// SetHost describes the interfaces to the programs on them. The links are those of the sides, in
// the order of Sides. Packets from servers to clients leave through the first link. SetHost returns
// an error if a variable cannot be written.
func (p *Plane) SetHost(links []nexthop.Link) error {
	for i, side := range p.Sides {
		if err := side.Objects.HostClientInterface.Set(uint32(links[0].Index)); err != nil {
			return fmt.Errorf("set which interface leads to clients: %w", err)
		}
		if err := side.SetHost(links[i]); err != nil {
			return err
		}
	}
	return nil
}

// SetOwnAddresses sets the addresses of the host. A server's packet to one of them is delivered
// here. SetOwnAddresses returns an error if the table has no room for all of them, or cannot be
// written.
func (p *Plane) SetOwnAddresses(addresses []netip.Addr) error {
	own := make(map[balancerIn6Addr]uint8, len(addresses))
	for _, address := range addresses {
		own[in6(address)] = 1
	}
	return datapath.Replace(p.Objects.OwnAddresses, own)
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
