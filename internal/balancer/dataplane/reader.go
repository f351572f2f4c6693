// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
)

// Reader has the tables of an instance open, whether its process runs or not, and writes none. Traffic and
// reloads go on meanwhile: what is read is true of each table, not of all at one moment.
type Reader struct {
	Instance  string
	maps      Maps
	Identity  Identity
	Reasons   []string // the names of reasons, by number
	Directory *Directory
	Servers   *ServerTable
	Services  *ServiceTable
	Flows     *FlowTable
	HalfOpen  *FlowTable // the half-open ones
	Clock     *FlowClock
	counting  *sync.Mutex // while counters move from one table to another
}

// OpenReader opens the tables of an instance. Those of a build with another layout are refused.
func OpenReader(instance string) (*Reader, error) {
	return newReader(instance, new(sync.Mutex), func(name string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
		return datapath.OpenTable(filepath.Join(datapath.Dir(instance), name), spec)
	})
}

// Reader reads the data path's own tables. Not all of them are pinned before it is attached.
func (p *Plane) Reader() (*Reader, error) {
	tables := p.Objects.Maps.Pinned()
	return newReader(p.instance, &p.counting, func(name string, _ *ebpf.MapSpec) (*ebpf.Map, error) {
		return (*tables[name]).Clone()
	})
}

// newReader makes a reader of tables that it opens.
func newReader(instance string, counting *sync.Mutex, open func(name string, spec *ebpf.MapSpec) (*ebpf.Map, error)) (_ *Reader, err error) {
	r := &Reader{Instance: instance, counting: counting}
	defer func() {
		if err != nil {
			_ = r.Close()
			err = fmt.Errorf("instance %s: %w", instance, err)
		}
	}()
	spec, reasons, err := LoadSpec()
	if err != nil {
		return nil, err
	}
	r.Reasons = reasons
	for name, m := range r.maps.Pinned() {
		if *m, err = open(name, spec.Maps[name]); err != nil {
			return nil, fmt.Errorf("table %s: %w", name, err)
		}
	}
	if err := readIdentity(r.maps.Identity, &r.Identity); err != nil {
		return nil, err
	}
	if r.Directory, err = MapDirectory(r.maps.Directory, unix.PROT_READ); err != nil {
		return nil, err
	}
	r.Servers, r.Services = r.maps.serverTable(r.Directory), &ServiceTable{directory: r.Directory, keys: &r.Identity.ServiceKeys}
	if r.Flows, err = mapFlows(r.maps.Flows, unix.PROT_READ); err != nil {
		return nil, err
	}
	if r.HalfOpen, err = mapFlows(r.maps.HalfOpen, unix.PROT_READ); err != nil {
		return nil, err
	}
	r.Clock, err = loadFlowClock(spec)
	return r, err
}

// Close closes the tables.
func (r *Reader) Close() error {
	var errs []error
	if r.Flows != nil {
		errs = append(errs, r.Flows.close())
	}
	if r.HalfOpen != nil {
		errs = append(errs, r.HalfOpen.close())
	}
	if r.Directory != nil {
		errs = append(errs, r.Directory.Close())
	}
	if r.Clock != nil {
		errs = append(errs, r.Clock.close())
	}
	return errors.Join(append(errs, r.maps.Close())...)
}

// Capacity is how many flows the flow table is made for.
func (r *Reader) Capacity() uint64 { return uint64(r.maps.Flows.MaxEntries()) * FlowLoad }

// ServiceNames reads the names of services, by their numbers.
func (r *Reader) ServiceNames() (map[uint32]string, error) {
	return readServiceNames(r.maps.ServiceLabels)
}

// ServerNames reads whose the slots are.
func (r *Reader) ServerNames() (map[uint32]ServerName, error) {
	return readServerNames(r.maps.ServerLabels)
}

// ServerName reads whose a slot is; false: nobody's.
func (r *Reader) ServerName(slot uint32) (ServerName, bool) {
	var label balancerLabel
	if err := r.maps.ServerLabels.Lookup(slot, &label); err != nil {
		return ServerName{}, false
	}
	return nameIn(label), true
}

// Candidates reads a whole candidate table.
func (r *Reader) Candidates(number uint32) (Candidates, error) {
	return readCandidates(r.maps.Tables, number)
}

// Row reads the candidates of a bucket from a candidate table.
func (r *Reader) Row(number, bucket uint32, candidates uint8) (slots []uint32, err error) {
	return readRow(r.maps.Tables, number, bucket, candidates)
}

// Port is an interface that packets leave by, as a next hop names it.
func (r *Reader) Port(number uint16) Port { return r.Directory.Ports[number] }

// ServerCounter returns what went to the server of a slot, all CPUs together.
func (r *Reader) ServerCounter(slot uint32) (ServerCounter, error) {
	return readServerCounter(r.maps.ServerCounters, slot)
}

// ServerSignals returns what the server of a slot said of flows, all CPUs together.
func (r *Reader) ServerSignals(slot uint32) (SignalCounter, error) {
	return readServerSignals(r.maps.ServerSignals, slot)
}
