// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/health/probe"
)

// probedWeb returns a configuration of one service with the servers s1, s2, … whose agents are
// probed.
func probedWeb(servers int) *desired.Balancer {
	var all []desired.Server
	for n := range uint8(servers) {
		all = append(all, srv6Server(fmt.Sprint("s", n+1), n+1, 1))
	}
	cfg := webOf(all...)
	yes := true
	cfg.Services[0].Probe = &yes
	return cfg
}

// find applies results of probes to the data path.
func (f *fixture) find(fault probe.Fault, servers ...string) {
	f.t.Helper()
	for _, server := range servers {
		result := probe.Result{Service: "web", Server: server, Slot: f.slot("web", server), Fault: fault}
		if svc := f.services.setFault(result); svc != nil {
			f.services.admit(svc)
		}
	}
}

// used returns the servers that get new flows.
func (f *fixture) used() string {
	var names []string
	for _, m := range f.services.usable(f.services.byName["web"]) {
		names = append(names, m.Name)
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

func (f *fixture) expectUsed(when, want string) {
	f.t.Helper()
	if got := f.used(); got != want {
		f.t.Errorf("%s: new flows go to %s, want %s", when, got, want)
	}
}

// Probes exclude at most a third of the servers. The servers that became unfit first are excluded.
func TestProbesTakeOutAThird(t *testing.T) {
	t.Parallel()
	f := open(t, probedWeb(7))
	f.expectUsed("all are well", "s1 s2 s3 s4 s5 s6 s7")
	f.find(probe.Silent, "s6")
	f.find(probe.NotServed, "s3")
	f.expectUsed("two are unfit", "s1 s2 s4 s5 s7")
	f.expectLog("two are unfit",
		`level=WARN msg="agent does not answer probes" service=web server=s6`,
		`level=WARN msg="agent does not serve the VIP" service=web server=s3`)
	f.find(probe.Silent, "s1")
	f.expectUsed("the third is used all the same", "s1 s2 s4 s5 s7")
	f.expectLog("the third",
		`level=WARN msg="agent does not answer probes" service=web server=s1`,
		`level=ERROR msg="probes find TOO MANY servers of the service unfit, more than a third: `+
			`some of them still get new connections" service=web`)
	f.find(probe.OtherVersion, "s6")
	f.expectUsed("another fault keeps its place", "s1 s2 s4 s5 s7")
	f.find(probe.None, "s6")
	f.expectUsed("the third comes for the first", "s2 s4 s5 s6 s7")
	f.find(probe.Silent, "s2", "s4", "s5", "s6", "s7")
	f.expectUsed("all are unfit: probes are ignored", "s1 s2 s3 s4 s5 s6 s7")
	f.find(probe.None, "s1", "s2", "s3", "s4", "s5", "s6", "s7")
	f.expectUsed("all are well again", "s1 s2 s3 s4 s5 s6 s7")
}

// Of two servers, probes may exclude one. They may not exclude the only server.
func TestProbesOfFewServers(t *testing.T) {
	t.Parallel()
	f := open(t, probedWeb(2))
	f.find(probe.Silent, "s2")
	f.expectUsed("one of two", "s1")
	f.find(probe.Silent, "s1")
	f.expectUsed("both", "s1 s2")
	f.mustApply(probedWeb(1))
	f.expectUsed("the only one", "s1")
}

// A server that is excluded for another cause does not count towards the servers that probes may
// exclude.
func TestProbesAfterChecks(t *testing.T) {
	t.Parallel()
	f := open(t, probedWeb(4))
	f.via["s1"] = ""
	f.route()
	f.find(probe.Silent, "s1", "s2")
	f.expectUsed("one has no next hop, another is silent", "s3 s4")
}

// What probes have found survives a restart, and is dropped if the agents are no longer probed.
func TestFaultsAreKept(t *testing.T) {
	t.Parallel()
	cfg := probedWeb(4)
	f := open(t, cfg)
	f.find(probe.Unheard, "s2")
	f.restartAs(cfg)
	f.expectUsed("after a restart", "s1 s3 s4")
	targets := f.services.probeTargets()
	i := slices.IndexFunc(targets, func(t probe.Target) bool { return t.Server == "s2" })
	if len(targets) != 4 || targets[i].Fault != probe.Unheard {
		t.Errorf("targets: %+v", targets)
	}
	unprobed := probedWeb(4)
	unprobed.Services[0].Probe = nil
	f.mustApply(unprobed)
	f.expectUsed("agents are not probed", "s1 s2 s3 s4")
	if targets := f.services.probeTargets(); len(targets) != 0 {
		t.Errorf("targets: %+v", targets)
	}
}

// A server with another address is another host, about which nothing is known.
func TestMovedServerHasNoFaults(t *testing.T) {
	t.Parallel()
	cfg := probedWeb(4)
	f := open(t, cfg)
	for i, server := range []string{"s1", "s2"} {
		f.find(probe.Silent, server)
		f.expectUsed("one is silent", strings.TrimSpace(strings.Replace("s1 s2 s3 s4", server+" ", "", 1)))
		moved := probedWeb(4)
		moved.Services[0].Servers[i].Locator = srv6Server(server, 99, 1).Locator
		f.mustApply(moved)
		f.expectUsed("it has moved", "s1 s2 s3 s4")
		f.mustApply(cfg)
	}
}

// Readers show what probes have found without a process of the balancer.
func TestStatusShowsFaults(t *testing.T) {
	t.Parallel()
	f := open(t, probedWeb(6))
	for fault, server := range map[probe.Fault]string{
		probe.Silent: "s1", probe.OtherVersion: "s2", probe.NotServed: "s3", probe.Unheard: "s4",
		probe.Refusing: "s5",
	} {
		f.find(fault, server)
	}
	service := mustSnapshot(t, f.view()).Services[0]
	want := []inspect.Condition{
		inspect.ServerSilent, inspect.ServerIncompatible, inspect.ServerNotServed, inspect.ServerUnheard,
		inspect.ServerRefusing, inspect.ServerUnchecked,
	}
	for i, server := range service.Servers {
		if server.Condition != want[i] || !server.Probed {
			t.Errorf("%s: %s, probed %v; want %s", server.Name, server.Condition, server.Probed, want[i])
		}
	}
	if len(service.Ignored) != 3 {
		t.Errorf("of five unfit servers, three of which are used, these causes are ignored: %v", service.Ignored)
	}
}
