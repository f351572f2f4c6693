package bench

import (
	"fmt"
	"net/netip"

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
)

// service is what is done with the packets of a case.
type service struct {
	family        family
	protocol      config.Protocol
	encapsulation config.Encapsulation // "" where nothing is encapsulated
}

// benchCase is packets of one kind, and the program that they are for.
type benchCase struct {
	name string
	service
	flows   uint32
	setup   setup
	step    string // after which the program ends; "": none
	traffic traffic
}

// isBase tells whether the others are compared with the case: those are measured whatever is chosen.
func (c *benchCase) isBase() bool { return c.name == caseNull || c.name == caseFloor }

// steps of a packet's way; enum step of bpf/bench/steps.bpf.c.
var steps = []string{"parse", "classify", "persist", "encapsulate", "count"}

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
			c := knownCase(caseSteps+step, service{ipv6, config.TCP, typical[ipv6]}, flows, room)
			c.step = step
			cases = append(cases, c)
		}
	}
	for _, f := range []family{ipv6, ipv4} {
		usual := service{f, config.TCP, typical[f]}
		for _, kind := range encapsulations[f] {
			s := service{f, config.TCP, kind}
			for _, flows := range levels {
				cases = append(cases, knownCase(caseKnown, s, flows, room), deliverCase(s, flows))
			}
		}
		for _, flows := range levels {
			cases = append(cases,
				referenceCase(usual, flows, room), knownCase(caseUDP, service{f, config.UDP, typical[f]}, flows, room),
				newCase(caseSYN, usual, packet.SYN, flows, room), newCase(caseUnknown, usual, packet.ACK, flows, room))
		}
	}
	return cases
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
		name: caseMiss, service: service{f, config.TCP, typical[f]}, flows: 1,
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
	return c
}

// referenceCase does the same with the reference, to which a flow is known from its first packet.
func referenceCase(s service, flows, room uint32) benchCase {
	c := knownCase(caseReference, s, flows, room)
	c.setup.kind, c.setup.content = setupReference, newFlows
	return c
}

// newCase has each packet the first of its flow. The table is full of others like it: whether they came by
// a SYN, and of which family they are, its entries do not tell.
func newCase(name string, s service, flags packet.TCPFlags, flows, room uint32) benchCase {
	c := benchCase{name: name, service: s, flows: flows}
	c.setup = setup{kind: setupBalancer, family: ipv6, capacity: max(room, flows), content: newFlows}
	c.traffic = trafficTo(s.family, vips[s.family], s.protocol, flags)
	c.traffic.order = inTurn
	return c
}

// deliverCase takes the encapsulation off again.
func deliverCase(s service, flows uint32) benchCase {
	c := benchCase{name: caseDeliver, service: s, flows: flows}
	c.setup = setup{kind: setupAgent, family: s.family, encapsulation: s.encapsulation}
	t := passed(trafficTo(s.family, vips[s.family], s.protocol, packet.ACK))
	wrapped, err := packet.Encapsulate(t.frame, envelope(s.encapsulation))
	if err != nil {
		panic(fmt.Sprintf("%s of %s: %v", s.encapsulation, s.family, err)) // frames and addresses are constants
	}
	// An inserted header pushes only what is behind the addresses back.
	if s.encapsulation != config.SRv6Insert {
		t.flowOffset += uint32(len(wrapped) - len(t.frame))
	}
	t.frame, t.flows = wrapped, flows
	c.traffic = t
	return c
}

// envelope is what a balancer sends to the first server.
func envelope(kind config.Encapsulation) packet.Encap {
	e := packet.Encap{Kind: kind, Own: clientMAC, NextHop: hostMAC}
	if hasLocators(kind) {
		e.Sender = balancerLocator.Addr()
		e.Segments = []netip.Addr{srv6.SID{Locator: serverLocator(1), Function: srv6.Deliver}.Addr()}
	} else {
		e.Source, e.Destination = balancerAddress, serverAddress(1)
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
