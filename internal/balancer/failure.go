// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"slices"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
)

// hasFailed tells whether a server with these causes has failed, so that its flows may be ended or
// moved. It returns false if all causes are in the set benign: then the server may still serve the
// connections that it has. If the application has ended, the server's kernel resets them.
func hasFailed(all dataplane.Causes) bool {
	return all&^benign != 0
}

// usable lists the servers of a service that get new flows. It leaves out, in this order:
//
//   - drained servers;
//   - the servers with the cause Unresolved, then those with Unreachable, then those with Failing.
//     If all servers that are left have the cause, usable ignores the cause, unless the service has
//     all-failed: refuse. For example, if the health checks of all servers fail, a fault of the
//     checks is more likely than a fault of all servers;
//   - servers that probes have found unfit, at most mostUnfit;
//   - servers that await their first health check, if another server works.
func (s *services) usable(svc *service) []*member {
	undrained := only(svc.members, func(m *member) bool { return m.Takes() })
	chosen := undrained
	for _, cause := range []dataplane.Causes{
		dataplane.Unresolved, dataplane.Unreachable, dataplane.Failing,
	} {
		isWithout := func(m *member) bool { return !s.causes(m).Has(cause) }
		if svc.AllFailed == desired.AllFailedRefuse {
			chosen = only(chosen, isWithout)
		} else {
			chosen = prefer(chosen, isWithout)
		}
	}
	chosen = withoutUnfit(chosen, mostUnfit(len(undrained)))
	if slices.ContainsFunc(chosen, svc.works) {
		return only(chosen, func(m *member) bool { return !svc.awaitsCheck(m) })
	}
	return chosen
}

// works tells whether a member does not await its first health check, and probes find it fit.
func (svc *service) works(m *member) bool {
	return !svc.awaitsCheck(m) && m.causes&dataplane.Probed == 0
}

// awaitsCheck tells whether no health check of a member has had a result yet, though it has checks.
func (svc *service) awaitsCheck(m *member) bool { return svc.Health != nil && !m.checked }

// refuses tells whether a service gives new flows to no server, although not all are drained.
func (s *services) refuses(svc *service) bool {
	return svc.Takes() && len(s.usable(svc)) == 0
}

// flagsOfUnused returns the flags of a member that gets no new flows. UDP packets of known flows
// leave a server with FlagFailing or FlagLeaving, and stay with one that has only FlagDrained.
// Three kinds of members need other flags than those of member.flags:
//
//   - A member that has no cause and awaits its first check has FlagDrained and FlagUnproven, and
//     not FlagFailing, for all protocols. It may have flows, because what its checks ask for may
//     have changed.
//   - A drained member whose UDP flows are to leave also has FlagLeaving.
//   - A member that is not drained, and whose UDP flows are to stay, has FlagDrained and not
//     FlagFailing.
func (s *services) flagsOfUnused(svc *service, m *member) dataplane.ServerFlags {
	flags := m.flags(false)
	if m.Takes() && s.causes(m) == 0 && svc.awaitsCheck(m) {
		return flags&^dataplane.FlagFailing | dataplane.FlagDrained | dataplane.FlagUnproven
	}
	switch stays := svc.OnFailure == desired.OnFailureKeep || !hasFailed(s.causes(m)); {
	case svc.Protocol != desired.UDP:
	case !m.Takes() && s.leaveDrained(svc):
		flags |= dataplane.FlagLeaving
	case m.Takes() && stays:
		flags = flags&^dataplane.FlagFailing | dataplane.FlagDrained
	}
	return flags
}

// leaveDrained tells whether the flows of UDP of a service move away from drained servers. If no
// server takes new flows, they stay: they could only be dropped. They also stay until a server that
// takes new flows has had its first health check: until then, perhaps none of them works.
func (s *services) leaveDrained(svc *service) bool {
	return svc.OnDrain == desired.OnDrainMoveUDP && svc.rule.Flags&dataplane.RuleTakesFlows != 0 && !svc.awaits
}

// endFlows makes packets leave the unused members that have failed, if the service has on-failure
// reset. Another server then gets the packets, and resets the connections, which it does not have.
// endFlows makes the slot of such a member belong to no service. The data path then treats a flow's
// entry that names this slot as that of another service (bpf/balancer/segments.h). The slots of all
// other unused members belong to the service again.
func (s *services) endFlows(svc *service, unused []*member) {
	for _, m := range unused {
		owner := svc.id
		if svc.OnFailure == desired.OnFailureReset && hasFailed(s.causes(m)) {
			owner = dataplane.NoService
		}
		s.plane.Servers.SetService(m.slot, owner)
	}
}

// joinService makes the slots of all members belong to the service, also those that endFlows has
// made belong to none.
func (s *services) joinService(svc *service) {
	for _, m := range svc.members {
		s.plane.Servers.SetService(m.slot, svc.id)
	}
}
