// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"

	"github.com/cilium/ebpf"
)

// ServerKey identifies a server of a service. The server keeps its slot and its flows as long as
// all fields stay the same.
type ServerKey struct {
	Service, Server string
	Address, Source netip.Addr
}

// Slots gives each server of each service a slot. Flow entries and candidate tables contain these
// numbers. Slots outlive the process: labels in the kernel contain the names of their servers.
type Slots struct {
	plane   *Plane
	byKey   map[ServerKey]uint32
	bySlot  map[uint32]ServerKey
	retired map[uint32]int // slots of removed servers, with the number of sweeps since
	lowest  uint32         // all lower slots are taken
}

// sweepsToRelease is how many sweeps must pass before the slot of a removed server is given to
// another one. A packet that is under way during the first sweep may still add an entry with the
// slot.
const sweepsToRelease = 2

// LoadSlots reads the slots that earlier processes have given out. LoadSlots returns an error if
// the labels cannot be read.
func LoadSlots(p *Plane) (*Slots, error) {
	s := &Slots{
		plane:   p,
		byKey:   map[ServerKey]uint32{},
		bySlot:  map[uint32]ServerKey{},
		retired: map[uint32]int{},
	}
	names, err := readServerNames(p.Objects.ServerLabels)
	if err != nil {
		return nil, err
	}
	for slot, name := range names {
		server := &p.Servers.servers[slot]
		key := ServerKey{
			Service: name.Service,
			Server:  name.Server,
			Address: addrOf(server.Address),
			Source:  addrOf(server.Source),
		}
		s.byKey[key], s.bySlot[slot] = slot, key
		if p.Servers.Flags(slot)&FlagInUse == 0 { // an earlier process has retired it
			s.retired[slot] = 0
		}
	}
	return s, nil
}

// Of returns the slot of a server. It returns false if the server has none.
func (s *Slots) Of(key ServerKey) (slot uint32, ok bool) {
	slot, ok = s.byKey[key]
	return slot, ok
}

// All lists the slots that have a server. They include the slots of retired servers.
func (s *Slots) All() iter.Seq2[uint32, ServerKey] { return maps.All(s.bySlot) }

// Server returns the server of a slot. It returns the zero key if the slot has none.
func (s *Slots) Server(slot uint32) ServerKey { return s.bySlot[slot] }

// IsRetired tells whether the slot's server is no longer configured. The flow tables may still
// contain flows of the server.
func (s *Slots) IsRetired(slot uint32) bool {
	_, retired := s.retired[slot]
	return retired
}

// unusedFlags are the flags that keep new flows from a server, and those that say why.
const unusedFlags = FlagDrained | FlagFailing | FlagLeaving | FlagStarting | FlagUnproven

// Claim returns the slot of a server: its present slot, or a free one. A retired server gets its
// slot back, and its flows with it. The number of the service can differ from the one before,
// because a service that is removed and added again gets another number. The argument known is what
// packets of known flows ask of the server.
//
// The caller sets the final flags when the server's candidate table is ready. Until then, a present
// server keeps the flags that tell whether it gets new flows: packets use its candidate table
// meanwhile, and the process may end before it knows again whether the server is unfit. A new or
// retired server gets FlagFailing. Claim returns an error if no slot is free.
func (s *Slots) Claim(key ServerKey, service uint32, known KnownSID, flags ServerFlags) (uint32, error) {
	if slot, ok := s.byKey[key]; ok {
		return slot, s.renew(slot, service, known, flags)
	}
	slot, err := s.free()
	if err != nil {
		return 0, err
	}
	label := balancerServerLabel{}
	copy(label.Service[:], key.Service)
	copy(label.Server[:], key.Server)
	if err := s.plane.Objects.ServerLabels.Put(slot, &label); err != nil {
		return 0, fmt.Errorf("label slot %d: %w", slot, err)
	}
	s.plane.Servers.put(slot, service, key.Address, key.Source, known, flags|FlagFailing)
	s.byKey[key], s.bySlot[slot] = slot, key
	return slot, s.plane.addSender(slot)
}

// renew is the part of Claim for a server that has a slot.
func (s *Slots) renew(slot, service uint32, known KnownSID, flags ServerFlags) error {
	delete(s.retired, slot)
	if s.plane.Servers.servers[slot].Service != service {
		if err := s.plane.removeSender(slot); err != nil {
			return err
		}
	}
	s.plane.Servers.servers[slot].Service = service
	s.plane.Servers.SetKnownSID(slot, known)
	present := s.plane.Servers.Flags(slot)
	if present&FlagInUse == 0 { // the slot was retired
		flags |= FlagFailing
		if err := s.plane.forgetLoad(slot); err != nil {
			return err
		}
	} else {
		flags = flags&^FlagDrained | present&unusedFlags
	}
	s.plane.Servers.SetFlags(slot, flags)
	return s.plane.addSender(slot)
}

// CheckRoom returns an error if the wanted servers need more slots than there are free ones. Slots
// that Reclaim can free count as free.
func (s *Slots) CheckRoom(wanted map[ServerKey]bool) error {
	free := len(s.plane.Servers.servers) - len(s.bySlot)
	for slot := range s.retired {
		if !wanted[s.bySlot[slot]] {
			free++
		}
	}
	more := 0
	for key := range wanted {
		if _, ok := s.byKey[key]; !ok {
			more++
		}
	}
	if more > free {
		return fmt.Errorf("%d new servers need slots, and %d of %d are free: servers that are being "+
			"removed still use theirs, or node.limits.servers is too low", more, free,
			len(s.plane.Servers.servers))
	}
	return nil
}

