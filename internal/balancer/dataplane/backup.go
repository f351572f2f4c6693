// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
)

// backup stores the state that a start finds in the tables of an earlier process and may change.
// The start copies small tables completely before it begins. Of a large table, it copies each
// element just before it changes the element.
type backup struct {
	plane         *Plane
	identity      Identity
	generation    uint64
	rules         map[*ServiceEntry]ServiceRule // rules of the services in force
	ports         []Port
	servers       []balancerServer
	rankings      []balancerRanking
	loads         []balancerLoad
	serverLabels  map[uint32]balancerServerLabel
	serviceLabels map[uint32]balancerServiceLabel

	tables   map[tableNumber]*ebpf.Map // replaced tables of services; nil: there was no table
	flows    []sweptFlow
	counters map[uint32]slotCounters
	reasons  map[uint32][]Counter // counters of the forwarding reasons, by reason and CPU
	turns    map[uint32]uint64    // of services that were added, by number
	// estimates are those that were removed, by slot; nil: there was none.
	estimates map[uint32]*balancerEstimate
	samples   map[uint32]balancerReservoir // emptied samples of durations, by slot
	sources   SourcePrefixes
	// wantedSources are those to keep when the takeover is complete; nil: not known.
	wantedSources SourcePrefixes
	restored      bool
}

// tableNumber is the place of a service's table in a map of maps.
type tableNumber struct {
	outer  *ebpf.Map
	number uint32
}

// sweptFlow is a freed entry of a flow table.
type sweptFlow struct {
	place *uint64
	value uint64
}

// slotCounters are the counters of a server. Those of packets and signals are by CPU.
type slotCounters struct {
	packets []ServerCounter
	signals []SignalCounter
	flows   balancerFlowCount
	load    slotLoad
}

// BackUp stores the state of the tables, and registers with the takeover to restore it on undo.
// From BackUp until the end of the takeover, each change stores the state that it replaces. BackUp
// returns an error if a table cannot be read.
func (p *Plane) BackUp(t *datapath.Takeover) error {
	b := &backup{
		plane:      p,
		generation: p.Directory.Generation,
		rules:      map[*ServiceEntry]ServiceRule{},
		ports:      slices.Clone(p.Directory.Ports[:]),
		servers:    slices.Clone(p.Servers.servers),
		rankings:   slices.Clone(p.Rankings.byService),
		loads:      slices.Clone(p.Loads.loads),
		tables:     map[tableNumber]*ebpf.Map{},
		counters:   map[uint32]slotCounters{},
		reasons:    map[uint32][]Counter{},
		turns:      map[uint32]uint64{},
		estimates:  map[uint32]*balancerEstimate{},
		samples:    map[uint32]balancerReservoir{},
	}
	for entry := range p.Services.inForce().entries() {
		b.rules[entry] = entry.rule()
	}
	var err error
	if b.serverLabels, err = readLabels[balancerServerLabel](p.Objects.ServerLabels); err != nil {
		return fmt.Errorf("read the labels of servers: %w", err)
	}
	if b.serviceLabels, err = readLabels[balancerServiceLabel](p.Objects.ServiceLabels); err != nil {
		return fmt.Errorf("read the labels of services: %w", err)
	}
	if err := p.Objects.Identity.Lookup(uint32(0), &b.identity); err != nil {
		return fmt.Errorf("read identity: %w", err)
	}
	if b.sources, err = readSources(p.Objects.SourcePrefixes); err != nil {
		return err
	}
	p.backup = b
	t.OnUndo(func() error { return errors.Join(b.restore(), b.close()) })
	t.OnCommit(func() error { return errors.Join(b.keepSources(), b.close()) })
	return nil
}

// RestoreOnUndo makes an undo restore the tables before it undoes earlier steps, such as the
// attachment of the programs. The earlier programs may lack features that the new rules of services
// need. BackUp has registered the same, for an undo before this call.
func (p *Plane) RestoreOnUndo(t *datapath.Takeover) { t.OnUndo(p.backup.restore) }

