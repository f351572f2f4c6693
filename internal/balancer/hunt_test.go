// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/srv6"
)

// huntingOf makes a service hunt with the given number of candidates.
func huntingOf(svc desired.Service, selection desired.Selection, candidates int) desired.Service {
	svc.Placement, svc.Selection, svc.Candidates = desired.PlacementHunt, selection, candidates
	return svc
}

// hunting returns a configuration with services that hunt, with both SRv6 encapsulations and both
// families.
func hunting(selection desired.Selection, candidates int) *desired.Balancer {
	var servers []desired.Server
	for i := range uint8(10) {
		servers = append(servers, srv6Server(fmt.Sprintf("s%d", i), i+1, 1))
	}
	var services []desired.Service
	for _, s := range []desired.Service{
		serviceOf("insert", vip6, 443, desired.TCP, desired.SRv6Insert, servers...),
		serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap, servers...),
		serviceOf("web4", vip4, 80, desired.TCP, desired.SRv6Encap, servers...),
	} {
		services = append(services, huntingOf(s, selection, candidates))
	}
	return balancerOf(services...)
}

// hunted contains the flows to the services of hunting, by service.
var hunted = map[string]dataplane.Flow{"insert": insert, "web": web, "web4": web4}

// row lists the servers in the row of a flow's bucket.
func (f *fixture) row(flow dataplane.Flow, service string) (names []string) {
	f.t.Helper()
	svc := f.service(service)
	table, err := serversets.SetOf(svc).Table()
	f.must(err)
	for _, i := range table.Row(int(dataplane.BucketOf(flow.Hash(&f.identity.BucketKeys), uint32(svc.Buckets)))) {
		names = append(names, table.Servers[i].Name)
	}
	return names
}

// A SYN is offered to the candidates of the flow's bucket. A later packet of an unknown flow is
// recovered through the same candidates. Neither makes an entry. The segment lists equal those of
// the reference, and have the lengths that the papers state.
func TestHuntLists(t *testing.T) {
	t.Parallel()
	for candidates := 1; candidates <= 8; candidates++ {
		t.Run(fmt.Sprint(candidates), func(t *testing.T) {
			f := open(t, hunting(desired.SelectConsistent, candidates))
			for service, flow := range hunted {
				kind := f.service(service).Encapsulation
				row := f.row(flow, service)
				fragments := packet.Fragments(frameOf(flow, large), 64, 7)
				router := router6
				if flow.Source.Addr().Is4() {
					router = router4
				}
				problem := packet.ICMPError(router, 1, 0, 0, reply(flow))
				if flow.Source.Addr().Is4() {
					problem = packet.ICMPError(router, 3, 1, 0, reply(flow))
				}
				for _, c := range []struct {
					name     string
					frame    []byte
					reason   string
					function srv6.Function
				}{
					{"SYN", frameOf(flow), "forward_hunt", srv6.ConnectAvail},
					{"SYN again", frameOf(flow), "forward_hunt", srv6.ConnectAvail},
					{"SYN-ACK", frameOf(flow, packet.Flags(packet.SYN|packet.ACK)), "forward_recover", srv6.RecoverStickiness},
					{"ACK", frameOf(flow, packet.Flags(packet.ACK)), "forward_recover", srv6.RecoverStickiness},
					{"RST", frameOf(flow, packet.Flags(packet.RST)), "forward_recover", srv6.RecoverStickiness},
					{"first fragment", fragments[0], "forward_hunt", srv6.ConnectAvail},
					{"later fragment", fragments[1], "forward_fragment", srv6.Steer},
					{"ICMP error", problem, "forward_icmp", srv6.Steer},
				} {
					t.Run(service+"/"+c.name, func(t *testing.T) {
						f.t = t
						got := f.run(c.frame)
						f.check(f.offered(c.frame, flow, service, c.reason, c.function, row...), got)
						want := overheadOf(kind, candidates, c.function == srv6.ConnectAvail)
						if added := len(got.Frame) - len(c.frame); added != want {
							t.Errorf("%d bytes added, want %d", added, want)
						}
						if err := packet.Verify(got.Frame); err != nil {
							t.Error(err)
						}
					})
				}
			}
			if slices.ContainsFunc(f.plane.Flows.Entries, func(e uint64) bool { return e != 0 }) ||
				slices.ContainsFunc(f.plane.HalfOpen.Entries, func(e uint64) bool { return e != 0 }) {
				t.Error("the balancer remembers a flow that no server has taken")
			}
		})
	}
}

