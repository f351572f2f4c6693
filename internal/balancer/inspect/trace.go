// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/tables"
)

// Packet contains the properties of a packet that determine what the data path does with it. The
// packet must be one that the data path can parse, with a hop limit of more than 1.
type Packet struct {
	Flow   dataplane.Flow
	Opens  bool // a TCP segment with SYN and without ACK
	Length int  // bytes of layer 3
}

// Trace is what the data path would do with a packet, and why.
type Trace struct {
	Instance string         `json:"instance"`
	Flow     dataplane.Flow `json:"flow"`
	Opens    bool           `json:"opens"`  // the packet is a SYN
	Length   int            `json:"length"` // length of the packet in bytes of layer 3
	Service  *TracedService `json:"service"`
	// Known is the flow's entry in the flow table, or in the table of half-open flows.
	Known *TracedEntry `json:"known"`
	// Placement is where an unknown flow goes, or a known flow whose packet leaves its server. For
	// a service that hunts, Placement is set for all flows.
	Placement *TracedPlacement `json:"placement"`
	// Course lists the servers that the packet visits, and what it asks of each, in the order of
	// travel. If the candidates are random, it contains at most the drained server of the flow.
	Course []TracedSegment `json:"course"`
	// Server is the server that gets the packet first.
	Server *TracedServer `json:"server"`
	// Encapsulation is nil if the candidates are random, because the number of segments is not
	// known beforehand.
	Encapsulation *TracedEncapsulation `json:"encapsulation"`
	NextHop       *NextHop             `json:"next_hop"`
	// Reason is the reason under which the packet is counted.
	Reason string `json:"reason"`
}

// TracedService is the service of a packet.
type TracedService struct {
	Name  string `json:"name"`
	Exact bool   `json:"exact"` // it has the flow's port; else all ports without another service
}

// TracedEntry is an entry of the flow table or of the table of half-open flows.
type TracedEntry struct {
	Server string `json:"server"`
	State  string `json:"state"` // new, established, closing or half-open
	// Idle is the time since the last packet, in seconds, with a granularity of 4 to 7 seconds.
	Idle float64 `json:"idle_seconds"`
	// Left says why the packet does not go to the server. It is empty if the packet goes there.
	Left string `json:"left,omitempty"`
}

// TracedPlacement is a row of a service's candidate table. It contains only the candidates that the
// packet may visit.
type TracedPlacement struct {
	Bucket     uint32   `json:"bucket"`
	Buckets    uint32   `json:"buckets"`
	Candidates []string `json:"candidates"` // the first one gets the flow or the first offer
	// Random is true for a SYN that is offered to the candidates of a random bucket.
	Random bool `json:"random,omitempty"`
}

// TracedSegment is a server that a packet visits, and what the packet asks of the server.
type TracedSegment struct {
	Server   string `json:"server"`
	Function string `json:"function"` // a function of docs/protocol.md; empty with gre and ipip
}

// TracedServer is the server that gets a packet first.
type TracedServer struct {
	Name    string `json:"name"`
	Slot    uint32 `json:"slot"`
	Address string `json:"address"`
	// Causes are the reasons why the server is unfit for new flows.
	Causes []Condition `json:"causes"`
}

// TracedEncapsulation is the encapsulation of a packet.
type TracedEncapsulation struct {
	Kind  config.Encapsulation `json:"kind"`
	Added int                  `json:"added"` // length of the added headers in bytes
	// MaxLength is the length of the longest packet that fits the interface, in bytes of layer 3,
	// without the encapsulation. It is 0 if the server has no next hop.
	MaxLength int `json:"max_length,omitempty"`
	// Source and Destination are the addresses of the outermost IP header.
	Source      netip.Addr `json:"source"`
	Destination netip.Addr `json:"destination"`
	// Segments are all addresses that the packet visits, beginning with the balancer; only for
	// SRv6.
	Segments []netip.Addr `json:"segments,omitempty"`
}

