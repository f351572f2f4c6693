// SPDX-License-Identifier: Apache-2.0

package serversets

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
)

// Digest identifies sets, and the history of columns in servers (0: the service finds no flows by
// columns). Balancers whose digests of a service are equal have the same candidate tables.
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