// With random candidates, a SYN is offered to the candidates of a random bucket. A later packet is
// recovered through the candidates of the flow's own bucket.
func TestHuntRandom(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectRandom, 2))
	lists := map[string]bool{}
	svc := f.service("web")
	for range 100 {
		verdict, out := f.exec(frameOf(web), nil)
		if verdict != verdictRedirect {
			t.Fatalf("verdict %d", verdict)
		}
		found := ""
		for _, a := range svc.Servers {
			for _, b := range svc.Servers {
				all := offers(nil, nil, []string{a.Name, b.Name}) // no column tells anything about them
				want, err := packet.Encapsulate(frameOf(web), f.encapFor(web, "web", all...))
				f.must(err)
				if a.Name != b.Name && slices.Equal(want, out) {
					found = a.Name + " " + b.Name
				}
			}
		}
		if found == "" {
			t.Fatalf("offered to none: %x", out)
		}
		lists[found] = true
	}
	// Suppose that there are at least 10 lists, and that they are equally likely. Then 100 SYNs
	// have fewer than 5 different lists with a probability of 1 in 10^25.
	if len(lists) < 5 {
		t.Errorf("100 SYNs had the lists %v", lists)
	}
	ack := frameOf(web, packet.Flags(packet.ACK))
	f.check(f.offered(ack, web, "web", "forward_recover", srv6.RecoverStickiness, f.row(web, "web")...), f.run(ack))
}

// Servers that cannot be reached, are drained or fail are not offered connections. The candidates
// of the next rows take their place, because the last server must accept. When a flow is recovered,
// candidates that cannot be reached come last. If all servers are alike, all stay in the list. A
// packet whose first server has no next hop is dropped. Trace agrees.
func TestHuntPassesOverUnreachable(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 3))
	r := newReference(f)
	svc, member := f.service("web"), f.services.byName["web"].member
	row := f.row(web, "web")
	a, b, c := row[0], row[1], row[2]
	var all []string
	for _, s := range svc.Servers {
		all = append(all, s.Name)
	}
	view := f.view()
	ack := frameOf(web, packet.Flags(packet.ACK))
	lose := func(name string) { f.via[name] = "" }
	silence := func(name string) { f.silent[name] = true }
	drain := func(name string) {
		i := slices.Index(all, name)
		svc.Servers[i].Drained, member(name).Drained = true, true
	}
	fail := func(name string) {
		r.failing["web/"+name] = true
		member(name).set(dataplane.Failing, true)
	}
	restore := func() {
		f.via, f.silent, r.failing = map[string]string{}, map[string]bool{}, map[string]bool{}
		for i, name := range all {
			svc.Servers[i].Drained, member(name).Drained = false, false
			member(name).set(dataplane.Failing, false)
		}
	}
	for _, v := range []struct {
		name    string
		harm    func(name string)
		harmed  []string
		offered []string // the candidates of the row that are offered the connection
		last    []string // the last servers that are asked for a flow
	}{
		{"none", nil, nil, row, nil},
		{"first lost", lose, []string{a}, []string{b, c}, []string{a}},
		{"second lost", lose, []string{b}, []string{a, c}, []string{b}},
		{"last lost", lose, []string{c}, []string{a, b}, []string{c}},
		{"two lost", lose, []string{a, b}, []string{c}, []string{a, b}},
		{"row lost", lose, row, nil, row},
		{"first silent", silence, []string{a}, []string{b, c}, []string{a}},
		{"last silent", silence, []string{c}, []string{a, b}, []string{c}},
		{"all silent", silence, all, row, nil},
		{"last drained", drain, []string{c}, []string{a, b}, []string{c}},
		{"first failing", fail, []string{a}, []string{b, c}, []string{a}},
		{"first and second failing", fail, []string{a, b}, []string{c}, []string{a, b}},
		{"all failing", fail, all, row, nil},
		{"all but one drained", drain, without(all, b), []string{b}, []string{a, c}},
		{"all drained", drain, all, nil, row},
	} {
		restore()
		for _, name := range v.harmed {
			v.harm(name)
		}
		f.route()
		f.services.admit(f.services.byName["web"])
		r.changed()
		t.Run(v.name, func(t *testing.T) {
			f.t = t
			offered, asked := r.taking(web, svc, 3), r.possible(web, svc)
			if !slices.Equal(offered[:len(v.offered)], v.offered) {
				t.Errorf("offered to %v, want %v first", offered, v.offered)
			}
			if !slices.Equal(asked[len(asked)-len(v.last):], v.last) {
				t.Errorf("asked are %v, want %v last", asked, v.last)
			}
			if want := min(3, len(r.usable(svc))); len(offered) != want {
				t.Errorf("offered to %v, want %d servers", offered, want)
			}
			f.check(r.receive(frameOf(web)), f.run(frameOf(web)))
			f.check(f.offered(ack, web, "web", "forward_recover", srv6.RecoverStickiness, asked...), f.run(ack))
			for _, opens := range []bool{true, false} {
				frame := frameOf(web, packet.Flags(map[bool]packet.TCPFlags{true: packet.SYN, false: packet.ACK}[opens]))
				trace := mustTrace(t, view, inspect.Packet{Flow: web, Opens: opens, Length: int(layer3(frame))})
				f.check(f.traced(t, trace, frame), f.run(frame))
			}
		})
		f.t = t
	}
	restore()
	for _, name := range all {
		lose(name)
	}
	f.route()
	f.check(refused(frameOf(web), "drop_no_next_hop", 60), f.run(frameOf(web)))
	f.check(refused(ack, "drop_no_next_hop", 60), f.run(ack))
}

