// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/health/probe"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// signal returns a packet from a server to the client of a flow, with a signal to the balancer.
func (f *fixture) signal(flow dataplane.Flow, service, server string, function srv6.Function, options ...packet.Option) []byte {
	f.t.Helper()
	svc := f.service(service)
	return signal(svc.Encapsulation, serverOfName(svc, server).Locator, flow, function, options...)
}

// signal returns a signal from a server with the locator, to the balancer that node describes.
func signal(kind desired.Encapsulation, sender netip.Prefix, flow dataplane.Flow, function srv6.Function, options ...packet.Option) []byte {
	frame, err := packet.Signal(reply(flow, options...), packet.Encap{
		Kind:     kind,
		Sender:   sender.Addr(),
		Segments: []netip.Addr{srv6.SID{Locator: node().Locator, Function: function}.Addr()},
		Own:      packet.MAC{2, 0, 0, 0, 0, 1}, NextHop: ownMAC,
	})
	if err != nil {
		panic(err)
	}
	return frame
}

// returned returns the outcome for a signal whose packet continues to the client.
func (f *fixture) returned(frame []byte, reason string) outcome {
	f.t.Helper()
	out, err := packet.Return(frame, ownMAC)
	f.must(err)
	return outcome{verdictPass, out, map[string]tally{reason: {1, layer3(frame), 0}}, map[string]tally{}}
}

// acknowledged is the acknowledgement number in the packets of servers.
const acknowledged = 0xfedcba98

// reset returns the outcome for a signal whose sender gets a reset, because another server has the
// connection.
func (f *fixture) reset(flow dataplane.Flow, service, server string) outcome {
	f.t.Helper()
	rst := frameOf(flow, packet.Flags(packet.RST), packet.Sequence(acknowledged, 0), packet.Window(0))
	return f.offered(rst, flow, service, "forward_reset", srv6.Deliver, server)
}

// The names of servers in a table of states: the flow's two candidates, and a server that is not a
// candidate.
const (
	first  = "first"
	second = "second"
	third  = "third"
)

// cast maps these names to servers. In a table, first is the flow's first candidate.
func (f *fixture) cast(flow dataplane.Flow, service string) map[string]string {
	f.t.Helper()
	row := f.row(flow, service)
	parts := map[string]string{first: row[0], second: row[1]}
	for _, s := range f.service(service).Servers {
		if s.Name != row[0] && s.Name != row[1] {
			parts[third] = s.Name
		}
	}
	return parts
}

// setState makes the flow tables correspond to a state of a flow. The states are "listen", and
// "half-open", "new", "steer", "closing", "long-closing", "closed", "over" or "stale" with a
// server.
func (f *fixture) setState(flow dataplane.Flow, service, state string, parts map[string]string) {
	f.t.Helper()
	clear(f.plane.Flows.Entries)
	clear(f.plane.HalfOpen.Entries)
	kind, part, _ := strings.Cut(state, " ")
	if kind == "listen" {
		return
	}
	place, signature := flow.TableHash(f.serviceID(flow), &f.identity)
	table, flowState := f.plane.Flows, map[string]dataplane.FlowState{
		"half-open": stateNew, "new": stateNew, "steer": stateEstablished, "closing": stateClosing,
		"long-closing": stateClosing, "closed": stateClosed, "over": stateClosed,
		"stale": stateEstablished,
	}[kind]
	seen := f.now()
	if kind == "over" || kind == "long-closing" {
		seen = (seen - flowLinger) & dataplane.FlowTimeMask
	}
	if kind == "stale" {
		seen = (seen - flowMinIdle) & dataplane.FlowTimeMask
	}
	if kind == "half-open" {
		table = f.plane.HalfOpen
	}
	table.Entries[bucketNumber(table, place)*dataplane.FlowsPerBucket+3] = entryOf(signature, f.slot(service, parts[part]), flowState, seen)
}

