// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"slices"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/srv6"
)

// inTurn returns the course of the first packet of a flow under placement round-robin, and the
// reason under which it is counted. If the flow table has no room, the flow is placed as under
// hash, so that its next packet goes to the same server.
func (r *reference) inTurn(p parsed, svc *desired.Service) (to []stage, reason string) {
	server := r.nextInTurn(svc)
	if server == nil {
		return r.hash(p, svc)
	}
	reason = r.remember(p, svc, server)
	if reason == "forward_no_room" {
		server = r.place(p.flow, svc)
	}
	return alone(srv6.Deliver, server), reason
}

// nextInTurn returns the next server in turn that gets new flows, or nil if there is none. Servers
// that get none lose their turns.
func (r *reference) nextInTurn(svc *desired.Service) *desired.Server {
	usable := r.usable(svc)
	if len(usable) == 0 {
		return nil
	}
	if _, known := r.turns[svc.Name]; !known {
		r.turns[svc.Name] = r.turnsGiven(svc.Name)
	}
	for {
		turn := int(r.turns[svc.Name] % uint64(r.rows(svc)))
		r.turns[svc.Name]++
		name := r.row(svc, 0, turn)[0]
		if i := slices.IndexFunc(usable, func(s desired.Server) bool { return s.Name == name }); i >= 0 {
			return &usable[i]
		}
	}
}

// turnsGiven returns how many turns the data path has given out for a service.
func (f *fixture) turnsGiven(service string) (given uint64) {
	f.t.Helper()
	f.must(f.plane.Objects.Turns.Lookup(f.services.byName[service].id, &given))
	return given
}
