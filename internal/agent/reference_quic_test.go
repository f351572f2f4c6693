// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/quiclb"
)

// ownForm is a form in which connection IDs name this server.
type ownForm struct {
	quiclb.Config
	serverID []byte
}

// formsOf returns the forms of all UDP services. Services whose IDs are not compared have none.
func formsOf(cfg *desired.Agent) map[netip.AddrPort][]ownForm {
	all := map[netip.AddrPort][]ownForm{}
	for _, s := range cfg.Services {
		var forms []ownForm
		if s.QUIC != nil {
			forms = append(forms, ownForm{s.QUIC.Config(), s.QUICServerID()})
		}
		if s.FormerQUIC != nil {
			forms = append(forms, ownForm{s.FormerQUIC.Config(), s.FormerQUICServerID()})
		}
		if s.Protocol == desired.UDP {
			all[netip.AddrPortFrom(s.VIP, s.Port.Number())] = forms
		}
	}
	return all
}

// formsAt returns the forms of the service at an address.
func (r reference) formsAt(vip netip.AddrPort) []ownForm {
	if forms, found := r.forms[vip]; found {
		return forms
	}
	return r.forms[netip.AddrPortFrom(vip.Addr(), 0)]
}

// issuedID returns how the source ID of a packet that the host sends compares with the own ones,
// and the ID. The result is "" if there is nothing to compare.
func (r reference) issuedID(frame []byte) (result string, id []byte) {
	d, ok := readDatagram(frame)
	if !ok || d.source.Addr().Is4In6() {
		return "", nil
	}
	forms, p := r.formsAt(d.source), d.udp[8:]
	if forms == nil || len(p) < 6 || p[0]&0x80 == 0 || binary.BigEndian.Uint32(p[1:]) == 0 {
		return "", nil
	}
	_, p, _ = cutID(p[5:])
	if id, _, ok = cutID(p); !ok {
		return "", nil
	}
	for _, f := range forms {
		if serverID, ok := f.ServerID(id); ok && bytes.Equal(serverID, f.serverID) {
			return "issued_own", id
		}
	}
	return "issued_other", id
}

// deliveredID does the same as issuedID for the destination ID of a packet that is delivered.
func (r reference) deliveredID(reason string, frame []byte) (result string, id []byte) {
	switch reason {
	case "deliver_srv6_insert", "deliver_srv6_encap", "deliver_gre", "deliver_ipip":
	default:
		return "", nil
	}
	d, ok := readDatagram(frame)
	if !ok || d.hasMore {
		return "", nil
	}
	length := int(binary.BigEndian.Uint16(d.udp[4:]))
	if length < 8 || length > d.length || d.length > len(d.udp) {
		return "", nil
	}
	p := d.udp[8:length]
	switch {
	case len(p) > 0 && p[0]&0x80 == 0:
		id = p[1:]
	case len(p) < 6:
		return "", nil
	default:
		version := binary.BigEndian.Uint32(p[1:])
		opening := map[uint32][]byte{1: {0, 1}, 0x6b3343cf: {1, 2}}[version] // RFC 9000, RFC 9369
		if id, _, ok = cutID(p[5:]); !ok || version == 0 || slices.Contains(opening, p[0]>>4&3) {
			return "", nil
		}
	}
	for _, f := range r.formsAt(d.destination) {
		if serverID, ok := f.ServerID(id); ok && !bytes.Equal(serverID, f.serverID) {
			return "delivered_other", id
		}
	}
	return "", nil
}

// cutID returns the connection ID behind the octet with its length, and what follows the ID.
func cutID(p []byte) (id, rest []byte, ok bool) {
	if len(p) < 1 || len(p) < 1+int(p[0]) {
		return nil, nil, false
	}
	return p[1:][:p[0]], p[1+int(p[0]):], true
}

// datagram is a packet of UDP whose header follows the IP header directly.
type datagram struct {
	source, destination netip.AddrPort
	udp                 []byte // from the UDP header to the end of the frame
	length              int    // of udp, as the IP header states it
	hasMore             bool   // it is a first fragment
}

// readDatagram returns false for other packets, and for later fragments.
func readDatagram(frame []byte) (d datagram, ok bool) {
	b := frame[14:]
	var source, destination netip.Addr
	switch {
	case binary.BigEndian.Uint16(frame[12:]) == 0x0800 && len(b) >= 20:
		header, fragment := int(b[0]&0xf)*4, binary.BigEndian.Uint16(b[6:])
		if b[0]>>4 != 4 || header < 20 || header > len(b) || b[9] != 17 || fragment&0x1fff != 0 {
			return d, false
		}
		source, destination = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
		d.udp, d.hasMore = b[header:], fragment&0x2000 != 0
		d.length = int(binary.BigEndian.Uint16(b[2:])) - header
	case binary.BigEndian.Uint16(frame[12:]) == 0x86dd && len(b) >= 40:
		if b[0]>>4 != 6 || b[6] != 17 {
			return d, false
		}
		source, destination = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
		d.udp, d.length = b[40:], int(binary.BigEndian.Uint16(b[4:]))
	}
	if len(d.udp) < 8 {
		return d, false
	}
	d.source = netip.AddrPortFrom(source, binary.BigEndian.Uint16(d.udp))
	d.destination = netip.AddrPortFrom(destination, binary.BigEndian.Uint16(d.udp[2:]))
	return d, true
}
