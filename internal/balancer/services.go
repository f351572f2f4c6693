// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/health"
)

// service is a service, with its state in the data path.
type service struct {
	*desired.Service
	id        uint32
	rule      dataplane.ServiceRule
	members   []*member
	named     map[string]*member // the members by name
	knownSID  dataplane.KnownSID // what packets of known flows ask of its servers, after settle
	follows   *serviceState      // what the data path follows; nil: reconcile has to change it
	label     dataplane.ServiceLabel
	builtFrom tableInput       // the input of its candidate table
	hasSpare  bool             // its second candidate table, which is not in use, may exist
	huntsEnd  time.Time        // when RuleHalfOpen ends, after hunting has stopped; zero: not set
	awaits    bool             // all servers that get new flows await their first checks
	logged    dataplane.Causes // the ignored causes at the last log
	down      bool             // the last event about it says that no server is fit
	refused   bool             // according to the log, it refuses new flows
	ability   Ability
	// formerSince is when RuleFormerFlows was set in this process, or zero if it is not set.
	formerSince time.Time
}

// services applies a configuration to the data path.
type services struct {
	plane *dataplane.Plane
	slots *dataplane.Slots
	// inference has the services that infer.
	inference *inference
	byName    map[string]*service
	free      []uint32      // numbers that no service has; the last one is given out next
	reach     func(*member) // writes the next hop of a member, if it is known
	// hasHints tells whether there is a hint table.
	hasHints bool
	// Services whose candidate tables were replaced, or that have ceased to be stateless. Packets
	// may still use their former tables and rules.
	swapped []*service
	locator netip.Prefix // of the balancer
	// rejects tells whether clients are told that no server gets their packets.
	rejects bool
	// dropRemoved is how long packets to removed VIPs are dropped.
	dropRemoved time.Duration
	removed     int // the number of removed VIPs in the table of services
	// starting are the services with servers that start slowly.
	starting map[*service]bool
	// abilitiesChanged tells whether services or their abilities have changed since tellAbilities.
	abilitiesChanged bool
	built            builtRows
	// isSure tells that the last desired state is completely in force. Otherwise the next change
	// looks at all services.
	isSure bool
	// progress counts the steps of the goroutine that owns the services. Others may read it.
	progress atomic.Uint64
}

// loadServices reads the services that an earlier process has left. The first call of prepare adds
// their members and their configuration.
func loadServices(
	plane *dataplane.Plane, slots *dataplane.Slots, inference *inference, reach func(*member),
) (*services, error) {
	s := &services{
		plane: plane, slots: slots, inference: inference, byName: map[string]*service{}, reach: reach,
		hasHints: plane.HasHints(), starting: map[*service]bool{},
	}
	byID := map[uint32]*service{}
	labels, err := plane.ServiceLabels()
	if err != nil {
		return nil, err
	}
	for id, label := range labels {
		// The earlier process may have left both candidate tables: hasSpare makes removeSpares
		// look.
		byID[id] = &service{Service: &desired.Service{Name: label.Name}, id: id, hasSpare: true}
		s.byName[label.Name] = byID[id]
	}
	for id := uint32(desired.MaxServices); id > 0; id-- {
		if byID[id-1] == nil {
			s.free = append(s.free, id-1)
		}
	}
	for _, entry := range plane.Services.All() {
		if known := byID[entry.Service()]; known != nil && entry.IsService() {
			known.rule = entry.Rule
		}
	}
	return s, nil
}

// member returns the server of that name, or nil.
func (svc *service) member(name string) *member { return svc.named[name] }

// slots returns the slots of the members, in their order.
func (svc *service) slots() []uint32 {
	slots := make([]uint32, len(svc.members))
	for i, m := range svc.members {
		slots[i] = m.slot
	}
	return slots
}

// isStateless tells whether the service's rule in force has persistence stateless. A new service
// has no rule yet.
func (svc *service) isStateless() bool {
	return svc.rule.Buckets() > 0 && svc.rule.PersistenceName().Method().HasCookies
}

// takesPlainPath tells whether packets of the service take the plain path of the program
// (lookup_stateless_plain), which asks servers to compare cookies by known_sid. While there may be
// former flows, no packet takes this path, and only packets of former flows use known_sid.
func (svc *service) takesPlainPath() bool {
	return svc.isStateless() && !svc.rule.HasFormerFlows()
}

// setHealth stores the result of a health check. It returns the service that admit must look at
// again. It returns nil if nothing changed, or if a reload has removed the server.
func (s *services) setHealth(result health.Result) *service {
	// changed is the service if the result changes the cause Failing, and nil otherwise.
	changed := s.setCause(result.Service, result.Server, dataplane.Failing, !result.Healthy, result.Reason)
	svc := s.byName[result.Service]
	if svc == nil || svc.Health == nil {
		return changed
	}
	if m := svc.member(result.Server); m != nil && !m.checked { // its first result
		m.checked = true
		return svc
	}
	return changed
}

// healthTargets lists the servers to check, each with its present state of health. The map tells
// how the packets of checks and calls are encapsulated, by slot. It has the servers whose checks
// take the path of clients' packets, and the servers that the prober may call.
func (s *services) healthTargets(
	services []desired.Service,
) ([]health.Target, map[uint32]dataplane.Check) {
	targets, onPath := health.Targets(services), map[uint32]dataplane.Check{}
	for i := range targets {
		t := &targets[i]
		svc := s.byName[t.Service]
		m := svc.member(t.Server)
		t.State = healthOf(m)
		if t.OnPath {
			t.Mark = dataplane.MarkOf(m.slot)
			onPath[m.slot] = svc.checkOnPath()
		}
	}
	for _, svc := range s.byName {
		for _, m := range svc.members {
			if m.probed && svc.comparesOffers() {
				onPath[m.slot] = svc.checkOnPath()
			}
		}
	}
	return targets, onPath
}

// checkOnPath says how the packets of checks and calls of the service's servers are encapsulated.
func (svc *service) checkOnPath() dataplane.Check {
	return dataplane.Check{VIP: svc.VIP, Encapsulation: svc.Encapsulation}
}

// healthOf returns what health checks have said about a member.
func healthOf(m *member) health.State {
	switch {
	case m.causes.Has(dataplane.Failing):
		return health.Failing
	case m.checked:
		return health.Healthy
	}
	return health.Unchecked
}

func (s *services) members() []*member {
	var all []*member
	for _, svc := range s.byName {
		all = append(all, svc.members...)
	}
	return all
}
