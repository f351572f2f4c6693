// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"

	"github.com/cilium/ebpf"
)

// Life tells how long a map lives.
type Life uint8

// The lives of a map. A map with a pin has the pin's name.
const (
	Private    Life = iota // as long as its programs, without a pin
	Renewed                // as long as its programs, with a pin for readers
	Kept                   // longer than a process; a start refuses another layout
	Expendable             // longer than a process; if the layout is another, the map starts empty
)

// Declaration tells what a start does with a map.
type Declaration struct {
	Name string
	Life Life
	Size uint32 // the number of elements; 0: as the object says
}

// Declarations are those of all maps of a data path. The first map with a pin tells the role of an
// instance.
type Declarations []Declaration

// Names returns the names of the maps with one of the lives, in the order of the declarations.
func (d Declarations) Names(lives ...Life) (names []string) {
	for _, m := range d {
		if slices.Contains(lives, m.Life) {
			names = append(names, m.Name)
		}
	}
	return names
}

// Resize gives the maps of a specification their sizes.
func (d Declarations) Resize(spec *ebpf.CollectionSpec) {
	for _, m := range d {
		if m.Size != 0 {
			spec.Maps[m.Name].MaxEntries = m.Size
		}
	}
}

// Open opens the maps that an earlier process of an instance has left in a directory. It returns
// those that this build can use, by name, and the names of the expendable maps that it cannot use.
// The caller closes the maps, also after an error.
func (d Declarations) Open(spec *ebpf.CollectionSpec, dir string) (
	maps map[string]*ebpf.Map, other []string, err error,
) {
	maps = map[string]*ebpf.Map{}
	for _, declared := range d {
		name := declared.Name
		if declared.Life != Kept && declared.Life != Expendable {
			continue
		}
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return maps, nil, fmt.Errorf("table %s: %w", name, err)
		}
		err = declared.check(spec.Maps[name], m)
		if err == nil {
			maps[name] = m
			continue
		}
		err = errors.Join(fmt.Errorf("table %s: %w", name, err), m.Close())
		if declared.Life == Kept || !errors.Is(err, ebpf.ErrMapIncompatible) {
			return maps, nil, err
		}
		other = append(other, name)
	}
	return maps, other, nil
}

// check returns ebpf.ErrMapIncompatible if a map has another layout than the specification. The name
// of an expendable map is a part of the layout: see NameAfter.
func (d Declaration) check(spec *ebpf.MapSpec, m *ebpf.Map) error {
	if d.Life == Expendable {
		return Compatible(spec, m)
	}
	return spec.Compatible(m)
}

// MapsIn returns the fields for maps of a struct that bpf2go has generated, by the names of the maps.
// If names are given, it returns only these fields.
func MapsIn(objects any, names ...string) map[string]**ebpf.Map {
	all := map[string]**ebpf.Map{}
	addMaps(all, reflect.ValueOf(objects).Elem(), names)
	return all
}

func addMaps(all map[string]**ebpf.Map, objects reflect.Value, names []string) {
	for i := range objects.NumField() {
		field, name := objects.Field(i), objects.Type().Field(i).Tag.Get("ebpf")
		if field.Kind() == reflect.Struct {
			addMaps(all, field, names)
		} else if m, is := field.Addr().Interface().(**ebpf.Map); is {
			if len(names) == 0 || slices.Contains(names, name) {
				all[name] = m
			}
		}
	}
}

// PinMaps pins maps of a struct that bpf2go has generated, in this order. The directory is that of
// the instance.
func (t *Takeover) PinMaps(objects any, dir string, names []string) error {
	maps := MapsIn(objects)
	for _, name := range names {
		if err := t.Pin(*maps[name], filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// CloseMaps closes all maps.
func CloseMaps(maps map[string]*ebpf.Map) error {
	var errs []error
	for _, m := range maps {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// SetVariables sets variables of programs before they are loaded.
func SetVariables(spec *ebpf.CollectionSpec, values map[string]any) error {
	for name, value := range values {
		if err := spec.Variables[name].Set(value); err != nil {
			return fmt.Errorf("set %s: %w", name, err)
		}
	}
	return nil
}
