// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/tables"
)

// mostBuiltRows is how many candidate tables builtRows keeps. Each has a megabyte or so.
const mostBuiltRows = 8

// builtRows has the last candidate tables that were built, with numbers of servers in place of
// slots. Services with equal sets of servers have equal tables but for the slots, so a change of
// many such services builds one table.
type builtRows struct {
	keys []rowsKey // the latest one last
	rows map[rowsKey]*dataplane.Rows
	// last are the last tables of single sets, also those of earlier changes: the next change of a
	// service needs the tables of its former sets again.
	last []builtSet
}

type builtSet struct {
	set   serversets.Set
	table *tables.Table
}

const (
	mostLast = 4       // how many tables last has
	mostKept = 1 << 20 // how many entries a table in last may have: 2 MB
)

// forget forgets the candidate tables that build has kept. It keeps b.last, the tables of single
// sets, for the next change.
func (b *builtRows) forget() { b.keys, b.rows = nil, nil }

// table returns the table of a set. It returns an error if the set is not valid.
func (b *builtRows) table(set serversets.Set) (*tables.Table, error) {
	isOfSet := func(built builtSet) bool { return reflect.DeepEqual(built.set, set) }
	if i := slices.IndexFunc(b.last, isOfSet); i >= 0 {
		return b.last[i].table, nil
	}
	table, err := set.Table()
	if err == nil && len(table.Rows) <= mostKept {
		if len(b.last) == mostLast {
			b.last = b.last[1:] // without the oldest one
		}
		b.last = append(b.last, builtSet{set, table})
	}
	return table, err
}

type rowsKey [sha256.Size]byte

// build returns the candidate table of an input. It takes a table that it has kept, or else builds
// one. Both have numbers in place of slots: the number of a server is its index in the sorted
// names. So build then replaces the numbers by slots. Errors are those of buildRows.
func (b *builtRows) build(p tableInput) (*dataplane.Rows, error) {
	names := slices.Sorted(maps.Keys(p.slots))
	key := p.key(names)
	rows := b.rows[key]
	if rows == nil {
		numbered := p
		numbered.slots = make(map[string]uint16, len(names))
		for i, name := range names {
			numbered.slots[name] = uint16(i)
		}
		var err error
		if rows, err = b.buildRows(numbered); err != nil {
			return nil, err
		}
		b.keep(key, rows)
	}
	slots := make([]uint16, len(names))
	for i, name := range names {
		slots[i] = p.slots[name]
	}
	return rows.WithSlots(slots), nil
}

// keep stores a table under its key. If there are mostBuiltRows already, it forgets the oldest one.
func (b *builtRows) keep(key rowsKey, rows *dataplane.Rows) {
	if b.rows == nil {
		b.rows = map[rowsKey]*dataplane.Rows{}
	}
	if len(b.keys) == mostBuiltRows {
		delete(b.rows, b.keys[0])
		b.keys = b.keys[1:]
	}
	b.keys, b.rows[key] = append(b.keys, key), rows
}

// key returns a hash that identifies the input, apart from the slots. The names are those of the
// servers that have a slot.
func (p *tableInput) key(names []string) rowsKey {
	text, err := json.Marshal([]any{p.sets, names, p.depth, p.columns})
	if err != nil {
		panic(err) // they contain only numbers and strings
	}
	return sha256.Sum256(text)
}

// buildRows builds the candidate table of the sets. Each place of a row has its present server and
// then the last other servers that it had, p.depth in all. Servers that are no longer configured
// have no slot, and are left out. If packets need a column table, a row has as many places as
// candidates are configured, also if there are fewer servers: the width of cookies must not change
// when servers come and go. buildRows returns an error if a set is not valid.
func (b *builtRows) buildRows(p tableInput) (*dataplane.Rows, error) {
	built := make([]*tables.Table, len(p.sets))
	candidates := 0
	if p.columns {
		candidates = p.sets[0].Candidates
	}
	for i, set := range p.sets {
		var err error
		if built[i], err = b.table(set); err != nil {
			return nil, err
		}
		candidates = max(candidates, built[i].Candidates)
	}
	rows := dataplane.NewRows(built[0].Buckets, min(p.depth, len(p.sets)), candidates, p.sets[0].BucketHash)
	for i, table := range built {
		addSet(rows, table, p.slots, i == 0)
	}
	return rows, nil
}

