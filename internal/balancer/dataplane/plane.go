// SPDX-License-Identifier: Apache-2.0

// Package dataplane owns the objects that a balancer has in the kernel: programs, pins and tables.
// It knows the layout of each table, and how to change the table while packets use it. It does not
// decide what the tables contain. Package balancer writes the tables. Package inspect reads them,
// even if no process runs the balancer.
package dataplane

import (
	"errors"
	"log/slog"
	"os"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

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
	TC        datapath.TC

	instance string
	node     *desired.BalancerNode
	features Features       // of the loaded programs
	links    []nexthop.Link // to which the programs are attached, as Attach got them
	dir      string         // the directory of the pins
	fresh    bool           // the directory of the pins did not exist before
	made     []string       // names of the tables that this process has pinned
	recount  bool           // the pinned counters are for the reasons of another build
	counting sync.Mutex     // held while counters are moved from one table to another
	inner    *ebpf.MapSpec  // the layout of candidate tables
	columns  *ebpf.MapSpec  // the layout of column tables
	identity *Identity
	backup   *backup // set while this process takes over
	copier   tableCopier
	// checkLink is the tcx link of tc_check; nil: it is not attached, or by a filter.
	checkLink link.Link
}

// Open loads the programs. It opens the tables that an earlier process has left pinned, or makes
// and pins them. It attaches no program and changes no entry of a table. Open returns an error, and
// leaves the pins as they are, if the tables have the layout of another build or other limits.
func Open(cfg *desired.Balancer, clock *FlowClock, log *slog.Logger) (*Plane, error) {
	spec, err := specFor(&cfg.Node)
	if err != nil {
		return nil, err
	}
	_, err = os.Stat(datapath.Dir(cfg.Node.Instance))
	fresh := errors.Is(err, os.ErrNotExist)
	dir, err := datapath.MakeDir(cfg.Node.Instance, datapath.RoleBalancer)
	if err != nil {
		return nil, err
	}
	p := &Plane{
		instance: cfg.Node.Instance, node: &cfg.Node, dir: dir, fresh: fresh, Clock: clock, inner: spec.Maps[TablesMap].InnerMap,
		columns: spec.Maps[balancerMapColumns].InnerMap,
		TC:      datapath.TC{Instance: cfg.Node.Instance, AttachTCX: link.AttachTCX},
	}
	if err := p.load(spec, cfg, log); err != nil {
		_ = p.closeObjects()
		return nil, errors.Join(p.explain(err, cfg.Node.Limits), p.Undo())
	}
	return p, nil
}

// specFor returns the specification of this build's data path, with tables of the node's limits.
func specFor(node *desired.BalancerNode) (*ebpf.CollectionSpec, error) {
	spec, _, err := LoadSpec()
	if err != nil {
		return nil, err
	}
	declare(node.Limits).Resize(spec)
	return spec, nil
}

// serverSlots returns the number of slots for the given number of servers. It is twice as many, so
// that all servers can be replaced at once while the flows of the old ones are swept. No server
// gets the slot NoServer.
func serverSlots(servers uint32) uint32 {
	return min(2*servers, NoServer)
}

