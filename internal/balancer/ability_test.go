// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/health/probe"
)

// TestAbilities follows the ability of a service while its servers fail and are drained.
func TestAbilities(t *testing.T) {
	t.Parallel()
	cfg := probedWeb(2)
	cfg.Services[0].Health = &desired.Health{TCP: &desired.TCPCheck{Port: 80}}
	f := open(t, cfg)
	expect := func(when string, want Ability) {
		t.Helper()
		if got := f.services.byName["web"].ability; got != want {
			t.Errorf("%s: %d, want %d", when, got, want)
		}
	}
	expect("at first", Unchecked)
	f.setHealth("web", "s1", false)
	expect("one server fails, and the other one is unchecked", Unchecked)
	f.setHealth("web", "s2", true)
	expect("the other one passes its first check", Ready)
	f.setHealth("web", "s2", false)
	expect("all servers fail", Usable)
	f.setHealth("web", "s2", true)
	expect("one server passes", Ready)
	f.find(probe.Silent, "s1", "s2")
	expect("all agents are silent", Usable)
	f.find(probe.OtherVersion, "s1", "s2")
	expect("all agents are of another version", Ready)
	f.find(probe.Refusing, "s1", "s2")
	expect("all applications are refusing, as in a restart", Ready)
	f.find(probe.Unheard, "s1", "s2")
	expect("all servers are unheard, which begins with offers of clients", Ready)
	f.setHealth("web", "s2", false)
	expect("and all servers fail", Usable)
	f.find(probe.None, "s1", "s2")
	f.setHealth("web", "s1", true)
	expect("all is well", Ready)

	drained := *cfg
	drained.Services = []desired.Service{cfg.Services[0]}
	drained.Services[0].Servers = append([]desired.Server{}, cfg.Services[0].Servers...)
	for i := range drained.Services[0].Servers {
		drained.Services[0].Servers[i].Drained = true
	}
	f.mustApply(&drained)
	expect("all servers are drained", Unable)
	f.mustApply(cfg)
	expect("no longer", Ready)

	f.restartAs(cfg)
	f.attached = true
	expect("after a restart", Ready)
	moved := *cfg
	moved.Services = []desired.Service{cfg.Services[0]}
	moved.Services[0].Servers = []desired.Server{srv6Server("s1", 8, 1), srv6Server("s2", 9, 1)}
	f.mustApply(&moved)
	expect("the servers are others", Unchecked)
	f.find(probe.Silent, "s1", "s2")
	expect("and their agents are silent", Unchecked)
	f.setHealth("web", "s1", false)
	f.setHealth("web", "s2", false)
	expect("and fail their checks", Usable)
	moved.Services[0].Health = nil
	f.find(probe.None, "s1", "s2")
	f.mustApply(&moved)
	expect("and are not checked any more", Ready)
	moved.Services[0].Health = cfg.Services[0].Health
	f.mustApply(&moved)
	expect("and are checked again", Unchecked)
	f.via["s1"], f.via["s2"] = "", ""
	f.route()
	f.services.admit(f.services.byName["web"])
	expect("and have no next hop", Unable)
}

// TestAbilitiesAreTold: the channel has the latest abilities only, with their services.
func TestAbilitiesAreTold(t *testing.T) {
	t.Parallel()
	f := open(t, probedWeb(1))
	b := &Balancer{services: f.services, abilities: make(chan []ServiceState, 1)}
	told := func() []ServiceState {
		b.tellAbilities()
		select {
		case all := <-b.abilities:
			return all
		default:
			return nil
		}
	}
	if all := told(); len(all) != 1 || all[0].Ability != Ready || all[0].Service.VIP != f.service("web").VIP {
		t.Errorf("at first: %+v", all)
	}
	if all := told(); all != nil {
		t.Errorf("nothing has changed: %+v", all)
	}
	f.find(probe.Silent, "s1")
	b.tellAbilities() // and nobody reads
	f.find(probe.None, "s1")
	if all := told(); len(all) != 1 || all[0].Ability != Ready {
		t.Errorf("the latest: %+v", all)
	}
	f.find(probe.Silent, "s1")
	if all := told(); len(all) != 1 || all[0].Ability != Usable {
		t.Errorf("a fault: %+v", all)
	}
}
