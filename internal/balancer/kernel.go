// SPDX-License-Identifier: Apache-2.0

package balancer

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

// kernel is the data path: the program and the tables that it reads.
type kernel struct {
	instance  string
	dir       string
	fresh     bool       // nothing was pinned before
	recount   bool       // the counters that are pinned are of another build's reasons
	counting  sync.Mutex // while counters move from one table to another
	objects   objects
	sides     []*side       // on node.interface, and on node.inside where there is one
	inner     *ebpf.MapSpec // of candidate tables
	flows     *flowTable
	halfOpen  *flowTable // the half-open ones
	clock     *flowClock
	mapped    *directory
	servers   *serverTable
	services  *serviceTable
	ports     *ports
	probes    *probeTable
	identity  *balancerIdentity
	constants map[string]any // that the program was loaded with
	made      []string       // pins of tables that no earlier process has left
	backup    *backup        // while this process takes over
	attachTCX func(link.TCXOptions) (link.Link, error)
}

// pinned are the tables that outlive the process, by their names.
func (maps *kernelMaps) pinned() map[string]**ebpf.Map {
	return map[string]**ebpf.Map{
		directoryMap:              &maps.Directory,
		balancerMapFlows:          &maps.Flows,
		balancerMapFragments:      &maps.Fragments,
		balancerMapIdentity:       &maps.Identity,
		balancerMapHalfOpen:       &maps.HalfOpen,
		balancerMapReasons:        &maps.Reasons,
		balancerMapServerCounters: &maps.ServerCounters,
		balancerMapServerLabels:   &maps.ServerLabels,
		balancerMapServerSignals:  &maps.ServerSignals,
		balancerMapServiceLabels:  &maps.ServiceLabels,
		balancerMapTables:         &maps.Tables,
	}
}

// countersByReason are the tables that mean something else to a build with other reasons. They alone can be
// lost without harm.
var countersByReason = []string{balancerMapReasons, balancerMapServerCounters}

// loadSpec describes the data path of this build, and names the reasons that it counts.
func loadSpec() (spec *ebpf.CollectionSpec, reasons []string, err error) {
	if spec, err = loadBalancer(); err != nil {
		return nil, nil, err
	}
	if reasons, err = datapath.EnumLabels(spec.Types, "lb_reason", "LB_"); err != nil {
		return nil, nil, err
	}
	for _, name := range countersByReason {
		datapath.NameAfter(spec.Maps[name], reasons)
	}
	NameDirectory(spec)
	return spec, reasons, nil
}

// openKernel loads the program and opens the tables that an earlier process left
// pinned, or makes them. What is in the tables stays as it is, and nothing is attached
// yet. A build or limits that do not fit the tables are refused.
func openKernel(cfg *config.Balancer, clock *flowClock, log *slog.Logger) (*kernel, error) {
	spec, _, err := loadSpec()
	if err != nil {
		return nil, err
	}
	_, err = os.Stat(datapath.Dir(cfg.Node.Instance))
	fresh := errors.Is(err, os.ErrNotExist)
	dir, err := datapath.MakeDir(cfg.Node.Instance, datapath.RoleBalancer)
	if err != nil {
		return nil, err
	}
	spec.Maps[balancerMapFlows].MaxEntries = flowBuckets(cfg.Node.Limits.Flows)
	spec.Maps[balancerMapHalfOpen].MaxEntries = flowBuckets(cfg.Node.Limits.Flows / flowsPerHalfOpen)
	for _, bySlot := range []string{
		balancerMapServerCounters, balancerMapServerSignals, balancerMapAnsweredOffers,
		balancerMapProbes, balancerMapProbeTurns,
	} {
		spec.Maps[bySlot].MaxEntries = serverSlots(cfg.Node.Limits.Servers)
	}

	k := &kernel{
		instance: cfg.Node.Instance, dir: dir, fresh: fresh, clock: clock, inner: spec.Maps[balancerMapTables].InnerMap,
		attachTCX: link.AttachTCX,
	}
	if err := k.load(spec, &cfg.Node, log); err != nil {
		_ = k.closeObjects()
		return nil, errors.Join(k.explain(err), k.undo())
	}
	return k, nil
}

// serverSlots is how many slots that many servers need: as many again, so that
// all can be replaced at once, while the flows of those before are swept. A slot
// has 16 bits.
func serverSlots(servers uint32) uint32 {
	return min(2*servers, mostSlots)
}

