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

// benchCase is packets of one kind, and the program that they are for.
type benchCase struct {
	name          string
	family        family
	encapsulation config.Encapsulation // "" where nothing is encapsulated
	flows         uint32
	setup         setup
	traffic       traffic
}

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
		for i, name := range steps {
			c := knownCase(caseSteps+name, ipv6, typical[ipv6], flows, room)
			c.setup.kind, c.setup.lastStep = setupSteps, uint32(i)
			cases = append(cases, c)
		}
	}
	for _, f := range []family{ipv6, ipv4} {
		for _, kind := range encapsulations[f] {
			for _, flows := range levels {
				cases = append(cases, knownCase(caseKnown, f, kind, flows, room), deliverCase(f, kind, flows))
			}
		}
		for _, flows := range levels {
			cases = append(cases,
				knownCase(caseReference, f, typical[f], flows, room), knownCase(caseUDP, f, typical[f], flows, room),
				newCase(caseSYN, f, packet.SYN, flows, room), newCase(caseUnknown, f, packet.ACK, flows, room))
		}
	}
	return cases
}

// nullCase is also the measure of what is to be taken off the others of its family.
func nullCase(f family) benchCase {
	c := benchCase{name: caseNull, family: f, flows: 1, traffic: trafficTo(f, vips[f], config.TCP, packet.ACK)}
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
	c := benchCase{name: caseMiss, family: f, flows: 1, traffic: trafficTo(f, strangers[f], config.TCP, packet.ACK)}
	c.setup = setup{kind: setupBalancer, family: f, encapsulation: typical[f], protocol: config.TCP, capacity: room}
	c.traffic.verdict = xdpPass
	return c
}

// knownCase visits flows that the table has, in random order. The table is filled to its capacity before,
// so that its room is that of a table in use.
func knownCase(name string, f family, kind config.Encapsulation, flows, room uint32) benchCase {
	c := benchCase{name: name, family: f, encapsulation: kind, flows: flows}
	c.setup = setup{
		kind: setupBalancer, family: f, encapsulation: kind, protocol: config.TCP, capacity: max(room, flows),
		filledBy: packet.SYN, confirmed: true,
	}
	switch name {
	case caseReference:
		c.setup.kind = setupReference
	case caseUDP:
		c.setup.protocol = config.UDP
	}
	c.traffic = trafficTo(f, vips[f], c.setup.protocol, packet.ACK)
	c.traffic.flows = flows
	return c
}

// newCase has each packet the first of its flow. The table is full of others like it.
func newCase(name string, f family, flags packet.TCPFlags, flows, room uint32) benchCase {
	c := benchCase{name: name, family: f, encapsulation: typical[f], flows: flows}
	c.setup = setup{
		kind: setupBalancer, family: f, encapsulation: typical[f], protocol: config.TCP,
		capacity: max(room, flows), filledBy: flags,
	}
	c.traffic = trafficTo(f, vips[f], config.TCP, flags)
	c.traffic.order = sequential
	c.traffic.first = uint64(c.setup.capacity)
	return c
}

// deliverCase takes the encapsulation off again.
func deliverCase(f family, kind config.Encapsulation, flows uint32) benchCase {
	c := benchCase{name: caseDeliver, family: f, encapsulation: kind, flows: flows}
	c.setup = setup{kind: setupAgent, family: f, encapsulation: kind}
	t := trafficTo(f, vips[f], config.TCP, packet.ACK)
	wrapped, err := packet.Encapsulate(t.frame, envelope(kind))
	if err != nil {
		panic(fmt.Sprintf("%s of %s: %v", kind, f, err)) // frames and addresses are constants
	}
	// An inserted header pushes only what is behind the addresses back.
	if kind != config.SRv6Insert {
		t.flowOffset += uint32(len(wrapped) - len(t.frame))
	}
	t.frame, t.flows, t.verdict = wrapped, flows, xdpPass
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
