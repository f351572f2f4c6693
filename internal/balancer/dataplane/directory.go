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

// NameDirectory gives the map of bpf/balancer/directory.h its name and size, in an object that uses it.
func NameDirectory(spec *ebpf.CollectionSpec) {
	datapath.NameSection(spec, directorySection, DirectoryMap, directorySize)
}

// Directory is the kernel's, mapped into this process, so that single words are replaced without a packet
// seeing half of one.
type Directory struct {
	memory []byte
	*balancerDirectory
}

func MapDirectory(m *ebpf.Map, protection int) (*Directory, error) {
	memory, err := unix.Mmap(m.FD(), 0, int(directorySize), protection, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the directory: %w", err)
	}
	return &Directory{memory, (*DirectoryLayout)(unsafe.Pointer(unsafe.SliceData(memory)))}, nil
}

func (d *Directory) Close() error { return unix.Munmap(d.memory) }
