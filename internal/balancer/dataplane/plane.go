// SPDX-License-Identifier: Apache-2.0

// Package dataplane owns what a balancer has in the kernel: programs, their pins and their
// tables. It knows the layout of each table and how to change it while packets meet it. What the
// tables are to hold, others decide: package balancer writes them, and package inspect reads
// them, also without a process.
package dataplane

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
)

// Plane is the data path of an instance: programs in the kernel, and the tables that they read.
// It belongs to one goroutine, except for Probes, which belong to another, and for what a Reader
// reads.
type Plane struct {
	// Objects are the maps and the programs of the outside, as they are loaded.
	Objects Objects
	// Sides are the outside and, where node.inside is configured, the inside.
	Sides     []*Side
	Directory *Directory
	Services  *ServiceTable
	Servers   *ServerTable
	Ports     *Ports
	Flows     *FlowTable
	HalfOpen  *FlowTable // flows whose server has answered and whose client has not
	Clock     *FlowClock // of both flow tables
	Probes    *ProbeTable
	// Constants are what programs that use these tables are loaded with, by the names of variables.
	Constants map[string]any
	// AttachTCX is link.AttachTCX. Tests of kernels before 6.6, which have no tcx, replace it.
	AttachTCX func(link.TCXOptions) (link.Link, error)

	instance string
	dir      string        // of the pins
	fresh    bool          // nothing was pinned before
	made     []string      // pins of tables that no earlier process has left
	recount  bool          // the counters that are pinned are of another build's reasons
	counting sync.Mutex    // held while counters move from one table to another
	inner    *ebpf.MapSpec // of candidate tables
	identity *Identity
	backup   *backup // while this process takes over
}

// Open loads the programs. It opens the tables that an earlier process has left pinned, or
// makes and pins them. It neither attaches programs nor changes what is in the tables. Tables
// of another build's layout or of other limits are an error, and Open leaves them as they are.
func Open(cfg *config.Balancer, clock *FlowClock, log *slog.Logger) (*Plane, error) {
	spec, _, err := LoadSpec()
	if err != nil {
		return nil, err
	}
	_, err = os.Stat(datapath.Dir(cfg.Node.Instance))
	fresh := errors.Is(err, os.ErrNotExist)
	dir, err := datapath.MakeDir(cfg.Node.Instance, datapath.RoleBalancer)
	if err != nil {
		return nil, err
	}
	spec.Maps[FlowsMap].MaxEntries = flowBuckets(cfg.Node.Limits.Flows)
	spec.Maps[balancerMapHalfOpen].MaxEntries = flowBuckets(cfg.Node.Limits.Flows / flowsPerHalfOpen)
	for _, bySlot := range []string{
		ServerCountersMap, balancerMapServerSignals, balancerMapAnsweredOffers,
		balancerMapProbes, balancerMapProbeTurns,
	} {
		spec.Maps[bySlot].MaxEntries = serverSlots(cfg.Node.Limits.Servers)
	}

	p := &Plane{
		instance: cfg.Node.Instance, dir: dir, fresh: fresh, Clock: clock, inner: spec.Maps[TablesMap].InnerMap,
		AttachTCX: link.AttachTCX,
	}
	if err := p.load(spec, &cfg.Node, log); err != nil {
		_ = p.closeObjects()
		return nil, errors.Join(p.explain(err), p.Undo())
	}
	return p, nil
}

// serverSlots is how many slots that many servers need: as many again, so that
// all can be replaced at once, while the flows of those before are swept. A slot
// has 16 bits.
func serverSlots(servers uint32) uint32 {
	return min(2*servers, MostSlots)
}

// load pins nothing before the kernel has taken the program.
func (p *Plane) load(spec *ebpf.CollectionSpec, node *config.BalancerNode, log *slog.Logger) error {
	kept, err := openKept(spec, p.dir)
	defer closeAll(kept)
	if err != nil {
		return err
	}
	if p.recount = countsOthers(spec, kept); p.recount {
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
	p.Constants = map[string]any{
		balancerVarFlowTickShift:       p.Clock.Shift,
		balancerVarFlowBucketKeys:      identity.FlowBucketKeys,
		balancerVarFlowSignatureKeys:   identity.FlowSignatureKeys,
		balancerVarFlowBucketShift:     bucketShift(spec.Maps[FlowsMap].MaxEntries),
		balancerVarHalfOpenBucketShift: bucketShift(spec.Maps[balancerMapHalfOpen].MaxEntries),
		balancerVarServiceKeys:         identity.ServiceKeys,
		balancerVarBucketKeys:          identity.BucketKeys,
	}
	for name, value := range p.Constants {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	if err := spec.Variables[balancerVarHostIsOutside].Set(!node.IsInternal()); err != nil {
		return fmt.Errorf("set where the interface leads: %w", err)
	}
	if err := spec.LoadAndAssign(&p.Objects, &ebpf.CollectionOptions{MapReplacements: kept}); err != nil {
		return err
	}
	if err := p.loadSides(spec, node); err != nil {
		return err
	}
	p.Clock.program = p.Objects.ReadJiffies
	if p.Flows, err = mapFlows(p.Objects.Flows, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return err
	}
	if p.HalfOpen, err = mapFlows(p.Objects.HalfOpen, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return err
	}
	if p.Directory, err = MapDirectory(p.Objects.Directory, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return err
	}
	p.Servers = p.Objects.serverTable(p.Directory)
	p.Services = &ServiceTable{directory: p.Directory, keys: &identity.ServiceKeys}
	p.Ports = &Ports{directory: p.Directory}
	if p.Probes, err = p.mapProbes(p.Sides[len(p.Sides)-1]); err != nil { // the side towards the servers
		return err
	}
	if kept[balancerMapIdentity] == nil {
		if err := p.WriteIdentity(); err != nil {
			return err
		}
	}
	return p.pinNew(kept)
}

// SetSignalKeys replaces the keys by which signals of servers are verified.
func (p *Plane) SetSignalKeys(keys config.SignalKeys) error {
	return datapath.SetSignalKeys(p.Objects.SignalKeys, keys)
}

// Close unloads what is not pinned. The data path works on if it is attached.
func (p *Plane) Close() error {
	return errors.Join(p.Probes.close(), p.Flows.close(), p.HalfOpen.close(), p.Directory.Close(),
		p.closeObjects())
}

// Detach takes the data path of an instance out of the kernel, with all flows. Programs go
// before their tables. The caller is in the network namespace of the instance.
func Detach(instance string) error {
	if err := detachReturn(instance); err != nil {
		return err
	}
	for _, kind := range sideKinds {
		if err := datapath.DetachLink(filepath.Join(datapath.Dir(instance), kind.xdpPin)); err != nil {
			return err
		}
	}
	return datapath.RemoveDir(instance)
}
