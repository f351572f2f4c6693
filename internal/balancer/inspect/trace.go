// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// Packet contains the properties of a packet that determine what the data path does with it. All
// other properties are the usual ones.
type Packet struct {
	Flow dataplane.Flow
	// Opens tells that the packet begins a connection: a TCP segment with SYN and without ACK, which
	// otherwise has ACK only; or an Initial packet of QUIC version 1.
	Opens  bool
	Length int // bytes of layer 3: at least the headers, at most 65535
	// Echo is TSecr of a TCP packet; nil: the packet has no timestamps.
	Echo *uint32
	// ConnectionID is the destination connection ID of a QUIC packet. Length includes its octets and
	// those before them. Without an ID, the payload of a packet that does not open is zeros.
	ConnectionID []byte
}

// Trace is what the data path would do with a packet, and why.
type Trace struct {
	Instance string         `json:"instance"`
	Flow     dataplane.Flow `json:"flow"`
	Opens    bool           `json:"opens"`  // the packet is a SYN, or an Initial packet of QUIC
	Length   int            `json:"length"` // length of the packet in bytes of layer 3
	Echo     *uint32        `json:"echo"`   // TSecr of the packet; nil: it has no timestamps
	Service  *TracedService `json:"service"`
	// Known is the flow's entry in the flow table, or in the table of half-open flows.
	Known *TracedEntry `json:"known"`
	// Cookie and Hint are nil if the data path has not looked for them, as with persistence table.
	Cookie *TracedCookie `json:"cookie"`
	Hint   *TracedHint   `json:"hint"`
	// Placement is where an unknown flow goes, or a known flow whose packet leaves its server. For
	// a service that hunts, Placement is set for all flows.
	Placement *TracedPlacement `json:"placement"`
	// Course lists the servers that the packet visits, and what it asks of each, in the order of
	// travel. If the candidates are random, it contains at most the holder of the flow.
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
	Name string `json:"name"`
	// Exact tells that the service has just this one port. Otherwise the service has all ports of
	// the VIP that no other service has.
	Exact bool `json:"exact"`
}

// TracedEntry is an entry of the flow table or of the table of half-open flows.
type TracedEntry struct {
	Server string `json:"server"`
	State  string `json:"state"` // new, established, silent, closing, closed or half-open
	// Idle is the time since the last packet, in seconds, with a granularity of 4 to 7 seconds.
	Idle float64 `json:"idle_seconds"`
	// Left says why the packet does not go to the server. It is empty if the packet goes there.
	Left string `json:"left,omitempty"`
}

// TracedCookie is the cookie of a packet.
type TracedCookie struct {
	Column *uint8 `json:"column"` // nil: the packet has no cookie
}

// TracedHint is the hint of a flow.
type TracedHint struct {
	Use string `json:"use"` // none, idle, recent or shared
	// Column is that of the flow's server, in an idle or recent hint.
	Column uint8 `json:"column"`
}

// TracedPlacement is a row of a service's candidate table. It contains only the candidates that the
// packet may visit.
type TracedPlacement struct {
	// Bucket is nil if the flow's bucket does not decide about a new flow.
	Bucket     *uint32  `json:"bucket"`
	Buckets    uint32   `json:"buckets"`
	Candidates []string `json:"candidates"` // the first one gets the flow or the first offer
	// Client is the prefix of clients whose flows to the service have this bucket, under affinity;
	// nil: the whole flow selects the bucket.
	Client *netip.Prefix `json:"client,omitempty"`
	// Random is true for a SYN that is offered to the candidates of a random bucket.
	Random bool `json:"random,omitempty"`
	// InTurn is true for a new flow under round-robin. Candidates is then the server whose turn it
	// is at present.
	InTurn bool `json:"in_turn,omitempty"`
	// Scores are the servers among which a new flow is placed under a placement that infers.
	// Candidates is then the server that gets the flow at present.
	Scores *TracedScores `json:"scores,omitempty"`
	// Order shows how load reports have ordered the servers that are offered a connection. It is
	// nil if they have not, as for a SYN that first goes to a server that may have the connection.
	Order *TracedOrder `json:"order,omitempty"`
}

