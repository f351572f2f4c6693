// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// hints is the capacity of the hint table in these tests.
const hints = 1 << 14

// hinting returns the configuration of stateless with persistence hint.
func hinting(placement desired.Placement, candidates int) *desired.Balancer {
	cfg := multilinear(stateless(placement, candidates))
	cfg.Node.Limits.Hints = hints
	for i := range cfg.Services {
		cfg.Services[i].Persistence = desired.PersistenceHint
	}
	return cfg
}

// withHints adds a hint table to a configuration.
func withHints(cfg *desired.Balancer) *desired.Balancer {
	cfg.Node.Limits.Hints = hints
	return cfg
}

// named is a server that a hint names: it returns the packet if it does not have the flow.
func named(server string) stage {
	return stage{srv6.Steer, server, srv6.Offer{Returns: true}.Argument()}
}

// create signals that a server has the flow. With SYN, it is the SYN-ACK.
func (f *fixture) create(flow dataplane.Flow, service, server string, flags packet.TCPFlags) outcome {
	f.t.Helper()
	return f.run(f.signal(flow, service, server, srv6.CreateStickiness, packet.Flags(packet.ACK|flags),
		packet.Sequence(1, acknowledged)))
}

func (f *fixture) mustBe(reason string, got outcome) {
	f.t.Helper()
	if reasonOf(got) != reason {
		f.t.Errorf("counted as %s, want %s", reasonOf(got), reason)
	}
}

func ackOf(flow dataplane.Flow, flags ...packet.TCPFlags) []byte {
	all := packet.ACK
	for _, flag := range flags {
		all |= flag
	}
	return frameOf(flow, packet.Flags(all))
}

// A server's answer to a SYN makes a hint. Then packets go to that server alone. After the server
// has signalled the end, they visit all candidates.
func TestHintFollowsSignals(t *testing.T) {
	t.Parallel()
	for _, placement := range []desired.Placement{desired.PlacementHunt, desired.PlacementHash} {
		t.Run(string(placement), func(t *testing.T) {
			f := open(t, hinting(placement, 4))
			for service, flow := range hunted {
				row := f.row(flow, service)
				list := stages(srv6.RecoverStickiness, row...)
				syn, ack := frameOf(flow), ackOf(flow)
				if placement == desired.PlacementHunt {
					f.check(f.visited(syn, flow, service, "forward_hunt", offers(nil, row, row)...), f.run(syn))
				} else {
					want := f.visited(syn, flow, service, "forward_new", stage{function: srv6.ConnectForce, server: row[0]})
					f.check(want, f.run(syn))
				}
				f.check(f.visited(ack, flow, service, "forward_recover", list...), f.run(ack))
				f.mustBe("return_create", f.create(flow, service, row[2], packet.SYN))
				f.check(f.visited(ack, flow, service, "forward_known", named(row[2])), f.run(ack))
				fin := ackOf(flow, packet.FIN)
				f.check(f.visited(fin, flow, service, "forward_known", named(row[2])), f.run(fin))
				end := f.signal(flow, service, row[2], srv6.RemoveStickiness, packet.Flags(packet.ACK|packet.FIN))
				f.mustBe("return_remove", f.run(end))
				f.check(f.visited(ack, flow, service, "forward_recover", list...), f.run(ack))
			}
		})
	}
}

// A dry run notes the cookie or the hint by which a packet finds its server.
func TestDryRunNotesCookiesAndHints(t *testing.T) {
	t.Parallel()
	f := open(t, withHints(stateless(desired.PlacementHunt, 4)))
	f.foresees = true
	row := f.row(web, "web")
	f.create(web, "web", row[3], 0)
	foreseen, _, _ := f.foreseeAndExec(ackOf(web), nil)
	if use, column := dataplane.ReadHint(foreseen.decision.Hint); use != "recent" || column != 3 {
		t.Errorf("hint %s of column %d, want recent of column 3", use, column)
	}
	marked := frameOf(web, packet.Flags(packet.ACK), packet.Timestamps(9, 4096|2))
	foreseen, _, _ = f.foreseeAndExec(marked, nil)
	if d := foreseen.decision; d.HasCookie == 0 || d.Column != 2 || d.Hint != 0 {
		t.Errorf("cookie %d of column %d, hint %#x, want a cookie of column 2", d.HasCookie, d.Column, d.Hint)
	}
}

