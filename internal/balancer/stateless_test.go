// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/srv6"
)

// stateless returns the configuration of hunting, with persistence stateless.
func stateless(placement desired.Placement, candidates int) *desired.Balancer {
	cfg := hunting(desired.SelectConsistent, candidates)
	for i := range cfg.Services {
		svc := &cfg.Services[i]
		svc.Persistence, svc.Generations, svc.History = desired.PersistenceStateless, 32, 3
		if svc.Placement = placement; placement == desired.PlacementHash {
			svc.Selection = ""
		}
	}
	return cfg
}

// labelOf is flow_sign of bpf/balancer/tables/flowtable.h: the flow label of flows without an
// entry.
func labelOf(flow dataplane.Flow) uint32 {
	const golden = 0x9e3779b97f4a7c15
	ports := binary.LittleEndian.Uint32(binary.BigEndian.AppendUint16(
		binary.BigEndian.AppendUint16(nil, flow.Source.Port()), flow.Destination.Port()))
	source := flow.Source.Addr().As16()
	sum := uint64(ports)*golden + uint64(binary.LittleEndian.Uint32(source[12:]))
	return uint32((sum ^ sum>>32) * golden >> 30)
}

// cookied returns the outcome for a frame that visits the stages, which carry the width of cookies.
func (f *fixture) cookied(frame []byte, flow dataplane.Flow, service, reason string, all ...stage) outcome {
	f.t.Helper()
	all = withCookies(f.service(service), slices.Clone(all))
	return f.visited(frame, flow, service, reason, all...)
}

// A SYN is offered to the candidates of its row with their columns and the width of cookies, also
// if it has an echo. A client without timestamps could not tell which of them has accepted, so its
// SYN goes to the first one.
func TestStatelessSYN(t *testing.T) {
	t.Parallel()
	for candidates := 1; candidates <= 8; candidates++ {
		t.Run(fmt.Sprint(candidates), func(t *testing.T) {
			f := open(t, stateless(desired.PlacementHunt, candidates))
			hash := open(t, stateless(desired.PlacementHash, candidates))
			for service, flow := range hunted {
				row := f.row(flow, service)
				syn := frameOf(flow, packet.MSS(1440), packet.Timestamps(7, 0))
				echo := frameOf(flow, packet.Timestamps(7, 0x01020301))
				f.check(f.cookied(syn, flow, service, "forward_hunt", offers(nil, row, row)...), f.run(syn))
				f.check(f.cookied(echo, flow, service, "forward_hunt", offers(nil, row, row)...), f.run(echo))
				bare := frameOf(flow)
				f.check(f.cookied(bare, flow, service, "forward_hunt", offers(nil, row, row[:1])...), f.run(bare))

				row = hash.row(flow, service)
				want := hash.cookied(syn, flow, service, "forward_new", offers(nil, row, row[:1])...)
				hash.check(want, hash.run(syn))
			}
		})
	}
}

// cookieShapes are forms of the timestamps among the options of TCP, with an echo.
func cookieShapes(echo uint32) map[string][]packet.Option {
	data := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, 0x01020304), echo)
	timestamps := packet.TCPOption(layers.TCPOptionKindTimestamps, data)
	sack := packet.TCPOption(layers.TCPOptionKindSACK, make([]byte, 24))
	return map[string][]packet.Option{
		"usual":        {packet.Timestamps(0x01020304, echo)},
		"first":        {timestamps},
		"with SACK":    {packet.Timestamps(0x01020304, echo), packet.TCPOption(layers.TCPOptionKindSACK, make([]byte, 16))},
		"behind SACK":  {sack, timestamps},
		"with payload": {packet.Timestamps(0x01020304, echo), large},
	}
}

