// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"

	"github.com/segue-lb/segue/loadshm"
)

// SharedMemory reads a file of load reports (package loadshm, and its equivalents for C and
// Python). The application chooses the unit.
type SharedMemory struct{ reader *loadshm.Reader }

// NewSharedMemory returns the source for the file, which need not exist yet.
func NewSharedMemory(path string) *SharedMemory {
	return &SharedMemory{loadshm.NewReader(path)}
}

// Read returns the sum of the reports of all living processes of the application. It is an error if
// there are none. A process that has ended without a word counts for loadshm.CheckInterval at most,
// or until the next read.
func (s *SharedMemory) Read() (Load, error) {
	busy, capacity, err := s.reader.Read()
	if err != nil {
		return Load{}, fmt.Errorf("shared memory: %w", err)
	}
	return Load{Busy: busy, Capacity: capacity}, nil
}

// Close unmaps the file. It implements io.Closer.
func (s *SharedMemory) Close() error { return s.reader.Close() }
