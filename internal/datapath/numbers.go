// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// A link and a map of maps tell the kernel's numbers of their programs and inner maps. Opening an
// object by its number needs CAP_SYS_ADMIN, but opening a pin does not. So objects that the next
// process of an instance must open have pins that are named after their numbers, in this folder of
// the instance. A process that is killed leaves pins of objects that nothing uses; the next process
// removes them.
const numbersDir = "by_number"

// The kinds of objects with pins by number.
const (
	programKind = "program_"
	mapKind     = "map_"
)

// numberPin returns the path of an object's pin by number.
func numberPin(dir, kind string, number uint32) string {
	return filepath.Join(dir, numbersDir, kind+strconv.FormatUint(uint64(number), 10))
}

// KeepMap pins a map under its number, in the directory of an instance.
func KeepMap(dir string, m *ebpf.Map) error {
	info, err := m.Info()
	if err != nil {
		return err
	}
	id, _ := info.ID()
	clone, err := m.Clone() // m can then be pinned elsewhere
	if err != nil {
		return err
	}
	defer clone.Close()
	_, err = keep(clone, dir, mapKind, uint32(id))
	return err
}

// OpenMap opens a map by its number. A map without a pin, of an earlier build, can be opened only
// with CAP_SYS_ADMIN.
func OpenMap(dir string, id ebpf.MapID) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(numberPin(dir, mapKind, uint32(id)), nil)
	if err != nil {
		return ebpf.NewMapFromID(id)
	}
	return m, nil
}

// ReleaseMap removes the pin of a map. It returns nil if there is none.
func ReleaseMap(dir string, id ebpf.MapID) error {
	return release(numberPin(dir, mapKind, uint32(id)))
}

// ReleaseMapsExcept removes the pins by number of all maps that are not in used.
func ReleaseMapsExcept(dir string, used map[ebpf.MapID]bool) error {
	return releaseExcept(dir, mapKind, func(number uint32) bool { return used[ebpf.MapID(number)] })
}

// keepProgram is KeepMap for a program. It returns the number, and whether the pin is new.
func keepProgram(dir string, program *ebpf.Program) (id ebpf.ProgramID, isNew bool, err error) {
	info, err := program.Info()
	if err != nil {
		return 0, false, err
	}
	id, _ = info.ID()
	clone, err := program.Clone()
	if err != nil {
		return 0, false, err
	}
	defer clone.Close()
	isNew, err = keep(clone, dir, programKind, uint32(id))
	return id, isNew, err
}

// openProgram is OpenMap for a program.
func openProgram(dir string, id ebpf.ProgramID) (*ebpf.Program, error) {
	program, err := ebpf.LoadPinnedProgram(numberPin(dir, programKind, uint32(id)), nil)
	if err != nil {
		return ebpf.NewProgramFromID(id)
	}
	return program, nil
}

// releasePrograms removes the pins of all programs that are not in kept, and that no pinned link of
// the instance runs.
func releasePrograms(dir string, kept map[ebpf.ProgramID]bool) error {
	used := map[ebpf.ProgramID]bool{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.IsDir() {
			continue
		}
		l, err := link.LoadPinnedLink(filepath.Join(dir, entry.Name()), nil)
		if err != nil {
			continue // the pin is that of a program or a map
		}
		if info, err := l.Info(); err == nil {
			used[info.Program] = true
		}
		_ = l.Close()
	}
	return releaseExcept(dir, programKind, func(number uint32) bool {
		return kept[ebpf.ProgramID(number)] || used[ebpf.ProgramID(number)]
	})
}

// keep pins an object, and tells whether the pin is new. It does nothing if the instance has been
// detached: then there is no next process.
func keep(object pinnable, dir, kind string, number uint32) (isNew bool, err error) {
	path := numberPin(dir, kind, number)
	err = object.Pin(path)
	if errors.Is(err, os.ErrNotExist) { // there is no folder yet
		err = os.Mkdir(filepath.Dir(path), 0o700)
		if errors.Is(err, os.ErrNotExist) {
			return false, nil
		}
		if err == nil || errors.Is(err, os.ErrExist) {
			err = object.Pin(path)
		}
	}
	if err != nil && !errors.Is(err, os.ErrExist) {
		return false, fmt.Errorf("pin %s: %w", path, err)
	}
	return err == nil, nil
}

// release removes a pin, if it exists.
func release(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// releaseExcept removes the pins by number of all objects of a kind that are not used.
func releaseExcept(dir, kind string, used func(number uint32) bool) error {
	entries, err := os.ReadDir(filepath.Join(dir, numbersDir))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, entry := range entries {
		text, ok := strings.CutPrefix(entry.Name(), kind)
		number, err := strconv.ParseUint(text, 10, 32)
		if ok && err == nil && !used(uint32(number)) {
			errs = append(errs, release(numberPin(dir, kind, uint32(number))))
		}
	}
	return errors.Join(errs...)
}
