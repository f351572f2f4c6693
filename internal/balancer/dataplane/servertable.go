// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"encoding/binary"
	"math"
	"math/bits"
	"net"
	"net/netip"
	"sync/atomic"

	"github.com/segue-lb/segue/internal/srv6"
)

// macWord returns a MAC address in memory order, in the low 48 bits.
func macWord(mac [6]byte) uint64 {
	var word [8]byte
	copy(word[:], mac[:])
	return binary.LittleEndian.Uint64(word[:])
}

// macOf returns the MAC address in the low 48 bits of a word.
func macOf(word uint64) net.HardwareAddr {
	mac := make(net.HardwareAddr, 6)
	for i := range mac {
		mac[i] = byte(word >> (8 * i))
	}
	return mac
}

// ServerTable contains the servers of the directory, as many as the balancer has slots. Slots are
// numbers from 0 to the size of the table minus 1. All methods except Has panic for other slots.
// Each write is one aligned store, so that packets see the server completely before or completely
// after it.
type ServerTable struct {
	servers []balancerServer
}

// serverTable returns the servers in a directory. Each map by slot has the same number of slots.
func (t *Maps) serverTable(in *Directory) *ServerTable {
	return &ServerTable{in.Servers[:t.ServerSignals.MaxEntries()]}
}

// Has tells whether the table has the slot.
func (t *ServerTable) Has(slot uint32) bool { return int(slot) < len(t.servers) }

// mayBeOf tells whether the slot may have a server of the service with this number. The slot of a
// failed server may belong to no service. The slot of a removed server keeps the number that the
// service had when the server was removed. Slots that have never been in use have no address.
func (t *ServerTable) mayBeOf(slot, service uint32) bool {
	if t.servers[slot].Address == (balancerServer{}).Address {
		return false
	}
	owner := atomic.LoadUint32(&t.servers[slot].Service)
	return owner == service || owner == NoService || t.Flags(slot)&FlagInUse == 0
}

// Address returns the locator of the slot's server, or the far end of the tunnel to it.
func (t *ServerTable) Address(slot uint32) netip.Addr { return addrOf(t.servers[slot].Address) }

// Source returns the address from which the balancer sends packets to the slot's server.
func (t *ServerTable) Source(slot uint32) netip.Addr { return addrOf(t.servers[slot].Source) }

// put fills a free slot. It writes the flags last, because they put the slot into use.
func (t *ServerTable) put(
	slot, service uint32, address, source netip.Addr, known KnownSID, flags ServerFlags,
) {
	server := &t.servers[slot]
	server.Service = service
	t.SetKnownSID(slot, known)
	atomic.StoreUint64(&server.NextHop, 0)
	server.Address = in6(address)
	server.Source = in6(source)
	t.SetFlags(slot, flags)
}

// Flags returns the flags of the slot. They are 0 if the slot is not in use.
func (t *ServerTable) Flags(slot uint32) ServerFlags {
	return ServerFlags(atomic.LoadUint32(&t.servers[slot].Flags))
}

// SetFlags replaces the flags of the slot.
func (t *ServerTable) SetFlags(slot uint32, flags ServerFlags) {
	atomic.StoreUint32(&t.servers[slot].Flags, uint32(flags))
}

// NoService is a number that no service has.
const NoService = ^uint32(0)

// SetService makes the slot's server one of the service with this number. With NoService, no packet
// of a service goes to the server.
func (t *ServerTable) SetService(slot, service uint32) {
	atomic.StoreUint32(&t.servers[slot].Service, service)
}

// takesFlowsOf tells whether the slot has a server of the service that takes new flows:
// takes_flows_of in bpf/balancer/segments.h.
func (t *ServerTable) takesFlowsOf(slot, service uint32) bool {
	return t.servers[slot].Service == service && t.TakesFlows(slot)
}

// Of returns the slots of a service, in order.
func (t *ServerTable) Of(service uint32) (slots []uint32) {
	for slot := range t.servers {
		if t.servers[slot].Service == service && t.Flags(uint32(slot))&FlagInUse != 0 {
			slots = append(slots, uint32(slot))
		}
	}
	return slots
}

