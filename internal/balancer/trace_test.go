// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"maps"
	"math"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// varied returns a configuration with all encapsulations, both IP versions and both protocols.
func varied() *desired.Balancer {
	web := []desired.Server{srv6Server("s1", 1, 1), srv6Server("s2", 2, 2), srv6Server("s3", 3, 0)}
	return balancerOf(
		serviceOf("insert", vip6, 80, desired.TCP, desired.SRv6Insert, web...),
		serviceOf("encap", vip4, 80, desired.TCP, desired.SRv6Encap, web...),
		serviceOf("gre", vip4, 53, desired.UDP, desired.GRE, tunnelServer("g4", "10.0.0.53"), tunnelServer("g6", "fd00:a::53")),
		serviceOf("rest", vip6, desired.AllPorts, desired.TCP, desired.IPIP, tunnelServer("r4", "10.0.0.99"), tunnelServer("r6", "fd00:a::99")),
	)
}

// randomPacket draws a packet of one of a few flows, so that many packets belong to a known flow.
// The flags are for TCP.
func randomPacket(t *rapid.T) (p inspect.Packet, flags packet.TCPFlags, frame []byte) {
	client, vips, headers := "2001:db8:c::%d", []netip.Addr{vip6, vip6, vip6.Next()}, 40
	if rapid.Bool().Draw(t, "IPv4") {
		client, vips, headers = "203.0.113.%d", []netip.Addr{vip4, vip4, vip4.Next()}, 20
	}
	source := netip.MustParseAddr(fmt.Sprintf(client, rapid.IntRange(1, 2).Draw(t, "client")))
	vip, port := rapid.SampledFrom(vips).Draw(t, "VIP"), rapid.SampledFrom([]uint16{80, 53, 443}).Draw(t, "port")
	p.Flow = dataplane.Flow{
		Protocol:    rapid.SampledFrom([]desired.Protocol{desired.TCP, desired.UDP}).Draw(t, "protocol"),
		Source:      netip.AddrPortFrom(source, rapid.Uint16Range(40000, 40001).Draw(t, "source port")),
		Destination: netip.AddrPortFrom(vip, port),
	}
	headers += 8
	if p.Flow.Protocol == desired.TCP {
		headers += 12
		flags = rapid.SampledFrom([]packet.TCPFlags{packet.SYN, packet.SYN, packet.ACK, packet.ACK,
			packet.SYN | packet.ACK, packet.FIN | packet.ACK, packet.RST}).Draw(t, "flags")
	}
	p.Opens = flags&(packet.SYN|packet.ACK) == packet.SYN
	// Half of the lengths are near the MTU of the narrow link minus the encapsulation. The others
	// are arbitrary.
	mtu := links["narrow"]
	p.Length = rapid.OneOf(rapid.IntRange(headers, mtu), rapid.IntRange(mtu-80, mtu-16)).Draw(t, "length")
	return p, flags, frameOf(p.Flow, packet.Flags(flags), packet.Payload(make([]byte, p.Length-headers)))
}

// reconfigure changes placement, weights, servers and next hops of a service.
func (f *fixture) reconfigure(t *rapid.T, number int) {
	service := f.cfg.Services[number]
	service.Placement = rapid.SampledFrom([]desired.Placement{
		desired.PlacementHash, desired.PlacementRoundRobin,
	}).Draw(t, "placement")
	service.Servers = slices.Clone(service.Servers)
	for i := range service.Servers {
		weight := rapid.Uint32Range(0, 2).Draw(t, "weight")
		service.Servers[i].Weight = &weight
		f.via[service.Servers[i].Name] = rapid.SampledFrom([]string{"out", "narrow", "narrow", "narrow", "narrow", ""}).Draw(t, "link")
		f.silent[service.Servers[i].Name] = rapid.IntRange(0, 4).Draw(t, "silent") == 0
	}
	if rapid.Bool().Draw(t, "without the first server") {
		service.Servers = service.Servers[1:]
	}
	g := f.generations.Next([]desired.Service{service})[service.Name]
	if err := f.services.placeOne(newServiceState(&service, &f.cfg.Node, g)); err != nil {
		t.Fatal(err)
	}
	f.generations[service.Name] = g
	f.services.retireSlots()
	f.route()
}

