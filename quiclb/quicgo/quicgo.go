// SPDX-License-Identifier: Apache-2.0

// Package quicgo lets servers that use quic-go issue connection IDs that name them (package
// quiclb):
//
//	generator, err := quicgo.New(quiclb.Config{ServerIDLength: 3, NonceLength: 8}, serverID)
//	...
//	transport := &quic.Transport{Conn: conn, ConnectionIDGenerator: generator}
//
// The transport then issues such IDs in the handshake, in Retry packets and in NEW_CONNECTION_ID
// frames.
package quicgo

import (
	"slices"

	"github.com/quic-go/quic-go"

	"github.com/segue-lb/segue/quiclb"
)

// Generator generates the connection IDs of one server. It is a quic.ConnectionIDGenerator. Several
// goroutines and transports may use it at the same time.
type Generator struct {
	config   quiclb.Config
	serverID []byte
}

// New returns the generator of a server. It returns an error that names the field of the
// configuration that is not valid, or the server ID if its length is not that of the configuration.
func New(config quiclb.Config, serverID []byte) (*Generator, error) {
	if _, err := config.Generate(serverID); err != nil {
		return nil, err
	}
	return &Generator{config, slices.Clone(serverID)}, nil
}

// GenerateConnectionID returns a new connection ID. The error is always nil.
func (g *Generator) GenerateConnectionID() (quic.ConnectionID, error) {
	id, err := g.config.Generate(g.serverID)
	if err != nil {
		return quic.ConnectionID{}, err
	}
	return quic.ConnectionIDFromBytes(id), nil
}

// ConnectionIDLen returns the length of the connection IDs, 6 to 20 octets.
func (g *Generator) ConnectionIDLen() int { return g.config.Length() }
