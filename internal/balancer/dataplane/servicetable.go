// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"
	"iter"
	"math"
	"math/bits"
	"net/netip"
	"sync/atomic"
	"unsafe"

	"github.com/segue-lb/segue/internal/desired"
)

const (
	serviceBits      = 16 // SERVICE_BITS in bpf/balancer/tables/directory.h
	serviceLineCount = 1 << serviceBits
	servicesPerLine  = 2  // SERVICES_PER_LINE in bpf/balancer/tables/directory.h
	serviceReach     = 16 // SERVICE_REACH in bpf/balancer/tables/services.h
)

// serviceLines is one table of services.
type serviceLines [serviceLineCount]balancerServiceLine

// ServiceTable is the table in which bpf/balancer/tables/services.h looks services up. The
// directory contains two such tables: one is in force, and the other one is filled with the next
// services.
type ServiceTable struct {
	directory *Directory
	keys      *ServiceKeys
	unsettled bool // packets under way may still use the table that is not in force
}

// inForce returns the table in which packets are looked up.
func (t *ServiceTable) inForce() *serviceLines {
	return t.of(atomic.LoadUint64(&t.directory.Generation))
}

// of returns the table of a generation.
func (t *ServiceTable) of(generation uint64) *serviceLines {
	return (*serviceLines)(&t.directory.Services[generation%2])
}

// All lists the entries in force, in any order. If another process replaces the table meanwhile,
// All reads the new table instead.
func (t *ServiceTable) All() []ServiceEntry {
	for {
		generation := atomic.LoadUint64(&t.directory.Generation)
		all := t.of(generation).all()
		if atomic.LoadUint64(&t.directory.Generation) == generation {
			return all
		}
	}
}

// all returns copies of the entries that are not free, in any order.
func (l *serviceLines) all() []ServiceEntry {
	var all []ServiceEntry
	for e := range l.entries() {
		entry := *e
		entry.Rule = e.rule()
		all = append(all, entry)
	}
	return all
}