// Trace says what the data path then does, for any packet in any state of the tables.
func TestTraceAgreesWithDataPath(t *testing.T) {
	t.Parallel()
	cfg := varied()
	cfg.Services[1].Placement = desired.PlacementRoundRobin // so that programs have both placements
	f := open(t, cfg)
	view := f.view()
	seen := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		clear(f.plane.Flows.Entries)
		for number := range f.cfg.Services {
			f.reconfigure(t, number)
		}
		for range rapid.IntRange(1, 30).Draw(t, "packets") {
			if rapid.IntRange(0, 14).Draw(t, "reconfigure") == 0 {
				f.reconfigure(t, rapid.IntRange(0, len(f.cfg.Services)-1).Draw(t, "service"))
			}
			p, flags, frame := randomPacket(t)
			seen[f.compare(t, view, p, flags, frame)]++
		}
	})
	for _, reason := range []string{"pass_not_vip", "forward_known", "forward_new", "forward_recover", "drop_no_service",
		"answer_no_service", "drop_no_server", "answer_no_server", "drop_no_next_hop", "answer_too_big"} {
		if seen[reason] == 0 {
			t.Errorf("no packet met %s: %v", reason, seen)
		}
	}
}

// A bucket that is full of flows in use accepts no other flow.
func TestTraceOfFullTable(t *testing.T) {
	t.Parallel()
	f := open(t, varied())
	view := f.view()
	p := inspect.Packet{Flow: flowTo(vip6, 80, desired.TCP), Opens: true, Length: 60}
	fill := func(idle uint16) {
		for i := range f.plane.Flows.Entries {
			f.plane.Flows.Entries[i] = entryOf(uint64(i), 0, dataplane.FlowEstablished, f.now()-idle)
		}
	}
	fill(flowMinIdle - 2)
	if reason := f.compare(t, view, p, packet.SYN, frameOf(p.Flow)); reason != "forward_no_room" {
		t.Errorf("among flows in use: %s", reason)
	}
	fill(flowMinIdle)
	if reason := f.compare(t, view, p, packet.SYN, frameOf(p.Flow)); reason != "forward_new" {
		t.Errorf("among idle flows: %s", reason)
	}
}

// Trace says what the data path then does with any packet of a flow that hunts, whatever signals
// servers have sent before, and whichever servers can be reached.
func TestTraceOfHuntsAgreesWithDataPath(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 3))
	view := f.view()
	seen := map[string]int{}
	names := slices.Sorted(maps.Keys(hunted))
	states := []string{"half-open first", "new second", "steer third", "closing second", "over second", "stale first", "stale third"}
	// SYNs reach most cases. The rarest case is a closing flow at a server that cannot be reached.
	kinds := []packet.TCPFlags{packet.SYN, packet.SYN, packet.SYN, packet.SYN | packet.ACK, packet.ACK, packet.FIN | packet.ACK, packet.RST}
	rapid.Check(t, func(t *rapid.T) {
		clear(f.plane.Flows.Entries)
		clear(f.plane.HalfOpen.Entries)
		f.route()
		for range rapid.IntRange(40, 80).Draw(t, "packets") {
			service := rapid.SampledFrom(names).Draw(t, "service")
			flow := fromPort(hunted[service], rapid.Uint16Range(1, 2).Draw(t, "port"))
			server := rapid.SampledFrom(f.row(flow, service)).Draw(t, "server")
			kind := rapid.SampledFrom(kinds).Draw(t, "flags")
			flags := packet.Flags(kind)
			switch rapid.IntRange(0, 10).Draw(t, "what") {
			case 0:
				harm := rapid.SampledFrom([]func(uint32){f.plane.Servers.ClearNextHop, f.hush}).Draw(t, "harm")
				for _, name := range f.row(flow, service)[:rapid.IntRange(1, 3).Draw(t, "harmed")] {
					harm(f.slot(service, name))
				}
			case 1:
				f.route()
			case 10:
				f.setState(flow, service, rapid.SampledFrom(states).Draw(t, "state"), f.cast(flow, service))
			case 2, 3:
				f.exec(f.signal(flow, service, server, srv6.CreateStickiness, flags), nil)
			case 4:
				f.exec(f.signal(flow, service, server, srv6.RemoveStickiness, flags), nil)
			default:
				frame := frameOf(flow, flags)
				trace := mustTrace(t, view, inspect.Packet{Flow: flow, Opens: kind == packet.SYN, Length: int(layer3(frame))})
				if kind == packet.RST && trace.Reason == "forward_new" {
					trace.Reason = "forward_known" // of a packet that confirms the half-open flow
				}
				if diff := cmp.Diff(f.traced(t, trace, frame), f.run(frame)); diff != "" {
					t.Fatalf("traced as %+v; -trace +data path:\n%s", trace, diff)
				}
				state := "unknown"
				if trace.Known != nil {
					state = trace.Known.State
				}
				if trace.Placement == nil || len(trace.Placement.Candidates) < 1 || len(trace.Placement.Candidates) > 3 {
					t.Fatalf("the candidates are %+v", trace.Placement)
				}
				seen[state+" "+trace.Reason]++
			}
		}
	})
	for _, want := range []string{"unknown forward_hunt", "unknown forward_recover", "unknown drop_no_next_hop", "half-open forward_new",
		"half-open forward_known", "established forward_known", "closing forward_hunt", "closing forward_known"} {
		if seen[want] == 0 {
			t.Errorf("no packet met %s: %v", want, seen)
		}
	}
}

