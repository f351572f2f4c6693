// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"strings"

	configv1 "github.com/p4lang/p4runtime/go/p4/config/v1"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/srv6"
)

// Trace is what a switch does with a packet, and why.
type Trace struct {
	Address string `json:"address"` // of the switch
	// Lookups are those of the packet, in the order of p4/core/balance.p4.
	Lookups []Lookup `json:"lookups"`
	// Course lists the servers that the packet visits. It is empty if the packet passes to the host.
	Course []inspect.TracedSegment `json:"course"`
	// Segments are the SIDs of these servers.
	Segments []netip.Addr `json:"segments"`
	// Reason is the reason under which the switch counts the packet. It is empty if it is unknown.
	Reason string `json:"reason"`
	// Problem is why the reason is unknown.
	Problem string `json:"problem,omitempty"`
}

// Lookup is an entry that a packet looks for.
type Lookup struct {
	Table string  `json:"table"`
	Key   []Field `json:"key"`
	// Action is that of the entry. It is empty if the switch has no entry with this key.
	Action string  `json:"action"`
	Params []Field `json:"parameters"`
}

// Field is a field of a key, or a parameter of an action, in readable form.
type Field struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// Forwards tells whether the switch sends the packet to a server.
func (t *Trace) Forwards() bool { return strings.HasPrefix(t.Reason, "forward_") }

// tracer looks up the entries for a packet, and takes the steps of the program.
type tracer struct {
	*Reader
	ctx     context.Context
	packet  inspect.Packet
	nameOf  func(slot uint16) string
	trace   *Trace
	service fields
	servers fields // the list of servers of the packet
	// function is what the packet asks each of these servers.
	function srv6.Function
}

// fields are the parameters of an entry by name.
type fields map[string]Value

func (f fields) number(name string) int { return int(f[name].number()) }

// TracePacket returns what a switch does with a packet. It reads the entries that the switch has.
// nameOf returns the name of the server in a slot.
func TracePacket(ctx context.Context, to *desired.Switch, p inspect.Packet, nameOf func(slot uint16) string) *Trace {
	t := &Trace{Address: to.Address, Lookups: []Lookup{}}
	err := withReader(to, func(r *Reader) error {
		isRunning, err := r.runsProgram(ctx)
		if err == nil && !isRunning {
			err = errors.New("the switch does not run the program of this build")
		}
		if err != nil {
			return err
		}
		return (&tracer{Reader: r, ctx: ctx, packet: p, nameOf: nameOf, trace: t}).run()
	})
	if err != nil {
		t.Reason, t.Problem = "", err.Error()
	}
	return t
}

// run takes the steps of the control Balance in p4/core/balance.p4.
func (t *tracer) run() error {
	for _, step := range []func() error{t.classify, t.findServers, t.findNextHop, t.encapsulate} {
		if err := step(); err != nil {
			return err
		}
		if !t.isOnItsWay() {
			return nil
		}
	}
	return nil
}

// isOnItsWay tells whether the packet goes to a server, as far as the steps have found.
func (t *tracer) isOnItsWay() bool { return t.trace.Reason == "" || t.trace.Forwards() }

// match looks for an entry, and notes it. It returns nil if the switch has none.
func (t *tracer) match(table string, key []Value) (fields, error) {
	e, err := t.Lookup(t.ctx, table, key...)
	if err != nil {
		return nil, err
	}
	about := t.program.tables[table]
	l := Lookup{Table: table, Key: []Field{}, Params: []Field{}}
	for i, field := range about.MatchFields {
		l.Key = append(l.Key, Field{field.Name, t.readable(field.Name, field.Bitwidth, key[i])})
	}
	var found fields
	if e != nil {
		found = fields{}
		l.Action = e.Action
		for i, param := range t.program.action(about, e.Action).Params {
			found[param.Name] = e.Params[i]
			if !isUnused(param, found) {
				l.Params = append(l.Params, Field{param.Name, t.readable(param.Name, param.Bitwidth, e.Params[i])})
			}
		}
	}
	t.trace.Lookups = append(t.trace.Lookups, l)
	return found, nil
}

// isUnused tells whether a parameter is a place of a list that is shorter. The parameters before it
// are known.
func isUnused(param *configv1.Action_Param, known fields) bool {
	var place int
	_, hasCount := known["count"]
	n, _ := fmt.Sscanf(param.Name, "slot%d", &place)
	return n == 1 && hasCount && place >= known.number("count")
}

