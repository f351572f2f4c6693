package balancer

import (
	"slices"

	"github.com/segue-lb/segue/internal/config"
)

// causes is a set of causes. A cause makes a server unfit for new flows while other servers of its
// service are fit.
type causes uint8

const (
	unresolved causes = 1 << iota // the server has no next hop
	failing                       // the server fails its health checks
)

// has tells whether the set has all of the given causes.
func (c causes) has(these causes) bool { return c&these == these }

// set returns the set with or without the given causes.
func (c causes) set(these causes, hold bool) causes {
	if hold {
		return c | these
	}
	return c &^ these
}

// causeKind says how a cause is kept and told.
type causeKind struct {
	cause     causes
	condition Condition           // of a server with this cause and none before it in causeKinds
	flag      balancerServerFlags // notes the cause in the server's slot; 0: next_hop tells
	server    changeText          // of a server that gets or loses the cause
	service   changeText          // of a service that begins or ceases to ignore it
}

// causeKinds are all causes, the weightiest first: in this order they take servers out of
// placement. A further cause is a constant, a line here and a call of setCause.
var causeKinds = []causeKind{
	{
		cause: unresolved, condition: ServerUnresolved,
		server: changeText{
			began: wording{"server has no next hop: its packets are dropped",
				"servers have no next hop: their packets are dropped"},
			ended: wording{"server has a next hop", "servers have a next hop"},
		},
		service: changeText{
			began: wording{"NO server of the service has a next hop: its packets are dropped",
				"NO server of these services has a next hop: their packets are dropped"},
			ended: wording{"the service has a server with a next hop again",
				"these services have servers with a next hop again"},
		},
	},
	{
		cause: failing, condition: ServerFailing, flag: balancerServerFlagsSERVER_CHECKS_FAIL,
		server: changeText{
			began: wording{"server fails its health checks", "servers fail their health checks"},
			ended: wording{"server passes its health checks", "servers pass their health checks"},
		},
		service: changeText{
			began: wording{"ALL reachable servers of the service fail their health checks: " +
				"the checks are ignored",
				"ALL reachable servers of these services fail their health checks: " +
					"the checks are ignored"},
			ended: wording{"the health checks of the service count again",
				"the health checks of these services count again"},
		},
	},
}

// conditions names the causes as their conditions.
func (c causes) conditions() []Condition {
	names := []Condition{}
	for _, kind := range causeKinds {
		if c.has(kind.cause) {
			names = append(names, kind.condition)
		}
	}
	return names
}

// flags note the causes in a server's slot.
func (c causes) flags() (flags balancerServerFlags) {
	for _, kind := range causeKinds {
		if c.has(kind.cause) {
			flags |= kind.flag
		}
	}
	return flags
}

// causes reads the causes that a server's slot tells; none of a slot that is not in use.
func (t *serverTable) causes(slot uint32) (all causes) {
	flags := t.flags(slot)
	if flags&balancerServerFlagsSERVER_IN_USE == 0 {
		return 0
	}
	for _, kind := range causeKinds {
		if kind.flag != 0 && flags&kind.flag != 0 {
			all |= kind.cause
		}
	}
	if all == 0 && flags&balancerServerFlagsSERVER_FAILING != 0 {
		all = failing // an earlier build knows no other cause, and does not note it
	}
	return all.set(unresolved, !t.hasNextHop(slot))
}

// conditionOf is the one condition that stands for all that is known of a server.
func conditionOf(flags balancerServerFlags, all causes) Condition {
	switch {
	case flags&balancerServerFlagsSERVER_IN_USE == 0:
		return ServerRemoved
	case flags&balancerServerFlagsSERVER_DRAINED != 0:
		return ServerDrained
	case all != 0:
		return all.conditions()[0]
	case flags&balancerServerFlagsSERVER_UNCHECKED != 0:
		return ServerUnchecked
	}
	return ServerUp
}

// member is a server of a service as the data path has it.
type member struct {
	config.Server
	slot    uint32
	checked bool
	// causes are all but unresolved, which the next hop in the server table tells.
	causes  causes
	reasons map[causes]string // why, in plain words, where that is known
	logged  causes            // as the log has it, with unresolved
}

// newMember is a server that goes on as the one before it in the process, if there is one, and else
// as its slot says.
func newMember(server config.Server, cfg *config.Service, before *member, noted causes) *member {
	m := &member{Server: server, checked: cfg.Health != nil, causes: noted}
	if before != nil {
		m.causes, m.reasons, m.logged = before.causes, before.reasons, before.logged
	}
	m.causes &^= unresolved
	if !m.checked {
		m.causes &^= failing
	}
	return m
}

// flags are what the data path is told of the member: failing only when new flows
// are not placed on it all the same.
func (m *member) flags(used bool) balancerServerFlags {
	flags := balancerServerFlagsSERVER_IN_USE | m.causes.flags()
	if m.Address.Is4() {
		flags |= balancerServerFlagsSERVER_IPV4
	}
	if *m.Weight == 0 {
		flags |= balancerServerFlagsSERVER_DRAINED
	}
	if !m.checked {
		flags |= balancerServerFlagsSERVER_UNCHECKED
	}
	if m.causes != 0 && !used {
		flags |= balancerServerFlagsSERVER_FAILING
	}
	return flags
}

// setCause notes that a server has or has not a cause, and why. It returns the service whose table
// is to follow: nil when nothing changed, or a reload has removed the server.
func (s *services) setCause(
	service, server string, cause causes, holds bool, reason string,
) *service {
	svc := s.byName[service]
	if svc == nil {
		return nil
	}
	m := svc.member(server)
	if m == nil || m.causes.has(cause) == holds {
		return nil
	}
	m.causes = m.causes.set(cause, holds)
	m.setReason(cause, reason)
	return svc
}

// setReason notes why a server has or has not a cause; empty: not known.
func (m *member) setReason(cause causes, reason string) {
	if reason == "" {
		delete(m.reasons, cause)
		return
	}
	if m.reasons == nil {
		m.reasons = map[causes]string{}
	}
	m.reasons[cause] = reason
}

// causes are all that a member has now.
func (s *services) causes(m *member) causes {
	return m.causes.set(unresolved, !s.kernel.servers.hasNextHop(m.slot))
}

// usable lists the servers of a service that new flows are placed on: those that are not drained
// and have no cause. A cause that all have is ignored. For checks this means: when all fail, the
// checks are the likelier culprit.
func (s *services) usable(svc *service) []*member {
	drained := func(m *member) bool { return *m.Weight == 0 }
	chosen := slices.DeleteFunc(slices.Clone(svc.members), drained)
	for _, kind := range causeKinds {
		chosen = prefer(chosen, func(m *member) bool { return !s.causes(m).has(kind.cause) })
	}
	return chosen
}

// prefer returns the members that are good, or all when none is.
func prefer(members []*member, good func(*member) bool) []*member {
	chosen := slices.DeleteFunc(slices.Clone(members), func(m *member) bool { return !good(m) })
	if len(chosen) == 0 {
		return members
	}
	return chosen
}

// ignored are the causes of servers that new flows are placed on all the same.
func (s *services) ignored(svc *service) (all causes) {
	for _, m := range s.usable(svc) {
		all |= s.causes(m)
	}
	return all
}
