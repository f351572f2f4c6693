// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/testhost"
)

// The copier writes and reads whole tables, in one run or in several. It returns an error if the
// table has fewer words than expected, or if there is no table.
func TestTableCopier(t *testing.T) {
	t.Parallel()
	testhost.NeedBPF(t)
	spec, err := loadCopier()
	testhost.Must(t, err)
	outer, err := ebpf.NewMap(spec.Maps[TablesMap])
	testhost.Must(t, err)
	defer outer.Close()
	var copier tableCopier
	defer copier.close()
	write := func(number uint32, words []uint64) error {
		return copier.write(outer, &NumberedRows{number, &Rows{servers: slotsIn(words)}})
	}
	for number, size := range map[uint32]int{3: 1, 4: 31, 5: 32, 6: copiedWords, 7: 2*copiedWords + 33} {
		words := make([]uint64, size)
		for i := range words {
			words[i] = rand.Uint64()
		}
		inner := spec.Maps[TablesMap].InnerMap.Copy()
		inner.MaxEntries = uint32(size)
		table, err := ebpf.NewMap(inner)
		testhost.Must(t, err)
		defer table.Close()
		testhost.Must(t, outer.Put(number, table))
		testhost.Must(t, write(number, words))
		var last uint64 // read without the program
		if err := table.Lookup(uint32(size-1), &last); err != nil || last != words[size-1] {
			t.Errorf("%d words: the last one is %x, %v; want %x", size, last, err, words[size-1])
		}
		if err := write(number, make([]uint64, size+1)); err == nil {
			t.Errorf("%d words: one more was written", size)
		}
		testhost.Must(t, write(number, words))
		got := make([]uint64, size)
		if err := copier.read(outer, number, got); err != nil || !slices.Equal(got, words) {
			t.Errorf("%d words: error %v, or other words", size, err)
		}
		if err := copier.read(outer, number, make([]uint64, size+1)); err == nil {
			t.Errorf("%d words: one more was read", size)
		}
	}
	if err := copier.read(outer, 2, make([]uint64, 1)); err == nil {
		t.Error("a table that does not exist was read")
	}
}
