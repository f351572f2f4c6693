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
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".")
	if err != nil {
		return err
	}
	_, err = file.Write(content)
	err = errors.Join(err, file.Chmod(permissions), file.Sync(), file.Close())
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	return nil
}
