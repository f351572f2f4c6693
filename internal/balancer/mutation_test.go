package balancer

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/packet"
)

// judgement is what docs/packet-path.md says of a frame, up to the point where its service is known.
type judgement struct {
	reason string // "" for a packet that has a service
	flow   Flow
	flags  packet.TCPFlags
	hops   uint8
	length uint64
	to     *config.Service
}

// judge reads a frame as docs/packet-path.md does, without a thought of speed or the verifier.
func (f *fixture) judge(frame []byte) judgement {
	if packet.MAC(frame) != ownMAC {
		return judgement{reason: "pass_not_for_host"}
	}
	var j judgement
	p := frame[ethernetLength:]
	switch binary.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		if len(p) < 20 {
			return judgement{reason: "pass_not_vip"}
		}
		j = judgeIPv4(p)
	case 0x86dd:
		if len(p) < 40 {
			return judgement{reason: "pass_not_vip"}
		}
		j = judgeIPv6(p)
	default:
		return judgement{reason: "pass_not_ip"}
	}
	if j.reason == "" {
		if j.to = f.serviceFor(j.flow); j.to == nil {
			j.reason = "drop_no_service"
		}
	}
	if j.reason != "" && !f.isVIP(j.flow.Destination.Addr()) {
		j.reason = "pass_not_vip"
	}
	return j
}

func (f *fixture) isVIP(address netip.Addr) bool {
	return slices.ContainsFunc(f.cfg.Services, func(s config.Service) bool { return s.VIP == address.Unmap() })
}

func (f *fixture) serviceFor(flow Flow) (found *config.Service) {
	for i := range f.cfg.Services {
		s := &f.cfg.Services[i]
		if s.VIP != flow.Destination.Addr() || s.Protocol != flow.Protocol {
			continue
		}
		if uint16(s.Port) == flow.Destination.Port() {
			return s
		}
		if s.Port == config.AllPorts {
			found = s
		}
	}
	return found
}

func judgeIPv4(p []byte) judgement {
	j := judgement{hops: p[8], length: uint64(binary.BigEndian.Uint16(p[2:]))}
	j.flow.Source = netip.AddrPortFrom(netip.AddrFrom4([4]byte(p[12:])), 0)
	j.flow.Destination = netip.AddrPortFrom(netip.AddrFrom4([4]byte(p[16:])), 0)
	header := int(p[0]&0xf) * 4
	switch {
	case p[0]>>4 != 4 || header < 20 || int(j.length) < header || int(j.length) > len(p):
		j.reason = "drop_ip_header"
	case binary.BigEndian.Uint16(p[6:])&0x3fff != 0:
		j.reason = "drop_fragment"
	default:
		j.judgeTransport(p[9], p[header:j.length])
	}
	return j
}

func judgeIPv6(p []byte) judgement {
	j := judgement{hops: p[7], length: (40 + uint64(binary.BigEndian.Uint16(p[4:]))) & 0xffff}
	j.flow.Source = netip.AddrPortFrom(netip.AddrFrom16([16]byte(p[8:])), 0)
	j.flow.Destination = netip.AddrPortFrom(netip.AddrFrom16([16]byte(p[24:])), 0)
	if p[0]>>4 != 6 || j.flow.Destination.Addr().Is4In6() || j.length < 40 || int(j.length) > len(p) {
		j.reason = "drop_ip_header"
		return j
	}
	next, rest := p[6], p[40:j.length]
	for headers := 0; slices.Contains([]byte{0, 43, 44, 60}, next); headers++ {
		j.reason = refuseExtension(next, rest, headers)
		if j.reason != "" {
			return j
		}
		size := 8
		if next != 44 {
			size += int(rest[1]) * 8
		}
		if size > len(rest) || headers == 8 {
			j.reason = "drop_extension"
			return j
		}
		next, rest = rest[0], rest[size:]
	}
	j.judgeTransport(next, rest)
	return j
}

// refuseExtension says what is wrong with the extension header at the start of rest.
func refuseExtension(header byte, rest []byte, before int) string {
	switch {
	case len(rest) < 8:
		return "drop_extension"
	case header == 44 && binary.BigEndian.Uint16(rest[2:])&0xfff9 != 0:
		return "drop_fragment"
	case header == 0 && before > 0:
		return "drop_extension"
	case header == 43 && rest[3] > 0:
		return "drop_routing_header"
	}
	return ""
}

func (j *judgement) judgeTransport(protocol byte, p []byte) {
	switch {
	case protocol != 6 && protocol != 17:
		j.reason = "drop_protocol"
		return
	case protocol == 6 && (len(p) < 20 || p[12]>>4 < 5 || int(p[12]>>4)*4 > len(p)):
		j.reason = "drop_transport"
		return
	case protocol == 17 && (len(p) < 8 || binary.BigEndian.Uint16(p[4:]) < 8 ||
		int(binary.BigEndian.Uint16(p[4:])) > len(p)):
		j.reason = "drop_transport"
		return
	}
	j.flow.Protocol = config.UDP
	if protocol == 6 {
		j.flow.Protocol, j.flags = config.TCP, packet.TCPFlags(p[13])
	}
	j.flow.Source = netip.AddrPortFrom(j.flow.Source.Addr(), binary.BigEndian.Uint16(p))
	j.flow.Destination = netip.AddrPortFrom(j.flow.Destination.Addr(), binary.BigEndian.Uint16(p[2:]))
}

// known is the flow table as the frames so far should have left it: a state for each flow.
type known map[Flow]balancerFlowState

