// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/tables"
)

// candidatesPerWord is CANDIDATES_PER_WORD in bpf/balancer/types.h.
const candidatesPerWord = 4

// NoServer is a slot that no server has: NO_SERVER in bpf/balancer/types.h.
const NoServer = tables.NoServer

// Rows is the content of a candidate table (bpf/balancer/tables/candidates.h).
type Rows struct {
	Buckets                 uint32
	hash                    desired.BucketHash // selects the row of a flow
	generations, candidates int
	// servers are the candidates, row by row. A row has generations times candidates of them.
	servers []uint16
	// If slots is nil, servers contains slots. Otherwise it contains indexes of this list, which
	// has the slots: see WithSlots.
	slots []uint16
}

// NewRows returns rows without servers, of the given number of buckets, generations (1 to 4) and
// candidates in each generation (0 to 8). Without candidates there are no rows. The hash selects
// the row of a flow; empty: BucketHashMultilinear.
func NewRows(buckets, generations, candidates int, hash desired.BucketHash) *Rows {
	r := &Rows{generations: generations, candidates: candidates, hash: hash}
	if candidates == 0 {
		return r
	}
	r.Buckets = uint32(buckets)
	r.servers = slices.Repeat([]uint16{NoServer}, buckets*generations*candidates)
	return r
}

// Size returns the number of candidates in all rows.
func (r *Rows) Size() int { return len(r.servers) }

// row returns the candidates of a bucket, one generation after the other; 0 is the present one.
func (r *Rows) row(bucket int) []uint16 {
	size := r.generations * r.candidates
	return r.servers[bucket*size : (bucket+1)*size]
}

// Candidates returns the slots of the candidates of a bucket in a generation; 0 is the present one.
func (r *Rows) Candidates(bucket, generation int) []uint16 {
	slots := make([]uint16, r.candidates)
	for i, server := range r.row(bucket)[generation*r.candidates : (generation+1)*r.candidates] {
		slots[i] = r.slot(server)
	}
	return slots
}

// slot returns the slot for an element of servers, which may be an index of slots, or NoServer.
func (r *Rows) slot(server uint16) uint16 {
	if r.slots == nil || server == NoServer {
		return server
	}
	return r.slots[server]
}

// SetPresent sets the present server of a place: of a candidate's number in the row of a bucket.
func (r *Rows) SetPresent(bucket, candidate int, server uint16) { r.row(bucket)[candidate] = server }

// AddFormer adds a server to the former ones of a place. The newest one must be added first.
// AddFormer does nothing if the server is there already, or if there is no room.
func (r *Rows) AddFormer(bucket, candidate int, server uint16) {
	row := r.row(bucket)
	if row[candidate] == server {
		return
	}
	// The same place in one former generation after the other.
	for i := candidate + r.candidates; i < len(row); i += r.candidates {
		switch row[i] {
		case NoServer:
			row[i] = server
			return
		case server:
			return
		}
	}
}

// WithSlots returns the same rows with slots[n] in place of each n. It shares memory with r.
func (r *Rows) WithSlots(slots []uint16) *Rows {
	replaced := *r
	replaced.slots = slots
	return &replaced
}

// Shape returns rows of the same shape without content.
func (r *Rows) Shape() *Rows {
	return &Rows{Buckets: r.Buckets, hash: r.hash, generations: r.generations, candidates: r.candidates}
}

// Row returns the shape of a row, as it is in a service's rule: ROW in bpf/balancer/types.h.
func (r *Rows) Row() uint8 {
	return uint8(r.candidates|r.generations<<4) | uint8(bucketHashes[r.hash])<<7
}

// Candidates returns how many candidates each generation of a row has.
func (r ServiceRule) Candidates() uint32 { return uint32(r.Row & 0xf) }

// Generations returns how many generations a row has.
func (r ServiceRule) Generations() uint32 { return uint32(r.Row >> 4 & 7) }

// BucketHash returns the hash that selects the row of a flow.
func (r ServiceRule) BucketHash() desired.BucketHash {
	return nameOf(bucketHashes, balancerBucketHash(r.Row>>7))
}

// Uninstall removes a service's candidate table and its column table, if there are any. No packet
// may use them at the time of the call. Uninstall returns an error if the kernel cannot remove a
// table.
func (p *Plane) Uninstall(number uint32) error {
	return errors.Join(p.remove(p.Objects.Tables, number), p.remove(p.Objects.Columns, number))
}

