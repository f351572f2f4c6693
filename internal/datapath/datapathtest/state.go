// SPDX-License-Identifier: Apache-2.0

package datapathtest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/pin"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// State describes all pinned objects of an instance, by the names of the pins. For a map it has the
// ID, and the elements by key. For a program it has the ID. For a link it has the ID, the program
// and the interface.
type State map[string]map[string][]byte

// ReadState reads the pinned objects in a directory.
func ReadState(t testing.TB, dir string) State {
	t.Helper()
	pins, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	s := State{}
	for _, entry := range pins {
		if entry.IsDir() {
			for name, object := range ReadState(t, filepath.Join(dir, entry.Name())) {
				s[filepath.Join(entry.Name(), name)] = object
			}
			continue
		}
		object, err := pin.Load(filepath.Join(dir, entry.Name()), nil)
		if err != nil {
			t.Fatal(err)
		}
		s[entry.Name()], err = describe(object)
		if err := errors.Join(err, object.Close()); err != nil {
			t.Fatalf("%s: %v", entry.Name(), err)
		}
	}
	return s
}

// ReadMaps reads maps, by their names.
func ReadMaps(t testing.TB, all map[string]*ebpf.Map) State {
	t.Helper()
	s := State{}
	for name, m := range all {
		var err error
		if s[name], err = describe(m); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	return s
}

// describe returns the part of a State for a map, a program or a link. It returns an error for any
// other object.
func describe(object pin.Pinner) (map[string][]byte, error) {
	switch object := object.(type) {
	case *ebpf.Map:
		info, err := object.Info()
		if err != nil {
			return nil, err
		}
		id, _ := info.ID()
		elements, err := readMap(object)
		if err == nil {
			elements["map"] = []byte(fmt.Sprint(id))
		}
		return elements, err
	case *ebpf.Program:
		info, err := object.Info()
		if err != nil {
			return nil, err
		}
		id, _ := info.ID()
		return map[string][]byte{"program": []byte(fmt.Sprint(id))}, nil
	case link.Link:
		info, err := object.Info()
		if err != nil {
			return nil, err
		}
		text := fmt.Sprintf("%d of program %d", info.ID, info.Program)
		if xdp := info.XDP(); xdp != nil {
			text += fmt.Sprintf(" on interface %d", xdp.Ifindex)
		}
		if tcx := info.TCX(); tcx != nil {
			text += fmt.Sprintf(" on interface %d", tcx.Ifindex)
		}
		return map[string][]byte{"link": []byte(text)}, nil
	}
	return nil, fmt.Errorf("neither a map, a program nor a link: %T", object)
}

// readMap reads the elements of a map. The element of a map of maps is the content of the inner
// map.
func readMap(m *ebpf.Map) (map[string][]byte, error) {
	if m.Type() == ebpf.Array && m.Flags()&unix.BPF_F_MMAPABLE != 0 && m.MaxEntries() > 1 {
		return readMemory(m)
	}
	elements := map[string][]byte{}
	switch m.Type() {
	case ebpf.SkStorage: // its elements are those of sockets: nobody can list them
		return elements, nil
	case ebpf.RingBuf:
		r, err := ringbuf.NewReader(m)
		if err != nil {
			return nil, err
		}
		elements["unread bytes"] = []byte(fmt.Sprint(r.AvailableBytes()))
		return elements, r.Close()
	}
	key, err := m.NextKeyBytes(nil)
	for ; err == nil && key != nil; key, err = m.NextKeyBytes(key) {
		value, err := readElement(m, key)
		if errors.Is(err, ebpf.ErrKeyNotExist) { // an array of maps has all keys
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("element %x: %w", key, err)
		}
		elements[fmt.Sprintf("%x", key)] = value
	}
	return elements, err
}

// readMemory reads the elements of an array that are not zero. Tables of flows have too many
// elements for a system call each.
func readMemory(m *ebpf.Map) (map[string][]byte, error) {
	size := (int(m.ValueSize()) + 7) &^ 7 // as the kernel pads elements
	memory, err := unix.Mmap(m.FD(), 0, int(m.MaxEntries())*size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s into memory: %w", m, err)
	}
	elements, zero := map[string][]byte{}, make([]byte, size)
	for i := range int(m.MaxEntries()) {
		if element := memory[i*size:][:size]; !bytes.Equal(element, zero) {
			elements[fmt.Sprint(i)] = bytes.Clone(element)
		}
	}
	return elements, unix.Munmap(memory)
}

// readInner reads the ID and the elements of an inner map. Tables of columns have too many words
// for a system call each, and for a Go map.
func readInner(m *ebpf.Map) ([]byte, error) {
	info, err := m.Info()
	if err != nil {
		return nil, err
	}
	id, _ := info.ID()
	all := fmt.Append(nil, id)
	if m.Type() == ebpf.Array && m.ValueSize() == 8 {
		keys, words := make([]uint32, m.MaxEntries()), make([]uint64, m.MaxEntries())
		// The error says that there are no more words.
		if n, err := m.BatchLookup(new(ebpf.MapBatchCursor), keys, words, nil); n < len(keys) {
			return nil, fmt.Errorf("map %s: %d of %d words: %w", m, n, len(keys), err)
		}
		return binary.Append(all, binary.NativeEndian, words)
	}
	elements, err := readMap(m)
	for _, key := range slices.Sorted(maps.Keys(elements)) {
		all = append(append(all, key...), elements[key]...)
	}
	return all, err
}

// readElement reads the value of an element. For a map by CPU it joins the values of all CPUs. For
// a map of maps it returns the content of the inner map. If there is no such element, the error is
// ebpf.ErrKeyNotExist.
func readElement(m *ebpf.Map, key []byte) ([]byte, error) {
	switch m.Type() {
	case ebpf.PerCPUArray, ebpf.PerCPUHash, ebpf.LRUCPUHash:
		var cpus [][]byte
		err := m.Lookup(key, &cpus)
		return bytes.Join(cpus, nil), err
	case ebpf.ArrayOfMaps, ebpf.HashOfMaps:
		var inner *ebpf.Map
		if err := m.Lookup(key, &inner); err != nil {
			return nil, err
		}
		defer inner.Close()
		return readInner(inner)
	}
	value, err := m.LookupBytes(key)
	if err == nil && value == nil {
		err = ebpf.ErrKeyNotExist
	}
	return value, err
}

// RequireSame fails the test if a later state differs. It reports the differences.
func (s State) RequireSame(t testing.TB, when string, later State) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(s)) {
		if later[name] == nil {
			t.Errorf("%s: the pin %s is gone", when, name)
			continue
		}
		requireSameElements(t, when+": "+name, s[name], later[name])
	}
	for name := range later {
		if s[name] == nil {
			t.Errorf("%s: there is a new pin %s", when, name)
		}
	}
}

// requireSameElements reports each element that is gone, new or different.
func requireSameElements(t testing.TB, where string, before, after map[string][]byte) {
	t.Helper()
	for _, key := range slices.Sorted(maps.Keys(before)) {
		value, ok := after[key]
		switch {
		case !ok:
			t.Errorf("%s: element %s is gone", where, key)
		case !bytes.Equal(before[key], value):
			at := firstDifference(before[key], value)
			t.Errorf("%s: element %s differs from byte %d on: %x, not %x", where, key, at,
				excerpt(value, at), excerpt(before[key], at))
		}
	}
	for key := range after {
		if _, ok := before[key]; !ok {
			t.Errorf("%s: there is a new element %s", where, key)
		}
	}
}

func firstDifference(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

func excerpt(b []byte, from int) []byte { return b[from:min(len(b), from+32)] }
