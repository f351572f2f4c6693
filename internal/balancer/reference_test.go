// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/tables"
)

// reference is the data path in Go, as docs/understand/packet-path.md and
// docs/understand/flow-table.md describe it. It ignores speed, the verifier and other cores. It
// knows the configuration and the state of servers, but not the tables in the kernel. The fixture
// provides the configuration, the next hops of the servers and the hash keys.
//
// Its steps are those of xdp_lb() and handle_in_full() in bpf/balancer/balancer.bpf.c:
//
//	parse -> classify -> lookup -> choose -> commit -> encapsulate
type reference struct {
	*fixture
	failing  map[string]bool // servers that fail their checks, by "service/server"
	flows    map[uint32]*referenceBucket
	halfOpen map[uint32]*referenceBucket // the half-open flows
	hints    map[int]*referenceHints     // by number of the word
	firsts   map[piece]dataplane.Flow    // the flows of first fragments
	tables   map[string][]*tables.Table  // by service and generation; empty after changes
	turns    map[string]uint64           // turns given out by services, as far as they are known
	// former has the services that have lost their flow table and may still have flows in the flow
	// table, by name, as they were before.
	former  map[string]desired.Service
	removed map[netip.Addr]bool // the removed VIPs
	loads   referenceLoads
	seen    func(outcome)  // called with each outcome of the data path; may be nil
	results map[string]int // of reports, since the reference was made
	slowest time.Duration  // the longest time for a frame, while frames are compared
}

func newReference(f *fixture) *reference {
	r := &reference{
		fixture: f, failing: map[string]bool{}, results: map[string]int{},
		former: map[string]desired.Service{}, removed: map[netip.Addr]bool{},
	}
	r.forget()
	r.changed()
	return r
}

// forget empties both flow tables and the hint table, lets the reference read again which turn is
// next, and forgets what the reference knows of loads.
func (r *reference) forget() {
	r.flows, r.halfOpen = map[uint32]*referenceBucket{}, map[uint32]*referenceBucket{}
	r.forgetFlows()
	r.hints = map[int]*referenceHints{}
	clear(r.plane.Hints.Words())
	r.firsts = map[piece]dataplane.Flow{}
	r.turns = map[string]uint64{}
	r.loads = newReferenceLoads()
	r.forgetFragments()
}

// changed must be called after servers, their health or their next hops have changed.
func (r *reference) changed() {
	r.tables = map[string][]*tables.Table{}
	r.loads.slots = map[string]uint32{}
}

// receive returns the outcome for a frame.
func (r *reference) receive(frame []byte) outcome {
	if packet.MAC(frame) == ownMAC && frame[6]&1 != 0 {
		return refused(frame, "drop_group_source", 0)
	}
	if r.isSignal(frame) {
		return r.takeSignal(frame)
	}
	p, reason := parse(frame)
	return r.handle(frame, p, reason)
}

// handle returns the outcome for a client's packet, of which the parser has read p.
func (r *reference) handle(frame []byte, p parsed, reason string) outcome {
	var svc *desired.Service
	if reason == "" && p.piece != nil && r.isVIP(p.flow.Destination.Addr()) {
		reason = r.follow(frame, &p)
	}
	if reason == "" {
		if svc = r.classify(p.flow); svc == nil {
			reason = "drop_no_service"
			if p.follow == "forward_icmp" {
				reason = "drop_icmp_no_service"
			}
		}
	}
	if reason == "" && !admits(svc, p.flow.Source.Addr()) {
		reason = "drop_source"
	}
	if reason == "" && p.flags&packet.SYN != 0 && p.ends() {
		reason = "drop_tcp_flags"
	}
	isForVIP := reason == "pass_solicitation" || !strings.HasPrefix(reason, "pass_")
	if isForVIP && reason != "" && !r.isVIP(p.flow.Destination.Addr()) {
		reason = "pass_not_vip"
		if r.removed[p.flow.Destination.Addr().Unmap()] {
			reason = "drop_removed_vip"
		}
	}
	if r.intrudes(p, reason) {
		reason = "drop_outside"
	}
	switch {
	case reason == "answer_echo":
		return sentBack(frame, reason, packet.EchoReply(frame, 64))
	case reason != "":
		return r.endUnserved(frame, p, reason)
	}
	if r.needsCopies(p, svc) {
		return r.leftForCopies(frame, p, svc)
	}
	to, reason := r.find(p, svc)
	if to == nil {
		return r.endUnserved(frame, p, "drop_no_server")
	}
	if obstacle, mtu := r.obstacle(frame, p, svc, to); obstacle != "" {
		return tell(frame, p, obstacle, mtu)
	}
	return r.visited(frame, p.flow, svc.Name, reason, to...)
}

