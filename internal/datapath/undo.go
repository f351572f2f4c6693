// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"

	"github.com/cilium/ebpf"
)

// Takeover is one attempt of this process to replace the programs and maps of an earlier process.
// It knows how to undo its steps. TakeOver makes it.
type Takeover struct {
	undo   []func() error
	commit []func() error
	held   []io.Closer // what undo needs
	// kept are the programs that the takeover has pinned by number, by the directory of the instance.
	kept map[string]map[ebpf.ProgramID]bool
}

// TakeOver runs the steps. If they return an error, TakeOver undoes them in reverse order, so that
// packets meet no other states than before. Then it returns that error. If the steps succeed, it
// removes the objects that the steps have replaced. A failed removal does no other harm, so it is
// only logged.
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

// end runs the functions, the last one first. It continues after errors.
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

// OnCommit adds a function that removes what a step has replaced.
func (t *Takeover) OnCommit(f func() error) { t.commit = append(t.commit, f) }

// Undo removes what Pin has pinned. It is for a process that ends before it has attached its
// programs.
func (l *Loader) Undo() error {
	if l.isFirst {
		return RemoveDir(l.Instance)
	}
	var errs []error
	for _, name := range l.missing {
		errs = append(errs, release(l.PathOf(name)))
	}
	return errors.Join(errs...)
}
