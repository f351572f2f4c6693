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
	for _, words := range []any{&keys.Place, &keys.Signature} {
		if err := binary.Read(rand.Reader, binary.NativeEndian, words); err != nil {
			return keys, fmt.Errorf("make hash keys: %w", err)
		}
	}
	for i := range keys.Place {
		keys.Place[i] |= 1
	}
	return keys, nil
}

// constants returns the constants of the data path that depend on its keys.
func constants(keys *agentAgentFlowKeys) map[string]any {
	return map[string]any{
		agentVarAgentPlaceKeys: keys.Place, agentVarAgentSignatureKeys: keys.Signature,
	}
}
