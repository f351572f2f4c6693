// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/health"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/srv6"
)

// transition is a desired state that is about to be put in force.
type transition struct {
	wanted  map[string]bool // the names of all its services
	changed []*ruleChange   // of the services that follow another state
	// isWide tells that entries, slots or IDs may change, so that some may be left that no service
	// needs any more. A change of nothing but drains, weights and settings is not wide.
	isWide bool
}

// prepare writes all that a desired state needs, except the rules of services: servers, the tables
// that only the programs of this process read, rankings and candidate tables. So packets are
// handled as before, until enforce. A service that follows the wanted state already is not changed.
// After an error, the caller can call prepare and enforce with the state before, to restore it.
func (s *services) prepare(
	cfg *desired.Balancer, generations serversets.Generations,
) (*transition, error) {
	next := &transition{wanted: make(map[string]bool, len(cfg.Services))}
	next.isWide = !s.isSure || s.locator != cfg.Node.Locator || s.rejects != cfg.Node.Reject ||
		s.dropRemoved != cfg.Node.DropRemovedVIPs
	s.abilitiesChanged, s.isSure = true, false
	defer s.built.forget()
	s.locator, s.rejects, s.dropRemoved = cfg.Node.Locator, cfg.Node.Reject, cfg.Node.DropRemovedVIPs
	// An earlier call that failed may have left tables that packets use.
	if err := s.settle(); err != nil {
		return nil, err
	}
	if err := s.plane.SetLocator(cfg.Node.Locator); err != nil {
		return nil, err
	}
	var changed []*serviceState
	for i := range cfg.Services {
		service := &cfg.Services[i]
		next.wanted[service.Name] = true
		want := newServiceState(service, &cfg.Node, generations[service.Name])
		svc := s.byName[service.Name]
		if svc == nil || svc.follows == nil || !svc.follows.equals(want) {
			changed = append(changed, want)
			continue
		}
		svc.Service, svc.follows = service, want // so that nothing refers to the former state
	}
	var err error
	if next.changed, err = s.prepareAll(changed); err != nil {
		return nil, err
	}
	next.isWide = next.isWide || len(next.wanted) < len(s.byName) ||
		slices.ContainsFunc(next.changed, func(p *ruleChange) bool { return p.isWide })
	if next.isWide {
		err = s.plane.SetDomain(cfg)
	}
	return next, err
}

// enforce puts a state in force that was prepared. The attached programs must have its features.
// After a wide transition, enforce removes all that no service needs any more. It removes servers
// last, after the tables that name them.
func (s *services) enforce(next *transition) error {
	if err := s.placeAll(next.changed); err != nil {
		return err
	}
	if err := s.settle(); err != nil {
		return err
	}
	if next.isWide {
		s.endInferences(next.wanted)
		if err := s.keepOnly(next.wanted); err != nil {
			return err
		}
		if err := errors.Join(s.keepQUICServers(), s.retireSlots()); err != nil {
			return err
		}
	}
	s.isSure = true
	return nil
}

// The limits of a batch of candidate tables. Each table has an open file until its batch is
// installed.
const (
	tablesAtOnce = 64
	slotsAtOnce  = 1 << 25 // slots in all tables of a batch: 64 MB
)

// serviceState is all of a desired state that a service depends on.
type serviceState struct {
	service    *desired.Service
	locator    netip.Prefix // of the balancer
	addresses  []netip.Addr // of the balancer
	sources    netip.Prefix // of tunnels over IPv4; if not valid, one of the addresses is used
	generation serversets.Generation
	// names is set only for services that infer. It contains only the name of this balancer and the
	// peers.
	names desired.BalancerNode
}

// newServiceState returns the state of a service of the node, with its generation.
func newServiceState(
	service *desired.Service, node *desired.BalancerNode, g serversets.Generation,
) *serviceState {
	state := &serviceState{
		service: service, locator: node.Locator, addresses: node.Addresses, sources: node.TunnelSources,
		generation: g,
	}
	if service.Placement.Infers() {
		state.names = desired.BalancerNode{Name: node.Name, Peers: node.Peers}
	}
	return state
}