// TracedOrder is how a balancer has ordered the servers of a row by their load reports. Loads are
// in connections per unit of capacity, with one connection more.
type TracedOrder struct {
	// Mean is the mean of all reports of the service's servers. Estimates approach it as the
	// reports become older. It is 0 before the first report.
	Mean float64 `json:"mean"`
	// Servers are those of the row in the order of their estimates. A spare server that is not in
	// the row follows.
	Servers []OrderedServer `json:"servers"`
}

// OrderedServer is a server that may be offered a connection.
type OrderedServer struct {
	Server string `json:"server"`
	// Report is the last report of the server. Counts is nil.
	Report ReportState `json:"report"`
	// Estimate is the load on which the balancer decides. It is nil if the load is unknown: the
	// server then comes first if it is the first of the row, and last otherwise. It is also nil for
	// a spare server.
	Estimate *float64 `json:"estimate"`
	Offered  bool     `json:"offered"` // the server is offered the connection
	// Spare is true for a server that is not in the row, and has reported free capacity.
	Spare bool `json:"spare,omitempty"`
}

// TracedSegment is a server that a packet visits, and what the packet asks of the server.
type TracedSegment struct {
	Server   string `json:"server"`
	Function string `json:"function"` // a function of docs/understand/protocol.md; empty with gre and ipip
	// Column is the column of a candidate in its bucket's row, if the server is offered a
	// connection. It is nil if the server replaces a candidate that takes no new flows.
	Column *int `json:"column"`
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
	Kind  desired.Encapsulation `json:"kind"`
	Added int                   `json:"added"` // length of the added headers in bytes
	// MaxLength is the length of the longest packet that fits the interface, in bytes of layer 3,
	// without the encapsulation. It is 0 if the server has no next hop.
	MaxLength int `json:"max_length,omitempty"`
	// Source and Destination are the addresses of the outermost IP header.
	Source      netip.Addr `json:"source"`
	Destination netip.Addr `json:"destination"`
	// Segments are all addresses that the packet visits, beginning with the balancer; only for
	// SRv6.
	Segments []netip.Addr `json:"segments,omitempty"`
	// Underlay has the outer headers of a packet of SRv6 on a fabric without IPv6, or is nil.
	Underlay *TracedUnderlay `json:"underlay,omitempty"`
}

// TracedUnderlay has the addresses and ports of the underlay, with which the packet travels to the
// next host.
type TracedUnderlay struct {
	Source      netip.AddrPort `json:"source"`
	Destination netip.AddrPort `json:"destination"`
}

// Trace runs the data path with a packet, and shows what it decides. It sends nothing. It changes
// no table, but corrects ranks of servers, as packets do all the time. Trace returns an error if a
// table cannot be read, or if the kernel refuses the program.
func (v *View) Trace(p Packet) (*Trace, error) {
	t := &Trace{Instance: v.tables.Instance, Flow: p.Flow, Opens: p.Opens, Length: p.Length, Echo: p.Echo}
	d, sent, err := v.decide(p)
	if err == nil {
		err = v.describe(d, sent, t)
	}
	if err != nil {
		return nil, fmt.Errorf("instance %s: %w", v.tables.Instance, err)
	}
	return t, nil
}

// decide makes a dry run of the data path with a packet. It returns the decision, and the frame
// that would be sent.
func (v *View) decide(p Packet) (d *dataplane.Decision, sent []byte, err error) {
	if v.dryRun == nil {
		if v.dryRun, err = v.tables.DryRun(); err != nil {
			return nil, nil, err
		}
	}
	frame := frameOf(p)
	destination := [6]byte(frame) // as the host's own address, so that the frame is for the host
	if err := v.dryRun.SetHost(destination, 0, 0); err != nil {
		return nil, nil, err
	}
	options := &ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+longestHeaders)}
	_, d, err = v.dryRun.Run(options, uint16(p.Length))
	return d, options.DataOut, err
}

