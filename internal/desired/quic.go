// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"encoding/hex"

	"github.com/segue-lb/segue/internal/field"
	"github.com/segue-lb/segue/quiclb"
)

// QUICForm names a form of QUIC connection IDs.
type QUICForm string

// QUICLB21 is the plaintext form of draft-ietf-quic-load-balancers-21 (package quiclb).
const QUICLB21 QUICForm = "quic-lb-21"

// QUIC is the form of the connection IDs that the servers of a service issue. The fields after Form
// are those of quiclb.Config.
type QUIC struct {
	Form           QUICForm `yaml:"form"` // default quic-lb-21
	Rotation       uint8    `yaml:"rotation" range:"0 to 6"`
	ServerIDLength int      `yaml:"server-id-length" range:"1 to 15"` // default 8
	// NonceLength is 8 by default, or less if the server ID leaves less room.
	NonceLength  int  `yaml:"nonce-length" range:"4 to 18"`
	EncodeLength bool `yaml:"encode-length"`
}

// Config returns the form as servers configure it.
func (q *QUIC) Config() quiclb.Config {
	return quiclb.Config{
		Rotation: q.Rotation, ServerIDLength: q.ServerIDLength, NonceLength: q.NonceLength,
		EncodeLength: q.EncodeLength,
	}
}

// QUICServerID returns the server ID in the connection IDs of a server, or nil if the server has no
// valid one.
func (s *Server) QUICServerID() []byte {
	id, err := quiclb.ParseServerID(s.QUICID)
	if err != nil {
		return nil
	}
	return id
}

// mostNonce returns the greatest length of nonces, in octets, beside server IDs of a length.
func mostNonce(serverIDLength int) int {
	return quiclb.MaxNonceLength + quiclb.MinServerIDLength - serverIDLength
}

// checkQUIC checks the requirements and the fields of persistence quic.
func (r *rules) checkQUIC(path string, s *Service) {
	at := field.Child(path, "quic")
	if s.Persistence != PersistenceQUIC {
		r.checkNoQUIC(path, s)
		return
	}
	if s.Protocol == TCP {
		r.failf(field.Child(path, "protocol"),
			"must be %s for persistence %s: only packets of QUIC, "+
				"which are datagrams of UDP, have connection IDs",
			UDP, s.Persistence)
	}
	if s.Placement == PlacementHunt || s.Placement == PlacementRoundRobin {
		r.failf(field.Child(path, "placement"),
			"must be %s for persistence %s: a client sends several packets "+
				"before it knows the server's connection ID, "+
				"and only %s leads all of them to one server",
			PlacementHash, s.Persistence, PlacementHash)
	}
	if s.QUIC == nil {
		r.failf(at, "required by persistence %s", s.Persistence)
		return
	}
	checkKnown(r, field.Child(at, "form"), s.QUIC.Form, QUICLB21)
	length := s.QUIC.ServerIDLength
	if length < quiclb.MinServerIDLength || length > quiclb.MaxServerIDLength {
		return // checkRanges reports it
	}
	if most := mostNonce(length); s.QUIC.NonceLength > most {
		r.failf(field.Child(at, "nonce-length"),
			"must be at most %d with server IDs of %d octets: "+
				"a connection ID has at most 20 octets", most, length)
	}
	r.checkQUICIDs(field.Child(path, "servers"), s)
}

// checkNoQUIC checks that a service with another persistence has no fields of persistence quic.
func (r *rules) checkNoQUIC(path string, s *Service) {
	const unused = "not used by persistence %s"
	if s.QUIC != nil {
		r.failf(field.Child(path, "quic"), unused, s.Persistence)
	}
	servers := field.Child(path, "servers")
	for i := range s.Servers {
		at := field.Child(field.Item(servers, i), "quic-id")
		if s.Servers[i].QUICID != "" {
			r.failf(at, unused, s.Persistence)
		}
	}
}

// checkQUICIDs checks the server IDs of a service.
func (r *rules) checkQUICIDs(servers string, s *Service) {
	seen := map[string]string{}
	for i := range s.Servers {
		at := field.Child(field.Item(servers, i), "quic-id")
		id, err := hex.DecodeString(s.Servers[i].QUICID)
		switch {
		case s.Servers[i].QUICID == "":
			r.failf(at, "required by persistence %s", s.Persistence)
		case err != nil:
			r.failf(at, "must be an even number of hexadecimal digits")
		case len(id) != s.QUIC.ServerIDLength:
			r.failf(at, "must be %d octets, as quic.server-id-length says; is %d",
				s.QUIC.ServerIDLength, len(id))
		default:
			checkUnique(r, seen, string(id), at)
		}
	}
}
