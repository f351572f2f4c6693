// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"maps"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
)

// quicServers returns the slots of a service's servers, by the beginnings of the connection IDs
// that name them. It returns none for a service with another persistence than quic.
func (svc *service) quicServers() (map[dataplane.QUICPrefix]uint32, error) {
	if !svc.Persistence.Method().HasIDs {
		return nil, nil
	}
	slots := map[dataplane.QUICPrefix]uint32{}
	add := func(form *desired.QUIC, serverID []byte, m *member) error {
		prefix, err := dataplane.QUICPrefixOf(svc.id, form, serverID)
		if err != nil {
			return fmt.Errorf("server %s: %w", m.Name, err)
		}
		slots[prefix] = m.slot
		return nil
	}
	for _, m := range svc.members {
		err := add(svc.QUIC, m.QUICServerID(), m)
		if err == nil && svc.FormerQUIC != nil {
			err = add(svc.FormerQUIC, m.FormerQUICServerID(), m)
		}
		if err != nil {
			return nil, err
		}
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
	return s.plane.AddQUICServers(svc.id, svc.Service, slots)
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
