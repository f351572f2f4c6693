// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

const (
	stateFree        = dataplane.FlowFree
	stateSilent      = dataplane.FlowSilent
	stateNew         = dataplane.FlowNew
	stateEstablished = dataplane.FlowEstablished
	stateClosing     = dataplane.FlowClosing
	stateClosed      = dataplane.FlowClosed
)

// enter puts a flow into the first entry of its bucket, which must be empty.
func (f *fixture) enter(flow dataplane.Flow, service, server string, state dataplane.FlowState) {
	f.t.Helper()
	bucket := f.bucket(flow)
	clear(bucket)
	bucket[0] = entryOf(f.signature(flow), f.slot(service, server), state, f.now())
}

// otherThanPlaced returns a server of the service that consistent hashing does not select for the
// flow.
func (f *fixture) otherThanPlaced(flow dataplane.Flow, service string) string {
	f.t.Helper()
	placed := f.placed(flow, service)
	for _, s := range f.service(service).Servers {
		if s.Name != placed {
			return s.Name
		}
	}
	f.t.Fatalf("service %s has one server", service)
	return ""
}

// The effect of packets on a flow that has an entry. Placement would choose another server for the
// flow.
func TestFlowStates(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	for _, v := range []struct {
		state  dataplane.FlowState
		flags  packet.TCPFlags
		stays  bool
		after  dataplane.FlowState
		reason string
	}{
		{stateNew, packet.SYN, true, stateNew, "forward_known"},
		{stateNew, packet.ACK, true, stateEstablished, "forward_known"},
		{stateNew, packet.SYN | packet.ACK, true, stateEstablished, "forward_known"},
		{stateNew, packet.FIN | packet.ACK, true, stateClosing, "forward_known"},
		{stateNew, packet.RST, true, stateNew, "forward_known"},
		{stateEstablished, packet.SYN, true, stateEstablished, "forward_known"},
		{stateEstablished, packet.ACK, true, stateEstablished, "forward_known"},
		{stateEstablished, 0, true, stateEstablished, "forward_known"},
		{stateEstablished, packet.FIN | packet.ACK, true, stateClosing, "forward_known"},
		{stateEstablished, packet.RST, true, stateClosing, "forward_known"},
		{stateSilent, packet.SYN, true, stateSilent, "forward_known"},
		{stateSilent, packet.ACK, true, stateEstablished, "forward_known"},
		{stateSilent, packet.FIN | packet.ACK, true, stateClosing, "forward_known"},
		{stateClosing, packet.ACK, true, stateClosing, "forward_known"},
		{stateClosing, packet.FIN | packet.ACK, true, stateClosing, "forward_known"},
		{stateClosing, packet.SYN | packet.ACK, true, stateClosing, "forward_known"},
		{stateClosing, packet.SYN, true, stateClosing, "forward_known"},
		{stateClosed, packet.ACK, true, stateClosed, "forward_known"},
		{stateClosed, packet.FIN | packet.ACK, true, stateClosed, "forward_known"},
		{stateClosed, packet.RST, true, stateClosed, "forward_known"},
		{stateClosed, packet.SYN, true, stateNew, "forward_known"},
		{stateFree, packet.SYN, false, stateNew, "forward_new"},
		{stateFree, packet.ACK, false, stateNew, "forward_recover"},
		{stateFree, packet.FIN | packet.ACK, false, stateNew, "forward_recover"},
		{stateFree, packet.RST, false, stateNew, "forward_recover"},
	} {
		t.Run(fmt.Sprintf("state %d, flags %#x", v.state, v.flags), func(t *testing.T) {
			f.t = t
			server := f.otherThanPlaced(web, "web")
			f.enter(web, "web", server, v.state)
			if !v.stays {
				server = f.placed(web, "web")
			}
			frame := frameOf(web, packet.Flags(v.flags))
			f.check(f.forwarded(frame, web, "web", server, v.reason), f.run(frame))
			f.isEntered(web, "web", server, v.after)
		})
	}
}

