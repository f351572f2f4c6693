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
		Rotation:       q.Rotation,
	}
	if q.EncodeLength {
		form.Mask = quicWholeMask
	}
	return form
}

// quicFormsOf returns the forms of a service as the data path has them.
func quicFormsOf(svc *desired.Service) balancerQuicForms {
	former := svc.QUIC
	if svc.FormerQUIC != nil {
		former = svc.FormerQUIC
	}
	return balancerQuicForms{Present: quicFormOf(svc.QUIC), Former: quicFormOf(former)}
}

// QUICPrefixOf returns how the connection IDs with a server ID begin. The service has the number
// and the form. QUICPrefixOf returns an error if the form or the server ID is not valid.
func QUICPrefixOf(service uint32, q *desired.QUIC, serverID []byte) (QUICPrefix, error) {
	id, err := q.Config().Encode(serverID, make([]byte, q.NonceLength))
	if err != nil {
		return QUICPrefix{}, err
	}
	form := quicFormOf(q)
	prefix := QUICPrefix{Service: service, Length: uint32(form.ServerIdLength)}
	copy(prefix.Octets[:], id[:1+form.ServerIdLength])
	prefix.Octets[0] &= form.Mask
	return prefix, nil
}

// AddQUICServers makes connection IDs lead to the slots of servers, and then puts the forms of a
// service's IDs in force. The service has the number. AddQUICServers returns an error if a table
// cannot be written.
func (p *Plane) AddQUICServers(
	number uint32, svc *desired.Service, slots map[QUICPrefix]uint32,
) error {
	for prefix, slot := range slots {
		if err := p.Objects.QuicServers.Put(&prefix, slot); err != nil {
			return fmt.Errorf("add the server ID of slot %d: %w", slot, err)
		}
	}
	if err := p.Objects.QuicForms.Put(number, quicFormsOf(svc)); err != nil {
		return fmt.Errorf("set the forms of connection IDs: %w", err)
	}
	return nil
}

// KeepQUICServers makes only these connection IDs lead to servers. KeepQUICServers returns an error
// if the table cannot be changed.
func (p *Plane) KeepQUICServers(slots map[QUICPrefix]uint32) error {
	return datapath.Keep(p.Objects.QuicServers, slots)
}
