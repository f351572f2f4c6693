// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"encoding/hex"
	"fmt"

	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/quiclb"
)

// QUICForm names a form of QUIC connection IDs.
type QUICForm string

// QUICLB21 is the plaintext form of draft-ietf-quic-load-balancers-21 (package quiclb).
const QUICLB21 QUICForm = "quic-lb-21"

// QUIC is the form of the connection IDs that the servers of a service issue. The fields after Form
// are those of quiclb.Config.
type QUIC struct {
	Form QUICForm `yaml:"form" json:"form"` // default quic-lb-21
	// Rotation is the config rotation codepoint of the form: the first three bits of the IDs.
	Rotation uint8 `yaml:"rotation" json:"rotation" range:"0 to 6"`
	// ServerIDLength is 8 by default.
	ServerIDLength int `yaml:"server-id-length" json:"server_id_length" range:"1 to 15"`
	// NonceLength is 8 by default, or less if the server ID leaves less room.
	NonceLength int `yaml:"nonce-length" json:"nonce_length" range:"4 to 18"`
	// EncodeLength tells whether the first octet of an ID contains the ID's length.
	EncodeLength bool `yaml:"encode-length" json:"encode_length"`
}

// String returns the form with its fields as in the file, such as "quic-lb-21, rotation 0,
// server-id-length 3, nonce-length 8".
func (q *QUIC) String() string {
	text := fmt.Sprintf("%s, rotation %d, server-id-length %d, nonce-length %d",
		q.Form, q.Rotation, q.ServerIDLength, q.NonceLength)
	if q.EncodeLength {
		text += ", encode-length"
	}
	return text
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
func (s *Server) QUICServerID() []byte { return quicServerID(s.QUICID) }

// FormerQUICServerID is QUICServerID for connection IDs of the former form.
func (s *Server) FormerQUICServerID() []byte { return quicServerID(s.FormerQUICID) }

// QUICServerID is Server.QUICServerID for this server.
func (s *AgentService) QUICServerID() []byte { return quicServerID(s.QUICID) }

// FormerQUICServerID is Server.FormerQUICServerID for this server.
func (s *AgentService) FormerQUICServerID() []byte { return quicServerID(s.FormerQUICID) }

// quicServerID reads a server ID. It returns nil if the text is not valid.
func quicServerID(text string) []byte {
	id, err := quiclb.ParseServerID(text)
	if err != nil {
		return nil
	}
	return id
}

// keepsServerIDs tells whether a server can have the same ID in this form and in the former one.
func (q *QUIC) keepsServerIDs(former *QUIC) bool {
	return former != nil && q.ServerIDLength == former.ServerIDLength
}

// mostNonce returns the greatest length of nonces, in octets, if server IDs have a given length.
func mostNonce(serverIDLength int) int {
	return quiclb.MaxNonceLength + quiclb.MinServerIDLength - serverIDLength
}

// checkQUIC checks the requirements and the fields of persistence quic.
func (r *rules) checkQUIC(path string, s *Service) {
	at := fieldpath.Child(path, "quic")
	if !s.Persistence.Method().HasIDs {
		r.checkNoQUIC(path, s)
		return
	}
	r.checkQUICProtocol(path, s.Protocol, fmt.Sprintf("persistence %s", s.Persistence))
	if placement := s.Placement.Method(); placement.Name != "" && !placement.FollowsFlow && !placement.ServersDecide {
		r.failf(fieldpath.Child(path, "placement"),
			"must be %s or %s for persistence %s: a client sends several packets "+
				"before it knows the server's connection ID, "+
				"and only these placements lead all of them to one server",
			PlacementHash, PlacementHunt, s.Persistence)
	}
	if s.QUIC == nil {
		r.failf(at, "required by persistence %s", s.Persistence)
		return
	}
	r.checkQUICForms(path, s.QUIC, s.FormerQUIC)
	if s.FormerQUIC == nil {
		r.checkNoFormerIDs(path, s, withoutFormer)
	}
	r.checkQUICIDs(path, s)
}

const withoutFormer = "not used without former-quic"

// checkQUICProtocol checks that a service is not for TCP. feature names the setting that needs
// connection IDs.
func (r *rules) checkQUICProtocol(path string, protocol Protocol, feature string) {
	if protocol == TCP {
		r.failf(fieldpath.Child(path, "protocol"),
			"must be %s for %s: only packets of QUIC, "+
				"which are datagrams of UDP, have connection IDs",
			UDP, feature)
	}
}

// checkQUICForms checks the present form of a service and, if there is one, the former form.
func (r *rules) checkQUICForms(path string, present, former *QUIC) {
	r.checkQUICForm(fieldpath.Child(path, "quic"), present)
	if former == nil {
		return
	}
	at := fieldpath.Child(path, "former-quic")
	r.checkQUICForm(at, former)
	if former.Rotation == present.Rotation {
		r.failf(fieldpath.Child(at, "rotation"),
			"must not be %d, the rotation of quic: it tells the IDs of both forms apart",
			present.Rotation)
	}
}

// checkQUICForm checks a form of connection IDs.
func (r *rules) checkQUICForm(at string, q *QUIC) {
	checkKnown(r, fieldpath.Child(at, "form"), q.Form, QUICLB21)
	if !q.hasValidIDLength() {
		return // checkRanges reports the error
	}
	if most := mostNonce(q.ServerIDLength); q.NonceLength > most {
		r.failf(fieldpath.Child(at, "nonce-length"),
			"must be at most %d with server IDs of %d octets: "+
				"a connection ID has at most 20 octets", most, q.ServerIDLength)
	}
}

// hasValidIDLength tells whether the length of server IDs is in its range.
func (q *QUIC) hasValidIDLength() bool {
	return q.ServerIDLength >= quiclb.MinServerIDLength &&
		q.ServerIDLength <= quiclb.MaxServerIDLength
}

// checkNoQUIC checks that a service without persistence quic has none of its fields.
func (r *rules) checkNoQUIC(path string, s *Service) {
	unused := fmt.Sprintf("not used by persistence %s", s.Persistence)
	if s.QUIC != nil {
		r.failf(fieldpath.Child(path, "quic"), "%s", unused)
	}
	if s.FormerQUIC != nil {
		r.failf(fieldpath.Child(path, "former-quic"), "%s", unused)
	}
	for i := range s.Servers {
		if s.Servers[i].QUICID != "" {
			at := fieldpath.Item(fieldpath.Child(path, "servers"), i)
			r.failf(fieldpath.Child(at, "quic-id"), "%s", unused)
		}
	}
	r.checkNoFormerIDs(path, s, unused)
}

// checkNoFormerIDs reports each server that has an ID of the former form. problem is the text of
// the error.
func (r *rules) checkNoFormerIDs(path string, s *Service, problem string) {
	for i := range s.Servers {
		if s.Servers[i].FormerQUICID != "" {
			at := fieldpath.Item(fieldpath.Child(path, "servers"), i)
			r.failf(fieldpath.Child(at, "former-quic-id"), "%s", problem)
		}
	}
}

// quicIDs has the server IDs of one form that were checked so far.
type quicIDs struct {
	*QUIC
	field string            // the field of the form: quic or former-quic
	need  string            // the persistence or the field that requires the IDs
	seen  map[string]string // the paths of the IDs so far, by ID
}

// checkQUICIDs checks the server IDs of a service, in each of its forms.
func (r *rules) checkQUICIDs(path string, s *Service) {
	present := quicIDs{s.QUIC, "quic", "persistence quic", map[string]string{}}
	former := formerIDs(s.FormerQUIC)
	for i := range s.Servers {
		server, at := &s.Servers[i], fieldpath.Item(fieldpath.Child(path, "servers"), i)
		r.checkBothQUICIDs(at, server.QUICID, server.FormerQUICID, present, former)
	}
}

// formerIDs begins the check of the server IDs of the former form. form is nil if there is none.
func formerIDs(form *QUIC) quicIDs {
	return quicIDs{form, "former-quic", "former-quic", map[string]string{}}
}

// checkBothQUICIDs checks a server's ID and, if there is a former form, its ID in the former form.
func (r *rules) checkBothQUICIDs(at, id, formerID string, present, former quicIDs) {
	ok := r.checkQUICID(at, id, present)
	// By default, the former ID is the present one. If that is wrong, one error about it suffices.
	isDefault := present.keepsServerIDs(former.QUIC) && formerID == id
	if former.QUIC != nil && (ok || !isDefault) {
		r.checkQUICID(at, formerID, former)
	}
}

// checkAgentQUIC checks the forms and the server IDs of an agent's service.
func (r *rules) checkAgentQUIC(path string, s *AgentService) {
	if s.QUIC == nil {
		const unused = "not used without quic"
		r.refuse(fieldpath.Child(path, "quic-id"), s.QUICID != "", unused)
		r.refuse(fieldpath.Child(path, "former-quic"), s.FormerQUIC != nil, unused)
		r.refuse(fieldpath.Child(path, "former-quic-id"), s.FormerQUICID != "", unused)
		return
	}
	r.checkQUICProtocol(path, s.Protocol, "quic")
	r.checkQUICForms(path, s.QUIC, s.FormerQUIC)
	r.refuse(fieldpath.Child(path, "former-quic-id"), s.FormerQUIC == nil && s.FormerQUICID != "",
		withoutFormer)
	present := quicIDs{s.QUIC, "quic", "quic", map[string]string{}}
	r.checkBothQUICIDs(path, s.QUICID, s.FormerQUICID, present, formerIDs(s.FormerQUIC))
}

// checkQUICID checks a server's ID in one form. server is the path of the server. The result is
// false if the ID breaks a rule.
func (r *rules) checkQUICID(server, text string, of quicIDs) (ok bool) {
	if !of.hasValidIDLength() {
		return false // checkRanges reports it
	}
	at := fieldpath.Child(server, of.field+"-id")
	id, err := hex.DecodeString(text)
	switch {
	case text == "":
		r.failf(at, "required by %s", of.need)
	case err != nil:
		r.failf(at, "must be an even number of hexadecimal digits")
	case len(id) != of.ServerIDLength:
		r.failf(at, "must be %d octets, as %s.server-id-length says; is %d",
			of.ServerIDLength, of.field, len(id))
	default:
		return checkUnique(r, of.seen, string(id), at)
	}
	return false
}
