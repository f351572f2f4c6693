// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/srv6"
)

// findByID returns the course of a packet of a service with persistence quic, and the reason under
// which it is counted. The flow table is asked first, if it can have flows of the service.
func (r *reference) findByID(p parsed, svc *desired.Service) (to []stage, reason string) {
	_, isFormer := r.former[svc.Name]
	if isFormer {
		if server := r.persist(p, svc); server != nil {
			return alone(srv6.Deliver, server), "forward_known"
		}
	}
	id, opens := connectionID(p.datagram)
	named := serverNamed(svc, id)
	if named != nil && !opens {
		return alone(srv6.Deliver, named), "forward_known"
	}
	if opens && svc.ServersDecide() {
		to, reason = r.offerInitial(p, svc, named), "forward_hunt"
	} else if server := r.place(p.flow, svc); server != nil {
		to, reason = alone(srv6.Deliver, server), "forward_new"
	}
	if to == nil || !opens {
		return to, "forward_recover"
	}
	if e := r.bucketOf(p.flow).find(p.flow, svc.Name); isFormer && e != nil &&
		e.server != svc.Name+"/"+to[0].server {
		*e = referenceEntry{} // later packets of the connection go by their IDs
	}
	return to, reason
}

// offerInitial returns the course of an Initial or 0-RTT packet under placement hunt. If the packet
// names a server, that server may have the connection, and so is asked first.
func (r *reference) offerInitial(p parsed, svc *desired.Service, named *desired.Server) []stage {
	var asked []stage
	if named != nil && r.reaches(named.Name) {
		asked = stages(srv6.Steer, named.Name)
	}
	return r.offer(p, svc, asked)
}

// connectionID returns the destination connection ID of the first packet in a datagram. With a
// short header it is followed by the rest of the packet. It is empty if there is none, and for
// version negotiation. The result opens tells whether it is an Initial or a 0-RTT packet.
func connectionID(datagram []byte) (id []byte, opens bool) {
	if len(datagram) > 0 && datagram[0]&0x80 == 0 {
		return datagram[1:], false
	}
	if len(datagram) < 6 {
		return nil, false
	}
	version, rest := binary.BigEndian.Uint32(datagram[1:]), datagram[6:]
	if version == 0 || int(datagram[5]) > len(rest) {
		return nil, false
	}
	opening := map[uint32][]byte{1: {0, 1}, 0x6b3343cf: {1, 2}}[version] // RFC 9000, RFC 9369
	return rest[:datagram[5]], slices.Contains(opening, datagram[0]>>4&3)
}

// serverNamed returns the server of the service that a connection ID names, or nil.
func serverNamed(svc *desired.Service, id []byte) *desired.Server {
	named, ok := svc.QUIC.Config().ServerID(id)
	former, isFormer := []byte(nil), false
	if svc.FormerQUIC != nil {
		former, isFormer = svc.FormerQUIC.Config().ServerID(id)
	}
	i := slices.IndexFunc(svc.Servers, func(s desired.Server) bool {
		return ok && bytes.Equal(s.QUICServerID(), named) ||
			isFormer && bytes.Equal(s.FormerQUICServerID(), former)
	})
	if i < 0 {
		return nil
	}
	return &svc.Servers[i]
}
