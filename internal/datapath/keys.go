// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/desired"
)

// SetSignalKeys sets the keys for the tags of signals in a data path, at most two. A single key
// takes both places. Without keys, signals have no tags. m is the map signal_keys of bpf/net/tag.h.
// Its element is replaced as a whole.
func SetSignalKeys(m *ebpf.Map, keys desired.SignalKeys) error {
	if len(keys) == 0 {
		if err := m.Delete(uint32(0)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete the keys of signals: %w", err)
		}
		return nil
	}
	element := [...]desired.SignalKey{keys[0], keys[len(keys)-1]}
	if err := m.Put(uint32(0), element); err != nil {
		return fmt.Errorf("set the keys of signals: %w", err)
	}
	return nil
}