// TakesFlows tells whether the slot has a server that takes new flows.
func (t *ServerTable) TakesFlows(slot uint32) bool {
	return t.Flags(slot)&(FlagInUse|FlagDrained|FlagFailing) == FlagInUse
}

// setRank stores 1 plus the place of the slot's server in its service's ranking. 0: it has none.
func (t *ServerTable) setRank(slot, rank uint32) { atomic.StoreUint32(&t.servers[slot].Rank, rank) }

// KnownSID is what packets of known flows ask of a server: a function and its argument.
type KnownSID struct {
	Function srv6.Function
	Argument uint64 // at most srv6.MaxArgument
}

// SetKnownSID sets what packets of known flows ask of the slot's server.
func (t *ServerTable) SetKnownSID(slot uint32, known KnownSID) {
	low := uint64(known.Function)<<48 | known.Argument // as in a SID, in network order
	atomic.StoreUint64(&t.servers[slot].KnownSid, bits.ReverseBytes64(low))
}

// SetVaried sets the IPv4 prefix whose addresses are the outer sources of packets to the slot's
// server. If it is not valid, the source is always Source.
func (t *ServerTable) SetVaried(slot uint32, sources netip.Prefix) {
	varied := uint32(0)
	if sources.IsValid() { // the bits behind the prefix vary
		varied = bits.ReverseBytes32(math.MaxUint32 >> sources.Bits()) // in network order
	}
	atomic.StoreUint32(&t.servers[slot].Varied, varied)
}

// SetNextHop sets the next hop of the slot's server: a MAC address, and a port (a number of Ports,
// from 1 to 255).
func (t *ServerTable) SetNextHop(slot uint32, mac [6]byte, port uint16) {
	atomic.StoreUint64(&t.servers[slot].NextHop, macWord(mac)|uint64(port)<<48)
}

// NextHop returns the MAC address and the port of the next hop of the slot's server. It returns
// false if the server has no next hop.
func (t *ServerTable) NextHop(slot uint32) (mac [6]byte, port uint16, ok bool) {
	word := atomic.LoadUint64(&t.servers[slot].NextHop)
	return [6]byte(macOf(word)), uint16(word >> 48), word != 0
}

// HasNextHop tells whether the slot's server has a next hop.
func (t *ServerTable) HasNextHop(slot uint32) bool {
	return atomic.LoadUint64(&t.servers[slot].NextHop) != 0
}

// ClearNextHop removes the next hop of the slot's server. Packets to the server are then dropped.
func (t *ServerTable) ClearNextHop(slot uint32) {
	atomic.StoreUint64(&t.servers[slot].NextHop, 0)
}

// in6 returns an address in the form of the data path. An IPv4 address becomes an IPv4-mapped one.
func in6(address netip.Addr) (out balancerIn6Addr) {
	out.In6U.U6Addr8 = address.As16()
	return out
}

// addrOf is the reverse of in6.
func addrOf(in balancerIn6Addr) netip.Addr {
	return netip.AddrFrom16(in.In6U.U6Addr8).Unmap()
}

// restore gives a slot its earlier content. If the slot was in use, it still has the same server,
// and only its flags, its next hop, its function, its rank and its varied sources can differ.
func (t *ServerTable) restore(slot uint32, server balancerServer) {
	if server.Flags == 0 { // it was not in use: packets must not see a mixture
		t.SetFlags(slot, 0)
	}
	now := &t.servers[slot]
	now.Service, now.Address, now.Source = server.Service, server.Address, server.Source
	atomic.StoreUint64(&now.KnownSid, server.KnownSid)
	atomic.StoreUint64(&now.NextHop, server.NextHop)
	atomic.StoreUint32(&now.Varied, server.Varied)
	t.setRank(slot, server.Rank)
	t.SetFlags(slot, ServerFlags(server.Flags))
}
