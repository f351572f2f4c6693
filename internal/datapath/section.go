// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// NameSection gives the data section of an object a name that it can be pinned by. The section's
// own name has a dot, which a pin cannot have. Programs address the section directly. The map has
// size bytes, all of them zero, even if the object has fewer.
func NameSection(spec *ebpf.CollectionSpec, section, name string, size uint32) {
	spec.Maps[name] = &ebpf.MapSpec{
		Name: name, Type: ebpf.Array, KeySize: 4, ValueSize: size, MaxEntries: 1, Flags: unix.BPF_F_MMAPABLE,
	}
	delete(spec.Maps, section)
	for _, program := range spec.Programs {
		for i, instruction := range program.Instructions {
			if instruction.IsLoadFromMap() && instruction.Reference() == section {
				program.Instructions[i] = instruction.WithReference(name)
			}
		}
	}
}
