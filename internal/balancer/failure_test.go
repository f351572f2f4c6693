// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/health/probe"
	"github.com/segue-lb/segue/internal/packet"
)

// withProbes makes the servers of services have agents, which pass packets on.
func withProbes(cfg *desired.Balancer) *desired.Balancer {
	yes := true
	for i := range cfg.Services {
		cfg.Services[i].Probe = &yes
	}
	return cfg
}

// The flows of a server that fails its checks stay or leave it, by rule and protocol.
func TestFlowsOfFailedServers(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		rule     desired.OnFailure
		protocol desired.Protocol
		agents   bool
		stays    bool
	}{
		{desired.OnFailureKeep, desired.TCP, false, true},
		{desired.OnFailureKeep, desired.TCP, true, true},
		{desired.OnFailureKeep, desired.UDP, false, true},
		{desired.OnFailureMoveUDP, desired.TCP, true, true},
		{desired.OnFailureMoveUDP, desired.UDP, false, false},
		{desired.OnFailureReset, desired.TCP, false, false},
		{desired.OnFailureReset, desired.TCP, true, false},
		{desired.OnFailureReset, desired.UDP, false, false},
	} {
		t.Run(strings.Join([]string{string(test.rule), string(test.protocol)}, " "), func(t *testing.T) {
			service := serviceOf("web", vip6, 80, test.protocol, desired.SRv6Encap,
				srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 1))
			service.OnFailure = test.rule
			cfg := balancerOf(service)
			if test.agents {
				cfg = withProbes(cfg)
			}
			f := open(t, cfg)
			flow := flowTo(vip6, 80, test.protocol)
			servers := f.establish(flow)
			f.setHealth("web", "s1", false)
			f.requireVisits(servers, "web/s1", test.stays)
			// A change of another service changes nothing.
			cfg = balancerOf(service, serviceOf("other", vip6, 81, desired.TCP, desired.SRv6Encap, srv6Server("s1", 1, 1)))
			if test.agents {
				cfg = withProbes(cfg)
			}
			f.mustApply(cfg)
			f.requireVisits(servers, "web/s1", test.stays)
			fresh := fromPort(flow, 9999)
			for port := range uint16(100) {
				if got := serverOf(f.run(frameOf(fromPort(fresh, 30000+port)))); got == "web/s1" || got == "" {
					t.Fatalf("a new flow goes to %q", got)
				}
			}
			f.requireCondition("web", "s1", inspect.ServerFailing)
			if ignored := f.snapshot().Services[0].Ignored; len(ignored) > 0 {
				t.Errorf("ignored: %v", ignored)
			}
			// Flows that have not sent a packet meanwhile continue when the server is well again.
			f.forgetFlows()
			f.setHealth("web", "s1", true)
			servers = f.establish(flow)
			f.setHealth("web", "s1", false)
			f.setHealth("web", "s1", true)
			f.requireVisits(servers, "web/s1", true)
		})
	}
}

// The flows of a server whose application has stopped listening, or whose agent is of another
// version, stay, whatever the rule: the server still serves them. New flows go elsewhere.
func TestFlowsOfServersThatStillServe(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		fault     probe.Fault
		condition inspect.Condition
		rule      desired.OnFailure
		protocol  desired.Protocol
	}{
		{probe.Refusing, inspect.ServerRefusing, desired.OnFailureKeep, desired.TCP},
		{probe.Refusing, inspect.ServerRefusing, desired.OnFailureReset, desired.TCP},
		{probe.OtherVersion, inspect.ServerIncompatible, desired.OnFailureReset, desired.TCP},
		{probe.OtherVersion, inspect.ServerIncompatible, desired.OnFailureReset, desired.UDP},
		{probe.OtherVersion, inspect.ServerIncompatible, desired.OnFailureMoveUDP, desired.UDP},
	} {
		t.Run(fmt.Sprint(test.condition, test.rule, test.protocol), func(t *testing.T) {
			cfg := probedWeb(3)
			cfg.Services[0].OnFailure, cfg.Services[0].Protocol = test.rule, test.protocol
			f := open(t, cfg)
			flow := flowTo(vip6, 80, test.protocol)
			servers := f.establish(flow)
			f.find(test.fault, "s1")
			f.requireVisits(servers, "web/s1", true)
			for port := range uint16(100) {
				if got := serverOf(f.run(frameOf(fromPort(flow, 30000+port)))); got == "web/s1" || got == "" {
					t.Fatalf("a new flow goes to %q", got)
				}
			}
			f.requireCondition("web", "s1", test.condition)
		})
	}
}