// Saved returns how much an undo would restore: the number of entries of flow tables, and the
// number of slots whose counters are stored. Both are 0 without a takeover.
func (p *Plane) Saved() (flows, slots int) {
	if p.backup == nil {
		return 0, 0
	}
	return len(p.backup.flows), len(p.backup.counters)
}

// keepTable stores a service's table that is about to be replaced. Without a backup it does
// nothing.
func (b *backup) keepTable(outer *ebpf.Map, number uint32) error {
	if b == nil {
		return nil
	}
	key := tableNumber{outer, number}
	if _, kept := b.tables[key]; kept {
		return nil
	}
	table, err := openInner(b.plane.Loader.Dir, outer, number)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("read table %d: %w", number, err)
	}
	b.tables[key] = table
	return nil
}

// keepTurns stores the turns that a service number has before a new service gets the number.
// Without a backup it does nothing.
func (b *backup) keepTurns(id uint32) error {
	if b == nil {
		return nil
	}
	if _, kept := b.turns[id]; kept {
		return nil
	}
	var given uint64
	if err := b.plane.Objects.Turns.Lookup(id, &given); err != nil {
		return fmt.Errorf("read the turns of service %d: %w", id, err)
	}
	b.turns[id] = given
	return nil
}

// keepEstimate stores the estimate of a slot that is about to be removed. Without a backup it does
// nothing.
func (b *backup) keepEstimate(slot uint32) (err error) {
	if b == nil {
		return nil
	}
	if _, kept := b.estimates[slot]; !kept {
		b.estimates[slot], err = b.plane.Estimates.read(slot)
	}
	return err
}

// keepSample stores the sample of durations of a slot that is about to be emptied. Without a backup
// it does nothing.
func (b *backup) keepSample(slot uint32) {
	if b == nil {
		return
	}
	if _, kept := b.samples[slot]; !kept {
		b.samples[slot] = b.plane.Loads.reservoirs[slot]
	}
}

// keepFlows stores the entries of the slots. They are about to be freed.
func (b *backup) keepFlows(table *FlowTable, slots map[uint32]bool) {
	for i := range table.Entries {
		value := atomic.LoadUint64(&table.Entries[i])
		if entry := FlowEntry(value); entry.State() != FlowFree && slots[entry.Server()] {
			b.flows = append(b.flows, sweptFlow{&table.Entries[i], value})
		}
	}
}

// keepCounters stores the counters and the load of a slot, which are about to change. The first
// call also stores the sums by reason, to which the counters of removed servers are added.
func (b *backup) keepCounters(slot uint32) error {
	objects := &b.plane.Objects
	var counters slotCounters
	if err := objects.ServerCounters.Lookup(slot, &counters.packets); err != nil {
		return fmt.Errorf("read the counters of slot %d: %w", slot, err)
	}
	if err := objects.ServerSignals.Lookup(slot, &counters.signals); err != nil {
		return fmt.Errorf("read the signals of slot %d: %w", slot, err)
	}
	counters.flows = b.plane.FlowCounts.bySlot[slot]
	counters.load = b.plane.Loads.of(slot)
	b.counters[slot] = counters
	if len(b.reasons) > 0 { // stored already
		return nil
	}
	for i := range len(ServerCounter{}.Forwarded) {
		reason := FirstForward + uint32(i)
		var cpus []Counter
		if err := objects.Reasons.Lookup(reason, &cpus); err != nil {
			return fmt.Errorf("read the counters of reason %d: %w", reason, err)
		}
		b.reasons[reason] = cpus
	}
	return nil
}