// Trace follows a packet through the tables as `xdp_lb` in bpf/balancer/balancer.bpf.c does. It
// returns an error if a table cannot be read.
func (v *View) Trace(p Packet) (*Trace, error) {
	t := &Trace{Instance: v.tables.Instance, Flow: p.Flow, Opens: p.Opens, Length: p.Length}
	reason, err := v.steer(p, t)
	if err != nil {
		return nil, fmt.Errorf("instance %s: %w", v.tables.Instance, err)
	}
	t.Reason = v.tables.Reasons[reason]
	return t, nil
}

func (v *View) steer(p Packet, t *Trace) (dataplane.Reason, error) {
	service, exact, isVIP := v.classify(p.Flow)
	switch {
	case !isVIP:
		return dataplane.PassNotVIP, nil
	case service == nil:
		return dataplane.DropNoService, nil
	}
	labels, err := v.tables.ServiceLabels()
	if err != nil {
		return 0, err
	}
	t.Service = &TracedService{Name: labels[service.Id].Name, Exact: exact}
	to, found, err := v.findServers(p, service, t)
	if err != nil || len(to.slots) == 0 {
		return found, err
	}
	failed, err := v.send(p, service, to, t)
	if err != nil || failed != dataplane.NoReason {
		return failed, err
	}
	return found, nil
}

// course lists the servers that a packet visits, and the function that it asks of each server.
type course struct {
	slots     []uint32
	functions []srv6.Function
}

// askAll returns the course through the servers in slots. The packet asks the function last of the
// last server, and the function each of all others: ask in bpf/balancer/segments.h.
func askAll(slots []uint32, each, last srv6.Function) course {
	c := course{slots, slices.Repeat([]srv6.Function{each}, len(slots))}
	if len(slots) > 0 {
		c.functions[len(slots)-1] = last
	}
	return c
}

// classify returns the service of a flow, or nil if there is none. The result exact tells whether
// the service has the flow's port. The result isVIP tells whether the destination is a VIP.
func (v *View) classify(flow dataplane.Flow) (service *dataplane.ServiceEntry, exact, isVIP bool) {
	vip := flow.Destination.Addr()
	isVIP = v.tables.Services.Find(dataplane.VIPKey(vip)) != nil
	for _, port := range []config.Port{config.Port(flow.Destination.Port()), config.AllPorts} {
		entry := v.tables.Services.Find(dataplane.ServiceKey(&config.Service{VIP: vip, Port: port, Protocol: flow.Protocol}))
		if entry != nil {
			found := *entry
			return &found, port != config.AllPorts, isVIP
		}
	}
	return nil, false, isVIP
}

// findServers returns the servers that the packet visits, and the reason under which the packet is
// counted if it can be sent.
func (v *View) findServers(
	p Packet, service *dataplane.ServiceEntry, t *Trace,
) (to course, found dataplane.Reason, err error) {
	now, err := v.tables.Clock.Now()
	if err != nil {
		return to, 0, err
	}
	placement, selection := service.Rule.PlacementName()
	hunts := placement == config.PlacementHunt
	var row []uint32
	if hunts {
		if row, err = v.place(p, service, hunts, t); err != nil {
			return to, 0, err
		}
	}
	bucket, signature := v.tables.Flows.Bucket(p.Flow, service.Id, &v.tables.Identity)
	entry := bucket.Find(signature)
	hasRoom := entry != 0 || bucket.HasRoom(now)
	if entry != 0 && v.traceEntry(p, service, entry, entry.State().String(), now, t) {
		known := v.tables.Servers.Known(entry.Server())
		return askAll([]uint32{entry.Server()}, known, known), dataplane.ForwardKnown, nil
	}
	var half dataplane.FlowEntry
	if service.Rule.HasHalfOpen() {
		halfOpen, signature := v.tables.HalfOpen.Bucket(p.Flow, service.Id, &v.tables.Identity)
		half = halfOpen.Find(signature)
		if half != 0 && v.traceEntry(p, service, half, "half-open", now, t) {
			return askAll([]uint32{half.Server()}, srv6.AckStickiness, srv6.AckStickiness), foundHalfOpen(p, hasRoom), nil
		}
	}
	if hunts && p.Opens && selection == config.SelectRandom && service.Rule.Buckets > 0 {
		t.Placement = &TracedPlacement{Buckets: service.Rule.Buckets, Random: true}
		if left := cmp.Or(entry, half); v.isDrained(service, left, now) {
			v.traceFirst(askAll([]uint32{left.Server()}, srv6.Steer, srv6.Steer), service, t)
		}
		return to, dataplane.ForwardHunt, nil
	}
	if hunts && entry != 0 && !p.Opens && v.tables.Servers.Serves(entry.Server(), service.Id) {
		return v.seek(p, service, row, entry.Server()), dataplane.ForwardRecover, nil
	}
	if hunts {
		return v.huntCourse(p, service, row, cmp.Or(entry, half), now)
	}
	slots, err := v.place(p, service, hunts, t)
	if err != nil || len(slots) == 0 {
		return to, dataplane.DropNoServer, err
	}
	to = askAll(slots[:1], srv6.Deliver, srv6.Deliver)
	if p.Flow.Protocol == config.TCP && !p.Opens && service.Rule.Flags&dataplane.RuleServersPassOn != 0 {
		to = askAll(slots, srv6.Steer, srv6.Steer)
	}
	switch {
	case len(to.slots) > 1:
		return to, dataplane.ForwardRecover, nil
	case !hasRoom:
		return to, dataplane.ForwardNoRoom, nil
	case p.Flow.Protocol == config.TCP && !p.Opens:
		return to, dataplane.ForwardRecover, nil
	}
	return to, dataplane.ForwardNew, nil
}

