// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"

	"github.com/segue-lb/segue/loadshm"
)

// SharedMemory reads a file of load reports. The application writes them by package loadshm, or by
// its equivalent for C or Python. The application chooses the unit.
type SharedMemory struct{ reader *loadshm.Reader }

// NewSharedMemory returns the source for the file, which need not exist yet.
func NewSharedMemory(path string) *SharedMemory {
	return &SharedMemory{loadshm.NewReader(path)}
}

// Read returns the sum of the reports of all living processes of the application. It is an error if
// there are none. If a process ends without removing its report, the report counts until the first
// read after loadshm.CheckInterval.
func (s *SharedMemory) Read() (Load, error) {
	busy, capacity, err := s.reader.Read()
	if err != nil {
		return Load{}, fmt.Errorf("shared memory: %w", err)
	}
	return Load{Busy: busy, Capacity: capacity}, nil
}

// Close unmaps the file. It implements io.Closer.
func (s *SharedMemory) Close() error { return s.reader.Close() }
