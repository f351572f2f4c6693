// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/health"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// A process that ends and the next one see the same balancer. Packets between the two are forwarded
// as before.
func TestRestart(t *testing.T) {
	t.Parallel()
	s1, s2, s3 := srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 1)
	cfg := webOf(s1, s2, s3)
	cfg.Node.Limits.Flows = 1 << 14
	f := open(t, cfg)
	servers := f.establish(web)
	identity, counters, slots := f.identity, f.counters(), maps.Collect(f.slots.All())

	f.stop()
	f.start(cfg)
	if f.identity != identity {
		t.Error("the hash keys are others")
	}
	if diff := cmp.Diff(counters, f.counters(), cmp.AllowUnexported(counterType)); diff != "" {
		t.Errorf("counters (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(slots, maps.Collect(f.slots.All()), cmp.AllowUnexported(dataplane.ServerKey{}), addrComparer); diff != "" {
		t.Errorf("slots (-before +after):\n%s", diff)
	}
	f.stay(servers, "")

	// The next process has another configuration.
	f.stop()
	next := webOf(s1, s3)
	next.Node = cfg.Node
	f.start(next)
	f.route()
	f.stay(servers, "web/s2")
	f.places([]desired.Server{s1, s3})
}

var (
	counterType  = counters{}
	addrComparer = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
)

// A first start that does not attach leaves no pins.
func TestFirstStartUndone(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	cfg := standard()
	cfg.Node.Instance = f.cfg.Node.Instance + "-undone"
	b, err := New(cfg, desired.Secrets{}, slog.New(slog.DiscardHandler))
	f.must(err)
	f.must(b.Close())
	if _, err := os.Stat(datapath.Dir(cfg.Node.Instance)); !os.IsNotExist(err) {
		t.Errorf("%s after a start that did not attach: %v", datapath.Dir(cfg.Node.Instance), err)
	}
}

// All servers get other addresses while no process runs. There is room for the new servers beside
// the old ones.
func TestRestartWithOtherServers(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1))
	cfg.Node.Limits.Servers = 2
	f := open(t, cfg)
	f.stop()
	cfg.Services = webOf(srv6Server("s1", 11, 1), srv6Server("s2", 12, 1)).Services
	f.start(cfg)
	f.route()
	if got := f.run(frameOf(web)); reasonOf(got) != "forward_new" {
		t.Errorf("SYN: %s", reasonOf(got))
	}
}

// Processes that end before they sweep do not use up the slots.
func TestRestartsWithOthersAgainAndAgain(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1))
	cfg.Node.Limits.Servers = 2
	f := open(t, cfg)
	f.run(frameOf(web))
	for i := range uint8(5) {
		f.stop()
		cfg.Services = webOf(srv6Server("s1", 11+i, 1), srv6Server("s2", 21+i, 1)).Services
		f.start(cfg)
		// The first of these starts retires the server itself, so its flows are not yet swept.
		if known := f.entry(web) != 0; known != (i == 0) {
			t.Errorf("start %d: the flow of a server that went is known: %v", i, known)
		}
	}
}

// A server that was removed and is configured again by the next process gets its flows back.
func TestServerComesBackAfterRestart(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1))
	first := cfg.Services
	f := open(t, cfg)
	f.run(frameOf(web))
	for _, services := range [][]desired.Service{webOf(srv6Server("s2", 2, 1)).Services, first} {
		f.stop()
		cfg.Services = services
		f.start(cfg)
	}
	f.route()
	if got := f.run(frameOf(web, packet.Flags(packet.ACK))); reasonOf(got) != "forward_known" {
		t.Errorf("%s", reasonOf(got))
	}
}

