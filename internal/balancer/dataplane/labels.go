// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// ServerName names a server and its service.
type ServerName struct{ Service, Server string }

// readServerNames reads the names of servers, by slot.
func readServerNames(labels *ebpf.Map) (map[uint32]ServerName, error) {
	bySlot, err := readLabels(labels)
	if err != nil {
		return nil, fmt.Errorf("read the labels of servers: %w", err)
	}
	names := map[uint32]ServerName{}
	for slot, label := range bySlot {
		names[slot] = nameIn(label)
	}
	return names, nil
}

// nameIn returns the name in the label of a slot.
func nameIn(label balancerLabel) ServerName {
	return ServerName{text(label.Service[:]), text(label.Server[:])}
}

// readServiceNames reads the names of services, by number.
func readServiceNames(labels *ebpf.Map) (map[uint32]string, error) {
	byNumber, err := readLabels(labels)
	if err != nil {
		return nil, fmt.Errorf("read the labels of services: %w", err)
	}
	names := map[uint32]string{}
	for id, label := range byNumber {
		names[id] = text(label.Service[:])
	}
	return names, nil
}

// ServiceNames reads the names of services, by number. ServiceNames returns an error if the labels
// cannot be read.
func (p *Plane) ServiceNames() (map[uint32]string, error) {
	return readServiceNames(p.Objects.ServiceLabels)
}

// LabelService stores the name of the service that has a number. LabelService returns an error if
// the label cannot be written.
func (p *Plane) LabelService(id uint32, name string) error {
	var label balancerLabel
	copy(label.Service[:], name)
	if err := p.Objects.ServiceLabels.Put(id, &label); err != nil {
		return fmt.Errorf("label service %d: %w", id, err)
	}
	return nil
}

// UnlabelService frees the number of a service. It returns no error if no service has the number.
func (p *Plane) UnlabelService(id uint32) error {
	err := p.Objects.ServiceLabels.Delete(id)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove the label of service %d: %w", id, err)
	}
	return nil
}

// readLabels reads all labels, by number. If a label is deleted during the iteration, the kernel
// begins again, so that the iterator can return a label twice.
func readLabels(m *ebpf.Map) (map[uint32]balancerLabel, error) {
	labels := map[uint32]balancerLabel{}
	var number uint32
	var label balancerLabel
	entries := m.Iterate()
	for entries.Next(&number, &label) {
		labels[number] = label
	}
	return labels, entries.Err()
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
