// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// kernel is the data path: the programs and their tables. Each process makes new tables for its
// programs, so that a restart replaces programs and tables in one step. Other tables pass from
// process to process: the counters, the state of connections, the accept policies and the assigned
// VIPs (see declared).
type kernel struct {
	log      *slog.Logger
	loader   datapath.Loader
	objects  agentObjects
	assigned assignedVIPs
	labels   labels
	flowKeys agentAgentFlowKeys
	isFirst  bool // no earlier process has attached programs
}

// labels are the names of the data path's counters, indexed by their numbers.
type labels struct {
	reasons, synAcks, offers, signals, quicIDs []string
}

// openKernel loads the programs. It attaches nothing.
func openKernel(node *desired.AgentNode, log *slog.Logger) (*kernel, error) {
	k := &kernel{log: log, loader: datapath.Loader{
		Instance: node.Instance, Role: datapath.RoleAgent, Maps: declared,
		Programs: []string{agentProgXdpAgent, agentProgTcAgent, agentProgTcForward}, Hooks: hooks,
		XDPMode: node.XDPMode,
	}}
	if err := k.load(node); err != nil {
		err = k.undo(fmt.Errorf("load the data path: %w", err))
		return nil, errors.Join(err, k.close(), k.loader.Undo()) // Undo removes the pins of this start
	}
	return k, nil
}

// load loads the programs with their tables, and pins them.
func (k *kernel) load(node *desired.AgentNode) error {
	spec, labels, err := loadPermitted()
	if err != nil {
		return err
	}
	k.labels = labels
	err = k.loader.Load(spec, &k.objects, func(kept map[string]*ebpf.Map) (map[string]any, error) {
		return k.variant(node, kept)
	})
	if err != nil {
		return err
	}
	if err := k.objects.AgentFlowKeys.Put(uint32(0), k.flowKeys); err != nil {
		return fmt.Errorf("write %s: %w", k.objects.AgentFlowKeys, err)
	}
	k.assigned = assignedVIPs{k.objects.Belongings}
	return k.loader.Pin()
}

// variant returns the constants of the programs. kept are the tables that an earlier process has
// left. variant also finds out whether an earlier process has attached programs, warns about tables
// that start empty, and sets the keys of the flow table.
func (k *kernel) variant(node *desired.AgentNode, kept map[string]*ebpf.Map) (_ map[string]any, err error) {
	_, err = os.Stat(k.loader.PathOf(datapath.LinkPin))
	k.isFirst = errors.Is(err, os.ErrNotExist)
	for _, name := range k.loader.Replaced {
		k.log.Warn("another build made this map: it starts empty", "map", name)
	}
	if k.flowKeys, err = flowKeysOf(kept[agentMapAgentFlowKeys]); err != nil {
		return nil, err
	}
	variables := constants(&k.flowKeys)
	variables[agentVarHostIsOutside] = !node.IsInternal()
	maps.Copy(variables, datapath.UnderlayConstants(node.Underlay))
	return variables, nil
}

// parsed returns the specification of this build's data path. It is parsed once, because tests load
// many data paths.
var parsed = sync.OnceValues(loadAgent)

// loadSpec returns the specification of this build's data path, and the names of its counters. The
// names are those of enums in the programs.
func loadSpec() (spec *ebpf.CollectionSpec, l labels, err error) {
	if spec, err = parsed(); err != nil {
		return nil, l, err
	}
	spec = spec.Copy()
	for _, c := range []struct {
		enum, prefix, table string
		labels              *[]string
	}{
		{"agent_reason", "AGENT_", agentMapReasons, &l.reasons},
		{"syn_ack", "SYN_ACK_", agentMapSynAcks, &l.synAcks},
		{"offer", "OFFER_", agentMapOffers, &l.offers},
		{"sent_signal", "SENT_", agentMapSignals, &l.signals},
		{"quic_id_result", "QUIC_ID_", agentMapQuicIdCounts, &l.quicIDs},
	} {
		if *c.labels, err = datapath.EnumLabels(spec.Types, c.enum, c.prefix); err != nil {
			return nil, l, err
		}
		datapath.NameAfter(spec.Maps[c.table], *c.labels)
	}
	return spec, l, nil
}