// alone returns the course to one server.
func alone(function srv6.Function, server *desired.Server) []stage {
	return []stage{{function: function, server: server.Name}}
}

// toKnown returns the course of a packet of a known flow to its server.
func toKnown(svc *desired.Service, server *desired.Server) []stage {
	if !svc.Placement.Method().ServersDecide {
		return alone(srv6.Deliver, server)
	}
	asked := srv6.Offer{WantsReport: svc.OrdersByReports()}
	return []stage{{srv6.AckStickiness, server.Name, asked.Argument()}}
}

// find returns the course of a packet, or nil if there is none, and the reason under which it is
// counted.
func (r *reference) find(p parsed, svc *desired.Service) (to []stage, reason string) {
	if p.follow != "" {
		return r.findFollower(p, svc), p.follow
	}
	if svc.FindsByColumn() {
		return r.findByColumn(p, svc)
	}
	if svc.Persistence == desired.PersistenceQUIC {
		return r.findByID(p, svc)
	}
	if server := r.persist(p, svc); server != nil {
		return toKnown(svc, server), "forward_known"
	}
	switch {
	case svc.Placement.Method().ServersDecide:
		return r.hunt(p, svc)
	case svc.Placement.Method().TakesTurns() && p.mayMove():
		return r.inTurn(p, svc)
	}
	return r.hash(p, svc)
}

// findFollower returns the course of a packet that does not count as a packet of its flow.
func (r *reference) findFollower(p parsed, svc *desired.Service) []stage {
	server := r.recalled(p, svc)
	if server == nil && passesOn(svc) {
		return stages(srv6.Steer, r.possible(p.flow, svc)...)
	}
	if server == nil {
		server = r.place(p.flow, svc)
	}
	if server == nil {
		return nil
	}
	return alone(srv6.Deliver, server)
}

// parsed contains what the data path reads of a frame. If a header cannot be read, the fields of
// later headers are zero.
type parsed struct {
	flow     dataplane.Flow
	flags    packet.TCPFlags
	seq, ack uint32 // of TCP
	segment  uint32 // length of the TCP segment in sequence numbers (RFC 9293 section 3.4)
	options  []byte // of TCP
	datagram []byte // of UDP, if the packet has all of it
	hopLimit uint8
	length   uint64 // of layer 3, by the IP header
	// follow is set if the packet does not count as one of its flow. It is the reason under which
	// the packet is forwarded.
	follow string
	piece  *piece // set if the packet is a fragment
	// returned is true if a server has returned the packet.
	returned bool
	// extended is true if extension headers of IPv6 are in front of the transport header.
	extended bool
	hopByHop bool // the first of them are hop-by-hop options
}

// visitsAll tells whether the packet visits all servers that may have its flow: a server has
// returned it, or no server can return it, because it is a first fragment or has extension headers.
// No server returns an offer.
func (p parsed) visitsAll() bool {
	return p.returned || p.piece != nil || p.extended && !p.opens()
}

func (p parsed) opens() bool { return p.flags&(packet.SYN|packet.ACK) == packet.SYN }
func (p parsed) ends() bool  { return p.flags&(packet.FIN|packet.RST) != 0 }

