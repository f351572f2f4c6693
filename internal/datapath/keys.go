// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/config"
)

// SetSignalKeys makes a data path use these keys for the tags of signals, one or two, or no tags if there are none. The map
// is signal_keys of bpf/net/tag.h, whose element is replaced whole.
func SetSignalKeys(m *ebpf.Map, keys config.SignalKeys) error {
	if len(keys) == 0 {
		if err := m.Delete(uint32(0)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete the keys of signals: %w", err)
		}
		return nil
	}
	element := [...]config.SignalKey{keys[0], keys[len(keys)-1]}
	if err := m.Put(uint32(0), element); err != nil {
		return fmt.Errorf("set the keys of signals: %w", err)
	}
	return nil
}