// addSet adds the servers of a table to rows. The first table to be added is that of the present
// set, then comes that of the set before it, and so on. The table of a former set can have fewer
// rows, under round-robin: addSet repeats them.
func addSet(rows *dataplane.Rows, table *tables.Table, slots map[string]uint16, isPresent bool) {
	slotOf := make([]uint16, len(table.Servers))
	for i, server := range table.Servers {
		slot, ok := slots[server.Name]
		if !ok {
			slot = tables.NoServer
		}
		slotOf[i] = slot
	}
	for bucket := 0; bucket < int(rows.Buckets) && table.Candidates > 0; bucket++ {
		for candidate, server := range table.Row(bucket % table.Buckets) {
			switch slot := slotOf[server]; {
			case slot == tables.NoServer:
			case isPresent:
				rows.SetPresent(bucket, candidate, slot)
			default:
				rows.AddFormer(bucket, candidate, slot)
			}
		}
	}
}

// tableInput is the complete input of a service's candidate table.
type tableInput struct {
	sets    []serversets.Set  // the present one first
	slots   map[string]uint16 // of the configured servers by name
	depth   int               // how many servers each place has, the present one included
	columns bool              // packets also need a column table
}

// inputOf returns the input for a service's generation. The former sets are of use only if packets
// can be passed on from server to server, and if the sets can be in one table with the present one.
func inputOf(svc *service, g serversets.Generation) tableInput {
	p := tableInput{sets: g.Sets, slots: map[string]uint16{}, depth: svc.Generations}
	if svc.FindsByColumn() {
		p.depth, p.columns = svc.History, true
	}
	if !svc.passesOn() {
		p.sets = p.sets[:1]
	}
	p.sets = slices.Clone(p.sets)
	former := slices.DeleteFunc(p.sets[1:], func(s serversets.Set) bool {
		// In rows of another length, cookies and hints would mean other columns.
		hasOtherColumns := p.columns && s.Candidates != p.sets[0].Candidates
		return hasOtherColumns || !p.sets[0].CanHold(s)
	})
	p.sets = p.sets[:1+len(former)]
	for _, m := range svc.members {
		p.slots[m.Name] = uint16(m.slot)
	}
	return p
}

// digest returns a hash that is the same on all balancers with the same candidate table.
func (p *tableInput) digest() uint32 {
	if p.columns {
		return serversets.Digest(p.sets, p.depth)
	}
	return serversets.Digest(p.sets, 0)
}

// passesOn tells whether the service's servers have agents that pass packets on to each other.
// Agents do so with TCP only.
func (svc *service) passesOn() bool {
	return svc.Protocol == desired.TCP && (svc.ServersDecide() || svc.Probes() || svc.FindsByColumn())
}

// ruleChange is a rule of a service that is about to be put in force, with its candidate table.
type ruleChange struct {
	svc   *service
	want  *serviceState
	input tableInput
	table uint8 // which of the service's two tables
	// rows is the content of the table. After install it is only the shape. It is nil if the input
	// has not changed, so that the table in force stays.
	rows  *dataplane.Rows
	isNew bool // the table has to be written
	// isWide tells for this service what transition.isWide tells for all.
	isWide bool
}

// size returns how many slots have to be written.
func (p *ruleChange) size() int {
	if !p.isNew {
		return 0
	}
	return p.rows.Size()
}

// number returns the number of the table among the tables of all services.
func (p *ruleChange) number() uint32 { return 2*p.svc.id + uint32(p.table) }

// prepareTable computes the candidate table of a service that is to follow a state. If the input is
// that of the table in force, the result has no rows, and the table stays. If the table in force
// contains the computed rows already, as after a restart, it stays too. Otherwise the result names
// the service's other table, which install has to write.
func (s *services) prepareTable(svc *service, want *serviceState) (*ruleChange, error) {
	p := &ruleChange{
		svc: svc, want: want, input: inputOf(svc, want.generation), table: svc.rule.Table(),
	}
	if reflect.DeepEqual(p.input, svc.builtFrom) {
		return p, nil
	}
	var err error
	if p.rows, err = s.built.build(p.input); err != nil {
		return nil, err
	}
	fits := p.rows.Buckets == svc.rule.Buckets() && p.rows.Row() == svc.rule.Row
	// Holds compares only the words of the rows, not their shape, which is in the rule.
	if !fits || !s.plane.Holds(p.number(), p.rows) { // the other table is to be written
		p.table, p.isNew, svc.hasSpare = 1-p.table, true, true
	}
	return p, nil
}

