// SPDX-License-Identifier: Apache-2.0

package loadshm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapType is the kernel's type of an application's map: an array with one element, the page.
const mapType = unix.BPF_MAP_TYPE_ARRAY

// isPin tells whether a path is in a BPF file system. There, its name is that of a pinned map.
func isPin(path string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(filepath.Dir(path), &fs) == nil && fs.Type == unix.BPF_FS_MAGIC
}

// bpf makes the system call bpf(2). The argument is a union bpf_attr.
func bpf(command int, attr unsafe.Pointer, size uintptr) (int, error) {
	result, _, errno := unix.Syscall(unix.SYS_BPF, uintptr(command), uintptr(attr), size)
	if errno != 0 {
		return -1, errno
	}
	return int(result), nil
}

// pinAttr is the argument of BPF_OBJ_PIN and BPF_OBJ_GET.
type pinAttr struct {
	path  unsafe.Pointer
	fd    uint32
	flags uint32
}

// pinCommand pins a map, or opens a pinned one.
func pinCommand(command int, path string, fd int) (int, error) {
	name, err := unix.BytePtrFromString(path)
	if err != nil {
		return -1, err
	}
	attr := pinAttr{path: unsafe.Pointer(name), fd: uint32(fd)}
	return bpf(command, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
}

// openMap returns a descriptor of the map with this pin. It creates the map if there is none, which
// takes CAP_BPF. Another process may create it at the same time; the folder must exist.
func openMap(path string) (int, error) {
	fd, err := pinCommand(unix.BPF_OBJ_GET, path, 0)
	if errors.Is(err, unix.ENOENT) {
		if err = createMap(path); err == nil || errors.Is(err, unix.EEXIST) {
			fd, err = pinCommand(unix.BPF_OBJ_GET, path, 0)
		}
	}
	if err != nil {
		return -1, fmt.Errorf("open the map: %w", err)
	}
	if err := checkMap(fd); err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// createMap creates a map, and pins it with mode 0660.
func createMap(path string) error {
	types, err := loadTypes()
	if err != nil {
		return fmt.Errorf("describe the types of a map: %w", err)
	}
	defer unix.Close(types)
	attr := struct {
		mapType, keySize, valueSize, entries, flags, innerFD, numaNode uint32
		name                                                           [16]byte
		ifindex, btfFD, keyType, valueType                             uint32
	}{
		mapType: mapType, keySize: 4, valueSize: fileSize, entries: 1, flags: unix.BPF_F_MMAPABLE,
		name: [16]byte([]byte("segue_load\x00\x00\x00\x00\x00\x00")), btfFD: uint32(types), keyType: 1, valueType: 3,
	}
	fd, err := bpf(unix.BPF_MAP_CREATE, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	if err != nil {
		return fmt.Errorf("create a map (needs CAP_BPF): %w", err)
	}
	defer unix.Close(fd)
	if _, err := pinCommand(unix.BPF_OBJ_PIN, path, fd); err != nil {
		return fmt.Errorf("pin a map: %w", err)
	}
	return os.Chmod(path, 0o660)
}

// btf describes the types of a map's key and value: a 32-bit number, and an array of 512 64-bit
// numbers. The kernel lets processes open the pin of a map only if its types are known, and a
// process must open the pin to lock its slot.
func btf() []byte {
	const integer, array = 1 << 24, 3 << 24
	types := []uint32{
		1, integer, 4, 32, // type 1: a 32-bit number
		1, integer, 8, 64, // type 2: a 64-bit number
		0, array, 0, 2, 1, fileSize / slotSize, // type 3: elements of type 2, indexes of type 1
	}
	names := "\x00n\x00"
	b := binary.NativeEndian.AppendUint16(nil, 0xeb9f)
	b = append(b, 1, 0) // version, flags
	size := uint32(4 * len(types))
	for _, n := range append([]uint32{24, 0, size, size, uint32(len(names))}, types...) {
		b = binary.NativeEndian.AppendUint32(b, n)
	}
	return append(b, names...)
}

// loadTypes passes the types of a map to the kernel.
func loadTypes() (int, error) {
	b := btf()
	attr := struct {
		btf, log               unsafe.Pointer
		size, logSize, logMode uint32
		_                      uint32
	}{btf: unsafe.Pointer(&b[0]), size: uint32(len(b))}
	fd, err := bpf(unix.BPF_BTF_LOAD, unsafe.Pointer(&attr), 28)
	runtime.KeepAlive(b)
	return fd, err
}

// checkMap returns an error unless a map has the type and the size of an application's map.
func checkMap(fd int) error {
	type info struct{ mapType, id, keySize, valueSize, entries, flags uint32 }
	var got info
	attr := struct {
		fd, size uint32
		info     unsafe.Pointer
	}{uint32(fd), uint32(unsafe.Sizeof(got)), unsafe.Pointer(&got)}
	if _, err := bpf(unix.BPF_OBJ_GET_INFO_BY_FD, unsafe.Pointer(&attr), unsafe.Sizeof(attr)); err != nil {
		return fmt.Errorf("describe the map: %w", err)
	}
	if want := (info{mapType, got.id, 4, fileSize, 1, unix.BPF_F_MMAPABLE}); got != want {
		return fmt.Errorf("is a map of type %d with %d values of %d bytes (flags %#x), so it is not a map of load reports",
			got.mapType, got.entries, got.valueSize, got.flags)
	}
	return nil
}

// Map is an application's map. The agent uses it: its data path reads the map by itself, and the
// agent looks for ended processes. Only one goroutine at a time may call its methods.
type Map struct {
	path string
	pin  *os.File // the pin, for locks
	fd   int      // of the map
	page []byte
}

// OpenMap opens the map with this pin, which must be in a BPF file system. It creates the map if
// there is none; so applications without CAP_BPF find one.
func OpenMap(path string) (m *Map, err error) {
	if !isPin(path) {
		return nil, fmt.Errorf("%s: %s is not a folder of a BPF file system", path, filepath.Dir(path))
	}
	m = &Map{path: path, fd: -1}
	defer func() {
		if err != nil {
			_ = m.Close()
			err = fmt.Errorf("%s: %w", path, err)
		}
	}()
	if m.fd, err = openMap(path); err != nil {
		return nil, err
	}
	if m.pin, err = os.OpenFile(path, os.O_RDWR, 0); err != nil {
		return nil, err
	}
	m.page, err = mapPage(m.fd)
	return m, err
}

// FD returns the descriptor of the map, which is valid until Close.
func (m *Map) FD() int { return m.fd }

// IsPinned tells whether the path still names this map.
func (m *Map) IsPinned() (bool, error) {
	own, err := m.pin.Stat()
	if err != nil {
		return false, err
	}
	named, err := os.Stat(m.path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(own, named), err
}

// ClearEnded sets the slots of ended processes to 0. It holds the lock of a slot meanwhile, so no
// process can take the slot. It also corrects the number of slots that the data path reads.
func (m *Map) ClearEnded() error {
	for slot := range slots {
		w := word(m.page, headerSize+slot*slotSize)
		if w.Load() == 0 {
			continue
		}
		raise(half(m.page, usedOffset), uint32(slot)+1)
		lock := slotLock(slot)
		switch err := unix.FcntlFlock(m.pin.Fd(), unix.F_OFD_SETLK, &lock); {
		case errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES):
			continue // the process lives
		case err != nil:
			return fmt.Errorf("%s: lock slot %d: %w", m.path, slot, err)
		}
		w.Store(0)
		lock.Type = unix.F_UNLCK
		if err := unix.FcntlFlock(m.pin.Fd(), unix.F_OFD_SETLK, &lock); err != nil {
			return fmt.Errorf("%s: unlock slot %d: %w", m.path, slot, err)
		}
	}
	return nil
}

// Sum returns the present load: the sum of all slots.
func (m *Map) Sum() (busy, capacity uint32, err error) {
	if err := checkHeader(m.page); err != nil {
		return 0, 0, fmt.Errorf("%s: %w", m.path, err)
	}
	p := copyOf(m.page)
	if busy, capacity = p.sum(nil); capacity == 0 {
		return 0, 0, fmt.Errorf("%s: %w", m.path, ErrNobody)
	}
	return busy, capacity, nil
}

// Close closes the map. Its pin stays.
func (m *Map) Close() error {
	var errs []error
	if m.page != nil {
		errs = append(errs, unix.Munmap(m.page))
	}
	if m.pin != nil {
		errs = append(errs, m.pin.Close())
	}
	if m.fd >= 0 {
		errs = append(errs, unix.Close(m.fd))
	}
	return errors.Join(errs...)
}