// load loads the objects, and pins nothing before the kernel has accepted the programs.
func (p *Plane) load(spec *ebpf.CollectionSpec, cfg *desired.Balancer, log *slog.Logger) error {
	node := &cfg.Node
	kept, others, err := declare(node.Limits).Open(spec, p.dir)
	defer func() { _ = datapath.CloseMaps(kept) }()
	if err != nil {
		return err
	}
	if err := checkInner(p.dir, kept, spec); err != nil {
		return err
	}
	if p.recount = len(others) > 0; p.recount {
		log.Warn("another build counted other reasons: all counters start at zero")
		for _, name := range CountersByReason {
			_ = kept[name].Close()
			delete(kept, name)
		}
	}
	identity, err := identityOf(kept[balancerMapIdentity], node.Seed)
	if err != nil {
		return err
	}
	p.identity = identity
	p.Constants = constantsOf(identity, p.Clock, tableSizes{
		flows: spec.Maps[FlowsMap].MaxEntries, halfOpen: spec.Maps[balancerMapHalfOpen].MaxEntries,
		hints: spec.Maps[HintsMap].MaxEntries, starts: spec.Maps[balancerMapStarts].MaxEntries,
		observed: spec.Maps[balancerMapObserved].MaxEntries,
	})
	former, err := featuresInForce(kept[DirectoryMap])
	if err != nil {
		return err
	}
	p.features = FeaturesOf(cfg) | former
	if err := p.setVariables(spec); err != nil {
		return err
	}
	if err := LoadObjects(spec, &p.Objects, kept); err != nil {
		return err
	}
	if err := p.loadSides(spec); err != nil {
		return err
	}
	p.Clock.program = p.Objects.ReadJiffies
	if p.Flows, err = mapFlows(p.Objects.Flows); err != nil {
		return err
	}
	if p.HalfOpen, err = mapFlows(p.Objects.HalfOpen); err != nil {
		return err
	}
	if p.Observed, err = mapFlows(p.Objects.Observed); err != nil {
		return err
	}
	if p.Hints, err = mapHints(p.Objects.Hints); err != nil {
		return err
	}
	if p.Sweeper, err = newSweeper(&p.Objects, p.Clock); err != nil {
		return err
	}
	const protection = unix.PROT_READ | unix.PROT_WRITE
	if p.FlowCounts, err = mapFlowCounts(p.Objects.FlowCounts, protection); err != nil {
		return err
	}
	if p.Loads, err = mapLoads(&p.Objects.Maps, protection); err != nil {
		return err
	}
	p.Estimates = &EstimateTable{estimates: p.Objects.Estimates}
	if p.Rankings, err = p.mapRankings(); err != nil {
		return err
	}
	if p.Directory, err = MapDirectory(p.Objects.Directory, protection); err != nil {
		return err
	}
	p.Servers = p.Objects.serverTable(p.Directory)
	p.Rankings.load(p.Servers.servers)
	p.Services = &ServiceTable{directory: p.Directory, keys: &identity.ServiceKeys}
	p.Ports = &Ports{directory: p.Directory}
	if p.Checks, err = mapChecks(p.Objects.Checks); err != nil {
		return err
	}
	if p.Held, err = p.openHeld(); err != nil {
		return err
	}
	// Probes leave through the side towards the servers.
	if p.Probes, err = p.mapProbes(p.Sides[len(p.Sides)-1]); err != nil {
		return err
	}
	if kept[balancerMapIdentity] == nil {
		if err := p.WriteIdentity(); err != nil {
			return err
		}
	}
	return p.pinNew(kept)
}

// setVariables sets the variables with which the programs of the outside are loaded.
func (p *Plane) setVariables(spec *ebpf.CollectionSpec) error {
	return errors.Join(datapath.SetVariables(spec, p.Constants), datapath.SetVariables(spec, map[string]any{
		balancerVarFeatures:      p.features.in(p.identity, spec.Maps[HintsMap].MaxEntries),
		balancerVarHostIsOutside: !p.node.IsInternal(),
		balancerVarServerSlots:   serverSlots(p.node.Limits.Servers),
	}))
}

// tableSizes are the numbers of buckets of the flow tables, and of sets of the hint table.
type tableSizes struct{ flows, halfOpen, hints, starts, observed uint32 }

// constantsOf returns the values of the variables with which programs that use some tables and have
// all features must be loaded. The tables have the identity and these sizes.
func constantsOf(identity *Identity, clock *FlowClock, sizes tableSizes) map[string]any {
	return map[string]any{
		balancerVarFlowTickShift:       clock.Shift,
		balancerVarReportHalfLifeShift: halfLifeShift(clock.Jiffy),
		balancerVarFlowKeys:            identity.FlowKeys,
		balancerVarFeatures:            FeaturesAll.in(identity, sizes.hints),
		balancerVarFlowBucketShift:     bucketShift(sizes.flows),
		balancerVarHalfOpenBucketShift: bucketShift(sizes.halfOpen),
		balancerVarHintSetShift:        hintSetShift(sizes.hints),
		balancerVarStartMask:           sizes.starts - 1,
		balancerVarObservedBucketShift: bucketShift(sizes.observed),
		balancerVarServiceKeys:         identity.ServiceKeys,
		balancerVarBucketKeys:          identity.BucketKeys,
	}
}

// SetSignalKeys replaces the keys that verify the signals of servers. SetSignalKeys returns an
// error if the table cannot be written.
func (p *Plane) SetSignalKeys(keys desired.SignalKeys) error {
	return datapath.SetSignalKeys(p.Objects.SignalKeys, keys)
}

// Close unloads the objects that are not pinned. A data path that is attached keeps working.
func (p *Plane) Close() error {
	return errors.Join(
		p.closeCheck(), p.Checks.close(), p.Held.close(), p.Probes.close(), p.Sweeper.close(), p.Flows.close(),
		p.HalfOpen.close(), p.Observed.close(), p.Hints.close(), p.FlowCounts.close(), p.Loads.close(),
		p.Rankings.close(), p.copier.close(), p.Directory.Close(), p.closeObjects(),
	)
}

// Detach removes the data path of an instance from the kernel, with all flows. It removes the
// programs before their tables. The caller must be in the network namespace of the instance. If
// programs cannot be removed, Detach returns an error, and leaves the tables.
func Detach(instance string) error {
	if err := detachReturn(instance); err != nil {
		return err
	}
	if err := datapath.DetachLinks(instance, xdpPins()...); err != nil {
		return err
	}
	return datapath.RemoveDir(instance)
}
