// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"net"

	"github.com/segue-lb/segue/internal/desired"
)

// The constants of programs about the underlay: bpf/net/underlay.h.
const (
	UnderlayPort    = "underlay_port"
	UnderlaySources = "underlay_sources"
)

// underlayPrefix is struct underlay_prefix of bpf/net/underlay.h, in network order.
type underlayPrefix struct{ Address, Mask [4]byte }

// UnderlayConstants returns the constants of programs for an underlay; nil: there is none.
func UnderlayConstants(u *desired.Underlay) map[string]any {
	var port [2]byte
	var sources [desired.MostUnderlaySources]underlayPrefix
	if u != nil {
		binary.BigEndian.PutUint16(port[:], u.Port)
		for i, prefix := range u.Sources {
			mask := net.CIDRMask(prefix.Bits(), 32)
			sources[i] = underlayPrefix{prefix.Addr().As4(), [4]byte(mask)}
		}
	}
	return map[string]any{UnderlayPort: port, UnderlaySources: sources}
}
