// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"iter"
	"math"
	"math/bits"
	"net/netip"
	"sync/atomic"
	"unsafe"

	"github.com/segue-lb/segue/internal/config"
)

const (
	serviceBits      = 16 // SERVICE_BITS in bpf/balancer/directory.h
	serviceLineCount = 1 << serviceBits
	servicesPerLine  = 2  // SERVICES_PER_LINE
	serviceReach     = 16 // SERVICE_REACH
)

// serviceLines are a table of services.
type serviceLines [serviceLineCount]balancerServiceLine

// serviceTable is what bpf/balancer/services.h finds services in: one of the directory's two tables, while the other
// waits to take its place.
type serviceTable struct {
	directory *directory
	keys      *serviceKeys
	unsettled bool // packets may still be on their way that saw the table that is not in force
}

// inForce is the table that packets are looked up in.
func (t *serviceTable) inForce() *serviceLines {
	return t.of(atomic.LoadUint64(&t.directory.Generation))
}

// of is the table of a generation.
func (t *serviceTable) of(generation uint64) *serviceLines {
	return (*serviceLines)(&t.directory.Services[generation%2])
}

// all lists what is in the table, in no order that means anything. Another process may replace tables
// meanwhile: what it writes to is not in force, but may have been.
func (t *serviceTable) all() []balancerServiceEntry {
	for {
		generation := atomic.LoadUint64(&t.directory.Generation)
		all := t.of(generation).all()
		if atomic.LoadUint64(&t.directory.Generation) == generation {
			return all
		}
	}
}

func (l *serviceLines) all() []balancerServiceEntry {
	var all []balancerServiceEntry
	for e := range l.entries() {
		entry := *e
		entry.Rule = e.rule()
		all = append(all, entry)
	}
	return all
}

// entries are those that are not free, in the memory that packets are looked up in.
func (l *serviceLines) entries() iter.Seq[*balancerServiceEntry] {
	return func(yield func(*balancerServiceEntry) bool) {
		for i := range l {
			for j := range l[i].Entry {
				e := &l[i].Entry[j]
				if kindOf(e) != balancerServiceEntryKindENTRY_FREE && !yield(e) {
					return
				}
			}
		}
	}
}

// find returns the entry under a key, or nil: find_entry in bpf/balancer/services.h.
func (t *serviceTable) find(key balancerServiceEntry) *balancerServiceEntry {
	lines, place := t.inForce(), t.place(key)
	for i := range serviceReach {
		line := &lines[(place+i)%serviceLineCount].Entry
		for j := range line {
			if line[j].key() == key {
				return &line[j]
			}
		}
		if kindOf(&line[servicesPerLine-1]) == balancerServiceEntryKindENTRY_FREE {
			return nil
		}
	}
	return nil
}

// replace brings another table with the given entries into force; no packet sees anything between, and none
// is on its way that saw the one before when it returns.
func (t *serviceTable) replace(entries []balancerServiceEntry, wait func() error) error {
	if err := t.settle(wait); err != nil {
		return err
	}
	generation := t.directory.Generation + 1
	next := t.of(generation)
	clear(next[:])
	for _, entry := range entries {
		if err := t.add(next, entry); err != nil {
			return err
		}
	}
	atomic.StoreUint64(&t.directory.Generation, generation)
	t.unsettled = true
	return t.settle(wait)
}

// settle waits, if nobody has, until no packet sees the table that is not in force.
func (t *serviceTable) settle(wait func() error) error {
	if !t.unsettled {
		return nil
	}
	if err := wait(); err != nil {
		return fmt.Errorf("wait for packets that saw the table of services before: %w", err)
	}
	t.unsettled = false
	return nil
}

