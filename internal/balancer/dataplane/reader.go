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

// Reader reads the tables of an instance, whether its process runs or not. Packets and reloads can
// change the tables meanwhile. So the results for different tables can be from different moments.
type Reader struct {
	Instance string
	Identity Identity
	Reasons  []string // the names of the reasons, by number
	Services *ServiceTable
	Servers  *ServerTable
	// FlowCounts are the flows at the last sweep. A Reader does not read the flow tables
	// themselves, because they can have gigabytes.
	FlowCounts *FlowCountTable
	Clock      *FlowClock // the clock of the flow tables
	Loads      *LoadTable
	Estimates  *EstimateTable

	maps      Maps
	directory *Directory
	counting  *sync.Mutex // held while counters are moved from one table to another
	copier    tableCopier
}

// OpenReader opens the pinned tables of an instance. If the tables have the layout of another
// build, the error is ebpf.ErrMapIncompatible.
func OpenReader(instance string) (*Reader, error) {
	return newReader(instance, new(sync.Mutex), func(name string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
		return datapath.OpenTable(filepath.Join(datapath.Dir(instance), name), spec)
	})
}

// Reader returns a reader of this process's tables, which need not be pinned yet. Reader returns an
// error if a table cannot be opened again.
func (p *Plane) Reader() (*Reader, error) {
	tables := p.Objects.Maps.Pinned()
	return newReader(p.Loader.Instance, &p.counting, func(name string, _ *ebpf.MapSpec) (*ebpf.Map, error) {
		return (*tables[name]).Clone()
	})
}

// newReader returns a reader of the tables that open returns.
func newReader(
	instance string, counting *sync.Mutex, open func(name string, spec *ebpf.MapSpec) (*ebpf.Map, error),
) (_ *Reader, err error) {
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
	openTable := func(name string, m **ebpf.Map) (err error) {
		if *m, err = open(name, spec.Maps[name]); err != nil {
			return fmt.Errorf("table %s: %w", name, err)
		}
		return nil
	}
	// The identity comes first, because it tells whether another build made the other tables.
	if err := openTable(balancerMapIdentity, &r.maps.Identity); err != nil {
		return nil, err
	}
	if err := readIdentity(r.maps.Identity, &r.Identity); err != nil {
		return nil, err
	}
	for name, m := range r.maps.Pinned() {
		if name == balancerMapIdentity {
			continue
		}
		if err := openTable(name, m); err != nil {
			return nil, err
		}
	}
	if r.directory, err = MapDirectory(r.maps.Directory, unix.PROT_READ); err != nil {
		return nil, err
	}
	r.Servers = r.maps.serverTable(r.directory)
	r.Services = &ServiceTable{directory: r.directory, keys: &r.Identity.ServiceKeys}
	if r.FlowCounts, err = mapFlowCounts(r.maps.FlowCounts, unix.PROT_READ); err != nil {
		return nil, err
	}
	if r.Loads, err = mapLoads(&r.maps, unix.PROT_READ); err != nil {
		return nil, err
	}
	r.Estimates = &EstimateTable{estimates: r.maps.Estimates}
	r.Clock, err = loadFlowClock(spec)
	return r, err
}

// Close closes the tables.
func (r *Reader) Close() error {
	var errs []error
	if r.FlowCounts != nil {
		errs = append(errs, r.FlowCounts.close())
	}
	if r.Loads != nil {
		errs = append(errs, r.Loads.close())
	}
	if r.directory != nil {
		errs = append(errs, r.directory.Close())
	}
	if r.Clock != nil {
		errs = append(errs, r.Clock.close())
	}
	return errors.Join(append(errs, r.copier.close(), r.maps.Close())...)
}

// Capacity returns the number of flows for which the flow table is made.
func (r *Reader) Capacity() uint64 { return uint64(r.maps.Flows.MaxEntries()) * FlowLoad }

// HasHints tells whether there is a hint table.
func (r *Reader) HasHints() bool { return r.maps.Hints.MaxEntries() > 1 }

// Hints counts the hints. Hints returns an error if the table cannot be mapped.
func (r *Reader) Hints() (HintCounts, error) {
	table, err := mapHints(r.maps.Hints)
	if err != nil {
		return HintCounts{}, err
	}
	return table.Count(), table.close()
}

// ServiceLabels reads the labels of services, by number. ServiceLabels returns an error if the
// labels cannot be read.
func (r *Reader) ServiceLabels() (map[uint32]ServiceLabel, error) {
	return readServiceLabels(r.maps.ServiceLabels)
}

// ServerNames reads the names of all servers, by slot. ServerNames returns an error if the labels
// cannot be read.
func (r *Reader) ServerNames() (map[uint32]ServerName, error) {
	return readServerNames(r.maps.ServerLabels)
}

// ServerNamesOf reads the names of a service's servers, by slot. It skips the labels of most other
// servers, so it is faster than ServerNames. ServerNamesOf returns an error if a label cannot be
// read.
func (r *Reader) ServerNamesOf(service string, number uint32) (map[uint32]ServerName, error) {
	names := map[uint32]ServerName{}
	for slot := range uint32(len(r.Servers.servers)) {
		if !r.Servers.mayBeOf(slot, number) {
			continue
		}
		var label balancerServerLabel
		err := r.maps.ServerLabels.Lookup(slot, &label)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read the label of slot %d: %w", slot, err)
		}
		if name := nameIn(&label); name.Service == service {
			names[slot] = name
		}
	}
	return names, nil
}

// ServerName reads the name of the slot's server. It returns false if the slot has none.
func (r *Reader) ServerName(slot uint32) (ServerName, bool) {
	var label balancerServerLabel
	if err := r.maps.ServerLabels.Lookup(slot, &label); err != nil {
		return ServerName{}, false
	}
	return nameIn(&label), true
}

// Candidates reads the candidate table with this number. Candidates returns an error if there is
// no such table.
func (r *Reader) Candidates(number uint32) (Candidates, error) {
	return readCandidates(datapath.Dir(r.Instance), r.maps.Tables, number, &r.copier)
}

// Port returns the interface that has the number of a port, from 0 to 255.
func (r *Reader) Port(number uint16) Port { return r.directory.Ports[number] }

// ServerCounter returns the counters of packets to the slot's server, summed over all CPUs.
// ServerCounter returns an error if the table has no such slot.
func (r *Reader) ServerCounter(slot uint32) (ServerCounter, error) {
	return readServerCounter(r.maps.ServerCounters, slot)
}

// ServerSignals returns the counters of signals from the slot's server, summed over all CPUs.
// ServerSignals returns an error if the table has no such slot.
func (r *Reader) ServerSignals(slot uint32) (SignalCounter, error) {
	return readServerSignals(r.maps.ServerSignals, slot)
}