// readable returns a value in the usual form for its field.
func (t *tracer) readable(name string, width int32, v Value) string {
	var octets [16]byte
	copy(octets[16-len(v):], v)
	switch {
	case name == "mask" || name == "octets":
		return fmt.Sprintf("%x", octets)
	case width == 128:
		return netip.AddrFrom16(octets).Unmap().String()
	case width == 64:
		return locatorOf(v).String()
	case width == 48:
		return net.HardwareAddr(octets[10:]).String()
	case width == 32:
		return fmt.Sprintf("%#08x", v.number())
	case strings.HasPrefix(name, "slot"):
		return fmt.Sprintf("%d (%s)", v.number(), t.nameOf(uint16(v.number())))
	case name == "column" && v.number() == noColumn:
		return "none"
	}
	return fmt.Sprint(v.number())
}

// classify finds the service: the control Classify.
func (t *tracer) classify() (err error) {
	flow := t.packet.Flow
	if flow.Protocol == desired.UDP && len(t.payload()) < shortestQUIC {
		t.trace.Reason = "pass_protocol"
		return nil
	}
	key := serviceKey(flow.Destination.Addr(), flow.Protocol, flow.Destination.Port())
	t.service, err = t.match("services", key)
	if t.service == nil && err == nil {
		t.service, err = t.match("services_of_all_ports", key[:2])
	}
	if t.service == nil {
		t.trace.Reason = "pass_no_service"
	}
	return err
}

// findServers finds the list of servers: the controls LookupServerID, Choose and Lookup.
func (t *tracer) findServers() error {
	if t.packet.Flow.Protocol == desired.UDP {
		return t.findNamed()
	}
	// The mask has a one for each bit of the bucket, and these are the highest bits.
	width := bits.OnesCount32(uint32(t.service.number("bucket_mask")))
	bucket := t.packet.Flow.Bucket(desired.BucketHashCRC32, &dataplane.TupleKeys{}, 1<<width)
	row := rowKey(t.service["number"].number(), t.service["tables"].number(), bucket, 32-width)
	if t.packet.Opens {
		return t.choose(row)
	}
	return t.findKnown(row)
}

// shortestQUIC is the length of the header quic_t in octets.
const shortestQUIC = 17

// payload returns the payload of a UDP packet: a packet of QUIC with a short header, if the packet has
// a connection ID, or else zeros.
func (t *tracer) payload() []byte {
	const udpHeader, ipv4Header, ipv6Header = 8, 20, 40
	length := t.packet.Length - udpHeader - ipv6Header
	if t.packet.Flow.Source.Addr().Is4() {
		length = t.packet.Length - udpHeader - ipv4Header
	}
	payload := make([]byte, max(length, 0))
	if len(payload) > 0 {
		copy(payload[1:], t.packet.ConnectionID)
	}
	return payload
}

// findNamed finds the server that a packet of QUIC names: the control LookupServerID.
func (t *tracer) findNamed() error {
	t.trace.Reason = "pass_no_server_id"
	if t.packet.Opens {
		return nil // it has a long header
	}
	payload := t.payload()
	id := payload[1:shortestQUIC]
	service := t.service["number"]
	form, err := t.match("quic_forms", []Value{service, Number(uint64(id[0] >> 5))})
	if form == nil || len(payload) < 1+form.number("length") {
		return err
	}
	octets := make(Value, len(id))
	copy(octets[len(id)-len(form["mask"]):], form["mask"])
	for i := range octets {
		octets[i] &= id[i]
	}
	t.servers, err = t.match("quic_servers", []Value{service, form["server_id_length"], octets})
	if t.servers == nil {
		return err
	}
	t.trace.Reason = "forward_known"
	t.servers["slot0"] = t.servers["slot"]
	t.visit(1, srv6.Deliver)
	return nil
}

// choose finds the candidates of a new flow.
func (t *tracer) choose(row []Value) (err error) {
	willHaveCookie := t.packet.Echo != nil || t.service.number("candidates") <= 1
	if !willHaveCookie && t.hasHints() {
		t.trace.Reason = "pass_no_cookie"
		return nil
	}
	if t.servers, err = t.match("rows", row); err != nil || t.servers == nil {
		t.trace.Reason = "pass_no_server"
		return err
	}
	t.trace.Reason = "forward_new"
	hunts := t.service.number("hunts") == 1
	if hunts {
		t.trace.Reason = "forward_hunt"
	}
	count, function := t.servers.number("count"), srv6.ConnectAvail
	if !hunts || !willHaveCookie {
		count = 1
	}
	if count == 1 {
		function = srv6.ConnectForce
	}
	t.visit(count, function)
	return nil
}

