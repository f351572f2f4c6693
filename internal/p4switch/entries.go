// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"fmt"
	"iter"
	"math/bits"
	"net/netip"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
)

// Service is a service with everything that its entries depend on.
type Service struct {
	*desired.Service
	Number uint16
	Tables uint8 // which of its two sets of tables, 0 or 1
	// Rows has the slots of the servers. Sets is how many generations each row has.
	Rows *dataplane.Rows
	Sets int
	// HasHints tells whether the host has hints for flows of the service that have no cookies.
	HasHints bool
	// Servers are those of the service, by slot.
	Servers map[uint16]Condition
	// IDs are the slots of servers by their connection IDs, for persistence quic, which has no Rows.
	IDs map[dataplane.QUICPrefix]uint32
	// Generation is the number of the service's generation. Digest is equal for equal rows. It does not
	// depend on the condition of servers.
	Generation uint64
	Digest     uint32
}

// Server is a server of any service.
type Server struct {
	Service string
	Name    string
	Slot    uint16
	Locator netip.Addr
	Hop     NextHop
}

// NextHop is the way to a server. With port 0, there is none.
type NextHop struct {
	Port uint16 // of the switch
	MAC  [6]byte
	Own  [6]byte // the MAC address of the port
	MTU  uint16
}

// Match returns the entry by which packets find the service.
func (s *Service) Match() Entry {
	shift := 32 - bits.Len(uint(s.Buckets-1))
	e := Entry{
		Table: "services", Key: serviceKey(s.VIP, s.Protocol, s.Port.Number()),
		Action: "set_service",
		Params: []Value{
			Number(uint64(s.Number)), Number(uint64(s.Tables)), Number(uint64(^uint32(0) << shift)),
			Number(uint64(s.Candidates)), Number(uint64(s.cookieWidth())), flag(s.ServersDecide()), flag(s.HasHints),
			flag(s.Encapsulation == desired.SRv6Encap),
		},
	}
	if s.Port == desired.AllPorts {
		e.Table, e.Key = "services_of_all_ports", e.Key[:2]
	}
	return e
}

// flag returns a value of one bit.
func flag(is bool) Value {
	if is {
		return Number(1)
	}
	return Number(0)
}

// serviceKey returns the key of a service's entry. Without the port, it is that of a service for all
// ports.
func serviceKey(vip netip.Addr, protocol desired.Protocol, port uint16) []Value {
	address := vip.As16()
	return []Value{address[:], Number(uint64(protocol.Number())), Number(uint64(port))}
}

// rowKey returns the key of a row. The bucket is in the highest bits of the hash.
func rowKey(service, tables uint64, bucket, shift int) []Value {
	return []Value{Number(service), Number(tables), Number(uint64(bucket) << shift)}
}

// cookieWidth returns the width of cookies in bits: cookie_width in
// bpf/balancer/persist/cookie.h. It is 0 for persistence quic.
func (s *Service) cookieWidth() int {
	if s.QUIC != nil {
		return 0
	}
	return max(1, bits.Len(uint(s.Candidates-1)))
}

// IDEntries yields the entries by which packets of QUIC find their servers. Each is right by itself,
// because the host handles all packets that find none.
func (s *Service) IDEntries() iter.Seq[Entry] {
	return func(yield func(Entry) bool) {
		for prefix, slot := range s.IDs {
			key := []Value{Number(uint64(s.Number)), Number(uint64(prefix.Length)), prefix.Octets[:]}
			if !yield(Entry{"quic_servers", key, "go_to", []Value{Number(uint64(slot))}}) {
				return
			}
		}
		for _, form := range []*desired.QUIC{s.QUIC, s.FormerQUIC} {
			if form == nil {
				continue
			}
			mask := dataplane.QUICMask(form)
			key := []Value{Number(uint64(s.Number)), Number(uint64(form.Rotation))}
			params := []Value{mask[:], Number(uint64(form.ServerIDLength)), Number(uint64(form.Config().Length()))}
			if !yield(Entry{"quic_forms", key, "set_form", params}) {
				return
			}
		}
	}
}

