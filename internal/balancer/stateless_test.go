// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"math"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/srv6"
)

// stateless returns the configuration of hunting, with persistence stateless. A switch can balance
// its services.
func stateless(placement desired.Placement, candidates int) *desired.Balancer {
	cfg := hunting(desired.SelectConsistent, candidates)
	for i := range cfg.Services {
		svc := &cfg.Services[i]
		svc.Persistence, svc.Generations, svc.History = desired.PersistenceStateless, 32, 3
		svc.BucketHash, svc.Buckets = desired.BucketHashCRC32, 256
		if svc.Placement = placement; placement == desired.PlacementHash {
			svc.Selection = ""
		}
	}
	return cfg
}

// multilinear makes the services of a configuration select buckets by the default hash. No switch can
// balance them.
func multilinear(cfg *desired.Balancer) *desired.Balancer {
	for i := range cfg.Services {
		cfg.Services[i].BucketHash, cfg.Services[i].Buckets = desired.BucketHashMultilinear, 251
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
	server := f.row(web, "web")[0] // by the other bucket hash
	f.check(f.cookied(misleading, web, "web", "forward_known", stages(srv6.Steer, server)...), f.run(misleading))
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

// A change of the bucket hash loads a program that has the hash, and drops the former sets, in which
// flows have other buckets. New flows and cookies follow the new rows.
func TestChangeOfBucketHash(t *testing.T) {
	t.Parallel()
	grown := multilinear(stateless(desired.PlacementHunt, 2))
	web0 := &grown.Services[1]
	web0.Servers = web0.Servers[1:]
	f := openWith(t, multilinear(stateless(desired.PlacementHunt, 2)), stoppedClock(t), true)
	f.mustApply(grown) // begins a second generation
	cfg := stateless(desired.PlacementHunt, 2)
	f.mustApply(cfg)
	f.cfg = cfg
	row := f.row(web, "web")
	syn := frameOf(web, packet.Timestamps(7, 0))
	f.check(f.cookied(syn, web, "web", "forward_hunt", offers(nil, row, row)...), f.run(syn))
	for column, server := range row {
		ack := frameOf(web, packet.Flags(packet.ACK), packet.Timestamps(9, 1024+uint32(column)))
		f.check(f.cookied(ack, web, "web", "forward_known", stages(srv6.Steer, server)...), f.run(ack))
	}
	for _, s := range mustSnapshot(t, f.view()).Services {
		if s.BucketHash != desired.BucketHashCRC32 || s.Sets != 1 {
			t.Errorf("service %s: bucket hash %q, %d sets", s.Name, s.BucketHash, s.Sets)
		}
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
