// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"fmt"

	"github.com/segue-lb/segue/loadshm"
)

// SharedMap is a BPF map of load reports, which the data path reads by itself. The application
// writes to it by package loadshm, or by its equivalent for C or Python. A Read opens the map, and
// makes it forget ended processes.
type SharedMap struct {
	path   string
	opened func(*loadshm.Map) error
	now    *loadshm.Map // nil: none is open
}

// NewSharedMap returns the source for the pin of a map. It calls opened for each map that it opens:
// the first one, and those that replace it under the same path.
func NewSharedMap(path string, opened func(*loadshm.Map) error) *SharedMap {
	return &SharedMap{path: path, opened: opened}
}

// Read returns the sum of the reports of all living processes. The error is loadshm.ErrNobody if
// there are none. After any other error, the next Read opens the map again.
func (s *SharedMap) Read() (Load, error) {
	l, err := s.read()
	if err == nil {
		return l, nil
	}
	if !errors.Is(err, loadshm.ErrNobody) {
		err = errors.Join(err, s.Close())
	}
	return Load{}, fmt.Errorf("shared map: %w", err)
}

func (s *SharedMap) read() (l Load, err error) {
	if err := s.follow(); err != nil {
		return l, err
	}
	if err := s.now.ClearEnded(); err != nil {
		return l, err
	}
	l.Busy, l.Capacity, err = s.now.Sum()
	return l, err
}

// follow opens the map that the path names now.
func (s *SharedMap) follow() error {
	if s.now != nil {
		same, err := s.now.IsPinned()
		if same || err != nil {
			return err
		}
		if err := s.Close(); err != nil {
			return err
		}
	}
	m, err := loadshm.OpenMap(s.path)
	if err != nil {
		return err
	}
	s.now = m
	return s.opened(m)
}

// Close closes the map. It implements io.Closer.
func (s *SharedMap) Close() error {
	m := s.now
	if s.now = nil; m == nil {
		return nil
	}
	return m.Close()
}
