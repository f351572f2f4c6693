// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// family is of the client's packets.
type family string

const (
	ipv4 family = "ipv4"
	ipv6 family = "ipv6"
)

// ethernetHeader is the length of a frame's first header, in bytes.
const ethernetHeader = 14

// Names of cases.
const (
	caseNull      = "null"            // the host program alone
	caseFloor     = "floor"           // a bare encapsulation
	caseMiss      = "vip-miss"        // not for a VIP
	caseKnown     = "known-flow"      // in the flow table
	caseUDP       = "known-flow-udp"  // the same of UDP
	caseSYN       = "syn-of-new-flow" // placed and entered
	caseUnknown   = "non-syn-unknown" // of a flow that another balancer had
	caseReference = "reference-lru"   // known-flow, remembered by the kernel's LRU hash map
	caseSteps     = "up-to-"          // known-flow, up to one of the steps of its way
	caseDeliver   = "agent-deliver"   // decapsulated on a server
	caseHuntKnown = "known-flow-hunt" // known-flow of a service whose servers decide
	caseHuntSYN   = "syn-hunt"        // of a new flow of such a service: offered to two servers
	caseSignal    = "signal-create"   // the SYN-ACK by which a server says that it has taken a flow
	caseAccept    = "agent-accept"    // such an offer, which the server takes
	casePassOn    = "agent-pass-on"   // one that it refuses
	caseAck       = "agent-ack"       // a packet of a flow that the server has taken
)

// reasonKnown counts the packets of known flows at a balancer.
const reasonKnown = "forward_known"

// service is what is done with the packets of a case.
type service struct {
	family        family
	protocol      config.Protocol
	encapsulation config.Encapsulation // "" where nothing is encapsulated
	hunts         bool                 // placement hunt, with two candidates
}

// benchCase is packets of one kind, and the program that they are for.
type benchCase struct {
	name string
	service
	flows   uint32
	setup   setup
	step    string // after which the program ends; "": none
	traffic traffic
	reason  string // that the packets are counted by; "": there are no counters
}

// isBase tells whether the others are compared with the case: those are measured whatever is chosen.
func (c *benchCase) isBase() bool { return c.name == caseNull || c.name == caseFloor }

// steps of a packet's way; enum step of bpf/bench/steps.bpf.c.
var steps = []string{"parse", "classify", "lookup", "encapsulate", "count"}

// encapsulations are those of a family's packets.
var encapsulations = map[family][]config.Encapsulation{
	ipv6: {config.SRv6Insert, config.SRv6Encap, config.GRE, config.IPIP},
	ipv4: {config.SRv6Encap, config.GRE, config.IPIP},
}

// typical is the encapsulation of the cases that are not measured with all.
var typical = map[family]config.Encapsulation{ipv6: config.SRv6Insert, ipv4: config.SRv6Encap}

// allCases lists every case for the given numbers of flows, in tables that have room for so many flows at
// least.
func allCases(levels []uint32, room uint32) []benchCase {
	cases := []benchCase{nullCase(ipv6), nullCase(ipv4), floorCase(), missCase(ipv6, room), missCase(ipv4, room)}
	for _, flows := range levels {
		for _, step := range steps {
			c := knownCase(caseSteps+step, usual(ipv6, config.TCP), flows, room)
			c.step, c.reason = step, "" // it ends before it is counted
			cases = append(cases, c)
		}
	}
	for _, f := range []family{ipv6, ipv4} {
		for _, kind := range encapsulations[f] {
			s := service{family: f, protocol: config.TCP, encapsulation: kind}
			for _, flows := range levels {
				cases = append(cases, knownCase(caseKnown, s, flows, room), deliverCase(s, flows))
			}
		}
		tcp := usual(f, config.TCP)
		for _, flows := range levels {
			cases = append(cases,
				referenceCase(tcp, flows, room), knownCase(caseUDP, usual(f, config.UDP), flows, room),
				newCase(caseSYN, tcp, packet.SYN, flows, room), newCase(caseUnknown, tcp, packet.ACK, flows, room))
		}
		cases = append(cases, huntCases(f, levels, room)...)
	}
	return cases
}

