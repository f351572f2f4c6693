// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// Detach detaches the programs of an instance, the last of the hooks first. It returns an error,
// and detaches nothing, if the instance has filters in another network namespace than that of the
// calling thread, because Detach could not find these filters.
func Detach(instance string, hooks []Hook) error {
	// An instance has either tcx links or filters.
	hasTCX := slices.ContainsFunc(hooks, func(h Hook) bool {
		_, err := os.Stat(filepath.Join(Dir(instance), h.Pin))
		return h.At != ebpf.AttachXDP && err == nil
	})
	if !hasTCX {
		if err := CheckNamespace(instance, hooks); err != nil {
			return err
		}
	}
	var errs []error
	for _, hook := range slices.Backward(hooks) {
		errs = append(errs, DetachLink(filepath.Join(Dir(instance), hook.Pin)))
	}
	if err := errors.Join(errs...); err != nil || hasTCX {
		return err
	}
	return RemoveFilters(instance)
}

// DetachLink detaches a program from its interface and removes the link's pin. It detaches
// explicitly, because the kernel detaches a link only some time after its pin is removed.
// DetachLink returns nil if the link does not exist.
func DetachLink(pin string) error {
	l, err := link.LoadPinnedLink(pin, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", pin, err)
	}
	if err := errors.Join(l.Detach(), l.Unpin(), l.Close()); err != nil {
		return fmt.Errorf("detach %s: %w", pin, err)
	}
	return nil
}
