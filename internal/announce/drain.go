// SPDX-License-Identifier: Apache-2.0

package announce

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/segue-lb/segue/internal/atomicfile"
	"github.com/segue-lb/segue/internal/desired"
)

// DrainFile is the path of the file that exists while a balancer is drained. It is empty if the
// balancer has no directory for its state: then a restart ends each drain.
type DrainFile string

// DrainFileOf returns the file of a balancer.
func DrainFileOf(node *desired.BalancerNode) DrainFile {
	if node.State == "" {
		return ""
	}
	return DrainFile(filepath.Join(node.State, node.Instance+".drained"))
}

// Since returns when the balancer was drained, or nil if it is not drained. It returns an error if
// it cannot find that out.
func (f DrainFile) Since() (*time.Time, error) {
	if f == "" {
		return nil, nil
	}
	info, err := os.Stat(string(f))
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("find out whether the balancer is drained: %w", err)
	}
	since := info.ModTime()
	return &since, nil
}

// Make makes the file, unless it exists already. The drain began at the modification time of the
// file.
func (f DrainFile) Make() error {
	if f == "" {
		return nil
	}
	_, err := os.Stat(string(f))
	if errors.Is(err, os.ErrNotExist) {
		if err = os.MkdirAll(filepath.Dir(string(f)), 0o755); err == nil {
			err = atomicfile.Write(string(f), []byte("segue undrain --self removes this file.\n"), 0o644)
		}
	}
	if err != nil {
		return fmt.Errorf("store that the balancer is drained: %w", err)
	}
	return nil
}

// Remove removes the file. A drain until the restart has no file.
func (f DrainFile) Remove() error {
	if f == "" {
		return nil
	}
	if err := os.Remove(string(f)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("store that the balancer is no longer drained: %w", err)
	}
	return nil
}
