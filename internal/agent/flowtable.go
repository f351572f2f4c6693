// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"

	"github.com/cilium/ebpf"
)

// flowKeysOf returns the hash keys of the flow table that an earlier process has left. If there is
// none, it makes random keys.
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
	keys.Key[0] &^= 1 // odd in tables of a former build: bpf/agent/flowtable.h
	return keys, nil
}

// hasFormerPlaces tells whether the flow table with these keys was made by a former build, whose
// hash for a flow's bucket it keeps: agent_place_is_former in bpf/agent/flowtable.h.
func hasFormerPlaces(keys *agentAgentFlowKeys) bool { return keys.Key[0]&1 == 1 }

// constants returns the constants of the data path that depend on its keys.
func constants(keys *agentAgentFlowKeys) map[string]any {
	return map[string]any{agentVarAgentKeys: keys.Key}
}
