// SPDX-License-Identifier: Apache-2.0

package datapathtest

import (
	"bytes"
	"errors"
	"path/filepath"
	"reflect"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// CopyObjects makes a struct of maps, programs and variables, as bpf2go generates it, refer to the
// same objects of the kernel as another one of its type. Both are pointers.
func CopyObjects(to, from any) error {
	return eachObject(reflect.ValueOf(to).Elem(), reflect.ValueOf(from).Elem(), func(to, from reflect.Value) (err error) {
		var clone any
		switch object := from.Interface().(type) {
		case *ebpf.Map:
			clone, err = object.Clone()
		case *ebpf.Program:
			clone, err = object.Clone()
		case *ebpf.Variable:
			clone = object
		}
		to.Set(reflect.ValueOf(clone))
		return err
	})
}

// begun contains loaded objects of instances whose first process has not started yet, by the
// kernel's number of a map.
var begun sync.Map

// Begin pins maps in the directory of an instance, by name, as an earlier process of the instance
// would have left them. The map named mark identifies the instance: the next load (see Reusing)
// that gets this map uses these objects again.
func Begin(dir string, maps map[string]**ebpf.Map, mark string, objects any) error {
	for name, m := range maps {
		clone, err := (*m).Clone()
		if err != nil {
			return err
		}
		if err := errors.Join(clone.Pin(filepath.Join(dir, name)), clone.Close()); err != nil {
			return err
		}
	}
	id, err := mapNumber(*maps[mark])
	begun.Store(id, objects)
	return err
}

// Reusing returns a replacement of datapath.LoadObjects. If Begin has stored objects under the map
// named mark, it uses these objects, but only once. Otherwise it calls load.
func Reusing(
	load func(*ebpf.CollectionSpec, any, map[string]*ebpf.Map) error, mark string,
) func(*ebpf.CollectionSpec, any, map[string]*ebpf.Map) error {
	return func(spec *ebpf.CollectionSpec, objects any, maps map[string]*ebpf.Map) error {
		if maps[mark] != nil {
			id, err := mapNumber(maps[mark])
			if err != nil {
				return err
			}
			if loaded, ok := begun.LoadAndDelete(id); ok {
				return CopyObjects(objects, loaded)
			}
		}
		return load(spec, objects, maps)
	}
}

func mapNumber(m *ebpf.Map) (ebpf.MapID, error) {
	info, err := m.Info()
	if err != nil {
		return 0, err
	}
	id, _ := info.ID()
	return id, nil
}

// ProgramNumber returns the kernel's number of a program.
func ProgramNumber(t testing.TB, program *ebpf.Program) ebpf.ProgramID {
	t.Helper()
	info, err := program.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	return id
}

// eachObject calls f for each map, program and variable of two structs of the same type.
func eachObject(a, b reflect.Value, f func(a, b reflect.Value) error) error {
	var errs []error
	for i := range a.NumField() {
		if a.Field(i).Kind() == reflect.Struct {
			errs = append(errs, eachObject(a.Field(i), b.Field(i), f))
		} else {
			errs = append(errs, f(a.Field(i), b.Field(i)))
		}
	}
	return errors.Join(errs...)
}

// Empty makes all maps and variables as they are after a load. Storages of sockets end with their
// sockets, and are left alone.
func Empty[T any](objects *T) error {
	v := reflect.ValueOf(objects).Elem()
	return eachObject(v, v, func(_, field reflect.Value) error {
		switch object := field.Interface().(type) {
		case *ebpf.Map:
			return emptyMap(object)
		case *ebpf.Variable:
			if !object.ReadOnly() {
				return object.Set(make([]byte, object.Size()))
			}
		}
		return nil
	})
}

// emptyMap writes zeros to the elements of an array, and removes the elements of all other maps. It
// leaves storages of sockets alone.
func emptyMap(m *ebpf.Map) error {
	switch m.Type() {
	case ebpf.Array, ebpf.PerCPUArray:
		if m.Flags()&unix.BPF_F_MMAPABLE != 0 {
			return zeroMemory(m)
		}
		return Zero(m)
	case ebpf.ArrayOfMaps:
		return deleteInner(m)
	case ebpf.RingBuf:
		return readAll(m)
	case ebpf.SkStorage:
		return nil
	}
	for {
		key, err := m.NextKeyBytes(nil)
		if err != nil || key == nil {
			return err
		}
		if err := m.Delete(key); err != nil {
			return err
		}
	}
}

// readAll reads all records in a ring buffer.
func readAll(m *ebpf.Map) error {
	r, err := ringbuf.NewReader(m)
	if err != nil {
		return err
	}
	defer r.Close()
	var record ringbuf.Record
	for r.AvailableBytes() > 0 {
		if err := r.ReadInto(&record); err != nil {
			return err
		}
	}
	return nil
}

// Zero writes zeros to all elements of an array.
func Zero(m *ebpf.Map) error {
	keys := make([]uint32, m.MaxEntries())
	for i := range keys {
		keys[i] = uint32(i)
	}
	n := len(keys)
	if m.Type() == ebpf.PerCPUArray {
		cpus, err := ebpf.PossibleCPU()
		if err != nil {
			return err
		}
		n *= cpus
	}
	element := reflect.ArrayOf(int(m.ValueSize()), reflect.TypeFor[byte]())
	_, err := m.BatchUpdate(keys, reflect.MakeSlice(reflect.SliceOf(element), n, n).Interface(), nil)
	return err
}

// zeroMemory is Zero for an array that can be mapped into memory, which is much faster.
func zeroMemory(m *ebpf.Map) error {
	size := int(m.MaxEntries()) * ((int(m.ValueSize()) + 7) &^ 7) // of an element: array_map_alloc of Linux
	memory, err := unix.Mmap(m.FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	clear(memory)
	return unix.Munmap(memory)
}

// deleteInner removes the maps from a map of maps.
func deleteInner(m *ebpf.Map) error {
	keys, ids := make([]uint32, m.MaxEntries()), make([]uint32, m.MaxEntries())
	n, err := m.BatchLookup(new(ebpf.MapBatchCursor), keys, ids, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	for _, key := range keys[:n] {
		if err := m.Delete(key); err != nil {
			return err
		}
	}
	return nil
}

// UsedMaps returns the maps and variables that have content, except for one map.
func UsedMaps[T any](t testing.TB, objects *T, except *ebpf.Map) (used []string) {
	t.Helper()
	v := reflect.ValueOf(objects).Elem()
	err := eachObject(v, v, func(_, field reflect.Value) error {
		switch object := field.Interface().(type) {
		case *ebpf.Map:
			has, err := hasContent(object)
			if has && object != except {
				used = append(used, object.String())
			}
			return err
		case *ebpf.Variable:
			content := make([]byte, object.Size())
			if err := object.Get(content); err != nil {
				return err
			}
			if !object.ReadOnly() && !isZero(content) {
				used = append(used, object.String())
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return used
}

// hasContent tells whether a map has content. In an array, that is an element other than zeros. In
// a ring buffer, it is unread bytes. In any other map, it is an element. For storages of sockets,
// hasContent returns false.
func hasContent(m *ebpf.Map) (bool, error) {
	switch m.Type() {
	case ebpf.SkStorage:
		return false, nil
	case ebpf.RingBuf:
		r, err := ringbuf.NewReader(m)
		if err != nil {
			return false, err
		}
		defer r.Close()
		return r.AvailableBytes() > 0, nil
	}
	isArray := m.Type() == ebpf.Array || m.Type() == ebpf.PerCPUArray
	var key, value []byte
	var perCPU [][]byte
	elements := m.Iterate()
	if m.Type() == ebpf.PerCPUArray {
		for elements.Next(&key, &perCPU) {
			if !isZero(bytes.Join(perCPU, nil)) {
				return true, nil
			}
		}
		return false, elements.Err()
	}
	for elements.Next(&key, &value) {
		if !isArray || !isZero(value) {
			return true, nil
		}
	}
	return false, elements.Err()
}

func isZero(content []byte) bool { return len(bytes.Trim(content, "\x00")) == 0 }
