// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// InstallColumns writes a column table: for each bucket and column the present server, or none if
// the column has had other servers. The number is that of the candidate table to which it belongs.
// The table replaces the former one in one step, also while packets use it. The rows must have at
// most desired.MaxColumns columns. InstallColumns returns an error if the kernel cannot make or
// install the table.
func (p *Plane) InstallColumns(number uint32, rows *Rows) error {
	places := int(rows.Buckets) * rows.candidates
	// The table can have more words than these. No packet reads the others.
	words := make([]uint64, (places+candidatesPerWord-1)/candidatesPerWord)
	slots := slotsIn(words)
	for bucket := range int(rows.Buckets) {
		for column, server := range rows.row(bucket)[:rows.candidates] {
			if rows.hadOthers(bucket, column) {
				server = NoServer
			}
			slots[bucket*rows.candidates+column] = rows.slot(server)
		}
	}
	keys := make([]uint32, len(words))
	for i := range keys {
		keys[i] = uint32(i)
	}
	table, err := ebpf.NewMap(p.columns.Copy())
	if err != nil {
		return fmt.Errorf("make a column table: %w", err)
	}
	defer table.Close()
	if _, err := table.BatchUpdate(keys, words, nil); err != nil {
		return fmt.Errorf("fill a column table with %d words: %w", len(words), err)
	}
	return p.put(p.Objects.Columns, []numberedTable{{number, table}})
}

// RemoveColumns removes the column table of a number, if it exists. Packets of a service that keeps
// no flows then read its candidate table.
func (p *Plane) RemoveColumns(number uint32) error { return p.remove(p.Objects.Columns, number) }

// hadOthers tells whether a bucket's column has former servers besides the present one.
func (r *Rows) hadOthers(bucket, column int) bool {
	return r.generations > 1 && r.row(bucket)[r.candidates+column] != NoServer
}