// mayMove tells whether a packet can go to another server without harm.
func (p parsed) mayMove() bool { return p.opens() || p.flow.Protocol == desired.UDP }

// parse reads a frame up to its transport header. If that fails, it returns the reason for packets
// to VIPs.
func parse(frame []byte) (p parsed, reason string) {
	if packet.MAC(frame) != ownMAC {
		return p, "pass_not_for_host"
	}
	layer3 := frame[ethernetLength:]
	switch binary.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		if len(layer3) < 20 {
			return p, "pass_not_vip"
		}
		return parseIPv4(layer3)
	case 0x86dd:
		if len(layer3) < 40 {
			return p, "pass_not_vip"
		}
		return parseIPv6(layer3)
	}
	if tag := binary.BigEndian.Uint16(frame[12:]); tag == 0x8100 || tag == 0x88a8 {
		return p, "pass_vlan"
	}
	return p, "pass_not_ip"
}

func parseIPv4(b []byte) (p parsed, reason string) {
	p.hopLimit, p.length = b[8], uint64(binary.BigEndian.Uint16(b[2:]))
	p.flow.Source = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[12:])), 0)
	p.flow.Destination = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[16:])), 0)
	header := int(b[0]&0xf) * 4
	fragment := binary.BigEndian.Uint16(b[6:])
	switch {
	case b[0]>>4 != 4 || header < 20 || int(p.length) < header || int(p.length) > len(b):
		return p, "drop_ip_header"
	case fragment&0x3fff != 0: // more fragments follow, or this is not the first
		p.piece = &piece{protocol: b[9], id: uint32(binary.BigEndian.Uint16(b[4:])), later: fragment&0x1fff != 0}
	case b[9] == 1:
		return p, p.parseICMP(b[header:p.length], 4, header == 20)
	}
	reason = p.parseTransport(b[9], b[header:p.length])
	return p, reason
}

func parseIPv6(b []byte) (p parsed, reason string) {
	p.hopLimit = b[7]
	p.length = (40 + uint64(binary.BigEndian.Uint16(b[4:]))) & 0xffff // longer packets fit no frame
	p.flow.Source = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[8:])), 0)
	p.flow.Destination = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[24:])), 0)
	if b[0]>>4 != 6 || p.flow.Destination.Addr().Is4In6() || p.length < 40 || int(p.length) > len(b) {
		return p, "drop_ip_header"
	}
	next, rest, fragment, reason := walk(b[6], b[40:p.length])
	p.piece, p.extended, p.hopByHop = fragment, next != b[6], b[6] == 0
	switch {
	case reason != "":
		return p, reason
	case next == 58 && fragment == nil:
		return p, p.parseICMP(rest, 6, b[6] == 58)
	}
	return p, p.parseTransport(next, rest)
}

// walk reads the extension headers of an IPv6 packet, and returns the reason if one of them is
// invalid. It ends where the data of a later fragment begins.
func walk(next byte, rest []byte) (protocol byte, data []byte, fragment *piece, reason string) {
	for before := 0; slices.Contains([]byte{0, 43, 44, 60}, next); before++ {
		if next == 44 && len(rest) >= 8 && binary.BigEndian.Uint16(rest[2:])&0xfff9 != 0 {
			offset := binary.BigEndian.Uint16(rest[2:]) & 0xfff8
			fragment = &piece{id: binary.BigEndian.Uint32(rest[4:]), later: offset != 0}
			if fragment.later {
				return 0, nil, fragment, ""
			}
		}
		size, reason := parseExtension(next, rest, before)
		if reason != "" {
			return 0, nil, fragment, reason
		}
		next, rest = rest[0], rest[size:]
	}
	return next, rest, fragment, ""
}

