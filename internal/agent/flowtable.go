// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"

	"github.com/cilium/ebpf"
)

// flowKeysOf returns the hash keys of the flow table. They are in kept, the map that an earlier
// process has left. If kept is nil, the keys are new and random.
func flowKeysOf(kept *ebpf.Map) (keys agentAgentFlowKeys, err error) {
	if kept != nil {
		if err := kept.Lookup(uint32(0), &keys); err != nil {
			return keys, fmt.Errorf("read %s: %w", kept, err)
		}
		return keys, nil
	}
	if err := binary.Read(rand.Reader, binary.NativeEndian, &keys); err != nil {
		return keys, fmt.Errorf("make hash keys: %w", err)
	}
	return keys, nil
}

// constants returns the constants that hold the hash keys in the programs.
func constants(keys *agentAgentFlowKeys) map[string]any {
	return map[string]any{agentVarAgentKeys: keys.Key}
}