// longestInFrame is the length of the longest packet that a dry run gets completely, in bytes of
// layer 3. A frame must fit a page of memory. ICMP errors quote fewer bytes.
const longestInFrame = 2000

// frameOf returns a frame with a packet, or with the first longestInFrame bytes of it.
func frameOf(p Packet) []byte {
	build, flags := packet.TCP, packet.ACK
	if p.Flow.Protocol == desired.UDP {
		build = packet.UDP
	}
	if p.Opens {
		flags = packet.SYN
	}
	options := []packet.Option{packet.Flags(flags)}
	if p.Echo != nil {
		options = append(options, packet.Timestamps(1, *p.Echo))
	}
	headers := len(build(p.Flow.Source, p.Flow.Destination, options...)) - ethernetHeader
	payload := make([]byte, max(min(p.Length, longestInFrame)-headers, 0))
	if p.Opens && p.Flow.Protocol == desired.UDP || len(p.ConnectionID) > 0 {
		copy(payload, packet.QUICHeader(p.Opens, p.ConnectionID))
	}
	return build(p.Flow.Source, p.Flow.Destination, append(options, packet.Payload(payload))...)
}

const (
	ethernetHeader = 14  // bytes
	longestHeaders = 256 // bytes that an encapsulation or an ICMP error can add, and more
)

// describe stores a decision in the trace. Without a service, it stores only the reason. If the
// packet goes to no server, it leaves out the course, the server, the next hop and the
// encapsulation. sent is the frame that would be sent: it shows the source address of a tunnel.
func (v *View) describe(d *dataplane.Decision, sent []byte, t *Trace) error {
	t.Reason = v.tables.Reasons[d.Reason]
	if d.HasService == 0 {
		return nil
	}
	labels, err := v.tables.ServiceLabels()
	if err != nil {
		return err
	}
	t.Service = &TracedService{Name: labels[d.Service].Name, Exact: d.IsExact != 0}
	t.Known = v.describeEntry(d)
	t.Cookie, t.Hint = describeCookie(d, t), v.describeHint(d, t)
	if t.Placement, err = v.describePlacement(d, t.Flow); err != nil {
		return err
	}
	all, isComplete := segmentsOf(d)
	// isBeyond tells whether the table of servers is too small for the slot of a segment's server.
	isBeyond := func(at dataplane.DecidedSegment) bool { return !v.tables.Servers.Has(at.Server) }
	if len(all) == 0 || slices.ContainsFunc(all, isBeyond) {
		return nil
	}
	kind := d.Rule.EncapsulationName()
	t.Course = v.describeCourse(all, kind)
	t.Placement.behindHolder(t.Course)
	first := all[0].Server
	t.Server = &TracedServer{
		Name:    v.serverName(first),
		Slot:    first,
		Address: describeAddress(v.tables.Servers.Address(first), kind),
		Causes:  conditionsOf(v.tables.Servers.Causes(first)),
	}
	t.NextHop = v.nextHop(first, interfaceNames())
	if isComplete {
		t.Encapsulation = v.describeEncapsulation(d, t.Flow, all)
		if t.Encapsulation.Kind.IsTunnel() {
			t.Encapsulation.readSource(sent)
		} else {
			t.Encapsulation.readUnderlay(sent)
		}
	}
	return nil
}

// segmentsOf returns the servers that a packet visits. If the packet is offered to random
// candidates, these differ from packet to packet. Then the result is not complete: it contains at
// most the server that is asked before the candidates.
func segmentsOf(d *dataplane.Decision) (all []dataplane.DecidedSegment, isComplete bool) {
	all = d.Segment[:d.Count]
	if d.Placement.IsRandom == 0 || goesToKnown(d) {
		return all, true
	}
	if len(all) > 0 && srv6.Function(all[0].Function) == srv6.Steer {
		return all[:1], false
	}
	return nil, false
}

