// SPDX-License-Identifier: Apache-2.0

package packettest

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/dchest/siphash"

	"github.com/segue-lb/segue/internal/srv6"
)

// Tag returns the tag of a server's signal about a flow. The tag is the argument of the balancer's
// SID; see docs/understand/protocol.md. sender is the locator of the server. report is the argument
// of the server's own SID. As in the paper on SipHash, the first 8 bytes of the key are its first
// word.
func Tag(
	key [16]byte, function srv6.Function, sender netip.Prefix, report uint64, client, vip netip.AddrPort,
) uint64 {
	clientAddress, vipAddress, locator := client.Addr().As16(), vip.Addr().As16(), sender.Addr().As16()
	message := slices.Concat(clientAddress[:], vipAddress[:])
	for _, number := range []uint16{client.Port(), vip.Port(), uint16(function), 0} {
		message = binary.BigEndian.AppendUint16(message, number)
	}
	message = append(message, locator[:8]...)
	if report != 0 {
		message = binary.BigEndian.AppendUint64(message, report)
	}
	hash := siphash.New(key[:])
	hash.Write(message)
	return binary.BigEndian.Uint64(hash.Sum(nil)) >> 16 // its first six bytes
}