// entries iterates over the entries that are not free. The entries are pointers into the directory.
func (l *serviceLines) entries() iter.Seq[*ServiceEntry] {
	return func(yield func(*ServiceEntry) bool) {
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

// Find returns the entry in force that has the key, or nil: find_entry in
// bpf/balancer/tables/services.h.
func (t *ServiceTable) Find(key ServiceEntry) *ServiceEntry {
	lines, place := t.inForce(), t.place(key)
	for i := range serviceReach {
		line := &lines[(place+i)%serviceLineCount].Entry
		for j := range line {
			if line[j].Key() == key {
				return &line[j]
			}
		}
		// The method add fills a line before it takes the next one, so no later line has the key.
		if kindOf(&line[servicesPerLine-1]) == balancerServiceEntryKindENTRY_FREE {
			return nil
		}
	}
	return nil
}

// Replace replaces all entries in force by the given ones, at once. It then calls wait
// (Plane.Settle), which must return when no packet uses the former table any more. Replace returns
// an error if the wait fails, or if the table has no room for an entry.
func (t *ServiceTable) Replace(entries []ServiceEntry, wait func() error) error {
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

// settle waits until no packet uses the table that is not in force. If a call has already waited
// since the last replacement, settle returns at once.
func (t *ServiceTable) settle(wait func() error) error {
	if !t.unsettled {
		return nil
	}
	if err := wait(); err != nil {
		return fmt.Errorf("wait for packets that saw the table of services before: %w", err)
	}
	t.unsettled = false
	return nil
}

// add fills a free entry of a table that is not in force. It returns an error if there is no free
// entry within serviceReach lines.
func (t *ServiceTable) add(lines *serviceLines, entry ServiceEntry) error {
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

// place returns the line where the search for an entry begins: service_place in
// bpf/balancer/tables/services.h.
func (t *ServiceTable) place(entry ServiceEntry) int {
	// The key is the VIP in two words, and the port, protocol and kind in the low half of the
	// third.
	words := (*[unsafe.Sizeof(entry) / 8]uint64)(unsafe.Pointer(&entry))
	sum := words[0]*t.keys[0] + words[1]*t.keys[1] + (words[2]&math.MaxUint32)*t.keys[2]
	return int(spread(sum) >> (64 - serviceBits))
}

// ServiceKey returns the key of a service at its first VIP and port: its entry without numbers and
// rule.
func ServiceKey(svc *desired.Service) ServiceEntry {
	return serviceKey(svc.VIP, svc.Port, svc.Protocol)
}

// KeysOfService returns the keys of all entries of a service: one for each VIP and port.
func KeysOfService(svc *desired.Service) []ServiceEntry {
	vips, ports := svc.AllVIPs(), svc.AllPorts()
	keys := make([]ServiceEntry, 0, len(vips)*len(ports))
	for _, vip := range vips {
		for _, port := range ports {
			keys = append(keys, serviceKey(vip, port, svc.Protocol))
		}
	}
	return keys
}

func serviceKey(vip netip.Addr, port desired.Port, protocol desired.Protocol) ServiceEntry {
	return ServiceEntry{
		Vip:      in6(vip),
		Port:     bits.ReverseBytes16(port.Number()),
		Protocol: protocol.Number(),
		Kind:     uint8(balancerServiceEntryKindENTRY_SERVICE),
	}
}

// The parts of the Id of a service's entry: struct service_entry in bpf/balancer/types.h.
const (
	vipNumberShift = 16
	serviceMask    = desired.MaxServices - 1
	hasSources     = 1 << 15 // ENTRY_HAS_SOURCES
)

// SetNumbers sets the number of the entry's service, and that of the entry's VIP among the VIPs of
// the service, which is less than 65536. Both are part of the hashes of flows.
func (e *ServiceEntry) SetNumbers(service, vip uint32) { e.Id = vip<<vipNumberShift | service }

// SetSources says that only clients in the source prefixes of the service may reach it
// (Plane.AllowSources). Call SetSources after SetNumbers.
func (e *ServiceEntry) SetSources() { e.Id |= hasSources }

// HasSources tells whether only clients in the source prefixes of the service may reach it.
func (e *ServiceEntry) HasSources() bool { return e.IsService() && e.Id&hasSources != 0 }

// FlowWord returns what stands for the service and the VIP in the hashes of flows.
func (e *ServiceEntry) FlowWord() uint32 { return e.Id &^ hasSources }

// Service returns the number of the entry's service.
func (e *ServiceEntry) Service() uint32 { return e.Id & serviceMask }

// VIPNumber returns the number of the entry's VIP among the VIPs of its service.
func (e *ServiceEntry) VIPNumber() uint32 { return e.Id >> vipNumberShift }

// VIPKey returns the key of the entry that marks an address as a VIP.
func VIPKey(vip netip.Addr) ServiceEntry {
	return ServiceEntry{Vip: in6(vip), Kind: uint8(balancerServiceEntryKindENTRY_VIP)}
}

// Key returns the entry without number and rule.
func (e *ServiceEntry) Key() ServiceEntry {
	return ServiceEntry{Vip: e.Vip, Port: e.Port, Protocol: e.Protocol, Kind: e.Kind}
}

func kindOf(e *ServiceEntry) balancerServiceEntryKind {
	return balancerServiceEntryKind(e.Kind)
}

// IsService tells whether the entry is that of a service. If not, the entry marks an address as a
// VIP.
func (e *ServiceEntry) IsService() bool {
	return kindOf(e) == balancerServiceEntryKindENTRY_SERVICE
}

// Matches returns the destination of the packets to which the entry applies. Port 0 means any port.
func (e *ServiceEntry) Matches() (netip.Addr, desired.Port, desired.Protocol) {
	protocol := desired.TCP
	if e.Protocol == desired.UDP.Number() {
		protocol = desired.UDP
	}
	return addrOf(e.Vip), desired.PortOf(bits.ReverseBytes16(e.Port)), protocol
}

// Table returns the number of the service's candidate table in use.
func (e *ServiceEntry) Table() uint32 { return 2*e.Service() + uint32(e.Rule.Table()) }

// The flags of a rule (enum rule_flags in bpf/balancer/types.h).
const (
	ruleTable         = uint8(balancerRuleFlagsRULE_TABLE)
	RuleTakesFlows    = uint8(balancerRuleFlagsRULE_TAKES_FLOWS)
	RuleServersPassOn = uint8(balancerRuleFlagsRULE_SERVERS_PASS_ON)
	RuleHalfOpen      = uint8(balancerRuleFlagsRULE_HALF_OPEN)
	RuleServersAnswer = uint8(balancerRuleFlagsRULE_SERVERS_ANSWER)
	RuleAskIdle       = uint8(balancerRuleFlagsRULE_ASK_IDLE)
	RuleInRow         = uint8(balancerRuleFlagsRULE_IN_ROW)
	RuleFormerFlows   = uint8(balancerRuleFlagsRULE_FORMER_FLOWS)
)

// HasHalfOpen tells whether the service may have half-open flows: flows whose SYN a server has
// answered, and whose client has not answered yet.
func (r *ServiceRule) HasHalfOpen() bool { return r.Flags&RuleHalfOpen != 0 }

// HasFormerFlows tells whether the flow table may have flows from before the service had another
// persistence.
func (r *ServiceRule) HasFormerFlows() bool { return r.Flags&RuleFormerFlows != 0 }

// Table returns which of its two candidate tables the service uses: 0 or 1.
func (r *ServiceRule) Table() uint8 { return r.Flags & ruleTable }

// rule reads the rule of an entry in force by a single load.
func (e *ServiceEntry) rule() (rule ServiceRule) {
	*(*uint64)(unsafe.Pointer(&rule)) = atomic.LoadUint64((*uint64)(unsafe.Pointer(&e.Rule)))
	return rule
}

// SetRule replaces the rule of an entry in force by a single store.
func (e *ServiceEntry) SetRule(rule ServiceRule) {
	atomic.StoreUint64((*uint64)(unsafe.Pointer(&e.Rule)), *(*uint64)(unsafe.Pointer(&rule)))
}
