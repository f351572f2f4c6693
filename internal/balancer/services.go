// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/health"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/tables"
)

// service is a service as the data path has it.
type service struct {
	config.Service
	id       uint32
	rule     dataplane.ServiceRule
	members  []*member
	placed   placing          // what its table was built from
	huntsEnd time.Time        // when no flow is half open any more from when it hunted
	logged   dataplane.Causes // that are ignored, as the log has it
}

// services applies a configuration to the data path.
type services struct {
	plane  *dataplane.Plane
	slots  *dataplane.Slots
	byName map[string]*service
	free   []uint32      // numbers that no service has, the next one last
	reach  func(*member) // gives a member its next hop, if that is known
}

// loadServices reads what an earlier process has left; their members and
// configuration come with the first apply.
func loadServices(plane *dataplane.Plane, slots *dataplane.Slots, reach func(*member)) (*services, error) {
	s := &services{plane: plane, slots: slots, byName: map[string]*service{}, reach: reach}
	byID := map[uint32]*service{}
	names, err := plane.ServiceNames()
	if err != nil {
		return nil, err
	}
	for id, name := range names {
		byID[id] = &service{Service: config.Service{Name: name}, id: id}
		s.byName[name] = byID[id]
	}
	for id := uint32(config.MaxServices); id > 0; id-- {
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

// apply makes the data path follow a configuration. Servers come before the
// tables that name them, and go after.
func (s *services) apply(cfg *config.Balancer) error {
	wanted := map[string]bool{}
	for i := range cfg.Services {
		wanted[cfg.Services[i].Name] = true
		if err := s.applyService(&cfg.Services[i], &cfg.Node); err != nil {
			return fmt.Errorf("service %s: %w", cfg.Services[i].Name, err)
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

func (s *services) applyService(cfg *config.Service, node *config.BalancerNode) error {
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
	return s.place(svc)
}

// add gives a service a number.
func (s *services) add(name string) (*service, error) {
	if err := s.checkRoom(1); err != nil {
		return nil, err
	}
	id := s.free[len(s.free)-1]
	if err := s.plane.LabelService(id, name); err != nil {
		return nil, err
	}
	s.free = s.free[:len(s.free)-1]
	svc := &service{Service: config.Service{Name: name}, id: id}
	s.byName[name] = svc
	return svc, nil
}

// checkRoom returns an error if there are no numbers for so many more services.
func (s *services) checkRoom(more int) error {
	if more <= len(s.free) {
		return nil
	}
	return fmt.Errorf("%d new services need %d service IDs, and %d of %d are free: services that are "+
		"being removed still use theirs", more, more, len(s.free), len(s.byName)+len(s.free))
}

// claimMembers gives the configured servers their slots. A server that was there
// before keeps what the health checks found, also before a restart.
func (s *services) claimMembers(svc *service, cfg *config.Service, node *config.BalancerNode) ([]*member, error) {
	before := make(map[string]*member, len(svc.members))
	for _, m := range svc.members {
		before[m.Name] = m
	}
	known := knownFunction(cfg)
	if svc.rule.HasHalfOpen() {
		known = srv6.AckStickiness // servers wait for it, until the hunts have ended
	}
	members := make([]*member, 0, len(cfg.Servers))
	for _, server := range cfg.Servers {
		key := keyOfServer(cfg, &server, node)
		noted, routed := s.slots.Noted(key)
		old := before[server.Name]
		if slot, _ := s.slots.Of(key); old != nil && slot != old.slot {
			old = nil // it is at another address: what is known is of another host
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

// keyOfServer says between which addresses a server's packets travel.
func keyOfServer(svc *config.Service, server *config.Server, node *config.BalancerNode) dataplane.ServerKey {
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

// keysOf are the keys of all servers of a configuration.
func keysOf(cfg *config.Balancer) map[dataplane.ServerKey]bool {
	keys := map[dataplane.ServerKey]bool{}
	for i := range cfg.Services {
		for j := range cfg.Services[i].Servers {
			keys[keyOfServer(&cfg.Services[i], &cfg.Services[i].Servers[j], &cfg.Node)] = true
		}
	}
	return keys
}

// setHealth notes what the checks found of a server, and returns the service
// whose table is to follow: nil when nothing changed, or a reload has removed it.
func (s *services) setHealth(result health.Result) *service {
	return s.setCause(result.Service, result.Server, dataplane.Failing, !result.Healthy, result.Reason)
}

// healthTargets are the servers to be checked, as they are held to be.
func (s *services) healthTargets(services []config.Service) []health.Target {
	targets := health.Targets(services)
	for i := range targets {
		t := &targets[i]
		t.Failing = s.byName[t.Service].member(t.Server).causes.Has(dataplane.Failing)
	}
	return targets
}

// placing is all that a service's entry and table follow from.
type placing struct {
	service config.Service // but for its servers, timeouts, health check and probes
	servers []tables.Server
	slots   []uint16
}

// placingOf describes a service whose new flows go to the given members.
func placingOf(svc *service, usable []*member) placing {
	p := placing{service: svc.Service}
	p.service.Servers, p.service.Timeouts = nil, config.Timeouts{}
	p.service.Health, p.service.Probe = nil, nil
	for _, m := range usable {
		p.servers = append(p.servers, tables.Server{Name: m.Name, Weight: *m.Weight})
		p.slots = append(p.slots, uint16(m.slot))
	}
	return p
}

// place builds a service's table from the servers that take new flows, and swaps
// it in; unless it would be as it is.
func (s *services) place(svc *service) error {
	usable := s.usable(svc)
	used := make(map[*member]bool, len(usable))
	for _, m := range usable {
		used[m] = true
	}
	for _, m := range svc.members {
		s.plane.Servers.SetFlags(m.slot, m.flags(used[m]))
	}
	p := placingOf(svc, usable)
	if reflect.DeepEqual(p, svc.placed) {
		return nil
	}
	table, err := tables.Build(p.servers, svc.Buckets, svc.Candidates)
	if err != nil {
		return err
	}
	rows := table.Rows
	for i, server := range rows {
		rows[i] = p.slots[server]
	}
	rule := dataplane.RuleOf(&svc.Service)
	rule.Candidates = uint8(table.Candidates)
	if table.Candidates > 0 {
		rule.Buckets = uint32(table.Buckets)
	}
	if rule.Flags, err = s.install(svc, rule, rows); err != nil {
		return err
	}
	s.setCapabilities(svc, &rule)
	svc.rule, svc.placed = rule, p
	// One that is new, or moves to another VIP or port, waits until all are ready.
	if entry := s.plane.Services.Find(dataplane.ServiceKey(&svc.Service)); entry != nil && entry.Id == svc.id {
		entry.SetRule(rule)
	}
	return nil
}

// setCapabilities tells persistence what it must know of the placement: whether servers answer, and so
// can be asked. Where they do no longer, flows that are half open still are for a while.
func (s *services) setCapabilities(svc *service, rule *dataplane.ServiceRule) {
	switch {
	case svc.Placement == config.PlacementHunt:
		rule.Flags |= dataplane.RuleServersAnswer | dataplane.RuleHalfOpen | dataplane.RuleAskIdle
		svc.huntsEnd = time.Time{}
	case svc.rule.HasHalfOpen():
		rule.Flags |= dataplane.RuleHalfOpen
		if svc.huntsEnd.IsZero() {
			svc.huntsEnd = time.Now().Add(svc.Timeouts.New)
		}
	}
}

// install makes one of the service's two tables hold the rows, and says which, with what is true of the other:
// a table that is as it would be stays, and with it the one before, after a restart too.
func (s *services) install(svc *service, rule dataplane.ServiceRule, rows []uint16) (table uint8, err error) {
	fits := rule.Buckets == svc.rule.Buckets && rule.Candidates == svc.rule.Candidates
	table = svc.rule.Table()
	if fits && s.plane.Holds(2*svc.id+uint32(table), rows) {
		return table | svc.rule.Flags&dataplane.RuleFormer, nil
	}
	table = 1 - table
	if err := s.plane.Install(2*svc.id+uint32(table), rows); err != nil {
		return 0, err
	}
	if fits {
		table |= dataplane.RuleFormer
	}
	return table, nil
}

// endHunts ends what goes on of hunts in services that place flows themselves now.
func (s *services) endHunts(now time.Time) {
	for _, svc := range s.byName {
		if svc.huntsEnd.IsZero() || now.Before(svc.huntsEnd) {
			continue
		}
		svc.huntsEnd = time.Time{}
		svc.rule.Flags &^= dataplane.RuleHalfOpen
		if entry := s.plane.Services.Find(dataplane.ServiceKey(&svc.Service)); entry != nil && entry.Id == svc.id {
			entry.SetRule(svc.rule)
		}
		for _, m := range svc.members {
			s.plane.Servers.SetKnown(m.slot, knownFunction(&svc.Service))
		}
	}
}

// knownFunction is what a service's servers are asked for packets of known flows: where they are to tell
// the balancer of their flows, the packets tell them that it knows.
func knownFunction(svc *config.Service) srv6.Function {
	if svc.Placement == config.PlacementHunt {
		return srv6.AckStickiness
	}
	return srv6.Deliver
}

// keepOnly brings the wanted services, and no others, into the data path, and frees the numbers of the
// others.
func (s *services) keepOnly(wanted map[string]bool) error {
	if err := s.enter(wanted); err != nil {
		return err
	}
	for name, svc := range s.byName {
		if wanted[name] {
			continue
		}
		if err := s.plane.UnlabelService(svc.id); err != nil {
			return fmt.Errorf("remove service %s: %w", name, err)
		}
		delete(s.byName, name)
		s.free = append(s.free, svc.id)
	}
	return nil
}

// enter makes the table of services have the wanted ones. They come and go together, so that no packet
// misses its service while services change places.
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

// retireSlots retires the slots that no member holds any more.
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