// Notes are what the slot of a server tells the next process.
type Notes struct {
	Causes  Causes
	Routed  bool // the server has had a route of its own
	Checked bool // a health check of the server has had a result
}

// Noted returns the notes in the slot of a server. They are empty if the server has no slot.
func (s *Slots) Noted(key ServerKey) Notes {
	slot, ok := s.byKey[key]
	if !ok {
		return Notes{}
	}
	flags := s.plane.Servers.Flags(slot)
	return Notes{
		Causes: s.plane.Servers.Causes(slot), Routed: flags&FlagRouted != 0,
		Checked: flags&FlagInUse != 0 && flags&FlagUnchecked == 0,
	}
}

// TookFlows tells whether a server has taken new flows until now. It also returns true for a server
// without a slot or with a retired one, because that server was neither drained nor unfit.
func (s *Slots) TookFlows(key ServerKey) bool {
	slot, ok := s.byKey[key]
	return !ok || s.IsRetired(slot) || s.plane.Servers.TakesFlows(slot)
}

// free returns the lowest slot that no server has. It returns an error if there is none.
func (s *Slots) free() (uint32, error) {
	for ; s.lowest < uint32(len(s.plane.Servers.servers)); s.lowest++ {
		if _, taken := s.bySlot[s.lowest]; !taken {
			return s.lowest, nil
		}
	}
	return 0, fmt.Errorf("all %d slots for servers are in use, %d of them by removed servers whose flows "+
		"are not swept yet: node.limits.servers is too low", len(s.plane.Servers.servers), len(s.retired))
}

// retire takes the server of a slot out of use. The next packets of the server's flows are placed
// anew. The slot keeps its name and its counters until release.
func (s *Slots) retire(slot uint32) error {
	s.plane.Servers.SetFlags(slot, 0)
	s.plane.Servers.ClearNextHop(slot)
	s.retired[slot] = 0
	return errors.Join(s.plane.removeSender(slot), s.plane.forgetEstimate(slot))
}

// RetireOthers retires the servers in all slots that are not held. The next packets of the retired
// servers' flows are placed anew. RetireOthers returns an error if a table cannot be changed.
func (s *Slots) RetireOthers(held map[uint32]bool) error {
	for slot := range s.bySlot {
		if held[slot] || s.IsRetired(slot) {
			continue
		}
		if err := s.retire(slot); err != nil {
			return err
		}
	}
	return nil
}

// Swept must be called after each sweep that frees the entries of all retired servers. The argument
// kept is the result of the sweep. Swept stores it for readers. Then it frees the slots for which
// sweepsToRelease sweeps have passed. Swept returns an error if a counter or a label cannot be
// changed.
func (s *Slots) Swept(kept []SweptServer) error {
	if err := s.plane.FlowCounts.store(kept, maps.Keys(s.bySlot)); err != nil {
		return err
	}
	for slot := range s.retired {
		if s.retired[slot]++; s.retired[slot] < sweepsToRelease {
			continue
		}
		if err := s.release(slot); err != nil {
			return err
		}
	}
	return nil
}

// Reclaim frees the slots of servers that an earlier process has retired, unless they are wanted
// again. It sweeps the flows of these slots, and no others. One sweep is enough, because packets
// that were under way when the servers were retired have left the data path by now. Without
// Reclaim, processes that end before they sweep would use up all slots. Reclaim returns an error if
// the sweep fails, or if a counter or a label cannot be changed.
func (s *Slots) Reclaim(wanted map[ServerKey]bool) error {
	unwanted := map[uint32]bool{}
	for slot := range s.retired {
		if !wanted[s.bySlot[slot]] {
			unwanted[slot] = true
		}
	}
	if len(unwanted) == 0 {
		return nil
	}
	for _, table := range []*FlowTable{s.plane.Flows, s.plane.HalfOpen} {
		s.plane.backup.keepFlows(table, unwanted)
	}
	if err := s.sweep(unwanted); err != nil {
		return err
	}
	for slot := range unwanted {
		if err := s.plane.backup.keepCounters(slot); err != nil {
			return err
		}
		if err := s.release(slot); err != nil {
			return err
		}
	}
	return nil
}

// sweep frees the flow entries of the given slots. It keeps those of all other slots, however old
// they are.
func (s *Slots) sweep(slots map[uint32]bool) error {
	_, err := s.plane.Sweeper.Sweep(func(yield func(uint32, FlowLifetimes) bool) {
		for slot := range uint32(len(s.plane.Servers.servers)) {
			if !slots[slot] && !yield(slot, Forever) {
				return
			}
		}
	})
	return err
}

// release frees a slot: it moves the slot's counters to the sums by reason, and forgets the name
// and the load of the server. It holds the lock of counting, so that no reader in this process
// counts while the counters are moved.
func (s *Slots) release(slot uint32) error {
	s.plane.counting.Lock()
	defer s.plane.counting.Unlock()
	if err := s.plane.RetireCounters(slot); err != nil {
		return err
	}
	err := s.plane.Objects.ServerLabels.Delete(slot)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("free slot %d: %w", slot, err)
	}
	s.plane.Servers.setRank(slot, 0)
	s.plane.Loads.reset(slot)
	s.lowest = min(s.lowest, slot)
	delete(s.byKey, s.bySlot[slot])
	delete(s.bySlot, slot)
	delete(s.retired, slot)
	return nil
}
