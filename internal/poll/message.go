// SPDX-License-Identifier: Apache-2.0

// Package poll lets balancers ask agents for the loads of services, and agents answer. Requests and
// answers are UDP datagrams with a tag, which only nodes with a signal key can make.
// docs/understand/protocol.md describes them.
package poll

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/dchest/siphash"

	"github.com/segue-lb/segue/internal/desired"
)

// Service is the key of a service in a message.
type Service struct {
	VIP      netip.Addr
	Port     uint16 // 0: all ports
	Protocol uint8  // the number of IP: 6 or 17
}

// Load is the load of a service on a server, in units of the server's load source.
type Load struct {
	Busy     uint32
	Capacity uint32 // 0: not known
}

// kind tells what a message is.
type kind uint8

const (
	request kind = 1
	// known is an answer with a load.
	known kind = 2
	// unknown is an answer of an agent that does not have the service, or not its load.
	unknown kind = 3
)

// message is a request or an answer.
type message struct {
	kind    kind
	nonce   uint64 // of the request; the answer repeats it
	service Service
	load    Load // of an answer of kind known
}

const (
	// size is the number of bytes of each message. An answer is as long as a request, so polls are
	// of no use for amplification.
	size = 72
	// tagAt is the offset of the tag. The tag is a hash of the 64 bytes before it. Tags of signals
	// are hashes of 48 or 56 bytes. SipHash also hashes the length, so the tag of a signal is of no
	// use for a message.
	tagAt = 64
	// version is the version of the messages.
	version = 1
)

// magic begins all messages.
var magic = [4]byte{'S', 'L', 'o', 'd'}

// errTag tells that a message has no tag that one of the keys made.
var errTag = errors.New("the tag is wrong")

// encode returns the message with a tag made by the key.
func (m *message) encode(key desired.SignalKey) []byte {
	b := make([]byte, size)
	copy(b, magic[:])
	b[4], b[5], b[6] = version, byte(m.kind), m.service.Protocol
	binary.BigEndian.PutUint64(b[8:], m.nonce)
	vip := m.service.VIP.As16()
	copy(b[16:], vip[:])
	binary.BigEndian.PutUint16(b[32:], m.service.Port)
	binary.BigEndian.PutUint32(b[40:], m.load.Busy)
	binary.BigEndian.PutUint32(b[44:], m.load.Capacity)
	binary.LittleEndian.PutUint64(b[tagAt:], tag(b, key))
	return b
}

// tag returns the tag of a message.
func tag(b []byte, key desired.SignalKey) uint64 {
	return siphash.Hash(
		binary.LittleEndian.Uint64(key[:8]), binary.LittleEndian.Uint64(key[8:]), b[:tagAt])
}

// decode returns the message in a datagram, if one of the keys made its tag.
func decode(b []byte, keys desired.SignalKeys) (m message, err error) {
	switch {
	case len(b) != size:
		return m, fmt.Errorf("%d bytes, not %d", len(b), size)
	case [4]byte(b) != magic:
		return m, errors.New("another protocol")
	case !isTagged(b, keys):
		return m, errTag
	case b[4] != version:
		return m, fmt.Errorf("version %d, not %d", b[4], version)
	}
	m = message{
		kind: kind(b[5]), nonce: binary.BigEndian.Uint64(b[8:]),
		service: Service{
			VIP:      netip.AddrFrom16([16]byte(b[16:32])).Unmap(),
			Port:     binary.BigEndian.Uint16(b[32:]),
			Protocol: b[6],
		},
		load: Load{binary.BigEndian.Uint32(b[40:]), binary.BigEndian.Uint32(b[44:])},
	}
	return m, nil
}

func isTagged(b []byte, keys desired.SignalKeys) bool {
	got := binary.LittleEndian.Uint64(b[tagAt:])
	for _, key := range keys {
		if tag(b, key) == got {
			return true
		}
	}
	return false
}
