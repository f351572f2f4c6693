// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"

	"github.com/segue-lb/segue/loadshm"
)

// SharedMemory reads a file to which an application reports as package loadshm, or its equals for C
// and Python, do. Its unit is the application's own.
type SharedMemory struct{ path string }

// NewSharedMemory returns the source for the file, which need not exist yet.
func NewSharedMemory(path string) *SharedMemory { return &SharedMemory{path} }

// Read sums what all living processes of the application report. That none does is an error.
func (s *SharedMemory) Read() (Load, error) {
	busy, capacity, err := loadshm.Read(s.path)
	if err != nil {
		return Load{}, fmt.Errorf("shared memory: %w", err)
	}
	return Load{Busy: busy, Capacity: capacity}, nil
}
