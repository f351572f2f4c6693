// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
)

const (
	directorySection = ".data.directory" // in bpf/balancer/directory.h
	directoryMap     = "directory"
	directorySize    = uint32(unsafe.Sizeof(balancerDirectory{}))
)

// NameDirectory gives the map of bpf/balancer/directory.h its name and size, in an object that uses it.
func NameDirectory(spec *ebpf.CollectionSpec) {
	datapath.NameSection(spec, directorySection, directoryMap, directorySize)
}

// kernelMaps are the data path's tables.
type kernelMaps struct {
	balancerMaps
	Directory *ebpf.Map `ebpf:"directory"`
}

// Close closes the tables, but not what is mapped of them.
func (t *kernelMaps) Close() error { return errors.Join(t.balancerMaps.Close(), t.Directory.Close()) }

// objects are the data path's, as they are loaded.
type objects struct {
	balancerPrograms
	kernelMaps
	balancerVariables
}

func (o *objects) Close() error { return errors.Join(o.balancerPrograms.Close(), o.kernelMaps.Close()) }

// directory is the kernel's, mapped into this process, so that single words are replaced without a packet
// seeing half of one.
type directory struct {
	memory []byte
	*balancerDirectory
}

func mapDirectory(m *ebpf.Map, protection int) (*directory, error) {
	memory, err := unix.Mmap(m.FD(), 0, int(directorySize), protection, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the directory: %w", err)
	}
	return &directory{memory, (*balancerDirectory)(unsafe.Pointer(unsafe.SliceData(memory)))}, nil
}

func (d *directory) close() error { return unix.Munmap(d.memory) }
