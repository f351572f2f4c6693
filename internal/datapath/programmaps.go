// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// kernelNameLength is the number of bytes that the kernel keeps of a map's name
// (BPF_OBJ_NAME_LEN - 1).
const kernelNameLength = 15

// MapsOf opens those maps of a program that have a specification, and returns them by the keys of
// specs. It finds them by their names, and does not check that their layouts are as specified. The
// caller closes the maps.
func MapsOf(program *ebpf.Program, specs map[string]*ebpf.MapSpec) (map[string]*ebpf.Map, error) {
	info, err := program.Info()
	if err != nil {
		return nil, fmt.Errorf("describe %v: %w", program, err)
	}
	keys := map[string]string{} // by the names of the maps in the kernel
	for key, spec := range specs {
		keys[spec.Name[:min(len(spec.Name), kernelNameLength)]] = key
	}
	maps := map[string]*ebpf.Map{}
	ids, _ := info.MapIDs()
	for _, id := range ids {
		if err := addMap(maps, keys, id); err != nil {
			return nil, errors.Join(fmt.Errorf("open map %d of %v: %w", id, program, err), CloseMaps(maps))
		}
	}
	return maps, nil
}

// addMap opens the map with the kernel's number id. If its name is in keys, addMap adds it to maps.
// Otherwise it closes the map.
func addMap(maps map[string]*ebpf.Map, keys map[string]string, id ebpf.MapID) error {
	m, err := ebpf.NewMapFromID(id)
	if err != nil {
		return err
	}
	info, err := m.Info()
	if err != nil {
		_ = m.Close()
		return err
	}
	key, ok := keys[info.Name]
	if !ok {
		return m.Close()
	}
	maps[key] = m
	return nil
}
