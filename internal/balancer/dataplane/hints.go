// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"cmp"
	"math/bits"
	"sync/atomic"

	"github.com/cilium/ebpf"
)

const (
	// wordsPerSet and hintsPerWord are WORDS_PER_SET and HINTS_PER_WORD in
	// bpf/balancer/tables/hints.h.
	wordsPerSet  = 2
	hintsPerWord = 4
	// HintLoad is the number of hints per set when the table has as many as its capacity. It is
	// half of the places, so that few sets overflow (docs/operate/stateless.md).
	HintLoad = wordsPerSet * hintsPerWord / 2
	hintBits = 64 / hintsPerWord
	useMask  = 3
	// columnShift and columnMask select the column of a hint: HINT_COLUMN_SHIFT in hints.h.
	columnShift = 5
	columnMask  = 7
)

// The states of a hint (enum hint_use in bpf/balancer/tables/hints.h).
const (
	hintIdle   = uint64(balancerHintUseHINT_IDLE)
	hintRecent = uint64(balancerHintUseHINT_RECENT)
	hintShared = uint64(balancerHintUseHINT_SHARED)
)

// hintSets returns the number of sets for a capacity in hints. It is a power of two; 1: there is no
// hint table.
func hintSets(hints uint32) uint32 {
	if hints == 0 {
		return 1
	}
	return max(2, uint32(1)<<bits.Len32((hints-1)/HintLoad))
}

// hintSetShift is hint_set_shift of bpf/balancer/tables/hints.h for a number of sets.
func hintSetShift(sets uint32) uint32 {
	if sets == 1 {
		return 0
	}
	return bucketShift(sets)
}

// HintTable is the hint table of the data path, mapped into this process.
// bpf/balancer/tables/hints.h has its layout.
type HintTable struct{ table *FlowTable }

// HintCounts are numbers of hints.
type HintCounts struct {
	// Capacity is the number of flows for which the table is made: node.limits.hints, rounded up.
	// It is 0 if there is no table.
	Capacity uint64 `json:"capacity"`
	Idle     uint64 `json:"idle"` // no packet has followed them since the last sweep
	Recent   uint64 `json:"recent"`
	Shared   uint64 `json:"shared"` // of several flows, so they name no server
}

func mapHints(m *ebpf.Map) (*HintTable, error) {
	table, err := mapFlows(m)
	return &HintTable{table}, err
}

func (t *HintTable) close() error {
	if t == nil || t.table == nil {
		return nil
	}
	return t.table.close()
}

// ReadHint returns how a hint is used, as output shows it, and the column that it names. A shared
// hint names no column: the returned one then means nothing.
func ReadHint(hint uint16) (use string, column uint8) {
	use = map[uint64]string{hintIdle: "idle", hintRecent: "recent", hintShared: "shared"}[uint64(hint)&useMask]
	return cmp.Or(use, "none"), uint8(hint >> columnShift & columnMask)
}

// HasHints tells whether there is a hint table.
func (p *Plane) HasHints() bool { return len(p.Hints.Words()) > wordsPerSet }

// Words returns the words of the table, those of a set one after the other. The slice is the memory
// of the kernel, which other cores change.
func (t *HintTable) Words() []uint64 { return t.table.Entries }

// Sweep makes recent hints idle, and frees all others.
func (t *HintTable) Sweep() {
	for i := range t.Words() {
		word := &t.Words()[i]
		for {
			before := atomic.LoadUint64(word)
			if before == 0 || atomic.CompareAndSwapUint64(word, before, swept(before)) {
				break
			}
		}
	}
}

// swept returns a word after a sweep: of its hints, the recent ones are idle, and all others free.
func swept(word uint64) uint64 {
	for shift := 0; shift < 64; shift += hintBits {
		if word>>shift&useMask == hintRecent {
			word ^= (hintRecent ^ hintIdle) << shift // the hint is now idle
		} else {
			word &^= (1<<hintBits - 1) << shift
		}
	}
	return word
}

// Count counts the hints of the table.
func (t *HintTable) Count() (counts HintCounts) {
	words := t.Words()
	if len(words) > wordsPerSet {
		counts.Capacity = uint64(len(words)) / wordsPerSet * HintLoad
	}
	for i := range words {
		word := atomic.LoadUint64(&words[i])
		for ; word != 0; word >>= hintBits {
			switch word & useMask {
			case hintIdle:
				counts.Idle++
			case hintRecent:
				counts.Recent++
			case hintShared:
				counts.Shared++
			}
		}
	}
	return counts
}
