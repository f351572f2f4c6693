// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"

	"github.com/segue-lb/segue/internal/config"
)

// placement is what the data path calls one.
type placement struct {
	config.Placement
	config.Selection
}

func placementOf(svc *config.Service) placement { return placement{svc.Placement, svc.Selection} }

var placements = map[placement]balancerPlacement{
	{config.PlacementHash, ""}:                      balancerPlacementPLACEMENT_HASH,
	{config.PlacementHunt, config.SelectConsistent}: balancerPlacementPLACEMENT_HUNT,
	{config.PlacementHunt, config.SelectRandom}:     balancerPlacementPLACEMENT_HUNT_RANDOM,
}

var persistences = map[config.Persistence]balancerPersistence{
	config.PersistenceTable: balancerPersistencePERSISTENCE_TABLE,
}

var encapsulations = map[config.Encapsulation]balancerEncapsulation{
	config.SRv6Insert: balancerEncapsulationENCAP_SRV6INSERT,
	config.SRv6Encap:  balancerEncapsulationENCAP_SRV6ENCAP,
	config.GRE:        balancerEncapsulationENCAP_GRE,
	config.IPIP:       balancerEncapsulationENCAP_IPIP,
}

// placementNamed is the placement that the data path has a number for.
func placementNamed(number balancerPlacement) placement {
	for name, n := range placements {
		if n == number {
			return name
		}
	}
	return placement{Placement: config.Placement(fmt.Sprint(number))}
}

// nameOf is what a configuration file calls a value of the data path.
func nameOf[N ~string, V comparable](values map[N]V, value V) N {
	for name, v := range values {
		if v == value {
			return name
		}
	}
	return N(fmt.Sprint(value))
}