// isEntered checks that a flow is the only one in its bucket, with this server and state.
func (f *fixture) isEntered(flow dataplane.Flow, service, server string, state dataplane.FlowState) {
	f.t.Helper()
	entry := f.entry(flow)
	if entry.State() != state || entry.Server() != f.slot(service, server) {
		f.t.Errorf("entry: state %d, slot %d; want state %d, slot %d",
			entry.State(), entry.Server(), state, f.slot(service, server))
	}
	entries := 0
	for _, value := range f.bucket(flow) {
		if dataplane.FlowEntry(value).State() != stateFree {
			entries++
		}
	}
	if entries != 1 {
		f.t.Errorf("%d entries of one flow", entries)
	}
}

// A connection that continues after a FIN of the client, or after its server has signalled the end,
// is established again. A packet soon after the end may belong to it. Such a packet changes nothing,
// and does not renew the time after which packets count as a continuation. A SYN that soon after the
// server's signal may be a late copy of the connection's own SYN, so it stays with the server. A SYN
// after a FIN of the client may be forged, as the FIN: it changes nothing.
func TestConnectionGoesOnAfterFIN(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	server := f.otherThanPlaced(web, "web")
	for _, v := range []struct {
		before dataplane.FlowState
		age    uint16 // ticks between the end and the packet
		flags  packet.TCPFlags
		after  dataplane.FlowState
		seen   uint16 // ticks between the time in the entry and the packet
	}{
		{stateClosing, 0, packet.ACK, stateClosing, 0},
		{stateClosing, 1, packet.ACK, stateClosing, 1},
		{stateClosing, 1, packet.FIN | packet.ACK, stateClosing, 0},
		{stateClosing, 2, packet.ACK, stateEstablished, 0},
		{stateClosing, 3, packet.PSH | packet.ACK, stateEstablished, 0},
		{stateClosing, 3, packet.FIN | packet.ACK, stateClosing, 0},
		{stateClosing, 3, packet.RST, stateClosing, 0},
		{stateClosing, 1, packet.SYN, stateClosing, 1},
		{stateClosing, 2, packet.SYN, stateClosing, 2},
		{stateClosing, 500, packet.SYN, stateClosing, 500},
		{stateClosed, 1, packet.ACK, stateClosed, 1},
		{stateClosed, 1, packet.RST, stateClosed, 0},
		{stateClosed, 2, packet.ACK, stateEstablished, 0},
		{stateClosed, 0, packet.SYN, stateNew, 0},
		{stateClosed, 1, packet.SYN, stateNew, 0},
	} {
		now := f.now()
		clear(f.bucket(web))
		f.bucket(web)[0] = entryOf(f.signature(web), f.slot("web", server), v.before, now-v.age)
		f.run(frameOf(web, packet.Flags(v.flags)))
		entry := f.entry(web)
		if entry.State() != v.after || seenOf(entry) != (now-v.seen)&timeMaskOf(v.after) || entry.Server() != f.slot("web", server) {
			t.Errorf("%v %d ticks after the end (%v): state %d, seen %d ticks ago; want state %d, %d ticks ago",
				v.flags, v.age, v.before, entry.State(), ageOf(entry, now), v.after, v.seen)
		}
	}
}

