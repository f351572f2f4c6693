// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"
	"math/rand/v2"
)

// BeginTurns makes a service begin at a random turn of placement round-robin. Otherwise the first
// flows of all balancers would go to the same servers. BeginTurns returns an error if the counter
// cannot be read or written.
func (p *Plane) BeginTurns(id uint32) error {
	if err := p.backup.keepTurns(id); err != nil {
		return err
	}
	if err := p.Objects.Turns.Put(id, uint64(rand.Uint32())); err != nil {
		return fmt.Errorf("first turn of service %d: %w", id, err)
	}
	return nil
}
