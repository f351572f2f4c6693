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
	// Unchecked: servers get new connections, and none of them is known to work, because health
	// checks of some have no result yet.
	Unchecked
	Usable // servers get new connections, and the balancer ignores that all have a fault
	Ready  // at least one server that works gets new connections
)

// ServiceState is a service of the desired state, and its ability.
type ServiceState struct {
	Service *desired.Service
	Ability Ability
}

// Abilities returns a channel with the abilities of all services. Each value replaces the one
// before, unless it was read. The first one comes when the data path is attached.
func (b *Balancer) Abilities() <-chan []ServiceState { return b.abilities }

// benign are causes that keep new flows from a server, but do not show that the service has
// failed:
//
//   - Incompatible: the agent has answered, so the server works. While a fleet is upgraded, all
//     balancers can see this cause on all servers.
//   - Refusing: the application may just be restarted. All balancers see that at once, and each
//     would withdraw the VIP for much longer than a restart takes (bgp.hold-down). If the
//     application stays away, health checks find that.
//   - Unheard: clients can cause it by their offers, and no client may make all balancers withdraw
//     a VIP.
const benign = dataplane.Incompatible | dataplane.Refusing | dataplane.Unheard

// abilityOf returns the ability of a service whose usable members get new flows. If one of them
// works, the service is Ready. Otherwise it is Unchecked as long as one of them awaits its first
// check, because this server may work.
func (s *services) abilityOf(svc *service, usable []*member) Ability {
	ability, awaitsChecks := Unable, false
	for _, m := range usable {
		switch causes := s.causes(m) &^ benign; {
		case causes.Has(dataplane.Unresolved): // its packets are dropped
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

// tellAbilities puts the present abilities into the channel, if they, or the services, have
// changed.
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
	select { // remove a value that was not read; nobody else sends
	case <-b.abilities:
	default:
	}
	b.abilities <- all
}