// persist is the reason to forward a packet, and what the table then says of its flow.
func (k known) persist(flow Flow, flags packet.TCPFlags) string {
	syn := flags&(packet.SYN|packet.ACK) == packet.SYN
	end := flags&(packet.FIN|packet.RST) != 0
	state := k[flow]
	reason := "forward_known"
	switch {
	case state == stateFree && flow.Protocol == config.TCP && !syn:
		reason, state = "forward_recover", stateNew
	case state == stateFree || state == stateClosing && syn:
		reason, state = "forward_new", stateNew
	case state == stateNew && !syn:
		state = stateEstablished
	}
	if end {
		state = stateClosing
	}
	k[flow] = state
	return reason
}

// expect is the outcome of a frame that may be anything.
func (f *fixture) expect(t *rapid.T, k known, frame []byte) outcome {
	j := f.judge(frame)
	if j.reason != "" {
		return refused(frame, j.reason, j.length)
	}
	reason := k.persist(j.flow, j.flags)
	if j.hops <= 1 {
		return refused(frame, "drop_hop_limit", j.length)
	}
	server := f.placed(j.flow, j.to.Name)
	sent, err := packet.Encapsulate(frame, f.encap(j.flow, j.to.Name, server))
	if err != nil {
		t.Fatalf("the reference cannot encapsulate %x: %v", frame, err)
	}
	counted := tally{1, j.length, 0}
	placed := counted
	if reason == "forward_new" {
		placed.Flows = 1
	}
	return outcome{
		verdictRedirect, sent, map[string]tally{reason: counted},
		map[string]tally{j.to.Name + "/" + server: placed},
	}
}

// mutant is a frame to one of the services, with or without some changes.
func (f *fixture) mutant() *rapid.Generator[[]byte] {
	return rapid.Custom(func(t *rapid.T) []byte {
		svc := rapid.SampledFrom(f.cfg.Services).Draw(t, "service")
		flow := flowTo(svc.VIP, uint16(svc.Port), svc.Protocol).from(rapid.Uint16Range(1, 3).Draw(t, "port"))
		options := []packet.Option{
			packet.Flags(packet.TCPFlags(rapid.Uint8().Draw(t, "flags"))),
			packet.HopLimit(rapid.SampledFrom([]uint8{64, 64, 64, 2, 1, 0, 255}).Draw(t, "hop limit")),
			packet.TrafficClass(rapid.Uint8().Draw(t, "traffic class")),
			packet.Payload(make([]byte, rapid.IntRange(0, 40).Draw(t, "payload"))),
		}
		if svc.VIP.Is4() {
			options = append(options, packet.IPOptions(make([]byte, 4*rapid.IntRange(0, 10).Draw(t, "options"))))
		} else {
			options = append(options, extensions(t)...)
		}
		frame := flow.frame(options...)
		for range rapid.IntRange(0, 3).Draw(t, "mutations") {
			frame = mutate(t, frame)
		}
		return frame
	})
}

func extensions(t *rapid.T) (out []packet.Option) {
	if size := rapid.IntRange(0, 4).Draw(t, "hop-by-hop"); size > 0 {
		out = append(out, packet.HopByHop(8*size))
	}
	for range rapid.IntRange(0, 9).Draw(t, "extension headers") / 2 {
		out = append(out, packet.DestinationOptions(8))
	}
	return out
}

// interesting are bytes that mean something somewhere in a header.
var interesting = []byte{0, 1, 4, 5, 6, 7, 8, 17, 41, 43, 44, 45, 50, 51, 58, 59, 60, 0x46, 0x4f, 0x60, 0x80, 0xff}

// mutate changes a frame in one place. Ethernet is mostly left alone.
func mutate(t *rapid.T, frame []byte) []byte {
	frame = slices.Clone(frame)
	from := ethernetLength
	if rapid.IntRange(0, 19).Draw(t, "in Ethernet") == 0 || len(frame) == ethernetLength {
		from = 0
	}
	at := rapid.IntRange(from, min(len(frame)-1, from+90)).Draw(t, "at")
	switch rapid.IntRange(0, 4).Draw(t, "mutation") {
	case 0:
		frame[at] = rapid.SampledFrom(interesting).Draw(t, "byte")
	case 1:
		frame[at] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
	case 2:
		frame[at] += byte(rapid.IntRange(-3, 3).Draw(t, "more"))
	case 3:
		return frame[:max(at, ethernetLength)]
	case 4:
		return append(frame, rapid.SliceOfN(rapid.Byte(), 1, 20).Draw(t, "padding")...)
	}
	return frame
}

// Whatever comes, what is forwarded is the reference's encapsulation of it, and what is not is what
// a plain reading of the frame says.
func TestMutations(t *testing.T) {
	cfg := standard()
	for i, w := range ways {
		cfg.Services = append(cfg.Services, w.serviceBy(uint8(i), config.TCP), w.serviceBy(uint8(i), config.UDP))
	}
	cfg.Services = slices.DeleteFunc(cfg.Services, func(s config.Service) bool { return s.Name == "drained" })
	cfg.Node.Limits.Flows = 1 << 16
	f := open(t, cfg)
	seen := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		clear(f.kernel.flows.entries)
		k := known{}
		for range 30 {
			frame := f.mutant().Draw(t, "frame")
			want := f.expect(t, k, frame)
			got := f.run(frame)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("%x (-want +got):\n%s", frame, diff)
			}
			seen[reasonOf(got)]++
		}
	})
	for _, reason := range []string{
		"forward_known", "forward_new", "forward_recover", "pass_not_ip", "pass_not_for_host", "pass_not_vip",
		"drop_ip_header", "drop_extension", "drop_fragment", "drop_protocol", "drop_transport", "drop_no_service",
		"drop_hop_limit",
	} {
		if seen[reason] == 0 {
			t.Errorf("no mutant left as %s: %v", reason, seen)
		}
	}
	t.Log(seen)
}