// After a restart, a server that fails its checks gets no new flows either.
func TestRestartRemembersHealth(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1))
	cfg.Services[0].Health = &desired.Health{TCP: &desired.TCPCheck{Port: 80}, Interval: time.Second, Rise: 2, Fall: 3}
	f := open(t, cfg)
	f.setHealth("web", "s1", false)
	f.setHealth("web", "s2", true)
	f.stop()
	more := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 0))
	more.Node.Instance, more.Services[0].Health = cfg.Node.Instance, cfg.Services[0].Health
	f.start(more)
	f.route()
	for port := range uint16(50) {
		if got := serverOf(f.run(frameOf(fromPort(web, 20000+port)))); got != "web/s2" {
			t.Fatalf("a new flow goes to %s", got)
		}
	}
	want := map[string]health.State{"s1": health.Failing, "s2": health.Healthy, "s3": health.Unchecked}
	targets, _ := f.services.healthTargets(more.Services)
	for _, target := range targets {
		if target.State != want[target.Server] {
			t.Errorf("%s: state %d, want %d", target.Server, target.State, want[target.Server])
		}
	}
}

// After a restart, the next hops are known, even if the kernel has forgotten them.
func TestRestartKnowsNextHops(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1))
	f := open(t, cfg)
	f.stop()
	f.start(webWith(cfg, srv6Server("s3", 3, 1)))
	want := map[netip.Addr]nexthop.Hop{}
	for _, s := range cfg.Services[0].Servers {
		to := target(&s)
		want[to] = nexthop.Hop{MAC: hopMAC(to), Link: nexthop.Link{Index: f.ifindex["out"]}}
	}
	if diff := cmp.Diff(want, f.nextHops(), addrComparer); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// After a restart, it is known which next hops did not answer, and which servers had routes of
// their own, even if these are lost. A server that was removed and added again is a new one.
func TestRestartKnowsWays(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 1))
	f := open(t, cfg)
	f.silent["s1"], f.via["s2"], f.via["s3"], f.via["s4"] = true, "", "", ""
	f.route()
	without := webOf(cfg.Services[0].Servers[:2]...)
	without.Node = cfg.Node
	f.mustApply(without)
	f.mustApply(cfg)
	f.mustApply(webWith(cfg, srv6Server("s4", 4, 1)))
	want := map[netip.Addr]nexthop.Hop{}
	for _, m := range f.services.members() {
		hop := nexthop.Hop{MAC: hopMAC(target(&m.Server)), Link: f.link("out")}
		switch m.Name {
		case "s1":
			hop.Silent = true
		case "s2":
			hop = nexthop.Hop{}
		case "s3":
			continue
		case "s4":
			hop.Default = true
			f.hops[target(&m.Server)] = hop
		}
		hop.Link = nexthop.Link{Index: hop.Link.Index}
		want[target(&m.Server)] = hop
	}
	f.applyHops()
	for _, when := range []string{"before", "after"} {
		if diff := cmp.Diff(want, f.nextHops(), addrComparer); diff != "" {
			t.Errorf("%s the restart (-want +got):\n%s", when, diff)
		}
		next := f.cfg
		f.stop()
		f.start(next)
	}
}

// webWith returns the configuration with another server.
func webWith(cfg *desired.Balancer, server desired.Server) *desired.Balancer {
	next := webOf(append(slices.Clone(cfg.Services[0].Servers), server)...)
	next.Node = cfg.Node
	return next
}