// remove removes a table from a map of maps, if it exists, and the table's pin. During a takeover,
// the backup keeps the table, and the pin stays.
func (p *Plane) remove(outer *ebpf.Map, number uint32) error {
	if err := p.backup.keepTable(outer, number); err != nil {
		return err
	}
	former, err := innerID(outer, number)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	if err == nil {
		err = outer.Delete(number)
	}
	if err != nil {
		return fmt.Errorf("remove table %d: %w", number, err)
	}
	return p.releaseTable(former)
}

// NumberedRows is the content of a candidate table, and the table's number.
type NumberedRows struct {
	Number uint32
	Rows   *Rows
}

// words returns the number of words of a table with these rows: at least one.
func (r *Rows) words() uint32 {
	return uint32(max(1, (len(r.servers)+candidatesPerWord-1)/candidatesPerWord))
}

// fill writes the slots of the rows into words. The words are a part of the candidate table: the
// argument first is the index of the part's first word in the table. Slots behind the last row
// are 0.
func (r *Rows) fill(first int, words []uint64) {
	servers := r.servers[min(first*candidatesPerWord, len(r.servers)):]
	into := slotsIn(words)
	count := min(len(into), len(servers))
	clear(into[count:])
	for i, server := range servers[:count] {
		into[i] = r.slot(server)
	}
}

// Install writes new candidate tables. No packet may use their numbers at the time of the call.
// Service n has the tables 2n and 2n+1. Install returns an error if the kernel cannot make or
// install a table.
//
// The kernel waits until no packet is under way, once for all tables of a call. That can take tens
// of milliseconds. Before Linux 6.8 it waits for each table.
func (p *Plane) Install(all []NumberedRows) error {
	tables := make([]numberedTable, 0, len(all))
	defer func() {
		for _, t := range tables {
			t.table.Close()
		}
	}()
	for i := range all {
		spec := p.inner.Copy()
		spec.MaxEntries = all[i].Rows.words()
		table, err := ebpf.NewMap(spec)
		if err != nil {
			return fmt.Errorf("make a table of %d words: %w", spec.MaxEntries, err)
		}
		tables = append(tables, numberedTable{all[i].Number, table})
	}
	if err := p.put(p.Objects.Tables, tables); err != nil {
		return err
	}
	for _, rows := range all {
		if err := p.copier.write(p.Objects.Tables, &rows); err != nil {
			return err
		}
	}
	return nil
}

// numberedTable is a table with its number in a map of maps.
type numberedTable struct {
	number uint32
	table  *ebpf.Map
}

// put puts tables into a map of maps, and replaces the tables that have the same numbers. After an
// error, some new tables may be in place. put then removes the pins of the tables that are not.
// During a takeover, the end of the takeover removes these pins.
func (p *Plane) put(outer *ebpf.Map, tables []numberedTable) error {
	err := p.putAll(outer, tables)
	if err != nil && p.backup == nil { // there is no takeover
		err = errors.Join(err, p.releaseTables())
	}
	return err
}

// putAll does the same as put, but removes no pins after an error.
func (p *Plane) putAll(outer *ebpf.Map, tables []numberedTable) error {
	var numbers, descriptors []uint32
	var former []ebpf.MapID
	for _, t := range tables {
		if err := p.backup.keepTable(outer, t.number); err != nil {
			return err
		}
		before, err := innerID(outer, t.number)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("find table %d: %w", t.number, err)
		}
		if err := datapath.KeepMap(p.Loader.Dir, t.table); err != nil {
			return fmt.Errorf("keep table %d: %w", t.number, err)
		}
		numbers, descriptors = append(numbers, t.number), append(descriptors, uint32(t.table.FD()))
		former = append(former, before)
	}
	if _, err := outer.BatchUpdate(numbers, descriptors, nil); err != nil {
		return fmt.Errorf("install tables %d: %w", numbers, err)
	}
	for _, table := range former {
		if err := p.releaseTable(table); err != nil {
			return err
		}
	}
	return nil
}

