// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/gopacket/gopacket/layers"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// columnService is a service that finds flows by columns in openReference.
type columnService struct {
	name string
	flow dataplane.Flow
	// persistence is hint, or else empty for stateless.
	persistence desired.Persistence
	selection   desired.Selection // empty: the default
	placement   desired.Placement
	kind        desired.Encapsulation
	candidates  int
	former      desired.Placement // before it had this persistence; empty: it always had
	few         bool              // it has fewer servers than candidates
	crc         bool              // its bucket hash is crc-32
	affinity    *desired.Affinity
}

// cookieServices have persistence stateless.
var cookieServices = []columnService{
	{name: "cookies-1", flow: flowTo(vip6, 91, desired.TCP), placement: desired.PlacementHunt,
		kind: desired.SRv6Encap, candidates: 1},
	{name: "cookies-2", flow: flowTo(vip4, 92, desired.TCP), placement: desired.PlacementHash,
		kind: desired.SRv6Encap, candidates: 2, affinity: byClient(desired.ScopeVIP, true)},
	{name: "cookies-3", flow: flowTo(vip6, 93, desired.TCP), placement: desired.PlacementHunt,
		kind: desired.SRv6Insert, candidates: 3, affinity: byClient(desired.ScopeService, false)},
	{name: "cookies-4", flow: flowTo(vip4, 94, desired.TCP), placement: desired.PlacementHunt,
		kind: desired.SRv6Encap, candidates: 4, crc: true},
	{name: "cookies-8", flow: flowTo(vip6, 95, desired.TCP), placement: desired.PlacementHash,
		kind: desired.SRv6Insert, candidates: 8, few: true, crc: true},
	{name: "former-hunt", flow: flowTo(vip6, 96, desired.TCP), placement: desired.PlacementHunt,
		kind: desired.SRv6Insert, candidates: 2, former: desired.PlacementHunt},
	{name: "former-hash", flow: flowTo(vip4, 97, desired.TCP), placement: desired.PlacementHash,
		kind: desired.SRv6Encap, candidates: 3, former: desired.PlacementHash,
		affinity: byClient(desired.ScopeService, true)},
	{name: "former-other", flow: flowTo(vip6, 98, desired.TCP), placement: desired.PlacementHunt,
		kind: desired.SRv6Encap, candidates: 3, former: desired.PlacementHash, few: true},
}

// hintServices have persistence hint. Only a balancer with a hint table has them.
var hintServices = []columnService{
	{name: "hint-1", flow: flowTo(vip6, 101, desired.TCP),
		placement: desired.PlacementHunt, kind: desired.SRv6Insert, candidates: 1,
		persistence: desired.PersistenceHint},
	{name: "hint-2", flow: flowTo(vip6, 102, desired.TCP),
		placement: desired.PlacementHunt, kind: desired.SRv6Insert, candidates: 2,
		persistence: desired.PersistenceHint},
	{name: "hint-hash", flow: flowTo(vip4, 103, desired.TCP),
		placement: desired.PlacementHash, kind: desired.SRv6Encap, candidates: 3,
		persistence: desired.PersistenceHint},
	{name: "hint-few", flow: flowTo(vip4, 104, desired.TCP),
		placement: desired.PlacementHunt, kind: desired.SRv6Encap, candidates: 4,
		persistence: desired.PersistenceHint, few: true, affinity: byClient(desired.ScopeVIP, false)},
	{name: "hint-reports", flow: flowTo(vip6, 105, desired.TCP),
		placement: desired.PlacementHunt, kind: desired.SRv6Encap, candidates: 8,
		persistence: desired.PersistenceHint, selection: desired.SelectReports,
		affinity: byClient(desired.ScopeService, true)},
	{name: "hint-after-hunt", flow: flowTo(vip6, 106, desired.TCP),
		placement: desired.PlacementHunt, kind: desired.SRv6Insert, candidates: 2,
		persistence: desired.PersistenceHint, former: desired.PlacementHunt},
	{name: "hint-after-hash", flow: flowTo(vip4, 107, desired.TCP),
		placement: desired.PlacementHash, kind: desired.SRv6Encap, candidates: 3,
		persistence: desired.PersistenceHint, former: desired.PlacementHash},
}

