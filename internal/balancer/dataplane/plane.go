// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
)

// Plane is the data path: the program and the tables that it reads.
type Plane struct {
	instance  string
	dir       string
	fresh     bool       // nothing was pinned before
	recount   bool       // the counters that are pinned are of another build's reasons
	counting  sync.Mutex // while counters move from one table to another
	Objects   Objects
	Sides     []*Side       // on node.interface, and on node.inside where there is one
	inner     *ebpf.MapSpec // of candidate tables
	Flows     *FlowTable
	HalfOpen  *FlowTable // the half-open ones
	Clock     *FlowClock
	Directory *Directory
	Servers   *ServerTable
	Services  *ServiceTable
	Ports     *Ports
	Probes    *ProbeTable
	identity  *Identity
	Constants map[string]any // that the program was loaded with
	made      []string       // pins of tables that no earlier process has left
	backup    *backup        // while this process takes over
	AttachTCX func(link.TCXOptions) (link.Link, error)
}

// Pinned are the tables that outlive the process, by their names.
func (maps *Maps) Pinned() map[string]**ebpf.Map {
	return map[string]**ebpf.Map{
		DirectoryMap:             &maps.Directory,
		FlowsMap:                 &maps.Flows,
		FragmentsMap:             &maps.Fragments,
		balancerMapIdentity:      &maps.Identity,
		balancerMapHalfOpen:      &maps.HalfOpen,
		ReasonsMap:               &maps.Reasons,
		ServerCountersMap:        &maps.ServerCounters,
		balancerMapServerLabels:  &maps.ServerLabels,
		balancerMapServerSignals: &maps.ServerSignals,
		balancerMapServiceLabels: &maps.ServiceLabels,
		TablesMap:                &maps.Tables,
	}
}

// CountersByReason are the tables that mean something else to a build with other reasons. They alone can be
// lost without harm.
var CountersByReason = []string{ReasonsMap, ServerCountersMap}

// LoadSpec describes the data path of this build, and names the reasons that it counts.
func LoadSpec() (spec *ebpf.CollectionSpec, reasons []string, err error) {
	if spec, err = loadBalancer(); err != nil {
		return nil, nil, err
	}
	if reasons, err = datapath.EnumLabels(spec.Types, "lb_reason", "LB_"); err != nil {
		return nil, nil, err
	}
	for _, name := range CountersByReason {
		datapath.NameAfter(spec.Maps[name], reasons)
	}
	NameDirectory(spec)
	return spec, reasons, nil
}

// Open loads the program and opens the tables that an earlier process left
// pinned, or makes them. What is in the tables stays as it is, and nothing is attached
// yet. A build or limits that do not fit the tables are refused.
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

	k := &Plane{
		instance: cfg.Node.Instance, dir: dir, fresh: fresh, Clock: clock, inner: spec.Maps[TablesMap].InnerMap,
		AttachTCX: link.AttachTCX,
	}
	if err := k.load(spec, &cfg.Node, log); err != nil {
		_ = k.closeObjects()
		return nil, errors.Join(k.explain(err), k.Undo())
	}
	return k, nil
}

// serverSlots is how many slots that many servers need: as many again, so that
// all can be replaced at once, while the flows of those before are swept. A slot
// has 16 bits.
func serverSlots(servers uint32) uint32 {
	return min(2*servers, MostSlots)
}

