// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/cilium/ebpf"
)

// candidatesPerWord is CANDIDATES_PER_WORD in bpf/balancer/types.h.
const candidatesPerWord = 4

// Install writes a candidate table: slots, row by row. No service may name the number yet.
// Table 2n and table 2n+1 are those of the service with number n.
func (p *Plane) Install(number uint32, rows []uint16) error {
	words := make([]uint64, max(1, (len(rows)+candidatesPerWord-1)/candidatesPerWord))
	keys := make([]uint32, len(words))
	for i := range keys {
		keys[i] = uint32(i)
	}
	packed := unsafe.Slice((*uint16)(unsafe.Pointer(unsafe.SliceData(words))), len(words)*candidatesPerWord)
	copy(packed, rows)
	spec := p.inner.Copy()
	spec.MaxEntries = uint32(len(words))
	table, err := ebpf.NewMap(spec)
	if err != nil {
		return fmt.Errorf("make a table of %d candidates: %w", len(rows), err)
	}
	defer table.Close()
	if _, err := table.BatchUpdate(keys, words, nil); err != nil {
		return fmt.Errorf("fill a table of %d candidates: %w", len(rows), err)
	}
	if err := p.backup.keepTable(number); err != nil {
		return err
	}
	if err := p.Objects.Tables.Put(number, table); err != nil {
		return fmt.Errorf("install table %d: %w", number, err)
	}
	return nil
}

// Holds tells whether the candidate table of that number exists and begins with these rows.
func (p *Plane) Holds(number uint32, rows []uint16) bool {
	table, err := readCandidates(p.Objects.Tables, number)
	if err != nil || len(table)*candidatesPerWord < len(rows) {
		return false
	}
	for i, server := range rows {
		if slot, _ := table.At(uint32(i)); slot != uint32(server) {
			return false
		}
	}
	return true
}

// Settle returns when all packets that came before the call have left the data path. The kernel
// waits for them when an element of a map of maps is replaced.
func (p *Plane) Settle() error {
	return p.Install(p.Objects.Tables.MaxEntries()-1, nil)
}

// Candidates is a copy of a candidate table. Each word holds several slots.
type Candidates []uint64

// readCandidates reads a whole candidate table.
func readCandidates(tables *ebpf.Map, number uint32) (Candidates, error) {
	var table *ebpf.Map
	if err := tables.Lookup(number, &table); err != nil {
		return nil, fmt.Errorf("open table %d: %w", number, err)
	}
	defer table.Close()
	words := make(Candidates, table.MaxEntries())
	keys := make([]uint32, len(words))
	var cursor ebpf.MapBatchCursor
	_, err := table.BatchLookup(&cursor, keys, []uint64(words), nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, fmt.Errorf("read table %d: %w", number, err)
	}
	return words, nil
}

// At returns the slot at a position: bucket × candidates of a bucket + candidate. False: the
// table is smaller.
func (t Candidates) At(position uint32) (slot uint32, ok bool) {
	if int(position/candidatesPerWord) >= len(t) {
		return 0, false
	}
	return candidateIn(t[position/candidatesPerWord], position), true
}

// candidateIn takes the slot at a position of a table out of the word that holds it.
func candidateIn(word uint64, position uint32) uint32 {
	return uint32(uint16(word >> (16 * (position % candidatesPerWord))))
}

// readRow reads the candidates of a bucket from a candidate table.
func readRow(tables *ebpf.Map, number, bucket uint32, candidates uint8) (slots []uint32, err error) {
	var table *ebpf.Map
	if err := tables.Lookup(number, &table); err != nil {
		return nil, fmt.Errorf("open table %d: %w", number, err)
	}
	defer table.Close()
	for i := range uint32(candidates) {
		position := bucket*uint32(candidates) + i
		var word uint64
		if err := table.Lookup(position/candidatesPerWord, &word); err != nil {
			return nil, fmt.Errorf("read table %d: %w", number, err)
		}
		slots = append(slots, candidateIn(word, position))
	}
	return slots, nil
}
