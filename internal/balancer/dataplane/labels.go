// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// ServerName is a server with its service.
type ServerName struct{ Service, Server string }

// readServerNames reads whose the slots are.
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

// nameIn is the name that a label of a slot has.
func nameIn(label balancerLabel) ServerName {
	return ServerName{text(label.Service[:]), text(label.Server[:])}
}

// readServiceNames reads the names of services, by their numbers.
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

// ServiceNames reads the names of services, by their numbers.
func (p *Plane) ServiceNames() (map[uint32]string, error) {
	return readServiceNames(p.Objects.ServiceLabels)
}

// LabelService notes which service has a number.
func (p *Plane) LabelService(id uint32, name string) error {
	var label balancerLabel
	copy(label.Service[:], name)
	if err := p.Objects.ServiceLabels.Put(id, &label); err != nil {
		return fmt.Errorf("label service %d: %w", id, err)
	}
	return nil
}

// UnlabelService frees the number of a service. A number that no service has is no error.
func (p *Plane) UnlabelService(id uint32) error {
	err := p.Objects.ServiceLabels.Delete(id)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove the label of service %d: %w", id, err)
	}
	return nil
}

// readLabels reads all labels, by number. A label that is deleted meanwhile makes the kernel
// begin again, so that the iterator can return others twice.
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

// text is a zero-terminated name.
func text(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}
