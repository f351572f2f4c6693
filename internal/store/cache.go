// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/segue-lb/segue/internal/atomicfile"
	"github.com/segue-lb/segue/internal/serversets"
)

// State is what a balancer follows: the content of the store and the generations, both as of a
// change that the leader has released.
type State struct {
	Version     Version                `json:"version"`
	Content     Tree                   `json:"content"`
	Generations serversets.Generations `json:"generations"`
}

// CacheFile returns the path of the file in which a balancer's instance keeps the state that it
// follows. The directory is node.state of the configuration.
func CacheFile(dir, instance string) string { return filepath.Join(dir, instance+".store.json") }

// cached is the content of the file.
type cached struct {
	Format int    `json:"format"`
	Prefix string `json:"prefix"` // of the fleet
	*State
}

// LoadCache reads the state that a balancer followed last. It returns nil if there is no file, or
// if the file belongs to another fleet.
func LoadCache(path, prefix string) (*State, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var c cached
	if err := json.Unmarshal(text, &c); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if c.Format != format {
		return nil, fmt.Errorf("%s: format %d is not %d, the format of this build", path, c.Format, format)
	}
	if c.Prefix != prefix || c.State == nil {
		return nil, nil
	}
	for name, g := range c.Generations {
		if err := g.Validate(); err != nil {
			return nil, fmt.Errorf("%s: service %s: %w", path, name, err)
		}
	}
	return c.State, nil
}

// save writes the state to the file at path. If that fails, the former file stays. prefix is that
// of the fleet.
func (s *State) save(path, prefix string) error {
	text, err := json.Marshal(cached{format, prefix, s})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	// The file has no secrets, but only the balancer and its group need it.
	return atomicfile.Write(path, append(text, '\n'), 0o640)
}