// equals tells whether a service that follows one of the states also follows the other.
func (s *serviceState) equals(other *serviceState) bool {
	return s.service.Same(other.service) &&
		s.locator == other.locator && slices.Equal(s.addresses, other.addresses) &&
		s.sources == other.sources && s.generation.Equal(other.generation) &&
		s.names.Name == other.names.Name && slices.Equal(s.names.Peers, other.names.Peers)
}

// prepareAll prepares each service for its wanted state, and installs the tables that it needs. It
// installs them in batches, because the kernel waits once for a batch. placeAll then puts the
// tables in force.
func (s *services) prepareAll(all []*serviceState) ([]*ruleChange, error) {
	changes := make([]*ruleChange, 0, len(all))
	installed, waitingSlots := 0, 0
	for _, want := range all {
		s.progress.Add(1)
		p, err := s.prepareService(want)
		if err != nil {
			return nil, fmt.Errorf("service %s: %w", want.service.Name, err)
		}
		changes, waitingSlots = append(changes, p), waitingSlots+p.size()
		if len(changes)-installed >= tablesAtOnce || waitingSlots >= slotsAtOnce {
			if err := s.install(changes[installed:]); err != nil {
				return nil, err
			}
			installed, waitingSlots = len(changes), 0
		}
	}
	return changes, s.install(changes[installed:])
}

// install writes the new candidate tables and column tables of services.
func (s *services) install(all []*ruleChange) error {
	var tables []dataplane.NumberedRows
	for _, p := range all {
		if p.isNew {
			tables = append(tables, dataplane.NumberedRows{Number: p.number(), Rows: p.rows})
		}
	}
	if len(tables) > 0 {
		if err := s.plane.Install(tables); err != nil {
			return err
		}
	}
	for _, p := range all {
		s.progress.Add(1)
		if p.rows == nil { // the table in force stays, and its columns too
			continue
		}
		if p.input.columns {
			if err := s.plane.InstallColumns(p.number(), p.rows); err != nil {
				return fmt.Errorf("service %s: %w", p.svc.Name, err)
			}
		}
		p.rows = p.rows.Shape() // the rows of all services at once would need a lot of memory
	}
	return nil
}

// placeAll puts rules in force, with their candidate tables, which are installed.
func (s *services) placeAll(all []*ruleChange) error {
	for _, p := range all {
		s.progress.Add(1)
		if err := s.place(p); err != nil {
			return fmt.Errorf("service %s: %w", p.svc.Name, err)
		}
		p.svc.follows = p.want
	}
	return nil
}

// prepareService makes a service ready for its wanted state, except for its rule. It adds the
// service if it is new, and gives its servers slots. It writes their connection IDs and their
// ranking, if the service has such. Then it computes the candidate table, which the caller
// installs.
func (s *services) prepareService(want *serviceState) (*ruleChange, error) {
	svc := s.byName[want.service.Name]
	if svc == nil {
		var err error
		if svc, err = s.add(want.service.Name); err != nil {
			return nil, err
		}
	}
	isKnown := svc.follows != nil
	svc.follows = nil // until all steps have succeeded
	// This undoes endFlows for the former members. Later, admit calls endFlows for the new ones.
	s.joinService(svc)
	before, slots := svc.Service, svc.slots()
	members, err := s.claimMembers(svc, want)
	if err != nil {
		return nil, err
	}
	svc.Service, svc.members, svc.named = want.service, members, map[string]*member{}
	for _, m := range members {
		svc.named[m.Name] = m
	}
	// needsAll tells that the service still needs all slots, entries and IDs that it had.
	needsAll := isKnown && slices.Equal(slots, svc.slots()) && keepsEntries(before, svc.Service)
	if err := s.addQUICServers(svc); err != nil {
		return nil, err
	}
	if err := s.rank(svc, &want.names); err != nil {
		return nil, err
	}
	p, err := s.prepareTable(svc, want)
	if err == nil {
		p.isWide = !needsAll
	}
	return p, err
}

