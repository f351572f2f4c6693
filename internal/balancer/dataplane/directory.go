// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
)

const (
	directorySection = ".data.directory" // in bpf/balancer/directory.h
	DirectoryMap     = "directory"
	directorySize    = uint32(unsafe.Sizeof(DirectoryLayout{}))
)

// NameDirectory gives the map of bpf/balancer/directory.h its name and size in the
// specification of an object that uses the map. Each object needs it before it is loaded.
func NameDirectory(spec *ebpf.CollectionSpec) {
	datapath.NameSection(spec, directorySection, DirectoryMap, directorySize)
}

// Directory is the map of bpf/balancer/directory.h in the memory of this process. A store of an
// aligned word replaces the word as a whole for packets.
type Directory struct {
	memory []byte
	*balancerDirectory
}

// MapDirectory maps a directory into memory. The protection is PROT_READ, with PROT_WRITE to
// change it.
func MapDirectory(m *ebpf.Map, protection int) (*Directory, error) {
	memory, err := unix.Mmap(m.FD(), 0, int(directorySize), protection, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the directory: %w", err)
	}
	return &Directory{memory, (*DirectoryLayout)(unsafe.Pointer(unsafe.SliceData(memory)))}, nil
}

// Close unmaps the directory.
func (d *Directory) Close() error { return unix.Munmap(d.memory) }