// Trace cannot say which random candidates get an offer.
func TestTraceOfRandomHunt(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectRandom, 2))
	trace := mustTrace(t, f.view(), inspect.Packet{Flow: web, Opens: true, Length: 60})
	want := &inspect.TracedPlacement{Buckets: 251, Random: true}
	if diff := cmp.Diff(want, trace.Placement); diff != "" || trace.Reason != "forward_hunt" || trace.Server != nil {
		t.Errorf("%+v, placement (-want +got):\n%s", trace, diff)
	}
}

// With random candidates, Trace shows the drained server of the flow, which is asked first.
func TestTraceOfRandomHuntAfterDrained(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectRandom, 2))
	parts := f.cast(web, "web")
	cfg := hunting(desired.SelectRandom, 2)
	drained := serverOfName(&cfg.Services[1], parts[first])
	drained.Weight = new(uint32)
	f.mustApply(cfg)
	view := f.view()
	for _, state := range []string{"half-open first", "steer first", "over first"} {
		f.setState(web, "web", state, parts)
		trace := mustTrace(t, view, inspect.Packet{Flow: web, Opens: true, Length: 60})
		if !trace.Placement.Random || trace.Reason != "forward_hunt" {
			t.Errorf("%s: %+v", state, trace)
		}
		_, out := f.exec(frameOf(web), nil)
		got := srv6.Parse(netip.AddrFrom16([16]byte(out[ethernetLength+24:])))
		isAsked := got.Locator == drained.Locator && got.Function == srv6.Steer
		if state == "over first" {
			if isAsked || trace.Course != nil || trace.Server != nil {
				t.Errorf("%s: asked first %v, traced as %+v", state, isAsked, trace)
			}
			continue
		}
		want := []inspect.TracedSegment{{Server: parts[first], Function: srv6.Steer.String()}}
		if diff := cmp.Diff(want, trace.Course); diff != "" || !isAsked {
			t.Fatalf("%s: %v is asked first; course (-want +got):\n%s", state, got, diff)
		}
		mac, err := net.ParseMAC(trace.NextHop.MAC)
		if err != nil || trace.Server.Name != parts[first] || packet.MAC(mac) != packet.MAC(out) {
			t.Errorf("%s: traced to %+v by %+v, error %v", state, trace.Server, trace.NextHop, err)
		}
	}
}

// Trace says why a packet does not go to the server of its flow's entry.
func TestTraceOfDeparture(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 2))
	parts := f.cast(web, "web")
	slot := f.slot("web", parts[first])
	view := f.view()
	flag := func(flags dataplane.ServerFlags) func() {
		return func() { f.plane.Servers.SetFlags(slot, f.plane.Servers.Flags(slot)|flags) }
	}
	failing := flag(dataplane.FlagFailing | dataplane.FlagChecksFail | dataplane.FlagSilent)
	for _, c := range []struct {
		state string
		opens bool
		harm  func()
		left  string
	}{
		{"steer first", true, nil, ""},
		{"half-open first", true, nil, ""},
		{"stale first", true, nil, ""},
		{"steer first", true, func() { f.plane.Servers.SetFlags(slot, 0) }, "the server was removed"},
		{"steer first", false, func() {
			f.bucket(web)[3] = entryOf(f.signature(web), f.slot("insert", parts[first]), stateEstablished, f.now())
		}, "the entry is another service's: two flows share a signature"},
		{"steer first", true, failing, ""},
		{"half-open first", true, failing, "the server is failing, silent"},
		{"stale first", true, failing, "the server is failing, silent"},
		{"steer first", true, func() { f.plane.Servers.ClearNextHop(slot) }, "the server has no next hop"},
		{"steer first", true, func() { f.hush(slot) }, "the server's next hop does not answer"},
		{"half-open first", true, func() { f.hush(slot) }, "the server's next hop does not answer"},
		{"over first", true, nil, "a new connection takes the place of one that is over"},
		{"steer first", true, flag(dataplane.FlagDrained), "the server is drained"},
		{"steer first", false, flag(dataplane.FlagDrained), ""},
		{"stale first", false, nil, "it was idle for so long that servers are asked whose the flow is now"},
	} {
		f.plane.Servers.SetFlags(slot, dataplane.FlagInUse)
		f.route()
		f.setState(web, "web", c.state, parts)
		if c.harm != nil {
			c.harm()
		}
		known := mustTrace(t, view, inspect.Packet{Flow: web, Opens: c.opens, Length: 60}).Known
		if known == nil || known.Server != parts[first] || known.Left != c.left {
			t.Errorf("%s, SYN %v: %+v, want %q", c.state, c.opens, known, c.left)
		}
		if isHalfOpen := strings.HasPrefix(c.state, "half-open"); known != nil && isHalfOpen != (known.State == "half-open") {
			t.Errorf("%s, SYN %v: the entry is %s", c.state, c.opens, known.State)
		}
	}
}