// without returns the names except one.
func without(names []string, one string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return name == one })
}

// After changes of servers, the server of a flow may not be a candidate any more. Recovering asks
// the candidates of former generations as well, but new flows are not offered to them. They are
// forgotten when there were too many changes, or when the number of buckets changes. Trace agrees.
func TestRecoverAsksFormerCandidates(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 2))
	flow, left := f.flowThatMoves("s3")
	row := f.row(flow, "web")
	view := f.view()
	ack := frameOf(flow, packet.Flags(packet.ACK))
	check := func(name string, list ...string) {
		t.Helper()
		f.forgetFlows()
		t.Run(name, func(t *testing.T) {
			f.t = t
			f.check(f.offered(ack, flow, "web", "forward_recover", srv6.RecoverStickiness, list...), f.run(ack))
			f.check(f.offered(frameOf(flow), flow, "web", "forward_hunt", srv6.ConnectAvail, row...), f.run(frameOf(flow)))
			trace := mustTrace(t, view, inspect.Packet{Flow: flow, Length: int(layer3(ack))})
			f.check(f.traced(t, trace, ack), f.run(ack))
		})
		f.t = t
	}
	check("after the change", append(slices.Clone(row), left...)...)
	for _, name := range left {
		f.plane.Servers.ClearNextHop(f.slot("web", name))
	}
	check("and out of reach", row...)
	f.route()
	check("and back", append(slices.Clone(row), left...)...)
	for _, name := range left {
		f.hush(f.slot("web", name))
	}
	check("and silent", row...)
	f.route()

	r := newReference(f)
	change := func(name string, knows bool, cfg *desired.Balancer) {
		f.mustApply(cfg)
		f.cfg = cfg
		r.changed()
		row = f.row(flow, "web")
		asked := r.possible(flow, f.service("web"))
		for _, name := range left {
			if slices.Contains(asked, name) != knows {
				t.Errorf("%s: asked are %v, and %s had the flow", name, asked, name)
			}
		}
		check(name, asked...)
	}
	next := []string{"s3"}
	for _, name := range nodesExcept(f.service("web"), append(slices.Clone(left), row...)...)[:2] {
		next = append(next, name)
		change("without "+name, len(next) == 2, huntingWithout(2, next...))
	}
	change("all back", true, hunting(desired.SelectConsistent, 2))
	other := hunting(desired.SelectConsistent, 2)
	for i := range other.Services {
		other.Services[i].Buckets = 257
	}
	f.mustApply(other)
	row = f.row(flow, "web")
	check("with other buckets", row...)
}

// nodesExcept lists the servers of a service except some.
func nodesExcept(svc *desired.Service, except ...string) (names []string) {
	for _, s := range svc.Servers {
		if !slices.Contains(except, s.Name) {
			names = append(names, s.Name)
		}
	}
	return names
}

// huntingWithout is hunting without some servers.
func huntingWithout(candidates int, names ...string) *desired.Balancer {
	cfg := hunting(desired.SelectConsistent, candidates)
	for i := range cfg.Services {
		svc := &cfg.Services[i]
		svc.Servers = slices.DeleteFunc(svc.Servers, func(s desired.Server) bool { return slices.Contains(names, s.Name) })
	}
	return cfg
}