// parseExtension returns the size of the extension header at the beginning of rest, in bytes. The
// argument before is the number of extension headers that precede it.
func parseExtension(header byte, rest []byte, before int) (size int, reason string) {
	if len(rest) < 8 {
		return 0, "drop_extension"
	}
	size = 8 + int(rest[1])*8
	switch {
	case header == 44:
		size = 8 // the second byte is reserved
	case header == 0 && before > 0:
		return 0, "drop_extension"
	case header == 43 && rest[3] > 0:
		return 0, "drop_routing_header"
	}
	if size > len(rest) || before == 8 {
		return 0, "drop_extension"
	}
	return size, ""
}

func (p *parsed) parseTransport(protocol byte, b []byte) (reason string) {
	whole := p.piece == nil
	switch {
	case !whole && p.piece.later:
		return ""
	case protocol != 6 && protocol != 17:
		return "drop_protocol"
	case protocol == 6 && (len(b) < 20 || b[12]>>4 < 5 || int(b[12]>>4)*4 > len(b)),
		protocol == 17 && (len(b) < 8 || binary.BigEndian.Uint16(b[4:]) < 8 ||
			whole && int(binary.BigEndian.Uint16(b[4:])) > len(b)):
		if !whole {
			return "drop_fragment"
		}
		return "drop_transport"
	}
	p.flow.Protocol = desired.UDP
	if length := int(binary.BigEndian.Uint16(b[4:])); protocol == 17 && length <= len(b) {
		p.datagram = b[8:length]
	}
	if protocol == 6 {
		p.flow.Protocol, p.flags = desired.TCP, packet.TCPFlags(b[13])
		header := int(b[12]>>4) * 4
		p.options = b[20:header]
		p.seq, p.ack = binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:])
		p.segment = uint32(len(b)-header) + uint32(p.flags&packet.SYN>>1) + uint32(p.flags&packet.FIN)
	}
	p.flow.Source = netip.AddrPortFrom(p.flow.Source.Addr(), binary.BigEndian.Uint16(b))
	p.flow.Destination = netip.AddrPortFrom(p.flow.Destination.Addr(), binary.BigEndian.Uint16(b[2:]))
	return ""
}

func (r *reference) isVIP(address netip.Addr) bool {
	return slices.ContainsFunc(r.cfg.Services, func(s desired.Service) bool { return slices.Contains(s.AllVIPs(), address.Unmap()) })
}

// admits tells whether a client may reach a service.
func admits(svc *desired.Service, client netip.Addr) bool {
	contains := func(p netip.Prefix) bool { return p.Contains(client) }
	return len(svc.Sources) == 0 || slices.ContainsFunc(svc.Sources, contains)
}

// classify returns the service of a flow, or nil if there is none.
func (f *fixture) classify(flow dataplane.Flow) (found *desired.Service) {
	for i := range f.cfg.Services {
		s := &f.cfg.Services[i]
		if !slices.Contains(s.AllVIPs(), flow.Destination.Addr()) || s.Protocol != flow.Protocol {
			continue
		}
		if port := desired.Port(flow.Destination.Port()); port != 0 && slices.Contains(s.AllPorts(), port) {
			return s
		}
		if s.Port == desired.AllPorts {
			found = s
		}
	}
	return found
}

// usable returns the servers that get new flows: servers that are not drained; if possible, with a
// next hop that answers; and of those, if possible, servers that pass their checks.
func (r *reference) usable(svc *desired.Service) []desired.Server {
	servers := slices.DeleteFunc(slices.Clone(svc.Servers), func(s desired.Server) bool { return !s.Takes() })
	for _, bad := range []func(desired.Server) bool{
		func(s desired.Server) bool { return r.linkOf(s.Name) == "" },
		func(s desired.Server) bool { return !r.reaches(s.Name) },
		func(s desired.Server) bool { return r.failing[svc.Name+"/"+s.Name] },
		func(s desired.Server) bool { return r.awaitsCheck(svc, s.Name) },
	} {
		if good := slices.DeleteFunc(slices.Clone(servers), bad); len(good) > 0 {
			servers = good
		}
	}
	return servers
}

