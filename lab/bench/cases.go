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

// Names of cases at a balancer. docs/understand/performance.md describes them, too.
const (
	caseNull      = "null"             // the host program alone
	caseFloor     = "floor"            // an encapsulation without any lookup
	caseFloorHint = "floor-hint-table" // floor, and an access to a table of 4 bytes for each flow
	caseFloorFlow = "floor-flow-table" // floor, and an access to a table of 16 bytes for each flow
	caseMiss      = "vip-miss"         // a packet that is not to a VIP
	caseKnown     = "known-flow"       // a packet of a flow in the flow table
	caseUDP       = "known-flow-udp"   // known-flow with UDP
	caseQUIC      = "known-flow-quic"  // known-flow-udp, found by a connection ID without a flow table
	caseSYN       = "syn-of-new-flow"  // the SYN of a new flow, which is entered in the flow table
	caseUnknown   = "non-syn-unknown"  // a later packet of a flow that another balancer had
	caseReference = "reference-lru"    // known-flow, with the kernel's LRU hash map as the flow table

	// The name of a step follows each of these three prefixes. The program ends after that step.
	caseSteps     = "up-to-"          // known-flow
	caseSYNSteps  = "syn-up-to-"      // syn-of-new-flow
	caseHuntSteps = "syn-hunt-up-to-" // syn-hunt

	caseTurnSYN = "syn-round-robin" // syn-of-new-flow of a service with placement round-robin

	// The number of servers follows each of these six prefixes, and the prefixes of polledSYN.
	caseHashSYN  = "syn-hash-"  // syn-of-new-flow
	caseInferSYN = "syn-infer-" // syn-of-new-flow of a service with placement infer
	caseHashMix  = "mix-hash-"  // the SYN, a later packet and the FIN of new flows
	caseInferMix = "mix-infer-" // the same packets to a service with placement infer
	caseHLBSYN   = "syn-hlb-"   // syn-infer- with estimator hlb
	caseHLBMix   = "mix-hlb-"   // mix-infer- with estimator hlb

	// The following are of services with placement hunt.
	caseHuntKnown = "known-flow-hunt"      // known-flow
	caseStateless = "known-flow-stateless" // known-flow, found by cookies without a flow table
	caseOptions   = "stateless-options"    // known-flow-stateless, with the cookie behind many options
	caseSACK      = "stateless-sack-"      // known-flow-stateless, with the cookie behind 1 to 3 blocks
	caseHistory   = "stateless-history"    // known-flow-stateless after a change of all servers
	caseCRC       = "stateless-crc"        // known-flow-stateless, with buckets by CRC-32
	caseHint      = "known-flow-hint"      // known-flow, found by hints in a table for these flows
	caseHuntSYN   = "syn-hunt"             // the SYN of a new flow, which is offered to two servers
	caseReportSYN = "syn-hunt-reports"     // syn-hunt with three servers of eight, by load reports
	caseSignal    = "signal-create"        // a server's SYN-ACK, which signals that it accepts a flow
)

// Names of cases on a server.
const (
	caseDeliver   = "agent-deliver" // a packet that the agent decapsulates and delivers
	caseAccept    = "agent-accept"  // an offer that the server accepts
	casePassOn    = "agent-pass-on" // an offer that the server refuses
	caseAck       = "agent-ack"     // a packet of a flow that the server has accepted
	caseOfferStep = "agent-up-to-"  // agent-accept, up to the step whose name follows
)

// The reasons under which a balancer counts packets of known flows.
const (
	reasonKnown   = "forward_known"   // to the server of the flow
	reasonRecover = "forward_recover" // to all servers that may have the flow, one after the other
)

// service describes the service to which the packets of a case go.
type service struct {
	family        family
	protocol      desired.Protocol
	encapsulation desired.Encapsulation // "": none
	placement     desired.Placement     // "": hash
	selection     desired.Selection     // of placement hunt; "": consistent
	estimator     desired.Estimator     // of placement infer; "": the default
	persistence   desired.Persistence   // "": table
	bucketHash    desired.BucketHash    // of persistence stateless; "": multilinear
	changed       bool                  // other servers have replaced all servers
	servers       int                   // 0: serverCount
}