// findKnown finds the servers that may have the flow of a packet.
func (t *tracer) findKnown(row []Value) (err error) {
	column := t.column()
	if column == noColumn && t.hasHints() {
		t.trace.Reason = "pass_no_cookie"
		return nil
	}
	key := withColumn(row, column)
	if t.servers, err = t.match("columns", key); err != nil {
		return err
	}
	count := 1
	if t.servers != nil { // a column has one server
		t.servers["slot0"] = t.servers["slot"]
	} else {
		if t.servers, err = t.match("histories", key); err != nil || t.servers == nil {
			t.trace.Reason = "pass_no_server"
			return err
		}
		count = t.servers.number("count")
	}
	t.trace.Reason = "forward_known"
	if count > 1 {
		t.trace.Reason = "forward_recover"
	}
	t.visit(count, srv6.Steer)
	return nil
}

// hasHints tells whether the host has hints for flows without cookies.
func (t *tracer) hasHints() bool { return t.service.number("has_hints") == 1 }

// column returns the column that the packet's cookie names: the control ReadCookie.
func (t *tracer) column() int {
	candidates := t.service.number("candidates")
	if candidates <= 1 {
		return 0
	}
	if echo := t.packet.Echo; echo != nil && *echo != 0 {
		if column := int(*echo & 0xf & (1<<t.service.number("cookie_width") - 1)); column < candidates {
			return column
		}
	}
	return noColumn
}

// visit notes the servers that the packet visits, and what it asks of each.
func (t *tracer) visit(count int, function srv6.Function) {
	for place := range count {
		at := inspect.TracedSegment{Server: t.nameOf(t.slot(place)), Function: function.String()}
		if function.IsOffer() {
			column := t.columnOf(place)
			at.Column = &column
		}
		t.trace.Course = append(t.trace.Course, at)
	}
	t.function = function
}

func (t *tracer) slot(place int) uint16 {
	return uint16(t.servers.number(fmt.Sprintf("slot%d", place)))
}

// columnOf returns the column of an offered candidate: the inverse of offered.params.
func (t *tracer) columnOf(place int) int {
	return t.servers.number("columns") >> (4 * place) & 0xf >> 1
}

// findNextHop finds the way to the first server: the control FindNextHop.
func (t *tracer) findNextHop() error {
	hop, err := t.match("next_hops", []Value{Number(uint64(t.slot(0)))})
	switch {
	case err != nil:
		return err
	case hop == nil:
		t.pass("pass_no_server")
	case t.packet.Length+t.added() > hop.number("mtu"):
		t.pass("pass_too_big")
	}
	return nil
}

// pass makes the packet pass to the host.
func (t *tracer) pass(reason string) { t.trace.Reason, t.trace.Course = reason, nil }

// added returns the length of the added headers in bytes.
func (t *tracer) added() int {
	count := len(t.trace.Course)
	switch {
	case t.service.number("encapsulation") == 0: // SRV6_INSERT
		return 8 + 16*(count+2)
	case count == 1:
		return 40
	case t.function == srv6.ConnectAvail:
		return 48 + 16*count
	}
	return 32 + 16*count
}

// encapsulate finds the SIDs: the control WriteSegments.
func (t *tracer) encapsulate() error {
	for place, at := range t.trace.Course {
		found, err := t.match(locatorTable(place), []Value{Number(uint64(t.slot(place)))})
		if err != nil {
			return err
		}
		if found == nil {
			return fmt.Errorf("table %s has no entry for slot %d", locatorTable(place), t.slot(place))
		}
		offer := srv6.Offer{
			Cookie:  t.service.number("cookie_width"),
			Returns: t.hasHints() && t.function == srv6.Steer && len(t.trace.Course) == 1,
		}
		if at.Column != nil {
			offer.Column = *at.Column
		}
		sid := srv6.SID{Locator: locatorOf(found["locator"]), Function: t.function, Argument: offer.Argument()}
		t.trace.Segments = append(t.trace.Segments, sid.Addr())
	}
	return nil
}

// locatorOf returns a locator from its parameter.
func locatorOf(v Value) netip.Prefix {
	var address [16]byte
	copy(address[8-len(v):], v)
	return netip.PrefixFrom(netip.AddrFrom16(address), srv6.LocatorBits)
}