// keepsEntries tells whether a changed service, whose servers keep their slots, still needs all
// entries that the tables have for it.
func keepsEntries(before, now *desired.Service) bool {
	return slices.Equal(dataplane.KeysOfService(before), dataplane.KeysOfService(now)) &&
		slices.Equal(before.Sources, now.Sources) &&
		before.Placement.Infers() == now.Placement.Infers() &&
		!before.Persistence.Method().HasIDs && !now.Persistence.Method().HasIDs
}

// rank begins or continues the estimates of a service that infers, for its present members, and
// puts the members into its ranking. For other services, rank does nothing: endInferences removes a
// ranking that they had.
func (s *services) rank(svc *service, names *desired.BalancerNode) error {
	if !svc.Placement.Infers() {
		return nil
	}
	if err := s.inference.arrange(svc, names); err != nil {
		return err
	}
	return s.plane.Rankings.Set(svc.id, svc.slots())
}

// endInferences removes the rankings of services that have ceased to infer.
func (s *services) endInferences(wanted map[string]bool) {
	for name, svc := range s.byName {
		if wanted[name] && !svc.Placement.Infers() {
			s.endInference(svc)
		}
	}
}

// endInference ends the inference of a service, and removes its ranking, if it has one.
func (s *services) endInference(svc *service) {
	s.inference.remove(svc.Name)
	s.plane.Rankings.Remove(svc.id)
}

// add gives a new service a number and a label. It resets the turns of round-robin and the load
// reports that the tables have for this number, because another service may have had it. add
// returns an error if no number is free, or if a table cannot be changed.
func (s *services) add(name string) (*service, error) {
	if err := s.checkRoom(1); err != nil {
		return nil, err
	}
	id := s.free[len(s.free)-1]
	if err := s.plane.LabelService(id, dataplane.ServiceLabel{Name: name}); err != nil {
		return nil, err
	}
	if err := errors.Join(s.plane.BeginTurns(id), s.plane.ForgetReports(id)); err != nil {
		return nil, err
	}
	s.free = s.free[:len(s.free)-1]
	svc := &service{Service: &desired.Service{Name: name}, id: id}
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

// claimMembers gives the configured servers their slots. A server that existed before with the same
// addresses keeps the causes for which it is unfit, even if an earlier process has found them. If
// its health checks now ask for something else, it awaits its first check again.
func (s *services) claimMembers(svc *service, want *serviceState) ([]*member, error) {
	cfg := want.service
	svc.knownSID = s.knownSIDFor(svc, cfg)
	known := svc.knownSID
	if svc.takesPlainPath() {
		// Packets of the rule before still use known_sid on the plain path
		// (lookup_stateless_plain). Until settle, these packets must ask servers to compare the
		// cookie: a server must not deliver a packet whose cookie leads elsewhere. The condition is
		// false for a service with former flows, because none of its packets takes the plain path.
		known = knownSIDOf(&desired.Service{
			Persistence: desired.PersistenceStateless, Candidates: int(svc.rule.Candidates()),
		}, s.hasHints)
	}
	members := make([]*member, 0, len(cfg.Servers))
	before, now := checksOf(svc.Service), checksOf(cfg)
	for _, server := range cfg.Servers {
		key := keyOfServer(cfg, &server, want.locator, want.addresses)
		noted := s.slots.Noted(key)
		old := svc.member(server.Name)
		if slot, ok := s.slots.Of(key); old != nil && (!ok || slot != old.slot) {
			old = nil // the address has changed: the causes belong to another host
		}
		m := newMember(server, cfg, old, noted)
		was, is := before[server.Name], now[server.Name]
		if was != nil && is != nil && !was.AsksAs(is) {
			m.checked = false
		}
		m.took = s.slots.TookFlows(key)
		slot, err := s.slots.Claim(key, svc.id, known, m.flags(true))
		if err != nil {
			return nil, fmt.Errorf("server %s: %w", server.Name, err)
		}
		s.plane.Servers.SetVaried(slot, want.sources)
		m.slot = slot
		s.reach(m)
		members = append(members, m)
	}
	return members, nil
}

// checksOf returns the health checks of a service's servers, by server.
func checksOf(svc *desired.Service) map[string]*health.Target {
	checks := map[string]*health.Target{}
	targets := health.Targets([]desired.Service{*svc})
	for i := range targets {
		checks[targets[i].Server] = &targets[i]
	}
	return checks
}

// knownSIDFor returns what packets of known flows ask of the servers of a service that gets another
// configuration. The result depends on the service's rule before.
func (s *services) knownSIDFor(svc *service, cfg *desired.Service) dataplane.KnownSID {
	known := knownSIDOf(cfg, s.hasHints)
	if cfg.FindsByColumn() && svc.hasFormerFlows() {
		// The flows that the flow table knows carry no cookies. With this function, a server also
		// takes the repeated SYN of a known flow, if the first one was lost.
		known = dataplane.KnownSID{Function: srv6.Deliver}
	}
	if svc.rule.HasHalfOpen() {
		// Until huntsEnd, servers still wait for the acknowledgement that the balancer knows the
		// flow.
		known.Function = srv6.AckStickiness
	}
	return known
}

// keyOfServer returns the key of a server's slot: its names, its address and the source address of
// packets to it.
func keyOfServer(
	svc *desired.Service, server *desired.Server, locator netip.Prefix, addresses []netip.Addr,
) dataplane.ServerKey {
	key := dataplane.ServerKey{Service: svc.Name, Server: server.Name}
	if server.Locator.IsValid() {
		key.Address, key.Source = server.Locator.Addr(), locator.Addr()
		return key
	}
	key.Address = server.Address
	for _, source := range addresses {
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
			svc := &cfg.Services[i]
			keys[keyOfServer(svc, &svc.Servers[j], cfg.Node.Locator, cfg.Node.Addresses)] = true
		}
	}
	return keys
}