// A server cannot return a packet with extension headers. So such a packet visits all servers that
// may have its flow, and a wrong hint or cookie does not end the connection. A SYN is never
// returned.
func TestPacketsThatCannotBeReturned(t *testing.T) {
	t.Parallel()
	for name, headers := range map[string][]packet.Option{
		"hop-by-hop options":  {packet.HopByHop(8)},
		"destination options": {packet.DestinationOptions(8)},
	} {
		for _, service := range []string{"insert", "web"} {
			flow := hunted[service]
			frameWith := func(options ...packet.Option) []byte {
				return frameOf(flow, append(options, headers...)...)
			}
			t.Run(name+", "+service, func(t *testing.T) {
				t.Parallel()
				f := open(t, hinting(desired.PlacementHunt, 4))
				row := f.row(flow, service)
				f.mustBe("return_create", f.create(flow, service, row[2], 0))
				ack := frameWith(packet.Flags(packet.ACK))
				list := stages(srv6.RecoverStickiness, row...)
				f.check(f.visited(ack, flow, service, "forward_recover", list...), f.run(ack))
				rest := slices.DeleteFunc(slices.Clone(row), func(s string) bool { return s == row[2] })
				all := offers(stages(srv6.Steer, row[2]), row, rest)
				syn := frameWith()
				f.check(f.visited(syn, flow, service, "forward_hunt", all...), f.run(syn))

				f.mustApply(withHints(multilinear(stateless(desired.PlacementHunt, 4))))
				f.cfg = withHints(multilinear(stateless(desired.PlacementHunt, 4)))
				marked := frameWith(packet.Flags(packet.ACK), packet.Timestamps(9, 4096|2))
				list = stages(srv6.Steer, row[2], row[0], row[1], row[3])
				f.check(f.cookied(marked, flow, service, "forward_recover", list...), f.run(marked))
			})
		}
	}
}

// A set has room for eight flows. New hints replace those that no packet has followed since the
// last sweep, and a flood of answered SYNs replaces no other. Two sweeps free a hint without
// packets.
func TestHintRoom(t *testing.T) {
	t.Parallel()
	cfg := hinting(desired.PlacementHunt, 3)
	cfg.Node.Limits.Hints = 1024 // 256 sets
	f := open(t, cfg)
	flows := make([]dataplane.Flow, 4*1024)
	for i := range flows {
		flows[i] = web
		flows[i].Source = netip.AddrPortFrom(web.Source.Addr(), 10000+uint16(i))
	}
	enter := func(flows []dataplane.Flow, flags packet.TCPFlags) (entered int) {
		for _, flow := range flows {
			if reasonOf(f.create(flow, "web", f.row(flow, "web")[1], flags)) == "return_create" {
				entered++
			}
		}
		return entered
	}
	known := func(flows []dataplane.Flow) (known int) {
		for _, flow := range flows {
			if reasonOf(f.run(ackOf(flow))) == "forward_known" {
				known++
			}
		}
		return known
	}
	half := flows[:1024]
	// At half load, 99% of flows have room (docs/operate/stateless.md), and a few share a tag.
	if n := enter(half, 0); n < 1024*97/100 {
		t.Errorf("at half load, %d of 1024 flows have a hint", n)
	}
	before := known(half)
	t.Logf("at half load, %d of 1024 flows follow a hint", before)
	if before < 1024*96/100 {
		t.Errorf("at half load, %d of 1024 flows follow a hint", before)
	}
	enter(flows[1024:], packet.SYN)
	if after := known(half); after < before*99/100 {
		t.Errorf("after a flood, %d of %d flows still follow their hints", after, before)
	}
	f.plane.Hints.Sweep()
	f.plane.Hints.Sweep()
	if n := known(half); n != 0 {
		t.Errorf("after two sweeps, %d flows follow a hint", n)
	}
}

// A hint whose column is behind the end of the row names no server: it is of a flow of another
// service, or from before a change of candidates.
func TestHintOfLongerRow(t *testing.T) {
	t.Parallel()
	f := open(t, hinting(desired.PlacementHunt, 2))
	table := f.plane.Hints.Words()
	for port := range uint16(10) {
		flow := fromPort(web, 30000+port)
		word, tag := f.hintPlace(flow)
		list := stages(srv6.RecoverStickiness, f.row(flow, "web")...)
		for mark := range uint64(8) { // one is that of the first server of the next row
			table[word] = (&referenceHints{{tag, 2, mark, hintRecent}}).word()
			want := f.visited(ackOf(flow), flow, "web", "forward_recover", list...)
			f.check(want, f.run(ackOf(flow)))
		}
	}
}