// serverCount returns the number of the service's servers.
func (s service) serverCount() int {
	if s.servers == 0 {
		return serverCount
	}
	return s.servers
}

// benchCase describes packets of one kind, and the program that processes them.
type benchCase struct {
	name string
	service
	flows   uint32 // number of known flows
	setup   setup
	step    string // the step after which the program ends; "": it runs to its end
	traffic traffic
	reason  string // the reason under which the program counts the packets; "": it does not count
}

// isBase tells whether this is a base case: null or floor. The other cases are compared with the
// base cases, so these are always measured.
func (c *benchCase) isBase() bool { return c.name == caseNull || c.name == caseFloor }

// encapsulations are the encapsulations for packets of a family.
var encapsulations = map[family][]desired.Encapsulation{
	ipv6: {desired.SRv6Insert, desired.SRv6Encap, desired.GRE, desired.IPIP},
	ipv4: {desired.SRv6Encap, desired.GRE, desired.IPIP},
}

// typical has the encapsulation of cases that are measured with only one encapsulation.
var typical = map[family]desired.Encapsulation{ipv6: desired.SRv6Insert, ipv4: desired.SRv6Encap}

// allCases returns every case, for each number of flows in levels. Flow tables have room for at
// least room flows.
func allCases(levels []uint32, room uint32) []benchCase {
	const hintBytes, flowBytes = 4, 16 // of an entry of the hint table and the flow table
	cases := []benchCase{
		nullCase(ipv6), nullCase(ipv4), floorCase(), missCase(ipv6, room), missCase(ipv4, room),
	}
	for _, flows := range levels {
		cases = append(cases, floorLookupCase(caseFloorHint, flows, hintBytes),
			floorLookupCase(caseFloorFlow, flows, flowBytes))
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
				referenceCase(tcp, flows, room),
				knownCase(caseUDP, usual(f, desired.UDP), flows, room),
				quicCase(usual(f, desired.UDP), flows),
				newCase(caseSYN, tcp, packet.SYN, flows, room),
				newCase(caseTurnSYN, turns, packet.SYN, flows, room),
				newCase(caseUnknown, tcp, packet.ACK, flows, room))
		}
		cases = append(cases, huntCases(f, levels, room)...)
	}
	return append(cases, inferCases(levels, room)...)
}

// stepCases returns the cases at a balancer whose program ends after a step. They have no reason,
// because most programs end before they count the packet.
func stepCases(flows, room uint32) (cases []benchCase) {
	add := func(c benchCase, step string) {
		c.step, c.reason = step, ""
		cases = append(cases, c)
	}
	tcp := usual(ipv6, desired.TCP)
	hunt := tcp
	hunt.placement = desired.PlacementHunt
	for _, step := range steps {
		if step != "choose" && step != "commit" { // a known flow needs neither of them
			add(knownCase(caseSteps+step, tcp, flows, room), step)
		}
		add(newCase(caseSYNSteps+step, tcp, packet.SYN, flows, room), newFlow+step)
		add(offeredCase(caseHuntSteps+step, hunt, flows, room), newFlow+step)
	}
	return cases
}

// polledSYN returns the name of the case syn-of-new-flow with a placement that polls, without the
// number of servers at its end.
func polledSYN(p desired.Placement) string { return fmt.Sprintf("syn-%s-", p) }

