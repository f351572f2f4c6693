// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// Replace makes a hash table hold exactly these elements. Elements that it holds before and after
// never disappear in between.
func Replace[K comparable, V any](m *ebpf.Map, want map[K]V) error {
	for key, value := range want {
		if err := m.Put(key, value); err != nil {
			return fmt.Errorf("write to %s: %w", m, err)
		}
	}
	return Keep(m, want)
}

// Keep deletes from a hash table all elements whose keys are not in want.
func Keep[K comparable, V any](m *ebpf.Map, want map[K]V) error {
	var unwanted []K
	var key, next K
	err := m.NextKey(nil, &next)
	for ; err == nil; err = m.NextKey(&key, &next) {
		key = next
		if _, ok := want[key]; !ok {
			unwanted = append(unwanted, key)
		}
	}
	if !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("read %s: %w", m, err)
	}
	for _, key := range unwanted {
		if err := m.Delete(key); err != nil {
			return fmt.Errorf("delete from %s: %w", m, err)
		}
	}
	return nil
}
