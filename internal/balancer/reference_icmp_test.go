// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// piece identifies the packet to which a fragment belongs.
type piece struct {
	source, destination netip.Addr
	protocol            uint8 // IPv4 only
	id                  uint32
	later               bool // not the first fragment
}

// heldFrame is HELD_FRAME in bpf/balancer/path/hold.h.
const heldFrame = 1536

// follow finds the flow of a later fragment, or stores the flow of a first fragment. If a later
// fragment has no flow, follow returns the reason.
func (r *reference) follow(frame []byte, p *parsed) (reason string) {
	key := *p.piece
	key.source, key.destination, key.later = p.flow.Source.Addr(), p.flow.Destination.Addr(), false
	if !p.piece.later {
		r.firsts[key] = p.flow
		return ""
	}
	first, ok := r.firsts[key]
	if !ok {
		if len(frame) > heldFrame || packet.MAC(frame[6:]) == heldMAC {
			return "drop_fragment_unknown"
		}
		return "take_fragment"
	}
	p.flow, p.follow = first, "forward_fragment"
	return ""
}

// recall returns the server in the flow's entry, whatever its state, or nil if there is none.
func (r *reference) recall(bucket *referenceBucket, flow dataplane.Flow, svc *desired.Service) *desired.Server {
	e := bucket.find(flow, svc.Name)
	if e == nil {
		return nil
	}
	return serverOfName(svc, strings.TrimPrefix(e.server, svc.Name+"/"))
}

// recalled returns the server that a flow table names for a packet that does not count as one of its
// flow, or nil.
func (r *reference) recalled(p parsed, svc *desired.Service) *desired.Server {
	tabled, ok := r.tabled(svc)
	if !ok {
		return nil
	}
	server := r.recall(r.bucketOf(p.flow), p.flow, svc)
	if server == nil && tabled.Placement.Method().ServersDecide {
		server = r.recall(r.halfOpenOf(p.flow), p.flow, svc)
	}
	return server
}

// bucketTells tells whether the bucket of a flow tells which servers may have the flow.
func bucketTells(svc *desired.Service) bool {
	switch placement := svc.Placement.Method(); {
	case placement.FollowsFlow || svc.FindsByColumn():
		return true
	case svc.Persistence == desired.PersistenceQUIC: // no server can be asked
		return false
	case placement.ServersDecide:
		return svc.Selection.Method().NotInRow == ""
	}
	return svc.Placement.Infers() && svc.Infer.Among == desired.AmongCandidates && passesOn(svc)
}

// needsCopies tells whether a packet is an ICMP error of which all servers of a service get a copy.
func (r *reference) needsCopies(p parsed, svc *desired.Service) bool {
	return p.follow == "forward_icmp" && !bucketTells(svc) && r.recalled(p, svc) == nil &&
		!(svc.Encapsulation == desired.SRv6Insert && p.hopByHop)
}

// leftForCopies returns the outcome for an ICMP error that XDP leaves to tc_return. The source
// address of the frame tells the encapsulation and the service.
func (r *reference) leftForCopies(frame []byte, p parsed, svc *desired.Service) outcome {
	if p.hopLimit <= 1 {
		return refused(frame, "drop_hop_limit", p.length)
	}
	out := slices.Clone(frame)
	if svc.Encapsulation != desired.SRv6Insert {
		var err error
		if out, err = packet.TakeHop(frame); err != nil {
			panic(err)
		}
	}
	copy(out[6:], []byte{0x5f, 0x6c, dataplane.RuleOf(svc).Encapsulation, 0})
	binary.LittleEndian.PutUint16(out[10:], uint16(r.services.byName[svc.Name].id))
	return outcome{verdictPass, out, map[string]tally{"copy_icmp": {1, p.length, 0}}, map[string]tally{}}
}