// A packet that is longer than a page of memory is decided about as well.
func TestTraceOfLongPacket(t *testing.T) {
	t.Parallel()
	f := open(t, varied())
	view := f.view()
	flow := flowTo(vip6, 80, desired.TCP)
	most := links["out"] - overheadOf(desired.SRv6Insert, 1, false)
	for length, reason := range map[int]string{
		60: "forward_new", 3000: "forward_new", most: "forward_new", most + 1: "answer_too_big", 65535: "answer_too_big",
	} {
		trace := mustTrace(t, view, inspect.Packet{Flow: flow, Opens: true, Length: length})
		if trace.Reason != reason || trace.Encapsulation.MaxLength != most {
			t.Errorf("%d bytes: %s, at most %d bytes; want %s, %d", length, trace.Reason, trace.Encapsulation.MaxLength, reason, most)
		}
	}
}

// A balancer outside the domain drops packets to SIDs of the domain. Trace finds the domain in the
// attached program.
func TestTraceOfStranger(t *testing.T) {
	t.Parallel()
	f := open(t, outsideOf(varied()))
	f.must(datapath.Pin(f.plane.Objects.XdpLb, filepath.Join(datapath.Dir(f.cfg.Node.Instance), datapath.BalancerProgram)))
	view := f.view()
	for destination, reason := range map[string]string{
		"fd00:5:0:1:5::": "drop_outside", "fd00:5:0:1::1": "pass_not_vip", "fd00:5:0:ffff:5::": "pass_not_vip",
	} {
		flow := flowTo(netip.MustParseAddr(destination), 80, desired.TCP)
		trace := mustTrace(t, view, inspect.Packet{Flow: flow, Opens: true, Length: 60})
		if trace.Reason != reason {
			t.Errorf("to %s: %s, want %s", destination, trace.Reason, reason)
		}
		f.check(f.traced(t, trace, frameOf(flow)), f.run(frameOf(flow)))
	}
}

// fataler is implemented by the tests of packages testing and rapid.
type fataler interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
}

func (f *fixture) view() *inspect.View {
	f.t.Helper()
	tables, err := dataplane.OpenReader(f.cfg.Node.Instance)
	f.must(err)
	tables.Clock.Shift = f.clock.Shift
	view := inspect.NewView(tables)
	f.t.Cleanup(func() { _ = view.Close() })
	return view
}

func mustTrace(t fataler, view *inspect.View, p inspect.Packet) *inspect.Trace {
	t.Helper()
	trace, err := view.Trace(p)
	testhost.Must(t, err)
	return trace
}

