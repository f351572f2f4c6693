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

// SignalKey is a key of SipHash-2-4. Its bytes have the order of the test vectors in SipHash's
// paper.
type SignalKey [16]byte

// SignalKeys are the keys of a node. The node makes tags with the first key, and accepts tags made
// with any of the keys.
type SignalKeys []SignalKey

// Passwords are the passwords of BGP peers, by the addresses of the peers.
type Passwords map[netip.Addr]string

// ChangedFrom lists the peers that have a password, and had a different one before.
func (p Passwords) ChangedFrom(before Passwords) (peers []string) {
	for _, address := range slices.SortedFunc(maps.Keys(p), netip.Addr.Compare) {
		if was, ok := before[address]; ok && was != p[address] {
			peers = append(peers, address.String())
		}
	}
	return peers
}
