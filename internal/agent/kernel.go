// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// kernel is the data path: the programs and their tables. Each process makes new tables for its
// programs, so that a restart replaces programs and tables in one step. Only the counters, the
// programs' own state of connections and the assigned VIPs are handed on from process to process.
type kernel struct {
	log      *slog.Logger
	instance string
	dir      string
	first    bool     // no data path of an earlier process is attached
	begun    []string // kept maps that this process creates anew
	objects  agentObjects
	assigned assignedVIPs
	labels   labels
	flowKeys agentAgentFlowKeys
	tc       datapath.TC
}

// The hooks of the programs of tc.
var (
	ingress = datapath.Hook{At: ebpf.AttachTCXIngress, Priority: 0x5e6e, Pin: "link_ingress"}
	egress  = datapath.Hook{At: ebpf.AttachTCXEgress, Priority: 0x5e6e, Pin: "link_egress"}
)

// labels are the names of the data path's counters, indexed by their numbers.
type labels struct {
	reasons, synAcks, offers, signals, quicIDs []string
}

// openKernel loads the programs. It attaches nothing.
func openKernel(node *desired.AgentNode, log *slog.Logger) (*kernel, error) {
	instance := node.Instance
	dir, err := datapath.MakeDir(instance, datapath.RoleAgent)
	if err != nil {
		return nil, err
	}
	k := &kernel{log: log, instance: instance, dir: dir}
	if _, err := os.Stat(k.linkPin()); errors.Is(err, os.ErrNotExist) {
		k.first = true
	}
	if err := k.load(node); err != nil {
		return nil, errors.Join(k.undo(err), k.close())
	}
	return k, nil
}

// parsed is the specification of this build's data path. Tests load many data paths.
var parsed = sync.OnceValues(loadAgent)

// loadSpec returns the specification of this build's data path, and the names of its counters.
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

// refuseReads replaces the programs' reads of the kernel's memory by the result EPERM. Kernels that
// are locked down (kernel_lockdown(7)) would refuse the whole program otherwise.
func refuseReads(spec *ebpf.CollectionSpec) {
	for _, p := range spec.Programs {
		for i, ins := range p.Instructions {
			if ins.IsBuiltinCall() && ins.Constant == int64(asm.FnProbeReadKernel) {
				p.Instructions[i] = asm.Mov.Imm(asm.R0, -int32(unix.EPERM)).WithMetadata(ins.Metadata)
			}
		}
	}
}

// loadPermitted returns the same as loadSpec, with programs that this kernel permits.
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

// withLog adds the verifier's log to the error of a program that the kernel refused.
func withLog(err error) error {
	var verifier *ebpf.VerifierError
	if errors.As(err, &verifier) {
		return fmt.Errorf("the kernel refuses a program: %+v", verifier)
	}
	return err
}

func (k *kernel) load(node *desired.AgentNode) error {
	spec, labels, err := loadPermitted()
	if err != nil {
		return err
	}
	k.labels = labels
	kept, others, err := declared.Open(spec, k.dir)
	defer func() { _ = datapath.CloseMaps(kept) }()
	if err != nil {
		return err
	}
	for _, name := range others {
		k.log.Warn("another build made this map: it starts empty", "map", name)
	}
	k.begun = slices.DeleteFunc(slices.Clone(keptMaps), func(name string) bool { return kept[name] != nil })
	if k.flowKeys, err = flowKeysOf(kept[agentMapAgentFlowKeys]); err != nil {
		return err
	}
	variables := constants(&k.flowKeys)
	variables[agentVarHostIsOutside] = !node.IsInternal()
	if err := datapath.SetVariables(spec, variables); err != nil {
		return err
	}
	if err = loadObjects(spec, &k.objects, kept); err != nil {
		return fmt.Errorf("load the data path: %w", withLog(err))
	}
	if err := k.objects.AgentFlowKeys.Put(uint32(0), k.flowKeys); err != nil {
		return fmt.Errorf("write %s: %w", k.objects.AgentFlowKeys, err)
	}
	k.assigned = assignedVIPs{k.objects.Belongings}
	k.tc = datapath.TC{Instance: k.instance, AttachTCX: link.AttachTCX}
	return nil
}

// loadObjects loads the programs, and the maps that an earlier process has not kept. Tests replace it
// to use loaded programs again.
var loadObjects = func(spec *ebpf.CollectionSpec, objects *agentObjects, kept map[string]*ebpf.Map) error {
	return spec.LoadAndAssign(objects, &ebpf.CollectionOptions{MapReplacements: kept})
}

