// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// reference is the agent's data path in Go, as docs/understand/agent.md describes it, written
// without regard to speed or the verifier. It returns the reason for each frame. Package packet
// makes the delivered packets.
type reference struct {
	outside bool // the interface leads out of the domain
	locator netip.Prefix
	tunnels []netip.Addr
	vips    []netip.Addr
	absent  []netip.Addr // VIPs that are not addresses of the host
	// largest are the segment sizes of TCP services, in bytes. Port 0 is for all ports that no
	// other service has.
	largest map[netip.AddrPort]uint16
	// forms are the forms of the own connection IDs of UDP services. Port 0 is as in largest.
	forms map[netip.AddrPort][]ownForm
	hunter
}

func newReference(cfg *desired.Agent) reference {
	r := reference{outside: !cfg.Node.IsInternal(), locator: cfg.Node.Locator, tunnels: cfg.Node.Addresses, largest: map[netip.AddrPort]uint16{}, forms: formsOf(cfg)}
	r.hunter = hunter{
		balancers: cfg.Node.Balancers,
		initials:  map[initial]decision{}, udpServices: map[netip.AddrPort]*policy{},
		flows: map[flow]remembered{}, fragments: map[[3]any]bool{}, services: map[netip.AddrPort]*policy{}, offers: map[string]int{},
	}
	for _, s := range cfg.Services {
		if s.Accept.Policy != "" && s.Protocol == desired.UDP {
			r.udpServices[netip.AddrPortFrom(s.VIP, s.Port.Number())] = newPolicy(s)
		} else if s.Accept.Policy != "" {
			r.services[netip.AddrPortFrom(s.VIP, s.Port.Number())] = newPolicy(s)
		}
		r.vips = append(r.vips, s.VIP)
		if s.Protocol == desired.TCP {
			r.largest[netip.AddrPortFrom(s.VIP, s.Port.Number())] = uint16(segmentSize(s, s.VIP.Is4(), &cfg.Node, mtu))
		}
	}
	return r
}

// wrapped is an encapsulated packet of a client.
type wrapped struct {
	kind         desired.Encapsulation
	vip          netip.Addr
	fits         bool // the inner packet's lengths agree with the outer's
	hopLimit     uint8
	segmentsLeft int
	destination  netip.Addr   // of the outer header
	list         []netip.Addr // as in the header; the first entry is the last segment
	own          netip.Addr   // what the server writes into its own entry of the list, if anything
	function     uint16       // 0 in a tunnel
	source       netip.Addr   // of the outer header, or the client's address in srv6-insert
	sender       netip.Prefix // the balancer's locator
	next         byte         // protocol of inner, in srv6-insert
	inner        []byte       // after the headers that a balancer adds
	headers      int          // length of those headers, in bytes
}

// maxServers is the most servers that a packet may visit: MAX_SEGMENTS in bpf/net/srv6.h.
const maxServers = 10

// left returns the number of servers that the packet has not visited yet.
func (w wrapped) left() int {
	if w.kind == desired.SRv6Insert {
		return w.segmentsLeft - 1 // without the VIP's segment
	}
	return w.segmentsLeft
}

// following returns the segment to which the server passes the packet on.
func (w wrapped) following(reason string) netip.Addr {
	if reason == "next_returned" {
		return w.own
	}
	return w.list[w.segmentsLeft-1]
}

// receive returns the reason for a frame, and the resulting frame.
func (r reference) receive(frame []byte) (reason string, out []byte) {
	frame = slices.Clone(frame) // a cookie is taken out of the frame
	w, reason := r.open(frame)
	if reason == "" {
		reason = r.decide(&w)
	}
	if strings.HasPrefix(reason, "next_") || w.own.IsValid() {
		return reason, w.passedOn(frame, reason)
	}
	if reason == "return_not_local" {
		return reason, r.giveBack(w, frame)
	}
	if reason == "answer_probe" {
		return reason, r.answer(w, frame)
	}
	if reason != "deliver" && reason != "deliver_not_local" {
		return reason, frame
	}
	out, err := packet.Decapsulate(frame)
	switch {
	case errors.Is(err, packet.ErrCongestion):
		return "drop_ecn", frame
	case err != nil:
		return "not to be delivered: " + err.Error(), frame
	case reason == "deliver_not_local":
		return reason, out
	}
	return map[desired.Encapsulation]string{
		desired.SRv6Insert: "deliver_srv6_insert", desired.SRv6Encap: "deliver_srv6_encap",
		desired.GRE: "deliver_gre", desired.IPIP: "deliver_ipip",
	}[w.kind], out
}