// compare traces a packet, sends it, and traces the next packet of its flow.
func (f *fixture) compare(t fataler, view *inspect.View, p inspect.Packet, flags packet.TCPFlags, frame []byte) string {
	t.Helper()
	before := mustTrace(t, view, p)
	want, got := f.traced(t, before, frame), f.run(frame)
	if flags&packet.RST != 0 && before.Reason == "answer_no_service" { // trace makes no resets
		want = refused(frame, "drop_no_service", layer3(frame))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("%+v\nwas traced as %+v; -trace +data path:\n%s", p, before, diff)
	}
	if before.Server != nil && before.Reason != "forward_no_room" {
		after := mustTrace(t, view, inspect.Packet{Flow: p.Flow, Length: p.Length})
		// A flow is on a server that cannot be reached only if there is no other server.
		unreachable := p.Flow.Protocol == desired.UDP &&
			(before.Reason == "drop_no_next_hop" || slices.Contains(before.Server.Causes, inspect.ServerUnreachable))
		if after.Known == nil || after.Known.Server != before.Server.Name || (after.Known.Left != "") != unreachable {
			t.Fatalf("%+v went to %s; for a later packet trace has %+v", p, before.Server.Name, after.Known)
		}
		if want := stateAfter(before, flags); after.Known.State != want {
			t.Fatalf("%+v with flags %v: state %s, want %s; before %+v", p, flags, after.Known.State, want, before.Known)
		}
	}
	return reasonOf(got)
}

// traced returns the outcome that a trace predicts.
func (f *fixture) traced(t fataler, trace *inspect.Trace, frame []byte) outcome {
	t.Helper()
	switch {
	case trace.Reason == "answer_too_big":
		return answered(frame, trace.Reason, uint32(trace.Encapsulation.MaxLength))
	case strings.HasPrefix(trace.Reason, "answer_no_"):
		return rejected(frame, trace.Reason)
	case !strings.HasPrefix(trace.Reason, "forward_"):
		return refused(frame, trace.Reason, uint64(trace.Length))
	}
	e := trace.Encapsulation
	f.checkCourse(t, trace)
	encap := packet.Encap{Kind: e.Kind, Source: e.Source, Destination: e.Destination, FlowLabel: f.flowLabel(trace.Flow)}
	if len(e.Segments) > 0 {
		encap.Sender, encap.Segments = e.Segments[0], e.Segments[1:]
		if e.Kind == desired.SRv6Insert { // the last segment is the VIP
			encap.Segments = e.Segments[1 : len(e.Segments)-1]
		}
		encap.Whole = slices.ContainsFunc(encap.Segments, func(segment netip.Addr) bool {
			return srv6.Parse(segment).Function.IsOffer()
		})
	}
	mac, err := net.ParseMAC(trace.NextHop.MAC)
	testhost.Must(t, err)
	encap.NextHop = packet.MAC(mac)
	for link, index := range f.ifindex {
		if index == trace.NextHop.Ifindex {
			encap.Own = f.macs[link]
		}
	}
	out, err := packet.Encapsulate(frame, encap)
	testhost.Must(t, err)
	if len(out)-len(frame) != e.Added {
		t.Fatalf("%+v: it is %d bytes more", e, len(out)-len(frame))
	}
	counted := tally{Packets: 1, Bytes: uint64(trace.Length)}
	reasons := map[string]tally{trace.Reason: counted}
	if trace.Reason == "forward_new" {
		counted.Flows = 1
	}
	return outcome{verdictRedirect, out, reasons, map[string]tally{trace.Service.Name + "/" + trace.Server.Name: counted}}
}

// checkCourse compares the course of a trace with its segments.
func (f *fixture) checkCourse(t fataler, trace *inspect.Trace) {
	t.Helper()
	servers := f.service(trace.Service.Name).Servers
	if len(trace.Course) == 0 || trace.Course[0].Server != trace.Server.Name {
		t.Fatalf("%+v: it begins at %+v", trace.Course, trace.Server)
	}
	for i, at := range trace.Course {
		if len(trace.Encapsulation.Segments) == 0 { // gre or ipip
			continue
		}
		server := servers[slices.IndexFunc(servers, func(s desired.Server) bool { return s.Name == at.Server })]
		sid := srv6.Parse(trace.Encapsulation.Segments[i+1])
		column := srv6.NoColumn
		if sid.Function.IsOffer() {
			column = srv6.ParseOffer(sid.Argument).Column
		}
		if sid.Locator != server.Locator || sid.Function.String() != at.Function ||
			(at.Column == nil) != (column == srv6.NoColumn) || at.Column != nil && *at.Column != column {
			t.Fatalf("%+v: segment %d is %v", trace.Course, i, sid)
		}
	}
}

// stateAfter returns the state of a flow after a packet that was traced before.
func stateAfter(before *inspect.Trace, flags packet.TCPFlags) string {
	switch {
	case before.Known == nil || before.Known.Left != "",
		flags&packet.RST != 0 && before.Known.State == "new":
		return "new"
	case flags&(packet.FIN|packet.RST) != 0:
		return "closing"
	case before.Known.State == "new" && !before.Opens:
		return "established"
	}
	return before.Known.State
}