// A build that counts other reasons, or the same in another order, takes over all flows
// nevertheless. Scrapes read the counters of this build from the start on, even before its program
// is attached.
func TestUpgradeWithOtherReasons(t *testing.T) {
	t.Parallel()
	spec, reasons, err := dataplane.LoadSpec()
	testhost.Must(t, err)
	fewer := spec.Maps[dataplane.ReasonsMap].Copy()
	fewer.Name, fewer.MaxEntries = dataplane.ReasonsMap, 3
	datapath.NameAfter(fewer, reasons[:3])
	reordered := spec.Maps[dataplane.ReasonsMap].Copy()
	reordered.Name = dataplane.ReasonsMap
	slices.Reverse(reasons)
	datapath.NameAfter(reordered, reasons)
	counted := make([]dataplane.Counter, ebpf.MustPossibleCPU())
	counted[0].Packets = 7 // in this order it belongs to another reason
	reordered.Contents = []ebpf.MapKV{{Key: uint32(dataplane.ForwardKnown), Value: counted}}
	byServer := spec.Maps[dataplane.ServerCountersMap].Copy()
	byServer.Name = dataplane.ServerCountersMap
	datapath.NameAfter(byServer, reasons)
	for name, other := range map[string]*ebpf.MapSpec{
		"fewer": fewer, "reordered": reordered, "reordered by server": byServer,
	} {
		t.Run(name, func(t *testing.T) {
			cfg := standard()
			f := open(t, cfg)
			server := f.placed(web, "web")
			f.run(frameOf(web))
			if other == byServer {
				other.MaxEntries = f.plane.Objects.ServerCounters.MaxEntries()
				f.repin(dataplane.ServerCountersMap, other)
			} else {
				f.repin(dataplane.ReasonsMap, other)
			}
			f.stop()
			f.start(cfg)
			registry := newRegistry(f)
			ack := frameOf(web, packet.Flags(packet.ACK))
			f.check(f.forwarded(ack, web, "web", server, "forward_known"), f.run(ack))
			if got, want := expose(t, registry), `segue_lb_packets_total{reason="forward_known"} 1`; !strings.Contains(got, want+"\n") {
				t.Errorf("no line %q in\n%s", want, got)
			}
		})
	}
}

// The numbers of removed services are given out again, and no two services get the same number.
func TestNumbersOfServices(t *testing.T) {
	t.Parallel()
	f := open(t, twoServices(vip6, vip6All))
	named := func(names ...string) *desired.Balancer {
		cfg := twoServices(vip6, vip6All)
		for i, name := range names {
			cfg.Services[i].Name = name
		}
		cfg.Node = f.cfg.Node
		return cfg
	}
	most := f.plane.Objects.ServiceLabels.MaxEntries()
	for _, names := range [][]string{{"a", "c"}, {"c", "d"}, {"e", "f"}} {
		cfg := named(names...)
		f.mustApply(cfg)
		f.stop()
		f.start(cfg)
		numbers := append([]uint32{f.services.byName[names[0]].id, f.services.byName[names[1]].id}, f.services.free...)
		slices.Sort(numbers)
		if uint32(len(numbers)) != most || uint32(len(slices.Compact(numbers))) != most {
			t.Errorf("with %v there are %d numbers, %d of them free; want %d different", names,
				len(numbers), len(f.services.free), most)
		}
	}
}

// A service and a server that were removed while no process ran are removed by the next process.
func TestRestartWithoutService(t *testing.T) {
	t.Parallel()
	f := open(t, twoServices(vip6, vip6All))
	cfg := twoServices(vip6, vip6All)
	cfg.Node, cfg.Services = f.cfg.Node, cfg.Services[:1]
	f.stop()
	f.start(cfg)
	f.check(refused(frameOf(toOne), "drop_removed_vip", 60), f.run(frameOf(toOne)))
	f.check(f.forwarded(frameOf(web), web, "a", "s", "forward_new"), f.run(frameOf(web)))
}