// requireVisits requires that the packets of the flows of a server go to this server first, or that
// none of them visits it. All other flows must stay.
func (f *fixture) requireVisits(servers map[dataplane.Flow]string, failed string, stays bool) {
	f.t.Helper()
	seen := 0
	for flow, server := range servers {
		got := f.run(frameOf(flow, packet.Flags(packet.ACK)))
		visited := slices.Collect(maps.Keys(got.Servers))
		switch {
		case server != failed || stays:
			if serverOf(got) != server {
				f.t.Fatalf("a flow of %s goes to %v", server, visited)
			}
		case serverOf(got) == failed || serverOf(got) == "":
			f.t.Fatalf("a flow of the failed server goes to %v", visited)
		}
		if server == failed {
			seen++
		}
	}
	if seen == 0 {
		f.t.Fatal("the server had no flows")
	}
}

func (f *fixture) snapshot() *inspect.Snapshot {
	f.t.Helper()
	view, err := f.View()
	f.must(err)
	defer view.Close()
	s, err := view.Snapshot()
	f.must(err)
	return s
}

func (f *fixture) requireCondition(service, server string, want inspect.Condition) {
	f.t.Helper()
	for _, svc := range f.snapshot().Services {
		for _, s := range svc.Servers {
			if svc.Name == service && s.Name == server && s.Condition != want {
				f.t.Errorf("%s of %s is %s, want %s", server, service, s.Condition, want)
			}
		}
	}
}

// If all servers have failed, a service uses all of them, or rejects new flows.
func TestAllServersFailed(t *testing.T) {
	t.Parallel()
	for _, rule := range []desired.AllFailed{desired.AllFailedUse, desired.AllFailedRefuse} {
		t.Run(string(rule), func(t *testing.T) {
			cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("drained", 3, 0))
			cfg.Services[0].AllFailed = rule
			f := open(t, cfg)
			servers := f.establish(web)
			f.setHealth("web", "s1", false)
			f.hush(f.slot("web", "s2"))
			f.silent["s2"] = true
			f.route()
			refuses := rule == desired.AllFailedRefuse
			frame := frameOf(fromPort(web, 31000))
			if got := f.run(frame); refuses {
				f.check(rejected(frame, "answer_no_server"), got)
			} else if serverOf(got) == "" {
				t.Error("a new flow is dropped")
			}
			f.requireVisits(servers, "web/s1", true)
			snapshot := f.snapshot().Services[0]
			if snapshot.Refuses != refuses || snapshot.TakesFlows == refuses {
				t.Errorf("refuses %v, takes flows %v", snapshot.Refuses, snapshot.TakesFlows)
			}
			var log bytes.Buffer
			f.services.logChanges(slog.New(slog.NewTextHandler(&log, nil)))
			if said := strings.Contains(log.String(), "new connections are REFUSED"); said != refuses {
				t.Errorf("logged:\n%s", &log)
			}
			f.setHealth("web", "s1", true)
			if got := serverOf(f.run(frameOf(fromPort(web, 32000)))); got != "web/s1" {
				t.Errorf("when s1 is well again, a new flow goes to %q", got)
			}
			log.Reset()
			f.services.logChanges(slog.New(slog.NewTextHandler(&log, nil)))
			if said := strings.Contains(log.String(), "takes new connections again"); said != refuses {
				t.Errorf("logged:\n%s", &log)
			}
		})
	}
}