// restore makes the tables as they were. Servers that were in use are restored before the services
// that name them. All other slots are restored after these services, because until then, the
// present services may name them. restore continues after an error, and returns all errors. A
// second call does nothing.
func (b *backup) restore() error {
	if b.restored {
		return nil
	}
	b.restored = true
	p := b.plane
	inUse := func(slot uint32) bool {
		return ServerFlags(b.servers[slot].Flags)&FlagInUse != 0
	}
	b.restoreServers(inUse)
	b.restoreRankings()
	for entry, rule := range b.rules {
		entry.SetRule(rule)
	}
	// This puts the former table of services in force again.
	atomic.StoreUint64(&p.Directory.Generation, b.generation)
	errs := []error{b.restoreTables()}
	b.restoreServers(func(slot uint32) bool { return !inUse(slot) })
	copy(p.Directory.Ports[:], b.ports)
	b.restoreFlows()
	return errors.Join(append(errs,
		b.rank(),
		datapath.Replace(p.Objects.ServerLabels, b.serverLabels),
		datapath.Replace(p.Objects.ServiceLabels, b.serviceLabels),
		p.Objects.Identity.Put(uint32(0), &b.identity),
		b.restoreCounters(),
		datapath.Keep(p.Objects.SourcePrefixes, b.sources),
	)...)
}

// restoreServers restores the slots for which the function returns true.
func (b *backup) restoreServers(which func(slot uint32) bool) {
	for slot, server := range b.servers {
		if which(uint32(slot)) {
			b.plane.Servers.restore(uint32(slot), server)
		}
	}
}

// restoreRankings makes services use their former rankings, whose lines the takeover has kept. It
// also restores the prices from which the ranks follow, and the numbers at which the counts of a
// ranked server begin.
func (b *backup) restoreRankings() {
	for slot := range b.loads {
		b.plane.Loads.putPrice(uint32(slot), &b.loads[slot])
		b.plane.Loads.putCounts(uint32(slot), &b.loads[slot])
	}
	for service, ranking := range b.rankings {
		b.plane.Rankings.publish(uint32(service), region{first: ranking.First}, int(ranking.Servers))
	}
}

// rank corrects the ranks of all servers. During the restore, packets can have written the rank of
// a server to a place that it has in another ranking.
func (b *backup) rank() error {
	var ranked []uint32
	for slot, server := range b.servers {
		if server.Rank > 0 {
			ranked = append(ranked, uint32(slot))
		}
	}
	return b.plane.Rankings.Rank(ranked)
}

// restoreTables puts the replaced tables of services back. A table that was added in a place that
// was empty is removed.
func (b *backup) restoreTables() error {
	var errs []error
	for key, table := range b.tables {
		if table != nil {
			errs = append(errs, key.outer.Put(key.number, table))
			continue
		}
		if err := key.outer.Delete(key.number); !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// restoreCounters restores the counters of slots and reasons, the estimates and the turns.
func (b *backup) restoreCounters() error {
	objects := &b.plane.Objects
	var errs []error
	for slot, sample := range b.samples {
		b.plane.Loads.reservoirs[slot] = sample
	}
	for slot, counters := range b.counters {
		errs = append(errs,
			objects.ServerCounters.Put(slot, counters.packets),
			objects.ServerSignals.Put(slot, counters.signals))
		b.plane.FlowCounts.put(slot, counters.flows)
		b.plane.Loads.put(slot, counters.load)
	}
	for slot, estimate := range b.estimates {
		errs = append(errs, b.plane.Estimates.replace(slot, estimate))
	}
	for id, given := range b.turns {
		errs = append(errs, objects.Turns.Put(id, given))
	}
	for reason, cpus := range b.reasons {
		errs = append(errs, objects.Reasons.Put(reason, cpus))
	}
	return errors.Join(errs...)
}

// restoreFlows restores each freed entry, unless another flow has taken its place meanwhile.
func (b *backup) restoreFlows() {
	for _, flow := range b.flows {
		if atomic.CompareAndSwapUint64(flow.place, 0, flow.value) {
			b.plane.Loads.count(FlowEntry(flow.value))
		}
	}
}

// keepSources removes the source prefixes that the new state does not want.
func (b *backup) keepSources() error {
	if b.wantedSources == nil {
		return nil
	}
	return datapath.Keep(b.plane.Objects.SourcePrefixes, b.wantedSources)
}

// close ends the backup. It removes the pins of all tables that no service has.
func (b *backup) close() error {
	b.plane.backup = nil
	errs := []error{b.plane.releaseTables()}
	for _, table := range b.tables {
		if table != nil {
			errs = append(errs, table.Close())
		}
	}
	return errors.Join(errs...)
}
