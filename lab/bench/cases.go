// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"

	"github.com/gopacket/gopacket/layers"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// family is the IP version of the client's packets.
type family string

const (
	ipv4 family = "ipv4"
	ipv6 family = "ipv6"
)

// ethernetHeader is the length of an Ethernet header, in bytes.
const ethernetHeader = 14

// Names of cases.
const (
	caseNull      = "null"             // the host program alone
	caseFloor     = "floor"            // a bare encapsulation
	caseFloorHint = "floor-hint-table" // floor, and a random word of a table of 4 bytes for each flow
	caseFloorFlow = "floor-flow-table" // floor, and a random word of a table of 16 bytes for each flow
	caseMiss      = "vip-miss"         // not to a VIP
	caseKnown     = "known-flow"       // in the flow table
	caseUDP       = "known-flow-udp"   // the same with UDP
	caseQUIC      = "known-flow-quic"  // known-flow-udp, by a connection ID, without a flow table
	caseSYN       = "syn-of-new-flow"  // placed and entered in the flow table
	caseUnknown   = "non-syn-unknown"  // of a flow that another balancer had
	caseReference = "reference-lru"    // known-flow, in the kernel's LRU hash map
	// In front of the name of a step: known-flow, syn-of-new-flow and syn-hunt, up to that step of
	// the program.
	caseSteps     = "up-to-"
	caseSYNSteps  = "syn-up-to-"
	caseHuntSteps = "syn-hunt-up-to-"
	caseDeliver   = "agent-deliver"   // decapsulated on a server
	caseHuntKnown = "known-flow-hunt" // known-flow of a service with placement hunt
	caseTurnSYN   = "syn-round-robin" // syn-of-new-flow of a service with placement round-robin
	// The next four are followed by the number of servers. There are more of them: polledSYN.
	caseHashSYN   = "syn-hash-"            // syn-of-new-flow
	caseInferSYN  = "syn-infer-"           // the same of a service with placement infer
	caseHashMix   = "mix-hash-"            // the SYN, a later packet and the FIN of new flows
	caseInferMix  = "mix-infer-"           // the same of a service with placement infer
	caseStateless = "known-flow-stateless" // known-flow-hunt, by cookies, without a flow table
	caseOptions   = "stateless-options"    // known-flow-stateless, with the cookie far back in the packet
	caseHistory   = "stateless-history"    // known-flow-stateless, where all columns had other servers
	caseHint      = "known-flow-hint"      // known-flow-hunt, by hints, in a table for these flows
	caseHuntSYN   = "syn-hunt"             // of a new flow of such a service: offered to two servers
	caseReportSYN = "syn-hunt-reports"     // the same by load reports: offered to three of eight servers
	caseSignal    = "signal-create"        // the SYN-ACK that signals that a server has accepted a flow
	caseAccept    = "agent-accept"         // such an offer, which the server accepts
	casePassOn    = "agent-pass-on"        // such an offer, which the server refuses
	caseAck       = "agent-ack"            // a packet of a flow that the server has accepted
	caseOfferStep = "agent-up-to-"         // agent-accept, up to a step of the program
)

// The reasons that count the packets of known flows at a balancer. Packets of the second visit
// several servers.
const (
	reasonKnown   = "forward_known"
	reasonRecover = "forward_recover"
)

// service is the treatment of the packets of a case.
type service struct {
	family        family
	protocol      desired.Protocol
	encapsulation desired.Encapsulation // "": none
	placement     desired.Placement     // "": hash; hunt has two candidates
	selection     desired.Selection     // of placement hunt; "": consistent
	persistence   desired.Persistence   // "": table
	changed       bool                  // other servers have taken the places of all servers
	servers       int                   // 0: serverCount
}

func (s service) serverCount() int {
	if s.servers == 0 {
		return serverCount
	}
	return s.servers
}

// benchCase is packets of one kind, and the program that processes them.
type benchCase struct {
	name string
	service
	flows   uint32
	setup   setup
	step    string // after which the program ends; "": none
	traffic traffic
	reason  string // that counts the packets; "": there are no counters
}

// isBase tells whether other cases are compared with this case. Such cases are always measured.
func (c *benchCase) isBase() bool { return c.name == caseNull || c.name == caseFloor }

// encapsulations are the encapsulations for packets of a family.
var encapsulations = map[family][]desired.Encapsulation{
	ipv6: {desired.SRv6Insert, desired.SRv6Encap, desired.GRE, desired.IPIP},
	ipv4: {desired.SRv6Encap, desired.GRE, desired.IPIP},
}

