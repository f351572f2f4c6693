// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
)

// DryRun is a copy of xdp_lb that decides what happens to a packet, and why, and changes no table:
// bpf/balancer/decision.h. Only one goroutine may use it at a time.
//
// When a real packet of a service that infers is placed, xdp_lb first corrects outdated ranks. The
// copy cannot do so. So Run first corrects all ranks by another program, rank_servers. This changes
// nothing but ranks, and packets and the balancer's process do the same all the time.
type DryRun struct {
	slots   uint32 // of servers
	objects struct {
		XdpLb       *ebpf.Program  `ebpf:"xdp_lb"`
		RankServers *ebpf.Program  `ebpf:"rank_servers"`
		Decision    *ebpf.Variable `ebpf:"decision"`
		WholeLength *ebpf.Variable `ebpf:"whole_length"`
		HostMac     *ebpf.Variable `ebpf:"host_mac"`
		HostHairpin *ebpf.Variable `ebpf:"host_hairpin"`
		NodeLocator *ebpf.Variable `ebpf:"node_locator"`
	}
}

// parsedDryRun returns the specification of the dry run. It parses the object only once.
var parsedDryRun = sync.OnceValues(loadDryrun)

// NewDryRun loads a dry run on the given tables. Tables that are not given are empty. The constants
// are those of Plane.Constants. The argument outside tells whether packets come from outside the
// segment routing domain. NewDryRun returns an error if the kernel refuses the program.
func NewDryRun(tables map[string]*ebpf.Map, constants map[string]any, outside bool) (*DryRun, error) {
	spec, err := parsedDryRun()
	if err != nil {
		return nil, err
	}
	spec = spec.Copy()
	NameDirectory(spec)
	for name, table := range tables {
		spec.Maps[name].MaxEntries = table.MaxEntries()
	}
	if err := errors.Join(datapath.SetVariables(spec, constants), setOutside(spec, outside)); err != nil {
		return nil, err
	}
	d := &DryRun{}
	if loads := tables[LoadsMap]; loads != nil {
		d.slots = loads.MaxEntries()
	}
	err = datapath.LoadOn(spec, &d.objects, tables)
	if errors.Is(err, unix.EPERM) {
		return nil, fmt.Errorf("load a dry run of the data path (needs CAP_BPF and CAP_NET_ADMIN): %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("load a dry run of the data path: %w", err)
	}
	return d, nil
}

// DryRun loads a dry run on the tables of the instance. Packets for it come from outside. DryRun
// returns an error if a table cannot be opened, or if the kernel refuses the program.
func (r *Reader) DryRun() (*DryRun, error) {
	tables := map[string]*ebpf.Map{}
	for name, table := range r.maps.Pinned() {
		tables[name] = *table
	}
	for _, name := range []string{balancerMapLocators, balancerMapQuicForms, balancerMapQuicServers} {
		table, err := openAttached(r.Instance, name)
		if err != nil {
			return nil, err
		}
		if table != nil {
			defer table.Close()
			tables[name] = table
		}
	}
	sizes := tableSizes{
		flows: r.maps.Flows.MaxEntries(), halfOpen: r.maps.HalfOpen.MaxEntries(),
		hints: r.maps.Hints.MaxEntries(), starts: r.maps.Starts.MaxEntries(),
		observed: r.maps.Observed.MaxEntries(),
	}
	constants := constantsOf(&r.Identity, r.Clock, sizes)
	if err := r.addUnderlay(constants); err != nil {
		return nil, err
	}
	return NewDryRun(tables, constants, true)
}

// constantsSection is the section of the constants of a program.
const constantsSection = ".rodata"

// addUnderlay adds the constants about the underlay, as the attached xdp_lb has them. There are none
// if another build has loaded it.
func (r *Reader) addUnderlay(constants map[string]any) error {
	spec, _, err := LoadSpec()
	if err != nil {
		return err
	}
	section, err := openAttached(r.Instance, constantsSection)
	if section == nil || err != nil {
		return err
	}
	defer section.Close()
	if section.ValueSize() != spec.Maps[constantsSection].ValueSize {
		return nil
	}
	values, err := section.LookupBytes(uint32(0))
	if err != nil {
		return fmt.Errorf("read the constants of the attached program: %w", err)
	}
	for _, name := range []string{datapath.UnderlayPort, datapath.UnderlaySources} {
		v := spec.Variables[name]
		constants[name] = values[v.Offset:][:v.Size()]
	}
	return nil
}

// openAttached opens a map of the attached xdp_lb that has no pin. It returns nil if no xdp_lb is
// attached.
func openAttached(instance, name string) (*ebpf.Map, error) {
	pin := filepath.Join(datapath.Dir(instance), datapath.BalancerProgram)
	program, err := ebpf.LoadPinnedProgram(pin, nil)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", pin, err)
	}
	defer program.Close()
	maps, err := datapath.MapsOf(program, map[string]*ebpf.MapSpec{name: {Name: name}})
	return maps[name], err
}

// SetHost describes the interface and the node: the interface's MAC address, its index if packets
// to servers leave by XDP_TX, else 0, and the locator of the balancer as SideObjects.NodeLocator
// has it. SetHost returns an error if a variable cannot be written.
func (d *DryRun) SetHost(mac [6]byte, hairpin uint32, locator uint64) error {
	return errors.Join(d.objects.HostMac.Set(macWord(mac)), d.objects.HostHairpin.Set(hairpin),
		d.objects.NodeLocator.Set(locator))
}

// Run decides about the frame of the options. If the frame holds only the beginning of its packet,
// length is the length of the packet in bytes of layer 3, else 0. Run returns the verdict, which is
// an action of XDP, and the decision. The output of the options is the frame that would be sent.
// Run returns an error if the kernel cannot run the program, for example because the frame does not
// fit a page.
func (d *DryRun) Run(
	options *ebpf.RunOptions, length uint16,
) (verdict uint32, decision *Decision, err error) {
	if err := d.objects.WholeLength.Set(length); err != nil {
		return 0, nil, fmt.Errorf("set the length of the packet: %w", err)
	}
	if d.slots > 0 {
		if err := rankSlots(d.objects.RankServers, 0, d.slots-1); err != nil {
			return 0, nil, err
		}
	}
	if verdict, err = d.objects.XdpLb.Run(options); err != nil {
		return 0, nil, fmt.Errorf("run the data path: %w", err)
	}
	decision = new(Decision)
	if err := d.objects.Decision.Get(decision); err != nil {
		return 0, nil, fmt.Errorf("read the decision: %w", err)
	}
	return verdict, decision, nil
}

// Close unloads the program.
func (d *DryRun) Close() error {
	return errors.Join(d.objects.XdpLb.Close(), d.objects.RankServers.Close())
}