// A later packet visits the server of the column that its cookie names, whatever the order of
// options. Without a cookie it visits all candidates, that of column 0 first.
func TestStatelessCookies(t *testing.T) {
	t.Parallel()
	for _, candidates := range []int{1, 2, 3, 4, 8} {
		t.Run(fmt.Sprint(candidates), func(t *testing.T) {
			f := open(t, stateless(desired.PlacementHunt, candidates))
			reason := map[bool]string{true: "forward_known", false: "forward_recover"}[candidates == 1]
			for service, flow := range hunted {
				row := f.row(flow, service)
				for bits := range uint32(1) << widthOf(&desired.Service{Candidates: candidates}) {
					for shape, options := range cookieShapes(0xabcdef00 | bits) {
						for _, flags := range []packet.TCPFlags{packet.ACK, packet.ACK | packet.FIN, packet.RST | packet.ACK} {
							t.Run(fmt.Sprintf("%s/%d/%s/%d", service, bits, shape, flags), func(t *testing.T) {
								f.t = t
								frame := frameOf(flow, append(options, packet.Flags(flags))...)
								want := f.cookied(frame, flow, service, reason, stages(srv6.Steer, row...)...)
								if int(bits) < candidates {
									want = f.cookied(frame, flow, service, "forward_known", stages(srv6.Steer, row[bits])...)
								}
								f.check(want, f.run(frame))
							})
						}
					}
				}
				f.t = t
				for _, flags := range []packet.TCPFlags{packet.ACK, packet.RST} {
					frame := frameOf(flow, packet.Flags(flags))
					f.check(f.cookied(frame, flow, service, reason, stages(srv6.Steer, row...)...), f.run(frame))
				}
			}
			if slices.ContainsFunc(f.plane.Flows.Entries, func(e uint64) bool { return e != 0 }) {
				t.Error("the balancer remembers a flow")
			}
		})
	}
}

// When a service becomes stateless, the flows that the flow table knows stay with their servers
// until they have ended, although their timestamps look like cookies. Then all packets go by their
// cookies.
func TestStatelessKeepsFormerFlows(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 2))
	row := f.row(web, "web")
	answer := f.signal(web, "web", row[1], srv6.CreateStickiness, packet.Flags(packet.ACK), packet.Sequence(1, acknowledged))
	f.check(f.returned(answer, "return_create"), f.run(answer))
	cfg := stateless(desired.PlacementHunt, 2)
	f.mustApply(cfg)
	f.cfg = cfg
	misleading := frameOf(web, packet.Flags(packet.ACK), packet.Timestamps(9, 1024)) // as of column 0
	f.check(f.visited(misleading, web, "web", "forward_known", stage{function: srv6.AckStickiness, server: row[1]}), f.run(misleading))
	other := web
	other.Source = netip.AddrPortFrom(web.Source.Addr(), web.Source.Port()+1)
	otherRow := f.row(other, "web")
	ack := frameOf(other, packet.Flags(packet.ACK), packet.Timestamps(9, 1025))
	list := []string{otherRow[1], otherRow[0]}
	want := f.cookied(ack, other, "web", "forward_recover", stages(srv6.Steer, list...)...)
	if got := f.run(ack); reasonOf(got) != "forward_recover" {
		t.Errorf("a new flow: %+v, want %+v", got.Reasons, want.Reasons)
	}
	f.services.endFormerFlows(nil, time.Now())
	if svc := f.services.byName["web"]; !svc.rule.HasFormerFlows() {
		t.Error("the transition ended before half-open flows could")
	}
	f.services.endFormerFlows(nil, time.Now().Add(f.service("web").Timeouts.New))
	f.check(f.cookied(misleading, web, "web", "forward_known", stages(srv6.Steer, row[0])...), f.run(misleading))
}

// Rows that are not full, because there are few servers, have cookies of the same width as other
// rows. So the servers of flows are found after servers were added and removed.
func TestCookiesOfShortRows(t *testing.T) {
	t.Parallel()
	few := func(servers int) *desired.Balancer {
		cfg := stateless(desired.PlacementHunt, 4)
		for i := range cfg.Services {
			cfg.Services[i].Servers = cfg.Services[i].Servers[:servers]
		}
		return cfg
	}
	f := open(t, few(2))
	row := f.row(web, "web")
	ack := frameOf(web, packet.Flags(packet.ACK), packet.Timestamps(9, 0xabcdef01))
	for _, servers := range []int{2, 10, 2} {
		cfg := few(servers)
		f.mustApply(cfg)
		f.cfg = cfg
		present := f.row(web, "web")
		syn := frameOf(web, packet.Timestamps(7, 0))
		f.check(f.cookied(syn, web, "web", "forward_hunt", offers(nil, present, present)...), f.run(syn))
		got := visitedBy(f.run(ack).Frame, desired.SRv6Encap)
		isSecond := func(sid netip.Addr) bool {
			return srv6.Parse(sid).Locator == f.locatorOf("web", row[1])
		}
		if !slices.ContainsFunc(got, isSecond) {
			t.Errorf("with %d servers, %s is not visited: %v", servers, row[1], got)
		}
	}
}