// huntCases are those of services whose servers decide, at the balancer and on a server.
func huntCases(f family, levels []uint32, room uint32) (cases []benchCase) {
	s := usual(f, config.TCP)
	s.hunts = true
	for _, flows := range levels {
		offered := newCase(caseHuntSYN, s, packet.SYN, flows, room)
		offered.reason = "forward_hunt"
		cases = append(cases, knownCase(caseHuntKnown, s, flows, room), offered,
			signalCase(s, flows, room))
	}
	return append(cases,
		offerCase(caseAccept, s, 1, "deliver_"+underscored(s.encapsulation)), offerCase(casePassOn, s, 0, "next_refused"),
		ackCase(s))
}

func underscored(kind config.Encapsulation) string { return strings.ReplaceAll(string(kind), "-", "_") }

// usual is a service of the family in its typical encapsulation.
func usual(f family, protocol config.Protocol) service {
	return service{family: f, protocol: protocol, encapsulation: typical[f]}
}

// nullCase is also the measure of what is to be taken off the others of its family.
func nullCase(f family) benchCase {
	c := benchCase{name: caseNull, service: service{family: f, protocol: config.TCP}, flows: 1}
	c.traffic = trafficTo(f, vips[f], config.TCP, packet.ACK)
	c.traffic.verdict = xdpAborted // no program says anything
	return c
}

func floorCase() benchCase {
	c := nullCase(ipv6)
	c.name, c.encapsulation, c.traffic.verdict = caseFloor, config.SRv6Insert, xdpTX
	c.setup.kind = setupFloor
	return c
}

func missCase(f family, room uint32) benchCase {
	return benchCase{
		name: caseMiss, service: usual(f, config.TCP), flows: 1,
		setup:   setup{kind: setupBalancer, family: ipv6, capacity: room},
		traffic: passed(trafficTo(f, strangers[f], config.TCP, packet.ACK)),
	}
}

// knownCase visits flows that the table has, in random order. The table is filled with all that it was
// asked to have room for before, so that it is one in use.
func knownCase(name string, s service, flows, room uint32) benchCase {
	c := benchCase{name: name, service: s, flows: flows}
	c.setup = setup{kind: setupBalancer, family: s.family, capacity: max(room, flows), content: knownFlows}
	c.traffic = trafficTo(s.family, vips[s.family], s.protocol, packet.ACK)
	c.traffic.flows = flows
	c.reason = reasonKnown
	return c
}

// referenceCase does the same with the reference, to which a flow is known from its first packet.
func referenceCase(s service, flows, room uint32) benchCase {
	c := knownCase(caseReference, s, flows, room)
	c.setup.kind, c.setup.content, c.reason = setupReference, newFlows, ""
	return c
}

// newCase has each packet the first of its flow. The table is full of others like it: whether they came by
// a SYN, and of which family they are, its entries do not tell.
func newCase(name string, s service, flags packet.TCPFlags, flows, room uint32) benchCase {
	c := benchCase{name: name, service: s, flows: flows}
	c.setup = setup{kind: setupBalancer, family: ipv6, capacity: max(room, flows), content: newFlows}
	c.traffic = trafficTo(s.family, vips[s.family], s.protocol, flags)
	c.traffic.order = inTurn
	c.reason = reasonKnown
	return c
}

