// SPDX-License-Identifier: Apache-2.0

package serversets

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
)

// Digest returns a hash of the sets of a service and of its history. The history is the number of
// servers that a column keeps, or 0 if the service does not find flows by columns. Balancers whose
// digests of a service are equal have the same candidate tables.
func Digest(sets []Set, history int) uint32 {
	text, err := json.Marshal(sets)
	if err != nil {
		panic(err) // sets contain only numbers and strings
	}
	if history > 0 {
		text = fmt.Append(text, history)
	}
	sum := sha256.Sum256(text)
	return binary.BigEndian.Uint32(sum[:])
}