// Entries yields the entries of the service's rows, columns and histories. Persistence quic has none.
func (s *Service) Entries() iter.Seq[Entry] {
	if s.Rows == nil {
		return func(func(Entry) bool) {}
	}
	l := lists{rows: s.Rows, sets: s.Sets, of: s.Servers, hasHints: s.HasHints}
	for _, c := range s.Servers {
		l.takesFlows = l.takesFlows || c.Takes
	}
	return func(yield func(Entry) bool) {
		for bucket := range s.Buckets {
			for e := range s.entriesOf(&l, bucket) {
				if !yield(e) {
					return
				}
			}
		}
	}
}

func (s *Service) entriesOf(l *lists, bucket int) iter.Seq[Entry] {
	shift := 32 - bits.Len(uint(s.Buckets-1))
	row := rowKey(uint64(s.Number), uint64(s.Tables), bucket, shift)
	return func(yield func(Entry) bool) {
		if list := l.offer(bucket); len(list.slots) > 0 && !yield(Entry{"rows", row, "offer", list.params()}) {
			return
		}
		for column := range s.Candidates {
			if e, ok := l.columnEntry(row, bucket, column); ok && !yield(e) {
				return
			}
		}
		if s.Candidates > 1 && !s.HasHints {
			if e, ok := l.historyEntry(row, bucket, noColumn); ok {
				yield(e)
			}
		}
	}
}

// columnEntry returns the entry of a column, if packets of the column visit any server.
func (l *lists) columnEntry(row []Value, bucket, column int) (Entry, bool) {
	slot, ok := l.only(bucket, column)
	if !ok {
		return l.historyEntry(row, bucket, column)
	}
	return Entry{"columns", withColumn(row, column), "go_to", []Value{Number(uint64(slot))}}, true
}

func (l *lists) historyEntry(row []Value, bucket, column int) (Entry, bool) {
	visited := l.visited(bucket, column)
	params := append([]Value{Number(uint64(len(visited)))}, slotValues(visited, mostVisited)...)
	return Entry{"histories", withColumn(row, column), "visit", params}, len(visited) > 0
}

func withColumn(row []Value, column int) []Value {
	return append(row[:len(row):len(row)], Number(uint64(column)))
}

// params returns the parameters of the action offer.
func (o offered) params() []Value {
	columns := uint64(0)
	for i, column := range o.columns {
		columns |= uint64(column) << 1 << (4 * i) // COLUMN in bpf/balancer/segments.h
	}
	params := []Value{Number(uint64(len(o.slots))), Number(columns)}
	return append(params, slotValues(o.slots, 8)...)
}

// slotValues returns slots as parameters, and zeros for the places of a list that is shorter.
func slotValues(slots []uint16, places int) []Value {
	values := make([]Value, places)
	for i := range values {
		n := uint64(0)
		if i < len(slots) {
			n = uint64(slots[i])
		}
		values[i] = Number(n)
	}
	return values
}

// Entries yields the entries of a server: its next hop, if it has one, and its locator for each place
// of a list.
func (s *Server) Entries() iter.Seq[Entry] {
	slot := []Value{Number(uint64(s.Slot))}
	return func(yield func(Entry) bool) {
		h := &s.Hop
		if h.Port != 0 && !yield(Entry{"next_hops", slot, "set_next_hop", []Value{
			Number(uint64(h.Port)), h.MAC[:], h.Own[:], Number(uint64(h.MTU)),
		}}) {
			return
		}
		for place := range mostVisited {
			if !yield(s.locatorEntry(place)) {
				return
			}
		}
	}
}

func (s *Server) locatorEntry(place int) Entry {
	address := s.Locator.As16()
	return Entry{locatorTable(place), []Value{Number(uint64(s.Slot))}, "set_locator", []Value{address[:8]}}
}

// locatorTable returns the name of the table with the locators for a place of a list.
func locatorTable(place int) string { return fmt.Sprintf("server%d.locators", place) }