// parseICMP reads an ICMP message. The argument plain says that the message directly follows an IP
// header without options. If there is no reason, the message concerns a flow.
func (p *parsed) parseICMP(b []byte, version int, plain bool) (reason string) {
	echo, errors := byte(8), []byte{3, 11, 12}
	if version == 6 {
		echo, errors = 128, []byte{1, 2, 3, 4}
	}
	switch {
	case len(b) < 8:
		return "drop_transport"
	case b[0] == echo && plain && fromOneHost(p.flow.Source.Addr()):
		return "answer_echo"
	case version == 6 && b[0] == 135 && p.hopLimit == 255:
		return "pass_solicitation"
	case !slices.Contains(errors, b[0]):
		return "drop_icmp_type"
	}
	quoted, ok := quotedFlow(b[8:], version)
	if !ok || quoted.Source.Addr() != p.flow.Destination.Addr() {
		return "drop_icmp_quote"
	}
	p.follow, p.flow = "forward_icmp", reversed(quoted)
	return ""
}

// quotedFlow reads the flow of a quoted packet from its beginning.
func quotedFlow(p []byte, version int) (flow dataplane.Flow, ok bool) {
	var protocol byte
	var source, destination netip.Addr
	switch {
	case len(p) == 0 || int(p[0]>>4) != version:
		return flow, false
	case version == 4:
		header := int(p[0]&0xf) * 4
		if header < 20 || len(p) < header || binary.BigEndian.Uint16(p[6:])&0x1fff != 0 {
			return flow, false
		}
		source, destination = netip.AddrFrom4([4]byte(p[12:])), netip.AddrFrom4([4]byte(p[16:]))
		protocol, p = p[9], p[header:]
	default:
		if len(p) < 40 {
			return flow, false
		}
		source, destination = netip.AddrFrom16([16]byte(p[8:])), netip.AddrFrom16([16]byte(p[24:]))
		var fragment *piece
		var reason string
		if protocol, p, fragment, reason = walk(p[6], p[40:]); reason != "" || fragment != nil && fragment.later {
			return flow, false
		}
	}
	if len(p) < 8 || protocol != 6 && protocol != 17 {
		return flow, false
	}
	flow.Protocol = desired.UDP
	if protocol == 6 {
		flow.Protocol = desired.TCP
	}
	flow.Source = netip.AddrPortFrom(source, binary.BigEndian.Uint16(p))
	flow.Destination = netip.AddrPortFrom(destination, binary.BigEndian.Uint16(p[2:]))
	return flow, true
}

// fromOneHost tells whether an address can be that of a single host.
func fromOneHost(a netip.Addr) bool {
	if a.Is4() {
		return a.As4()[0] != 0 && a.As4()[0] < 224 && !a.IsLoopback()
	}
	reserved := netip.MustParsePrefix("::/64").Contains(a) || a.Is4In6()
	return !reserved && !a.IsMulticast()
}

// endUnserved returns the outcome for a packet that no server gets. The client is told so if it
// tries to connect to a port without a service, or to a service that has no server for new flows.
func (r *reference) endUnserved(frame []byte, p parsed, reason string) outcome {
	answer := strings.Replace(reason, "drop_", "answer_", 1)
	switch {
	case reason != "drop_no_service" && reason != "drop_no_server",
		!r.cfg.Node.Reject, p.follow != "", !fromOneHost(p.flow.Source.Addr()),
		!p.mayMove(), p.ends():
		return refused(frame, reason, p.length)
	}
	return rejected(frame, answer)
}

// tell returns the outcome for a packet that cannot be sent to its server. The sender gets an ICMP
// error if that is permitted and useful.
func tell(frame []byte, p parsed, obstacle string, mtu int) outcome {
	least := 1280
	if p.flow.Source.Addr().Is4() {
		least = 68
	}
	mtu = max(mtu, least)
	switch {
	case p.follow != "" || !fromOneHost(p.flow.Source.Addr()):
	case obstacle == "drop_hop_limit":
		return answered(frame, "answer_hop_limit", 0)
	case obstacle == "drop_too_big" && int(p.length) > mtu:
		return answered(frame, "answer_too_big", uint32(mtu))
	}
	return refused(frame, obstacle, p.length)
}