// knownSIDOf returns what packets of known flows ask of a service's servers:
//
//   - With cookies, a server checks whether it has the flow. The argument has the width of the
//     cookie. If the balancer has hints, the server returns a packet whose flow it does not have.
//   - If flows are found by columns without cookies, a server also checks whether it has the flow.
//     It always returns a packet whose flow it does not have.
//   - For other services that do not hunt, a server just delivers the packet. So it does for QUIC:
//     no server signals, and the packet names the server.
//   - For any other service that hunts, the packet acknowledges that the balancer knows the flow,
//     which the server waits for. If load reports order the servers, the packet also asks for a
//     report.
func knownSIDOf(svc *desired.Service, hasHints bool) dataplane.KnownSID {
	switch persistence := svc.Persistence.Method(); {
	case persistence.HasCookies:
		return dataplane.KnownSID{Function: srv6.Steer, Argument: srv6.Offer{
			Cookie:  max(1, bits.Len(uint(svc.Candidates-1))), // as in bpf/balancer/persist/cookie.h
			Returns: hasHints,
		}.Argument()}
	case persistence.ByColumn:
		return dataplane.KnownSID{Function: srv6.Steer, Argument: srv6.Offer{Returns: true}.Argument()}
	case !svc.ServersDecide(), persistence.HasIDs:
		return dataplane.KnownSID{Function: srv6.Deliver}
	}
	return dataplane.KnownSID{
		Function: srv6.AckStickiness,
		Argument: srv6.Offer{WantsReport: svc.OrdersByReports()}.Argument(),
	}
}

