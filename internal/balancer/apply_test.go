// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// webOf returns a configuration of one service with the given servers.
func webOf(servers ...desired.Server) *desired.Balancer {
	return balancerOf(serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap, servers...))
}

const (
	liveFlows  = 60
	freshFlows = 200 // so many that a server with a small weight gets one
)

// establish opens connections, each by a SYN and an ACK. It returns the server of each connection.
func (f *fixture) establish(flow dataplane.Flow) map[dataplane.Flow]string {
	f.t.Helper()
	servers := map[dataplane.Flow]string{}
	for port := range uint16(liveFlows) {
		flow := fromPort(flow, 10000+port)
		servers[flow] = serverOf(f.run(frameOf(flow)))
		if got := serverOf(f.run(frameOf(flow, packet.Flags(packet.ACK)))); got != servers[flow] || got == "" {
			f.t.Fatalf("%v: SYN to %q, ACK to %q", flow, servers[flow], got)
		}
	}
	return servers
}

// stay checks that connections are still on their servers. Those of the server gone must be placed
// on others.
func (f *fixture) stay(servers map[dataplane.Flow]string, gone string) {
	f.t.Helper()
	for flow, server := range servers {
		o := f.run(frameOf(flow, packet.Flags(packet.ACK)))
		switch {
		case server != gone && (serverOf(o) != server || reasonOf(o) != "forward_known"):
			f.t.Errorf("%v moved from %s to %s (%s)", flow.Source, server, serverOf(o), reasonOf(o))
		case server == gone && (serverOf(o) == gone || reasonOf(o) != "forward_recover"):
			f.t.Errorf("%v of %s, which is gone: to %s (%s)", flow.Source, gone, serverOf(o), reasonOf(o))
		}
	}
}

func TestServersComeAndGo(t *testing.T) {
	t.Parallel()
	s1, s2, s3, s4 := srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 1), srv6Server("s4", 4, 1)
	for name, v := range map[string]struct {
		after []desired.Server
		gone  string
	}{
		"added":       {[]desired.Server{s1, s2, s3, s4}, ""},
		"removed":     {[]desired.Server{s1, s3}, "web/s2"},
		"replaced":    {[]desired.Server{s1, s4, s3}, "web/s2"},
		"reweighted":  {[]desired.Server{srv6Server("s1", 1, 9), s2, s3}, ""},
		"drained":     {[]desired.Server{srv6Server("s1", 1, 0), s2, s3}, ""},
		"reordered":   {[]desired.Server{s3, s2, s1}, ""},
		"readdressed": {[]desired.Server{s1, srv6Server("s2", 12, 1), s3}, "none: the name is the same"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := webOf(s1, s2, s3)
			cfg.Node.Limits.Flows = 1 << 14 // each flow gets an entry
			f := open(t, cfg)
			servers := f.establish(web)
			next := webOf(v.after...)
			next.Node = cfg.Node
			f.mustApply(next)
			if name == "readdressed" {
				f.readdressed(servers)
				return
			}
			f.stay(servers, v.gone)
			f.places(v.after)
		})
	}
}

// readdressed checks that the flows of s2, which has another address now, are placed anew, and that
// no packet goes to the old address.
func (f *fixture) readdressed(servers map[dataplane.Flow]string) {
	f.t.Helper()
	for flow, server := range servers {
		frame := frameOf(flow, packet.Flags(packet.ACK))
		reason := "forward_known"
		if server == "web/s2" {
			reason = "forward_recover"
		}
		f.check(f.forwarded(frame, flow, "web", strings.TrimPrefix(server, "web/"), reason), f.run(frame))
	}
}

// places checks that new flows reach all servers that take new flows, and no others.
func (f *fixture) places(servers []desired.Server) {
	f.t.Helper()
	want, got := map[string]bool{}, map[string]bool{}
	for _, s := range servers {
		if *s.Weight > 0 {
			want["web/"+s.Name] = true
		}
	}
	for port := range uint16(freshFlows) {
		flow := fromPort(web, 20000+port)
		o := f.run(frameOf(flow))
		if want := "web/" + f.placed(flow, "web"); serverOf(o) != want {
			f.t.Errorf("%v placed on %s, want %s", flow, serverOf(o), want)
		}
		got[serverOf(o)] = true
	}
	if diff := cmp.Diff(want, got); diff != "" {
		f.t.Errorf("servers with new flows (-want +got):\n%s", diff)
	}
}