// passedOn returns the frame that the server leaves to tc for another server, or a dropped frame.
func (w wrapped) passedOn(frame []byte, reason string) (out []byte) {
	var err error
	if reason == "next_returned" {
		out, err = packet.HandBack(frame, w.own)
	} else if w.own.IsValid() {
		out, err = packet.SetActive(frame, w.own)
	} else {
		out = frame
	}
	if err == nil && strings.HasPrefix(reason, "next_") {
		if reason != "next_returned" {
			out, err = packet.Advance(out)
		}
		out = packet.SetMACs(out, hostMAC, hostMAC)
	}
	if err != nil {
		panic(err)
	}
	return out
}

// wantsReturn tells whether the balancer wants the packet back if its flow is not here.
func (w *wrapped) wantsReturn() bool {
	if w.function != steer || !w.offer().Returns {
		return false
	}
	if w.kind == desired.SRv6Encap {
		return w.headers == 40
	}
	return w.headers == 40+56 && len(w.list) == 3 && w.segmentsLeft == 1
}

// giveBack returns the frame that goes back to the balancer: like a signal, from this node to the
// balancer's function return.
func (r reference) giveBack(w wrapped, frame []byte) []byte {
	out := packet.SetMACs(frame, hostMAC, hostMAC)
	ip, balancer := out[14:], srv6.SID{Locator: w.sender, Function: srv6.Return}.Addr().AsSlice()
	ip[7]--
	copy(ip[24:], balancer)
	if w.kind == desired.SRv6Encap {
		copy(ip[8:], r.locator.Addr().AsSlice())
		return out
	}
	copy(ip[40+8+16:], balancer)
	copy(ip[40+8+32:], r.locator.Addr().AsSlice())
	return out
}

func (r reference) decide(w *wrapped) string {
	reason := "next_segment"
	switch {
	case w.function == probe:
		return r.probe(*w)
	case slices.Contains(r.vips, w.vip) && w.kind != desired.SRv6Insert && !w.fits:
		return "drop_inner_header"
	case slices.Contains(r.vips, w.vip) && (w.function == 0 || w.function == deliverAlways):
		return "deliver"
	case slices.Contains(r.vips, w.vip):
		reason = r.handshake(w)
	case w.kind == desired.GRE || w.kind == desired.IPIP:
		return "pass_other_tunnel"
	case w.left() <= 0:
		return "drop_not_served"
	case !r.isBalancer(w.sender):
		return "drop_sender"
	}
	switch {
	case reason == "":
		return "deliver"
	case strings.HasPrefix(reason, "next_") && !isOtherServer(r.locator, w.following(reason)):
		return "drop_next_segment"
	case isSentOn(reason) && w.hopLimit <= 1:
		return "drop_hop_limit"
	}
	return reason
}

// probe returns the reason for a probe.
func (r reference) probe(w wrapped) string {
	switch {
	case !r.isBalancer(w.sender):
		return "drop_sender"
	case w.token() == nil || w.headers > 2*40+8+3*16:
		return "drop_probe"
	}
	return "answer_probe"
}

// token returns the bytes of a probe after its headers, or nil if the probe is malformed.
func (w wrapped) token() []byte {
	protocol, rest := w.next, w.inner
	if w.kind == desired.SRv6Encap && w.vip.Is4() {
		protocol, rest = rest[9], rest[20:]
	} else if w.kind == desired.SRv6Encap {
		protocol, rest = rest[6], rest[40:]
	}
	if protocol != 59 || len(rest) < 8 {
		return nil
	}
	return rest[:8]
}

// answer returns the answer to a probe as XDP passes it to tc, with the MAC addresses of the probe.
func (r reference) answer(w wrapped, frame []byte) []byte {
	flags := uint16(0)
	if slices.Contains(r.vips, w.vip) && !slices.Contains(r.absent, w.vip) {
		flags = 1
	}
	return packet.ProbeAnswer(r.locator.Addr(), w.sender.Addr(), binary.NativeEndian.Uint64(w.token()), 1, flags,
		packet.Ethernet(packet.MAC(frame[6:]), packet.MAC(frame)))
}

