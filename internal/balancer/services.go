// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/generation"
	"github.com/segue-lb/segue/internal/health"
	"github.com/segue-lb/segue/internal/srv6"
)

// service is a service, with its state in the data path.
type service struct {
	desired.Service
	id       uint32
	rule     dataplane.ServiceRule
	members  []*member
	placed   placing          // the input that its candidate table was built from
	hasSpare bool             // the candidate table that is not in use may exist
	huntsEnd time.Time        // zero, or the end of RuleHalfOpen after hunting
	logged   dataplane.Causes // the ignored causes at the last log
}

// services applies a configuration to the data path.
type services struct {
	plane  *dataplane.Plane
	slots  *dataplane.Slots
	byName map[string]*service
	free   []uint32      // numbers that no service has; the last one is given out next
	reach  func(*member) // writes the next hop of a member, if it is known
}

// loadServices reads the services that an earlier process has left. The first apply adds their
// members and their configuration.
func loadServices(plane *dataplane.Plane, slots *dataplane.Slots, reach func(*member)) (*services, error) {
	s := &services{plane: plane, slots: slots, byName: map[string]*service{}, reach: reach}
	byID := map[uint32]*service{}
	labels, err := plane.ServiceLabels()
	if err != nil {
		return nil, err
	}
	for id, label := range labels {
		byID[id] = &service{Service: desired.Service{Name: label.Name}, id: id, hasSpare: true}
		s.byName[label.Name] = byID[id]
	}
	for id := uint32(desired.MaxServices); id > 0; id-- {
		if byID[id-1] == nil {
			s.free = append(s.free, id-1)
		}
	}
	for _, entry := range plane.Services.All() {
		if known := byID[entry.Id]; known != nil && entry.IsService() {
			known.rule = entry.Rule
		}
	}
	return s, nil
}

// apply makes the data path follow a configuration. Servers are added before the tables that name
// them, and removed after these tables.
func (s *services) apply(cfg *desired.Balancer, generations generation.Generations) error {
	wanted := map[string]bool{}
	for i := range cfg.Services {
		name := cfg.Services[i].Name
		wanted[name] = true
		if err := s.applyService(&cfg.Services[i], &cfg.Node, generations[name]); err != nil {
			return fmt.Errorf("service %s: %w", name, err)
		}
	}
	if err := s.keepOnly(wanted); err != nil {
		return err
	}
	if err := s.plane.SetLocator(cfg.Node.Locator); err != nil {
		return err
	}
	if err := s.plane.SetDomain(cfg); err != nil {
		return err
	}
	return s.retireSlots()
}

func (s *services) applyService(cfg *desired.Service, node *desired.BalancerNode, g generation.Generation) error {
	svc := s.byName[cfg.Name]
	if svc == nil {
		var err error
		if svc, err = s.add(cfg.Name); err != nil {
			return err
		}
	}
	members, err := s.claimMembers(svc, cfg, node)
	if err != nil {
		return err
	}
	svc.Service, svc.members = *cfg, members
	return s.place(svc, g)
}

// add gives a new service a number and a label. It returns an error if no number is free.
func (s *services) add(name string) (*service, error) {
	if err := s.checkRoom(1); err != nil {
		return nil, err
	}
	id := s.free[len(s.free)-1]
	if err := s.plane.LabelService(id, dataplane.ServiceLabel{Name: name}); err != nil {
		return nil, err
	}
	s.free = s.free[:len(s.free)-1]
	svc := &service{Service: desired.Service{Name: name}, id: id}
	s.byName[name] = svc
	return svc, nil
}

// checkRoom returns an error if the numbers do not suffice for the given number of further
// services.
func (s *services) checkRoom(more int) error {
	if more <= len(s.free) {
		return nil
	}
	return fmt.Errorf("%d new services need %d service IDs, and %d of %d are free: services that are "+
		"being removed still use theirs", more, more, len(s.free), len(s.byName)+len(s.free))
}

