// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

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

// checkElement compares the layout of an element of a map of maps, if both exist. It ignores the
// size of a candidate table, which depends on the content.
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

// pinNew pins the tables that were not pinned. Counters that replace those of another build wait
// until the program that counts in them is attached (pinCounting).
func (p *Plane) pinNew(kept map[string]*ebpf.Map) error {
	tables := p.Objects.Maps.Pinned()
	for _, name := range pinned {
		if kept[name] != nil || p.recount && slices.Contains(CountersByReason, name) {
			continue
		}
		p.made = append(p.made, name)
		if err := datapath.Pin(*tables[name], p.pin(name)); err != nil {
			return err
		}
	}
	return nil
}

// explain adds to an error of Open what the user can do about it.
func (p *Plane) explain(err error, limits desired.Limits) error {
	var verifier *ebpf.VerifierError
	if errors.As(err, &verifier) {
		return fmt.Errorf("the kernel refuses the program: %+v", verifier)
	}
	if version := otherVersion(0); errors.As(err, &version) {
		return fmt.Errorf("%s: %w; `segue lb detach %s` drops them with their flows", p.dir, version, p.instance)
	}
	if errors.Is(err, ebpf.ErrMapIncompatible) {
		return fmt.Errorf("the tables in %s were made with other limits, or by another build, and have flows: "+
			"`segue lb detach %s` drops them: %w", p.dir, p.instance, err)
	}
	if errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.E2BIG) {
		return fmt.Errorf("the kernel has no memory for the tables of node.limits (flows: %d, hints: %d, servers: %d): "+
			"lower a limit, or give the host or the control group of the process more memory: %w",
			limits.Flows, limits.Hints, limits.Servers, err)
	}
	return fmt.Errorf("load the data path: %w", err)
}

// pinCounting pins the program that processes packets, for tools. If this process has replaced the
// counters by reason, pinCounting pins them as well.
func (p *Plane) pinCounting(t *datapath.Takeover) error {
	if p.recount {
		if err := t.PinMaps(&p.Objects.Maps, p.dir, CountersByReason); err != nil {
			return err
		}
	}
	return t.Pin(p.Objects.XdpLb, p.pin(datapath.BalancerProgram))
}

// Undo removes the pins that this process has made. It is for a start that failed.
func (p *Plane) Undo() error {
	if p.fresh {
		return datapath.RemoveDir(p.instance)
	}
	var errs []error
	for _, name := range p.made {
		if err := os.Remove(p.pin(name)); !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