// load pins nothing before the kernel has taken the program.
func (k *kernel) load(spec *ebpf.CollectionSpec, node *config.BalancerNode, log *slog.Logger) error {
	kept, err := openKept(spec, k.dir)
	defer closeAll(kept)
	if err != nil {
		return err
	}
	if k.recount = countsOthers(spec, kept); k.recount {
		log.Warn("another build counted other reasons: all counters start at zero")
		for _, name := range countersByReason {
			_ = kept[name].Close()
			delete(kept, name)
		}
	}
	identity, err := identityOf(kept[balancerMapIdentity], node.Seed)
	if err != nil {
		return err
	}
	k.identity = identity
	k.constants = map[string]any{
		balancerVarFlowTickShift:       k.clock.shift,
		balancerVarFlowBucketKeys:      identity.FlowBucketKeys,
		balancerVarFlowSignatureKeys:   identity.FlowSignatureKeys,
		balancerVarFlowBucketShift:     bucketShift(spec.Maps[balancerMapFlows].MaxEntries),
		balancerVarHalfOpenBucketShift: bucketShift(spec.Maps[balancerMapHalfOpen].MaxEntries),
		balancerVarServiceKeys:         identity.ServiceKeys,
		balancerVarBucketKeys:          identity.BucketKeys,
	}
	for name, value := range k.constants {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	if err := spec.Variables[balancerVarHostIsOutside].Set(!node.IsInternal()); err != nil {
		return fmt.Errorf("set where the interface leads: %w", err)
	}
	if err := spec.LoadAndAssign(&k.objects, &ebpf.CollectionOptions{MapReplacements: kept}); err != nil {
		return err
	}
	if err := k.loadSides(spec, node); err != nil {
		return err
	}
	k.clock.program = k.objects.ReadJiffies
	if k.flows, err = mapFlows(k.objects.Flows, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return err
	}
	if k.halfOpen, err = mapFlows(k.objects.HalfOpen, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return err
	}
	if k.mapped, err = mapDirectory(k.objects.Directory, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return err
	}
	k.servers, k.services = k.objects.serverTable(k.mapped), &serviceTable{directory: k.mapped, keys: &identity.ServiceKeys}
	k.ports = &ports{directory: k.mapped}
	if k.probes, err = k.mapProbes(k.sides[len(k.sides)-1]); err != nil { // the side towards the servers
		return err
	}
	if kept[balancerMapIdentity] == nil {
		if err := k.writeIdentity(); err != nil {
			return err
		}
	}
	return k.pinNew(kept)
}

// countsOthers tells whether counters by reason were kept, and are of other reasons.
func countsOthers(spec *ebpf.CollectionSpec, kept map[string]*ebpf.Map) bool {
	return slices.ContainsFunc(countersByReason, func(name string) bool {
		return kept[name] != nil && datapath.Compatible(spec.Maps[name], kept[name]) != nil
	})
}

// openKept opens the tables that an earlier process left. Those of another layout
// or other limits are an error, but for the counters by reason.
func openKept(spec *ebpf.CollectionSpec, dir string) (kept map[string]*ebpf.Map, err error) {
	kept = map[string]*ebpf.Map{}
	for name := range new(kernelMaps).pinned() {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return kept, fmt.Errorf("table %s: %w", name, err)
		}
		kept[name] = m
		if err := spec.Maps[name].Compatible(m); err != nil && !slices.Contains(countersByReason, name) {
			return kept, fmt.Errorf("table %s: %w", name, err)
		}
	}
	return kept, checkInner(kept, spec)
}

// checkInner compares the layout of one candidate table, for no pin names them. The kernel sees to it that
// all are the same.
func checkInner(kept map[string]*ebpf.Map, spec *ebpf.CollectionSpec) error {
	if kept[directoryMap] == nil || kept[balancerMapTables] == nil {
		return nil
	}
	mapped, err := mapDirectory(kept[directoryMap], unix.PROT_READ)
	if err != nil {
		return err
	}
	defer mapped.close()
	for _, entry := range (&serviceTable{directory: mapped}).all() {
		if !entry.isService() {
			continue
		}
		if err := checkElement(kept[balancerMapTables], entry.table(), spec.Maps[balancerMapTables].InnerMap); err != nil {
			return fmt.Errorf("candidate table %d: %w", entry.table(), err)
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
func (k *kernel) pinNew(kept map[string]*ebpf.Map) error {
	pin := func(name string, table *ebpf.Map) error {
		if kept[name] != nil || k.recount && slices.Contains(countersByReason, name) {
			return nil
		}
		k.made = append(k.made, name)
		return datapath.Pin(table, k.pin(name))
	}
	if err := pin(balancerMapIdentity, k.objects.Identity); err != nil {
		return err
	}
	for name, table := range k.objects.kernelMaps.pinned() {
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
func (k *kernel) explain(err error) error {
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
func (k *kernel) pinCounting(t *datapath.Takeover) error {
	if k.recount {
		tables := k.objects.kernelMaps.pinned()
		for _, name := range countersByReason {
			if err := t.Pin(*tables[name], k.pin(name)); err != nil {
				return err
			}
		}
	}
	return t.Pin(k.objects.XdpLb, k.pin(datapath.BalancerProgram))
}

// setSignalKeys replaces the keys that tell servers' signals from others'.
func (k *kernel) setSignalKeys(keys config.SignalKeys) error {
	return datapath.SetSignalKeys(k.objects.SignalKeys, keys)
}

// undo takes away the pins of a start that came to nothing.
func (k *kernel) undo() error {
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

// close lets go of the data path; what is pinned works on.
func (k *kernel) close() error {
	return errors.Join(k.probes.close(), k.flows.close(), k.halfOpen.close(), k.mapped.close(), k.closeObjects())
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
