// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// The verdicts of an XDP program (enum xdp_action of the kernel).
const (
	verdictDrop     = 1
	verdictPass     = 2
	verdictTX       = 3
	verdictRedirect = 4
)

// tally is the change of a counter.
type tally struct{ Packets, Bytes, Flows uint64 }

// outcome is the result for a frame: the verdict, the frame and all changes of counters.
type outcome struct {
	Verdict uint32
	Frame   []byte
	Reasons map[string]tally // by the name of the reason
	Servers map[string]tally // by "service/server"
}

type counters struct{ reasons, servers map[string]tally }

func (f *fixture) counters() counters {
	f.t.Helper()
	c := counters{map[string]tally{}, map[string]tally{}}
	reasons := lookupAll[dataplane.Counter](f, f.plane.Objects.Reasons)
	for name, number := range reasonNumbers() {
		var sum tally
		for _, v := range reasons(number) {
			sum.Packets += v.Packets
			sum.Bytes += v.Bytes
		}
		c.reasons[name] = sum
	}
	servers := lookupAll[dataplane.ServerCounter](f, f.plane.Objects.ServerCounters)
	for slot, key := range f.slots.All() {
		var sum tally
		for _, v := range servers(slot) {
			total := v.Total()
			sum.Packets += total.Packets
			sum.Bytes += total.Bytes
			sum.Flows += v.Placed()
			for i, n := range v.Forwarded {
				reason := c.reasons[reasonName(dataplane.FirstForward+uint32(i))]
				reason.Packets += n.Packets
				reason.Bytes += n.Bytes
				c.reasons[reasonName(dataplane.FirstForward+uint32(i))] = reason
			}
		}
		name := key.Service + "/" + key.Server
		if f.slots.IsRetired(slot) {
			name += ", retired"
		}
		c.servers[name] = sum
	}
	return c
}

// lookupAll reads a per-CPU array in one system call. It returns a function that returns the values
// of an element.
func lookupAll[T any](f *fixture, m *ebpf.Map) func(number uint32) []T {
	f.t.Helper()
	cores := ebpf.MustPossibleCPU()
	keys := make([]uint32, m.MaxEntries())
	values := make([]T, len(keys)*cores)
	// The error says that there are no more elements.
	if n, err := m.BatchLookup(new(ebpf.MapBatchCursor), keys, values, nil); n < len(keys) {
		f.t.Fatalf("read %v: %d of %d elements: %v", m, n, len(keys), err)
	}
	return func(number uint32) []T { return values[int(number)*cores:][:cores] }
}

func difference(before, after map[string]tally) map[string]tally {
	out := map[string]tally{}
	for name, a := range after {
		b := before[name]
		if d := (tally{a.Packets - b.Packets, a.Bytes - b.Bytes, a.Flows - b.Flows}); d != (tally{}) {
			out[name] = d
		}
	}
	return out
}

// reasonNumbers returns enum lb_reason of bpf/balancer/stats.h, by the names that metrics have.
var reasonNumbers = sync.OnceValue(func() map[string]uint32 {
	spec, _, err := dataplane.LoadSpec()
	if err != nil {
		panic(err)
	}
	var enum *btf.Enum
	if err := spec.Types.TypeByName("lb_reason", &enum); err != nil {
		panic(err)
	}
	numbers := map[string]uint32{}
	for _, value := range enum.Values {
		name := strings.ToLower(strings.TrimPrefix(value.Name, "LB_"))
		if name != "count" {
			numbers[name] = uint32(value.Value)
		}
	}
	return numbers
})

// reasonName is the reverse of reasonNumbers.
func reasonName(number uint32) string {
	name, ok := reasonNames()[number]
	if !ok {
		panic(fmt.Sprintf("there is no reason %d", number))
	}
	return name
}

var reasonNames = sync.OnceValue(func() map[uint32]string {
	names := map[uint32]string{}
	for name, number := range reasonNumbers() {
		names[number] = name
	}
	return names
})