// Trace shows the loads by which the balancer orders the candidates of a SYN, and which of them are
// offered the connection: the three with the lowest estimates, or two and a spare server.
func TestTraceOfReports(t *testing.T) {
	t.Parallel()
	for _, selection := range []desired.Selection{desired.SelectReports, desired.SelectSpare} {
		t.Run(string(selection), func(t *testing.T) {
			f := open(t, hunting(selection, 4))
			shift := f.plane.Constants["report_half_life_shift"].(uint32)
			view := f.view()
			for service, flow := range hunted {
				row := f.row(flow, service)
				mean, offered, spare := heardLoad(20), 3, ""
				all := serviceReports{Mean: uint64(mean)}
				if selection == desired.SelectSpare {
					for _, s := range f.service(service).Servers {
						if !slices.Contains(row, s.Name) {
							offered, spare = 2, s.Name
						}
					}
					all.Spares = uint64(f.slot(service, spare) ^ dataplane.NoServer)
				}
				f.must(f.plane.Objects.ServiceReports.Put(f.serviceID(flow), &all))
				const old = 1 << 20 // jiffies: only the mean is left
				loads := map[string]reportedLoad{
					row[0]: {heardLoad(40), 0}, row[1]: {heardLoad(16), 0}, row[2]: {0, 0}, row[3]: {heardLoad(8), old},
				}
				now := f.jiffies()
				for server, r := range loads {
					f.storeReport(f.slot(service, server), storedReport{Heard: uint64(r.load)<<32 | (now-r.age)&math.MaxUint32})
				}
				want := ordered(row, loads, uint64(mean), shift)
				if got := []string{row[1], row[3], row[0], row[2]}; !slices.Equal(got, want) {
					t.Fatalf("the row %v is ordered %v", got, want)
				}
				trace := mustTrace(t, view, inspect.Packet{Flow: flow, Opens: true, Length: 60})
				order := trace.Placement.Order
				if order == nil || order.Mean != dataplane.EstimatedLoad(mean) {
					t.Fatalf("%s: %+v", service, order)
				}
				for i, server := range want {
					s, isKnown := order.Servers[i], loads[server].load != 0
					if s.Server != server || s.Offered != (i < offered) || s.Spare || (s.Estimate != nil) != isKnown || (s.Report.Load != nil) != isKnown {
						t.Errorf("%s: server %d is %+v, want %s", service, i, s, server)
					}
				}
				if e := *order.Servers[1].Estimate; math.Abs(e-order.Mean) > 0.001 {
					t.Errorf("%s: an old report has the estimate %g, want the mean %g", service, e, order.Mean)
				}
				if last := order.Servers[len(order.Servers)-1]; last.Spare != (spare != "") || last.Spare && last.Server != spare {
					t.Errorf("%s: the last server is %+v, want the spare server %q", service, last, spare)
				}
			}
		})
	}
}

// Behind a holder, a SYN is offered to the candidates in the order of the row, and load reports
// decide nothing. A SYN of an unknown flow is offered to the first three of them.
func TestTraceOfReportsBehindHolder(t *testing.T) {
	t.Parallel()
	for _, selection := range []desired.Selection{desired.SelectReports, desired.SelectSpare} {
		t.Run(string(selection), func(t *testing.T) {
			cfg := hunting(selection, 8)
			f := open(t, cfg)
			view := f.view()
			parts := f.cast(web, "web")
			serverOfName(&cfg.Services[1], parts[first]).Weight = new(uint32)
			f.mustApply(cfg)
			for state, want := range map[string]int{"steer first": 7, "listen": 3} {
				f.setState(web, "web", state, parts)
				trace := mustTrace(t, view, inspect.Packet{Flow: web, Opens: true, Length: 60})
				var offered []string
				for _, at := range trace.Course {
					if at.Function == srv6.ConnectAvail.String() {
						offered = append(offered, at.Server)
					}
				}
				if diff := cmp.Diff(offered, trace.Placement.Candidates); diff != "" || len(offered) != want {
					t.Errorf("%s, %s: offered to %d servers, want %d; -offered +candidates:\n%s",
						selection, state, len(offered), want, diff)
				}
				if isOrdered := trace.Placement.Order != nil; isOrdered != (state == "listen") {
					t.Errorf("%s, %s: the order is %+v", selection, state, trace.Placement.Order)
				}
			}
		})
	}
}