// A server that is added again before its flows were swept gets its flows back.
func TestServerComesBack(t *testing.T) {
	t.Parallel()
	s1, s2 := srv6Server("s1", 1, 1), srv6Server("s2", 2, 1)
	f := open(t, webOf(s1, s2))
	flow := web
	for f.placed(flow, "web") != "s2" {
		flow = fromPort(flow, flow.Source.Port()+1)
	}
	f.run(frameOf(flow))
	f.mustApply(webOf(s1))
	f.mustApply(webOf(s1, s2))
	if o := f.run(frameOf(flow, packet.Flags(packet.ACK))); reasonOf(o) != "forward_known" || serverOf(o) != "web/s2" {
		t.Errorf("%s to %s", reasonOf(o), serverOf(o))
	}
}

func TestServiceGoes(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	without := func(names ...string) *desired.Balancer {
		cfg := standard()
		cfg.Services = slices.DeleteFunc(cfg.Services, func(s desired.Service) bool { return slices.Contains(names, s.Name) })
		return cfg
	}
	f.mustApply(without("one"))
	f.check(f.forwarded(frameOf(toOne), toOne, "all", "a", "forward_new"), f.run(frameOf(toOne)))

	f.mustApply(without("all", "one")) // removes the VIP
	f.check(refused(frameOf(toOne), "drop_removed_vip", 60), f.run(frameOf(toOne)))
	f.check(refused(frameOf(toAll), "drop_removed_vip", 60), f.run(frameOf(toAll)))

	f.mustApply(standard())
	clear(f.plane.Flows.Entries)
	f.check(f.forwarded(frameOf(toOne), toOne, "one", "o", "forward_new"), f.run(frameOf(toOne)))
}

func TestServiceMoves(t *testing.T) {
	t.Parallel()
	server := srv6Server("s", 1, 1)
	f := open(t, webOf(server))
	f.mustApply(balancerOf(serviceOf("web", vip6, 8080, desired.TCP, desired.SRv6Encap, server)))
	f.check(rejected(frameOf(web), "answer_no_service"), f.run(frameOf(web)))
	moved := flowTo(vip6, 8080, desired.TCP)
	f.check(f.forwarded(frameOf(moved), moved, "web", "s", "forward_new"), f.run(frameOf(moved)))

	f.mustApply(balancerOf(serviceOf("web", vip4, 8080, desired.UDP, desired.SRv6Encap, server)))
	f.check(refused(frameOf(moved), "drop_removed_vip", 60), f.run(frameOf(moved)))
	moved = flowTo(vip4, 8080, desired.UDP)
	f.check(f.forwarded(frameOf(moved), moved, "web", "s", "forward_new"), f.run(frameOf(moved)))
}

func twoServices(a, b netip.Addr) *desired.Balancer {
	return balancerOf(
		serviceOf("a", a, 80, desired.TCP, desired.SRv6Encap, srv6Server("s", 1, 1)),
		serviceOf("b", b, 80, desired.TCP, desired.SRv6Encap, srv6Server("s", 2, 1)),
	)
}

// Two services exchange their VIPs in one reload while packets arrive. Each packet finds a service.
func TestServicesSwapVIPs(t *testing.T) {
	t.Parallel()
	f := open(t, twoServices(vip6, vip6All))
	flows := []dataplane.Flow{web, toOne}
	before := f.counters()
	ctx, cancel := context.WithCancel(t.Context())
	var traffic sync.WaitGroup
	traffic.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			frame := frameOf(flows[i%2])
			if _, err := f.plane.Objects.XdpLb.Run(&ebpf.RunOptions{Data: frame}); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for range 20 {
		f.mustApply(twoServices(vip6All, vip6))
		f.mustApply(twoServices(vip6, vip6All))
	}
	f.mustApply(twoServices(vip6All, vip6))
	cancel()
	traffic.Wait()
	for reason := range difference(before.reasons, f.counters().reasons) {
		if !strings.HasPrefix(reason, "forward_") {
			t.Errorf("packets left as %s", reason)
		}
	}
	clear(f.plane.Flows.Entries)
	f.check(f.forwarded(frameOf(web), web, "b", "s", "forward_new"), f.run(frameOf(web)))
	f.check(f.forwarded(frameOf(toOne), toOne, "a", "s", "forward_new"), f.run(frameOf(toOne)))
}