// check compares an outcome with the wanted one.
func (f *fixture) check(want, got outcome) {
	f.t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		f.t.Errorf("(-want +got):\n%s", diff)
	}
}

// layer3 returns the length of the frame's packet according to its IP header, in bytes.
func layer3(frame []byte) uint64 {
	p := frame[packet.NetworkOffset(frame):]
	if p[0]>>4 == 4 {
		return uint64(p[2])<<8 | uint64(p[3])
	}
	return 40 + (uint64(p[4])<<8 | uint64(p[5]))
}

// refused returns the outcome for a frame that is dropped or passed unchanged.
func refused(frame []byte, reason string, length uint64) outcome {
	verdict := uint32(verdictDrop)
	if strings.HasPrefix(reason, "pass_") {
		verdict = verdictPass
	}
	return outcome{verdict, frame, map[string]tally{reason: {1, length, 0}}, map[string]tally{}}
}

// forwarded returns the outcome for a frame that goes to a server of a service. The reference
// implementation encapsulates the frame.
func (f *fixture) forwarded(frame []byte, flow dataplane.Flow, service, server, reason string) outcome {
	f.t.Helper()
	return f.offered(frame, flow, service, reason, knownSIDOf(f.service(service), f.cfg.Node.Limits.Hints > 0).Function, server)
}

// stage is a server that a packet visits, and the function that it asks there.
type stage struct {
	function srv6.Function
	server   string
	argument uint64 // of the function
}

// stages returns servers that are all asked the same function. If they are offered a connection,
// they are the first candidates of the flow's row.
func stages(function srv6.Function, servers ...string) (all []stage) {
	if function == srv6.ConnectAvail {
		return offers(nil, servers, servers)
	}
	for _, name := range servers {
		all = append(all, stage{function: function, server: name})
	}
	return all
}

// offers returns the servers that are asked first, and then those that are offered a connection of
// a flow whose row is given. If the list has a single server, it must accept the connection.
func offers(asked []stage, row, servers []string) []stage {
	all := slices.Clone(asked)
	for _, name := range servers {
		// A server that is not in the row has index -1, which is srv6.NoColumn.
		all = append(all, stage{srv6.ConnectAvail, name, srv6.Offer{Column: slices.Index(row, name)}.Argument()})
	}
	if len(all) == 1 && len(servers) == 1 {
		all[0].function = srv6.ConnectForce
	}
	return all
}

// offered returns the outcome for a frame that visits the stages that stages returns.
func (f *fixture) offered(frame []byte, flow dataplane.Flow, service, reason string, function srv6.Function, servers ...string) outcome {
	f.t.Helper()
	return f.visited(frame, flow, service, reason, stages(function, servers...)...)
}

// visited returns the outcome for a frame that visits these stages.
func (f *fixture) visited(frame []byte, flow dataplane.Flow, service, reason string, all ...stage) outcome {
	f.t.Helper()
	out, err := packet.Encapsulate(frame, f.encapFor(flow, service, all...))
	f.must(err)
	length := layer3(frame)
	placed := uint64(0)
	if reason == "forward_new" {
		placed = 1
	}
	return outcome{
		verdictRedirect, out,
		map[string]tally{reason: {1, length, 0}},
		map[string]tally{service + "/" + all[0].server: {1, length, placed}},
	}
}

// segments returns the SIDs of stages.
func (f *fixture) segments(service string, all ...stage) (sids []netip.Addr) {
	f.t.Helper()
	for _, v := range all {
		server := serverOfName(f.service(service), v.server)
		sids = append(sids, srv6.SID{Locator: server.Locator, Function: v.function, Argument: v.argument}.Addr())
	}
	return sids
}

// answerTypes are the type and code of ICMP errors of the balancer, by reason and IP version.
var answerTypes = map[string]map[byte][2]uint8{
	"answer_too_big":   {4: {3, 4}, 6: {2, 0}},
	"answer_hop_limit": {4: {11, 0}, 6: {3, 0}},
	// Only of protocols without a reset.
	"answer_no_service": {4: {3, 3}, 6: {1, 4}},
	"answer_no_server":  {4: {3, 3}, 6: {1, 4}},
}