// A process reads the generations that the process before it has saved. So it has the former
// candidates as well, at which older flows are recovered. A reload that changes something else
// keeps them.
func TestRestartKeepsFormerCandidates(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 2))
	flow, left := f.flowThatMoves("s3")
	f.cfg.Node.State = t.TempDir()
	f.saveGenerations()
	asked := append(f.row(flow, "web"), left...)
	ack := frameOf(flow, packet.Flags(packet.ACK))
	check := func(when string) {
		t.Helper()
		if diff := cmp.Diff(f.offered(ack, flow, "web", "forward_recover", srv6.RecoverStickiness, asked...), f.run(ack)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	check("before the restart")
	cfg := f.cfg
	f.stop()
	f.start(cfg)
	check("after the restart")
	f.route()
	check("with next hops")
	random := huntingWithout(2, "s3")
	random.Node.State = f.cfg.Node.State
	for i := range random.Services {
		random.Services[i].Selection = desired.SelectRandom
	}
	f.mustApply(random)
	check("after a reload with another selection")
}

// A process can end in the middle of a reload. If it has left a service with two ports, only the
// configured one stays.
func TestRestartAfterHalfAMove(t *testing.T) {
	t.Parallel()
	f := open(t, twoServices(vip6, vip6All))
	entries := f.plane.Services.All()
	moved := *f.service("a")
	moved.Port = 8080
	entry := dataplane.ServiceKey(&moved)
	entry.Id, entry.Rule = f.services.byName["a"].id, f.services.byName["a"].rule
	f.must(f.plane.Services.Replace(append(entries, entry), f.plane.Settle))
	cfg := f.cfg
	f.stop()
	f.start(cfg)
	flow := flowTo(vip6, 8080, desired.TCP)
	f.check(rejected(frameOf(flow), "answer_no_service"), f.run(frameOf(flow)))
	f.check(f.forwarded(frameOf(web), web, "a", "s", "forward_new"), f.run(frameOf(web)))
}

// A start that fails keeps the results of the health checks.
func TestFailedStartRemembersHealth(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1))
	cfg.Services[0].Health = &desired.Health{TCP: &desired.TCPCheck{Port: 80}, Interval: time.Second, Rise: 2, Fall: 3}
	cfg.Node.Limits.Servers = 2
	f := open(t, cfg)
	f.setHealth("web", "s1", false)
	slot := f.slot("web", "s1")
	tooMany := *cfg
	tooMany.Services = webOf(srv6Server("s1", 1, 1), srv6Server("x", 3, 1), srv6Server("y", 4, 1), srv6Server("z", 5, 1)).Services
	tooMany.Services[0].Health = cfg.Services[0].Health
	if b, err := New(&tooMany, desired.Secrets{}, slog.New(slog.DiscardHandler)); err == nil {
		_ = b.Close()
		t.Fatal("no error")
	}
	if f.plane.Servers.Flags(slot)&dataplane.FlagFailing == 0 {
		t.Error("s1 is not held to be failing any more")
	}
}

// Other limits need other tables. A start with other limits is refused and changes nothing.
func TestOtherLimitsAreRefused(t *testing.T) {
	t.Parallel()
	f := open(t, webOf(srv6Server("s", 1, 1)))
	f.run(frameOf(web))
	want := f.configuration()
	for name, change := range map[string]func(*desired.Limits){
		"flows":   func(l *desired.Limits) { l.Flows *= 4 },
		"servers": func(l *desired.Limits) { l.Servers++ },
	} {
		cfg := webOf(srv6Server("other", 2, 1))
		cfg.Node = f.cfg.Node
		change(&cfg.Node.Limits)
		cfg.Node.Seed++
		b, err := New(cfg, desired.Secrets{}, slog.New(slog.DiscardHandler))
		if err == nil {
			_ = b.Close()
			t.Fatalf("%s: no error", name)
		}
		if message := err.Error(); !strings.Contains(message, "limits") || !strings.Contains(message, "segue lb detach "+cfg.Node.Instance) {
			t.Errorf("%s: %v", name, err)
		}
		var identity dataplane.Identity
		f.must(f.plane.Objects.Identity.Lookup(uint32(0), &identity))
		if identity != f.identity {
			t.Errorf("%s: the hash keys changed", name)
		}
	}
	if diff := cmp.Diff(want, f.configuration()); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
	f.check(f.forwarded(frameOf(web), web, "web", "s", "forward_known"), f.run(frameOf(web)))
}