// columnServices are all services that find flows by columns.
var columnServices = slices.Concat(cookieServices, hintServices)

// cookieSteps lists the servers that columnServices have one after the other, and those that a
// service with few servers has. Server m0 is removed, and m2 leaves and comes back.
var cookieSteps = []struct{ all, few []uint8 }{
	{[]uint8{0, 1, 2, 3, 4, 5, 6, 7}, []uint8{0, 1, 2, 4}},
	{[]uint8{0, 1, 3, 4, 5, 6, 7}, []uint8{0, 1, 4}},
	{[]uint8{1, 2, 3, 4, 5, 6, 7}, []uint8{1, 2}},
	{[]uint8{1, 2, 3, 4, 5, 6, 7, 8}, []uint8{1, 2, 8}},
}

// cookiePorts is the number of flows to each of columnServices.
const cookiePorts = uint16(2)

// service returns the service with the servers of a step. At step 0, services with a former
// placement have persistence table.
func (c columnService) service(step int) desired.Service {
	numbers := cookieSteps[step].all
	if c.few {
		numbers = cookieSteps[step].few
	}
	var servers []desired.Server
	for _, number := range numbers {
		s := srv6Server(fmt.Sprintf("m%d", number), 80+number, 1+uint32(step)*uint32(number%3))
		s.Drained = number == 6 && step > 0
		servers = append(servers, s)
	}
	vip := c.flow.Destination
	svc := serviceOf(c.name, vip.Addr(), desired.Port(vip.Port()), desired.TCP, c.kind, servers...)
	svc.Placement, svc.Candidates, svc.Affinity = c.placement, c.candidates, c.affinity
	if step == 0 && c.former != "" {
		svc.Placement = c.former
	} else {
		svc.Persistence, svc.Generations, svc.History = desired.PersistenceStateless, 32, 3
		if c.persistence != "" {
			svc.Persistence = c.persistence
		}
		if c.crc {
			svc.BucketHash, svc.Buckets = desired.BucketHashCRC32, 256
		}
	}
	if svc.Placement == desired.PlacementHunt {
		svc.Selection = desired.SelectConsistent
		if c.selection != "" {
			svc.Selection = c.selection
		}
	}
	return svc
}

// columnConfig returns services with the servers of a step.
func columnConfig(of []columnService, step int) (services []desired.Service) {
	for _, c := range of {
		services = append(services, c.service(step))
	}
	return services
}

// takeColumnSteps makes services, which are the last ones of the configuration, go through all
// steps.
func takeColumnSteps(f *fixture, cfg *desired.Balancer, services []columnService) {
	for step := range cookieSteps {
		first := len(cfg.Services) - len(services)
		cfg.Services = slices.Concat(cfg.Services[:first], columnConfig(services, step))
		f.mustApply(cfg)
	}
	f.via["m4"], f.via["m5"], f.silent["m1"] = "narrow", "", true
}

// rememberFormer tells the reference what services were before they lost their flow table.
func (r *reference) rememberFormer() {
	for _, c := range columnServices {
		if c.former != "" {
			r.former[c.name] = c.service(0)
		}
	}
	for _, q := range quicServices {
		if q.former {
			r.former[q.name] = q.service(true)
		}
	}
}

// cookieReasons are the reasons for which services with persistence stateless forward packets, by
// placement. A service that hunts has new flows only if they were half-open before.
var cookieReasons = []string{
	"hash forward_new", "hash forward_known", "hash forward_recover", "hash forward_fragment",
	"hash forward_icmp",
	"hunt forward_new", "hunt forward_known", "hunt forward_recover", "hunt forward_fragment",
	"hunt forward_icmp", "hunt forward_hunt", "hunt forward_no_room",
}

