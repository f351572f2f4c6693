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

// Install writes a new candidate table under a number. The argument rows contains the slots, row by
// row. No packet may use the number at the time of the call. Service n has the tables 2n and 2n+1.
// Install returns an error if the kernel cannot make or install the table.
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

// Holds tells whether the candidate table of the number exists and begins with these rows. It
// returns false if the table cannot be read.
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

// Settle returns when all packets that were in the data path at the call have left it. The kernel
// waits for these packets when an element of a map of maps is replaced, so Settle replaces one that
// no service uses. Settle returns an error if the kernel cannot replace the element.
func (p *Plane) Settle() error {
	return p.Install(p.Objects.Tables.MaxEntries()-1, nil)
}

// Candidates is a copy of a candidate table. Each word contains candidatesPerWord slots.
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

// At returns the slot at a position of the table. The position is the bucket times the number of
// candidates of a bucket, plus the number of the candidate. At returns false if the table is
// smaller.
func (t Candidates) At(position uint32) (slot uint32, ok bool) {
	if int(position/candidatesPerWord) >= len(t) {
		return 0, false
	}
	return candidateIn(t[position/candidatesPerWord], position), true
}

// candidateIn returns the slot at a position of a table. The word is the one that contains it.
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