// place puts the rule of a service in force, which names its candidate table. The table exists. If
// packets may still use the table or the rule before, place leaves the rest to settle. Otherwise it
// calls admit for the service.
func (s *services) place(p *ruleChange) error {
	svc := p.svc
	rule := dataplane.RuleOf(svc.Service)
	// The number of the table is also its flag. The other flags follow.
	rule.SetBuckets(svc.rule.Buckets())
	rule.Row, rule.Flags = svc.rule.Row, p.table
	if p.rows != nil {
		rule.SetBuckets(p.rows.Buckets)
		rule.Row = p.rows.Row()
		if !p.input.columns {
			if err := s.plane.RemoveColumns(p.number()); err != nil {
				return err
			}
		}
	}
	label := dataplane.ServiceLabel{
		Name: svc.Name, Generation: p.want.generation.Number, Digest: p.input.digest(),
		Estimator: svc.EstimatorName(),
	}
	if label != svc.label {
		if err := s.plane.LabelService(svc.id, label); err != nil {
			return err
		}
		svc.label = label
	}
	s.setCapabilities(svc, &rule)
	// Until settle, packets may still use the table before, or still use known_sid to compare
	// cookies.
	swapsTable := rule.Table() != svc.rule.Table()
	losesCookies := svc.takesPlainPath() && !svc.Persistence.Method().HasCookies
	svc.rule, svc.builtFrom = rule, p.input
	if swapsTable || losesCookies {
		s.admitUsable(svc)
		s.swapped = append(s.swapped, svc)
	} else {
		s.admit(svc)
	}
	return nil
}

// settle waits until no packet uses a candidate table or a rule that was replaced. It then makes
// servers that are not in the new tables cease to get new flows, and makes packets of known flows
// ask servers for what the new rules require. It waits only once for all services, because a wait
// can take tens of milliseconds. settle returns an error if the wait fails, and can be called
// again.
func (s *services) settle() error {
	if len(s.swapped) == 0 {
		return nil
	}
	if err := s.plane.Settle(); err != nil {
		return fmt.Errorf("wait for packets that use the candidate tables before: %w", err)
	}
	for _, svc := range s.swapped {
		s.setKnownSID(svc, svc.knownSID)
		s.admit(svc)
	}
	s.swapped = nil
	return nil
}

// setKnownSID sets what packets of known flows ask of a service's servers.
func (s *services) setKnownSID(svc *service, known dataplane.KnownSID) {
	svc.knownSID = known
	for _, m := range svc.members {
		s.plane.Servers.SetKnownSID(m.slot, known)
	}
}