// awaitsCheck tells whether no health check of a server has had a result yet, though it has checks.
func (r *reference) awaitsCheck(svc *desired.Service, server string) bool {
	return svc.Health != nil && !r.services.byName[svc.Name].named[server].checked
}

// isUnproven tells whether a server is drained only until its first check has a result, because
// others have passed theirs.
func (r *reference) isUnproven(svc *desired.Service, server *desired.Server) bool {
	return server.Takes() && r.awaitsCheck(svc, server.Name) && r.reaches(server.Name) &&
		!r.failing[svc.Name+"/"+server.Name] && !r.takes(svc, server.Name)
}

// tablesOf returns the tables of the service's generations, the present one first. The tables of
// former sets must have the present buckets. Those of round-robin need not, because their rows are
// alike; but other tables do not fit a present table of round-robin.
func (r *reference) tablesOf(svc *desired.Service) []*tables.Table {
	built := r.tables[svc.Name]
	if built != nil {
		return built
	}
	for i, set := range r.generations[svc.Name].Sets {
		fits := set.Buckets == svc.Buckets && !svc.Placement.Method().TakesTurns() &&
			reflect.DeepEqual(set.Affinity, serversets.SetOf(svc).Affinity) &&
			(set.Candidates == svc.Candidates || !svc.FindsByColumn())
		if i == 0 || fits || set.Placement.Method().TakesTurns() {
			table, err := set.Table()
			r.must(err)
			built = append(built, table)
		}
	}
	r.tables[svc.Name] = built
	return built
}

// rows returns the number of rows of the service's candidate table.
func (r *reference) rows(svc *desired.Service) int { return r.tablesOf(svc)[0].Buckets }

// depth returns how many servers the reference knows of each place of a row.
func (r *reference) depth(svc *desired.Service) int {
	depth := svc.Generations
	if svc.FindsByColumn() {
		depth = svc.History
	}
	return min(depth, len(r.tablesOf(svc)))
}

// row lists the servers of the service in the row of a bucket. Age 0 is the present row. At age i
// are the servers that the places had before, the i-th last ones that are different and still
// configured. The name is empty if there is no such server.
func (r *reference) row(svc *desired.Service, age, bucket int) (names []string) {
	bucket %= r.rows(svc)
	if age == 0 {
		return serversIn(svc, r.tablesOf(svc)[0], bucket)
	}
	longest := 0
	for _, table := range r.tablesOf(svc) {
		longest = max(longest, table.Candidates)
	}
	for place := range longest {
		name := ""
		if past := r.past(svc, bucket, place); age < len(past) {
			name = past[age]
		}
		names = append(names, name)
	}
	return names
}

// serversIn lists the servers of the service in the row of a table. The names of removed servers
// are empty.
func serversIn(svc *desired.Service, table *tables.Table, bucket int) (names []string) {
	if table.Candidates == 0 {
		return nil
	}
	for _, i := range table.Row(bucket % table.Buckets) {
		name := table.Servers[i].Name
		if serverOfName(svc, name) == nil {
			name = ""
		}
		names = append(names, name)
	}
	return names
}