// A reload that fails half-way leaves everything as it was. Here the servers of the second service
// have no room, after the first service was changed.
func TestFailedReload(t *testing.T) {
	t.Parallel()
	base := func() *desired.Balancer {
		cfg := twoServices(vip6, vip6All)
		cfg.Node.Limits.Servers = 2 // 4 slots
		return cfg
	}
	f := open(t, base())
	flow := web
	f.run(frameOf(flow))
	f.run(frameOf(toOne))
	want := f.configuration()

	cfg := base()
	cfg.Services[0] = serviceOf("a", vip4, 443, desired.UDP, desired.SRv6Encap, srv6Server("other", 3, 1))
	cfg.Services[1].Servers = []desired.Server{
		srv6Server("s", 2, 0), srv6Server("x", 4, 1), srv6Server("y", 5, 1), srv6Server("z", 6, 1),
	}
	cfg.Services = append(cfg.Services, serviceOf("c", vip6, 443, desired.TCP, desired.SRv6Encap, srv6Server("s", 7, 1)))
	err := f.apply(cfg)
	if err == nil || !strings.Contains(err.Error(), "service b") || !strings.Contains(err.Error(), "node.limits.servers") {
		t.Fatalf("error of the reload: %v", err)
	}
	if diff := cmp.Diff(want, f.configuration()); diff != "" {
		t.Errorf("after the reload that failed (-before +after):\n%s", diff)
	}
	f.check(f.forwarded(frameOf(flow), flow, "a", "s", "forward_known"), f.run(frameOf(flow)))
	f.check(f.forwarded(frameOf(toOne), toOne, "b", "s", "forward_known"), f.run(frameOf(toOne)))
	v4 := flowTo(vip4, 443, desired.UDP)
	f.check(refused(frameOf(v4), "pass_not_vip", layer3(frameOf(v4))), f.run(frameOf(v4)))

	// The slots that the failed reload took are free again after sweeps, and not before.
	f.must(f.sweep())
	f.must(f.sweep())
	cfg = base()
	cfg.Services[1].Servers = append(cfg.Services[1].Servers, srv6Server("x", 4, 1), srv6Server("y", 5, 1))
	f.mustApply(cfg)
}

// configuration describes as text how the data path is configured.
func (f *fixture) configuration() map[string]string {
	f.t.Helper()
	out := map[string]string{}
	names, err := f.plane.ServiceLabels()
	f.must(err)
	for _, entry := range f.plane.Services.All() {
		vip, port, protocol := entry.Matches()
		if !entry.IsService() {
			out["VIP "+vip.String()] = ""
			continue
		}
		out["service "+vip.String()+" "+port.String()+" "+string(protocol)] = names[entry.Id].Name
	}
	for slot, key := range f.slots.All() {
		if flags := f.plane.Servers.Flags(slot); flags != 0 {
			state := "in use"
			if flags&dataplane.FlagDrained != 0 {
				state = "drained"
			}
			out["server "+key.Service+"/"+key.Server+" "+f.plane.Servers.Address(slot).String()] = state
		}
	}
	return out
}

// A slot is given to another server only after two sweeps, and with counters of zero.
func TestSlotLifecycle(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1))
	f := open(t, cfg)
	slot := f.slot("web", "s2")
	flow := web
	for f.placed(flow, "web") != "s2" {
		flow = fromPort(flow, flow.Source.Port()+1)
	}
	f.run(frameOf(flow))
	f.mustApply(webOf(srv6Server("s1", 1, 1), srv6Server("s3", 3, 1)))
	if got := f.slot("web", "s3"); got == slot {
		t.Fatalf("slot %d has another server at once", slot)
	}
	if _, port, ok := f.plane.Servers.NextHop(slot); ok {
		t.Errorf("a slot without a server holds on to port %d", port)
	}
	f.must(f.sweep())
	if entry := f.entry(flow); entry != 0 {
		t.Errorf("flow of the server that went is still there after a sweep: %#x", entry)
	}
	f.mustApply(webOf(srv6Server("s1", 1, 1), srv6Server("s3", 3, 1), srv6Server("s4", 4, 1)))
	if got := f.slot("web", "s4"); got == slot {
		t.Fatalf("slot %d has another server after one sweep", slot)
	}
	f.must(f.sweep())
	f.mustApply(webOf(srv6Server("s1", 1, 1), srv6Server("s3", 3, 1), srv6Server("s5", 5, 1)))
	if got := f.slot("web", "s5"); got != slot {
		t.Errorf("slot %d is free after two sweeps, but s5 has %d", slot, got)
	}
	if got := f.counters().servers["web/s5"]; got != (tally{}) {
		t.Errorf("a new server begins with counters of %+v", got)
	}
}

