// SPDX-License-Identifier: Apache-2.0

// Package datapath attaches BPF programs to interfaces, and pins them with their maps so that they
// outlive the process that loaded them. The next process finds them and replaces the programs
// without losing a packet.
package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
)

// Root is the mount point of the BPF file system.
const Root = "/sys/fs/bpf"

// Dir returns the directory of an instance's pins. desired.CheckInstance must accept the name.
func Dir(instance string) string {
	return filepath.Join(Root, "segue", instance)
}

// HidesPins tells whether pins of this process will be visible to this process alone: the BPF file
// system is not mounted, and the process has a mount namespace of its own, as under ip netns exec.
func HidesPins() bool {
	if mounted, err := isMounted(); err != nil || mounted {
		return false
	}
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return false
	}
	// Process 2 of a host is kthreadd, in the host's mount namespace. A container has another one or
	// none.
	host, err := os.Readlink("/proc/2/ns/mnt")
	return err == nil && own != host
}

// isMounted tells whether the directory of all instances is in the BPF file system, or will be when
// it is made. A sandbox may show a process this directory alone, and not all of Root.
func isMounted() (bool, error) {
	var stat unix.Statfs_t
	for _, dir := range []string{Dir(""), Root} {
		err := unix.Statfs(dir, &stat)
		if err == nil && stat.Type == unix.BPF_FS_MAGIC {
			return true, nil
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return false, fmt.Errorf("%s: %w", dir, err)
		}
	}
	return false, nil
}

// MakeDir makes the pin directory of an instance. It mounts the BPF file system first if the host
// has not mounted it. It returns an error if the instance has another role.
func MakeDir(instance string, role Role) (string, error) {
	if err := desired.CheckInstance(instance); err != nil {
		return "", err
	}
	mounted, err := isMounted()
	if err != nil {
		return "", err
	}
	if !mounted {
		if err := unix.Mount("bpf", Root, "bpf", 0, "mode=0700"); err != nil {
			return "", fmt.Errorf("mount the BPF file system at %s: %w", Root, err)
		}
	}
	if actual, err := roleOf(instance); err != nil {
		return "", err
	} else if actual != "" && actual != role {
		return "", fmt.Errorf("instance %q has the role %s, not %s: choose another name, or detach the instance first", instance, actual, role)
	}
	dir := Dir(instance)
	if err := makeInSharedDir(dir); err != nil {
		return "", err
	}
	return dir, cmp.Or(checkOwner(filepath.Dir(dir), role), checkOwner(dir, role))
}

// checkOwner returns an error if another user could replace the content of a directory. On many
// hosts, every user can make directories in the BPF file system, and so could have made this one.
// The user root, too, must not use the directory of another user, such as the user of the package's
// units: an attacker who controls a process of that user could otherwise prepare tables for root.
func checkOwner(dir string, role Role) error {
	var stat unix.Stat_t
	if err := unix.Lstat(dir, &stat); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	isDirectory, isShared := stat.Mode&unix.S_IFMT == unix.S_IFDIR, stat.Mode&0o022 != 0
	if isDirectory && !isShared && int(stat.Uid) == os.Geteuid() {
		return nil
	}
	owner, self := userName(int(stat.Uid)), userName(os.Geteuid())
	if !isDirectory || isShared {
		return fmt.Errorf("%s belongs to the user %s and has mode %04o: other users could replace the tables; remove it",
			dir, owner, stat.Mode&0o7777)
	}
	return fmt.Errorf("%s belongs to the user %s, who could replace the tables, and this process runs as %s: "+
		"start the process as %s (the package's unit does: systemctl start segue-%s), or, if you trust what %s has "+
		"put there, give the tables to %s: chown -R %s: %s",
		dir, owner, self, owner, commands[role], owner, self, self, Dir(""))
}

// userName returns the name of a user, or the number of a user without a name.
func userName(id int) string {
	if u, err := user.LookupId(strconv.Itoa(id)); err == nil {
		return u.Username
	}
	return strconv.Itoa(id)
}

// makeInSharedDir makes a directory, although the last instance to be removed may remove the parent
// at any time.
func makeInSharedDir(dir string) error {
	const attempts = 100 // each failure means that another instance was removed
	var err error
	for range attempts {
		// os.ErrExist: MkdirAll did not make the parent, because it existed; then it was removed.
		if err = os.MkdirAll(dir, 0o700); !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrExist) {
			break
		}
	}
	return err
}

// RemoveDir removes all pins of an instance. Objects that only a pin held are thereby detached. It
// returns nil if the directory does not exist.
func RemoveDir(instance string) error {
	if err := desired.CheckInstance(instance); err != nil {
		return err
	}
	dir := Dir(instance)
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	// The last instance also removes the parent. Otherwise one of these errors is expected.
	err := os.Remove(filepath.Dir(dir))
	for _, expected := range []error{
		os.ErrNotExist, unix.ENOTEMPTY,
		os.ErrPermission, unix.EBUSY, unix.EROFS, // in a sandbox
	} {
		if errors.Is(err, expected) {
			return nil
		}
	}
	return err
}

// Pin pins a program or a map at path. The object must not have been pinned before. If another
// object is pinned at path, Pin replaces it in one step. So one of the two is always there, even if
// this process is killed.
func Pin(object pinnable, path string) error {
	next, err := pinNext(object, path)
	if err != nil {
		return err
	}
	return os.Rename(next, path)
}

// pinnable is a program, a map or a link.
type pinnable interface{ Pin(path string) error }

// pinNext pins an object beside path. It first removes a pin that a killed process has left there.
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

// next returns the path at which Pin pins an object before it moves the pin to path.
func next(path string) string { return path + "_next" }