// add fills a free entry of a table that is not in force.
func (t *serviceTable) add(lines *serviceLines, entry balancerServiceEntry) error {
	place := t.place(entry)
	for i := range serviceReach {
		line := &lines[(place+i)%serviceLineCount].Entry
		for j := range line {
			if kindOf(&line[j]) == balancerServiceEntryKindENTRY_FREE {
				line[j] = entry
				return nil
			}
		}
	}
	return fmt.Errorf("the table of services has no room for %s", addrOf(entry.Vip))
}

// place is the line where an entry belongs: service_place in bpf/balancer/services.h.
func (t *serviceTable) place(entry balancerServiceEntry) int {
	words := (*[unsafe.Sizeof(entry) / 8]uint64)(unsafe.Pointer(&entry))
	sum := words[0]*t.keys[0] + words[1]*t.keys[1] + (words[2]&math.MaxUint32)*t.keys[2]
	return int(spread(sum) >> (64 - serviceBits))
}

// serviceKeyOf is the key of a service: an entry without number and rule.
func serviceKeyOf(svc *config.Service) balancerServiceEntry {
	return balancerServiceEntry{
		Vip:      in6(svc.VIP),
		Port:     bits.ReverseBytes16(uint16(svc.Port)),
		Protocol: protocolNumber(svc.Protocol),
		Kind:     uint8(balancerServiceEntryKindENTRY_SERVICE),
	}
}

// vipKeyOf is the key that says that an address is a VIP.
func vipKeyOf(vip netip.Addr) balancerServiceEntry {
	return balancerServiceEntry{Vip: in6(vip), Kind: uint8(balancerServiceEntryKindENTRY_VIP)}
}

// key is the entry without number and rule.
func (e *balancerServiceEntry) key() balancerServiceEntry {
	return balancerServiceEntry{Vip: e.Vip, Port: e.Port, Protocol: e.Protocol, Kind: e.Kind}
}

func kindOf(e *balancerServiceEntry) balancerServiceEntryKind {
	return balancerServiceEntryKind(e.Kind)
}

// isService tells an entry of a service from one that says that an address is a VIP.
func (e *balancerServiceEntry) isService() bool {
	return kindOf(e) == balancerServiceEntryKindENTRY_SERVICE
}

// matches tells what packets a service entry is for.
func (e *balancerServiceEntry) matches() (netip.Addr, config.Port, config.Protocol) {
	protocol := config.TCP
	if e.Protocol == protocolNumber(config.UDP) {
		protocol = config.UDP
	}
	return addrOf(e.Vip), config.Port(bits.ReverseBytes16(e.Port)), protocol
}

// table is the number of the service's consistent-hash table.
func (e *balancerServiceEntry) table() uint32 { return 2*e.Id + uint32(e.Rule.table()) }

// enum rule_flags of bpf/balancer/types.h.
const (
	ruleTable         = uint8(balancerRuleFlagsRULE_TABLE)
	ruleFormer        = uint8(balancerRuleFlagsRULE_FORMER)
	ruleHalfOpen      = uint8(balancerRuleFlagsRULE_HALF_OPEN)
	ruleServersAnswer = uint8(balancerRuleFlagsRULE_SERVERS_ANSWER)
	ruleAskIdle       = uint8(balancerRuleFlagsRULE_ASK_IDLE)
)

// hasHalfOpen tells whether there may be flows that servers have taken and whose clients have not
// answered yet.
func (r *balancerServiceRule) hasHalfOpen() bool { return r.Flags&ruleHalfOpen != 0 }

// table is which of its two tables a service uses: 0 or 1.
func (r *balancerServiceRule) table() uint8 { return r.Flags & ruleTable }

func (e *balancerServiceEntry) rule() (rule balancerServiceRule) {
	*(*uint64)(unsafe.Pointer(&rule)) = atomic.LoadUint64((*uint64)(unsafe.Pointer(&e.Rule)))
	return rule
}

// setRule changes what becomes of a service's packets, all at once.
func (e *balancerServiceEntry) setRule(rule balancerServiceRule) {
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&e.Rule)), *(*uint64)(unsafe.Pointer(&rule)))
}
