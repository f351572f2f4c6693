// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"cmp"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/health/probe"
)

// causeText contains the log messages about one cause.
type causeText struct {
	cause   dataplane.Causes
	server  changeText // a server gets or loses the cause
	service changeText // a service starts or stops ignoring the cause
}

// causeTexts lists all causes, the most severe first. To add a cause, add a constant with its flag
// in causeFlags, a text here, a condition in conditionsOfCauses and a call of setCause.
var causeTexts = []causeText{
	{
		cause: dataplane.Unresolved,
		server: changeText{
			began: wording{"server has no next hop: its packets are dropped",
				"servers have no next hop: their packets are dropped"},
			ended: wording{"server has a next hop", "servers have a next hop"},
		},
		service: changeText{
			began: wording{"NO server of the service has a next hop: " +
				"all packets for the service are dropped",
				"NO server of these services has a next hop: " +
					"all packets for the services are dropped"},
			ended: wording{"a server of the service has a next hop again",
				"servers of these services have a next hop again"},
		},
	},
	{
		cause: dataplane.Unreachable,
		server: changeText{
			began: wording{"server's next hop does not answer",
				"servers' next hops do not answer"},
			ended: wording{"server's next hop answers", "servers' next hops answer"},
		},
		service: changeText{
			began: wording{"the next hops of ALL servers of the service do not answer: " +
				"this is ignored for new connections",
				"the next hops of ALL servers of these services do not answer: " +
					"this is ignored for new connections"},
			ended: wording{"the next hop of a server of the service answers again",
				"the next hops of servers of these services answer again"},
		},
	},
	{
		cause: dataplane.Failing,
		server: changeText{
			began: wording{"server fails its health checks", "servers fail their health checks"},
			ended: wording{"server passes its health checks", "servers pass their health checks"},
		},
		service: changeText{
			began: wording{"ALL reachable servers of the service fail their health checks: " +
				"the checks are ignored",
				"ALL reachable servers of these services fail their health checks: " +
					"the checks are ignored"},
			ended: wording{"the health checks of the service are no longer ignored",
				"the health checks of these services are no longer ignored"},
		},
	},
	{
		cause: dataplane.Silent,
		server: changeText{
			began: wording{"agent does not answer probes", "agents do not answer probes"},
			ended: wording{"agent answers probes", "agents answer probes"},
		},
		service: tooMany,
	},
	{
		cause: dataplane.Incompatible,
		server: changeText{
			began: wording{"agent speaks another version of the protocol than this balancer",
				"agents speak another version of the protocol than this balancer"},
			ended: wording{"agent speaks this balancer's version of the protocol",
				"agents speak this balancer's version of the protocol"},
		},
		service: tooMany,
	},
	{
		cause: dataplane.NotServed,
		server: changeText{
			began: wording{"agent does not serve the VIP", "agents do not serve the VIP"},
			ended: wording{"agent serves the VIP", "agents serve the VIP"},
		},
		service: tooMany,
	},
	{
		cause: dataplane.Refusing,
		server: changeText{
			began: wording{"application has stopped listening: the server refuses connections",
				"applications have stopped listening: the servers refuse connections"},
			ended: wording{"application listens", "applications listen"},
		},
		service: tooMany,
	},
	{
		cause: dataplane.Unheard,
		server: changeText{
			began: wording{"connections offered to the server get no answer",
				"connections offered to the servers get no answer"},
			ended: wording{"server is offered connections again",
				"servers are offered connections again"},
		},
		service: tooMany,
	},
}

// tooMany is logged when probes find more servers of a service unfit than they may exclude. Each
// cause is logged separately.
var tooMany = changeText{
	began: wording{"probes find TOO MANY servers of the service unfit, more than a third: " +
		"some of them still get new connections",
		"probes find TOO MANY servers of these services unfit, more than a third: " +
			"some of them still get new connections"},
	ended: wording{"probes find no fault in the servers of the service that get new connections",
		"probes find no fault in the servers of these services that get new connections"},
}

// refusalText is logged when all servers of a service have failed, and the service refuses new
// flows then.
var refusalText = changeText{
	began: wording{"ALL servers of the service have failed: new connections are REFUSED",
		"ALL servers of these services have failed: new connections are REFUSED"},
	ended: wording{"the service takes new connections again",
		"these services take new connections again"},
}

