// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"maps"
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

// Declarations are those of all maps of a data path, in the order in which maps are pinned. The
// first map with a pin must tell the role of an instance (marks).
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

// MapsIn returns the fields for maps of a struct that bpf2go has generated, by the names of the
// maps. If names are given, it returns only these fields.
func MapsIn(objects any, names ...string) map[string]**ebpf.Map {
	all := fieldsOf[*ebpf.Map](objects)
	if len(names) > 0 {
		maps.DeleteFunc(all, func(name string, _ **ebpf.Map) bool { return !slices.Contains(names, name) })
	}
	return all
}

// fieldsOf returns the fields of type T in a struct that bpf2go has generated, by the names of the
// objects.
func fieldsOf[T any](objects any) map[string]*T {
	all := map[string]*T{}
	addFields(all, reflect.ValueOf(objects).Elem())
	return all
}

// addFields adds the fields of type T in a struct, and in the structs that it contains.
func addFields[T any](all map[string]*T, objects reflect.Value) {
	for i := range objects.NumField() {
		field := objects.Field(i)
		if field.Kind() == reflect.Struct {
			addFields(all, field)
		} else if object, ok := field.Addr().Interface().(*T); ok {
			all[objects.Type().Field(i).Tag.Get("ebpf")] = object
		}
	}
}

// CloseMaps closes all maps.
func CloseMaps(all map[string]*ebpf.Map) error {
	var errs []error
	for _, m := range all {
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