// inferCases returns the cases with placement infer and with placements that poll. For comparison,
// it also returns the same cases with placement hash. No agents answer the polls in a measurement.
func inferCases(levels []uint32, room uint32) (cases []benchCase) {
	for _, servers := range []int{8, 128, 1000} {
		hash := usual(ipv6, desired.TCP)
		hash.servers = servers
		infer := hash
		infer.placement = desired.PlacementInfer
		hlb := infer
		hlb.estimator = desired.EstimateHLB
		name := func(prefix string) string { return fmt.Sprint(prefix, servers) }
		for _, flows := range levels {
			cases = append(cases,
				newCase(name(caseHashSYN), hash, packet.SYN, flows, room),
				newCase(name(caseInferSYN), infer, packet.SYN, flows, room),
				mixCase(name(caseHashMix), hash, flows, room),
				mixCase(name(caseInferMix), infer, flows, room),
				newCase(name(caseHLBSYN), hlb, packet.SYN, flows, room),
				mixCase(name(caseHLBMix), hlb, flows, room))
			for _, method := range desired.PlacementMethods {
				if !method.Polls {
					continue
				}
				polled := hash
				polled.placement = method.Name
				cases = append(cases,
					newCase(name(polledSYN(method.Name)), polled, packet.SYN, flows, room))
			}
		}
	}
	return cases
}

// mixCase uses three packets of each connection: the SYN, a packet that establishes the connection,
// and the FIN (HLB, section VI-F). After the FIN comes the SYN of the next connection.
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
			statelessCase(s, flows), optionsCase(s, flows), historyCase(s, flows), crcCase(s, flows),
			hintCase(s, flows),
			offeredCase(caseHuntSYN, s, flows, room),
			offeredCase(caseReportSYN, reports, flows, room), signalCase(s, flows, room))
	}
	if f == ipv6 {
		cases = append(cases, offerStepCases(s)...)
		for blocks := 1; blocks <= 3; blocks++ {
			cases = append(cases, sackCase(s, levels[0], blocks))
		}
	}
	// With threshold 0 a server refuses all offers.
	return append(cases,
		offerCase(caseAccept, s, 1, "deliver_"+underscored(s.encapsulation)),
		offerCase(casePassOn, s, 0, "next_refused"),
		ackCase(s))
}

// underscored returns the name of an encapsulation as it is in the names of reasons.
func underscored(kind desired.Encapsulation) string {
	return strings.ReplaceAll(string(kind), "-", "_")
}

// usual returns a service with the typical encapsulation of its family.
func usual(f family, protocol desired.Protocol) service {
	return service{family: f, protocol: protocol, encapsulation: typical[f]}
}

// nullCase runs the host program alone. Its time is subtracted from the times of the other cases of
// the family.
func nullCase(f family) benchCase {
	c := benchCase{name: caseNull, service: service{family: f, protocol: desired.TCP}, flows: 1}
	c.traffic = trafficTo(f, vips[f], desired.TCP, packet.ACK)
	c.traffic.verdict = xdpAborted // the host program's verdict without a program under test
	return c
}

// floorCase encapsulates packets, without any lookup.
func floorCase() benchCase {
	c := nullCase(ipv6)
	c.name, c.encapsulation, c.traffic.verdict = caseFloor, desired.SRv6Insert, xdpTX
	c.setup.kind = setupFloor
	return c
}

// floorLookupCase is the floor with one random access to a table that has the given number of bytes
// for each flow. No persistence with such a table can cost less.
func floorLookupCase(name string, flows, bytesPerFlow uint32) benchCase {
	c := floorCase()
	c.name, c.flows, c.traffic.flows = name, flows, flows
	c.setup.kind, c.setup.tableBytes = setupFloorLookup, flows*bytesPerFlow
	return c
}

// missCase uses packets to an address that is not a VIP.
func missCase(f family, room uint32) benchCase {
	return benchCase{
		name: caseMiss, service: usual(f, desired.TCP), flows: 1,
		setup:   setup{kind: setupBalancer, family: ipv6, capacity: room},
		traffic: passed(trafficTo(f, strangers[f], desired.TCP, packet.ACK)),
	}
}