// A service whose servers are all drained refuses nothing: nobody wants it to serve.
func TestDrainedIsNotRefused(t *testing.T) {
	t.Parallel()
	cfg := webOf(srv6Server("s1", 1, 0))
	cfg.Services[0].AllFailed = desired.AllFailedRefuse
	f := open(t, cfg)
	f.setHealth("web", "s1", false)
	if f.snapshot().Services[0].Refuses {
		t.Error("refuses")
	}
}

// A server that was unfit takes new flows in a growing share of ticks, in every placement that does
// not infer. It keeps its flows meanwhile.
func TestRecoveredServersStartSlowly(t *testing.T) {
	t.Parallel()
	slow := 2 * time.Second
	for _, placement := range []desired.Placement{
		desired.PlacementHash, desired.PlacementHunt, desired.PlacementRoundRobin,
	} {
		t.Run(string(placement), func(t *testing.T) {
			cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1))
			svc := &cfg.Services[0]
			svc.Placement, svc.SlowStart = placement, &slow
			if placement == desired.PlacementHunt {
				svc.Selection = desired.SelectConsistent
			}
			f := open(t, cfg)
			if len(f.services.starting) > 0 {
				t.Error("a new server starts slowly")
			}
			f.setHealth("web", "s1", false)
			f.setHealth("web", "s1", true)
			start := f.services.byName["web"].member("s1").slow.since
			if start.IsZero() {
				t.Fatal("the server does not start slowly")
			}
			f.requireCondition("web", "s1", inspect.ServerStarting)
			slot, ticks := f.slot("web", "s1"), 0
			var takes []int // in each quarter of the time
			for at := time.Duration(0); at < slow; at += slowTick {
				if at%(slow/4) == 0 {
					takes = append(takes, 0)
				}
				f.services.tickSlowStarts(start.Add(at))
				if f.plane.Servers.TakesFlows(slot) {
					takes[len(takes)-1]++
				}
				f.requireCondition("web", "s1", inspect.ServerStarting)
				ticks++
			}
			if !slices.IsSorted(takes) || takes[0] > 1 || takes[3] < 4 {
				t.Errorf("takes flows in %v ticks, of %d in each quarter", takes, ticks/4)
			}
			f.services.tickSlowStarts(start.Add(slow))
			f.requireCondition("web", "s1", inspect.ServerUnchecked)
			if len(f.services.starting) > 0 || !f.plane.Servers.TakesFlows(slot) {
				t.Error("the slow start does not end")
			}
		})
	}
}

// A server that only lacked a next hop, as a new one may, does not start slowly.
func TestResolvedServersDoNotStartSlowly(t *testing.T) {
	t.Parallel()
	slow := time.Minute
	cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1))
	cfg.Services[0].SlowStart = &slow
	f := open(t, cfg)
	f.via["s1"] = ""
	f.route()
	f.requireCondition("web", "s1", inspect.ServerUnresolved)
	f.via["s1"] = "out"
	f.route()
	if len(f.services.starting) > 0 {
		t.Error("the server starts slowly")
	}
}

// A service that is removed while a server starts slowly is forgotten.
func TestRemovedServiceStartsNoServer(t *testing.T) {
	t.Parallel()
	slow := time.Minute
	cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1))
	cfg.Services[0].SlowStart = &slow
	other := serviceOf("other", vip6, 81, desired.TCP, desired.SRv6Encap, srv6Server("s1", 1, 1))
	f := open(t, balancerOf(cfg.Services[0], other))
	f.setHealth("web", "s1", false)
	f.setHealth("web", "s1", true)
	if len(f.services.starting) != 1 {
		t.Fatalf("%d services start servers slowly", len(f.services.starting))
	}
	f.mustApply(balancerOf(other))
	if len(f.services.starting) > 0 {
		t.Error("the removed service still starts a server")
	}
}