// claimMembers gives the configured servers their slots. A server that existed before keeps its
// causes, even if an earlier process has found them.
func (s *services) claimMembers(svc *service, cfg *desired.Service, node *desired.BalancerNode) ([]*member, error) {
	before := make(map[string]*member, len(svc.members))
	for _, m := range svc.members {
		before[m.Name] = m
	}
	known := knownFunction(cfg)
	if svc.rule.HasHalfOpen() {
		known = srv6.AckStickiness // servers wait for it until huntsEnd
	}
	members := make([]*member, 0, len(cfg.Servers))
	for _, server := range cfg.Servers {
		key := keyOfServer(cfg, &server, node)
		noted, routed := s.slots.Noted(key)
		old := before[server.Name]
		if slot, _ := s.slots.Of(key); old != nil && slot != old.slot {
			old = nil // its address has changed: the causes are another host's
		}
		m := newMember(server, cfg, old, noted, routed)
		slot, err := s.slots.Claim(key, svc.id, known, m.flags(true))
		if err != nil {
			return nil, fmt.Errorf("server %s: %w", server.Name, err)
		}
		m.slot = slot
		s.reach(m)
		members = append(members, m)
	}
	return members, nil
}

// member returns the server of that name, or nil.
func (svc *service) member(name string) *member {
	for _, m := range svc.members {
		if m.Name == name {
			return m
		}
	}
	return nil
}

// keyOfServer returns the key of a server's slot: its names, its address and the source address of
// packets to it.
func keyOfServer(svc *desired.Service, server *desired.Server, node *desired.BalancerNode) dataplane.ServerKey {
	key := dataplane.ServerKey{Service: svc.Name, Server: server.Name}
	if server.Locator.IsValid() {
		key.Address, key.Source = server.Locator.Addr(), node.Locator.Addr()
		return key
	}
	key.Address = server.Address
	for _, source := range node.Addresses {
		if source.Is4() == server.Address.Is4() {
			key.Source = source
		}
	}
	return key
}

// keysOf returns the keys of all servers of a configuration.
func keysOf(cfg *desired.Balancer) map[dataplane.ServerKey]bool {
	keys := map[dataplane.ServerKey]bool{}
	for i := range cfg.Services {
		for j := range cfg.Services[i].Servers {
			keys[keyOfServer(&cfg.Services[i], &cfg.Services[i].Servers[j], &cfg.Node)] = true
		}
	}
	return keys
}

// setHealth stores the result of a health check. It returns the service that admit must look at
// again. It returns nil if nothing changed, or if a reload has removed the server.
func (s *services) setHealth(result health.Result) *service {
	return s.setCause(result.Service, result.Server, dataplane.Failing, !result.Healthy, result.Reason)
}

// healthTargets lists the servers to check, each with its present result.
func (s *services) healthTargets(services []desired.Service) []health.Target {
	targets := health.Targets(services)
	for i := range targets {
		t := &targets[i]
		t.Failing = s.byName[t.Service].member(t.Server).causes.Has(dataplane.Failing)
	}
	return targets
}

// placing is the complete input of a service's candidate table.
type placing struct {
	sets  []generation.Set
	slots map[string]uint16 // of the servers by name
}

// placingOf returns the input for a service of a generation. The former sets are of use only if
// packets can be passed on from server to server, and if their buckets are the present ones.
func placingOf(svc *service, g generation.Generation) placing {
	p := placing{sets: g.Sets, slots: map[string]uint16{}}
	if !svc.passesOn() {
		p.sets = p.sets[:1]
	}
	p.sets = slices.DeleteFunc(slices.Clone(p.sets), func(s generation.Set) bool {
		return s.Buckets != svc.Buckets
	})
	for _, m := range svc.members {
		p.slots[m.Name] = uint16(m.slot)
	}
	return p
}

