// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// flowTable is a reference model of bpf/agent/flowtable.h, on the data path's own memory.
type flowTable struct {
	t         testing.TB
	keys      agentAgentFlowKeys
	entries   []agentAgentFlowEntry // entriesPerBucket for each bucket
	balancers []uint64
	initials  []agentInitialBucket // of bpf/agent/initial.h
}

const (
	entriesPerBucket = 8
	bucketBits       = 15
	tickLength       = 1 << 20   // ns
	firstMask        = 1<<13 - 1 // of a report: what it tells about the first candidate
)

// tables contains the flow tables that are in the memory of this process. The kernel needs a
// millisecond to map one.
var tables sync.Map // *flowTable by *kernel

// tableOf maps the flow table of a data path into memory, for the time of the test.
func tableOf(t testing.TB, k *kernel) *flowTable {
	t.Helper()
	table := &flowTable{t: t}
	mapped, _ := tables.Load(k)
	testhost.Must(t, k.objects.AgentFlowKeys.Lookup(uint32(0), &table.keys))
	if mapped != nil {
		table.entries, table.balancers = mapped.(*flowTable).entries, mapped.(*flowTable).balancers
		table.initials = mapped.(*flowTable).initials
		return table
	}
	table.entries = memoryOf[agentAgentFlowEntry](t, k.objects.AgentFlows)
	table.balancers = memoryOf[uint64](t, k.objects.AgentBalancers)
	table.initials = memoryOf[agentInitialBucket](t, k.objects.Initials)
	tables.Store(k, table)
	t.Cleanup(func() { tables.Delete(k) })
	return table
}

// memoryOf returns the memory of an array, for the time of the test.
func memoryOf[T any](t testing.TB, m *ebpf.Map) []T {
	t.Helper()
	const protection = unix.PROT_READ | unix.PROT_WRITE
	size := int(m.MaxEntries() * m.ValueSize())
	memory, err := unix.Mmap(m.FD(), 0, size, protection, unix.MAP_SHARED)
	testhost.Must(t, err)
	t.Cleanup(func() {
		if err := unix.Munmap(memory); err != nil {
			t.Error(err)
		}
	})
	var element T
	elements := (*T)(unsafe.Pointer(unsafe.SliceData(memory)))
	return unsafe.Slice(elements, size/int(unsafe.Sizeof(element)))
}

func spread(sum uint64) uint64 {
	sum ^= sum >> 32
	return sum * 0x9e3779b97f4a7c15
}

// placeOf is place_of in bpf/net/hash.h.
func placeOf(sum uint64) uint64 {
	high := sum >> 32
	return sum + high*high<<33
}

// place returns the number of the flow's bucket and its signature, in the highest bits.
func (t *flowTable) place(f flow) (bucket, signature uint64) {
	source, destination := f.client.Addr().As16(), f.vip.Addr().As16()
	var key [40]byte
	copy(key[:], source[:])
	copy(key[16:], destination[:])
	binary.BigEndian.PutUint16(key[32:], f.client.Port())
	binary.BigEndian.PutUint16(key[34:], f.vip.Port())
	key[36] = unix.IPPROTO_TCP
	word := func(i int) uint64 { return uint64(binary.NativeEndian.Uint32(key[4*i:])) }
	keys := t.keys.Key
	multilinear := func(keys []uint64, added uint64) uint64 {
		for i := 0; i < 10; i += 2 {
			added += (keys[i] + word(i)) * (keys[i+1] + word(i+1))
		}
		return added
	}
	bucket = placeOf(multilinear(keys[1:], keys[0])) >> (64 - bucketBits)
	return bucket, multilinear(keys[3:], keys[13]) >> 30 << 30
}

func (t *flowTable) check(content, locator uint64) uint64 {
	return spread(content*(t.keys.Key[0]|1)+locator) >> 34
}

// search returns the entries of the flow's bucket in the order in which the data path visits them.
func (t *flowTable) search(f flow) (entries []*agentAgentFlowEntry, signature uint64) {
	bucket, signature := t.place(f)
	for i := range uint64(entriesPerBucket) {
		way := (i ^ signature>>30) % entriesPerBucket
		entries = append(entries, &t.entries[entriesPerBucket*bucket+way])
	}
	return entries, signature
}