// typical is the encapsulation of the cases that are measured with only one.
var typical = map[family]desired.Encapsulation{ipv6: desired.SRv6Insert, ipv4: desired.SRv6Encap}

// allCases returns every case for the given numbers of flows. The flow tables have room for at
// least room flows.
func allCases(levels []uint32, room uint32) []benchCase {
	cases := []benchCase{nullCase(ipv6), nullCase(ipv4), floorCase(), missCase(ipv6, room), missCase(ipv4, room)}
	for _, flows := range levels {
		cases = append(cases, floorLookupCase(caseFloorHint, flows, 4), floorLookupCase(caseFloorFlow, flows, 16))
		cases = append(cases, stepCases(flows, room)...)
	}
	for _, f := range []family{ipv6, ipv4} {
		for _, kind := range encapsulations[f] {
			s := service{family: f, protocol: desired.TCP, encapsulation: kind}
			for _, flows := range levels {
				cases = append(cases, knownCase(caseKnown, s, flows, room), deliverCase(s, flows))
			}
		}
		tcp := usual(f, desired.TCP)
		turns := tcp
		turns.placement = desired.PlacementRoundRobin
		for _, flows := range levels {
			cases = append(cases,
				referenceCase(tcp, flows, room), knownCase(caseUDP, usual(f, desired.UDP), flows, room),
				quicCase(usual(f, desired.UDP), flows),
				newCase(caseSYN, tcp, packet.SYN, flows, room), newCase(caseTurnSYN, turns, packet.SYN, flows, room),
				newCase(caseUnknown, tcp, packet.ACK, flows, room))
		}
		cases = append(cases, huntCases(f, levels, room)...)
	}
	return append(cases, inferCases(levels, room)...)
}

// stepCases returns cases whose program ends after a step. Most end before they count the packet.
func stepCases(flows, room uint32) (cases []benchCase) {
	add := func(c benchCase, step string) {
		c.step, c.reason = step, ""
		cases = append(cases, c)
	}
	tcp := usual(ipv6, desired.TCP)
	hunt := tcp
	hunt.placement = desired.PlacementHunt
	for _, step := range steps {
		if step != "choose" && step != "commit" { // persistence has found the server
			add(knownCase(caseSteps+step, tcp, flows, room), step)
		}
		add(newCase(caseSYNSteps+step, tcp, packet.SYN, flows, room), newFlow+step)
		add(offeredCase(caseHuntSteps+step, hunt, flows, room), newFlow+step)
	}
	return cases
}

// polledSYN returns the name of the case of such a placement, before the number of servers.
func polledSYN(p desired.Placement) string { return fmt.Sprintf("syn-%s-", p) }

// inferCases returns the cases of services with placements that infer, and the same cases with hash.
func inferCases(levels []uint32, room uint32) (cases []benchCase) {
	for _, servers := range []int{8, 128, 1000} {
		hash := usual(ipv6, desired.TCP)
		hash.servers = servers
		infer := hash
		infer.placement = desired.PlacementInfer
		name := func(prefix string) string { return fmt.Sprint(prefix, servers) }
		for _, flows := range levels {
			cases = append(cases,
				newCase(name(caseHashSYN), hash, packet.SYN, flows, room),
				newCase(name(caseInferSYN), infer, packet.SYN, flows, room),
				mixCase(name(caseHashMix), hash, flows, room),
				mixCase(name(caseInferMix), infer, flows, room))
			for _, method := range desired.PlacementMethods { // in the bench nobody answers polls
				if !method.Polls {
					continue
				}
				placement := method.Name
				polled := hash
				polled.placement = placement
				cases = append(cases,
					newCase(name(polledSYN(placement)), polled, packet.SYN, flows, room))
			}
		}
	}
	return cases
}

// mixCase uses the packets of one connection after the other: the SYN, a packet that establishes
// it, and the FIN (HLB, section VI-F).
func mixCase(name string, s service, flows, room uint32) benchCase {
	c := newCase(name, s, packet.SYN, flows, room)
	c.traffic.order = connections
	c.reason = "" // two of three packets are of known flows
	return c
}