// member is a server of a service, with its state in the data path.
type member struct {
	desired.Server
	slot    uint32
	checked bool // it has health checks, and one of them has had a result
	probed  bool // its agent is probed
	routed  bool // it has had a route of its own, so that the default route does not count
	took    bool // it took new flows after the last admit, or before this process
	down    bool // the last event about it says that it is unfit for new flows
	drained bool // an event says that it has no flow left
	// since is when this process's probes first found the member unfit. It is zero if they have
	// not, or if an earlier process's probes found it unfit.
	since time.Time
	// causes are all causes except Unresolved, which follows from the next hop in the server table.
	causes  dataplane.Causes
	reasons map[dataplane.Causes]reasons
	logged  dataplane.Causes // the causes at the last log, with Unresolved
	// unlogged are the causes that the member has got since the last log, except Unresolved.
	unlogged dataplane.Causes
	slow     slowStart
}

// reasons are texts that say why a server got a cause and why it lost the cause. An empty text
// means that the reason is unknown.
type reasons struct{ began, ended string }

// newMember returns the member for a server of a service. The argument before is the member that
// this process had for the server until now: the new one takes over its state. If before is nil,
// the state is that in the server's slot.
func newMember(server desired.Server, cfg *desired.Service, before *member, noted dataplane.Notes) *member {
	m := &member{
		Server: server, checked: noted.Checked, probed: cfg.Probes(), causes: noted.Causes, routed: noted.Routed,
	}
	if before != nil {
		m.checked = before.checked
		m.causes, m.reasons, m.since = before.causes, before.reasons, before.since
		m.logged, m.unlogged, m.slow = before.logged, before.unlogged, before.slow
		m.down, m.drained = before.down, before.drained && !m.Takes()
	}
	m.causes &^= dataplane.Unresolved
	if cfg.Health == nil {
		m.checked = false
		m.causes &^= dataplane.Failing
	}
	if !m.probed {
		m.causes &^= dataplane.Probed
	}
	return m
}

// flags returns the flags of the member's slot. The argument used says that the member gets new
// flows. If not, the member has FlagDrained or FlagFailing. A drained member that has a cause has
// both.
func (m *member) flags(used bool) dataplane.ServerFlags {
	flags := dataplane.FlagInUse | m.causes.Flags()
	if m.Address.Is4() {
		flags |= dataplane.FlagIPv4
	}
	if !m.Takes() {
		flags |= dataplane.FlagDrained
	}
	if !m.checked {
		flags |= dataplane.FlagUnchecked
	}
	if !m.probed {
		flags |= dataplane.FlagUnprobed
	}
	if m.routed {
		flags |= dataplane.FlagRouted
	}
	if !used && (m.causes != 0 || m.Takes()) {
		flags |= dataplane.FlagFailing
	}
	return flags
}

// setCause stores whether a server has a cause, and the reason. It returns the service that admit
// must look at again. It returns nil if nothing changed, or if a reload has removed the server.
func (s *services) setCause(
	service, server string, cause dataplane.Causes, holds bool, reason string,
) *service {
	svc := s.byName[service]
	if svc == nil {
		return nil
	}
	m := svc.member(server)
	if m == nil || m.causes.Has(cause) == holds {
		return nil
	}
	m.set(cause, holds)
	m.setReason(cause, holds, reason)
	return svc
}

// set stores whether the member has a cause, or each of several causes. It also notes new causes
// for the log.
func (m *member) set(cause dataplane.Causes, holds bool) {
	m.causes = m.causes.Set(cause, holds)
	m.unlogged |= m.causes & cause
}

// setReason stores why the member got a cause, if it holds, or why the member lost it. An empty
// reason means that the reason is unknown.
func (m *member) setReason(cause dataplane.Causes, holds bool, reason string) {
	why := m.reasons[cause]
	if holds {
		why.began = reason
	} else {
		why.ended = reason
	}
	if m.reasons == nil && reason != "" {
		m.reasons = map[dataplane.Causes]reasons{}
	}
	if m.reasons != nil {
		m.reasons[cause] = why
	}
}

// causes returns all present causes of a member, with Unresolved.
func (s *services) causes(m *member) dataplane.Causes {
	return m.causes.Set(dataplane.Unresolved, !s.plane.Servers.HasNextHop(m.slot))
}

// mostUnfit returns the largest number of servers of a service that probes may exclude. It is a
// third of the servers that are not drained, whose number is the argument, but at least one.
func mostUnfit(servers int) int { return max(1, servers/3) }

