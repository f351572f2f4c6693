// SPDX-License-Identifier: Apache-2.0

// Package atomicfile replaces files in one step.
package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
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
	file, err := os.CreateTemp(filepath.Dir(path), prefixOf(path))
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

// prefixOf returns the first part of the names under which the new content of a file is written. A
// number follows it.
func prefixOf(path string) string { return "." + filepath.Base(path) + "." }

// RemoveLeft removes the new contents of a file that earlier processes have neither committed nor
// discarded, because they died. No process may write the file meanwhile.
func RemoveLeft(path string) error {
	dir := filepath.Dir(path)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, entry := range entries {
		number, isOurs := strings.CutPrefix(entry.Name(), prefixOf(path))
		_, err := strconv.ParseUint(number, 10, 64)
		if isOurs && err == nil && entry.Type().IsRegular() {
			errs = append(errs, os.Remove(filepath.Join(dir, entry.Name())))
		}
	}
	return errors.Join(errs...)
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
