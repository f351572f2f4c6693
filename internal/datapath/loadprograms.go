// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
)

// Loader brings the data path of an instance into the kernel. The exported fields above Dir declare
// the data path. A process calls the methods in this order:
//
//   - Load opens the maps that an earlier process has left, and loads the programs.
//   - Pin pins the maps that are new. Like Load, it changes nothing that packets use.
//   - Publish and Attach, within a TakeOver, replace what the earlier process has pinned and
//     attached. If a step fails, TakeOver undoes all of them.
//   - Undo removes the pins of Pin, if the process ends before it has attached the programs.
//   - Close detaches the programs that must end with the process.
type Loader struct {
	Instance string
	Role     Role
	Maps     Declarations
	Programs []string        // those that are pinned for readers
	Hooks    []Hook          // all hooks with pins, in the order in which programs are attached
	XDPMode  desired.XDPMode // of XDP programs; empty stands for auto

	Dir string // the directory of the pins
	// Replaced are the expendable maps that Load has found with the layout of another build.
	// Publish replaces them.
	Replaced []string
	// AttachTCX is link.AttachTCX. Tests replace it to simulate kernels before 6.6.
	AttachTCX func(link.TCXOptions) (link.Link, error)

	objects     any      // the struct of bpf2go with the maps and programs
	madeDir     bool     // Load has made the directory of the pins
	missing     []string // lasting maps that had no pins
	unpublished []string // the maps that Publish pins
	unpinned    map[Hook]link.Link
}

// Variant returns the values of the constants of programs. kept contains the maps that an earlier
// process has left, by name, as far as this build can use them.
type Variant func(kept map[string]*ebpf.Map) (map[string]any, error)

// Load loads programs and maps into a struct that bpf2go has generated. It uses the maps that an
// earlier process has left. Load returns an error if this build cannot use one of these maps, or if
// the kernel refuses a program.
func (l *Loader) Load(spec *ebpf.CollectionSpec, objects any, variant Variant) (err error) {
	_, statErr := os.Stat(Dir(l.Instance))
	if l.Dir, err = MakeDir(l.Instance, l.Role); err != nil {
		return err
	}
	l.madeDir = errors.Is(statErr, os.ErrNotExist)
	l.objects, l.AttachTCX, l.unpinned = objects, link.AttachTCX, map[Hook]link.Link{}
	kept, err := l.openMaps(spec)
	defer func() { _ = CloseMaps(kept) }()
	if err != nil {
		return err
	}
	l.unpublished = append(l.Maps.Names(Renewed), l.Replaced...)
	constants, err := variant(kept)
	if err != nil {
		return err
	}
	if err := SetVariables(spec, constants); err != nil {
		return err
	}
	return LoadObjects(spec, objects, kept)
}

// LoadObjects is LoadOn for the objects of a Loader. Tests replace it, to use objects again: the
// verifier's work is most of the time of a start.
var LoadObjects = LoadOn

// LoadOn loads programs and maps into a struct that bpf2go has generated. It uses the given maps,
// by name, instead of new ones. If the verifier refuses a program, the error has its log.
func LoadOn(spec *ebpf.CollectionSpec, objects any, maps map[string]*ebpf.Map) error {
	err := spec.LoadAndAssign(objects, &ebpf.CollectionOptions{MapReplacements: maps})
	if verifier := (*ebpf.VerifierError)(nil); errors.As(err, &verifier) && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("the kernel refuses a program: %v\n%+v", err, verifier)
	}
	return err
}

// openMaps opens the lasting maps that an earlier process has left. It returns those that this
// build can use. It adds the names of maps without a pin to l.missing, and those of expendable maps
// with another layout to l.Replaced. It returns an error for a Kept map with another layout. The
// caller closes the returned maps, also after an error.
func (l *Loader) openMaps(spec *ebpf.CollectionSpec) (map[string]*ebpf.Map, error) {
	kept := map[string]*ebpf.Map{}
	for _, declared := range l.Maps {
		name := declared.Name
		if declared.Life != Kept && declared.Life != Expendable {
			continue
		}
		m, err := ebpf.LoadPinnedMap(l.PathOf(name), nil)
		if errors.Is(err, os.ErrNotExist) {
			l.missing = append(l.missing, name)
			continue
		}
		if err != nil {
			return kept, fmt.Errorf("table %s: %w", name, err)
		}
		if declared.Life == Expendable { // the name is a part of the layout: see NameAfter
			err = Compatible(spec.Maps[name], m)
		} else {
			err = spec.Maps[name].Compatible(m)
		}
		if err == nil {
			kept[name] = m
			continue
		}
		err = errors.Join(fmt.Errorf("table %s: %w", name, err), m.Close())
		if declared.Life == Kept || !errors.Is(err, ebpf.ErrMapIncompatible) {
			return kept, err
		}
		l.Replaced = append(l.Replaced, name)
	}
	return kept, nil
}

// PathOf returns the path of a pin.
func (l *Loader) PathOf(pin string) string { return filepath.Join(l.Dir, pin) }

// Pin pins the lasting maps that had no pins.
func (l *Loader) Pin() error {
	maps := MapsIn(l.objects)
	for _, name := range l.missing {
		if err := Pin(*maps[name], l.PathOf(name)); err != nil {
			return err
		}
	}
	return nil
}

// Publish pins the programs and maps that readers need, in place of those of an earlier process.
func (l *Loader) Publish(t *Takeover) error {
	maps, programs := MapsIn(l.objects), fieldsOf[*ebpf.Program](l.objects)
	for _, name := range l.unpublished {
		if err := t.Pin(*maps[name], l.PathOf(name)); err != nil {
			return err
		}
	}
	for _, name := range l.Programs {
		if err := t.Pin(*programs[name], l.PathOf(name)); err != nil {
			return err
		}
	}
	t.OnCommit(func() error { // a later Publish replaces programs only
		l.unpublished = nil
		return nil
	})
	return nil
}
