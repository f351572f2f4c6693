// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"iter"
	"math"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
)

const (
	// bucketsPerRun is how many buckets one run of the program sweeps: one megabyte of the table.
	// Kernels without preemption run nothing else on the CPU during a run, except interrupts.
	// Packets that the kernel leaves to its threads wait for the end of the run. So a run should
	// take less than a millisecond. It still takes far longer than the system call that starts it.
	bucketsPerRun = 1 << 14

	sweptServersSection = ".data.swept_servers" // in bpf/balancer/sweep.bpf.c
	sweptServersMap     = "swept_servers"
)

// FlowLifetimes are ages, in ticks, at which a sweep changes the entries of a server. It frees a
// new flow at New, a closed one at Closed, and an established, silent or closing one at
// Established. An age of 0 frees all flows in the state. At Silent, an established flow becomes
// silent, and no longer counts as a load of its server.
type FlowLifetimes struct{ New, Established, Closed, Silent uint16 }

// Forever are the lifetimes of entries that a sweep keeps as they are, however old they are. No age
// in ticks is as high.
var Forever = FlowLifetimes{math.MaxUint16, math.MaxUint16, math.MaxUint16, math.MaxUint16}

// sweptStates is SWEPT_STATES in bpf/balancer/sweep.bpf.c.
const sweptStates = 8

// swept returns the form of the lifetimes in the program. Due has, by state, the age at which the
// program changes an entry. It makes an established or closing entry silent or frees it, whichever
// is due. It frees all other entries.
func (l FlowLifetimes) swept() SweptServer {
	return SweptServer{
		Due: [sweptStates]uint16{
			FlowNew: l.New, FlowEstablished: min(l.Established, l.Silent),
			FlowClosed: l.Closed, FlowSilent: l.Established,
			FlowClosing: min(l.Established, maxEndedTicks),
		},
		Established: l.Established,
	}
}

// Sweeper sweeps the flow tables by the program of bpf/balancer/sweep.bpf.c. One goroutine owns it.
type Sweeper struct {
	program *ebpf.Program
	tables  []*ebpf.Map // by enum swept_table of bpf/balancer/sweep.bpf.c
	memory  []byte
	servers []SweptServer // by slot, and one more for all higher slots
}

// parsedSweeper returns the specification of the program. It parses the object only once.
var parsedSweeper = sync.OnceValues(loadSweeper)

// newSweeper loads the program for the flow tables of the objects.
func newSweeper(o *Objects, clock *FlowClock) (*Sweeper, error) {
	spec, err := parsedSweeper()
	if err != nil {
		return nil, err
	}
	spec = spec.Copy()
	shared := map[string]*ebpf.Map{
		FlowsMap: o.Flows, balancerMapHalfOpen: o.HalfOpen, balancerMapObserved: o.Observed,
		LoadsMap: o.Loads,
	}
	for name, table := range shared {
		spec.Maps[name].MaxEntries = table.MaxEntries()
	}
	slots := o.ServerCounters.MaxEntries()
	size, err := setSweptSlots(spec, slots)
	if err != nil {
		return nil, err
	}
	if err := spec.Variables[sweeperVarFlowTickShift].Set(clock.Shift); err != nil {
		return nil, fmt.Errorf("set %s: %w", sweeperVarFlowTickShift, err)
	}
	var loaded struct {
		Program *ebpf.Program `ebpf:"sweep_flows"`
		Servers *ebpf.Map     `ebpf:"swept_servers"`
	}
	err = spec.LoadAndAssign(&loaded, &ebpf.CollectionOptions{MapReplacements: shared})
	if err != nil {
		return nil, fmt.Errorf("load the sweep: %w", err)
	}
	defer loaded.Servers.Close() // the program and the mapping keep the map
	s := &Sweeper{program: loaded.Program, tables: []*ebpf.Map{
		sweeperSweptTableSWEPT_FLOWS: o.Flows, sweeperSweptTableSWEPT_HALF_OPEN: o.HalfOpen,
		sweeperSweptTableSWEPT_OBSERVED: o.Observed,
	}}
	const protection = unix.PROT_READ | unix.PROT_WRITE
	s.memory, err = unix.Mmap(loaded.Servers.FD(), 0, int(size), protection, unix.MAP_SHARED)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("map the servers of the sweep: %w", err), s.close())
	}
	s.servers = unsafe.Slice((*SweptServer)(unsafe.Pointer(unsafe.SliceData(s.memory))), slots+1)
	return s, nil
}

// setSweptSlots sets the number of slots whose flows the program sweeps. It returns the size of the
// map of the servers, in bytes. Tests of the verifier must set a number, too: without a slot, the
// verifier would check only a part of the program.
func setSweptSlots(spec *ebpf.CollectionSpec, slots uint32) (size uint32, err error) {
	size = (slots + 1) * uint32(unsafe.Sizeof(SweptServer{}))
	datapath.NameSection(spec, sweptServersSection, sweptServersMap, size)
	if err := spec.Variables[sweeperVarSweptSlots].Set(slots); err != nil {
		return 0, fmt.Errorf("set %s: %w", sweeperVarSweptSlots, err)
	}
	return size, nil
}

func (s *Sweeper) close() error {
	err := s.program.Close()
	if s.memory != nil {
		err = errors.Join(err, unix.Munmap(s.memory))
	}
	return err
}

// Sweep frees the entries that have reached their lifetimes, in all flow tables, and counts the
// others. The lifetimes are by slot. Entries of slots without lifetimes are freed. Packets can
// change the tables meanwhile. An entry that changes during the sweep stays.
//
// Sweep returns the numbers of the entries that it has kept, by slot, up to the highest slot with
// lifetimes. The next sweep overwrites them. Sweep returns an error if the program cannot be run.
// Then it may have swept a part of the tables.
func (s *Sweeper) Sweep(
	lifetimes iter.Seq2[uint32, FlowLifetimes],
) (kept []SweptServer, err error) {
	clear(s.servers)
	slots := uint32(0)
	for slot, lifetime := range lifetimes {
		s.servers[slot] = lifetime.swept()
		slots = max(slots, slot+1)
	}
	for number, table := range s.tables {
		for first := uint32(0); first < table.MaxEntries(); first += bucketsPerRun {
			part := sweeperSweepRun{
				First: first,
				Count: min(bucketsPerRun, table.MaxEntries()-first),
				Table: uint32(number),
			}
			if err := s.run(part); err != nil {
				return nil, err
			}
		}
	}
	return s.servers[:slots], nil
}

// run sweeps a part of a table. The program returns an error number as a negative number.
func (s *Sweeper) run(part sweeperSweepRun) error {
	result, err := s.program.Run(&ebpf.RunOptions{Context: part})
	if err == nil && int32(result) < 0 {
		err = unix.Errno(-int32(result))
	}
	if err != nil {
		return fmt.Errorf("sweep %d buckets from bucket %d: %w", part.Count, part.First, err)
	}
	return nil
}
