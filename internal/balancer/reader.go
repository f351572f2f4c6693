// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
)

// reader has the tables of an instance open, whether its process runs or not, and writes none. Traffic and
// reloads go on meanwhile: what is read is true of each table, not of all at one moment.
type reader struct {
	instance string
	maps     kernelMaps
	identity balancerIdentity
	reasons  []string // the names of reasons, by number
	mapped   *directory
	servers  *serverTable
	services *serviceTable
	flows    *flowTable
	halfOpen *flowTable // the half-open ones
	clock    *flowClock
	counting *sync.Mutex // while counters move from one table to another
}

// openReader opens the tables of an instance. Those of a build with another layout are refused.
func openReader(instance string) (*reader, error) {
	return newReader(instance, new(sync.Mutex), func(name string, spec *ebpf.MapSpec) (*ebpf.Map, error) {
		return datapath.OpenTable(filepath.Join(datapath.Dir(instance), name), spec)
	})
}

// reader reads the data path's own tables. Not all of them are pinned before it is attached.
func (k *kernel) reader() (*reader, error) {
	tables := k.objects.kernelMaps.pinned()
	return newReader(k.instance, &k.counting, func(name string, _ *ebpf.MapSpec) (*ebpf.Map, error) {
		return (*tables[name]).Clone()
	})
}

// newReader makes a reader of tables that it opens.
func newReader(instance string, counting *sync.Mutex, open func(name string, spec *ebpf.MapSpec) (*ebpf.Map, error)) (_ *reader, err error) {
	r := &reader{instance: instance, counting: counting}
	defer func() {
		if err != nil {
			_ = r.close()
			err = fmt.Errorf("instance %s: %w", instance, err)
		}
	}()
	spec, reasons, err := loadSpec()
	if err != nil {
		return nil, err
	}
	r.reasons = reasons
	for name, m := range r.maps.pinned() {
		if *m, err = open(name, spec.Maps[name]); err != nil {
			return nil, fmt.Errorf("table %s: %w", name, err)
		}
	}
	if err := readIdentity(r.maps.Identity, &r.identity); err != nil {
		return nil, err
	}
	if r.mapped, err = mapDirectory(r.maps.Directory, unix.PROT_READ); err != nil {
		return nil, err
	}
	r.servers, r.services = r.maps.serverTable(r.mapped), &serviceTable{directory: r.mapped, keys: &r.identity.ServiceKeys}
	if r.flows, err = mapFlows(r.maps.Flows, unix.PROT_READ); err != nil {
		return nil, err
	}
	if r.halfOpen, err = mapFlows(r.maps.HalfOpen, unix.PROT_READ); err != nil {
		return nil, err
	}
	r.clock, err = loadFlowClock(spec)
	return r, err
}

// close closes the tables.
func (r *reader) close() error {
	var errs []error
	if r.flows != nil {
		errs = append(errs, r.flows.close())
	}
	if r.halfOpen != nil {
		errs = append(errs, r.halfOpen.close())
	}
	if r.mapped != nil {
		errs = append(errs, r.mapped.close())
	}
	if r.clock != nil {
		errs = append(errs, r.clock.close())
	}
	return errors.Join(append(errs, r.maps.Close())...)
}

// capacity is how many flows the flow table is made for.
func (r *reader) capacity() uint64 { return uint64(r.maps.Flows.MaxEntries()) * flowLoad }

// serviceNames reads the names of services, by their numbers.
func (r *reader) serviceNames() (map[uint32]string, error) {
	return readServiceNames(r.maps.ServiceLabels)
}

// serverNames reads whose the slots are.
func (r *reader) serverNames() (map[uint32]serverName, error) {
	return readServerNames(r.maps.ServerLabels)
}

// serverName reads whose a slot is; false: nobody's.
func (r *reader) serverName(slot uint32) (serverName, bool) {
	var label balancerLabel
	if err := r.maps.ServerLabels.Lookup(slot, &label); err != nil {
		return serverName{}, false
	}
	return nameIn(label), true
}

// candidates reads a whole candidate table.
func (r *reader) candidates(number uint32) (candidateTable, error) {
	return readCandidates(r.maps.Tables, number)
}

// row reads the candidates of a bucket from a candidate table.
func (r *reader) row(number, bucket uint32, candidates uint8) (slots []uint32, err error) {
	return readRow(r.maps.Tables, number, bucket, candidates)
}

// port is an interface that packets leave by, as a next hop names it.
func (r *reader) port(number uint16) balancerPort { return r.mapped.Ports[number] }

// serverCounter returns what went to the server of a slot, all CPUs together.
func (r *reader) serverCounter(slot uint32) (balancerServerCounter, error) {
	return readServerCounter(r.maps.ServerCounters, slot)
}

// serverSignals returns what the server of a slot said of flows, all CPUs together.
func (r *reader) serverSignals(slot uint32) (balancerSignalCounter, error) {
	return readServerSignals(r.maps.ServerSignals, slot)
}