// huntCases returns the cases of services with placement hunt, at the balancer and on a server.
func huntCases(f family, levels []uint32, room uint32) (cases []benchCase) {
	s := usual(f, desired.TCP)
	s.placement = desired.PlacementHunt
	reports := s
	reports.selection = desired.SelectReports
	for _, flows := range levels {
		cases = append(cases, knownCase(caseHuntKnown, s, flows, room),
			statelessCase(s, flows), optionsCase(s, flows), historyCase(s, flows), hintCase(s, flows),
			offeredCase(caseHuntSYN, s, flows, room),
			offeredCase(caseReportSYN, reports, flows, room), signalCase(s, flows, room))
	}
	if f == ipv6 {
		cases = append(cases, offerStepCases(s)...)
	}
	return append(cases,
		offerCase(caseAccept, s, 1, "deliver_"+underscored(s.encapsulation)), offerCase(casePassOn, s, 0, "next_refused"),
		ackCase(s))
}

func underscored(kind desired.Encapsulation) string {
	return strings.ReplaceAll(string(kind), "-", "_")
}

// usual returns a service of the family with its typical encapsulation.
func usual(f family, protocol desired.Protocol) service {
	return service{family: f, protocol: protocol, encapsulation: typical[f]}
}

// nullCase runs the host program alone. Its time is subtracted from that of the other cases of its
// family.
func nullCase(f family) benchCase {
	c := benchCase{name: caseNull, service: service{family: f, protocol: desired.TCP}, flows: 1}
	c.traffic = trafficTo(f, vips[f], desired.TCP, packet.ACK)
	c.traffic.verdict = xdpAborted // the verdict without a program
	return c
}

func floorCase() benchCase {
	c := nullCase(ipv6)
	c.name, c.encapsulation, c.traffic.verdict = caseFloor, desired.SRv6Insert, xdpTX
	c.setup.kind = setupFloor
	return c
}

// floorLookupCase is the floor with one random access to a table that has the given number of bytes
// for each flow: the least cost of a persistence with such a table.
func floorLookupCase(name string, flows, bytesPerFlow uint32) benchCase {
	c := floorCase()
	c.name, c.flows, c.traffic.flows = name, flows, flows
	c.setup.kind, c.setup.tableBytes = setupFloorLookup, flows*bytesPerFlow
	return c
}

func missCase(f family, room uint32) benchCase {
	return benchCase{
		name: caseMiss, service: usual(f, desired.TCP), flows: 1,
		setup:   setup{kind: setupBalancer, family: ipv6, capacity: room},
		traffic: passed(trafficTo(f, strangers[f], desired.TCP, packet.ACK)),
	}
}

// knownCase uses known flows, in random order. The table is first filled to its capacity, so that
// it is like a table in use.
func knownCase(name string, s service, flows, room uint32) benchCase {
	c := benchCase{name: name, service: s, flows: flows}
	c.setup = setup{kind: setupBalancer, family: s.family, capacity: max(room, flows), content: knownFlows}
	c.traffic = trafficTo(s.family, vips[s.family], s.protocol, packet.ACK)
	c.traffic.flows = flows
	c.reason = reasonKnown
	return c
}

// statelessCase uses packets of flows of a service that hunts, in random order. Their timestamps
// tell the column of the server. There is no flow table to fill.
func statelessCase(s service, flows uint32) benchCase {
	s.persistence = desired.PersistenceStateless
	c := benchCase{name: caseStateless, service: s, flows: flows}
	c.setup = setup{kind: setupBalancer, family: s.family, capacity: 1, persistence: s.persistence}
	c.traffic = trafficTo(s.family, vips[s.family], s.protocol, packet.ACK, packet.Timestamps(1, 1))
	c.traffic.flows = flows
	c.reason = reasonKnown
	return c
}

// optionsCase is the worst case of statelessCase: the timestamps are the last option in the longest
// TCP header, behind options that are as short as can be.
func optionsCase(s service, flows uint32) benchCase {
	c := statelessCase(s, flows)
	c.name = caseOptions
	var options []packet.Option
	for range 28 {
		options = append(options, packet.TCPOption(layers.TCPOptionKindNop, nil))
	}
	c.traffic = trafficTo(s.family, vips[s.family], s.protocol, packet.ACK,
		append(options, packet.Timestamps(1, 1))...)
	c.traffic.flows = flows
	return c
}

// historyCase is statelessCase with packets that visit two servers, because a change of weights has
// given each column another server.
func historyCase(s service, flows uint32) benchCase {
	c := statelessCase(s, flows)
	c.name, c.reason = caseHistory, reasonRecover
	c.changed, c.setup.changed = true, true
	return c
}