// removeSpares removes the candidate tables that are no longer in force, after it has waited until
// no packet uses them. This wait (Settle) also frees the lines of former rankings. If there are
// neither such tables nor such lines, removeSpares does nothing.
func (s *services) removeSpares() error {
	hasSpare := func(svc *service) bool { return svc.hasSpare }
	if !slices.ContainsFunc(slices.Collect(maps.Values(s.byName)), hasSpare) &&
		!s.plane.Rankings.HasFormer() {
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
		if !svc.hasSpare {
			continue
		}
		for _, number := range []uint32{2 * svc.id, 2*svc.id + 1} {
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

// setCapabilities sets the flags of a rule that tell what the service's servers can do: whether
// they pass packets on, and whether they send signals and so can be asked about flows. Other flags
// tell what flows of an earlier method may be left. After a service has stopped hunting, its flows
// can be half-open for up to the timeout of new flows.
func (s *services) setCapabilities(svc *service, rule *dataplane.ServiceRule) {
	if svc.passesOn() {
		rule.Flags |= dataplane.RuleServersPassOn
	}
	switch persistence := svc.Persistence.Method(); {
	case persistence.ByColumn:
		rule.Flags |= dataplane.RuleInRow
		if persistence.NeedsHints || s.hasHints {
			rule.Flags |= dataplane.RuleServersAnswer
		}
		svc.setFormerFlows(rule)
	case persistence.HasIDs:
		svc.setFormerFlows(rule)
	case svc.ServersDecide():
		rule.Flags |= dataplane.RuleServersAnswer | dataplane.RuleHalfOpen | dataplane.RuleAskIdle
		svc.huntsEnd = time.Time{}
	case svc.rule.HasHalfOpen():
		rule.Flags |= dataplane.RuleHalfOpen
		if svc.huntsEnd.IsZero() {
			svc.huntsEnd = time.Now().Add(svc.Timeouts.New)
		}
	}
}

// setFormerFlows sets the flags about former flows in the new rule of a service without a flow
// table. If the service had a flow table before, the flow tables still have its flows, until the
// last one has ended. If it had none, setFormerFlows sets no flag.
func (svc *service) setFormerFlows(rule *dataplane.ServiceRule) {
	svc.huntsEnd = time.Time{}
	if !svc.hasFormerFlows() {
		return
	}
	rule.Flags |= dataplane.RuleFormerFlows | svc.rule.Flags&dataplane.RuleHalfOpen
	if svc.formerSince.IsZero() {
		svc.formerSince = time.Now()
	}
}

// hasFormerFlows tells whether the flow tables may have flows of a service that has no flow table,
// or is about to have none. The service's rule is still the one before the change.
func (svc *service) hasFormerFlows() bool {
	had := svc.rule.Buckets() > 0 && svc.rule.PersistenceName().Method().HasFlowTable
	return had || svc.rule.HasFormerFlows()
}

// endFormerFlows ends the transition of services from persistence table, when the flow tables have
// none of their flows any more. The argument kept contains the entries that a sweep has counted, by
// slot. A service has to wait at least its timeout of new flows after the change: until then, the
// answer of a server can still make an entry.
func (s *services) endFormerFlows(kept []dataplane.SweptServer, now time.Time) {
	for _, svc := range s.byName {
		mayGetEntries := now.Before(svc.formerSince.Add(svc.Timeouts.New))
		hasFlows := func(m *member) bool { return hasEntries(kept, m.slot) }
		if !svc.rule.HasFormerFlows() || mayGetEntries || slices.ContainsFunc(svc.members, hasFlows) {
			continue
		}
		svc.formerSince = time.Time{}
		s.setKnownSID(svc, knownSIDOf(svc.Service, s.hasHints))
		svc.rule.Flags &^= dataplane.RuleFormerFlows | dataplane.RuleHalfOpen
		s.writeRule(svc)
	}
}

// hasEntries tells whether a sweep has counted entries of a slot.
func hasEntries(kept []dataplane.SweptServer, slot uint32) bool {
	if int(slot) >= len(kept) {
		return false
	}
	for state := range kept[slot].Flows {
		if state == int(dataplane.FlowFree) {
			continue
		}
		if kept[slot].Flows[state] > 0 || kept[slot].HalfOpen[state] > 0 {
			return true
		}
	}
	return false
}

// writeRule puts a service's rule in force, at all of its VIPs and ports that are in force. A service
// that is new, or that moves to another VIP or port, waits there until all services are ready (enter).
func (s *services) writeRule(svc *service) {
	for _, key := range dataplane.KeysOfService(svc.Service) {
		entry := s.plane.Services.Find(key)
		if entry != nil && entry.Service() == svc.id {
			entry.SetRule(svc.rule)
		}
	}
}

// admit tells the data path which servers of a service get new flows, whether there is one, and
// what becomes of the flows of failed servers. Servers that get new flows again after a fault begin
// slowly, if the service has slow starts.
func (s *services) admit(svc *service) {
	unused := s.admitUsable(svc)
	for _, m := range unused {
		s.plane.Servers.SetFlags(m.slot, s.flagsOfUnused(svc, m))
	}
	s.inference.admitted(svc)
	s.endFlows(svc, unused)
}

// admitUsable makes the usable servers of a service get new flows, and then puts the service's rule
// in force, which may name a new candidate table. It returns the other servers, and does not change
// them: those in the former table must get new flows until no packet uses that table (settle).
// Otherwise packets would see a change of weights in part, because a server whose weight is or was
// 0 is in only one of the two tables.
func (s *services) admitUsable(svc *service) (unused []*member) {
	usable := s.usable(svc)
	if ability := s.abilityOf(svc, usable); ability != svc.ability {
		svc.ability, s.abilitiesChanged = ability, true
	}
	used := make(map[*member]bool, len(usable))
	// If no server is usable, awaits is true as well.
	svc.awaits = !slices.ContainsFunc(usable, func(m *member) bool { return !svc.awaitsCheck(m) })
	svc.rule.Flags &^= dataplane.RuleTakesFlows
	for _, m := range usable {
		used[m] = true
	}
	s.pace(svc, used, time.Now())
	for m := range used {
		s.plane.Servers.SetService(m.slot, svc.id)
		s.plane.Servers.SetFlags(m.slot, m.flags(true)|m.slow.flags())
		svc.rule.Flags |= dataplane.RuleTakesFlows
	}
	s.writeRule(svc)
	return only(svc.members, func(m *member) bool { return !used[m] })
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
		s.setKnownSID(svc, knownSIDOf(svc.Service, s.hasHints))
	}
}
