// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/srv6"
)

// identity of a server of a service: flows stay with it as long as all of this
// stays the same.
type serverKey struct {
	service, server string
	address, source netip.Addr
}

// slots gives every server of every service a number, which flow entries and
// candidate tables hold. The numbers outlive the process: labels in the kernel
// say whose they are.
type slots struct {
	kernel  *kernel
	byKey   map[serverKey]uint32
	bySlot  map[uint32]serverKey
	retired map[uint32]int // slots without a server, and how many sweeps they have seen
	lowest  uint32         // no slot below is free
}

// sweepsToRelease is how many sweeps of the flow table must find a slot retired
// before it is given to another server: a packet on its way during the first may
// still enter a flow for it.
const sweepsToRelease = 2

// loadSlots reads which slots an earlier process has given out.
func loadSlots(k *kernel) (*slots, error) {
	s := &slots{
		kernel:  k,
		byKey:   map[serverKey]uint32{},
		bySlot:  map[uint32]serverKey{},
		retired: map[uint32]int{},
	}
	names, err := readServerNames(k.objects.ServerLabels)
	if err != nil {
		return nil, err
	}
	for slot, name := range names {
		server := &k.servers.servers[slot]
		key := serverKey{
			service: name.service,
			server:  name.server,
			address: addrOf(server.Address),
			source:  addrOf(server.Source),
		}
		s.byKey[key], s.bySlot[slot] = slot, key
		if k.servers.flags(slot)&balancerServerFlagsSERVER_IN_USE == 0 {
			s.retired[slot] = 0
		}
	}
	return s, nil
}

// of returns the slot of a server; false: it has none.
func (s *slots) of(key serverKey) (slot uint32, ok bool) {
	slot, ok = s.byKey[key]
	return slot, ok
}

// all are the servers that have slots, those of retired slots too.
func (s *slots) all() iter.Seq2[uint32, serverKey] { return maps.All(s.bySlot) }

// server is whose a slot is; zero: nobody's.
func (s *slots) server(slot uint32) serverKey { return s.bySlot[slot] }

// isRetired tells whether the server of a slot is gone, but may still have flows.
func (s *slots) isRetired(slot uint32) bool {
	_, retired := s.retired[slot]
	return retired
}

// claim returns the slot of a server: the one it has, or a free one. A slot that
// was retired takes up its flows again. The service is told by its id, too, which
// changes when the service goes and comes back. Whether the server is unfit stays
// noted: this process may end before it places the service.
func (s *slots) claim(key serverKey, service uint32, known srv6.Function, flags balancerServerFlags) (uint32, error) {
	slot, ok := s.byKey[key]
	if ok {
		delete(s.retired, slot)
		if s.kernel.servers.servers[slot].Service != service {
			if err := s.kernel.removeSender(slot); err != nil {
				return 0, err
			}
		}
		s.kernel.servers.servers[slot].Service = service
		s.kernel.servers.setKnown(slot, known)
		const unfit = balancerServerFlagsSERVER_FAILING | balancerServerFlagsSERVER_UNUSED
		s.kernel.servers.setFlags(slot, flags|s.kernel.servers.flags(slot)&unfit)
		return slot, s.kernel.addSender(slot)
	}
	slot, err := s.free()
	if err != nil {
		return 0, err
	}
	label := balancerLabel{}
	copy(label.Service[:], key.service)
	copy(label.Server[:], key.server)
	if err := s.kernel.objects.ServerLabels.Put(slot, &label); err != nil {
		return 0, fmt.Errorf("label slot %d: %w", slot, err)
	}
	s.kernel.servers.put(slot, service, key.address, key.source, known, flags)
	s.byKey[key], s.bySlot[slot] = slot, key
	return slot, s.kernel.addSender(slot)
}

// checkRoom returns an error if there are not enough slots for the wanted servers, after a reclaim.
func (s *slots) checkRoom(wanted map[serverKey]bool) error {
	free := len(s.kernel.servers.servers) - len(s.bySlot)
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
		return fmt.Errorf("%d servers are new, and %d of %d slots for servers are free, until "+
			"servers that go have gone: node.limits.servers is too low", more, free,
			len(s.kernel.servers.servers))
	}
	return nil
}

// noted is what the slot of a server tells of it: why it is unfit, and whether it has had a route of its
// own. A server without a slot is fit, and has not.
func (s *slots) noted(key serverKey) (all causes, routed bool) {
	slot, ok := s.byKey[key]
	if !ok {
		return 0, false
	}
	return s.kernel.servers.causes(slot), s.kernel.servers.flags(slot)&balancerServerFlagsSERVER_ROUTED != 0
}

// free finds a slot that nobody has.
func (s *slots) free() (uint32, error) {
	for ; s.lowest < uint32(len(s.kernel.servers.servers)); s.lowest++ {
		if _, taken := s.bySlot[s.lowest]; !taken {
			return s.lowest, nil
		}
	}
	return 0, fmt.Errorf("all %d slots for servers are taken, %d of them until their flows are swept: "+
		"node.limits.servers is too low", len(s.kernel.servers.servers), len(s.retired))
}

// retire takes the server off a slot. Its flows are placed anew by their next
// packets.
func (s *slots) retire(slot uint32) error {
	s.kernel.servers.setFlags(slot, 0)
	s.kernel.servers.clearNextHop(slot)
	s.retired[slot] = 0
	return s.kernel.removeSender(slot)
}

// retireOthers retires the slots that are not held.
func (s *slots) retireOthers(held map[uint32]bool) error {
	for slot := range s.bySlot {
		if held[slot] || s.isRetired(slot) {
			continue
		}
		if err := s.retire(slot); err != nil {
			return err
		}
	}
	return nil
}

// swept notes that the flow table holds no flow of the retired slots any more,
// and frees those that have seen it often enough.
func (s *slots) swept() error {
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

// reclaim frees the slots that an earlier process has retired and that are not
// wanted again. Packets that were on their way then have gone by now, so that one
// sweep is enough; and processes that end before they sweep do not use up all slots.
func (s *slots) reclaim(wanted map[serverKey]bool) error {
	unwanted := map[uint32]bool{}
	for slot := range s.retired {
		if !wanted[s.bySlot[slot]] {
			unwanted[slot] = true
		}
	}
	if len(unwanted) == 0 {
		return nil
	}
	for _, table := range []*flowTable{s.kernel.flows, s.kernel.halfOpen} {
		s.kernel.backup.keepFlows(table, func(e flowEntry) bool { return unwanted[e.server()] })
		table.sweep(func(e flowEntry) bool { return !unwanted[e.server()] })
	}
	for slot := range unwanted {
		if err := s.kernel.backup.keepCounters(slot); err != nil {
			return err
		}
		if err := s.release(slot); err != nil {
			return err
		}
	}
	return nil
}

// release frees a slot. No View of this process counts while the counters move.
func (s *slots) release(slot uint32) error {
	s.kernel.counting.Lock()
	defer s.kernel.counting.Unlock()
	if err := s.kernel.retireCounter(slot); err != nil {
		return err
	}
	err := s.kernel.objects.ServerLabels.Delete(slot)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("free slot %d: %w", slot, err)
	}
	s.lowest = min(s.lowest, slot)
	delete(s.byKey, s.bySlot[slot])
	delete(s.bySlot, slot)
	delete(s.retired, slot)
	return nil
}