// state is the reverse of setState.
func (f *fixture) state(flow dataplane.Flow, service string, parts map[string]string) string {
	f.t.Helper()
	place, signature := flow.TableHash(f.serviceID(flow), &f.identity)
	var states []string
	for name, table := range map[string]*dataplane.FlowTable{"half-open": f.plane.HalfOpen, "": f.plane.Flows} {
		for i := range table.Entries {
			entry := dataplane.FlowEntry(table.Entries[i])
			if entry == 0 {
				continue
			}
			if entry.Signature() != signature || i/dataplane.FlowsPerBucket != bucketNumber(table, place) {
				return "an entry of another flow"
			}
			kind := map[dataplane.FlowState]string{stateNew: "new", stateEstablished: "steer", stateClosing: "closing", stateClosed: "closed"}[entry.State()]
			if isOver(entry, f.now()) {
				kind = "over"
			}
			if kind == "closing" && ageOf(entry, f.now()) >= flowLinger {
				kind = "long-closing"
			}
			if kind == "steer" && ageOf(entry, f.now()) >= flowMinIdle {
				kind = "stale"
			}
			if name != "" && entry.State() == stateNew {
				kind = name
			} else if name != "" {
				kind = name + " " + kind
			}
			for part, server := range parts {
				if f.slot(service, server) == entry.Server() {
					kind += " " + part
				}
			}
			states = append(states, kind)
		}
	}
	if len(states) == 0 {
		return "listen"
	}
	return strings.Join(states, ", ")
}

// A half-open flow stays with an unheard server, which has answered its SYN. A second server would
// reset the connection that the client has with the first. Other SYNs are offered to other servers.
func TestSYNOfUnheardServer(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 2))
	parts := f.cast(web, "web")
	for _, m := range f.services.byName["web"].members {
		m.probed = true
	}
	f.find(probe.Unheard, parts[first])
	view := f.view()
	frame := frameOf(web)
	for _, c := range []struct{ state, want string }{
		{"listen", "forward_hunt"}, {"half-open first", "forward_known"}, {"new first", "forward_known"},
		{"steer first", "forward_known"}, {"stale first", "forward_hunt"}, {"over first", "forward_hunt"},
	} {
		f.setState(web, "web", c.state, parts)
		trace := mustTrace(t, view, inspect.Packet{Flow: web, Opens: true, Length: int(layer3(frame))})
		if got := f.run(frame); got.Reasons[c.want].Packets != 1 || trace.Reason != c.want {
			t.Errorf("%s: %+v, traced as %s, want %s", c.state, got.Reasons, trace.Reason, c.want)
		}
		if c.state == "stale first" {
			// The SYN may be a late copy: the server is asked whether it has the connection.
			f.setState(web, "web", c.state, parts)
			f.check(f.traced(t, trace, frame), f.run(frame))
			if course := trace.Course; len(course) < 2 || course[0].Server != parts[first] {
				t.Errorf("%s: the SYN visits %+v", c.state, course)
			}
		}
	}
	f.setState(web, "web", "half-open first", parts)
	second := f.signal(web, "web", parts[second], srv6.CreateStickiness, packet.Flags(packet.SYN|packet.ACK))
	if got := f.run(second); got.Reasons["forward_reset"].Packets != 1 {
		t.Errorf("a second server answers: %+v", got.Reasons)
	}
	f.find(probe.Silent, parts[first])
	if got := f.run(frame); got.Reasons["forward_hunt"].Packets != 1 {
		t.Errorf("a half-open flow of a silent server: %+v", got.Reasons)
	}
}

// If servers take new flows, but none of the rows that are searched names one, a SYN is offered to
// some server, which must accept it. If that server may have the flow, it is offered the SYN like
// any other SYN.
func TestSYNWithoutATaker(t *testing.T) {
	t.Parallel()
	f := open(t, webOf(srv6Server("s1", 1, 1)))
	f.mustApply(balancerOf(huntingOf(f.cfg.Services[0], desired.SelectConsistent, 1)))
	f.plane.Servers.SetFlags(f.slot("web", "s1"), dataplane.FlagInUse|dataplane.FlagDrained)
	frame := frameOf(web)
	for _, state := range []string{"listen", "steer first"} {
		f.setState(web, "web", state, map[string]string{first: "s1"})
		f.check(f.visited(frame, web, "web", "forward_hunt", offers(nil, nil, []string{"s1"})...), f.run(frame))
	}
}