// keepOnly makes the table of services contain the wanted services and no others. It frees the
// numbers of all other services, and removes their rankings, their tables and their labels.
func (s *services) keepOnly(wanted map[string]bool) error {
	if err := s.enter(wanted); err != nil {
		return err
	}
	for name, svc := range s.byName {
		if wanted[name] {
			continue
		}
		s.progress.Add(1)
		// If a step fails, the next reconcile with this service must write all of it again.
		svc.follows, svc.builtFrom, svc.label = nil, tableInput{}, dataplane.ServiceLabel{}
		s.endInference(svc)
		err := errors.Join(
			s.plane.Uninstall(2*svc.id), s.plane.Uninstall(2*svc.id+1), s.plane.UnlabelService(svc.id))
		if err != nil {
			return fmt.Errorf("remove service %s: %w", name, err)
		}
		delete(s.byName, name)
		delete(s.starting, svc)
		s.free = append(s.free, svc.id)
	}
	return nil
}

// enter replaces the table of services by one with the wanted services, and with the VIPs that have
// lost their last service not long ago. All entries change at once, so that no packet misses its
// service while services exchange their VIPs or ports.
func (s *services) enter(wanted map[string]bool) error {
	entries := map[dataplane.ServiceEntry]dataplane.ServiceEntry{} // by key
	before, sources := s.plane.Services.All(), dataplane.SourcePrefixes{}
	known := knownVIPs(before)
	for name, svc := range s.byName {
		if !wanted[name] {
			continue
		}
		numbers := known[svc.id].numbersOf(svc.AllVIPs())
		sources.Add(svc.id, svc.Sources)
		for _, entry := range dataplane.KeysOfService(svc.Service) {
			vip := dataplane.VIPEntry(entry.VIP(), s.rejects)
			entry.SetNumbers(svc.id, numbers[entry.VIP()])
			if len(svc.Sources) > 0 {
				entry.SetSources()
			}
			entry.Rule = svc.rule
			entries[entry.Key()], entries[vip.Key()] = entry, vip
		}
	}
	removed, err := s.removedVIPs(before, func(vip dataplane.ServiceEntry) bool {
		_, ok := entries[vip]
		return ok
	})
	if err != nil {
		return err
	}
	for _, vip := range removed {
		entries[vip.Key()] = vip
	}
	s.removed = len(removed)
	if err := s.plane.AllowSources(sources); err != nil {
		return err
	}
	changed := func(e dataplane.ServiceEntry) bool { return entries[e.Key()] != e }
	if len(before) != len(entries) || slices.ContainsFunc(before, changed) {
		if err := s.replaceEntries(slices.Collect(maps.Values(entries))); err != nil {
			return err
		}
	}
	return s.plane.KeepSources(sources)
}

// vipNumbers has the numbers of the VIPs of a service in the table of services. They are part of the
// hashes of flows, so a VIP keeps its number while the service has the VIP.
type vipNumbers map[netip.Addr]uint32

// knownVIPs returns the numbers of the VIPs of all services in the table, by the number of the
// service.
func knownVIPs(entries []dataplane.ServiceEntry) map[uint32]vipNumbers {
	known := map[uint32]vipNumbers{}
	for i := range entries {
		e := &entries[i]
		if !e.IsService() {
			continue
		}
		if known[e.Service()] == nil {
			known[e.Service()] = vipNumbers{}
		}
		known[e.Service()][e.VIP()] = e.VIPNumber()
	}
	return known
}

// numbersOf returns the numbers of the VIPs of a service: those that are known, and the lowest free
// numbers for all others. So the only VIP of a service has the number 0, unless it has had others.
func (known vipNumbers) numbersOf(vips []netip.Addr) vipNumbers {
	numbers, taken := make(vipNumbers, len(vips)), map[uint32]bool{}
	for _, vip := range vips {
		if number, ok := known[vip]; ok {
			numbers[vip], taken[number] = number, true
		}
	}
	next := uint32(0)
	for _, vip := range vips {
		if _, ok := numbers[vip]; ok {
			continue
		}
		for taken[next] {
			next++
		}
		numbers[vip], taken[next] = next, true
	}
	return numbers
}

// retireSlots retires the slots of servers that are no longer configured.
func (s *services) retireSlots() error {
	held := map[uint32]bool{}
	for _, m := range s.members() {
		held[m.slot] = true
	}
	return s.slots.RetireOthers(held)
}