// While a server rests, new flows go to others, and it keeps the flows that it has.
func TestRestingServerKeepsFlows(t *testing.T) {
	t.Parallel()
	slow := time.Minute
	cfg := webOf(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1))
	cfg.Services[0].SlowStart = &slow
	f := open(t, cfg)
	servers := f.establish(web)
	f.setHealth("web", "s1", false)
	f.setHealth("web", "s1", true)
	for port := range uint16(50) {
		if got := serverOf(f.run(frameOf(fromPort(web, 33000+port)))); got != "web/s2" {
			t.Fatalf("a new flow goes to %s", got)
		}
	}
	f.requireVisits(servers, "web/s1", true)
	if f.snapshot().Services[0].Servers[0].Share == 0 {
		t.Error("status shows no share of the server")
	}
	// The data path continues after the end of the process.
	f.services.endSlowStarts()
	f.requireCondition("web", "s1", inspect.ServerUnchecked)
	if !f.plane.Servers.TakesFlows(f.slot("web", "s1")) {
		t.Error("the server rests after the end of the process")
	}
	f.setHealth("web", "s1", false)
	f.setHealth("web", "s1", true)
	// If the other server fails, the one that rests is better than none.
	f.setHealth("web", "s2", false)
	if got := serverOf(f.run(frameOf(fromPort(web, 34000)))); got != "web/s1" {
		t.Errorf("a new flow goes to %s", got)
	}
	// A failure during the slow start ends it, and the next one begins anew.
	f.setHealth("web", "s2", true)
	f.setHealth("web", "s1", false)
	f.requireCondition("web", "s1", inspect.ServerFailing)
	if got := serverOf(f.run(frameOf(fromPort(web, 35000)))); got != "web/s2" {
		t.Errorf("a new flow goes to %s", got)
	}
}

// A server that awaits its first health check gets new flows if probes find all servers unfit that
// have passed theirs. Probes exclude at most a third of the servers, and the other unfit servers
// get new flows.
func TestServersAwaitNoUnfitOnes(t *testing.T) {
	t.Parallel()
	configured := func(servers int) *desired.Balancer {
		cfg := probedWeb(servers)
		cfg.Services[0].Health = &desired.Health{HTTP: &desired.HTTPCheck{Path: "/", Port: 80}}
		return cfg
	}
	f := open(t, configured(3))
	for _, server := range []string{"s1", "s2"} {
		f.setHealth("web", server, true)
	}
	f.expectUsed("two have passed", "s1 s2")
	f.find(probe.Refusing, "s1")
	f.expectUsed("one of them refuses", "s2")
	f.find(probe.Refusing, "s2")
	f.expectUsed("both refuse", "s2 s3")
	f.find(probe.None, "s1")
	f.expectUsed("one accepts again", "s1")
	f.find(probe.None, "s2")
	f.mustApply(configured(6))
	f.route()
	for _, server := range []string{"s3", "s4", "s5"} {
		f.setHealth("web", server, true)
	}
	f.find(probe.Refusing, "s1", "s2", "s3")
	f.expectUsed("more than a third refuse, and others work", "s3 s4 s5")
}