// signalCase has a server take one new flow after the other: each packet is its SYN-ACK to the client,
// which tells the balancer, and which the balancer unwraps and passes on.
func signalCase(s service, flows, room uint32) benchCase {
	c := newCase(caseSignal, s, packet.SYN, flows, room)
	c.traffic.verdict, c.reason = xdpPass, "return_create"
	client := clients[s.family]
	reply := packet.TCP(netip.AddrPortFrom(vips[s.family], servicePort), netip.AddrPortFrom(client, 40000),
		packet.Ethernet(clientMAC, hostMAC), packet.Flags(packet.SYN|packet.ACK))
	sid := srv6.SID{Locator: balancerLocator, Function: srv6.CreateStickiness}
	frame, err := packet.Signal(reply, packet.Encap{
		Kind: s.encapsulation, Sender: serverLocator(1).Addr(), Segments: []netip.Addr{sid.Addr()},
		Own: clientMAC, NextHop: hostMAC,
	})
	if err != nil {
		panic(fmt.Sprintf("%s: %v", s.encapsulation, err)) // frames and addresses are constants
	}
	address := client.AsSlice()
	c.traffic.frame = frame
	c.traffic.flowOffset = uint32(bytes.LastIndex(frame, address) + len(address) - 4)
	return c
}

// deliverCase takes the encapsulation off again.
func deliverCase(s service, flows uint32) benchCase {
	c := agentCase(caseDeliver, s, packet.ACK, srv6.Deliver)
	c.flows, c.traffic.flows = flows, flows
	return c
}

// offerCase has each packet a new connection that is offered to a server, and to another after it. The
// server takes connections while fewer than the threshold wait for the application; none does.
func offerCase(name string, s service, threshold uint32, reason string) benchCase {
	c := agentCase(name, s, packet.SYN, srv6.ConnectAvail, srv6.ConnectForce)
	c.flows, c.traffic.order, c.reason = 1, inTurn, reason
	c.setup.accept, c.setup.threshold = true, threshold
	return c
}

// ackCase is what comes of a connection once the balancer knows that the server has it.
func ackCase(s service) benchCase {
	c := agentCase(caseAck, s, packet.ACK, srv6.AckStickiness)
	c.flows, c.traffic.flows, c.reason = agentFlows, agentFlows, "deliver_"+underscored(s.encapsulation)
	c.setup.accept, c.setup.threshold = true, 1
	c.setup.content, c.setup.capacity = knownFlows, agentFlows
	return c
}

// agentFlows is how many flows a server has that is asked for those it knows.
const agentFlows = 1000

// agentCase is packets in an envelope to a server, with what it and those after it are asked.
func agentCase(name string, s service, flags packet.TCPFlags, functions ...srv6.Function) benchCase {
	c := benchCase{name: name, service: s}
	c.setup = setup{kind: setupAgent, family: s.family, encapsulation: s.encapsulation}
	c.traffic = wrapped(passed(trafficTo(s.family, vips[s.family], s.protocol, flags)), s.encapsulation, functions...)
	return c
}

// wrapped is traffic in an envelope.
func wrapped(t traffic, kind config.Encapsulation, functions ...srv6.Function) traffic {
	frame, err := packet.Encapsulate(t.frame, envelope(kind, functions...))
	if err != nil {
		panic(fmt.Sprintf("%s: %v", kind, err)) // frames and addresses are constants
	}
	// An inserted header pushes only what is behind the addresses back.
	if kind != config.SRv6Insert {
		t.flowOffset += uint32(len(frame) - len(t.frame))
	}
	t.frame = frame
	return t
}

// envelope is what a balancer sends to the first server.
func envelope(kind config.Encapsulation, functions ...srv6.Function) packet.Encap {
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

// passed is traffic that goes up the host's own stack.
func passed(t traffic) traffic {
	t.verdict = xdpPass
	return t
}

// trafficTo is packets without payload of one flow, to be forwarded.
func trafficTo(f family, destination netip.Addr, protocol config.Protocol, flags packet.TCPFlags) traffic {
	source := netip.AddrPortFrom(clients[f], 40000)
	target := netip.AddrPortFrom(destination, servicePort)
	link := packet.Ethernet(clientMAC, hostMAC)
	t := traffic{flows: 1, verdict: xdpTX, flowOffset: ethernetHeader + 12}
	if f == ipv6 {
		t.flowOffset = ethernetHeader + 8 + 12
	}
	if protocol == config.UDP {
		t.frame = packet.UDP(source, target, link)
	} else {
		t.frame = packet.TCP(source, target, link, packet.Flags(flags))
	}
	return t
}