// huntCourse returns the course through the candidates of a flow that has no entry, or whose packet
// leaves the server of its entry.
func (v *View) huntCourse(
	p Packet, service *dataplane.ServiceEntry, row []uint32, entry dataplane.FlowEntry, now uint16,
) (to course, found dataplane.Reason, err error) {
	switch {
	case p.Opens && v.isDrained(service, entry, now):
		return offerAfter(entry.Server(), row), dataplane.ForwardHunt, nil
	case len(row) == 0:
		return to, dataplane.DropNoServer, nil
	case p.Opens:
		return askAll(row, srv6.ConnectAvail, srv6.ConnectForce), dataplane.ForwardHunt, nil
	}
	return askAll(row, srv6.RecoverStickiness, srv6.RecoverStickiness), dataplane.ForwardRecover, nil
}

// offerAfter returns the course of a SYN that asks a drained server first whether it has the
// connection, and is then offered to a row: offer in bpf/balancer/place_hunt.h.
func offerAfter(drained uint32, row []uint32) course {
	slots := slices.DeleteFunc(slices.Clone(row), func(slot uint32) bool { return slot == drained })
	slots = slices.Insert(slots, 0, drained)
	to := askAll(slots[:min(len(slots), tables.MaxCandidates)], srv6.ConnectAvail, srv6.ConnectForce)
	if len(slots) > 1 || len(row) == 0 {
		to.functions[0] = srv6.Steer
	}
	return to
}

// isDrained tells whether the server of an entry may have the connection, although a SYN leaves the
// server: holder_of in bpf/balancer/persist_table.h and list_holder in bpf/balancer/place_hunt.h.
func (v *View) isDrained(service *dataplane.ServiceEntry, entry dataplane.FlowEntry, now uint16) bool {
	slot := entry.Server()
	return entry != 0 && v.tables.Servers.Serves(slot, service.Id) && v.tables.Servers.Reachable(slot) && !entry.IsOver(now) &&
		(v.tables.Servers.Flags(slot)&dataplane.FlagFailing == 0 || v.isOnlyUnheard(slot))
}

// isOnlyUnheard tells whether a server is unfit for one reason alone: is_only_unheard in
// bpf/balancer/segments.h.
func (v *View) isOnlyUnheard(slot uint32) bool {
	causes := v.tables.Servers.Causes(slot)
	return causes&^dataplane.Unresolved&^dataplane.Unreachable == dataplane.Unheard
}

// seek returns the course of a packet whose flow has a stale entry: seek in
// bpf/balancer/place_hunt.h.
func (v *View) seek(p Packet, service *dataplane.ServiceEntry, row []uint32, holder uint32) course {
	slots := slices.Clone(row)
	if v.tables.Servers.Reachable(holder) {
		slots = slices.DeleteFunc(slots, func(slot uint32) bool { return slot == holder })
		slots = slices.Insert(slots, 0, holder)
	}
	most := 1
	if len(slots) > 0 {
		if hop := v.nextHop(slots[0], nil); hop != nil {
			most = mostSegments(p, service.Rule.EncapsulationName(), hop.MTU)
		}
	}
	last := min(len(slots), most-1)
	if last == 1 && slots[0] == holder {
		last = 0
	}
	return askAll(append(slots[:last:last], holder), srv6.RecoverStickiness, srv6.AckStickiness)
}

