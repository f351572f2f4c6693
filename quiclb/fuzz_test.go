// SPDX-License-Identifier: Apache-2.0

package quiclb

import (
	"bytes"
	"testing"
)

// FuzzServerID reads any bytes of a client as a connection ID. If they name a server, they equal an
// ID that this server could have issued.
func FuzzServerID(f *testing.F) {
	f.Add([]byte{0x20, 1, 2, 3, 4, 5, 6, 7, 8, 9}, uint8(1), 3, 6, false)
	f.Add([]byte{0xd3}, uint8(6), 15, 4, true)
	f.Add([]byte(nil), uint8(0), 1, 18, false)
	f.Fuzz(func(t *testing.T, cid []byte, rotation uint8, idLength, nonceLength int, encodesLength bool) {
		c := Config{Rotation: rotation, ServerIDLength: idLength, NonceLength: nonceLength, EncodeLength: encodesLength}
		if c.Validate() != nil {
			return
		}
		id, ok := c.ServerID(cid)
		if !ok {
			return
		}
		issued, err := c.Encode(id, cid[1+idLength:c.Length()])
		if err != nil || !bytes.Equal(issued[1:], cid[1:c.Length()]) {
			t.Errorf("% x names % x, which would issue % x: %v", cid, id, issued, err)
		}
	})
}
