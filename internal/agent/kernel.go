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

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
)

// kernel is the data path: the programs and the tables that they read. Each process makes new tables
// for its programs, so that a restart swaps programs and tables in one step; only the counters, what
// the programs themselves remember of connections, and the assigned VIPs are handed on.
type kernel struct {
	log      *slog.Logger
	instance string
	dir      string
	first    bool     // no earlier process's data path is attached
	begun    []string // kept maps that this process starts anew
	objects  agentObjects
	assigned assignedVIPs
	labels   labels
	tc       tc
}

// labels are the names of what the data path counts, by their numbers.
type labels struct {
	reasons, synAcks, offers, signals []string
}

// openKernel loads the programs. Nothing is attached yet.
func openKernel(node *config.AgentNode, log *slog.Logger) (*kernel, error) {
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

// loadSpec describes the data path of this build, and names what it counts.
func loadSpec() (spec *ebpf.CollectionSpec, l labels, err error) {
	if spec, err = loadAgent(); err != nil {
		return nil, l, err
	}
	for _, c := range []struct {
		enum, prefix, table string
		labels              *[]string
	}{
		{"agent_reason", "AGENT_", agentMapReasons, &l.reasons},
		{"syn_ack", "SYN_ACK_", agentMapSynAcks, &l.synAcks},
		{"offer", "OFFER_", agentMapOffers, &l.offers},
		{"sent_signal", "SENT_", agentMapSignals, &l.signals},
	} {
		if *c.labels, err = datapath.EnumLabels(spec.Types, c.enum, c.prefix); err != nil {
			return nil, l, err
		}
		datapath.NameAfter(spec.Maps[c.table], *c.labels)
	}
	return spec, l, nil
}

// mayRead finds out whether programs may read the kernel's memory.
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

// refuseReads has programs read nothing of the kernel's memory, as on kernels that are locked down
// (kernel_lockdown(7)), which else refuse the whole program.
func refuseReads(spec *ebpf.CollectionSpec) {
	for _, p := range spec.Programs {
		for i, ins := range p.Instructions {
			if ins.IsBuiltinCall() && ins.Constant == int64(asm.FnProbeReadKernel) {
				p.Instructions[i] = asm.Mov.Imm(asm.R0, -int32(unix.EPERM)).WithMetadata(ins.Metadata)
			}
		}
	}
}

func (k *kernel) load(node *config.AgentNode) error {
	spec, labels, err := loadSpec()
	if err != nil {
		return err
	}
	k.labels = labels
	allowed, err := mayRead()
	if err != nil {
		return err
	}
	if !allowed {
		refuseReads(spec)
	}
	kept, err := k.openKept(spec)
	if err != nil {
		return err
	}
	defer closeAll(kept)
	if err := spec.Variables[agentVarHostIsOutside].Set(!node.IsInternal()); err != nil {
		return fmt.Errorf("set where the interface leads: %w", err)
	}
	err = spec.LoadAndAssign(&k.objects, &ebpf.CollectionOptions{MapReplacements: kept})
	var verifier *ebpf.VerifierError
	if errors.As(err, &verifier) {
		return fmt.Errorf("the kernel refuses a program: %+v", verifier)
	}
	if err != nil {
		return fmt.Errorf("load the data path: %w", err)
	}
	k.assigned = assignedVIPs{k.objects.Belongings}
	k.tc = tc{instance: k.instance, dir: k.dir, attachTCX: link.AttachTCX}
	return nil
}

// keptMaps are the maps that outlive a process. The assigned VIPs come first: they tell the role
// of an instance.
func keptMaps(maps *agentMaps) []keptMap {
	return []keptMap{
		{agentMapBelongings, &maps.Belongings},
		{agentMapReasons, &maps.Reasons},
		{agentMapSynAcks, &maps.SynAcks},
		{agentMapSignals, &maps.Signals},
		{agentMapOffers, &maps.Offers},
		{agentMapAgentFlows, &maps.AgentFlows},
		{agentMapConnections, &maps.Connections},
		{agentMapAcceptances, &maps.Acceptances},
	}
}

type keptMap struct {
	name string
	m    **ebpf.Map
}

// openKept opens the kept maps that an earlier process has left. A map of a build that kept
// something else starts anew.
func (k *kernel) openKept(spec *ebpf.CollectionSpec) (map[string]*ebpf.Map, error) {
	opened := map[string]*ebpf.Map{}
	for _, kept := range keptMaps(&agentMaps{}) {
		m, err := openMap(k.pinOf(kept.name), spec.Maps[kept.name])
		switch {
		case err == nil:
			opened[kept.name] = m
			continue
		case errors.Is(err, os.ErrNotExist):
		case errors.Is(err, ebpf.ErrMapIncompatible) && kept.name != agentMapBelongings:
			k.log.Warn("another build made this map: it starts empty", "map", kept.name)
		default:
			return nil, errors.Join(fmt.Errorf("open map %s: %w", kept.name, err), closeAll(opened))
		}
		k.begun = append(k.begun, kept.name)
	}
	return opened, nil
}

func openMap(pin string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(pin, nil)
	if err != nil {
		return nil, err
	}
	if err := datapath.Compatible(spec, m); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// pinKept pins the kept maps that start anew.
func (k *kernel) pinKept(t *datapath.Takeover) error {
	for _, kept := range keptMaps(&k.objects.agentMaps) {
		if slices.Contains(k.begun, kept.name) {
			if err := t.Pin(*kept.m, k.pinOf(kept.name)); err != nil {
				return err
			}
		}
	}
	return nil
}

func closeAll(maps map[string]*ebpf.Map) error {
	var errs []error
	for _, m := range maps {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// attach puts the programs on an interface, each in the place of an earlier process's, and pins them
// with their tables for other tools to find. What an earlier process has on another interface works
// until all of them are attached.
func (k *kernel) attach(t *datapath.Takeover, ifindex int) (datapath.Attached, error) {
	// XDP comes last, for it hands packets to the others.
	if err := k.tc.attach(t, k.objects.TcAgent, ifindex, egress); err != nil {
		return datapath.Attached{}, err
	}
	if err := k.tc.attach(t, k.objects.TcForward, ifindex, ingress); err != nil {
		return datapath.Attached{}, err
	}
	attached, err := t.AttachXDP(k.objects.XdpAgent, ifindex, k.linkPin())
	if err != nil {
		return datapath.Attached{}, err
	}
	// A start on another interface leaves none behind on the one before.
	t.OnCommit(func() error { return datapath.RemoveFilters(k.instance, ifindex) })
	return attached, k.pin(t)
}

// checkNamespace returns an error if the instance works in another network namespace.
func (k *kernel) checkNamespace() error {
	for _, name := range []string{datapath.LinkPin, ingress.pin, egress.pin} {
		if _, err := datapath.AttachedTo(k.pinOf(name)); err != nil {
			return err
		}
	}
	return nil
}

func (k *kernel) pinOf(name string) string { return filepath.Join(k.dir, name) }

// linkPin is where the XDP link is pinned.
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
	for name, m := range map[string]*ebpf.Map{
		agentMapVips:            k.objects.Vips,
		agentMapTunnelAddresses: k.objects.TunnelAddresses,
		agentMapSegmentSizes:    k.objects.SegmentSizes,
		agentMapLoads:           k.objects.Loads,
		agentMapServiceNames:    k.objects.ServiceNames,
	} {
		if err := t.Pin(m, k.pinOf(name)); err != nil {
			return err
		}
	}
	return nil
}

// undo takes away what a first start that failed did, and returns its error. The data path of an
// earlier process stays.
func (k *kernel) undo(err error) error {
	if !k.first {
		return err
	}
	return errors.Join(err, Detach(k.instance))
}

// close lets go of the data path; what is pinned works on.
func (k *kernel) close() error {
	return k.objects.Close()
}

// setHostMAC tells the program which frames are for this host.
func (k *kernel) setHostMAC(mac [6]byte) error {
	var word [8]byte
	copy(word[:], mac[:])
	if err := k.objects.HostMac.Set(binary.NativeEndian.Uint64(word[:])); err != nil {
		return fmt.Errorf("set the interface's address: %w", err)
	}
	return nil
}

// Detach takes an agent's data path out of the kernel, with everything that it put on the host and
// all counters. It works on the network namespace of the calling thread, which must be the agent's.
// An instance that does not exist is no error.
func Detach(instance string) error {
	dir := datapath.Dir(instance)
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, agentMapBelongings), nil)
	if errors.Is(err, os.ErrNotExist) {
		return datapath.RemoveDir(instance) // of a start that failed early
	}
	if err != nil {
		return fmt.Errorf("open map %s: %w", agentMapBelongings, err)
	}
	defer m.Close()
	all := assignedVIPs{m}
	// The programs go first, so that no packet is delivered to an address that is gone.
	if _, err := datapath.AttachedTo(filepath.Join(dir, datapath.LinkPin)); err != nil {
		return err
	}
	for _, name := range []string{datapath.LinkPin, ingress.pin, egress.pin, connectionCountPin} {
		if err := datapath.DetachLink(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	if err := datapath.RemoveFilters(instance); err != nil {
		return err
	}
	if err := all.release(nil); err != nil {
		return err
	}
	return datapath.RemoveDir(instance)
}