// releaseTable removes the pin of a table that was replaced or removed; 0: there was none. During a
// takeover it does nothing, because an undo needs the pin: see releaseTables.
func (p *Plane) releaseTable(former ebpf.MapID) error {
	if p.backup != nil || former == 0 {
		return nil
	}
	return datapath.ReleaseMap(p.Loader.Dir, former)
}

// releaseTables removes the pins of all tables that no service has. It looks only at the numbers of
// services with a label: a service has its label before its first table, and loses it after its
// last. To look at all numbers would take longer than the rest of a start.
func (p *Plane) releaseTables() error {
	labels, err := p.ServiceLabels()
	if err != nil {
		return fmt.Errorf("list the services: %w", err)
	}
	numbers := []uint32{p.spareTable()}
	for service := range labels {
		numbers = append(numbers, 2*service, 2*service+1)
	}
	used := map[ebpf.MapID]bool{}
	for _, outer := range []*ebpf.Map{p.Objects.Tables, p.Objects.Columns} {
		for _, number := range numbers {
			id, err := innerID(outer, number)
			if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("find table %d: %w", number, err)
			}
			used[id] = true
		}
	}
	return datapath.ReleaseMapsExcept(p.Loader.Dir, used)
}

// innerID returns the kernel's number of an element of a map of maps. The error is
// ebpf.ErrKeyNotExist if there is no such element.
func innerID(outer *ebpf.Map, number uint32) (ebpf.MapID, error) {
	var id uint32
	err := outer.Lookup(number, &id)
	return ebpf.MapID(id), err
}

// openInner opens an element of a map of maps. The argument dir is the directory of the instance's
// pins. The errors are those of innerID and of opening the map.
func openInner(dir string, outer *ebpf.Map, number uint32) (*ebpf.Map, error) {
	id, err := innerID(outer, number)
	if err != nil {
		return nil, err
	}
	return datapath.OpenMap(dir, id)
}

// slotsIn returns the slots that are packed in words.
func slotsIn(words []uint64) []uint16 {
	return unsafe.Slice((*uint16)(unsafe.Pointer(unsafe.SliceData(words))), len(words)*candidatesPerWord)
}

// Holds tells whether a candidate table with this number exists and begins with these rows. It
// returns false if the table cannot be read.
func (p *Plane) Holds(number uint32, rows *Rows) bool {
	table, err := readCandidates(p.Loader.Dir, p.Objects.Tables, number, &p.copier)
	if err != nil || len(table)*candidatesPerWord < len(rows.servers) {
		return false
	}
	for i, slot := range slotsIn(table)[:len(rows.servers)] {
		if slot != rows.slot(rows.servers[i]) {
			return false
		}
	}
	return true
}

// Settle returns when all packets that were in the data path at the call have left it. The kernel
// waits for these packets when an element of a map of maps is replaced, so Settle replaces one that
// no service uses. It also frees the lines of the rankings that were replaced before the call.
// Settle returns an error if the kernel cannot replace the element.
func (p *Plane) Settle() error {
	former := len(p.Rankings.former)
	if err := p.Install([]NumberedRows{{p.spareTable(), &Rows{}}}); err != nil {
		return err
	}
	p.Rankings.settled(former)
	return nil
}

// spareTable returns the number of the table that no service uses.
func (p *Plane) spareTable() uint32 { return p.Objects.Tables.MaxEntries() - 1 }

// Candidates is a copy of a candidate table. Each word contains candidatesPerWord slots.
type Candidates []uint64

// readCandidates reads a whole candidate table. The table stays open meanwhile, so that the kernel
// does not free it while the program reads it.
func readCandidates(dir string, tables *ebpf.Map, number uint32, copier *tableCopier) (Candidates, error) {
	table, err := openInner(dir, tables, number)
	if err != nil {
		return nil, fmt.Errorf("open table %d: %w", number, err)
	}
	defer table.Close()
	words := make(Candidates, table.MaxEntries())
	return words, copier.read(tables, number, words)
}

// At returns the slot at a position of the table: row_start in bpf/balancer/tables/candidates.h
// plus the number of the candidate in the row. At returns false if the table is smaller.
func (t Candidates) At(position uint32) (slot uint32, ok bool) {
	if int(position/candidatesPerWord) >= len(t) {
		return 0, false
	}
	word := t[position/candidatesPerWord]
	return uint32(uint16(word >> (16 * (position % candidatesPerWord)))), true
}
