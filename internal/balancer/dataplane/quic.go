// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// Masks of the first octet of connection IDs: the bits that all IDs of a form have in common.
const (
	quicRotationMask = 0xe0 // the others are random
	quicWholeMask    = 0xff // the others are the length
)

// quicFormOf returns the form as the data path has it.
func quicFormOf(q *desired.QUIC) balancerQuicForm {
	form := balancerQuicForm{
		Mask:           quicRotationMask,
		ServerIdLength: uint8(q.ServerIDLength),
		Length:         uint8(q.Config().Length()),
	}
	if q.EncodeLength {
		form.Mask = quicWholeMask
	}
	return form
}

// QUICPrefixOf returns how the connection IDs of a server begin. The service has the number and the
// form. QUICPrefixOf returns an error if the form or the server ID is not valid.
func QUICPrefixOf(service uint32, q *desired.QUIC, server *desired.Server) (QUICPrefix, error) {
	id, err := q.Config().Encode(server.QUICServerID(), make([]byte, q.NonceLength))
	if err != nil {
		return QUICPrefix{}, fmt.Errorf("server %s: %w", server.Name, err)
	}
	form := quicFormOf(q)
	prefix := QUICPrefix{Service: service, Length: uint32(form.ServerIdLength)}
	copy(prefix.Octets[:], id[:1+form.ServerIdLength])
	prefix.Octets[0] &= form.Mask
	return prefix, nil
}

// AddQUICServers makes connection IDs lead to the slots of servers, and then puts the form of a
// service's IDs in force. AddQUICServers returns an error if a table cannot be written.
func (p *Plane) AddQUICServers(service uint32, q *desired.QUIC, slots map[QUICPrefix]uint32) error {
	for prefix, slot := range slots {
		if err := p.Objects.QuicServers.Put(&prefix, slot); err != nil {
			return fmt.Errorf("add the server ID of slot %d: %w", slot, err)
		}
	}
	if err := p.Objects.QuicForms.Put(service, quicFormOf(q)); err != nil {
		return fmt.Errorf("set the form of connection IDs: %w", err)
	}
	return nil
}

// KeepQUICServers makes only these connection IDs lead to servers. KeepQUICServers returns an error
// if the table cannot be changed.
func (p *Plane) KeepQUICServers(slots map[QUICPrefix]uint32) error {
	return datapath.Keep(p.Objects.QuicServers, slots)
}