// load pins nothing before the kernel has taken the program.
func (k *Plane) load(spec *ebpf.CollectionSpec, node *config.BalancerNode, log *slog.Logger) error {
	kept, err := openKept(spec, k.dir)
	defer closeAll(kept)
	if err != nil {
		return err
	}
	if k.recount = countsOthers(spec, kept); k.recount {
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
	k.identity = identity
	k.Constants = map[string]any{
		balancerVarFlowTickShift:       k.Clock.Shift,
		balancerVarFlowBucketKeys:      identity.FlowBucketKeys,
		balancerVarFlowSignatureKeys:   identity.FlowSignatureKeys,
		balancerVarFlowBucketShift:     bucketShift(spec.Maps[FlowsMap].MaxEntries),
		balancerVarHalfOpenBucketShift: bucketShift(spec.Maps[balancerMapHalfOpen].MaxEntries),
		balancerVarServiceKeys:         identity.ServiceKeys,
		balancerVarBucketKeys:          identity.BucketKeys,
	}
	for name, value := range k.Constants {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	if err := spec.Variables[balancerVarHostIsOutside].Set(!node.IsInternal()); err != nil {
		return fmt.Errorf("set where the interface leads: %w", err)
	}
	if err := spec.LoadAndAssign(&k.Objects, &ebpf.CollectionOptions{MapReplacements: kept}); err != nil {
		return err
	}
	if err := k.loadSides(spec, node); err != nil {
		return err
	}
	k.Clock.program = k.Objects.ReadJiffies
	if k.Flows, err = mapFlows(k.Objects.Flows, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return err
	}
	if k.HalfOpen, err = mapFlows(k.Objects.HalfOpen, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return err
	}
	if k.Directory, err = MapDirectory(k.Objects.Directory, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return err
	}
	k.Servers, k.Services = k.Objects.serverTable(k.Directory), &ServiceTable{directory: k.Directory, keys: &identity.ServiceKeys}
	k.Ports = &Ports{directory: k.Directory}
	if k.Probes, err = k.mapProbes(k.Sides[len(k.Sides)-1]); err != nil { // the side towards the servers
		return err
	}
	if kept[balancerMapIdentity] == nil {
		if err := k.WriteIdentity(); err != nil {
			return err
		}
	}
	return k.pinNew(kept)
}

// countsOthers tells whether counters by reason were kept, and are of other reasons.
func countsOthers(spec *ebpf.CollectionSpec, kept map[string]*ebpf.Map) bool {
	return slices.ContainsFunc(CountersByReason, func(name string) bool {
		return kept[name] != nil && datapath.Compatible(spec.Maps[name], kept[name]) != nil
	})
}

// openKept opens the tables that an earlier process left. Those of another layout
// or other limits are an error, but for the counters by reason.
func openKept(spec *ebpf.CollectionSpec, dir string) (kept map[string]*ebpf.Map, err error) {
	kept = map[string]*ebpf.Map{}
	for name := range new(Maps).Pinned() {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return kept, fmt.Errorf("table %s: %w", name, err)
		}
		kept[name] = m
		if err := spec.Maps[name].Compatible(m); err != nil && !slices.Contains(CountersByReason, name) {
			return kept, fmt.Errorf("table %s: %w", name, err)
		}
	}
	return kept, checkInner(kept, spec)
}

// checkInner compares the layout of one candidate table, for no pin names them. The kernel sees to it that
// all are the same.
func checkInner(kept map[string]*ebpf.Map, spec *ebpf.CollectionSpec) error {
	if kept[DirectoryMap] == nil || kept[TablesMap] == nil {
		return nil
	}
	mapped, err := MapDirectory(kept[DirectoryMap], unix.PROT_READ)
	if err != nil {
		return err
	}
	defer mapped.Close()
	for _, entry := range (&ServiceTable{directory: mapped}).All() {
		if !entry.IsService() {
			continue
		}
		if err := checkElement(kept[TablesMap], entry.Table(), spec.Maps[TablesMap].InnerMap); err != nil {
			return fmt.Errorf("candidate table %d: %w", entry.Table(), err)
		}
		break
	}
	return nil
}

// checkElement compares an element, if there is one, of a map of maps; its size is set with its content.
func checkElement(outer *ebpf.Map, number uint32, spec *ebpf.MapSpec) error {
	var inner *ebpf.Map
	err := outer.Lookup(number, &inner)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer inner.Close()
	expected := spec.Copy()
	expected.MaxEntries = inner.MaxEntries()
	return expected.Compatible(inner)
}

func closeAll(maps map[string]*ebpf.Map) {
	for _, m := range maps {
		_ = m.Close()
	}
}

// pinNew pins the tables that were not: identity first, which tells an instance's
// role. Counters that take the place of others wait until the program that counts
// in them is attached.
func (k *Plane) pinNew(kept map[string]*ebpf.Map) error {
	pin := func(name string, table *ebpf.Map) error {
		if kept[name] != nil || k.recount && slices.Contains(CountersByReason, name) {
			return nil
		}
		k.made = append(k.made, name)
		return datapath.Pin(table, k.pin(name))
	}
	if err := pin(balancerMapIdentity, k.Objects.Identity); err != nil {
		return err
	}
	for name, table := range k.Objects.Maps.Pinned() {
		if name == balancerMapIdentity {
			continue
		}
		if err := pin(name, *table); err != nil {
			return err
		}
	}
	return nil
}

// explain says what to do about pins that another build or other limits left.
func (k *Plane) explain(err error) error {
	var verifier *ebpf.VerifierError
	if errors.As(err, &verifier) {
		return fmt.Errorf("the kernel refuses the program: %+v", verifier)
	}
	if errors.Is(err, ebpf.ErrMapIncompatible) {
		return fmt.Errorf("the tables in %s have another layout or other limits, and flows in them: "+
			"`segue lb detach %s` drops them: %w", k.dir, k.instance, err)
	}
	return fmt.Errorf("load the data path: %w", err)
}

// pinCounting pins the program that packets meet, for tools, and the counters that it counts in where they are others
// than before.
func (k *Plane) pinCounting(t *datapath.Takeover) error {
	if k.recount {
		tables := k.Objects.Maps.Pinned()
		for _, name := range CountersByReason {
			if err := t.Pin(*tables[name], k.pin(name)); err != nil {
				return err
			}
		}
	}
	return t.Pin(k.Objects.XdpLb, k.pin(datapath.BalancerProgram))
}

// SetSignalKeys replaces the keys that tell servers' signals from others'.
func (k *Plane) SetSignalKeys(keys config.SignalKeys) error {
	return datapath.SetSignalKeys(k.Objects.SignalKeys, keys)
}

// Undo takes away the pins of a start that came to nothing.
func (k *Plane) Undo() error {
	if k.fresh {
		return datapath.RemoveDir(k.instance)
	}
	var errs []error
	for _, name := range k.made {
		if err := os.Remove(k.pin(name)); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Close lets go of the data path; what is pinned works on.
func (k *Plane) Close() error {
	return errors.Join(k.Probes.close(), k.Flows.close(), k.HalfOpen.close(), k.Directory.Close(), k.closeObjects())
}

// Detach takes the data path of an instance out of the kernel, with all flows. No
// packet meets a program whose tables are on their way out.
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
