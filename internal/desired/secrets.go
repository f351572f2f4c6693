// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"maps"
	"slices"
)

// Secrets are the contents of the files with keys and passwords that a configuration file names. A
// process reads them only together with the configuration file. So a change of services by an
// operator neither depends on these files nor makes a new key or password take effect.
type Secrets struct {
	SignalKeys SignalKeys
	Passwords  Passwords
}

// SignalKey is a key of SipHash-2-4. Its bytes have the order of the test vectors in SipHash's
// paper.
type SignalKey [16]byte

// SignalKeys are the keys of a node. The node makes tags with the first key, and accepts tags made
// with any of the keys.
type SignalKeys []SignalKey

// Passwords are the passwords of BGP peers, by the names of the peers.
type Passwords map[string]string

// ChangedFrom lists the peers that have a password, and had a different one before.
func (p Passwords) ChangedFrom(before Passwords) (peers []string) {
	for _, name := range slices.Sorted(maps.Keys(p)) {
		if was, ok := before[name]; ok && was != p[name] {
			peers = append(peers, name)
		}
	}
	return peers
}