// goesToKnown tells whether a packet goes to the server of its flow's entry.
func goesToKnown(d *dataplane.Decision) bool {
	return isKnown(d) && dataplane.Departure(d.Entry.Departure) == dataplane.Stays
}

// isKnown tells whether a table of flows has an entry of the packet's flow.
func isKnown(d *dataplane.Decision) bool {
	return dataplane.FlowState(d.Entry.State) != dataplane.FlowFree
}

// describeEntry returns the entry of a packet's flow, or nil if the flow is unknown.
func (v *View) describeEntry(d *dataplane.Decision) *TracedEntry {
	if !isKnown(d) {
		return nil
	}
	e := &TracedEntry{
		Server: v.serverName(d.Entry.Server),
		State:  dataplane.FlowState(d.Entry.State).String(),
		Idle:   float64(d.Entry.Age) * v.tables.Clock.Tick.Seconds(),
		Left:   departures[dataplane.Departure(d.Entry.Departure)],
	}
	if d.Entry.IsHalfOpen != 0 {
		e.State = "half-open"
	}
	if dataplane.Departure(d.Entry.Departure) == dataplane.LeavesFailing {
		e.Left = "the server is " + describeConditions(conditionsOf(v.tables.Servers.Causes(d.Entry.Server)))
	}
	return e
}

// describeCookie returns the cookie of a packet. It returns nil if the packet is not found by
// cookies.
func describeCookie(d *dataplane.Decision, t *Trace) *TracedCookie {
	switch {
	case !d.Rule.PersistenceName().Method().HasCookies || t.Opens:
		return nil
	case d.HasCookie == 0:
		return &TracedCookie{}
	}
	return &TracedCookie{&d.Column}
}

// describeHint returns the hint of a packet's flow. It returns nil if the packet is not found by
// hints.
func (v *View) describeHint(d *dataplane.Decision, t *Trace) *TracedHint {
	persistence := d.Rule.PersistenceName().Method()
	carriesCookie := d.HasCookie != 0 || t.Echo != nil // packets with timestamps carry cookies
	// Under stateless, hints are only for packets without cookies.
	isByCookie := persistence.HasCookies && (carriesCookie || !v.tables.HasHints())
	if !persistence.ByColumn || isByCookie {
		return nil
	}
	use, column := dataplane.ReadHint(d.Hint)
	return &TracedHint{Use: use, Column: column}
}

// departures are the texts of TracedEntry.Left.
var departures = map[dataplane.Departure]string{
	dataplane.LeavesRemoved:      "the server was removed",
	dataplane.LeavesOtherService: "the entry is another service's: two flows share a signature",
	dataplane.LeavesNoNextHop:    "the server has no next hop",
	dataplane.LeavesUnreachable:  "the server's next hop does not answer",
	dataplane.LeavesOver:         "a new connection takes the place of one that is over",
	dataplane.LeavesDrained:      "the server is drained",
	dataplane.LeavesStale:        "it was idle for so long that servers are asked whose the flow is now",
}

// describeConditions joins conditions into one text.
func describeConditions(conditions []Condition) string {
	names := make([]string, len(conditions))
	for i, condition := range conditions {
		names[i] = string(condition)
	}
	return strings.Join(names, ", ")
}

