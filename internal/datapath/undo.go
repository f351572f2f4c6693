// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Takeover is one attempt of this process to replace the programs and maps of an earlier process.
// It knows how to undo its steps. TakeOver makes it.
type Takeover struct {
	undo   []func() error
	commit []func() error
	held   []io.Closer             // objects that undo needs
	kept   map[ebpf.ProgramID]bool // programs that the takeover has pinned by number
}

// TakeOver runs the steps. If they return an error, TakeOver undoes them in reverse order, so that
// packets meet only states that the steps have gone through. Then it returns that error. If the
// steps succeed, it removes the objects that the steps have replaced. A failed removal is only
// logged, because the new programs and maps work nevertheless.
func TakeOver(log *slog.Logger, steps func(*Takeover) error) error {
	t := &Takeover{}
	if err := steps(t); err != nil {
		if undo := t.end(t.undo); undo != nil {
			return fmt.Errorf("%w; the earlier state is not fully restored: %w", err, undo)
		}
		return err
	}
	if err := t.end(t.commit); err != nil {
		log.Error("remove the pins of an earlier process", "error", err)
	}
	return nil
}

// end runs the functions, the last one first, and closes the objects in held. It continues after
// errors.
func (t *Takeover) end(functions []func() error) error {
	var errs []error
	for _, f := range slices.Backward(functions) {
		errs = append(errs, f())
	}
	for _, object := range t.held {
		errs = append(errs, object.Close())
	}
	return errors.Join(errs...)
}

// OnUndo adds a function that undoes a step.
func (t *Takeover) OnUndo(f func() error) { t.undo = append(t.undo, f) }

// OnCommit adds a function that removes the objects that a step has replaced.
func (t *Takeover) OnCommit(f func() error) { t.commit = append(t.commit, f) }

// Pin pins a program or a map at path, in one step. The object must not have been pinned before.
// An object that is pinned at path already keeps another pin until the takeover ends.
func (t *Takeover) Pin(object pinnable, path string) error { return t.pin(object, path, os.Remove) }

// pin exchanges the new pin with the old one, so that undo need not pin the old object again. If
// the takeover succeeds, the function remove finally removes the old pin. If nothing is pinned at
// path, pin only adds the new pin, and undo removes it.
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

// exchange exchanges the names of two pins in one step.
func exchange(a, b string) error {
	return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
}

// Undo removes the pins of Pin. If Load has made the directory of the pins, it removes the
// whole directory. Undo is for a process that ends before it has attached its programs.
func (l *Loader) Undo() error {
	if l.madeDir {
		return RemoveDir(l.Instance)
	}
	var errs []error
	for _, name := range l.missing {
		errs = append(errs, release(l.PathOf(name)))
	}
	return errors.Join(errs...)
}
