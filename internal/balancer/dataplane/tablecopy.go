// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
)

const (
	copiedWords        = 1 << 16              // COPIED_WORDS in bpf/balancer/copytable.bpf.c
	copiedWordsSection = ".data.copied_words" // the section of copied_words in the same file
	copiedWordsMap     = "copied_words"
	copiedSize         = copiedWords * 8 // bytes
)

// tableCopier reads and writes candidate tables by the program of bpf/balancer/copytable.bpf.c. One
// goroutine owns it. It loads the program when it needs it for the first time.
type tableCopier struct {
	program *ebpf.Program
	memory  []byte
}

// parsedCopier returns the specification of the program. It parses the object only once.
var parsedCopier = sync.OnceValues(loadCopier)

// nameCopiedWords gives the map of the words its name and its size.
func nameCopiedWords(spec *ebpf.CollectionSpec) {
	datapath.NameSection(spec, copiedWordsSection, copiedWordsMap, copiedSize)
}

// load loads the program for the candidate tables, unless it is loaded.
func (c *tableCopier) load(tables *ebpf.Map) error {
	if c.program != nil {
		return nil
	}
	spec, err := parsedCopier()
	if err != nil {
		return err
	}
	spec = spec.Copy()
	nameCopiedWords(spec)
	var loaded struct {
		Program *ebpf.Program `ebpf:"copy_table"`
		Words   *ebpf.Map     `ebpf:"copied_words"`
	}
	if err := datapath.LoadOn(spec, &loaded, map[string]*ebpf.Map{TablesMap: tables}); err != nil {
		return fmt.Errorf("load the program that copies tables: %w", err)
	}
	defer loaded.Words.Close() // the program and the mapping keep the map
	memory, err := unix.Mmap(loaded.Words.FD(), 0, copiedSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return errors.Join(fmt.Errorf("map the copied words: %w", err), loaded.Program.Close())
	}
	c.program, c.memory = loaded.Program, memory
	return nil
}

// read copies the beginning of a candidate table to words. It returns an error if the table has
// fewer words.
func (c *tableCopier) read(tables *ebpf.Map, number uint32, words []uint64) error {
	for first := 0; first < len(words); first += copiedWords {
		part := words[first:min(first+copiedWords, len(words))]
		run := copierCopyRun{Table: number, First: uint32(first), Count: uint32(len(part))}
		if err := c.copy(tables, run); err != nil {
			return err
		}
		copy(part, c.words())
	}
	return nil
}

// write writes rows to a candidate table, which no packet may use.
func (c *tableCopier) write(tables *ebpf.Map, rows *NumberedRows) error {
	if err := c.load(tables); err != nil {
		return err
	}
	all := int(rows.Rows.words())
	for first := 0; first < all; first += copiedWords {
		count := min(copiedWords, all-first)
		rows.Rows.fill(first, c.words()[:count])
		run := copierCopyRun{Table: rows.Number, First: uint32(first), Count: uint32(count), Writes: 1}
		if err := c.copy(tables, run); err != nil {
			return err
		}
	}
	return nil
}

// words returns the words that a run copies.
func (c *tableCopier) words() []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(c.memory))), copiedWords)
}

// copy copies words between the memory and a candidate table.
func (c *tableCopier) copy(tables *ebpf.Map, run copierCopyRun) error {
	if err := c.load(tables); err != nil {
		return err
	}
	n, err := c.program.Run(&ebpf.RunOptions{Context: run})
	if err != nil {
		return fmt.Errorf("copy table %d: %w", run.Table, err)
	}
	if n < run.Count {
		return fmt.Errorf("copy table %d: it has only %d words", run.Table, run.First+n)
	}
	return nil
}

func (c *tableCopier) close() error {
	if c.program == nil {
		return nil
	}
	return errors.Join(c.program.Close(), unix.Munmap(c.memory))
}