// A server that has health checks gets no new flow before its first successful check while others
// serve: at the start of the service, if it is new, moves or is no longer drained, and if its checks
// change. The flows that it has stay.
func TestServersAwaitTheirFirstCheck(t *testing.T) {
	t.Parallel()
	for _, protocol := range []desired.Protocol{desired.TCP, desired.UDP} {
		t.Run(string(protocol), func(t *testing.T) {
			configured := func(path string, servers ...desired.Server) *desired.Balancer {
				service := serviceOf("web", vip6, 80, protocol, desired.SRv6Encap, servers...)
				service.Health = &desired.Health{HTTP: &desired.HTTPCheck{Path: path, Port: 80}}
				return balancerOf(service)
			}
			s1, s2, s3 := srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 1)
			f := open(t, configured("/", s1, s2))
			apply := func(cfg *desired.Balancer) {
				f.mustApply(cfg)
				f.route()
			}
			flow := flowTo(vip6, 80, protocol)
			port := uint16(20000)
			expect := func(when, used string, awaiting ...string) {
				t.Helper()
				f.expectUsed(when, used)
				for _, server := range f.snapshot().Services[0].Servers {
					waits := slices.Contains(awaiting, server.Name) && server.Condition != inspect.ServerRemoved
					if waits && (server.Condition != inspect.ServerUnchecked || server.Share > 0) {
						t.Errorf("%s: %s is %s, with a share of %v", when, server.Name, server.Condition, server.Share)
					}
				}
				for range 50 {
					port++
					got := serverOf(f.run(frameOf(fromPort(flow, port))))
					if name := strings.TrimPrefix(got, "web/"); slices.Contains(awaiting, name) || name == "" {
						t.Fatalf("%s: a new flow goes to %q", when, got)
					}
				}
			}
			expect("no server is checked", "s1 s2")
			servers := f.establish(flow)
			f.setHealth("web", "s1", true)
			expect("one has passed", "s1", "s2")
			f.requireVisits(servers, "web/s2", true)
			f.setHealth("web", "s2", true)
			expect("both have passed", "s1 s2")
			apply(configured("/", s1, s2, s3))
			expect("a server is added", "s1 s2", "s3")
			f.setHealth("web", "s3", true)
			expect("it has passed", "s1 s2 s3")

			moved := s2
			moved.Locator = srv6Server("s2", 9, 1).Locator
			apply(configured("/", s1, moved, s3))
			expect("a server has moved", "s1 s3", "s2")
			f.setHealth("web", "s1", false)
			f.setHealth("web", "s3", false)
			expect("the others fail", "s2")
			f.setHealth("web", "s1", true)
			f.setHealth("web", "s3", true)

			present := f.cfg
			f.restartAs(present)
			f.attached = true
			expect("after a restart", "s1 s3", "s2")
			f.setHealth("web", "s2", true)

			drained := srv6Server("s4", 4, 1)
			drained.Drained = true
			apply(configured("/", s1, moved, s3, drained))
			f.requireCondition("web", "s4", inspect.ServerDrained)
			drained.Drained = false
			apply(configured("/", s1, moved, s3, drained))
			expect("no longer drained, and not checked yet", "s1 s2 s3", "s4")
			f.setHealth("web", "s4", true)
			expect("all have passed", "s1 s2 s3 s4")

			cfg := configured("/", s1, moved, s3, drained)
			cfg.Services[0].Health.Interval = time.Minute
			apply(cfg)
			expect("checks are less frequent", "s1 s2 s3 s4")
			f.forgetFlows()
			servers = f.establish(flow)
			apply(configured("/ready", s1, moved, s3, drained))
			expect("checks ask for something else", "s1 s2 s3 s4")
			f.setHealth("web", "s1", true)
			expect("one has passed the new check", "s1", "s2", "s3", "s4")
			f.requireVisits(servers, "web/s2", true)
		})
	}
}

// A reload gives its servers their slots before their candidate table is in force, and packets go on
// meanwhile. So a server that gets no new flows gets none then either, whatever the reason is.
func TestReloadUsesNoUnusedServer(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		protocol desired.Protocol
		change   func(f *fixture)
	}{
		"it awaits its first check": {desired.TCP, func(f *fixture) { f.setHealth("web", "s1", true) }},
		"it fails, and flows of UDP stay": {desired.UDP, func(f *fixture) {
			f.setHealth("web", "s1", true)
			f.setHealth("web", "s2", false)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			service := serviceOf("web", vip6, 80, test.protocol, desired.SRv6Encap,
				srv6Server("s1", 1, 1), srv6Server("s2", 2, 1))
			service.Health = &desired.Health{HTTP: &desired.HTTPCheck{Path: "/", Port: 80}}
			service.OnFailure = desired.OnFailureKeep
			f := open(t, balancerOf(service))
			test.change(f)
			f.expectUsed("before", "s1")
			svc := f.services.byName["web"]
			if _, err := f.services.claimMembers(svc, svc.follows); err != nil {
				t.Fatal(err)
			}
			for server, takes := range map[string]bool{"s1": true, "s2": false} {
				if f.plane.Servers.TakesFlows(f.slot("web", server)) != takes {
					t.Errorf("during a reload %s takes new flows: %v", server, !takes)
				}
			}
		})
	}
}
