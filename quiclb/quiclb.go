// SPDX-License-Identifier: Apache-2.0

// Package quiclb makes and reads QUIC connection IDs that name their server, in the plaintext form
// of draft-ietf-quic-load-balancers-21 ("quic-lb-21" for short). A balancer that reads the server
// ID keeps a connection on its server when the client's address changes, without a flow table.
//
// A connection ID consists of the first octet, the server ID and the nonce:
//
//	first octet      1 octet         3 bits config rotation, 5 bits length or random
//	server ID        1 to 15 octets
//	nonce            4 to 18 octets
//
// The whole ID has at most 20 octets, the limit of QUIC version 1 (RFC 9000 section 17.2). The
// server ID is not encrypted: whoever sees a packet learns which server has the connection.
//
// This package depends on the standard library only. Package quicgo below it is a generator for
// servers that use quic-go. docs/operate/quic.md has a guide.
package quiclb

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
)

// Limits of the draft, in octets except for MaxRotation (sections 3.1 and 5.3). MaxServerIDLength
// and MaxNonceLength follow from the other limits.
const (
	MaxRotation       = 6 // 7 marks connection IDs that name no server
	MinServerIDLength = 1
	MaxServerIDLength = maxBlockLength - MinNonceLength
	MinNonceLength    = 4
	MaxNonceLength    = maxBlockLength - MinServerIDLength

	maxBlockLength = 19 // server ID and nonce together
)

// The first octet (section 3.4).
const (
	rotationShift = 5
	lengthMask    = 1<<rotationShift - 1
)

// Config is the form of connection IDs. All servers of a service and its balancers must use the
// same form.
type Config struct {
	// Rotation is the config rotation codepoint, 0 to 6. It tells balancers which of several
	// configurations a connection ID has, while servers change from one to the next (section 3.1).
	Rotation uint8
	// ServerIDLength is the length of server IDs, 1 to 15 octets.
	ServerIDLength int
	// NonceLength is the length of nonces, 4 to 18 octets. Together with the server ID it is at
	// most 19 octets. A nonce of 8 octets or more keeps random nonces from repeating.
	NonceLength int
	// EncodeLength puts the number of octets after the first octet into that octet (section 3.3).
	// Otherwise these five bits are random.
	EncodeLength bool
}

// ConnectionID is a QUIC connection ID, 6 to 20 octets.
type ConnectionID []byte

// String returns the connection ID as hexadecimal digits.
func (id ConnectionID) String() string { return hex.EncodeToString(id) }

// ParseServerID reads a server ID from an even number of hexadecimal digits, such as "c4605e". It
// returns an error that quotes the text if the text has another form, or not 1 to 15 octets.
func ParseServerID(text string) ([]byte, error) {
	id, err := hex.DecodeString(text)
	if err != nil {
		return nil, fmt.Errorf("server ID %q: must be an even number of hexadecimal digits", text)
	}
	if len(id) < MinServerIDLength || len(id) > MaxServerIDLength {
		return nil, fmt.Errorf("server ID %q: is %d octets, must be %d to %d",
			text, len(id), MinServerIDLength, MaxServerIDLength)
	}
	return id, nil
}

// Validate returns an error that names the first field outside its range, and its value.
func (c Config) Validate() error {
	switch {
	case c.Rotation > MaxRotation:
		return fmt.Errorf("rotation %d: must be 0 to %d", c.Rotation, MaxRotation)
	case c.ServerIDLength < MinServerIDLength || c.ServerIDLength > MaxServerIDLength:
		return fmt.Errorf("server ID length %d: must be %d to %d octets",
			c.ServerIDLength, MinServerIDLength, MaxServerIDLength)
	case c.NonceLength < MinNonceLength || c.NonceLength > MaxNonceLength:
		return fmt.Errorf("nonce length %d: must be %d to %d octets",
			c.NonceLength, MinNonceLength, MaxNonceLength)
	case c.blockLength() > maxBlockLength:
		return fmt.Errorf("nonce length %d: must be at most %d with server IDs of %d octets",
			c.NonceLength, maxBlockLength-c.ServerIDLength, c.ServerIDLength)
	}
	return nil
}

// Length returns the length of all connection IDs of a valid configuration, 6 to 20 octets.
func (c Config) Length() int { return 1 + c.blockLength() }

// blockLength returns the length of server ID and nonce together.
func (c Config) blockLength() int { return c.ServerIDLength + c.NonceLength }

// Generate returns a new connection ID with a nonce from crypto/rand. Observers cannot tell whether
// two IDs with the same server ID belong to one connection (section 5.4). Several goroutines may
// call Generate at the same time. The errors are those of Encode.
func (c Config) Generate(serverID []byte) (ConnectionID, error) {
	nonce := make([]byte, max(c.NonceLength, 0)) // Encode refuses a length below 0
	_, _ = rand.Read(nonce)                      // never fails
	return c.Encode(serverID, nonce)
}

// Encode returns the connection ID with this server ID and this nonce (section 5.4). The nonce must
// be new, and must not have a visible relation to other nonces; Generate chooses such nonces.
// Without EncodeLength, five bits of the first octet are random.
//
// Encode returns an error if the configuration is not valid, or if the length of the server ID or
// of the nonce is not that of the configuration.
func (c Config) Encode(serverID, nonce []byte) (ConnectionID, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if len(serverID) != c.ServerIDLength {
		return nil, fmt.Errorf("server ID %x: is %d octets, must be %d",
			serverID, len(serverID), c.ServerIDLength)
	}
	if len(nonce) != c.NonceLength {
		return nil, fmt.Errorf("nonce %x: is %d octets, must be %d", nonce, len(nonce), c.NonceLength)
	}
	id := make(ConnectionID, 0, c.Length())
	id = append(id, c.firstOctet())
	id = append(id, serverID...)
	return append(id, nonce...), nil
}

// firstOctet returns the first octet of a new ID: the rotation, and the length or random bits.
func (c Config) firstOctet() byte {
	low := [1]byte{byte(c.blockLength())}
	if !c.EncodeLength {
		_, _ = rand.Read(low[:]) // never fails
	}
	return c.Rotation<<rotationShift | low[0]&lengthMask
}

// ServerID returns the server ID in a connection ID, as a balancer reads it (section 5.5). Octets
// after the connection ID are ignored, so cid may be a packet with a short header from its second
// octet on. The result is a part of cid.
//
// ServerID reports false for connection IDs that name no server in this configuration (section
// 4.1): those with another rotation, those shorter than Length, and with EncodeLength those whose
// first octet tells another length. An ID that the client chose for its first packets may pass by
// chance, so callers compare the server ID with those of the servers. ServerID also reports false
// if the configuration is not valid.
func (c Config) ServerID(cid []byte) ([]byte, bool) {
	if c.Validate() != nil || len(cid) < c.Length() || cid[0]>>rotationShift != c.Rotation {
		return nil, false
	}
	if c.EncodeLength && int(cid[0]&lengthMask) != c.blockLength() {
		return nil, false
	}
	return cid[1 : 1+c.ServerIDLength], true
}
