// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// After the renaming, a program can read all bytes of the data section, also those that the object
// did not have.
func TestNameSection(t *testing.T) {
	needRoot(t)
	load := asm.LoadMapValue(asm.R1, 0, 40).WithReference(".data.section")
	spec := &ebpf.CollectionSpec{
		Maps: map[string]*ebpf.MapSpec{".data.section": {
			Name: ".data.section", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1,
			Contents: []ebpf.MapKV{{Key: uint32(0), Value: make([]byte, 8)}},
		}},
		Programs: map[string]*ebpf.ProgramSpec{"read": {
			Type: ebpf.XDP, License: "GPL",
			Instructions: asm.Instructions{load, asm.LoadMem(asm.R0, asm.R1, 0, asm.Word), asm.Return()},
		}},
	}
	NameSection(spec, ".data.section", "section", 48)
	if m := spec.Maps["section"]; m.Flags&unix.BPF_F_MMAPABLE == 0 || spec.Maps[".data.section"] != nil {
		t.Errorf("the maps are %v", spec.Maps)
	}
	collection, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	defer collection.Close()
	value := make([]byte, 48)
	value[40] = 7
	must(t, collection.Maps["section"].Put(uint32(0), value))
	got, err := collection.Programs["read"].Run(&ebpf.RunOptions{Data: make([]byte, 14)})
	if err != nil || got != 7 {
		t.Errorf("the program reads %d, %v", got, err)
	}
}
