// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"maps"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
)

// quicServers returns the slots of a service's servers, by the beginnings of the connection IDs
// that name them. It returns none for services of another persistence.
func (svc *service) quicServers() (map[dataplane.QUICPrefix]uint32, error) {
	if svc.Persistence != desired.PersistenceQUIC {
		return nil, nil
	}
	slots := map[dataplane.QUICPrefix]uint32{}
	for _, m := range svc.members {
		prefix, err := dataplane.QUICPrefixOf(svc.id, svc.QUIC, &m.Server)
		if err != nil {
			return nil, err
		}
		slots[prefix] = m.slot
	}
	return slots, nil
}

// addQUICServers makes connection IDs lead to the servers of a service. The IDs from before a
// change stay until keepQUICServers.
func (s *services) addQUICServers(svc *service) error {
	slots, err := svc.quicServers()
	if err != nil || slots == nil {
		return err
	}
	return s.plane.AddQUICServers(svc.id, svc.QUIC, slots)
}

// keepQUICServers removes the connection IDs that name no server of the configuration any more.
func (s *services) keepQUICServers() error {
	all := map[dataplane.QUICPrefix]uint32{}
	for _, svc := range s.byName {
		slots, err := svc.quicServers()
		if err != nil {
			return err
		}
		maps.Copy(all, slots)
	}
	return s.plane.KeepQUICServers(all)
}