// describePlacement returns where a packet's flow is placed if no server has it. It returns nil if
// the data path has not determined that, or if the service has no servers.
func (v *View) describePlacement(d *dataplane.Decision, flow dataplane.Flow) (*TracedPlacement, error) {
	placed := &d.Placement
	if placed.IsPlaced == 0 || d.Rule.Buckets() == 0 {
		return nil, nil
	}
	if placed.IsRandom != 0 {
		return &TracedPlacement{Buckets: d.Rule.Buckets(), Random: true}, nil
	}
	if placed.Count == 0 {
		return nil, nil
	}
	p := &TracedPlacement{Buckets: d.Rule.Buckets()}
	if placed.IsPicked != 0 {
		placement, _ := d.Rule.PlacementName()
		p.InTurn = placement.Method().TakesTurns()
	}
	for _, slot := range placed.Candidate[:placed.Count] {
		p.Candidates = append(p.Candidates, v.serverName(slot))
	}
	var err error
	// Without a flow table, no server is picked: the candidate with the lowest score is the only one.
	if placed.IsPicked != 0 || placed.Count == 1 {
		if p.Scores, err = v.describeScores(d.Service, d.Rule, placed.Bucket, placed.Candidate[0]); err != nil {
			return nil, err
		}
	}
	if placed.IsPicked == 0 || (p.Scores != nil && p.Scores.Among == desired.AmongCandidates) {
		p.Bucket = &placed.Bucket
		if a := d.Rule.Affinity(flow.Destination.Addr()); a.IsWanted() {
			p.Client = new(a.ClientOf(flow.Source.Addr()))
		}
	}
	if placed.Ordered == 0 {
		return p, nil
	}
	p.Order, err = v.describeOrder(placed)
	return p, err
}

// behindHolder corrects the placement of a SYN that first visits a holder: a server that may have
// the connection. The dry run notes where the flow would be placed without a holder. Behind a
// holder, load reports do not order the candidates.
func (p *TracedPlacement) behindHolder(course []TracedSegment) {
	isHeld := len(course) > 1 && course[0].Function == srv6.Steer.String() &&
		course[1].Function == srv6.ConnectAvail.String()
	if p == nil || !isHeld {
		return
	}
	p.Candidates, p.Order = nil, nil
	for _, at := range course[1:] {
		p.Candidates = append(p.Candidates, at.Server)
	}
}

// describeOrder returns how the servers of a row were ordered by their load reports. The servers of
// the row come first, in the order of their estimates. A spare server follows, which is offered the
// connection and is not in the row.
func (v *View) describeOrder(placed *dataplane.DecidedPlacement) (*TracedOrder, error) {
	order := &TracedOrder{Mean: dataplane.EstimatedLoad(placed.Mean)}
	offered := placed.Candidate[:placed.Count]
	places := make([]int, placed.Ordered)
	for i := range places {
		places[i] = i
	}
	slices.SortStableFunc(places, func(a, b int) int {
		return cmp.Compare(placed.Estimate[a], placed.Estimate[b])
	})
	row := placed.Row[:placed.Ordered]
	for _, place := range places {
		s, err := v.orderedServer(uint32(row[place]))
		if err != nil {
			return nil, err
		}
		if s.Report.Load != nil {
			estimate := dataplane.EstimatedLoad(placed.Estimate[place])
			s.Estimate = &estimate
		}
		s.Offered = slices.Contains(offered, uint32(row[place]))
		order.Servers = append(order.Servers, s)
	}
	for _, slot := range offered {
		if slices.Contains(row, uint16(slot)) {
			continue
		}
		s, err := v.orderedServer(slot)
		if err != nil {
			return nil, err
		}
		s.Offered, s.Spare = true, true
		order.Servers = append(order.Servers, s)
	}
	return order, nil
}

// orderedServer returns a server with its last report, without an estimate.
func (v *View) orderedServer(slot uint32) (s OrderedServer, err error) {
	s.Server = v.serverName(slot)
	s.Report, err = v.lastReport(slot)
	return s, err
}

// ServerName returns the name of the slot's server, or the slot if it has no name.
func (v *View) ServerName(slot uint16) string { return v.serverName(uint32(slot)) }

// serverName is ServerName for a slot as the tables have it.
func (v *View) serverName(slot uint32) string {
	name, ok := v.tables.ServerName(slot)
	if !ok {
		return fmt.Sprintf("slot %d", slot)
	}
	return name.Server
}