// mostSegments returns how many segments a packet can visit without becoming longer than the MTU,
// in bytes, allows: most_segments in bpf/balancer/place_hunt.h.
func mostSegments(p Packet, kind config.Encapsulation, mtu int) int {
	room := mtu - p.Length
	if kind == config.SRv6Insert {
		room -= srhHeader + 2*segmentSize
	} else {
		room -= ipv6Header + srhHeader - segmentSize
	}
	return min(max(room/segmentSize, 1), tables.MaxCandidates)
}

// traceEntry tells whether the packet goes to the server of an entry. It stores the entry and the
// reason in the trace.
func (v *View) traceEntry(
	p Packet, service *dataplane.ServiceEntry, entry dataplane.FlowEntry, state string, now uint16, t *Trace,
) bool {
	t.Known = &TracedEntry{
		Server: v.serverName(entry.Server()),
		State:  state,
		Idle:   float64(entry.Age(now)) * v.tables.Clock.Tick.Seconds(),
		Left:   v.leaves(p, service, entry, now),
	}
	return t.Known.Left == ""
}

// foundHalfOpen returns the reason under which a packet of a half-open flow is counted.
func foundHalfOpen(p Packet, hasRoom bool) dataplane.Reason {
	switch {
	case p.Opens:
		return dataplane.ForwardKnown
	case !hasRoom:
		return dataplane.ForwardNoRoom
	}
	return dataplane.ForwardNew
}

// leaves returns why the packet of a known flow does not go to its server: keeps_server in
// bpf/balancer/persist_table.h. It returns an empty text if the packet goes there.
func (v *View) leaves(
	p Packet, service *dataplane.ServiceEntry, entry dataplane.FlowEntry, now uint16,
) string {
	if !v.tables.Servers.Has(entry.Server()) {
		return "the server's slot is beyond the table"
	}
	flags := v.tables.Servers.Flags(entry.Server())
	causes := v.tables.Servers.Causes(entry.Server())
	staysThough := entry.Age(now) < dataplane.FlowMinIdle && v.isOnlyUnheard(entry.Server())
	mayMove := p.Opens || p.Flow.Protocol != config.TCP
	switch {
	case flags&dataplane.FlagInUse == 0:
		return "the server was removed"
	case v.tables.Servers.Service(entry.Server()) != service.Id:
		return "the entry is another service's: two flows share a signature"
	case mayMove && flags&dataplane.FlagFailing != 0 && !staysThough:
		return fmt.Sprintf("the server is %s", describeConditions(conditionsOf(causes)))
	case mayMove && !v.tables.Servers.HasNextHop(entry.Server()):
		return "the server has no next hop"
	case mayMove && !v.tables.Servers.Reachable(entry.Server()):
		return "the server's next hop does not answer"
	case p.Opens && entry.IsOver(now):
		return "a new connection takes the place of one that is over"
	case p.Opens && flags&dataplane.FlagDrained != 0:
		return "the server is drained"
	case !p.Opens && service.Rule.Flags&dataplane.RuleAskIdle != 0 && entry.Age(now) >= dataplane.FlowMinIdle:
		return "it was idle for so long that servers are asked whose the flow is now"
	}
	return ""
}

// describeConditions joins conditions into one text.
func describeConditions(conditions []Condition) string {
	names := make([]string, len(conditions))
	for i, condition := range conditions {
		names[i] = string(condition)
	}
	return strings.Join(names, ", ")
}