// flowThatMoves removes a server. It finds a flow that has lost another candidate by this change,
// and returns the flow and the candidates that it has lost. These servers are still configured.
func (f *fixture) flowThatMoves(removed string) (flow dataplane.Flow, left []string) {
	f.t.Helper()
	var flows []dataplane.Flow
	var before [][]string
	for port := range uint16(2000) {
		flow := web
		flow.Source = netip.AddrPortFrom(web.Source.Addr(), 30000+port)
		flows, before = append(flows, flow), append(before, f.row(flow, "web"))
	}
	f.mustApply(huntingWithout(2, removed))
	f.route()
	for i, flow := range flows {
		after := f.row(flow, "web")
		left := slices.DeleteFunc(slices.Clone(before[i]), func(name string) bool { return name == removed || slices.Contains(after, name) })
		if len(left) > 0 {
			return flow, left
		}
	}
	f.t.Fatal("no flow has lost a candidate that is still there")
	return flow, nil
}

// A packet of a flow with a stale entry visits as many servers as fit its path. If there is no room
// for others, it visits only the server of the entry.
func TestSeekFits(t *testing.T) {
	t.Parallel()
	for _, candidates := range []int{1, 2, 4, 8} {
		t.Run(fmt.Sprint(candidates), func(t *testing.T) {
			f := open(t, hunting(desired.SelectConsistent, candidates))
			view := f.view()
			for service, flow := range hunted {
				parts := map[string]string{first: f.row(flow, service)[0]}
				f.via[parts[first]] = "narrow"
				f.route()
				all := f.sought(flow, service, parts[first])
				for most := 1; most <= 8; most++ {
					full := links["narrow"] - overheadOf(f.service(service).Encapsulation, most, false)
					for _, c := range []struct{ length, most int }{{full, most}, {full + 1, most - 1}} {
						if c.most == 0 {
							continue // too long for any path
						}
						t.Run(fmt.Sprintf("%s/%d bytes", service, c.length), func(t *testing.T) {
							f.t = t
							f.setState(flow, service, "stale first", parts)
							bare := int(layer3(frameOf(flow, packet.Flags(packet.ACK), packet.Payload(nil))))
							frame := frameOf(flow, packet.Flags(packet.ACK), packet.Payload(make([]byte, c.length-bare)))
							want := f.visited(frame, flow, service, "forward_recover", cut(all, c.most)...)
							f.check(want, f.run(frame))
							after := "stale first"
							if len(cut(all, c.most)) == 1 { // no other server could be asked
								after = "steer first"
							}
							if got := f.state(flow, service, parts); got != after {
								t.Errorf("afterwards the flow is %q, want %q", got, after)
							}
							f.setState(flow, service, "stale first", parts)
							trace := mustTrace(t, view, inspect.Packet{Flow: flow, Length: c.length})
							f.check(f.traced(t, trace, frame), f.run(frame))
						})
						f.t = t
					}
				}
				delete(f.via, parts[first])
			}
		})
	}
}

// A packet of a stale flow visits the server of its entry and eight candidates. The server that
// gets new flows in place of a drained one is among them, also if the server of the entry is not.
func TestSeekAsksSubstitutes(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 8))
	for service, flow := range hunted {
		drained := f.row(flow, service)[3]
		cfg := hunting(desired.SelectConsistent, 8)
		for i := range cfg.Services {
			for j := range cfg.Services[i].Servers {
				if s := &cfg.Services[i].Servers[j]; cfg.Services[i].Name == service && s.Name == drained {
					s.Drained = true
				}
			}
		}
		f.mustApply(cfg)
		candidates := newReference(f).taking(flow, f.service(service), 8)
		holder := ""
		for _, s := range f.service(service).Servers {
			if s.Name != drained && !slices.Contains(candidates, s.Name) {
				holder = s.Name
			}
		}
		if len(candidates) != 8 || holder == "" {
			t.Fatalf("candidates %v, and %q is none", candidates, holder)
		}
		f.setState(flow, service, "stale first", map[string]string{first: holder})
		frame := frameOf(flow, packet.Flags(packet.ACK))
		want := slices.Concat(stages(srv6.RecoverStickiness, holder), stages(srv6.RecoverStickiness, candidates...),
			stages(srv6.AckStickiness, holder))
		f.check(f.visited(frame, flow, service, "forward_recover", want...), f.run(frame))
	}
}