// declared declares the maps. That of the assigned VIPs comes first, because it shows the role of an
// instance.
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
	{Name: agentMapQuicOwnIds, Life: datapath.Renewed},
	{Name: agentMapServiceNames, Life: datapath.Renewed},

	{Name: agentMapBalancers},
	{Name: agentMapDeliveredFragments},
	{Name: agentMapResets},
	{Name: agentMapSignalKeys},
}

// keptMaps are the names of the maps that outlive a process.
var keptMaps = declared.Names(datapath.Kept, datapath.Expendable)

// pinKept pins the kept maps that this process has created anew.
func (k *kernel) pinKept(t *datapath.Takeover) error {
	return t.PinMaps(&k.objects.agentMaps, k.dir, k.begun)
}

// attach attaches the programs to an interface, and pins them and their tables for other tools.
// Each program replaces that of an earlier process. If the earlier process used another interface,
// its programs work there until all new programs are attached.
func (k *kernel) attach(t *datapath.Takeover, ifindex int) (datapath.Attached, error) {
	// XDP comes last, because its program hands packets to the others.
	if err := k.tc.Attach(t, k.objects.TcAgent, ifindex, egress); err != nil {
		return datapath.Attached{}, err
	}
	if err := k.tc.Attach(t, k.objects.TcForward, ifindex, ingress); err != nil {
		return datapath.Attached{}, err
	}
	attached, err := t.AttachXDP(k.objects.XdpAgent, ifindex, k.linkPin())
	if err != nil {
		return datapath.Attached{}, err
	}
	// If the instance has moved to another interface, remove its filters from the previous one.
	t.OnCommit(func() error { return datapath.RemoveFilters(k.instance, ifindex) })
	return attached, k.pin(t)
}

// checkNamespace returns an error if the instance works in another network namespace.
func (k *kernel) checkNamespace() error {
	return datapath.CheckNamespace(k.instance, datapath.LinkPin, ingress.Pin, egress.Pin)
}

func (k *kernel) pinOf(name string) string { return filepath.Join(k.dir, name) }

// linkPin returns the path of the XDP link's pin.
func (k *kernel) linkPin() string { return k.pinOf(datapath.LinkPin) }

func (k *kernel) pin(t *datapath.Takeover) error {
	for name, prog := range map[string]*ebpf.Program{
		agentProgXdpAgent:  k.objects.XdpAgent,
		agentProgTcAgent:   k.objects.TcAgent,
		agentProgTcForward: k.objects.TcForward,
	} {
		if err := t.Pin(prog, k.pinOf(name)); err != nil {
			return err
		}
	}
	return t.PinMaps(&k.objects.agentMaps, k.dir, declared.Names(datapath.Renewed))
}

// undo removes everything that a failed first start has created, and returns err. It leaves the
// data path of an earlier process in place.
func (k *kernel) undo(err error) error {
	if !k.first {
		return err
	}
	return errors.Join(err, Detach(k.instance))
}

// close closes this process's references to the data path. Pinned objects keep working.
func (k *kernel) close() error {
	return k.objects.Close()
}

// setHostMAC sets the MAC address by which the program recognises frames for this host.
func (k *kernel) setHostMAC(mac [6]byte) error {
	var word [8]byte
	copy(word[:], mac[:])
	if err := k.objects.HostMac.Set(binary.NativeEndian.Uint64(word[:])); err != nil {
		return fmt.Errorf("set the interface's address: %w", err)
	}
	return nil
}

// Detach removes an agent's data path from the kernel, with all its counters and everything that
// the agent has put on the host. It works on the network namespace of the calling thread, which
// must be the agent's. It returns nil if the instance does not exist.
func Detach(instance string) error {
	dir := datapath.Dir(instance)
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, agentMapBelongings), nil)
	if errors.Is(err, os.ErrNotExist) {
		return datapath.RemoveDir(instance) // an earlier start failed before it made the map
	}
	if err != nil {
		return fmt.Errorf("open map %s: %w", agentMapBelongings, err)
	}
	defer m.Close()
	all := assignedVIPs{m}
	// Remove the programs first, so that they do not deliver packets to a removed address.
	if err := datapath.CheckNamespace(instance, datapath.LinkPin); err != nil {
		return err
	}
	err = datapath.DetachLinks(instance, datapath.LinkPin, ingress.Pin, egress.Pin, connectionCountPin)
	if err != nil {
		return err
	}
	if err := datapath.RemoveFilters(instance); err != nil {
		return err
	}
	if err := all.release(nil); err != nil {
		return err
	}
	return datapath.RemoveDir(instance)
}
