// SPDX-License-Identifier: Apache-2.0

package loadshm

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"
)

// ErrNobody is the error of Read if no living process reports to the file.
var ErrNobody = errors.New("no process reports its load")

// CheckInterval is the time after which a Reader opens its file again and looks for ended
// processes.
const CheckInterval = 500 * time.Millisecond

// Reader reads a file of load reports again and again. It keeps the file mapped between reads, so
// most reads make no system call. Only one goroutine at a time may call its methods.
type Reader struct {
	path    string
	page    []byte        // nil: not mapped
	ended   [slots]uint64 // the words that ended processes have left in their slots; 0 for other slots
	checked time.Time     // time of the last check; zero: never
	err     error         // why the file cannot be read since the last check
}

// NewReader returns a reader of the file, which need not exist yet.
func NewReader(path string) *Reader { return &Reader{path: path} }

// Read returns the sum of the reports of all living processes. It notices at once what processes
// report, and that a further process has begun to report. It notices within CheckInterval that a
// process has ended, that the file was replaced or removed, and that the file has appeared.
//
// Read does not trust the file: others may truncate it at any moment. A FIFO or a device under its
// name is an error.
func (r *Reader) Read() (busy, capacity uint32, err error) {
	if now := time.Now(); r.checked.IsZero() || now.Sub(r.checked) >= CheckInterval {
		r.checked = now
		r.err = r.check()
	}
	if r.err != nil { // the same until the next check, so that a missing file costs little
		return 0, 0, r.err
	}
	p, err := copyPage(r.page)
	if err != nil {
		r.err = fmt.Errorf("%s: %w", r.path, err)
		return 0, 0, r.err
	}
	if busy, capacity = p.sum(&r.ended); capacity == 0 {
		return 0, 0, fmt.Errorf("%s: %w", r.path, ErrNobody)
	}
	return busy, capacity, nil
}

// Close unmaps the file. The next Read maps it again.
func (r *Reader) Close() error {
	r.checked = time.Time{}
	return r.unmap()
}

func (r *Reader) unmap() error {
	page := r.page
	if r.page = nil; page == nil {
		return nil
	}
	return unix.Munmap(page)
}

// Read returns the sum of the reports of all living processes, as a Reader does.
func Read(path string) (busy, capacity uint32, err error) {
	r := NewReader(path)
	busy, capacity, err = r.Read()
	return busy, capacity, errors.Join(err, r.Close())
}

// check maps the file that the path names now, and finds the slots of ended processes.
func (r *Reader) check() error {
	if err := r.unmap(); err != nil {
		return err
	}
	f, err := os.OpenFile(r.path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if r.page, err = mapForReading(f); err != nil {
		return fmt.Errorf("%s: %w", r.path, err)
	}
	if err = r.findEnded(f); err != nil {
		return fmt.Errorf("%s: %w", r.path, err)
	}
	return nil
}

// mapForReading maps a file of the right type and size.
func mapForReading(f *os.File) ([]byte, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("not a regular file: %v", info.Mode().Type())
	}
	if info.Size() != fileSize {
		return nil, fmt.Errorf("size is %d bytes, not %d", info.Size(), fileSize)
	}
	// Only a load from mapped memory is certain never to see half a store. MAP_POPULATE reads the
	// page now: a slow file system then blocks this system call, and not the Go runtime, which
	// would wait for a thread in a page fault.
	page, err := unix.Mmap(int(f.Fd()), 0, fileSize, unix.PROT_READ, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("map: %w", err)
	}
	return page, nil
}

// findEnded notes the contents of the slots that no process has locked: their processes have ended.
func (r *Reader) findEnded(f *os.File) error {
	p, err := copyPage(r.page)
	if err != nil {
		return err
	}
	clear(r.ended[:])
	for slot, w := range p.words {
		if capacityOf(w) == 0 {
			continue
		}
		lock := slotLock(slot)
		if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lock); err != nil {
			return fmt.Errorf("query the lock of slot %d: %w", slot, err)
		}
		if lock.Type == unix.F_UNLCK {
			r.ended[slot] = w
		}
	}
	return nil
}

// reports are the numbers of a page.
type reports struct {
	words    [slots]uint64
	capacity uint32 // of all processes together; 0: the sum of the slots
}

// copyPage checks the header and returns the numbers. If the file is truncated meanwhile, SIGBUS
// becomes an error.
func copyPage(page []byte) (p reports, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if fault := recover(); fault != nil {
			err = fmt.Errorf("was truncated while it was read: %v", fault)
		}
	}()
	if err := checkHeader(page); err != nil {
		return p, err
	}
	return copyOf(page), nil
}

// copyOf returns the numbers of a page.
func copyOf(page []byte) (p reports) {
	p.capacity = half(page, capacityOffset).Load()
	for slot := range p.words {
		p.words[slot] = word(page, headerSize+slot*slotSize).Load()
	}
	return p
}

// sum adds up the slots of living processes. ended are the words that ended processes have left; it
// may be nil. If a slot has changed since its process ended, another process, which lives, has taken
// it. The capacity is 0 if no process lives.
func (p *reports) sum(ended *[slots]uint64) (busy, capacity uint32) {
	var busySum, capacitySum uint64
	for slot, w := range p.words {
		if capacityOf(w) != 0 && (ended == nil || w != ended[slot]) {
			busySum += w & (1<<32 - 1)
			capacitySum += capacityOf(w)
		}
	}
	if capacitySum != 0 && p.capacity != 0 {
		capacitySum = uint64(p.capacity)
	}
	return clamp(busySum), clamp(capacitySum)
}

func capacityOf(word uint64) uint64 { return word >> 32 }

func clamp(n uint64) uint32 { return uint32(min(n, 1<<32-1)) }