// tableFlow is an entry of the flow table.
type tableFlow struct {
	remembered
	age  time.Duration // in whole ticks
	told bool
}

// encode returns the entry of a flow with a signature, at the time now.
func (t *flowTable) encode(f tableFlow, signature uint64, now time.Duration) agentAgentFlowEntry {
	address := f.balancer.Addr().As16()
	locator := binary.NativeEndian.Uint64(address[:])
	number := slices.Index(t.balancers, locator)
	if number < 0 {
		number = slices.Index(t.balancers, 0)
		t.balancers[number] = locator
	}
	content := uint64(uint32((now-f.age)/tickLength))<<32 | uint64(number)<<22 |
		uint64(slices.Index(encapsulations, f.kind))<<3
	if f.told || f.acknowledged {
		content |= 1 << 4
	}
	if f.wantsReport {
		content |= 1 << 5
	}
	if f.state == "cookie" {
		content |= uint64(f.cookie.width<<3|f.cookie.column) << 6
	} else {
		content |= f.first.Argument() & firstMask << 6
	}
	for n, name := range flowStates {
		if name == f.state {
			content |= uint64(n)
		}
	}
	return agentAgentFlowEntry{Identity: signature | t.check(content, locator), Content: content}
}

// decode returns the flow of an entry. ok is false if the entry's check fails.
func (t *flowTable) decode(e agentAgentFlowEntry, now time.Duration) (f tableFlow, ok bool) {
	locator := t.balancers[e.Content>>22&0x3ff]
	var address [16]byte
	binary.NativeEndian.PutUint64(address[:], locator)
	f.balancer = netip.PrefixFrom(netip.AddrFrom16(address), 64)
	f.state = flowStates[agentAgentFlowState(e.Content&7)]
	f.kind = encapsulations[e.Content>>3&1]
	f.told = e.Content>>4&1 == 1
	f.wantsReport = e.Content>>5&1 == 1
	if f.state == "cookie" {
		f.cookie = cookie{width: uint32(e.Content >> 9 & 3), column: uint32(e.Content >> 6 & 7)}
		f.told, f.acknowledged = false, f.told
	} else {
		f.first, _ = srv6.ParseReport(e.Content >> 6 & firstMask)
	}
	f.age = time.Duration(uint32(now/tickLength)-uint32(e.Content>>32)) * tickLength
	return f, e.Identity<<34>>34 == t.check(e.Content, locator)
}

// find returns the entry with the flow's signature, or nil.
func (t *flowTable) find(f flow) *agentAgentFlowEntry {
	entries, signature := t.search(f)
	for _, e := range entries {
		if e.Identity>>30 == signature>>30 {
			return e
		}
	}
	return nil
}

// replaced returns the place in the search order of the entry that the flow takes.
func (t *flowTable) replaced(f flow, now time.Duration) int {
	entries, signature := t.search(f)
	best, highest := 0, uint64(0)
	for i, e := range entries {
		if e.Identity>>30 == signature>>30 {
			return i
		}
		found, _ := t.decode(*e, now)
		rank := uint64(found.age / tickLength)
		switch found.state {
		case "":
			rank = 2 << 32
		case "closing", "cookie":
			rank += 1 << 32
		}
		if rank > highest {
			best, highest = i, rank
		}
	}
	return best
}

// put enters a flow.
func (t *flowTable) put(f flow, entry tableFlow) {
	now := t.now()
	entries, signature := t.search(f)
	*entries[t.replaced(f, now)] = t.encode(entry, signature, now)
}

// makeOlder adds to the age of a flow's entry.
func (t *flowTable) makeOlder(f flow, by time.Duration) {
	t.t.Helper()
	e := t.find(f)
	if e == nil {
		t.t.Fatalf("there is no entry of %v", f)
	}
	e.Content -= uint64(by/tickLength) << 32
	e.Identity = e.Identity>>30<<30 | t.check(e.Content, t.balancers[e.Content>>22&0x3ff])
}

// now returns the time of the data path's clock, which may be some milliseconds behind.
func (t *flowTable) now() time.Duration {
	t.t.Helper()
	now, err := monotonic()
	if err != nil {
		t.t.Fatal(fmt.Errorf("read the clock: %w", err))
	}
	return time.Duration(now)
}