// describeCourse names the servers that a packet visits, and what it asks of each.
func (v *View) describeCourse(
	all []dataplane.DecidedSegment, kind desired.Encapsulation,
) (course []TracedSegment) {
	for _, at := range all {
		segment := TracedSegment{Server: v.serverName(at.Server)}
		if kind == desired.SRv6Insert || kind == desired.SRv6Encap {
			segment.Function = srv6.Function(at.Function).String()
			segment.Column = columnOf(at)
		}
		course = append(course, segment)
	}
	return course
}

// columnOf returns the column of a server that is offered a connection, or nil if it has none.
func columnOf(at dataplane.DecidedSegment) *int {
	offer := srv6.ParseOffer(at.Argument)
	if !srv6.Function(at.Function).IsOffer() || offer.Column == srv6.NoColumn {
		return nil
	}
	return &offer.Column
}

// readSource reads the outer source of an IPv4 tunnel from a frame to the tunnel's destination. The
// source can vary by flow (node.tunnel-sources).
func (e *TracedEncapsulation) readSource(sent []byte) {
	const source, destination, end = ethernetHeader + 12, ethernetHeader + 16, ethernetHeader + 20
	if !e.Destination.Is4() || len(sent) < end ||
		e.Destination != netip.AddrFrom4([4]byte(sent[destination:end])) {
		return
	}
	e.Source = netip.AddrFrom4([4]byte(sent[source:destination]))
}

// readUnderlay reads the underlay's headers from a frame to the host of the destination.
func (e *TracedEncapsulation) readUnderlay(sent []byte) {
	const source, destination, ports, end = ethernetHeader + 12, ethernetHeader + 16, ethernetHeader + 20, ethernetHeader + 24
	if len(sent) < end || sent[ethernetHeader]>>4 != 4 {
		return
	}
	to := netip.AddrFrom4([4]byte(sent[destination:ports]))
	if to != desired.UnderlayAddress(e.Destination) {
		return
	}
	e.Underlay = &TracedUnderlay{
		netip.AddrPortFrom(netip.AddrFrom4([4]byte(sent[source:destination])), binary.BigEndian.Uint16(sent[ports:])),
		netip.AddrPortFrom(to, binary.BigEndian.Uint16(sent[ports+2:])),
	}
}

// describeEncapsulation describes the encapsulation of a packet of a flow. The packet visits the
// servers in all. With GRE and IPIP, it goes from the balancer's address to the first of them. With
// SRv6, it goes to the SID of the first one. With srv6-insert, it keeps the client's source
// address, and the last segment is the VIP.
func (v *View) describeEncapsulation(
	d *dataplane.Decision, flow dataplane.Flow, all []dataplane.DecidedSegment,
) *TracedEncapsulation {
	servers := v.tables.Servers
	e := &TracedEncapsulation{
		Kind:        d.Rule.EncapsulationName(),
		Added:       int(d.Added),
		Source:      servers.Source(all[0].Server),
		Destination: servers.Address(all[0].Server),
	}
	if d.Mtu > 0 {
		e.MaxLength = int(d.Mtu) - e.Added
	}
	if e.Kind != desired.SRv6Insert && e.Kind != desired.SRv6Encap {
		return e
	}
	e.Segments = []netip.Addr{e.Source}
	for _, at := range all {
		locator := netip.PrefixFrom(servers.Address(at.Server), srv6.LocatorBits)
		sid := srv6.SID{Locator: locator, Function: srv6.Function(at.Function), Argument: at.Argument}
		e.Segments = append(e.Segments, sid.Addr())
	}
	e.Destination = e.Segments[1]
	if e.Kind == desired.SRv6Insert {
		e.Source = flow.Source.Addr()
		e.Segments = append(e.Segments, flow.Destination.Addr())
	}
	return e
}