// withoutUnfit excludes members that probes have found unfit, at most the given number. It begins
// with the members that became unfit first. If all members are unfit, it excludes none, because a
// fault of the probes is more likely.
func withoutUnfit(members []*member, most int) []*member {
	unfit := only(members, func(m *member) bool { return m.causes&dataplane.Probed != 0 })
	if len(unfit) == len(members) {
		return members
	}
	slices.SortFunc(unfit, func(a, b *member) int {
		return cmp.Or(a.since.Compare(b.since), cmp.Compare(a.Name, b.Name))
	})
	excluded := unfit[:min(len(unfit), most)]
	return only(members, func(m *member) bool { return !slices.Contains(excluded, m) })
}

// only returns the members for which good returns true.
func only(members []*member, good func(*member) bool) []*member {
	return slices.DeleteFunc(slices.Clone(members), func(m *member) bool { return !good(m) })
}

// prefer returns the members for which good returns true, or all members if there are none.
func prefer(members []*member, good func(*member) bool) []*member {
	if chosen := only(members, good); len(chosen) > 0 {
		return chosen
	}
	return members
}

// ignored returns the causes of the servers that get new flows: the service ignores these causes.
func (s *services) ignored(svc *service) (all dataplane.Causes) {
	for _, m := range s.usable(svc) {
		all |= s.causes(m)
	}
	return all
}

// causesOfFaults maps what probes find to causes.
var causesOfFaults = map[probe.Fault]dataplane.Causes{
	probe.Silent:       dataplane.Silent,
	probe.OtherVersion: dataplane.Incompatible,
	probe.NotServed:    dataplane.NotServed,
	probe.Refusing:     dataplane.Refusing,
	probe.Unheard:      dataplane.Unheard,
}

// faultOf returns the fault that probes have found, from the causes of a server. It returns None if
// none of the causes is such a fault.
func faultOf(c dataplane.Causes) probe.Fault {
	for fault, cause := range causesOfFaults {
		if c.Has(cause) {
			return fault
		}
	}
	return probe.None
}

// setFault stores what probes found of a server. It returns the service that admit must look at
// again. It returns nil if nothing changed, or if a reload has removed the server, has moved it to
// another slot or has ended its probes.
func (s *services) setFault(result probe.Result) *service {
	svc := s.byName[result.Service]
	if svc == nil {
		return nil
	}
	m := svc.member(result.Server)
	if m == nil || !m.probed || m.slot != result.Slot || faultOf(m.causes) == result.Fault {
		return nil
	}
	if m.causes&dataplane.Probed == 0 {
		m.since = time.Now()
	}
	m.set(dataplane.Probed, false) // a server has at most one of the causes that probes find
	m.set(causesOfFaults[result.Fault], true)
	return svc
}

// probeTargets lists the servers whose agents are probed, each with its present fault.
func (s *services) probeTargets() []probe.Target {
	var targets []probe.Target
	for _, svc := range s.byName {
		for _, m := range svc.members {
			if t, probed := svc.probeTarget(m); probed {
				targets = append(targets, t)
			}
		}
	}
	return targets
}

// probeTarget returns the target for a member's agent. It returns false if the agent is not probed.
func (svc *service) probeTarget(m *member) (t probe.Target, probed bool) {
	return probe.Target{
		Service: svc.Name, Server: m.Name, Slot: m.slot, VIP: svc.VIP, Protocol: svc.Protocol,
		Port: svc.Port.Number(), Encapsulation: svc.Encapsulation,
		Offered: svc.comparesOffers(), CallPort: svc.callPort(), Fault: faultOf(m.causes),
	}, m.probed
}

// comparesOffers tells whether the prober compares the service's offers with signals, and calls
// servers that leave offers unanswered. With random candidates, nobody knows to which server a flow
// was offered first. Under stateless, no server says that it has accepted.
func (svc *service) comparesOffers() bool {
	return svc.ServersDecide() && svc.Selection.Method().FollowsFlow &&
		svc.Persistence.Method().ServersSignal && svc.callPort() != 0
}

// callPort returns the port to which the prober connects: the service's port, or that of its health
// checks if the service has all ports. It returns 0 if neither is known.
func (svc *service) callPort() uint16 {
	check := svc.Health
	switch {
	case svc.Port != desired.AllPorts:
		return svc.Port.Number()
	case check == nil:
	case check.TCP != nil:
		return check.TCP.Port
	case check.HTTP != nil:
		return check.HTTP.Port
	case check.HTTPS != nil:
		return check.HTTPS.Port
	}
	return 0
}