// quicCase uses packets of QUIC, in random order. All flows have the same connection ID.
func quicCase(s service, flows uint32) benchCase {
	s.persistence = desired.PersistenceQUIC
	c := benchCase{name: caseQUIC, service: s, flows: flows}
	c.setup = setup{kind: setupBalancer, family: s.family, capacity: 1, persistence: s.persistence}
	id, err := quicForm().Config().Encode([]byte{0xc4, 0x60, 1}, make([]byte, quicForm().NonceLength))
	if err != nil {
		panic(err) // the form is a constant
	}
	c.traffic = trafficTo(s.family, vips[s.family], s.protocol, 0,
		packet.Payload(append([]byte{0x40}, id...)))
	c.traffic.flows = flows
	c.reason = reasonKnown
	return c
}

// quicForm returns the form of connection IDs in quicCase.
func quicForm() *desired.QUIC {
	return &desired.QUIC{Form: desired.QUICLB21, ServerIDLength: 3, NonceLength: 8}
}

// hintCase uses flows whose hints name their server, in random order. About one flow in 40 follows
// no hint, because its set has no room, or because its hint is shared (docs/operate/stateless.md).
func hintCase(s service, flows uint32) benchCase {
	s.persistence = desired.PersistenceHint
	c := benchCase{name: caseHint, service: s, flows: flows}
	c.setup = setup{
		kind: setupBalancer, family: s.family, capacity: max(leastHints, flows), content: knownFlows,
		persistence: s.persistence,
	}
	c.traffic = trafficTo(s.family, vips[s.family], s.protocol, packet.ACK)
	c.traffic.flows = flows
	c.reason = reasonKnown
	return c
}

// leastHints is the smallest hint table that a configuration can have.
const leastHints = 1024

// referenceCase does the same with the reference program, for which a flow is known from its first
// packet.
func referenceCase(s service, flows, room uint32) benchCase {
	c := knownCase(caseReference, s, flows, room)
	c.setup.kind, c.setup.content, c.reason = setupReference, newFlows, ""
	return c
}

// newCase uses a new flow for each packet. The table is full of new flows. Their entries do not
// depend on the kind of the first packet or on the family.
func newCase(name string, s service, flags packet.TCPFlags, flows, room uint32) benchCase {
	c := benchCase{name: name, service: s, flows: flows}
	c.setup = setup{
		kind: setupBalancer, family: ipv6, capacity: max(room, flows), content: newFlows,
		servers: s.servers,
	}
	c.traffic = trafficTo(s.family, vips[s.family], s.protocol, flags)
	c.traffic.order = inTurn
	c.reason = reasonKnown
	return c
}

// offeredCase offers a new flow to servers with each packet.
func offeredCase(name string, s service, flows, room uint32) benchCase {
	c := newCase(name, s, packet.SYN, flows, room)
	c.reason = "forward_hunt"
	return c
}

// signalCase has a server accept one new flow after the other. Each packet is the server's SYN-ACK
// to the client. It signals the acceptance to the balancer, which decapsulates it and passes it on.
func signalCase(s service, flows, room uint32) benchCase {
	c := newCase(caseSignal, s, packet.SYN, flows, room)
	c.traffic = signalFrom(s, 1, 0)
	c.reason = "return_create"
	return c
}

// signalFrom returns the SYN-ACKs by which a server accepts new flows, with its load report or 0.
func signalFrom(s service, server int, report uint64) traffic {
	client := clients[s.family]
	reply := packet.TCP(netip.AddrPortFrom(vips[s.family], servicePort), netip.AddrPortFrom(client, 40000),
		packet.Ethernet(clientMAC, hostMAC), packet.Flags(packet.SYN|packet.ACK))
	to := srv6.SID{Locator: balancerLocator, Function: srv6.CreateStickiness}
	from := srv6.SID{Locator: serverLocator(server), Function: srv6.Host, Argument: report}
	frame, err := packet.Signal(reply, packet.Encap{
		Kind: s.encapsulation, Sender: from.Addr(), Segments: []netip.Addr{to.Addr()},
		Own: clientMAC, NextHop: hostMAC,
	})
	if err != nil {
		panic(fmt.Sprintf("%s: %v", s.encapsulation, err)) // frames and addresses are constants
	}
	t := trafficTo(s.family, vips[s.family], s.protocol, packet.SYN)
	address := client.AsSlice()
	t.order, t.verdict, t.frame = inTurn, xdpPass, frame
	t.flowOffset = uint32(bytes.LastIndex(frame, address) + len(address) - 4)
	return t
}