// past lists the present server of a place of a row, which is empty if there is none, and the
// different servers that the place had before, the last one first.
func (r *reference) past(svc *desired.Service, bucket, place int) (names []string) {
	for age, table := range r.tablesOf(svc) {
		name := ""
		if row := serversIn(svc, table, bucket); place < len(row) {
			name = row[place]
		}
		if age == 0 || name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names[:min(len(names), r.depth(svc))]
}

func (r *reference) bucket(flow dataplane.Flow, svc *desired.Service) int {
	return flow.BucketOf(svc, &r.identity.BucketKeys, r.rows(svc))
}

// taking lists as many servers that get new flows as the flow's row has servers, but at most the
// wanted number. The next rows replace servers that get none. The search ends after eight more rows
// if it has found a server.
func (r *reference) taking(flow dataplane.Flow, svc *desired.Service, wanted int) (names []string) {
	first := r.bucket(flow, svc)
	wanted = min(wanted, len(r.row(svc, 0, first)))
	usable := r.usable(svc)
	for i := range r.rows(svc) {
		for _, name := range r.row(svc, 0, first+i) {
			takes := slices.ContainsFunc(usable, func(s desired.Server) bool { return s.Name == name })
			if takes && len(names) < wanted && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
		if len(names) == wanted || len(names) > 0 && i >= 8 {
			break
		}
	}
	return names
}

// possible lists the servers that may have a flow: those that get new flows, those of all
// generations that can be reached and do not fail, those that fail, and at last those of the
// present row that cannot be reached. A service that finds flows by columns has them on servers of
// their row only.
func (r *reference) possible(flow dataplane.Flow, svc *desired.Service) (names []string) {
	if !svc.FindsByColumn() {
		names = r.taking(flow, svc, svc.Candidates)
	}
	add := func(row []string, wanted func(string) bool) {
		for _, name := range row {
			if name != "" && wanted(name) && !slices.Contains(names, name) && len(names) < desired.MaxVisited {
				names = append(names, name)
			}
		}
	}
	bucket := r.bucket(flow, svc)
	present := r.row(svc, 0, bucket)
	fails := func(name string) bool { return r.isUnfit(svc, serverOfName(svc, name)) }
	for age := range r.depth(svc) {
		add(r.row(svc, age, bucket), func(name string) bool { return r.reaches(name) && !fails(name) })
	}
	for age := range r.depth(svc) {
		add(r.row(svc, age, bucket), r.reaches)
	}
	add(present, func(string) bool { return true })
	return names
}

// passesOn tells whether the servers of a service pass packets of unknown flows on.
func passesOn(svc *desired.Service) bool {
	return svc.Protocol == desired.TCP &&
		(svc.Placement.Method().ServersDecide || svc.Probes() || svc.FindsByColumn())
}

// hash returns the course of a packet whose flow is unknown, and the reason under which it is
// counted.
func (r *reference) hash(p parsed, svc *desired.Service) (to []stage, reason string) {
	if passesOn(svc) && !p.mayMove() {
		to = stages(srv6.Steer, r.possible(p.flow, svc)...)
	} else if server := r.place(p.flow, svc); server != nil {
		to = alone(srv6.Deliver, server)
	}
	switch len(to) {
	case 0:
		return nil, ""
	case 1:
		return to, r.remember(p, svc, serverOfName(svc, to[0].server))
	}
	return to, "forward_recover"
}

// place returns the server that consistent hashing selects for a flow, or nil if there is none.
func (r *reference) place(flow dataplane.Flow, svc *desired.Service) *desired.Server {
	names := r.taking(flow, svc, 1)
	if names == nil {
		return nil
	}
	return serverOfName(svc, names[0])
}

// serverOfName returns the server of the service with a name, or nil if there is none.
func serverOfName(svc *desired.Service, name string) *desired.Server {
	if i := slices.IndexFunc(svc.Servers, func(s desired.Server) bool { return s.Name == name }); i >= 0 {
		return &svc.Servers[i]
	}
	return nil
}

// obstacle returns why a packet cannot be sent to its server, and the MTU without the
// encapsulation.
func (r *reference) obstacle(frame []byte, p parsed, svc *desired.Service, to []stage) (reason string, mtu int) {
	link := r.linkOf(to[0].server)
	switch {
	case link == "":
		return "drop_no_next_hop", 0
	case p.hopLimit <= 1:
		return "drop_hop_limit", 0
	}
	sent, err := packet.Encapsulate(frame, r.encapFor(p.flow, svc.Name, to...))
	r.must(err)
	mtu = links[link] - (len(sent) - len(frame))
	if int(p.length) > mtu {
		return "drop_too_big", mtu
	}
	return "", mtu
}