// passesOn tells whether the service's servers have agents that pass packets on to each other. Agents
// do so with TCP only.
func (svc *service) passesOn() bool {
	return svc.Protocol == desired.TCP && (svc.Placement == desired.PlacementHunt || svc.Probes())
}

// place makes a service's entry follow a generation of its servers. It builds the candidate table
// and installs it, unless the input has not changed.
func (s *services) place(svc *service, g generation.Generation) error {
	rule := dataplane.RuleOf(&svc.Service)
	p := placingOf(svc, g)
	if reflect.DeepEqual(p, svc.placed) {
		rule.Buckets, rule.Row, rule.Flags = svc.rule.Buckets, svc.rule.Row, svc.rule.Table()
	} else {
		table, err := buildRows(p.sets, p.slots)
		if err != nil {
			return err
		}
		rule.Buckets, rule.Row = table.Buckets, table.Row()
		if rule.Flags, err = s.install(svc, rule, table.Slots); err != nil {
			return err
		}
	}
	label := dataplane.ServiceLabel{Name: svc.Name, Generation: g.Number, Digest: generation.Digest(p.sets)}
	if err := s.plane.LabelService(svc.id, label); err != nil {
		return err
	}
	s.setCapabilities(svc, &rule)
	svc.rule, svc.placed = rule, p
	s.admit(svc)
	return nil
}

// admit tells the data path which servers of a service get new flows, and whether there is one. The
// service's rule, which may name a new candidate table, takes effect after servers begin to get new
// flows and before others cease to. So no packet sees a change of weights in part: a server whose
// weight is or was 0 is in only one of the tables.
func (s *services) admit(svc *service) {
	usable := s.usable(svc)
	used := make(map[*member]bool, len(usable))
	for _, m := range usable {
		used[m] = true
	}
	svc.rule.Flags &^= dataplane.RuleTakesFlows
	for _, m := range usable {
		s.plane.Servers.SetFlags(m.slot, m.flags(true))
		svc.rule.Flags |= dataplane.RuleTakesFlows
	}
	s.writeRule(svc)
	for _, m := range svc.members {
		if !used[m] {
			s.plane.Servers.SetFlags(m.slot, m.flags(false))
		}
	}
}

// writeRule puts a service's rule in force. A service that is new, or that moves to another VIP or
// port, waits until all services are ready (enter).
func (s *services) writeRule(svc *service) {
	entry := s.plane.Services.Find(dataplane.ServiceKey(&svc.Service))
	if entry != nil && entry.Id == svc.id {
		entry.SetRule(svc.rule)
	}
}

// setCapabilities sets the flags that tell placement and persistence about servers and each other:
// whether servers pass packets on, and whether they send signals and so can be asked about flows.
// After a service has stopped hunting, its flows can be half-open for up to the timeout of new
// flows.
func (s *services) setCapabilities(svc *service, rule *dataplane.ServiceRule) {
	if svc.passesOn() {
		rule.Flags |= dataplane.RuleServersPassOn
	}
	switch {
	case svc.Placement == desired.PlacementHunt:
		rule.Flags |= dataplane.RuleServersAnswer | dataplane.RuleHalfOpen | dataplane.RuleAskIdle
		svc.huntsEnd = time.Time{}
	case svc.rule.HasHalfOpen():
		rule.Flags |= dataplane.RuleHalfOpen
		if svc.huntsEnd.IsZero() {
			svc.huntsEnd = time.Now().Add(svc.Timeouts.New)
		}
	}
}

// install makes one of the service's two candidate tables contain the rows. It returns the flag of
// the rule that says which table to use. If the table in use contains the rows already, it stays in
// use, also after a restart.
func (s *services) install(svc *service, rule dataplane.ServiceRule, rows []uint16) (table uint8, err error) {
	table = svc.rule.Table()
	fits := rule.Buckets == svc.rule.Buckets && rule.Row == svc.rule.Row
	if fits && s.plane.Holds(2*svc.id+uint32(table), rows) {
		return table, nil
	}
	table = 1 - table
	svc.hasSpare = true
	return table, s.plane.Install(2*svc.id+uint32(table), rows)
}

