// SPDX-License-Identifier: Apache-2.0

// Package datapath attaches BPF programs to interfaces and pins them with their
// maps, so that they outlive the process that loaded them: a restart finds them
// again and swaps the program without losing a packet.
package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/config"
)

// Root is where the BPF file system is mounted.
const Root = "/sys/fs/bpf"

// Dir is where the pins of an instance are; the name must be one that config.CheckInstance accepts.
func Dir(instance string) string {
	return filepath.Join(Root, "segue", instance)
}

// MakeDir makes the pin directory of an instance, and mounts the BPF file system
// first where the machine has not. An instance that has another role is refused.
func MakeDir(instance string, role Role) (string, error) {
	if err := config.CheckInstance(instance); err != nil {
		return "", err
	}
	var stat unix.Statfs_t
	if err := unix.Statfs(Root, &stat); err != nil {
		return "", fmt.Errorf("%s: %w", Root, err)
	}
	if stat.Type != unix.BPF_FS_MAGIC {
		if err := unix.Mount("bpf", Root, "bpf", 0, ""); err != nil {
			return "", fmt.Errorf("mount the BPF file system at %s: %w", Root, err)
		}
	}
	if is, err := roleOf(instance); err != nil {
		return "", err
	} else if is != "" && is != role {
		return "", fmt.Errorf("instance %q has the role %s, not %s: choose another name, or detach the instance first", instance, is, role)
	}
	dir := Dir(instance)
	return dir, makeInShared(dir)
}

// makeInShared makes a directory whose parent the last instance to go may remove at any time.
func makeInShared(dir string) error {
	const attempts = 100 // each that fails is another instance that goes
	var err error
	for range attempts {
		// It exists when it is to be made, and no more when it is looked at.
		if err = os.MkdirAll(dir, 0o700); !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrExist) {
			break
		}
	}
	return err
}

// RemoveDir unpins everything that an instance pinned; what only the pins held
// is thereby detached. A directory that does not exist is no error.
func RemoveDir(instance string) error {
	if err := config.CheckInstance(instance); err != nil {
		return err
	}
	dir := Dir(instance)
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	// The parent goes with its last instance.
	if err := os.Remove(filepath.Dir(dir)); err != nil &&
		!errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	return nil
}

// Pin pins a program or a map at path, through an object that was not pinned before. It takes the place
// of what is pinned there in one step, so that there is one or the other whenever this process ends.
func Pin(object pinnable, path string) error {
	next, err := pinNext(object, path)
	if err != nil {
		return err
	}
	return os.Rename(next, path)
}

// pinnable is a program, a map or a link.
type pinnable interface{ Pin(path string) error }

// pinNext pins an object beside path, where a killed process may have left another pin.
func pinNext(object pinnable, path string) (string, error) {
	next := next(path)
	if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	if err := object.Pin(next); err != nil {
		return "", fmt.Errorf("pin %s: %w", next, err)
	}
	return next, nil
}

// next is where Pin pins first what is to be pinned at path.
func next(path string) string { return path + "_next" }