// A server that is drained or failing gets no new flows, and keeps its connections. A SYN does not
// move a connection that may go on, because it may be forged. With a failing server, only an active
// connection may go on.
func TestServerWithoutNewFlows(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	drain := func(f *fixture, server string) {
		cfg := standard()
		zero := uint32(0)
		for i := range cfg.Services[0].Servers {
			if cfg.Services[0].Servers[i].Name == server {
				cfg.Services[0].Servers[i].Weight = &zero
			}
		}
		f.mustApply(cfg)
	}
	fail := func(f *fixture, server string) {
		f.setHealth("web", server, false)
	}
	const moves, stays = "forward_new", "forward_known"
	for name, c := range map[string]struct {
		take  func(*fixture, string)
		state dataplane.FlowState
		age   uint16
		syn   string
	}{
		"drained, active":            {drain, stateEstablished, 0, stays},
		"drained, idle":              {drain, stateEstablished, flowMinIdle, stays},
		"drained, silent":            {drain, stateSilent, 500, stays},
		"drained, new":               {drain, stateNew, 0, moves},
		"drained, just closing":      {drain, stateClosing, flowLinger - 1, stays},
		"drained, closing":           {drain, stateClosing, flowLinger, moves},
		"failing, active":            {fail, stateEstablished, flowMinIdle - 1, stays},
		"failing, idle":              {fail, stateEstablished, flowMinIdle, moves},
		"failing, silent":            {fail, stateSilent, flowMinIdle, moves},
		"failing, new":               {fail, stateNew, 0, moves},
		"failing, just closing":      {fail, stateClosing, flowLinger - 1, stays},
		"failing, closing":           {fail, stateClosing, flowLinger, moves},
		"failing, closed by servers": {fail, stateClosed, 0, moves},
	} {
		t.Run(name, func(t *testing.T) {
			f.t = t
			server := f.placed(web, "web")
			c.take(f, server)
			enter := func() {
				f.enter(web, "web", server, c.state)
				f.elapseFlows(c.age, func(dataplane.FlowEntry) bool { return true })
			}
			enter()
			ack := frameOf(web, packet.Flags(packet.ACK))
			f.check(f.forwarded(ack, web, "web", server, "forward_known"), f.run(ack))
			enter()
			got := f.run(frameOf(web))
			if to := serverOf(got); (to == "web/"+server) != (c.syn == stays) || reasonOf(got) != c.syn {
				t.Errorf("SYN: %s to %s, want %s", reasonOf(got), to, c.syn)
			}
			f.mustApply(standard())
			f.setHealth("web", server, true)
		})
	}
}

// SYNs and datagrams leave a server whose next hop does not answer. All other packets of connections
// stay, because the next hop may be back before the kernel notices.
func TestSilentNextHop(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	for flow, name := range map[dataplane.Flow]string{web: "web", dns: "dns"} {
		server := f.placed(flow, name)
		f.enter(flow, name, server, stateEstablished)
		f.silent[server] = true
		f.route()
		trace := mustTrace(t, f.view(), inspect.Packet{Flow: flow, Opens: flow == web, Length: 100})
		// The data path counts the server as failing, because others are well. A connection that may
		// go on leaves it only because of the next hop.
		want := "the server is unreachable"
		if flow == web {
			want = "the server's next hop does not answer"
		}
		if trace.Known.Left != want {
			t.Errorf("%s: trace says that the flow leaves because %q", name, trace.Known.Left)
		}
		if flow == web {
			ack := frameOf(web, packet.Flags(packet.ACK))
			f.check(f.forwarded(ack, web, "web", server, "forward_known"), f.run(ack))
		}
		got := f.run(frameOf(flow))
		if to := serverOf(got); to == name+"/"+server || reasonOf(got) != "forward_new" {
			t.Errorf("%s: %s to %s", name, reasonOf(got), to)
		}
		f.silent[server] = false
		f.route()
	}
}

// resident is an entry of a full bucket. Its age is in ticks.
type resident struct {
	state dataplane.FlowState
	age   int
}

func repeat(state dataplane.FlowState, ages ...int) (out [dataplane.FlowsPerBucket]resident) {
	for i := range out {
		out[i] = resident{state, ages[min(i, len(ages)-1)]}
	}
	return out
}

func with(bucket [dataplane.FlowsPerBucket]resident, changes map[int]resident) [dataplane.FlowsPerBucket]resident {
	for i, r := range changes {
		bucket[i] = r
	}
	return bucket
}