// answered returns the outcome for a frame whose sender gets an ICMP error from the VIP. The MTU is
// that of packet too big.
func answered(frame []byte, reason string, mtu uint32) outcome {
	p := frame[packet.NetworkOffset(frame):]
	version := p[0] >> 4
	vip, _ := netip.AddrFromSlice(p[16:20])
	if version == 6 {
		vip, _ = netip.AddrFromSlice(p[24:40])
	}
	message := answerTypes[reason][version]
	return sentBack(frame, reason, packet.ICMPError(vip, message[0], message[1], mtu, frame,
		packet.Ethernet(packet.MAC(frame), packet.MAC(frame[6:])), packet.TrafficClass(0xc0)))
}

// rejected returns the outcome for a frame whose sender is told that no server gets it. A TCP
// segment is answered as RFC 9293 section 3.10.7.1 says.
func rejected(frame []byte, reason string) outcome {
	p, _ := parse(frame)
	if p.flow.Protocol != desired.TCP {
		return answered(frame, reason, 0)
	}
	flags, seq, ack := packet.RST, p.ack, uint32(0)
	if p.flags&packet.ACK == 0 {
		flags, seq, ack = packet.RST|packet.ACK, 0, p.seq+p.segment
	}
	return sentBack(frame, reason, packet.TCP(p.flow.Destination, p.flow.Source, packet.Flags(flags),
		packet.Sequence(seq, ack), packet.Window(0),
		packet.Ethernet(packet.MAC(frame), packet.MAC(frame[6:]))))
}

// sentBack returns the outcome for a frame that is answered by another frame.
func sentBack(frame []byte, reason string, answer []byte) outcome {
	return outcome{verdictRedirect, answer, map[string]tally{reason: {1, layer3(frame), 0}}, map[string]tally{}}
}

// encapFor returns the encapsulation of packets of a flow that visit these stages.
func (f *fixture) encapFor(flow dataplane.Flow, service string, all ...stage) packet.Encap {
	f.t.Helper()
	e := f.encap(flow, service, all[0].server)
	if len(e.Segments) > 0 {
		e.Segments = f.segments(service, all...)
		e.Whole = slices.ContainsFunc(all, func(v stage) bool { return v.function.IsOffer() })
	}
	return e
}

// encap returns the encapsulation of packets of a flow to a server.
func (f *fixture) encap(flow dataplane.Flow, service, server string) packet.Encap {
	f.t.Helper()
	svc := f.service(service)
	for i := range svc.Servers {
		s := &svc.Servers[i]
		if s.Name != server {
			continue
		}
		e := packet.Encap{
			Kind: svc.Encapsulation, FlowLabel: f.flowLabel(flow),
			Own: f.macs[f.linkOf(server)], NextHop: hopMAC(target(s)),
		}
		if s.Locator.IsValid() {
			e.Sender = f.cfg.Node.Locator.Addr()
			e.Segments = f.segments(service, stage{function: knownSIDOf(svc, f.cfg.Node.Limits.Hints > 0).Function, argument: knownSIDOf(svc, f.cfg.Node.Limits.Hints > 0).Argument, server: server})
			return e
		}
		e.Source, e.Destination = f.sourceOf(flow, s.Address), s.Address
		return e
	}
	f.t.Fatalf("service %s has no server %s", service, server)
	return packet.Encap{}
}

func same(want, got outcome) bool {
	return want.Verdict == got.Verdict && bytes.Equal(want.Frame, got.Frame) &&
		maps.Equal(want.Reasons, got.Reasons) && maps.Equal(want.Servers, got.Servers)
}

// serverOf returns the server for which a frame was counted, as "service/server", or an empty text.
func serverOf(o outcome) string {
	for name := range o.Servers {
		return name
	}
	return ""
}

// reasonOf returns the only reason under which a frame was counted.
func reasonOf(o outcome) string {
	for name := range o.Reasons {
		return name
	}
	return ""
}
