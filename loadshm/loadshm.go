// SPDX-License-Identifier: Apache-2.0

// Package loadshm reports the load of an application to a Segue agent, through a small file that
// both map into memory. A report is a store to memory, without a system call, a lock or a wait.
//
// In place of a file, it may be a BPF map: Open takes the path of a pin, in a BPF file system, as it
// takes that of a file. The agent reads a file at an interval. Its data path reads a map when a
// connection is offered, and so decides by the load of that moment.
//
// The file has one slot for each reporting process. A process holds a lock on its slot while it
// lives. So the reports of ended processes do not count. The agent adds up the slots.
// docs/operate/load-sources.md describes the layout. segue_load.h and segue_load.py in this folder
// do the same for C and Python.
package loadshm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The layout: a header, then slots, one 64-bit word each, in the byte order of the machine. The
// lower half of a slot is the number of busy requests, and the upper half is the capacity.
const (
	fileSize   = 4096
	headerSize = 64
	slotSize   = 8
	slots      = (fileSize - headerSize) / slotSize

	magicOffset    = 0  // 8 bytes
	versionOffset  = 8  // uint32
	usedOffset     = 12 // uint32: no process has used a slot from this one on
	capacityOffset = 16 // uint32: capacity of all processes together; 0: the sum of the slots
	version        = 1
)

// magic is "segueshm" as it lies in memory.
var magic = binary.NativeEndian.Uint64([]byte("segueshm"))

// Reporter is this process's slot in a file. Several goroutines may call its methods at the same
// time. Close must be the last call.
type Reporter struct {
	page []byte
	word *atomic.Uint64
	fd   int // keeps the lock on the slot
}

// Open maps the file, and takes a free slot. It creates the file if there is none (mode 0660 less
// the umask). capacity is the number of requests that this process serves at a time, at least 1.
// The file should be on a file system in memory, such as /run, to avoid constant writes to a disk.
//
// A path in a BPF file system, such as /sys/fs/bpf/segue/@loads/shop, is the pin of a map. If there
// is none, the agent or a process with CAP_BPF creates it.
func Open(path string, capacity uint32) (*Reporter, error) {
	if capacity == 0 {
		return nil, fmt.Errorf("%s: capacity is 0", path)
	}
	f, page, err := openPage(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	slot, err := takeSlot(f)
	if err != nil {
		_ = unix.Munmap(page)
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	fd, err := keepOpen(f)
	if err != nil {
		_ = unix.Munmap(page)
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	r := &Reporter{page: page, word: word(page, headerSize+slot*slotSize), fd: fd}
	raise(half(page, usedOffset), uint32(slot)+1)
	half(page, capacityOffset).Store(0)
	r.Set(0, capacity)
	return r, nil
}

// openPage opens the file, or the pin of a map, and maps it. It creates what is missing.
func openPage(path string) (f *os.File, page []byte, err error) {
	if isPin(path) {
		return openPinned(path)
	}
	if f, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o660); err != nil {
		return nil, nil, err
	}
	if page, err = mapForWriting(f); err != nil {
		_ = f.Close()
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return f, page, nil
}

// openPinned is openPage for the pin of a map. The mapping keeps the map.
func openPinned(path string) (*os.File, []byte, error) {
	fd, err := openMap(path)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	defer unix.Close(fd)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, nil, err
	}
	page, err := mapPage(fd)
	if err != nil {
		_ = f.Close()
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return f, page, nil
}

// raise makes a number at least as large as another one.
func raise(n *atomic.Uint32, least uint32) {
	for {
		old := n.Load()
		if old >= least || n.CompareAndSwap(old, least) {
			return
		}
	}
}

// keepOpen returns a second descriptor of the open file. It is closed on exec, but the garbage
// collector does not close it. The lock lasts while the open file has a descriptor. A mapping is
// not enough: on overlayfs the kernel maps the underlying file instead.
func keepOpen(f *os.File) (int, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("duplicate the descriptor: %w", err)
	}
	return fd, nil
}

// mapForWriting maps the file. It gives a new file its size and its header. Several processes may
// do so at the same time, because all write the same.
func mapForWriting(f *os.File) ([]byte, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() == 0 {
		err = f.Truncate(fileSize)
	} else if info.Size() != fileSize {
		err = fmt.Errorf("size is %d bytes, not %d", info.Size(), fileSize)
	}
	if err != nil {
		return nil, err
	}
	return mapPage(int(f.Fd()))
}

// mapPage maps a file or a map for writing, writes the header of a new one, and checks the header of
// an old one.
func mapPage(fd int) ([]byte, error) {
	page, err := unix.Mmap(fd, 0, fileSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map: %w", err)
	}
	if word(page, magicOffset).Load() == 0 {
		binary.NativeEndian.PutUint32(page[versionOffset:], version)
		word(page, magicOffset).Store(magic)
	}
	if err := checkHeader(page); err != nil {
		_ = unix.Munmap(page)
		return nil, err
	}
	return page, nil
}

// checkHeader returns an error unless the page has the header of this version of the layout.
func checkHeader(page []byte) error {
	if got := word(page, magicOffset).Load(); got != magic {
		return fmt.Errorf("begins with %#x, so it is not a file of load reports", got)
	}
	if got := binary.NativeEndian.Uint32(page[versionOffset:]); got != version {
		return fmt.Errorf("version is %d, not %d", got, version)
	}
	return nil
}

// takeSlot locks the first free slot. The lock belongs to the open file, not to the process
// (fcntl(2), open file description locks).
func takeSlot(f *os.File) (int, error) {
	for slot := range slots {
		lock := slotLock(slot)
		switch err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lock); {
		case err == nil:
			return slot, nil
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES):
			return 0, fmt.Errorf("lock slot %d: %w", slot, err)
		}
	}
	return 0, fmt.Errorf("all %d slots are taken", slots)
}

// slotLock returns the lock on a slot, for the calls of fcntl.
func slotLock(slot int) unix.Flock_t {
	return unix.Flock_t{Type: unix.F_WRLCK, Start: int64(headerSize + slot*slotSize), Len: slotSize}
}

// word returns the 64-bit word at an offset of the page, for atomic loads and stores.
func word(page []byte, offset int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&page[offset]))
}

// half returns the 32-bit number at an offset of the page, for atomic loads and stores.
func half(page []byte, offset int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&page[offset]))
}

// Begin counts one more request (or worker, in the unit of the capacity) as busy.
func (r *Reporter) Begin() { r.word.Add(1) }

// End undoes one Begin. If no request is busy, it does nothing.
func (r *Reporter) End() {
	for {
		old := r.word.Load()
		if uint32(old) == 0 || r.word.CompareAndSwap(old, old-1) {
			return
		}
	}
}

// Set replaces both numbers at once. It is for applications that count busy requests themselves.
// capacity is at least 1; with 0 this process does not count.
func (r *Reporter) Set(busy, capacity uint32) {
	r.word.Store(uint64(capacity)<<32 | uint64(busy))
}

// Close releases the slot.
func (r *Reporter) Close() error {
	r.Set(0, 0)
	return errors.Join(unix.Munmap(r.page), unix.Close(r.fd))
}