// removeSpares removes the candidate tables that are no longer in force.
func (s *services) removeSpares() error {
	if !slices.ContainsFunc(slices.Collect(maps.Values(s.byName)), func(svc *service) bool { return svc.hasSpare }) {
		return nil
	}
	if err := s.plane.Settle(); err != nil {
		return err
	}
	inForce := map[uint32]bool{}
	for _, entry := range s.plane.Services.All() {
		if entry.IsService() {
			inForce[entry.Table()] = true
		}
	}
	for name, svc := range s.byName {
		for number := 2 * svc.id; svc.hasSpare && number <= 2*svc.id+1; number++ {
			if inForce[number] {
				continue
			}
			if err := s.plane.Uninstall(number); err != nil {
				return fmt.Errorf("service %s: %w", name, err)
			}
		}
		svc.hasSpare = false
	}
	return nil
}

// endHunts ends the transition of services that have stopped hunting, when their last half-open
// flows have expired.
func (s *services) endHunts(now time.Time) {
	for _, svc := range s.byName {
		if svc.huntsEnd.IsZero() || now.Before(svc.huntsEnd) {
			continue
		}
		svc.huntsEnd = time.Time{}
		svc.rule.Flags &^= dataplane.RuleHalfOpen
		s.writeRule(svc)
		for _, m := range svc.members {
			s.plane.Servers.SetKnown(m.slot, knownFunction(&svc.Service))
		}
	}
}

// knownFunction returns the function that packets of known flows ask of a service's servers. The
// servers of a service that hunts wait for an acknowledgement that the balancer knows the flow.
func knownFunction(svc *desired.Service) srv6.Function {
	if svc.Placement == desired.PlacementHunt {
		return srv6.AckStickiness
	}
	return srv6.Deliver
}

// keepOnly makes the table of services contain the wanted services and no others. It frees the
// numbers of the others.
func (s *services) keepOnly(wanted map[string]bool) error {
	if err := s.enter(wanted); err != nil {
		return err
	}
	for name, svc := range s.byName {
		if wanted[name] {
			continue
		}
		err := errors.Join(
			s.plane.Uninstall(2*svc.id), s.plane.Uninstall(2*svc.id+1), s.plane.UnlabelService(svc.id))
		if err != nil {
			return fmt.Errorf("remove service %s: %w", name, err)
		}
		delete(s.byName, name)
		s.free = append(s.free, svc.id)
	}
	return nil
}

// enter replaces the table of services by one with the wanted services. All entries change at once,
// so that no packet misses its service while services exchange their VIPs or ports.
func (s *services) enter(wanted map[string]bool) error {
	entries := map[dataplane.ServiceEntry]dataplane.ServiceEntry{} // by key
	for name, svc := range s.byName {
		if !wanted[name] {
			continue
		}
		key, vip := dataplane.ServiceKey(&svc.Service), dataplane.VIPKey(svc.VIP)
		entry := key
		entry.Id, entry.Rule = svc.id, svc.rule
		entries[key], entries[vip] = entry, vip
	}
	changed := func(e dataplane.ServiceEntry) bool { return entries[e.Key()] != e }
	before := s.plane.Services.All()
	if len(before) == len(entries) && !slices.ContainsFunc(before, changed) {
		return nil
	}
	return s.plane.Services.Replace(slices.Collect(maps.Values(entries)), s.plane.Settle)
}

// retireSlots retires the slots of servers that are no longer configured.
func (s *services) retireSlots() error {
	held := map[uint32]bool{}
	for _, m := range s.members() {
		held[m.slot] = true
	}
	return s.slots.RetireOthers(held)
}

// members lists the members of all services.
func (s *services) members() []*member {
	var all []*member
	for _, svc := range s.byName {
		all = append(all, svc.members...)
	}
	return all
}
