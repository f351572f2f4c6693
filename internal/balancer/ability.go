// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"maps"
	"slices"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
)

// Ability is what a service can do with new connections.
type Ability int

// The abilities, from the worst.
const (
	Unable Ability = iota // no server gets new connections, or their packets are dropped
	// Unchecked: servers get new connections, and none of them is known to work, because health checks
	// of some have no result yet.
	Unchecked
	Usable // servers get new connections, and the balancer ignores that all have a fault
	Ready  // at least one server that works gets new connections
)

// ServiceState is a service of the desired state, and its ability.
type ServiceState struct {
	Service *desired.Service
	Ability Ability
}

// Abilities returns a channel with the abilities of all services. Each value replaces the one before,
// unless it was read. The first one comes when the data path is attached.
func (b *Balancer) Abilities() <-chan []ServiceState { return b.abilities }

// passing are causes that say little about whether the service works, though other servers are
// better. A server whose agent uses another version of the protocol works: its agent has answered.
// While a fleet is upgraded, all balancers can see all servers so. An application that is refusing may
// just be restarted, and all balancers see that at once: each would withdraw the VIP for many times as
// long (bgp.hold-down). If the application stays away, health checks find that. A server becomes unheard
// only after offers of clients, and no client may make all balancers withdraw a VIP.
const passing = dataplane.Incompatible | dataplane.Refusing | dataplane.Unheard

// abilityOf returns the ability of a service that gives new flows to the members. One server that works
// suffices. Otherwise the checks of all servers must have a result: the next one may work.
func (s *services) abilityOf(svc *service, usable []*member) Ability {
	ability, awaitsChecks := Unable, false
	for _, m := range usable {
		switch causes := s.causes(m) &^ passing; {
		case causes.Has(dataplane.Unresolved):
		case svc.awaitsCheck(m):
			awaitsChecks = true
		case causes == 0:
			return Ready
		default:
			ability = Usable
		}
	}
	if awaitsChecks {
		return Unchecked
	}
	return ability
}

// tellAbilities puts the present abilities into the channel, if they, or the services, have changed.
func (b *Balancer) tellAbilities() {
	if !b.services.abilitiesChanged {
		return
	}
	b.services.abilitiesChanged = false
	var all []ServiceState
	for _, name := range slices.Sorted(maps.Keys(b.services.byName)) {
		svc := b.services.byName[name]
		all = append(all, ServiceState{svc.Service, svc.ability})
	}
	select { // nobody else sends
	case <-b.abilities:
	default:
	}
	b.abilities <- all
}