// If the server of a flow's entry is the only one that takes new flows, and the flow's row does not
// have it, a SYN is offered to no other server.
func TestOnlyTakerHasTheEntry(t *testing.T) {
	t.Parallel()
	cfg := hunting(desired.SelectConsistent, 2)
	f := open(t, cfg)
	parts := f.cast(web, "web")
	for _, s := range f.service("web").Servers {
		if s.Name != parts[third] {
			f.plane.Servers.SetFlags(f.slot("web", s.Name), dataplane.FlagInUse|dataplane.FlagDrained)
		}
	}
	syn, ack := frameOf(web), frameOf(web, packet.Flags(packet.ACK))
	f.setState(web, "web", "long-closing third", parts)
	f.check(f.visited(syn, web, "web", "forward_hunt", offers(nil, nil, []string{parts[third]})...), f.run(syn))
	f.setState(web, "web", "stale third", parts)
	course := append(stages(srv6.RecoverStickiness, parts[third], parts[first], parts[second]),
		stage{function: srv6.AckStickiness, server: parts[third]})
	f.check(f.visited(ack, web, "web", "forward_recover", course...), f.run(ack))
}

// A flood of SYNs, and of SYN-ACKs to them, makes no entry in the flow table and displaces none. A
// client that answers during the flood gets an entry.
func TestFloodOfSYNs(t *testing.T) {
	t.Parallel()
	cfg := hunting(desired.SelectConsistent, 2)
	f := open(t, cfg)
	row := f.row(web, "web")
	f.run(f.signal(web, "web", row[0], srv6.CreateStickiness, synAck))
	f.run(frameOf(web, packet.Flags(packet.ACK)))
	before := slices.Clone(f.plane.Flows.Entries)
	for port := range uint16(5_000) { // five times the capacity of the table
		flow := fromPort(web, 10_000+port)
		f.exec(frameOf(flow), nil)
		f.exec(f.signal(flow, "web", row[port%2], srv6.CreateStickiness, synAck), nil)
	}
	if !slices.Equal(before, f.plane.Flows.Entries) {
		t.Error("the flow table is other than before")
	}
	for _, e := range f.plane.HalfOpen.Entries {
		if e == 0 {
			t.Error("the flood did not fill the table of half-open flows")
			break
		}
	}
	f.check(f.forwarded(frameOf(web, packet.Flags(packet.ACK)), web, "web", row[0], "forward_known"), f.run(frameOf(web, packet.Flags(packet.ACK))))
	newcomer := fromPort(web, 60_000)
	f.run(f.signal(newcomer, "web", row[1], srv6.CreateStickiness, synAck))
	ack := frameOf(newcomer, packet.Flags(packet.ACK))
	f.check(f.forwarded(ack, newcomer, "web", row[1], "forward_new"), f.run(ack))
}

// Signals are accepted from the servers that the flow's service has at that time. Their locators
// identify them.
func TestSenders(t *testing.T) {
	t.Parallel()
	all := hunting(desired.SelectConsistent, 2)
	f := open(t, all)
	parts := f.cast(web, "web")
	sent := func(options ...packet.Option) []byte {
		return signal(desired.SRv6Encap, serverOfName(&all.Services[1], parts[first]).Locator, web, srv6.CreateStickiness,
			append(options, synAck)...)
	}
	f.check(f.returned(sent(), "return_create"), f.run(sent()))

	slot := f.slot("web", parts[first])
	flags := f.plane.Servers.Flags(slot)
	f.plane.Servers.SetFlags(slot, 0) // as the first step of retiring it
	f.check(refused(sent(), "drop_sender", 100), f.run(sent()))
	f.plane.Servers.SetFlags(slot, flags)

	fewer := hunting(desired.SelectConsistent, 2)
	svc := &fewer.Services[1]
	svc.Servers = slices.DeleteFunc(svc.Servers, func(s desired.Server) bool { return s.Name == parts[first] })
	f.mustApply(fewer)
	f.check(refused(sent(), "drop_sender", 100), f.run(sent()))

	f.mustApply(hunting(desired.SelectConsistent, 2))
	f.check(f.returned(sent(), "return_create"), f.run(sent()))

	f.restart() // the next process loads its program again
	f.check(f.returned(sent(), "return_create"), f.run(sent()))

	moved := hunting(desired.SelectConsistent, 2)
	moved.Node.Locator = netip.MustParsePrefix("fd00:6c:0:2::/64")
	f.mustApply(moved)
	f.check(refused(sent(), "pass_not_vip", 100), f.run(sent()))
}