// mayRead tells whether programs may read the kernel's memory.
func mayRead() (bool, error) {
	err := features.HaveProgramHelper(ebpf.XDP, asm.FnProbeReadKernel)
	if errors.Is(err, ebpf.ErrNotSupported) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("find out whether programs may read the kernel's memory: %w", err)
	}
	return true, nil
}

// refuseReads makes the programs' reads of the kernel's memory fail with EPERM. A kernel that is
// locked down (kernel_lockdown(7)) would refuse a program that could make such reads.
func refuseReads(spec *ebpf.CollectionSpec) {
	for _, p := range spec.Programs {
		for i, ins := range p.Instructions {
			if ins.IsBuiltinCall() && ins.Constant == int64(asm.FnProbeReadKernel) {
				p.Instructions[i] = asm.Mov.Imm(asm.R0, -int32(unix.EPERM)).WithMetadata(ins.Metadata)
			}
		}
	}
}

// loadPermitted returns the same as loadSpec, but with programs that this kernel permits.
func loadPermitted() (*ebpf.CollectionSpec, labels, error) {
	spec, l, err := loadSpec()
	if err != nil {
		return nil, l, err
	}
	allowed, err := mayRead()
	if err != nil {
		return nil, l, err
	}
	if !allowed {
		refuseReads(spec)
	}
	return spec, l, nil
}

// declared declares the maps. The map of the assigned VIPs comes first, because its pin marks an
// instance as an agent.
var declared = datapath.Declarations{
	{Name: agentMapBelongings, Life: datapath.Kept},
	{Name: agentMapReasons, Life: datapath.Expendable},
	{Name: agentMapSynAcks, Life: datapath.Expendable},
	{Name: agentMapSignals, Life: datapath.Expendable},
	{Name: agentMapOffers, Life: datapath.Expendable},
	{Name: agentMapQuicIdCounts, Life: datapath.Expendable},
	{Name: agentMapAgentFlows, Life: datapath.Expendable},
	{Name: agentMapAgentBalancers, Life: datapath.Expendable},
	{Name: agentMapAgentFlowKeys, Life: datapath.Expendable},
	{Name: agentMapInitials, Life: datapath.Expendable},
	{Name: agentMapConnections, Life: datapath.Expendable},
	{Name: agentMapCountedSockets, Life: datapath.Expendable},
	{Name: agentMapSocketCookies, Life: datapath.Expendable},
	{Name: agentMapCookiesUsed, Life: datapath.Expendable},
	{Name: agentMapAcceptances, Life: datapath.Expendable},
	{Name: agentMapListeners, Life: datapath.Expendable},

	{Name: agentMapVips, Life: datapath.Renewed},
	{Name: agentMapTunnelAddresses, Life: datapath.Renewed},
	{Name: agentMapSegmentSizes, Life: datapath.Renewed},
	{Name: agentMapLoads, Life: datapath.Renewed},
	{Name: agentMapLoadMaps, Life: datapath.Renewed},
	{Name: agentMapQuicOwnIds, Life: datapath.Renewed},
	{Name: agentMapServiceNames, Life: datapath.Renewed},
	{Name: agentMapFirstKeys, Life: datapath.Renewed},

	{Name: agentMapBalancers, Life: datapath.Private},
	{Name: agentMapDeliveredFragments, Life: datapath.Private},
	{Name: agentMapResets, Life: datapath.Private},
	{Name: agentMapSignalKeys, Life: datapath.Private},
}

// undo returns err, with which a start has failed. If no earlier process has attached programs,
// undo first removes everything that this start and killed earlier starts have left.
func (k *kernel) undo(err error) error {
	if !k.isFirst {
		return err
	}
	return errors.Join(err, Detach(k.loader.Instance))
}

// close closes this process's references to the data path. Pinned objects keep working.
func (k *kernel) close() error {
	return errors.Join(k.loader.Close(), k.objects.Close())
}