// hintReasons are those of persistence hint.
var hintReasons = []string{
	"hint hash forward_new", "hint hash forward_known", "hint hash forward_recover",
	"hint hash forward_fragment", "hint hash forward_icmp",
	"hint hunt forward_new", "hint hunt forward_known", "hint hunt forward_recover",
	"hint hunt forward_fragment", "hint hunt forward_icmp", "hint hunt forward_hunt",
	"hint hunt forward_no_room",
}

// columnKind returns the placement of the service of columnServices that got a frame, behind the
// persistence unless that is stateless. It returns an empty text if none of them got it.
func columnKind(o outcome) string {
	service, _, _ := strings.Cut(serverOf(o), "/")
	for _, c := range columnServices {
		if c.name == service {
			return strings.TrimSpace(string(c.persistence) + " " + string(c.placement))
		}
	}
	return ""
}

// cookieOptions are the TCP options of packets with timestamps, in all places and forms that a
// header has room for. Most of the last ones are malformed.
func cookieOptions(echo uint32) (all [][]packet.Option) {
	data := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, 0x01020304), echo)
	option := func(kind layers.TCPOptionKind, data ...byte) packet.Option {
		return packet.TCPOption(kind, data)
	}
	timestamps := option(8, data...)
	other := option(8, binary.BigEndian.AppendUint32(make([]byte, 4), echo+1)...)
	return [][]packet.Option{
		{packet.Timestamps(1, echo)},
		{packet.Timestamps(1, echo), option(5, make([]byte, 24)...)},
		{option(5, make([]byte, 16)...), timestamps},
		{packet.MSS(1440), option(4), timestamps, option(3, 7)},
		{option(3, 7), timestamps},
		{option(253, make([]byte, 28)...), timestamps},
		{timestamps, other},
		{other, timestamps},
		{option(8, data[:7]...), timestamps},
		{option(8, append(data, 0)...)},
		{packet.TCPOption(layers.TCPOptionKindEndList, nil), timestamps},
	}
}

// cookieCaptures returns packets to columnServices, and packets of their servers.
func cookieCaptures() (frames [][]byte) {
	for _, c := range columnServices {
		for port := range cookiePorts {
			flow := fromPort(c.flow, port)
			frames = append(frames, cookiePackets(flow, c.candidates)...)
			frames = append(frames, c.fromServers(flow)...)
		}
		frames = append(frames, c.unusual()...)
	}
	return frames
}

// cookiePackets returns packets of a flow: SYNs, packets with cookies and packets without.
func cookiePackets(flow dataplane.Flow, candidates int) (frames [][]byte) {
	all := []packet.TCPFlags{packet.SYN, packet.ACK, packet.RST, packet.FIN | packet.ACK}
	for _, flags := range all {
		frames = append(frames, frameOf(flow, packet.Flags(flags)))
	}
	frames = append(frames, frameOf(flow, packet.Timestamps(1, 0)),
		frameOf(flow, packet.Flags(packet.RST), packet.Timestamps(1, 3)),
		frameOf(flow, packet.Flags(packet.ACK), packet.Timestamps(1, 0)),
		frameOf(flow, packet.Flags(packet.SYN|packet.ACK), packet.Timestamps(1, 2)))
	for column := range uint32(candidates) + 1 {
		cookie := packet.Timestamps(1, 0xabcde000|column)
		frames = append(frames, frameOf(flow, packet.Flags(packet.ACK), cookie))
	}
	return frames
}