// A service stops hunting. Flows that servers have accepted stay with them. The same holds for
// flows that servers accept by offers that are still under way. The servers get acknowledgements.
// New flows are placed. After a while, all flags of the hunt are removed. Trace agrees.
func TestServiceCeasesToHunt(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 2))
	parts := f.cast(web, "web")
	taker := parts[second]
	view := f.view()
	send := func(flow dataplane.Flow, flags packet.TCPFlags, reason string, function srv6.Function, server string) {
		t.Helper()
		frame := frameOf(flow, packet.Flags(flags))
		trace := mustTrace(t, view, inspect.Packet{Flow: flow, Opens: flags == packet.SYN, Length: int(layer3(frame))})
		foretold, got := f.traced(t, trace, frame), f.run(frame)
		f.check(f.offered(frame, flow, "web", reason, function, server), got)
		f.check(foretold, got)
	}
	answer := func(flow dataplane.Flow) {
		t.Helper()
		frame := f.signal(flow, "web", taker, srv6.CreateStickiness, synAck)
		f.check(f.returned(frame, "return_create"), f.run(frame))
	}
	halfOpen, offered, repeated, left := web, fromPort(web, 1001), fromPort(web, 1002), fromPort(web, 1003)
	answer(halfOpen)
	answer(repeated)
	answer(left)
	f.run(frameOf(offered))

	cfg := hunting(desired.SelectConsistent, 2)
	for i := range cfg.Services {
		cfg.Services[i].Placement, cfg.Services[i].Selection = desired.PlacementHash, ""
	}
	f.mustApply(cfg)
	send(halfOpen, packet.ACK, "forward_new", srv6.AckStickiness, taker)
	send(halfOpen, packet.ACK, "forward_known", srv6.AckStickiness, taker)
	answer(offered)
	send(offered, packet.ACK, "forward_new", srv6.AckStickiness, taker)
	send(repeated, packet.SYN, "forward_known", srv6.AckStickiness, taker)
	send(repeated, packet.ACK, "forward_new", srv6.AckStickiness, taker)
	newcomer := fromPort(web, 1004)
	send(newcomer, packet.SYN, "forward_new", srv6.Deliver, f.placed(newcomer, "web"))

	f.restartAs(cfg) // the next process knows about the hunts, too
	send(halfOpen, packet.ACK, "forward_known", srv6.AckStickiness, taker)
	f.services.endHunts(time.Now())
	send(halfOpen, packet.ACK, "forward_known", srv6.AckStickiness, taker)

	f.services.endHunts(time.Now().Add(f.service("web").Timeouts.New))
	send(halfOpen, packet.ACK, "forward_known", srv6.Deliver, taker)
	send(left, packet.ACK, "forward_recover", srv6.Deliver, f.placed(left, "web"))
}

// Half-open flows survive a restart. They expire, and leave with their server.
func TestHalfOpenFlowsLeave(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 2))
	parts := f.cast(web, "web")
	ticks := f.clock.Ticks(f.service("web").Timeouts.New)
	for _, c := range []struct {
		idle  uint16
		after string
	}{{ticks, "half-open first"}, {ticks + 1, "listen"}} {
		f.setState(web, "web", "half-open first", parts)
		for i, e := range f.plane.HalfOpen.Entries {
			if e != 0 {
				f.plane.HalfOpen.Entries[i] = e&^dataplane.FlowTimeMask | uint64(f.now()-c.idle)&dataplane.FlowTimeMask
			}
		}
		f.must(f.sweep())
		if state := f.state(web, "web", parts); state != c.after {
			t.Errorf("idle for %d ticks of %d: %s, want %s", c.idle, ticks, state, c.after)
		}
	}
	f.setState(web, "web", "half-open first", parts)
	f.restart()
	if state := f.state(web, "web", parts); state != "half-open first" {
		t.Errorf("after a restart: %s", state)
	}
}

// During reloads, no signal of a server that stays is dropped.
func TestSignalsDuringReloads(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 2))
	parts := f.cast(web, "web")
	frame := f.signal(web, "web", parts[first], srv6.CreateStickiness, synAck)
	const reloads = 30
	done := make(chan struct{})
	f.moving = true
	go func() {
		defer close(done)
		for i := range reloads {
			f.must(f.apply(hunting(desired.SelectConsistent, 2+i%2)))
		}
	}()
	signals := 0
	for running := true; running && !t.Failed(); signals++ {
		if verdict, _ := f.exec(frame, nil); verdict != verdictPass {
			t.Errorf("signal %d: the verdict is %s", signals, verdicts[verdict])
		}
		select {
		case <-done:
			running = false
		default:
		}
	}
	<-done
	t.Logf("%d signals during %d reloads", signals, reloads)
}