// knownCase uses packets of known flows, in random order. The flow table is first filled to its
// capacity, so that lookups cost as much as in a table in use.
func knownCase(name string, s service, flows, room uint32) benchCase {
	c := benchCase{name: name, service: s, flows: flows}
	c.setup = setup{
		kind: setupBalancer, family: s.family, capacity: max(room, flows), content: knownFlows,
	}
	c.traffic = trafficTo(s.family, vips[s.family], s.protocol, packet.ACK)
	c.traffic.flows = flows
	c.reason = reasonKnown
	return c
}

// statelessCase uses packets of known flows with persistence stateless, in random order. The cookie
// in a packet's timestamps names the column of its server. So there is no flow table to fill.
func statelessCase(s service, flows uint32) benchCase {
	s.persistence = desired.PersistenceStateless
	c := benchCase{name: caseStateless, service: s, flows: flows}
	c.setup = setup{kind: setupBalancer, family: s.family, capacity: 1, persistence: s.persistence}
	c.traffic = trafficTo(s.family, vips[s.family], s.protocol, packet.ACK, packet.Timestamps(1, 1))
	c.traffic.flows = flows
	c.reason = reasonKnown
	return c
}

// optionsCase is the worst case of statelessCase: the timestamps are the last option in a TCP
// header of the largest length, behind options of one byte.
func optionsCase(s service, flows uint32) benchCase {
	c := statelessCase(s, flows)
	c.name = caseOptions
	const others = 28 // with timestamps and padding they fill the 40 bytes for options
	var options []packet.Option
	for range others {
		options = append(options, packet.TCPOption(layers.TCPOptionKindNop, nil))
	}
	c.traffic = trafficTo(s.family, vips[s.family], s.protocol, packet.ACK,
		append(options, packet.Timestamps(1, 1))...)
	c.traffic.flows = flows
	return c
}

// sackCase is statelessCase with the timestamps behind a SACK option of some blocks. With 1 to 3
// blocks, the data offset is 11, 13 and 15, as in figure 5 of SHELL.
func sackCase(s service, flows uint32, blocks int) benchCase {
	c := statelessCase(s, flows)
	c.name = fmt.Sprint(caseSACK, blocks)
	nop := packet.TCPOption(layers.TCPOptionKindNop, nil)
	sack := packet.TCPOption(layers.TCPOptionKindSACK, make([]byte, 8*blocks))
	c.traffic = trafficTo(s.family, vips[s.family], s.protocol, packet.ACK,
		nop, nop, sack, packet.Timestamps(1, 1))
	c.traffic.flows = flows
	return c
}

// historyCase is statelessCase after a change of weights that has given each column another server.
// So each packet visits two servers.
func historyCase(s service, flows uint32) benchCase {
	c := statelessCase(s, flows)
	c.name, c.reason = caseHistory, reasonRecover
	c.changed, c.setup.changed = true, true
	return c
}

// crcCase is statelessCase with the bucket hash that switches can compute, too.
func crcCase(s service, flows uint32) benchCase {
	s.bucketHash = desired.BucketHashCRC32
	c := statelessCase(s, flows)
	c.name, c.setup.bucketHash = caseCRC, s.bucketHash
	return c
}

// quicCase uses packets of QUIC flows, in random order. They all have the same connection ID.
func quicCase(s service, flows uint32) benchCase {
	s.persistence = desired.PersistenceQUIC
	c := benchCase{name: caseQUIC, service: s, flows: flows}
	c.setup = setup{kind: setupBalancer, family: s.family, capacity: 1, persistence: s.persistence}
	server := []byte{0xc4, 0x60, 1} // the ID of server 1; see addServers
	id, err := quicForm().Config().Encode(server, make([]byte, quicForm().NonceLength))
	if err != nil {
		panic(err) // the form is a constant
	}
	const shortHeader = 0x40 // the first byte of a packet with a short header
	c.traffic = trafficTo(s.family, vips[s.family], s.protocol, 0,
		packet.Payload(append([]byte{shortHeader}, id...)))
	c.traffic.flows = flows
	c.reason = reasonKnown
	return c
}

// quicForm returns the form of connection IDs in quicCase.
func quicForm() *desired.QUIC {
	return &desired.QUIC{Form: desired.QUICLB21, ServerIDLength: 3, NonceLength: 8}
}

