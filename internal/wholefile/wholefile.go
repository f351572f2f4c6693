// SPDX-License-Identifier: Apache-2.0

// Package wholefile replaces files in one step.
package wholefile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Write replaces a file, or creates it, with the given permissions. Readers see either the former
// content or the new one, also after a power failure. If Write returns an error, the former file
// stays.
func Write(path string, content []byte, permissions fs.FileMode) error {
	pending, err := Prepare(path, content, permissions)
	if err != nil {
		return err
	}
	return pending.Commit()
}

// Pending is the new content of a file, which is on the disk but not yet in the file's place. It
// must be committed or discarded.
type Pending struct{ name, path string }

// Prepare writes the new content of a file. If it returns an error, nothing is left to discard.
func Prepare(path string, content []byte, permissions fs.FileMode) (*Pending, error) {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".")
	if err != nil {
		return nil, err
	}
	_, err = file.Write(content)
	err = errors.Join(err, file.Chmod(permissions), file.Sync(), file.Close())
	if err != nil {
		return nil, errors.Join(err, os.Remove(file.Name()))
	}
	return &Pending{file.Name(), path}, nil
}

// Commit puts the new content into the file's place. If it returns an error, the former file stays.
func (p *Pending) Commit() error {
	if err := os.Rename(p.name, p.path); err != nil {
		return errors.Join(err, p.Discard())
	}
	return nil
}

// Discard removes the new content. The former file stays.
func (p *Pending) Discard() error { return os.Remove(p.name) }
