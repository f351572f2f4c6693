// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// ServerName names a server and its service.
type ServerName struct{ Service, Server string }

func readServerNames(labels *ebpf.Map) (map[uint32]ServerName, error) {
	names := map[uint32]ServerName{}
	err := eachLabel(labels, func(slot uint32, label *balancerServerLabel) { names[slot] = nameIn(label) })
	if err != nil {
		return nil, fmt.Errorf("read the labels of servers: %w", err)
	}
	return names, nil
}

func nameIn(label *balancerServerLabel) ServerName {
	return ServerName{text(label.Service[:]), text(label.Server[:])}
}

// ServiceLabel is what the kernel stores of a service for readers.
type ServiceLabel struct {
	Name string
	// Generation is the number of the present generation of the service's servers, and Digest that
	// of the generation's sets (package serversets).
	Generation uint64
	Digest     uint32
	// Estimator is how the service infers (desired.Service.EstimatorName), or nothing.
	Estimator string
}

// readServiceLabels reads the labels of services, by number.
func readServiceLabels(labels *ebpf.Map) (map[uint32]ServiceLabel, error) {
	all := map[uint32]ServiceLabel{}
	err := eachLabel(labels, func(id uint32, label *balancerServiceLabel) {
		all[id] = ServiceLabel{
			text(label.Service[:]), label.Generation, label.Digest,
			nameOf(estimators, balancerEstimator(label.Estimator)),
		}
	})
	if err != nil {
		return nil, fmt.Errorf("read the labels of services: %w", err)
	}
	return all, nil
}

// ServiceLabels reads the labels of services, by number. ServiceLabels returns an error if the
// labels cannot be read.
func (p *Plane) ServiceLabels() (map[uint32]ServiceLabel, error) {
	return readServiceLabels(p.Objects.ServiceLabels)
}

// LabelService stores the label of the service with this number. LabelService returns an error if
// the label cannot be written.
func (p *Plane) LabelService(id uint32, label ServiceLabel) error {
	stored := balancerServiceLabel{
		Generation: label.Generation, Digest: label.Digest,
		Estimator: uint32(estimators[label.Estimator]),
	}
	copy(stored.Service[:], label.Name)
	if err := p.Objects.ServiceLabels.Put(id, &stored); err != nil {
		return fmt.Errorf("label service %d: %w", id, err)
	}
	return nil
}

// UnlabelService removes the label of the service with this number, so that the number is free. If
// no service has the number, UnlabelService returns nil.
func (p *Plane) UnlabelService(id uint32) error {
	err := p.Objects.ServiceLabels.Delete(id)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove the label of service %d: %w", id, err)
	}
	return nil
}

// labelsPerRead is how many labels one system call reads. The kernel reads whole buckets of its
// hash table, which have far fewer.
const labelsPerRead = 1024

// readLabels reads all labels, by number.
func readLabels[Label balancerServerLabel | balancerServiceLabel](m *ebpf.Map) (map[uint32]Label, error) {
	labels := map[uint32]Label{}
	return labels, eachLabel(m, func(number uint32, label *Label) { labels[number] = *label })
}

// eachLabel calls a function with all labels and their numbers.
func eachLabel[Label balancerServerLabel | balancerServiceLabel](
	m *ebpf.Map, do func(uint32, *Label),
) error {
	numbers, read := make([]uint32, labelsPerRead), make([]Label, labelsPerRead)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, numbers, read, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
		for i := range n {
			do(numbers[i], &read[i])
		}
		if err != nil {
			return nil // ErrKeyNotExist: the labels just read were the last ones
		}
	}
}

// text returns a zero-terminated name as a string.
func text(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}
