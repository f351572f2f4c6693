// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// Open loads the programs. It opens the tables that an earlier process has left pinned, or makes
// and pins them. It attaches no program and changes no entry of a table. Open returns an error, and
// leaves the pins as they are, if the tables have another layout or other limits.
func Open(cfg *desired.Balancer, clock *FlowClock, log *slog.Logger) (*Plane, error) {
	spec, err := specFor(&cfg.Node)
	if err != nil {
		return nil, err
	}
	p := &Plane{
		Loader: datapath.Loader{
			Instance: cfg.Node.Instance, Role: datapath.RoleBalancer, Maps: declare(cfg.Node.Limits),
			Programs: []string{datapath.BalancerProgram}, Hooks: hooks, XDPMode: cfg.Node.XDPMode,
		},
		node: &cfg.Node, Clock: clock, inner: spec.Maps[TablesMap].InnerMap,
		columns: spec.Maps[balancerMapColumns].InnerMap,
	}
	if err := p.load(spec, cfg, log); err != nil {
		_ = p.closeObjects()
		return nil, errors.Join(p.explain(err, cfg.Node.Limits), p.Loader.Undo())
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

// load loads the objects, maps the tables into memory, and writes the identity if there is none. It
// then pins the new tables, as the last step, so that it leaves no pin if a step fails.
func (p *Plane) load(spec *ebpf.CollectionSpec, cfg *desired.Balancer, log *slog.Logger) error {
	var hasIdentity bool
	err := p.Loader.Load(spec, &p.Objects, func(kept map[string]*ebpf.Map) (map[string]any, error) {
		hasIdentity = kept[balancerMapIdentity] != nil
		return p.variant(spec, cfg, kept, log)
	})
	if err != nil {
		return err
	}
	if err := p.loadSides(spec); err != nil {
		return err
	}
	if err := p.mapTables(); err != nil {
		return err
	}
	if !hasIdentity {
		if err := p.WriteIdentity(); err != nil {
			return err
		}
	}
	return p.Loader.Pin()
}

// variant returns the values of the variables with which the programs of the outside are loaded.
// The argument kept has the tables that an earlier process has left. variant also stores the
// identity, the constants and the features in p.
func (p *Plane) variant(
	spec *ebpf.CollectionSpec, cfg *desired.Balancer, kept map[string]*ebpf.Map, log *slog.Logger,
) (map[string]any, error) {
	if err := checkInner(p.Loader.Dir, kept, spec); err != nil {
		return nil, err
	}
	if len(p.Loader.Replaced) > 0 {
		log.Warn("another build counted other reasons: all counters start at zero")
	}
	identity, err := identityOf(kept[balancerMapIdentity], p.node.Seed)
	if err != nil {
		return nil, err
	}
	p.identity = identity
	p.Constants = constantsOf(identity, p.Clock, tableSizes{
		flows: spec.Maps[FlowsMap].MaxEntries, halfOpen: spec.Maps[balancerMapHalfOpen].MaxEntries,
		hints: spec.Maps[HintsMap].MaxEntries, starts: spec.Maps[balancerMapStarts].MaxEntries,
		observed: spec.Maps[balancerMapObserved].MaxEntries,
	})
	maps.Copy(p.Constants, datapath.UnderlayConstants(p.node.Underlay))
	former, err := featuresInForce(kept[DirectoryMap])
	if err != nil {
		return nil, err
	}
	p.features = FeaturesOf(cfg) | former
	return p.outsideVariables(spec), nil
}

// outsideVariables returns the values of the variables with which the programs of the outside are
// loaded. In the programs of the inside, only host_is_outside has another value.
func (p *Plane) outsideVariables(spec *ebpf.CollectionSpec) map[string]any {
	all := maps.Clone(p.Constants)
	all[balancerVarFeatures] = p.features.mask(spec.Maps[HintsMap].MaxEntries)
	all[balancerVarHostIsOutside] = !p.node.IsInternal()
	all[balancerVarServerSlots] = serverSlots(p.node.Limits.Servers)
	return all
}

func (p *Plane) mapTables() (err error) {
	p.Clock.program = p.Objects.ReadJiffies
	for table, m := range map[**FlowTable]*ebpf.Map{
		&p.Flows: p.Objects.Flows, &p.HalfOpen: p.Objects.HalfOpen, &p.Observed: p.Objects.Observed,
	} {
		if *table, err = mapFlows(m); err != nil {
			return err
		}
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
	p.Services = &ServiceTable{directory: p.Directory, keys: &p.identity.ServiceKeys}
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
	return nil
}

// tableSizes are the numbers of buckets of the flow tables, and of sets of the hint table.
type tableSizes struct{ flows, halfOpen, hints, starts, observed uint32 }

// constantsOf returns the values of variables, by name, for a program that has all features and
// uses tables with this identity and these sizes.
func constantsOf(identity *Identity, clock *FlowClock, sizes tableSizes) map[string]any {
	return map[string]any{
		balancerVarFlowTickShift:       clock.Shift,
		balancerVarReportHalfLifeShift: halfLifeShift(clock.Jiffy),
		balancerVarFlowKeys:            identity.FlowKeys,
		balancerVarFeatures:            FeaturesAll.mask(sizes.hints),
		balancerVarFlowBucketShift:     bucketShift(sizes.flows),
		balancerVarHalfOpenBucketShift: bucketShift(sizes.halfOpen),
		balancerVarHintSetShift:        hintSetShift(sizes.hints),
		balancerVarStartMask:           sizes.starts - 1,
		balancerVarObservedBucketShift: bucketShift(sizes.observed),
		balancerVarServiceKeys:         identity.ServiceKeys,
		balancerVarBucketKeys:          identity.BucketKeys,
		balancerVarCrcTables:           crcTables(),
	}
}

// loadSides makes the outside from the loaded objects. If node.inside is configured, it loads
// further programs for the inside.
func (p *Plane) loadSides(spec *ebpf.CollectionSpec) error {
	own := &p.Objects
	p.Sides = []*Side{{sideKind: sideKinds[0], Objects: SideObjects{
		own.XdpLb, own.TcReturn, own.XdpProbe, own.HostMac, own.HostHairpin,
		own.HostClientInterface, own.NodeLocator, own.ProbeTurn, own.Variables,
	}}}
	if p.node.Inside == "" {
		return nil
	}
	if err := setOutside(spec, false); err != nil {
		return err
	}
	inside := &Side{sideKind: sideKinds[1]}
	if err := datapath.LoadOn(spec, &inside.Objects, own.Shared()); err != nil {
		return err
	}
	p.Sides = append(p.Sides, inside)
	return nil
}

// setOutside tells programs whether packets come to them from outside the segment routing domain.
func setOutside(spec *ebpf.CollectionSpec, outside bool) error {
	return datapath.SetVariables(spec, map[string]any{balancerVarHostIsOutside: outside})
}

// parsed parses this build's data path only once, because tests load many data paths.
var parsed = sync.OnceValues(loadBalancer)

// LoadSpec returns the specification of this build's data path, and the names of its reasons by
// number. LoadSpec returns an error if the embedded object is invalid.
func LoadSpec() (spec *ebpf.CollectionSpec, reasons []string, err error) {
	if spec, err = parsed(); err != nil {
		return nil, nil, err
	}
	spec = spec.Copy()
	if reasons, err = datapath.EnumLabels(spec.Types, "lb_reason", "LB_"); err != nil {
		return nil, nil, err
	}
	for _, name := range CountersByReason {
		datapath.NameAfter(spec.Maps[name], reasons)
	}
	NameDirectory(spec)
	return spec, reasons, nil
}

// checkInner compares the layout of candidate tables and column tables with that of this build.
// They have no pins, so checkInner finds them through the services.
func checkInner(dir string, kept map[string]*ebpf.Map, spec *ebpf.CollectionSpec) error {
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
		for kind, name := range map[string]string{"candidate": TablesMap, "column": balancerMapColumns} {
			if err := checkElement(dir, kept[name], entry.Table(), spec.Maps[name].InnerMap); err != nil {
				return fmt.Errorf("%s table %d: %w", kind, entry.Table(), err)
			}
		}
	}
	return nil
}

// checkElement compares the layout of an element of a map of maps, if there is one, with spec. It
// ignores the size of a candidate table, which depends on the content.
func checkElement(dir string, outer *ebpf.Map, number uint32, spec *ebpf.MapSpec) error {
	if outer == nil {
		return nil
	}
	inner, err := openInner(dir, outer, number)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer inner.Close()
	expected := spec.Copy()
	if spec.Flags&unix.BPF_F_INNER_MAP != 0 {
		expected.MaxEntries = inner.MaxEntries()
	}
	return expected.Compatible(inner)
}

// explain adds to an error of Open what the user can do about it.
func (p *Plane) explain(err error, limits desired.Limits) error {
	if version := otherVersion(0); errors.As(err, &version) {
		return fmt.Errorf("%s: %w; `segue lb detach %s` drops them with their flows", p.Loader.Dir, version, p.Loader.Instance)
	}
	if errors.Is(err, ebpf.ErrMapIncompatible) {
		return fmt.Errorf("the tables in %s were made with other limits, or by another build, and have flows: "+
			"`segue lb detach %s` drops them: %w", p.Loader.Dir, p.Loader.Instance, err)
	}
	if errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.E2BIG) {
		return fmt.Errorf("the kernel has no memory for the tables of node.limits (flows: %d, hints: %d, servers: %d): "+
			"lower a limit, or give the host or the control group of the process more memory: %w",
			limits.Flows, limits.Hints, limits.Servers, err)
	}
	return fmt.Errorf("load the data path: %w", err)
}

func (p *Plane) closeObjects() error {
	err := p.Objects.Close()
	for _, side := range p.Sides[min(1, len(p.Sides)):] { // the first has those of p.Objects
		err = errors.Join(err, side.Objects.XdpLb.Close(), side.Objects.TcReturn.Close(),
			side.Objects.XdpProbe.Close(), side.Objects.Variables.Close())
	}
	return err
}