// place lists the servers in the row of the flow's bucket that the packet visits. The list is empty
// if no server of the service gets new flows.
func (v *View) place(p Packet, service *dataplane.ServiceEntry, hunts bool, t *Trace) (slots []uint32, err error) {
	if service.Rule.Buckets == 0 {
		return nil, nil
	}
	bucket := dataplane.BucketOf(p.Flow.Hash(&v.tables.Identity.BucketKeys), service.Rule.Buckets)
	switch passesOn := service.Rule.Flags&dataplane.RuleServersPassOn != 0; {
	case hunts && p.Opens:
		slots, err = v.listTaking(bucket, service, service.Rule.Candidates())
	case !hunts && (p.Opens || p.Flow.Protocol != config.TCP || !passesOn):
		slots, err = v.listTaking(bucket, service, 1)
	default:
		slots, err = v.listPossible(bucket, service)
	}
	if err != nil || len(slots) == 0 {
		return nil, err
	}
	t.Placement = &TracedPlacement{Bucket: bucket, Buckets: service.Rule.Buckets}
	for _, slot := range slots {
		t.Placement.Candidates = append(t.Placement.Candidates, v.serverName(slot))
	}
	return slots, nil
}

// listTaking lists servers that take new flows: list_taking in bpf/balancer/candidates.h.
func (v *View) listTaking(bucket uint32, service *dataplane.ServiceEntry, wanted uint32) (slots []uint32, err error) {
	if service.Rule.Flags&dataplane.RuleTakesFlows == 0 {
		return nil, nil
	}
	for row := range min(4096, service.Rule.Buckets) {
		all, err := v.tables.Row(service, (bucket+row)%service.Rule.Buckets)
		if err != nil {
			return nil, err
		}
		present := all[:service.Rule.Candidates()]
		if end := slices.Index(present, dataplane.NoServer); end >= 0 {
			wanted = min(wanted, uint32(end))
		}
		for _, slot := range present {
			if len(slots) < int(wanted) {
				slots = v.appendRow(slots, []uint32{slot}, service, func(slot uint32) bool {
					return v.tables.Servers.Flags(slot)&(dataplane.FlagDrained|dataplane.FlagFailing) == 0
				})
			}
		}
		if len(slots) >= int(wanted) || len(slots) > 0 && row >= 8 {
			break
		}
	}
	return slots, nil
}

// listPossible lists the servers that are asked for a flow: list_possible in
// bpf/balancer/candidates.h.
func (v *View) listPossible(bucket uint32, service *dataplane.ServiceEntry) ([]uint32, error) {
	row, err := v.tables.Row(service, bucket)
	if err != nil {
		return nil, err
	}
	slots, err := v.listTaking(bucket, service, service.Rule.Candidates())
	if err != nil {
		return nil, err
	}
	slots = v.appendRow(slots, row, service, v.tables.Servers.Reachable)
	return v.appendRow(slots, row[:service.Rule.Candidates()], service, isAny), nil
}

func isAny(uint32) bool { return true }

// appendRow appends the servers of a row for which wanted returns true: list_row in
// bpf/balancer/place_hunt.h.
func (v *View) appendRow(slots, row []uint32, service *dataplane.ServiceEntry, wanted func(uint32) bool) []uint32 {
	for _, slot := range row {
		if len(slots) < tables.MaxCandidates && v.tables.Servers.Serves(slot, service.Id) && wanted(slot) && !slices.Contains(slots, slot) {
			slots = append(slots, slot)
		}
	}
	return slots
}

func (v *View) serverName(slot uint32) string {
	name, ok := v.tables.ServerName(slot)
	if !ok {
		return fmt.Sprintf("slot %d", slot)
	}
	return name.Server
}

// traceCourse returns the servers that a packet visits, and the name of the function that it asks
// of each.
func (v *View) traceCourse(to course, service *dataplane.ServiceEntry) (segments []TracedSegment) {
	kind := service.Rule.EncapsulationName()
	for i, slot := range to.slots {
		segment := TracedSegment{Server: v.serverName(slot)}
		if kind == config.SRv6Insert || kind == config.SRv6Encap {
			segment.Function = to.functions[i].String()
		}
		segments = append(segments, segment)
	}
	return segments
}

