// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"

	"github.com/cilium/ebpf"
)

// WriteIdentity writes the identity of this process, which is its hash keys and the version of its
// tables. WriteIdentity returns an error if the table cannot be written.
func (p *Plane) WriteIdentity() error {
	if err := p.Objects.Identity.Put(uint32(0), p.identity); err != nil {
		return fmt.Errorf("write identity: %w", err)
	}
	return nil
}

// identityOf returns the identity of the tables that an earlier process has left. If there are
// none, it makes random hash keys. The keys for buckets always follow from the seed.
func identityOf(kept *ebpf.Map, seed uint64) (*Identity, error) {
	identity := Identity{Version: uint64(balancerTablesVersionTABLES_VERSION)}
	if kept != nil {
		if err := readIdentity(kept, &identity); err != nil {
			return nil, err
		}
	} else {
		for _, keys := range []any{&identity.FlowKeys, &identity.ServiceKeys} {
			if err := binary.Read(rand.Reader, binary.NativeEndian, keys); err != nil {
				return nil, fmt.Errorf("make hash keys: %w", err)
			}
		}
		for i := range identity.ServiceKeys {
			identity.ServiceKeys[i] |= 1 // all are odd
		}
	}
	identity.BucketKeys = bucketKeys(seed)
	return &identity, nil
}

// readIdentity reads the identity of tables. It returns otherVersion if this build cannot use
// tables of their version.
func readIdentity(m *ebpf.Map, identity *Identity) error {
	if err := m.Lookup(uint32(0), identity); err != nil {
		return fmt.Errorf("read identity: %w", err)
	}
	if identity.Version != uint64(balancerTablesVersionTABLES_VERSION) {
		return otherVersion(identity.Version)
	}
	return nil
}

// otherVersion is the error that tables have this version instead of the build's.
type otherVersion uint64

func (v otherVersion) Error() string {
	return fmt.Sprintf("the tables were made by another build of segue (table version %d; this build: %d)",
		uint64(v), uint64(balancerTablesVersionTABLES_VERSION))
}

func (v otherVersion) Unwrap() error { return ebpf.ErrMapIncompatible }