// A SYN with data is offered to as many candidates as fit its path, but at least to one. The
// drained server of the flow stays in front of them.
func TestOfferFits(t *testing.T) {
	t.Parallel()
	for _, candidates := range []int{1, 2, 4, 8} {
		t.Run(fmt.Sprint(candidates), func(t *testing.T) {
			f := open(t, hunting(desired.SelectConsistent, candidates))
			view := f.view()
			for service, flow := range hunted {
				row := f.row(flow, service)
				drained := nodesExcept(f.service(service), row...)[0]
				f.services.byName[service].member(drained).Drained = true
				f.services.admit(f.services.byName[service])
				f.via[row[0]], f.via[drained] = "narrow", "narrow"
				f.route()
				for _, c := range []struct {
					state string
					asked []stage
				}{{"listen", nil}, {"steer first", stages(srv6.Steer, drained)}} {
					for most := 1; most <= 8; most++ {
						full := links["narrow"] - overheadOf(f.service(service).Encapsulation, most, true)
						for _, length := range []int{full, full + 1} {
							fit := most - (length - full)
							n := min(candidates, max(fit-len(c.asked), 1), 8-len(c.asked))
							all := offers(c.asked, row, row[:n])
							t.Run(fmt.Sprintf("%s/%s/%d bytes", service, c.state, length), func(t *testing.T) {
								f.t = t
								f.setState(flow, service, c.state, map[string]string{first: drained})
								frame := frameOf(flow, packet.Payload(make([]byte, length-len(frameOf(flow, packet.Payload(nil)))+ethernetLength)))
								want := f.visited(frame, flow, service, "forward_hunt", all...)
								if len(all) > fit {
									mtu := links["narrow"] - overheadOf(f.service(service).Encapsulation, len(all), true)
									want = answered(frame, "answer_too_big", uint32(mtu))
								}
								f.check(want, f.run(frame))
								trace := mustTrace(t, view, inspect.Packet{Flow: flow, Opens: true, Length: length})
								f.check(want, f.traced(t, trace, frame))
							})
							f.t = t
						}
					}
				}
				delete(f.via, row[0])
				delete(f.via, drained)
			}
		})
	}
}

// Offers tell each candidate its column, which other servers in the list do not change. Servers of
// other rows have none. Other lists have no argument.
func TestOfferColumns(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 3))
	none := srv6.NoColumn
	for service, flow := range hunted {
		row := f.row(flow, service)
		kind := f.service(service).Encapsulation
		sent := func(flags packet.TCPFlags) (sids []srv6.SID) {
			_, out := f.exec(frameOf(flow, packet.Flags(flags)), nil)
			for _, address := range visitedBy(out, kind) {
				sids = append(sids, srv6.Parse(address))
			}
			return sids
		}
		for name, c := range map[string]struct {
			lost []string
			want []int
		}{
			"none":           {nil, []int{0, 1, 2}},
			"the first":      {row[:1], []int{1, 2, none}},
			"the second":     {row[1:2], []int{0, 2, none}},
			"the last":       {row[2:], []int{0, 1, none}},
			"the first two":  {row[:2], []int{2, none, none}},
			"all of the row": {row, []int{none, none, none}},
		} {
			for _, server := range c.lost {
				f.via[server] = ""
			}
			f.route()
			f.services.admit(f.services.byName[service])
			var got []int
			for _, sid := range sent(packet.SYN) {
				got = append(got, srv6.ParseOffer(sid.Argument).Column)
				if sid.Function != srv6.ConnectAvail {
					t.Errorf("%s, lost is %s: %v is asked", service, name, sid)
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("%s, lost is %s: columns %v, want %v", service, name, got, c.want)
			}
			for _, sid := range sent(packet.ACK) {
				if sid.Function != srv6.RecoverStickiness || sid.Argument != 0 {
					t.Errorf("%s, lost is %s: %v is asked", service, name, sid)
				}
			}
			for _, server := range c.lost {
				delete(f.via, server)
			}
		}
	}
}

// cut shortens a course that begins and ends with the same server to the given number of stages. If
// only these two are left, cut removes one of them.
func cut(all []stage, most int) []stage {
	last := all[len(all)-1]
	if most < len(all) {
		all = append(slices.Clone(all[:most-1]), last)
	}
	if len(all) == 2 {
		all = all[1:]
	}
	return all
}