// deliverCase has an agent decapsulate packets.
func deliverCase(s service, flows uint32) benchCase {
	c := agentCase(caseDeliver, s, packet.ACK, srv6.Deliver)
	c.flows, c.traffic.flows = flows, flows
	return c
}

// offerCase offers a new connection to a server with each packet, with another server as the next
// candidate. The server accepts connections while the number of connections that wait for the
// application is below the threshold. None ever waits.
func offerCase(name string, s service, threshold uint32, reason string) benchCase {
	c := agentCase(name, s, packet.SYN, srv6.ConnectAvail, srv6.ConnectForce)
	c.flows, c.traffic.order, c.reason = 1, inTurn, reason
	c.setup.accept, c.setup.threshold = true, threshold
	return c
}

// offerStepCases returns offerCase with a server that accepts, up to each step.
func offerStepCases(s service) (cases []benchCase) {
	for _, step := range agentSteps {
		c := offerCase(caseOfferStep+step, s, 1, "") // the program ends before it counts the packet
		c.step = step
		cases = append(cases, c)
	}
	return cases
}

// ackCase uses packets of a connection after the balancer has learned that the server has it.
func ackCase(s service) benchCase {
	c := agentCase(caseAck, s, packet.ACK, srv6.AckStickiness)
	c.flows, c.traffic.flows, c.reason = agentFlows, agentFlows, "deliver_"+underscored(s.encapsulation)
	c.setup.accept, c.setup.threshold = true, 1
	c.setup.content, c.setup.capacity = knownFlows, agentFlows
	return c
}

// agentFlows is the number of flows in the cases of a server with known flows.
const agentFlows = 1000

// agentCase uses encapsulated packets to a server. The functions are those of the segments, the
// server's own first.
func agentCase(name string, s service, flags packet.TCPFlags, functions ...srv6.Function) benchCase {
	c := benchCase{name: name, service: s}
	c.setup = setup{kind: setupAgent, family: s.family, encapsulation: s.encapsulation}
	c.traffic = wrapped(passed(trafficTo(s.family, vips[s.family], s.protocol, flags)), s.encapsulation, functions...)
	return c
}

// wrapped returns the traffic with an encapsulation.
func wrapped(t traffic, kind desired.Encapsulation, functions ...srv6.Function) traffic {
	frame, err := packet.Encapsulate(t.frame, envelope(kind, functions...))
	if err != nil {
		panic(fmt.Sprintf("%s: %v", kind, err)) // frames and addresses are constants
	}
	// An inserted header moves only the bytes after the addresses.
	if kind != desired.SRv6Insert {
		t.flowOffset += uint32(len(frame) - len(t.frame))
	}
	t.frame = frame
	return t
}

// envelope returns the encapsulation that a balancer adds for the first server.
func envelope(kind desired.Encapsulation, functions ...srv6.Function) packet.Encap {
	e := packet.Encap{Kind: kind, Own: clientMAC, NextHop: hostMAC}
	if !hasLocators(kind) {
		e.Source, e.Destination = balancerAddress, serverAddress(1)
		return e
	}
	e.Sender = balancerLocator.Addr()
	for i, function := range functions {
		e.Segments = append(e.Segments, srv6.SID{Locator: serverLocator(i + 1), Function: function}.Addr())
	}
	return e
}

// passed returns the traffic with the verdict that the packet goes up the host's own stack.
func passed(t traffic) traffic {
	t.verdict = xdpPass
	return t
}

// trafficTo returns packets of one flow without payload, to be forwarded.
func trafficTo(
	f family, destination netip.Addr, protocol desired.Protocol, flags packet.TCPFlags, options ...packet.Option,
) traffic {
	source := netip.AddrPortFrom(clients[f], 40000)
	target := netip.AddrPortFrom(destination, servicePort)
	link := packet.Ethernet(clientMAC, hostMAC)
	t := traffic{flows: 1, verdict: xdpTX, flowOffset: ethernetHeader + 12}
	if f == ipv6 {
		t.flowOffset = ethernetHeader + 8 + 12
	}
	if protocol == desired.UDP {
		t.frame = packet.UDP(source, target, append(options, link)...)
	} else {
		t.frame = packet.TCP(source, target, append(options, link, packet.Flags(flags))...)
		// They are octet 13 of the TCP header, behind the rest of the source and the destination.
		t.flagsOffset = t.flowOffset + 4 + uint32(destination.BitLen()/8) + 13
	}
	return t
}