// A packet without the ACK flag has no valid echo, and 0 is no echo. Such packets have no cookie.
func TestCookiesNeedAnEcho(t *testing.T) {
	t.Parallel()
	f := open(t, stateless(desired.PlacementHunt, 2))
	list := stages(srv6.Steer, f.row(web, "web")...)
	for _, frame := range [][]byte{
		frameOf(web, packet.Flags(packet.RST), packet.Timestamps(9, 1025)),
		frameOf(web, packet.Flags(packet.ACK), packet.Timestamps(9, 0)),
	} {
		f.check(f.cookied(frame, web, "web", "forward_recover", list...), f.run(frame))
	}
}

// If all servers are drained, new connections are dropped. If the servers of other rows get new
// connections, a row of drained servers gets them, too: no other server would be found again.
func TestStatelessDrained(t *testing.T) {
	t.Parallel()
	for _, placement := range []desired.Placement{desired.PlacementHash, desired.PlacementHunt} {
		t.Run(string(placement), func(t *testing.T) {
			cfg := stateless(placement, 2)
			f := open(t, cfg)
			row := f.row(web, "web")
			syn := frameOf(web, packet.Timestamps(7, 0))
			drain := func(which func(desired.Server) bool) {
				cfg := stateless(placement, 2)
				for i := range cfg.Services[1].Servers {
					s := &cfg.Services[1].Servers[i]
					s.Drained = which(*s)
				}
				f.mustApply(cfg)
				f.cfg = cfg
			}
			drain(func(s desired.Server) bool { return slices.Contains(row, s.Name) })
			want := f.cookied(syn, web, "web", "forward_hunt", offers(nil, row, row)...)
			if placement == desired.PlacementHash {
				want = f.cookied(syn, web, "web", "forward_new", offers(nil, row, row[:1])...)
			}
			f.check(want, f.run(syn))
			f.requireRowShares("web")
			drain(func(desired.Server) bool { return true })
			f.check(rejected(syn, "answer_no_server"), f.run(syn))
		})
	}
}

// requireRowShares fails the test unless the status shows which servers get the new flows of each
// row, or are offered them first: the first server that takes new flows, or else the first server.
func (f *fixture) requireRowShares(service string) {
	f.t.Helper()
	svc := f.service(service)
	table, err := serversets.SetOf(svc).Table()
	f.must(err)
	want := map[string]float64{}
	for bucket := range table.Buckets {
		row := table.Row(bucket)
		taker := slices.IndexFunc(row, func(server uint16) bool {
			return serverOfName(svc, table.Servers[server].Name).Takes()
		})
		want[table.Servers[row[max(0, taker)]].Name] += 1 / float64(table.Buckets)
	}
	for _, state := range mustSnapshot(f.t, f.view()).Services {
		if state.Name != service {
			continue
		}
		for _, server := range state.Servers {
			if math.Abs(server.Share-want[server.Name]) > 1e-9 {
				f.t.Errorf("share of %s: %v, want %v", server.Name, server.Share, want[server.Name])
			}
		}
	}
}

// A later fragment and an ICMP error have no cookie. They visit the servers of the flow's row, also
// those that fail, but no servers of other rows, which cannot have the flow.
func TestStatelessRelatedPackets(t *testing.T) {
	t.Parallel()
	f := open(t, stateless(desired.PlacementHunt, 3))
	row := f.row(web, "web")
	f.setHealth("web", row[0], false)
	list := []string{row[1], row[2], row[0]}
	problem := packet.ICMPError(router6, 1, 0, 0, reply(web))
	f.check(f.offered(problem, web, "web", "forward_icmp", srv6.Steer, list...), f.run(problem))
	fragments := packet.Fragments(frameOf(web, packet.Flags(packet.ACK), large), 64, 7)
	f.run(fragments[0])
	want := f.offered(fragments[1], web, "web", "forward_fragment", srv6.Steer, list...)
	f.check(want, f.run(fragments[1]))
}