func TestEviction(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	busy := repeat(stateEstablished, 0)
	for name, v := range map[string]struct {
		bucket  [dataplane.FlowsPerBucket]resident
		evicted int // the number of the displaced entry; -1: none
	}{
		"empty":                                  {repeat(stateFree, 0), f.preferred(web)},
		"one free":                               {with(busy, map[int]resident{5: {}}), 5},
		"free before old":                        {with(repeat(stateNew, 900), map[int]resident{7: {}}), 7},
		"new, just seen":                         {with(busy, map[int]resident{3: {stateNew, 0}}), 3},
		"closed, just seen":                      {with(busy, map[int]resident{3: {stateClosed, 0}}), 3},
		"oldest of new and closed":               {with(busy, map[int]resident{1: {stateNew, 2}, 2: {stateClosed, 3}, 6: {stateNew, 1}}), 2},
		"closing, as an established one":         {with(busy, map[int]resident{3: {stateClosing, 14}}), -1},
		"oldest idle, among closing ones":        {with(repeat(stateClosing, 20), map[int]resident{5: {stateEstablished, 21}}), 5},
		"closing for longest":                    {with(repeat(stateEstablished, 20), map[int]resident{5: {stateClosing, 1500}}), 5},
		"new before idle for hours":              {with(repeat(stateEstablished, 3000), map[int]resident{4: {stateNew, 0}}), 4},
		"oldest idle":                            {repeat(stateEstablished, 20, 30, 40, 35, 21), 2},
		"idle for a minute":                      {with(busy, map[int]resident{6: {stateEstablished, 15}}), 6},
		"idle for less":                          {with(busy, map[int]resident{6: {stateEstablished, 14}}), -1},
		"all busy":                               {busy, -1},
		"idle, last seen before the clock wraps": {with(busy, map[int]resident{2: {stateEstablished, 3900}}), 2},
		"seen by a core whose clock is ahead":    {with(busy, map[int]resident{2: {stateEstablished, -1}}), -1},
		"new, ahead of the clock, among older":   {with(busy, map[int]resident{2: {stateNew, -1}, 5: {stateNew, 1}}), 5},
	} {
		t.Run(name, func(t *testing.T) {
			f.t = t
			now := f.now()
			want := f.settle(v.bucket, now)
			reason := "forward_new"
			if v.evicted < 0 {
				reason = "forward_no_room"
			} else {
				want[v.evicted] = entryOf(f.signature(web), f.slot("web", f.placed(web, "web")), stateNew, now)
			}
			f.check(f.forwarded(frameOf(web), web, "web", f.placed(web, "web"), reason), f.run(frameOf(web)))
			for i, entry := range f.bucket(web) {
				if entry != want[i] {
					t.Errorf("entry %d is %#x, want %#x", i, entry, want[i])
				}
			}
		})
	}
}

// settle fills the bucket of the flow `web` with residents, which are other flows.
func (f *fixture) settle(bucket [dataplane.FlowsPerBucket]resident, now uint16) (entries [dataplane.FlowsPerBucket]uint64) {
	f.t.Helper()
	slot := f.slot("web", "s1")
	for i, r := range bucket {
		if r.state != stateFree {
			other := f.signature(web) ^ uint64(i+1)
			entries[i] = entryOf(other, slot, r.state, now-uint16(r.age))
		}
	}
	copy(f.bucket(web), entries[:])
	return entries
}

// Packets write and renew the time in their flow's entry, with a clock that runs.
func TestRenewal(t *testing.T) {
	t.Parallel()
	clock, err := dataplane.NewFlowClock()
	testhost.Must(t, err)
	f := openAt(t, standard(), clock)
	sees := func(flags packet.TCPFlags) {
		t.Helper()
		before := f.now()
		f.run(frameOf(web, packet.Flags(flags)))
		after := f.now()
		seen := seenOf(f.entry(web))
		if passed := (after - before) & dataplane.FlowTimeMask; (seen-before)&dataplane.FlowTimeMask > passed {
			t.Errorf("seen at %d, from %d to %d", seen, before, after)
		}
	}
	sees(packet.SYN)
	for _, age := range []uint16{0, 1, 100, 4000} {
		f.enter(web, "web", "s1", stateEstablished)
		f.elapseFlows(age, func(dataplane.FlowEntry) bool { return true })
		sees(packet.ACK)
	}
}

