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
	directorySection = ".data.directory" // in bpf/balancer/tables/directory.h
	DirectoryMap     = "directory"
	directorySize    = uint32(unsafe.Sizeof(DirectoryLayout{}))
)

// NameDirectory gives the map of bpf/balancer/tables/directory.h its name and its size in the
// specification of an object that uses the map. Call it for each such object before loading the
// object.
func NameDirectory(spec *ebpf.CollectionSpec) {
	datapath.NameSection(spec, directorySection, DirectoryMap, directorySize)
}

// Directory is the map of bpf/balancer/tables/directory.h, mapped into the memory of this process.
// Packets see a store of an aligned word completely or not at all.
type Directory struct {
	memory []byte
	*balancerDirectory
}

// MapDirectory maps a directory into memory. The protection is PROT_READ, or PROT_READ|PROT_WRITE
// to change the directory. MapDirectory returns an error if the kernel refuses the mapping.
func MapDirectory(m *ebpf.Map, protection int) (*Directory, error) {
	memory, err := unix.Mmap(m.FD(), 0, int(directorySize), protection, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the directory: %w", err)
	}
	return &Directory{memory, (*DirectoryLayout)(unsafe.Pointer(unsafe.SliceData(memory)))}, nil
}

// Close unmaps the directory.
func (d *Directory) Close() error { return unix.Munmap(d.memory) }