// traceFirst stores the known part of the course in the trace, and the server at which the course
// begins.
func (v *View) traceFirst(to course, service *dataplane.ServiceEntry, t *Trace) {
	slot := to.slots[0]
	kind := service.Rule.EncapsulationName()
	t.Course = v.traceCourse(to, service)
	t.Server = &TracedServer{
		Name:    v.serverName(slot),
		Slot:    slot,
		Address: describeAddress(v.tables.Servers.Address(slot), kind),
		Causes:  conditionsOf(v.tables.Servers.Causes(slot)),
	}
	t.NextHop = v.nextHop(slot, interfaceNames())
}

// send stores in the trace how the packet is sent. If the packet cannot be sent, the result is the
// reason, else NoReason.
func (v *View) send(p Packet, service *dataplane.ServiceEntry, to course, t *Trace) (dataplane.Reason, error) {
	var addresses []netip.Addr
	for _, slot := range to.slots {
		if !v.tables.Servers.Has(slot) {
			return dataplane.DropNoNextHop, nil
		}
		addresses = append(addresses, v.tables.Servers.Address(slot))
	}
	v.traceFirst(to, service, t)
	kind := service.Rule.EncapsulationName()
	source := v.tables.Servers.Source(to.slots[0])
	t.Encapsulation = encapsulationOf(kind, p.Flow, source, addresses, to)
	if t.NextHop == nil {
		return dataplane.DropNoNextHop, nil
	}
	t.Encapsulation.MaxLength = t.NextHop.MTU - t.Encapsulation.Added
	if p.Length > t.Encapsulation.MaxLength {
		return refuseLength(p, t.Encapsulation.MaxLength), nil
	}
	return dataplane.NoReason, nil
}

// refuseLength returns the reason for a packet that is too long for its path, as refuse_length in
// bpf/balancer/answer.h does. It assumes that the limit on the rate of answers is not reached.
func refuseLength(p Packet, longest int) dataplane.Reason {
	const leastIPv4, leastIPv6 = 68, 1280
	least := leastIPv6
	if p.Flow.Source.Addr().Is4() {
		least = leastIPv4
	}
	if p.Length <= max(longest, least) || !isOneHost(p.Flow.Source.Addr()) {
		return dataplane.DropTooBig
	}
	return dataplane.AnswerTooBig
}

// reserved are the source addresses that do not belong to one host: unspecified, loopback,
// multicast and others.
var reserved = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("224.0.0.0/3"),
	netip.MustParsePrefix("::/64"), netip.MustParsePrefix("ff00::/8"),
}

// isOneHost is is_from_one_host in bpf/balancer/answer.h.
func isOneHost(source netip.Addr) bool {
	return !slices.ContainsFunc(reserved, func(p netip.Prefix) bool { return p.Contains(source) })
}

// The lengths of headers in bytes.
const (
	ipv4Header, ipv6Header, greHeader = 20, 40, 4

	srhHeader, segmentSize = 8, 16
)

// encapsulationOf describes the encapsulation that bpf/balancer/encap.h adds to a packet. Only SRv6
// can have more than one server.
func encapsulationOf(
	kind config.Encapsulation, flow dataplane.Flow, source netip.Addr, addresses []netip.Addr, to course,
) *TracedEncapsulation {
	e := &TracedEncapsulation{Kind: kind, Source: source, Destination: addresses[0], Added: ipv6Header}
	if addresses[0].Is4() {
		e.Added = ipv4Header
	}
	switch kind {
	case config.SRv6Insert:
		e.Segments = append(segmentsOf(source, addresses, to), flow.Destination.Addr())
		e.Source, e.Destination = flow.Source.Addr(), e.Segments[1]
		e.Added = srhHeader + segmentSize*len(e.Segments)
	case config.SRv6Encap:
		e.Segments = segmentsOf(source, addresses, to)
		e.Destination = e.Segments[1]
		if more := len(addresses) - 1; more > 0 {
			e.Added += srhHeader + segmentSize*more
		}
	case config.GRE:
		e.Added += greHeader
	}
	return e
}

// segmentsOf returns the source address, followed by the SIDs of the servers with these locators.
func segmentsOf(source netip.Addr, locators []netip.Addr, to course) []netip.Addr {
	segments := []netip.Addr{source}
	for i, locator := range locators {
		sid := srv6.SID{Locator: netip.PrefixFrom(locator, srv6.LocatorBits), Function: to.functions[i]}
		segments = append(segments, sid.Addr())
	}
	return segments
}
