package balancer

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"net/netip"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/config"
)

const (
	serviceBits     = 16 // SERVICE_BITS in bpf/services.h
	serviceLines    = 1 << serviceBits
	servicesPerLine = 2  // SERVICES_PER_LINE
	serviceReach    = 16 // SERVICE_REACH
	goldenRatio     = 0x9e3779b97f4a7c15
)

// serviceTable is the data path's table of services, bpf/services.h, mapped into this process.
type serviceTable struct {
	outer   *ebpf.Map
	keys    *serviceKeys
	memory  []byte // nil: none has been installed yet
	entries []balancerServiceEntry
}

// openServices maps the table that is in use.
func openServices(outer *ebpf.Map, identity *balancerIdentity, protection int) (*serviceTable, error) {
	t := &serviceTable{outer: outer, keys: &identity.ServiceKeys}
	var inner *ebpf.Map
	err := outer.Lookup(uint32(0), &inner)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return t, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the table of services: %w", err)
	}
	defer inner.Close()
	return t, t.mapInner(inner, protection)
}

func (t *serviceTable) mapInner(inner *ebpf.Map, protection int) error {
	size := serviceLines * servicesPerLine * int(unsafe.Sizeof(balancerServiceEntry{}))
	memory, err := unix.Mmap(inner.FD(), 0, size, protection, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map the table of services: %w", err)
	}
	t.memory = memory
	first := (*balancerServiceEntry)(unsafe.Pointer(unsafe.SliceData(memory)))
	t.entries = unsafe.Slice(first, serviceLines*servicesPerLine)
	return nil
}

func (t *serviceTable) close() error {
	if t.memory == nil {
		return nil
	}
	err := unix.Munmap(t.memory)
	t.memory, t.entries = nil, nil
	return err
}

// all lists what is in the table, in no order that means anything.
func (t *serviceTable) all() []balancerServiceEntry {
	var all []balancerServiceEntry
	for i := range t.entries {
		if e := &t.entries[i]; kindOf(e) != balancerServiceEntryKindENTRY_FREE {
			entry := *e
			entry.Rule = e.rule()
			all = append(all, entry)
		}
	}
	return all
}

// find returns the entry under a key, or nil: find_entry in bpf/services.h.
func (t *serviceTable) find(key balancerServiceEntry) *balancerServiceEntry {
	if t.entries == nil {
		return nil
	}
	place := t.place(key)
	for i := range serviceReach {
		line := t.line(place + i)
		for j := range line {
			if keyOfEntry(&line[j]) == key {
				return &line[j]
			}
		}
		if kindOf(&line[servicesPerLine-1]) == balancerServiceEntryKindENTRY_FREE {
			return nil
		}
	}
	return nil
}

func (t *serviceTable) line(number int) []balancerServiceEntry {
	at := number % serviceLines * servicesPerLine
	return t.entries[at : at+servicesPerLine]
}

// replace installs another table with the given entries; no packet sees anything between.
func (t *serviceTable) replace(spec *ebpf.MapSpec, entries []balancerServiceEntry) error {
	inner, err := ebpf.NewMap(spec)
	if err != nil {
		return fmt.Errorf("make a table of %d services: %w", len(entries), err)
	}
	defer inner.Close()
	next := &serviceTable{outer: t.outer, keys: t.keys}
	if err := next.mapInner(inner, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		return err
	}
	for _, entry := range entries {
		if err := next.add(entry); err != nil {
			return errors.Join(err, next.close())
		}
	}
	if err := t.outer.Put(uint32(0), inner); err != nil {
		return errors.Join(fmt.Errorf("install a table of %d services: %w", len(entries), err), next.close())
	}
	err = t.close()
	*t = *next
	return err
}

// add fills a free entry of a table that is not in use yet.
func (t *serviceTable) add(entry balancerServiceEntry) error {
	place := t.place(entry)
	for i := range serviceReach {
		for j := range t.line(place + i) {
			if e := &t.line(place + i)[j]; kindOf(e) == balancerServiceEntryKindENTRY_FREE {
				*e = entry
				return nil
			}
		}
	}
	return fmt.Errorf("the table of services has no room for %s", addrOf(entry.Vip))
}

// place is the line where an entry belongs: service_place in bpf/services.h.
func (t *serviceTable) place(entry balancerServiceEntry) int {
	words := (*[unsafe.Sizeof(entry) / 8]uint64)(unsafe.Pointer(&entry))
	hash := words[0]*t.keys[0] + words[1]*t.keys[1] + (words[2]&math.MaxUint32)*t.keys[2]
	hash ^= hash >> 32
	return int(hash * goldenRatio >> (64 - serviceBits))
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

func keyOfEntry(e *balancerServiceEntry) balancerServiceEntry {
	return balancerServiceEntry{Vip: e.Vip, Port: e.Port, Protocol: e.Protocol, Kind: e.Kind}
}

func kindOf(e *balancerServiceEntry) balancerServiceEntryKind {
	return balancerServiceEntryKind(e.Kind)
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

// ruleFormer tells that the service's other table is the one before, of the same shape: RULE_FORMER of
// bpf/types.h.
const ruleFormer = 2

// ruleHunted tells that the service has hunted until lately: RULE_HUNTED of bpf/types.h.
const ruleHunted = 4

// hunted tells whether there may be flows that servers have taken and wait with.
func (r *balancerServiceRule) hunted() bool {
	return r.Table&ruleHunted != 0 || r.placement() != balancerPlacementPLACEMENT_HASH
}

// table is which of its two tables a service uses: 0 or 1.
func (r *balancerServiceRule) table() uint8 { return r.Table &^ (ruleFormer | ruleHunted) }

func (e *balancerServiceEntry) rule() (rule balancerServiceRule) {
	*(*uint64)(unsafe.Pointer(&rule)) = atomic.LoadUint64((*uint64)(unsafe.Pointer(&e.Rule)))
	return rule
}

// setRule changes what becomes of a service's packets, all at once.
func (e *balancerServiceEntry) setRule(rule balancerServiceRule) {
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&e.Rule)), *(*uint64)(unsafe.Pointer(&rule)))
}

// methods is METHODS in bpf/types.h.
func methods(placement balancerPlacement, persistence balancerPersistence) uint8 {
	return uint8(placement) | uint8(persistence)<<4
}

func (r balancerServiceRule) placement() balancerPlacement { return balancerPlacement(r.Methods & 0xf) }

func (r balancerServiceRule) persistence() balancerPersistence {
	return balancerPersistence(r.Methods >> 4)
}