// Floods of SYNs, and of packets of no flow, write no hint.
func TestHintFloodWritesNothing(t *testing.T) {
	t.Parallel()
	f := open(t, hinting(desired.PlacementHunt, 3))
	for port := range uint16(2000) {
		flow := web
		flow.Source = netip.AddrPortFrom(web.Source.Addr(), 10000+port)
		f.exec(frameOf(flow), nil)
		f.exec(ackOf(flow), nil)
		f.exec(ackOf(flow, packet.RST), nil)
	}
	if n := f.plane.Hints.Count(); n.Idle+n.Recent+n.Shared != 0 {
		t.Errorf("%+v, want no hint", n)
	}
}

// After a change of servers, a hint still names the server that has the flow: by its mark, among
// the servers that the column has had.
func TestHintOutlivesChanges(t *testing.T) {
	t.Parallel()
	f := open(t, hinting(desired.PlacementHunt, 2))
	without := func(name string) *desired.Balancer {
		cfg := hinting(desired.PlacementHunt, 2)
		for i := range cfg.Services {
			svc := &cfg.Services[i]
			svc.Servers = slices.DeleteFunc(svc.Servers, func(s desired.Server) bool { return s.Name == name })
		}
		return cfg
	}
	took := map[uint16]string{}
	of := func(port uint16) dataplane.Flow {
		flow := web
		flow.Source = netip.AddrPortFrom(web.Source.Addr(), 30000+port)
		return flow
	}
	for port := range uint16(1000) {
		took[port] = f.row(of(port), "web")[1]
		f.create(of(port), "web", took[port], 0)
	}
	f.mustApply(without("s3"))
	f.route()
	moved, single := 0, 0
	for port, server := range took {
		flow := of(port)
		if server == "s3" || f.row(flow, "web")[1] == server {
			continue
		}
		moved++
		got := f.run(ackOf(flow))
		if reasonOf(got) == "forward_known" {
			single++
			f.check(f.visited(ackOf(flow), flow, "web", "forward_known", named(server)), got)
		}
	}
	// Every eighth pair of servers has the same mark, and some hints are shared.
	if moved < 50 || single < moved*3/4 {
		t.Errorf("%d flows have moved, %d follow their hints", moved, single)
	}
}

// A flow from before a change from hint to stateless has timestamps without a cookie, which name
// any column. If the column has had several servers, none of them can return the packet. So it
// visits all servers of the row, those of the column first.
func TestMisleadingCookiesOfChangedColumns(t *testing.T) {
	t.Parallel()
	f := open(t, hinting(desired.PlacementHunt, 2))
	cfg := withHints(multilinear(stateless(desired.PlacementHunt, 2)))
	for i := range cfg.Services {
		svc := &cfg.Services[i]
		svc.Servers = slices.DeleteFunc(svc.Servers, func(s desired.Server) bool { return s.Name == "s3" })
	}
	before := map[uint16][]string{}
	for port := range uint16(400) {
		before[port] = f.row(fromPort(web, 30000+port), "web")
	}
	f.mustApply(cfg)
	cfg = withHints(multilinear(stateless(desired.PlacementHunt, 2)))
	f.mustApply(cfg)
	f.cfg = cfg
	misled := 0
	for port, row := range before {
		flow := fromPort(web, 30000+port)
		server, other := row[0], 1
		ack := frameOf(flow, packet.Flags(packet.ACK), packet.Timestamps(9, 4096|uint32(other)))
		got := f.run(ack)
		if reasonOf(got) != "forward_recover" {
			continue // a server can return it
		}
		misled++
		isServer := func(sid netip.Addr) bool {
			return srv6.Parse(sid).Locator == f.locatorOf("web", server)
		}
		list := visitedBy(got.Frame, desired.SRv6Encap)
		if !slices.ContainsFunc(list, isServer) {
			t.Errorf("%s is not visited: %v", server, list)
		}
	}
	if misled < 20 {
		t.Errorf("only %d packets name a column that has had several servers", misled)
	}
}