// A server in the slot of a removed server gets none of the removed server's flows.
func TestAnotherServicesSlotIsNeverUsed(t *testing.T) {
	t.Parallel()
	f := open(t, twoServices(vip6, vip6All))
	entry := entryOf(f.signature(web), f.slot("b", "s"), dataplane.FlowEstablished, f.now())
	f.bucket(web)[3] = entry
	frame := frameOf(web, packet.Flags(packet.ACK))
	f.check(f.forwarded(frame, web, "a", "s", "forward_recover"), f.run(frame))
}

// A server whose flags a reload has cleared keeps no flow, even if it still has a next hop. A
// process can be killed between the two steps.
func TestRetiredServerKeepsNoFlow(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	other := f.otherThanPlaced(web, "web")
	f.enter(web, "web", other, stateEstablished)
	f.plane.Servers.SetFlags(f.slot("web", other), 0)
	frame := frameOf(web, packet.Flags(packet.ACK))
	f.check(f.forwarded(frame, web, "web", f.placed(web, "web"), "forward_recover"), f.run(frame))
}

// A reload that changes nothing for a service does not replace its candidate table.
func TestUnchangedServiceKeepsItsTable(t *testing.T) {
	t.Parallel()
	f := open(t, standard())
	before := f.services.byName["web"].rule.Flags
	f.mustApply(standard())
	if after := f.services.byName["web"].rule.Flags; after != before {
		t.Errorf("table %d, was %d", after, before)
	}
	cfg := standard()
	cfg.Services[0].Servers = cfg.Services[0].Servers[1:]
	f.mustApply(cfg)
	if f.services.byName["web"].rule.Flags == before {
		t.Error("with a server fewer the table is the same")
	}
}

// A change of one service does not touch the others. A change of the balancer's locator or
// addresses touches all of them, because one of these is in the packets to each server.
func TestReconcileChangesOnlyDifferences(t *testing.T) {
	t.Parallel()
	f := open(t, standard())
	members := func() map[string]*member {
		all := map[string]*member{}
		for name, svc := range f.services.byName {
			all[name] = svc.members[len(svc.members)-1]
		}
		return all
	}
	requireChanged := func(what string, before map[string]*member, changed func(service string) bool) {
		t.Helper()
		for name, now := range members() {
			if (now != before[name]) != changed(name) {
				t.Errorf("%s: service %s changed: %v, want %v", what, name, now != before[name], changed(name))
			}
		}
	}
	before := members()
	drained := func() *desired.Balancer {
		cfg := standard()
		cfg.Services[0].Servers = slices.Clone(cfg.Services[0].Servers)
		cfg.Services[0].Servers[0].Drained = true
		return cfg
	}
	cfg := drained()
	f.mustApply(cfg)
	requireChanged("drained server", before, func(service string) bool { return service == cfg.Services[0].Name })

	before = members()
	next := drained()
	next.Node.Locator = netip.MustParsePrefix("fd00:6c:0:99::/64")
	f.mustApply(next)
	requireChanged("locator", before, func(string) bool { return true })

	before = members()
	next = drained()
	next.Node.Locator = netip.MustParsePrefix("fd00:6c:0:99::/64")
	next.Node.Addresses = []netip.Addr{netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("fd00:a::9")}
	f.mustApply(next)
	requireChanged("addresses", before, func(string) bool { return true })
}