// hintCase uses packets of known flows with persistence hint, in random order. About one flow in 40
// follows no hint, because its set of the hint table has no room, or because its hint is shared
// (docs/operate/stateless.md).
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

// referenceCase is knownCase with the reference program, which has an LRU hash map as its flow
// table. The reference program knows a flow after one packet.
func referenceCase(s service, flows, room uint32) benchCase {
	c := knownCase(caseReference, s, flows, room)
	c.setup.kind, c.setup.content, c.reason = setupReference, newFlows, ""
	return c
}

// newCase uses a new flow for each packet. The flow table is first filled with flows of one packet.
// Cases with the same capacity and number of servers share one table, because its entries do not
// depend on the kind of packet or on the family.
func newCase(name string, s service, flags packet.TCPFlags, flows, room uint32) benchCase {
	c := benchCase{name: name, service: s, flows: flows}
	c.setup = setup{
		kind: setupBalancer, family: ipv6, capacity: max(room, flows), content: newFlows,
		servers: s.servers,
	}
	c.traffic = trafficTo(s.family, vips[s.family], s.protocol, flags)
	c.traffic.order = inTurn
	c.reason = reasonKnown // under which nearly no packet may be counted (requireCounted)
	return c
}

// offeredCase is newCase with a service whose balancer offers each new flow to servers.
func offeredCase(name string, s service, flows, room uint32) benchCase {
	c := newCase(name, s, packet.SYN, flows, room)
	c.reason = "forward_hunt"
	return c
}

// signalCase uses SYN-ACKs of a server to clients, each of a new flow. By the SYN-ACK, the server
// signals to the balancer that it has accepted the flow. The balancer decapsulates the packet and
// passes it on.
func signalCase(s service, flows, room uint32) benchCase {
	c := newCase(caseSignal, s, packet.SYN, flows, room)
	c.traffic = signalFrom(s, 1, 0)
	c.reason = "return_create"
	return c
}