// unusual returns unusual packets to the service. Mutants make SYNs of the others.
func (c columnService) unusual() (frames [][]byte) {
	for i, options := range cookieOptions(0xabcdef01) {
		flow := fromPort(c.flow, uint16(i)%cookiePorts)
		frames = append(frames, frameOf(flow, append(options, packet.Flags(packet.ACK))...))
	}
	router, unreachable := router6, uint8(1)
	if c.flow.Source.Addr().Is4() {
		router, unreachable = router4, 3
	}
	ack := []packet.Option{packet.Flags(packet.ACK), packet.Timestamps(1, 0xabcdef00)}
	for range 5 { // so that mutants of fragments of one packet meet
		frames = append(frames, packet.Fragments(frameOf(c.flow, append(ack, large)...), 64, 12)...)
	}
	for port := range cookiePorts {
		flow := fromPort(c.flow, port)
		frames = append(frames, packet.Fragments(frameOf(flow, append(ack, large)...), 64, 11)...)
		frames = append(frames,
			frameOf(flow, packet.Timestamps(1, 0), packet.Payload(make([]byte, 1350))),
			frameOf(flow, append(ack, packet.Payload(make([]byte, 1350)))...),
			packet.ICMPError(router, unreachable, 0, 0, reply(flow)))
		if c.flow.Source.Addr().Is6() {
			frames = append(frames,
				frameOf(flow, packet.HopByHop(8)),
				frameOf(flow, append(ack, packet.HopByHop(8))...),
				frameOf(flow, packet.Flags(packet.ACK), packet.DestinationOptions(8)))
		}
	}
	return frames
}

// varyColumns makes some servers of columnServices fail, and enters some of the flows of their
// captures into the tables, as of before they found flows by columns. It also enters hints.
func (r *reference) varyColumns(random *rand.Rand) {
	for _, c := range columnServices {
		svc := r.classify(c.flow)
		if svc == nil {
			continue // the balancer is not that of openReference
		}
		fails := random.IntN(2) == 0
		for _, server := range svc.Servers {
			r.fail(svc, server.Name, fails && random.IntN(3) == 0)
		}
		_, isFormer := r.former[c.name]
		for port := range cookiePorts {
			if r.hasHints() && random.IntN(2) == 0 {
				r.varyHint(random, fromPort(c.flow, port), svc)
			}
			if isFormer && random.IntN(2) == 0 {
				r.enterAny(random, fromPort(c.flow, port), svc)
			}
		}
	}
}

func (r *reference) fail(svc *desired.Service, server string, fails bool) {
	name := svc.Name + "/" + server
	if r.failing[name] != fails {
		r.setHealth(svc.Name, server, !fails)
		r.failing[name] = fails
	}
}

// enterAny enters a flow into one of the tables, with a random server, state and age, unless
// another flow has the entry.
func (r *reference) enterAny(random *rand.Rand, flow dataplane.Flow, svc *desired.Service) {
	bucket, table, number := r.bucketOf(flow), r.plane.Flows, r.bucketNumber(flow)
	state := []dataplane.FlowState{stateNew, stateEstablished, stateSilent, stateClosing, stateClosed}[random.IntN(5)]
	tabled, _ := r.tabled(svc)
	if tabled.Placement == desired.PlacementHunt && random.IntN(2) == 0 {
		place, _ := flow.TableHash(r.serviceID(flow), &r.identity)
		bucket, table, state = r.halfOpenOf(flow), r.plane.HalfOpen, stateNew
		number = uint32(bucketNumber(r.plane.HalfOpen, place))
	}
	server := svc.Servers[random.IntN(len(svc.Servers))].Name
	seen := (r.now() - []uint16{0, 1, 2, 3, 14, 15, 20, 500}[random.IntN(8)]) & dataplane.FlowTimeMask
	i := r.preferred(flow)
	if bucket[i].state != stateFree {
		return
	}
	bucket[i] = referenceEntry{flow, svc.Name + "/" + server, state, seen}
	table.Entries[number*dataplane.FlowsPerBucket+uint32(i)] =
		entryOf(r.signature(flow), r.slot(svc.Name, server), state, seen)
	if table == r.plane.HalfOpen && random.IntN(3) == 0 {
		r.crowdOut(flow, svc.Name, server)
	}
}

// crowdOut fills the bucket of a flow with other established flows that are in use.
func (r *reference) crowdOut(flow dataplane.Flow, service, server string) {
	bucket, slot := r.bucketOf(flow), r.slot(service, server)
	other := referenceEntry{server: service + "/" + server, state: stateEstablished, seen: r.now()}
	for i := range bucket {
		if bucket[i].state == stateFree {
			bucket[i] = other
			signature := r.signature(flow) ^ uint64(i+1)
			r.fixture.bucket(flow)[i] = entryOf(signature, slot, stateEstablished, r.now())
		}
	}
}