// While candidate tables are replaced, each new flow is placed by the old table or by the new one,
// and never by a mixture of both.
func TestTablesAreSwappedWhole(t *testing.T) {
	t.Parallel()
	tableOf := func(buckets int, weights ...uint32) *desired.Balancer {
		cfg := webOf()
		for i, weight := range weights {
			cfg.Services[0].Servers = append(cfg.Services[0].Servers, srv6Server(fmt.Sprintf("s%d", i), uint8(i+1), weight))
		}
		cfg.Services[0].Buckets = buckets
		cfg.Node.Limits.Flows = 1 << 14
		return cfg
	}
	versions := []*desired.Balancer{tableOf(64, 1, 1, 1, 1, 1, 1), tableOf(4099, 9, 1, 0, 7, 0, 2)}
	f := open(t, versions[0])
	var flows []dataplane.Flow
	allowed := map[dataplane.Flow]map[packet.MAC]bool{}
	for port := range uint16(500) {
		flow := fromPort(web, port+1)
		flows, allowed[flow] = append(flows, flow), map[packet.MAC]bool{}
	}
	for i := len(versions) - 1; i >= 0; i-- {
		f.mustApply(versions[i])
		for _, flow := range flows {
			allowed[flow][f.encap(flow, "web", f.placed(flow, "web")).NextHop] = true
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	var traffic sync.WaitGroup
	traffic.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			flow := flows[i%len(flows)]
			clear(f.bucket(flow))
			out := make([]byte, 256)
			verdict, err := f.plane.Objects.XdpLb.Run(&ebpf.RunOptions{Data: frameOf(flow), DataOut: out})
			if err != nil || verdict != verdictRedirect || !allowed[flow][packet.MAC(out)] {
				t.Errorf("%v: verdict %d, to %v of %v, %v", flow.Source, verdict, packet.MAC(out), allowed[flow], err)
				return
			}
		}
	})
	for i := range 40 {
		f.mustApply(versions[1-i%2])
	}
	cancel()
	traffic.Wait()
}

// A server that leaves the candidate table gets new flows until no packet uses the former table.
func TestServerLeavesAfterTheSwap(t *testing.T) {
	t.Parallel()
	f := open(t, webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1)))
	next := webOf(srv6Server("s1", 1, 0), srv6Server("s2", 2, 1))
	generations := f.generations.Next(next.Services)
	slot := f.slot("web", "s1")
	takes := func() bool {
		return f.plane.Servers.Flags(slot)&(dataplane.FlagDrained|dataplane.FlagFailing) == 0
	}
	before := f.services.byName["web"].rule.Table()
	f.must(f.services.placeOne(newServiceState(&next.Services[0], &next.Node, generations["web"])))
	if f.services.byName["web"].rule.Table() == before {
		t.Fatal("the table was not replaced")
	}
	if !takes() {
		t.Error("s1 gets no new flows while packets may use the former table")
	}
	f.must(f.services.settle())
	if takes() {
		t.Error("s1 gets new flows although no packet uses the former table")
	}
}

// A service may have no servers. New flows are rejected, and counted, until servers appear. When the
// servers are removed again, the SYN of a flow that one of them had is rejected as well.
func TestServiceWithoutServers(t *testing.T) {
	t.Parallel()
	syn := frameOf(web)
	f := open(t, webOf())
	f.check(rejected(syn, "answer_no_server"), f.run(syn))
	f.mustApply(webOf(srv6Server("s1", 1, 1)))
	f.check(f.offered(syn, web, "web", "forward_new", srv6.Deliver, "s1"), f.run(syn))
	f.mustApply(webOf())
	f.check(rejected(syn, "answer_no_server"), f.run(syn))
	f.mustApply(webOf(srv6Server("s2", 2, 1)))
	f.check(f.offered(syn, web, "web", "forward_new", srv6.Deliver, "s2"), f.run(syn))
}

// Health, next hops and draining change no candidate table and begin no generation, and a change of
// servers does.
func TestWhatBeginsAGeneration(t *testing.T) {
	t.Parallel()
	servers := []desired.Server{srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 1)}
	f := open(t, webOf(servers...))
	state := func() (table uint8, label dataplane.ServiceLabel) {
		labels, err := f.plane.ServiceLabels()
		f.must(err)
		svc := f.services.byName["web"]
		return svc.rule.Table(), labels[svc.id]
	}
	table, label := state()
	requireSame := func(when string) {
		t.Helper()
		if nowTable, now := state(); nowTable != table || now != label {
			t.Errorf("%s: table %d of %+v, before %d of %+v", when, nowTable, now, table, label)
		}
	}
	f.setHealth("web", "s1", false)
	requireSame("failing")
	f.setHealth("web", "s1", true)
	f.via["s2"] = ""
	f.route()
	requireSame("without a next hop")
	f.silent["s3"] = true
	f.route()
	requireSame("silent")
	f.via, f.silent = map[string]string{}, map[string]bool{}
	f.route()
	drained := slices.Clone(servers)
	drained[0].Drained = true
	f.mustApply(webOf(drained...))
	requireSame("drained")
	f.mustApply(webOf(servers[1:]...))
	if nowTable, now := state(); nowTable == table || now.Generation != label.Generation+1 || now.Digest == label.Digest {
		t.Errorf("after a change of servers: table %d of %+v, before %d of %+v", nowTable, now, table, label)
	}
}