// isOtherServer tells whether the server with a locator may pass a packet on to a segment.
func isOtherServer(locator netip.Prefix, segment netip.Addr) bool {
	return srv6.Parse(segment).Function.AtServer() &&
		!locator.Contains(segment) && !segment.IsMulticast()
}

// open reads a frame up to the VIP. If it finds no VIP, it returns the reason.
func (r reference) open(frame []byte) (wrapped, string) {
	if packet.MAC(frame) != hostMAC {
		return wrapped{}, "pass_not_for_host"
	}
	if r.outside && r.intrudes(frame) {
		return wrapped{}, "drop_outside"
	}
	b := frame[14:]
	switch binary.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		return r.openIPv4(b)
	case 0x86dd:
		return r.openIPv6(b)
	}
	return wrapped{}, "pass_not_ip"
}

// intrudes tells whether the destination of a frame is a SID, or a VIP with segments left.
func (r reference) intrudes(frame []byte) bool {
	b := frame[14:]
	if binary.BigEndian.Uint16(frame[12:]) != 0x86dd || len(b) < 40 {
		return false
	}
	destination, length := netip.AddrFrom16([16]byte(b[24:])), 40+int(binary.BigEndian.Uint16(b[4:]))
	if r.locator.Contains(destination) {
		return binary.BigEndian.Uint16(b[32:]) != 0
	}
	return slices.Contains(r.vips, destination) && b[0]>>4 == 6 && length <= len(b) && hasSegmentsLeft(b[6], b[40:length])
}

// hasSegmentsLeft tells whether the first extension headers include a routing header with segments
// left.
func hasSegmentsLeft(next byte, b []byte) bool {
	for i := 0; i <= 8 && len(b) >= 8; i++ {
		size := 8 + int(b[1])*8
		switch next {
		case 43:
			if b[3] > 0 {
				return true
			}
		case 44:
			size = 8
			if binary.BigEndian.Uint16(b[2:])&0xfff8 != 0 {
				return false
			}
		case 0:
			if i > 0 {
				return false
			}
		case 60:
		default:
			return false
		}
		if size > len(b) {
			return false
		}
		next, b = b[0], b[size:]
	}
	return false
}

func isTunnel(protocol byte) bool { return protocol == 4 || protocol == 41 || protocol == 47 }

func (r reference) openIPv4(b []byte) (wrapped, string) {
	if len(b) < 20 {
		return wrapped{}, "pass_ip_header"
	}
	header, length := int(b[0]&0xf)*4, int(binary.BigEndian.Uint16(b[2:]))
	switch {
	case !isTunnel(b[9]) || !slices.Contains(r.tunnels, netip.AddrFrom4([4]byte(b[16:]))):
		return wrapped{}, "pass_not_for_agent"
	case b[0]>>4 != 4 || header < 20 || length < header || length > len(b):
		return wrapped{}, "pass_ip_header"
	case binary.BigEndian.Uint16(b[6:])&0x3fff != 0:
		return wrapped{}, "pass_fragment"
	}
	return openTunnel(b[9], b[header:length])
}

func (r reference) openIPv6(b []byte) (wrapped, string) {
	if len(b) < 40 {
		return wrapped{}, "pass_ip_header"
	}
	destination, length := netip.AddrFrom16([16]byte(b[24:])), 40+int(binary.BigEndian.Uint16(b[4:]))
	bad := b[0]>>4 != 6 || length > len(b)
	if r.locator.Contains(destination) {
		switch function := binary.BigEndian.Uint16(b[32:]); {
		case function == 0:
			return wrapped{}, "pass_host"
		case function < connectAvail || function > probe:
			return wrapped{}, "drop_unknown_function"
		case bad:
			return wrapped{}, "drop_ip_header"
		}
		w := wrapped{
			hopLimit: b[7], function: binary.BigEndian.Uint16(b[32:]), source: netip.AddrFrom16([16]byte(b[8:])),
			destination: destination,
		}
		w.sender = netip.PrefixFrom(w.source, 64).Masked()
		reason := w.openSegments(b[6], b[40:length])
		if reason == "" && w.left()+1 > maxServers {
			reason = "drop_too_many_servers"
		}
		w.headers = length - len(w.inner)
		return w, reason
	}
	switch {
	case !isTunnel(b[6]) || !slices.Contains(r.tunnels, destination):
		return wrapped{}, "pass_not_for_agent"
	case bad:
		return wrapped{}, "pass_ip_header"
	}
	return openTunnel(b[6], b[40:length])
}

