// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
)

// SourcePrefixes are the source prefixes of services, as keys of the table of
// bpf/balancer/tables/sources.h.
type SourcePrefixes map[balancerSourcePrefix]uint32

const (
	// serviceBitsOfSource is the length of the service's number in a key.
	serviceBitsOfSource = 32
	// sourceIPv4 is added to the number for prefixes of IPv4: SOURCE_IPV4 in
	// bpf/balancer/tables/sources.h.
	sourceIPv4 = 1 << 31
)

// Add adds the prefixes of a service.
func (s SourcePrefixes) Add(service uint32, prefixes []netip.Prefix) {
	for _, prefix := range prefixes {
		bits, number := prefix.Bits(), service
		if prefix.Addr().Is4() {
			bits += 96 // as IPv4-mapped addresses
			number |= sourceIPv4
		}
		key := balancerSourcePrefix{
			Length: serviceBitsOfSource + uint32(bits), Service: number, Address: in6(prefix.Addr()),
		}
		s[key] = 1
	}
}

// AllowSources adds source prefixes to the table. It returns an error if the kernel has no memory
// for them.
func (p *Plane) AllowSources(wanted SourcePrefixes) error {
	for key := range wanted {
		if err := p.Objects.SourcePrefixes.Put(key, uint32(1)); err != nil {
			return fmt.Errorf("allow a source prefix: %w", err)
		}
	}
	return nil
}

// KeepSources removes all source prefixes from the table that are not wanted. During a takeover, it
// leaves that to the commit, because an undo needs the others. KeepSources returns an error if the
// table cannot be changed.
func (p *Plane) KeepSources(wanted SourcePrefixes) error {
	if p.backup != nil {
		p.backup.wantedSources = wanted
		return nil
	}
	return datapath.Keep(p.Objects.SourcePrefixes, wanted)
}

// readSources reads the table of source prefixes.
func readSources(m *ebpf.Map) (SourcePrefixes, error) {
	all := SourcePrefixes{}
	var key balancerSourcePrefix
	var value uint32
	entries := m.Iterate()
	for entries.Next(&key, &value) {
		all[key] = value
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read the source prefixes: %w", err)
	}
	return all, nil
}

// Sources reads the source prefixes, by the number of the service. It returns an error if the table
// cannot be read.
func (r *Reader) Sources() (map[uint32][]netip.Prefix, error) {
	keys, err := readSources(r.maps.SourcePrefixes)
	if err != nil {
		return nil, err
	}
	all := map[uint32][]netip.Prefix{}
	for key := range keys {
		address, bits := addrOf(key.Address), int(key.Length)-serviceBitsOfSource
		if key.Service&sourceIPv4 != 0 {
			bits -= 96
		}
		number := key.Service &^ sourceIPv4
		all[number] = append(all[number], netip.PrefixFrom(address, bits))
	}
	for _, prefixes := range all {
		slices.SortFunc(prefixes, netip.Prefix.Compare)
	}
	return all, nil
}