// A former candidate table is removed by the sweep after the change.
func TestFormerTableIsRemoved(t *testing.T) {
	t.Parallel()
	f := open(t, webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1)))
	count := func() (tables int) {
		svc := f.services.byName["web"]
		for number := range uint32(2) {
			if f.plane.Holds(2*svc.id+number, &dataplane.Rows{}) {
				tables++
			}
		}
		return tables
	}
	f.mustApply(webOf(srv6Server("s1", 1, 1)))
	if got := count(); got != 2 {
		t.Errorf("%d tables after the change", got)
	}
	f.must(f.sweep())
	if got := count(); got != 1 {
		t.Errorf("%d tables after the sweep", got)
	}
	f.check(f.offered(frameOf(web), web, "web", "forward_new", srv6.Deliver, "s1"), f.run(frameOf(web)))
}

// The candidate tables of a removed service are removed with it.
func TestTablesOfARemovedService(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1))
	f := open(t, balancerOf(cfg.Services[0], serviceOf("dns", vip6, 53, desired.UDP, desired.SRv6Encap, srv6Server("s1", 1, 1))))
	id := f.services.byName["dns"].id
	f.mustApply(cfg)
	for number := range uint32(2) {
		if f.plane.Holds(2*id+number, &dataplane.Rows{}) {
			t.Errorf("table %d of the removed service is there", number)
		}
	}
}

// If only some of several candidate tables can be put in place, those have pins, and no others.
func TestFailedBatchOfTablesLeavesNoPins(t *testing.T) {
	t.Parallel()
	f := open(t, webOf(srv6Server("s1", 1, 1)))
	tables := f.plane.Objects.Tables
	pinned := func() []string {
		paths, err := filepath.Glob(filepath.Join(datapath.Dir(f.cfg.Node.Instance), "by_number", "map_*"))
		f.must(err)
		slices.Sort(paths)
		return paths
	}
	f.must(f.plane.Settle())
	before := pinned()
	var none dataplane.Rows
	last := tables.MaxEntries() // the first number that no table can have
	err := f.plane.Install([]dataplane.NumberedRows{{Number: last - 1, Rows: &none}, {Number: last, Rows: &none}})
	if err == nil {
		t.Fatal("no error: nothing is tested")
	}
	var spare uint32
	f.must(tables.Lookup(last-1, &spare))
	after := pinned()
	if len(after) != len(before) || !slices.ContainsFunc(after, func(path string) bool {
		return strings.HasSuffix(path, fmt.Sprint("map_", spare))
	}) {
		t.Errorf("the pins are %v, and %v before; the table in place is %d", after, before, spare)
	}
}

// A reload that fails while it removes a service is undone: the service gets its candidate table
// and its label back.
func TestFailedRemovalIsUndone(t *testing.T) {
	t.Parallel()
	less := webOf(srv6Server("s1", 1, 1))
	dns := serviceOf("dns", vip6, 53, desired.UDP, desired.SRv6Encap, srv6Server("s1", 1, 1))
	f := open(t, balancerOf(less.Services[0], dns))

	writable := f.plane.Objects.ServiceLabels
	pin := filepath.Join(datapath.Dir(f.cfg.Node.Instance), "service_labels")
	readOnly, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true})
	f.must(err)
	defer readOnly.Close()
	f.plane.Objects.ServiceLabels = readOnly
	err = f.reconcile(less, nil, f.generations.Next(less.Services))
	f.plane.Objects.ServiceLabels = writable
	if err == nil {
		t.Fatal("the label was removed: nothing is tested")
	}
	f.must(f.reconcile(f.cfg, nil, f.generations))
	flow := flowTo(vip6, 53, desired.UDP)
	f.route()
	f.check(f.forwarded(frameOf(flow), flow, "dns", "s1", "forward_new"), f.run(frameOf(flow)))
	if f.labels()["dns"].Generation != 1 {
		t.Errorf("labels: %v", f.labels())
	}
}