func TestSweep(t *testing.T) {
	t.Parallel()
	cfg := standard()
	cfg.Services[0].Timeouts = desired.Timeouts{
		New: 10 * time.Second, Established: 4 * time.Hour, Closing: 20 * time.Second,
		Silent: 10 * time.Second,
	}
	f := open(t, cfg)
	ticks := func(d time.Duration) int { return int((d + f.clock.Tick - 1) / f.clock.Tick) }
	newest, closing, longest := ticks(10*time.Second), ticks(20*time.Second), ticks(4*time.Hour)
	for _, v := range []struct {
		state dataplane.FlowState
		age   int
		kept  bool
	}{
		{stateNew, 0, true}, {stateNew, newest, true}, {stateNew, newest + 1, false},
		{stateClosed, closing, true}, {stateClosed, closing + 1, false},
		{stateClosing, closing + 1, true}, {stateClosing, endedTicks, true},
		{stateSilent, longest, true}, {stateSilent, longest + 1, false},
		{stateEstablished, 900, true}, {stateEstablished, longest, true}, {stateEstablished, longest + 1, false},
		// These entries are renewed during the sweep, after the sweep has read the clock.
		{stateNew, -1, true}, {stateEstablished, -1, true}, {stateClosing, -2, true}, {stateClosed, -2, true},
	} {
		f.settle(repeat(v.state, v.age), f.now())
		f.must(f.sweep())
		for _, entry := range f.bucket(web) {
			if kept := dataplane.FlowEntry(entry).State() != stateFree; kept != v.kept {
				t.Errorf("state %d, %d ticks old: kept %v, want %v", v.state, v.age, kept, v.kept)
				break
			}
		}
	}
}

// If servers have agents, a later TCP packet of an unknown flow visits the servers that may have
// the flow, and gets no entry. So does an ICMP error about a TCP flow. SYNs, UDP packets and ICMP
// errors about UDP flows are placed. Trace agrees.
func TestHashVisitsServersWithAgents(t *testing.T) {
	t.Parallel()
	var servers []desired.Server
	for i := range uint8(5) {
		servers = append(servers, srv6Server(fmt.Sprint("s", i), i+1, 1))
	}
	cfg := balancerOf(
		serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap, servers...),
		serviceOf("dns", vip6, 53, desired.UDP, desired.SRv6Encap, servers...),
	)
	for i := range cfg.Services {
		cfg.Services[i].Probe = new(true)
	}
	f := open(t, cfg)
	view := f.view()
	r := newReference(f)
	ack := frameOf(web, packet.Flags(packet.ACK))
	row := r.possible(web, f.service("web"))
	if len(row) != 3 {
		t.Fatalf("the row is %v", row)
	}
	for range 2 {
		f.check(f.offered(ack, web, "web", "forward_recover", srv6.Steer, row...), f.run(ack))
		trace := mustTrace(t, view, inspect.Packet{Flow: web, Length: int(layer3(ack))})
		f.check(f.traced(t, trace, ack), f.run(ack))
	}
	tooBig := packet.ICMPError(routerOf(vip6), 2, 0, 1280, reply(web))
	f.check(f.offered(tooBig, web, "web", "forward_icmp", srv6.Steer, row...), f.run(tooBig))
	tooBig = packet.ICMPError(routerOf(vip6), 2, 0, 1280, reply(dns))
	f.check(f.offered(tooBig, dns, "dns", "forward_icmp", srv6.Deliver, f.placed(dns, "dns")), f.run(tooBig))
	f.check(f.offered(frameOf(dns), dns, "dns", "forward_new", srv6.Deliver, f.placed(dns, "dns")), f.run(frameOf(dns)))
	f.forgetFlows()

	f.via[row[0]] = ""
	f.route()
	r.changed()
	f.check(f.offered(frameOf(web), web, "web", "forward_new", srv6.Deliver, row[1]), f.run(frameOf(web)))
	f.forgetFlows()
	asked := r.possible(web, f.service("web"))
	if len(asked) != 4 || asked[0] != row[1] || asked[3] != row[0] {
		t.Errorf("asked are %v of the row %v", asked, row)
	}
	f.check(f.offered(ack, web, "web", "forward_recover", srv6.Steer, asked...), f.run(ack))
}
