// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"math/bits"
	"net"
	"net/netip"
	"sync/atomic"

	"github.com/segue-lb/segue/internal/srv6"
)

// macWord is a MAC address in memory order, in the low 48 bits.
func macWord(mac [6]byte) uint64 {
	var word [8]byte
	copy(word[:], mac[:])
	return binary.LittleEndian.Uint64(word[:])
}

// macOf is the reverse of macWord.
func macOf(word uint64) net.HardwareAddr {
	mac := make(net.HardwareAddr, 6)
	for i := range mac {
		mac[i] = byte(word >> (8 * i))
	}
	return mac
}

// serverTable are the directory's servers: as many slots as there are counters for.
type serverTable struct {
	servers []balancerServer
}

func (t *kernelMaps) serverTable(in *directory) *serverTable {
	return &serverTable{in.Servers[:t.ServerSignals.MaxEntries()]}
}

// has tells whether there is such a slot.
func (t *serverTable) has(slot uint32) bool { return int(slot) < len(t.servers) }

// address is the locator of the server of a slot, or the far end of its tunnel.
func (t *serverTable) address(slot uint32) netip.Addr { return addrOf(t.servers[slot].Address) }

// source is where the balancer's packets to the server of a slot come from.
func (t *serverTable) source(slot uint32) netip.Addr { return addrOf(t.servers[slot].Source) }

// service is the number of the service that the slot serves.
func (t *serverTable) service(slot uint32) uint32 { return t.servers[slot].Service }

// put fills a free slot. Its flags, which bring it to life, come last.
func (t *serverTable) put(slot, service uint32, address, source netip.Addr, known srv6.Function, flags balancerServerFlags) {
	server := &t.servers[slot]
	server.Service = service
	t.setKnown(slot, known)
	atomic.StoreUint64(&server.NextHop, 0)
	server.Address = in6(address)
	server.Source = in6(source)
	t.setFlags(slot, flags)
}

func (t *serverTable) flags(slot uint32) balancerServerFlags {
	return balancerServerFlags(atomic.LoadUint32(&t.servers[slot].Flags))
}

// serves tells whether the slot has a server of the service: serves of bpf/balancer/segments.h.
func (t *serverTable) serves(slot, service uint32) bool {
	return int(slot) < len(t.servers) && t.flags(slot)&balancerServerFlagsSERVER_IN_USE != 0 && t.servers[slot].Service == service
}

func (t *serverTable) setFlags(slot uint32, flags balancerServerFlags) {
	atomic.StoreUint32(&t.servers[slot].Flags, uint32(flags))
}

// setKnown says what the server is asked for packets of known flows.
func (t *serverTable) setKnown(slot uint32, function srv6.Function) {
	atomic.StoreUint64(&t.servers[slot].KnownSid, sidLow(function))
}

// known is what the server is asked for packets of known flows.
func (t *serverTable) known(slot uint32) srv6.Function {
	half := atomic.LoadUint64(&t.servers[slot].KnownSid)
	return srv6.Function(bits.ReverseBytes16(uint16(half)))
}

// sidLow is SID_LOW in bpf/net/srv6.h.
func sidLow(function srv6.Function) uint64 {
	return uint64(bits.ReverseBytes32(uint32(function) << 16))
}

// setNextHop names the MAC address and port by which a server is reached.
func (t *serverTable) setNextHop(slot uint32, mac [6]byte, port uint16) {
	atomic.StoreUint64(&t.servers[slot].NextHop, macWord(mac)|uint64(port)<<48)
}

// nextHop is the reverse of setNextHop; false: there is none.
func (t *serverTable) nextHop(slot uint32) (mac [6]byte, port uint16, ok bool) {
	word := atomic.LoadUint64(&t.servers[slot].NextHop)
	return [6]byte(macOf(word)), uint16(word >> 48), word != 0
}

func (t *serverTable) hasNextHop(slot uint32) bool {
	return atomic.LoadUint64(&t.servers[slot].NextHop) != 0
}

// reachable tells whether the server's next hop is known, and answers: is_reachable of bpf/balancer/segments.h.
func (t *serverTable) reachable(slot uint32) bool {
	return t.hasNextHop(slot) && t.flags(slot)&balancerServerFlagsSERVER_UNREACHABLE == 0
}

func (t *serverTable) clearNextHop(slot uint32) {
	atomic.StoreUint64(&t.servers[slot].NextHop, 0)
}

// in6 is an address as the data path holds it: IPv4 in its IPv4-mapped form.
func in6(address netip.Addr) (out balancerIn6Addr) {
	out.In6U.U6Addr8 = address.As16()
	return out
}

// addrOf is the reverse of in6.
func addrOf(in balancerIn6Addr) netip.Addr {
	return netip.AddrFrom16(in.In6U.U6Addr8).Unmap()
}

// restore makes a slot as it was. A slot that was in use has the same server as before: only its
// flags, its next hop and its function can differ.
func (t *serverTable) restore(slot uint32, server balancerServer) {
	if server.Flags == 0 {
		t.setFlags(slot, 0)
	}
	now := &t.servers[slot]
	now.Service, now.Address, now.Source = server.Service, server.Address, server.Source
	atomic.StoreUint64(&now.KnownSid, server.KnownSid)
	atomic.StoreUint64(&now.NextHop, server.NextHop)
	t.setFlags(slot, balancerServerFlags(server.Flags))
}