// openTunnel reads the content of a tunnel to this node.
func openTunnel(protocol byte, b []byte) (w wrapped, reason string) {
	w.kind = desired.IPIP
	if protocol == 47 {
		w.kind, protocol = desired.GRE, 0
		if len(b) >= 4 && b[0] == 0 && b[1] == 0 {
			protocol = map[uint16]byte{0x0800: 4, 0x86dd: 41}[binary.BigEndian.Uint16(b[2:])]
		}
		if protocol == 0 {
			return w, "pass_gre"
		}
		b = b[4:]
	}
	if !w.openInner(protocol, b) {
		return w, "pass_other_tunnel"
	}
	return w, ""
}

// openSegments reads the bytes after the IPv6 header of a packet to a SID.
func (w *wrapped) openSegments(next byte, b []byte) (reason string) {
	if next == 0 {
		if len(b) < 8 || 8+int(b[1])*8 > len(b) {
			return "drop_extension"
		}
		next, b = b[0], b[8+int(b[1])*8:]
	}
	routed, visited := next == 43, false
	var first netip.Addr
	if routed {
		if reason := checkSRH(b); reason != "" {
			return reason
		}
		w.vip, w.segmentsLeft = netip.AddrFrom16([16]byte(b[8:])), int(b[3])
		for i := range int(b[4]) + 1 {
			w.list = append(w.list, netip.AddrFrom16([16]byte(b[8+16*i:])))
		}
		first, visited = netip.AddrFrom16([16]byte(b[8+16*int(b[4]):])), b[3] < b[4]
		next, b = b[0], b[8+int(b[1])*8:]
	}
	w.next, w.inner = next, b
	switch {
	case next == 4 || next == 41:
		w.kind = desired.SRv6Encap
		if !w.openInner(next, b) {
			return "drop_inner_header"
		}
		return ""
	case !routed && next == 44:
		return "drop_fragment"
	case !routed:
		return "drop_not_encapsulated"
	case w.segmentsLeft == 0:
		return "drop_srh_segments_left"
	}
	w.kind = desired.SRv6Insert
	w.sender = netip.PrefixFrom(netip.IPv6Unspecified(), 64) // a reduced header has no sender
	if visited {
		w.sender = netip.PrefixFrom(first, 64).Masked()
	}
	if w.function != deliverAlways && w.sender.Addr().IsUnspecified() {
		return "drop_srh_segments_left" // the sender gets an ICMP error
	}
	return ""
}

// checkSRH makes the checks of RFC 8754 section 4.3.1.1. It requires at least one segment.
func checkSRH(b []byte) string {
	switch {
	case len(b) < 8+16:
		return "drop_srh_truncated"
	case b[2] != 4:
		return "drop_routing_type"
	case 8+int(b[1])*8 > len(b):
		return "drop_srh_truncated"
	case 16*(int(b[4])+1) > int(b[1])*8:
		return "drop_srh_last_entry"
	case int(b[3]) > int(b[4])+1:
		return "drop_srh_segments_left"
	}
	return ""
}

// openInner returns false if there is no IP header of the protocol's version.
func (w *wrapped) openInner(protocol byte, b []byte) bool {
	if protocol == 4 {
		if len(b) < 20 || b[0]>>4 != 4 {
			return false
		}
		header, length := int(b[0]&0xf)*4, int(binary.BigEndian.Uint16(b[2:]))
		w.vip = netip.AddrFrom4([4]byte(b[16:]))
		w.fits = header >= 20 && length >= header && length <= len(b)
		return true
	}
	if len(b) < 40 || b[0]>>4 != 6 {
		return false
	}
	w.vip = netip.AddrFrom16([16]byte(b[24:]))
	w.fits = 40+int(binary.BigEndian.Uint16(b[4:])) <= len(b)
	return true
}
