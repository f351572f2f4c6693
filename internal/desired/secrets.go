// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"maps"
	"net/netip"
	"slices"
)

// Secrets are the contents of the files with keys and passwords that a configuration file names. A
// process reads them only together with the configuration file. So a change of services by an
// operator neither depends on these files nor makes a new key or password take effect.
type Secrets struct {
	SignalKeys SignalKeys
	Passwords  Passwords
}

// SignalKey is a key of SipHash-2-4, in the order of its bytes in the paper's test vectors.
type SignalKey [16]byte

// SignalKeys are the keys of a node. It makes tags by the first key, and accepts tags of all keys.
type SignalKeys []SignalKey

// Passwords are those of peers, by their addresses.
type Passwords map[netip.Addr]string

// ChangedFrom lists the peers that had a password before, and have another one now.
func (p Passwords) ChangedFrom(before Passwords) (peers []string) {
	for _, address := range slices.SortedFunc(maps.Keys(p), netip.Addr.Compare) {
		if was, ok := before[address]; ok && was != p[address] {
			peers = append(peers, address.String())
		}
	}
	return peers
}
