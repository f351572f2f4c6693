// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// Masks of the first octet of connection IDs: the bits that all IDs of a form have in common.
const (
	quicRotationMask = 0xe0 // the config rotation; the other five bits are random
	quicWholeMask    = 0xff // the other five bits are the length
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

// form returns the form as a configuration has it.
func (f balancerQuicForm) form() *desired.QUIC {
	n := int(f.ServerIdLength)
	return &desired.QUIC{
		Form: desired.QUICLB21, Rotation: f.Rotation, ServerIDLength: n,
		NonceLength: int(f.Length) - 1 - n, EncodeLength: f.Mask == quicWholeMask,
	}
}

// QUICForms reads the forms of the connection IDs of the service with this number. The former one
// is nil if there is none. Both are nil if no program is attached. QUICForms returns an error if
// the table cannot be read.
func (r *Reader) QUICForms(number uint32) (present, former *desired.QUIC, err error) {
	table, err := openAttached(r.Instance, balancerMapQuicForms)
	if table == nil || err != nil {
		return nil, nil, err
	}
	defer table.Close()
	var forms balancerQuicForms
	if err := table.Lookup(number, &forms); err != nil {
		return nil, nil, fmt.Errorf("read the forms of connection IDs: %w", err)
	}
	if forms.Former != forms.Present {
		former = forms.Former.form()
	}
	return forms.Present.form(), former, nil
}

// quicFormsOf returns the forms of a service as the data path has them.
func quicFormsOf(svc *desired.Service) balancerQuicForms {
	former := svc.QUIC
	if svc.FormerQUIC != nil {
		former = svc.FormerQUIC
	}
	return balancerQuicForms{Present: quicFormOf(svc.QUIC), Former: quicFormOf(former)}
}

// QUICPrefixOf returns how connection IDs with a server ID begin. It takes the number of the
// service, and the form of the connection IDs. QUICPrefixOf returns an error if the form or the
// server ID is not valid.
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

// QUICMask returns the bits of the first 16 octets of a connection ID that QUICPrefix.Octets has for
// a form.
func QUICMask(q *desired.QUIC) (mask [16]byte) {
	form := quicFormOf(q)
	mask[0] = form.Mask
	for i := range form.ServerIdLength {
		mask[1+i] = 0xff
	}
	return mask
}

// AddQUICServers makes connection IDs lead to the slots of servers, and then puts the forms of a
// service's IDs in force. The number is that of the service. AddQUICServers returns an error if a
// table cannot be written.
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
