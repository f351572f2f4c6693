// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// UpdateLink gives a pinned XDP or tcx link a new program, in one step. The error is os.ErrNotExist
// when there is no such link, or when it belongs to another interface: see PinLink. A link of
// another network namespace is another error. UpdateLink first detaches a link that a killed
// process has left half-way: new, but not named yet, or replaced, but not detached yet.
func (t *Takeover) UpdateLink(prog *ebpf.Program, ifindex int, pin string) error {
	if err := DetachLink(next(pin)); err != nil {
		return err
	}
	attached, err := AttachedTo(pin)
	if err != nil {
		return err
	}
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return err
	}
	if attached != ifindex {
		return errors.Join(os.ErrNotExist, l.Close())
	}
	if err := t.Update(l, prog, filepath.Dir(pin)); err != nil {
		return fmt.Errorf("replace the program of %s: %w", pin, err)
	}
	return nil
}

// Update gives a link a new program, in one step. The takeover closes the link. The directory is that
// of the instance.
func (t *Takeover) Update(l link.Link, prog *ebpf.Program, dir string) error {
	t.held = append(t.held, l)
	if err := t.keep(prog, dir); err != nil {
		return err
	}
	info, err := l.Info()
	if err != nil {
		return err
	}
	before, err := openProgram(dir, info.Program)
	if err != nil {
		return fmt.Errorf("program %d: %w", info.Program, err)
	}
	t.held = append(t.held, before)
	if err := l.Update(prog); err != nil {
		return err
	}
	t.OnUndo(func() error { return l.Update(before) })
	return nil
}

// keep pins a program by its number before it is attached, for the next process. The end of the
// takeover removes the pins of programs that are attached no more.
func (t *Takeover) keep(prog *ebpf.Program, dir string) error {
	id, isNew, err := keepProgram(dir, prog)
	if err != nil {
		return err
	}
	if t.kept == nil {
		t.kept = map[string]map[ebpf.ProgramID]bool{}
	}
	if t.kept[dir] == nil {
		t.kept[dir] = map[ebpf.ProgramID]bool{}
		t.OnCommit(func() error { return releasePrograms(dir, t.kept[dir]) })
	}
	t.kept[dir][id] = true
	if isNew {
		t.OnUndo(func() error { return release(numberPin(dir, programKind, uint32(id))) })
	}
	return nil
}

// ClaimLink gives the link of an interface the name pin, if it has the name other. A link that has
// the name pin gets the name other: interfaces can have changed their parts since an earlier
// process. No link is detached, except for one that UpdateLink would detach first.
func (t *Takeover) ClaimLink(pin, other string, ifindex int) error {
	for _, unfinished := range []string{next(pin), next(other)} {
		if err := DetachLink(unfinished); err != nil {
			return err
		}
	}
	attached, err := AttachedTo(other)
	if err != nil || attached != ifindex {
		return err
	}
	back := func() error { return exchange(other, pin) }
	err = exchange(other, pin)
	if errors.Is(err, unix.ENOENT) {
		back = func() error { return os.Rename(pin, other) }
		err = os.Rename(other, pin)
	}
	if err != nil {
		return fmt.Errorf("rename %s to %s: %w", other, pin, err)
	}
	t.OnUndo(back)
	return nil
}

func exchange(a, b string) error {
	return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
}

// PinLink pins a new link of a program, and closes it when the takeover ends. A link that is pinned
// there already works until then.
func (t *Takeover) PinLink(l link.Link, prog *ebpf.Program, pin string) error {
	t.held = append(t.held, l)
	t.OnUndo(l.Detach)
	if err := t.keep(prog, filepath.Dir(pin)); err != nil {
		return err
	}
	return t.pin(l, pin, DetachLink)
}

// Pin pins a program or a map at path, in one step. The object must not have been pinned before.
// What is pinned at path already is kept until the takeover ends.
func (t *Takeover) Pin(object pinnable, path string) error { return t.pin(object, path, os.Remove) }

// pin exchanges the pins, so that undo need not make one. The function remove is for the old pin.
func (t *Takeover) pin(object pinnable, path string, remove func(path string) error) error {
	next, err := pinNext(object, path)
	if err != nil {
		return err
	}
	err = exchange(next, path)
	if errors.Is(err, unix.ENOENT) { // nothing is pinned there
		if err = os.Rename(next, path); err == nil {
			t.OnUndo(func() error { return os.Remove(path) })
			return nil
		}
	}
	if err != nil {
		return errors.Join(fmt.Errorf("pin %s: %w", path, err), os.Remove(next))
	}
	t.OnUndo(func() error { return os.Rename(next, path) })
	t.OnCommit(func() error { return remove(next) })
	return nil
}