// signalFrom returns SYN-ACKs by which a server signals that it accepts new flows. report is the
// load report in the signals; 0 means none.
func signalFrom(s service, server int, report uint64) traffic {
	client := clients[s.family]
	reply := packet.TCP(
		netip.AddrPortFrom(vips[s.family], servicePort), netip.AddrPortFrom(client, clientPort),
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
	t.order, t.verdict, t.frame = inTurn, xdpPass, frame
	// The flows differ in the last 32 bits of the client's address, which is the inner destination.
	address := client.AsSlice()
	t.flowOffset = uint32(bytes.LastIndex(frame, address) + len(address) - 4)
	return t
}

// deliverCase uses packets that an agent decapsulates and delivers.
func deliverCase(s service, flows uint32) benchCase {
	c := agentCase(caseDeliver, s, packet.ACK, srv6.Deliver)
	c.flows, c.traffic.flows = flows, flows
	return c
}

// offerCase offers a new connection to a server with each packet. Another server is the next
// candidate. The server accepts a connection if fewer connections than the threshold wait for the
// application. Here none ever waits, so the server accepts all connections unless the threshold is
// 0.
func offerCase(name string, s service, threshold uint32, reason string) benchCase {
	c := agentCase(name, s, packet.SYN, srv6.ConnectAvail, srv6.ConnectForce)
	c.flows, c.traffic.order, c.reason = 1, inTurn, reason
	c.setup.accept, c.setup.threshold = true, threshold
	return c
}

// offerStepCases returns a case for each step of the agent's program. The program of the case ends
// after that step, before it counts the packet, so the case has no reason. The server accepts.
func offerStepCases(s service) (cases []benchCase) {
	for _, step := range agentSteps {
		c := offerCase(caseOfferStep+step, s, 1, "")
		c.step = step
		cases = append(cases, c)
	}
	return cases
}

// ackCase uses packets of connections that the server has accepted, as the balancer sends them when
// it knows the server.
func ackCase(s service) benchCase {
	c := agentCase(caseAck, s, packet.ACK, srv6.AckStickiness)
	c.flows, c.traffic.flows = agentFlows, agentFlows
	c.reason = "deliver_" + underscored(s.encapsulation)
	c.setup.accept, c.setup.threshold = true, 1
	c.setup.content, c.setup.capacity = knownFlows, agentFlows
	return c
}

// agentFlows is the number of flows in the cases of a server with known flows.
const agentFlows = 1000

// agentCase uses encapsulated packets to server 1. functions are the functions of the SIDs in the
// list of segments: functions[0] is that of server 1, and functions[1] is that of server 2.
func agentCase(
	name string, s service, flags packet.TCPFlags, functions ...srv6.Function,
) benchCase {
	c := benchCase{name: name, service: s}
	c.setup = setup{kind: setupAgent, family: s.family, encapsulation: s.encapsulation}
	inner := passed(trafficTo(s.family, vips[s.family], s.protocol, flags))
	c.traffic = wrapped(inner, s.encapsulation, functions...)
	return c
}

// wrapped returns the traffic in an encapsulation, as a balancer sends it to a server.
func wrapped(t traffic, kind desired.Encapsulation, functions ...srv6.Function) traffic {
	frame, err := packet.Encapsulate(t.frame, envelope(kind, functions...))
	if err != nil {
		panic(fmt.Sprintf("%s: %v", kind, err)) // frames and addresses are constants
	}
	// The encapsulation adds headers in front of the client's address, so the address moves. Only
	// srv6-insert adds its header behind the addresses.
	if kind != desired.SRv6Insert {
		t.flowOffset += uint32(len(frame) - len(t.frame))
	}
	t.frame = frame
	return t
}

// envelope returns the encapsulation that a balancer adds to a packet for server 1. With segment
// routing, segment i asks server i for the i-th function.
func envelope(kind desired.Encapsulation, functions ...srv6.Function) packet.Encap {
	e := packet.Encap{Kind: kind, Own: clientMAC, NextHop: hostMAC}
	if !hasLocators(kind) {
		e.Source, e.Destination = balancerAddress, serverAddress(1)
		return e
	}
	e.Sender = balancerLocator.Addr()
	for i, function := range functions {
		sid := srv6.SID{Locator: serverLocator(i + 1), Function: function}
		e.Segments = append(e.Segments, sid.Addr())
	}
	return e
}

// passed returns the traffic with the expected verdict XDP_PASS: the program gives the packets to
// the host's stack.
func passed(t traffic) traffic {
	t.verdict = xdpPass
	return t
}

// clientPort is the source port of all flows.
const clientPort = 40000

// trafficTo returns packets of one flow from a client to an address, which a program is expected to
// forward (XDP_TX).
func trafficTo(
	f family, destination netip.Addr, protocol desired.Protocol, flags packet.TCPFlags,
	options ...packet.Option,
) traffic {
	source := netip.AddrPortFrom(clients[f], clientPort)
	target := netip.AddrPortFrom(destination, servicePort)
	link := packet.Ethernet(clientMAC, hostMAC)
	// The flows differ in the last 32 bits of the source address. In IPv4 this address begins at
	// octet 12 of the header, and is these 32 bits. In IPv6 it begins at octet 8, and has 12 octets
	// before them.
	t := traffic{flows: 1, verdict: xdpTX, flowOffset: ethernetHeader + 12}
	if f == ipv6 {
		t.flowOffset = ethernetHeader + 8 + 12
	}
	if protocol == desired.UDP {
		t.frame = packet.UDP(source, target, append(options, link)...)
	} else {
		t.frame = packet.TCP(source, target, append(options, link, packet.Flags(flags))...)
		// The TCP header follows the last 32 bits of the source address and the destination
		// address. Octet 13 of the TCP header has the flags.
		t.flagsOffset = t.flowOffset + 4 + uint32(destination.BitLen()/8) + 13
	}
	return t
}
